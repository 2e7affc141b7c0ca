"""Everything that needs a GPU, in one call: correctness on every fixture, then speed, then checks
of everything else (checks.py), then tables.

    python3 benches/gpu/run.py [--device cuda:0] [--out FILE] [--shapes NAME,...] [--checks ...]
        [--exact]

Needs an importable `kie` and a GPU; exits 1 if a fixture is off, 2 where there is no GPU. Speed is
measured on random weights (kie.bench.random_weights), by requests of 256 tokens one after another
(40 at a short prompt, 5 at a long one), or by eight at once, while all eight decode: speed.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checks
import kie
import numpy as np
import speed
import targets
from kie import machine
from kie.bench import inside

ROOT = Path(__file__).resolve().parents[2]
GATE = {"decode": 2e-3, "prefill": 1.5e-2}
EXACT_GATE = {"decode": 1e-5, "prefill": 1e-5}
KNOWN: dict[str, dict[str, float]] = json.loads((ROOT / "tests/data/bounds.json").read_text())
"""Beyond the gate on the decode path, and the bounds that hold instead: on one GPU and on several,
or `flips`, where a choice of experts may fall the other way (tests/data/README.md). None is with
two halves a number."""
ECHO_US = (4.0, 50.0)
"""Targets of the host's answer to a token: median, p99."""
CHECKS = ("echo", "steady", "prompts", "idle", "neighbours")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
"""Slow, and only where the CUDA toolkit is: run when named."""
FULL = ("gpt-oss-120b-few", "llama-3.1-8b-few")
"""Shapes of full width that the check `reference` compares with the CPU: tens of gigabytes of host
memory, so it is run when named."""
NAMED = (*SANITIZERS, "reference")
KEPT = {
    "itl_us": "us_per_token",
    "p99_us": "us_p99",
    "max_us": "us_max",
    "stream_only": "us_stream_only",
    "exchange_only": "us_exchange_only",
    "alone": "us_alone",
    "ttft_ms": "ttft_ms",
    "open_s": "open_s",
    "floor_us": "floor_us",
}
"""Of a row, what baselines have under which name."""
WEIGHTS = {
    "-fp8": "FP8 random, blocks of 128 x 128",
    "gpt-oss-120b": "16-bit random, experts MXFP4",
    "-fp8-all": "FP8 random, blocks of 128 x 128, the head, too",
    "-int4-all": "INT4 random, groups of 32, the head, too",
    "-mxfp4-all": "MXFP4 random, the head, too",
}
"""By the end of a shape's name."""
PROMPTS = ("llama-3.1-8b-few", "llama-3.2-1b")
"""Shapes whose long prompts several GPUs have to answer as one does."""
PROMPTS_ALONE = ("llama", "qwen3_moe", "gpt_oss_mxfp4", "own_qwen3_next")
"""Fixtures whose long prompts one GPU has to answer in the prefill kernel as in columns."""
WIDE = ("qwen3-coder-next-few-fp8",)
"""Shapes with heads as wide as no fixture's; the same of them, with the check `reference`."""
STEADY = ("llama-3.2-1b", "laneformer-2b-lane", "laneformer-2b-half")


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 over a prompt, in the columns that are recorded: all, or evenly spaced ones."""
    wide, columns = want.astype(np.float64), got[:, :: -(-got.shape[1] // want.shape[1])]
    return float(np.linalg.norm(columns - wide) / np.linalg.norm(wide))


def alike(engine: kie.Engine, ids: list[int]) -> bool:
    """Whether an answer has the same tokens and log-probabilities alone, with drafts, right and
    wrong ones, and beside others.
    """
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 3, "logprobs": 0}
    asked |= {"max_tokens": 24, "ignore_eos": True}
    alone = engine.generate(ids, **asked)
    wrong = [*alone.token_ids[:9], 4, *alone.token_ids[12:]]
    drafts = (alone.token_ids, wrong)
    answers = [engine.generate(ids, prediction=drafted, **asked) for drafted in drafts]
    streams = [engine.stream(ids, **asked) for _ in range(3)]
    answers += [stream.result() for stream in streams]
    told = (alone.token_ids, alone.logprobs)
    return all((answer.token_ids, answer.logprobs) == told for answer in answers)


def check(folder: Path, device: str, exact: bool) -> dict[str, Any]:
    """One fixture: both paths' logits and the greedy ids, against what is recorded, and the bits of
    an answer in other company.
    """
    name = folder.name + (", exact" if exact else "")
    golden, _ = checks.tensors(folder / "golden.safetensors")
    _, stored = checks.tensors(folder / "model.safetensors")
    prefix = "bf16w." if stored == {"F32"} else ""
    worst = {"decode": 0.0, "prefill": 0.0}
    greedy = True
    try:
        # What is stored in float32 is rounded as the golden of that name was.
        dtype = "bf16" if prefix else "auto"
        engine = kie.Engine(folder, device=device, dtype=dtype, exact=exact)
    except kie.UnsupportedModelError as refused:
        # Lanes and heads that so many GPUs cannot share: said, and nothing else happens.
        return {"fixture": name, "refused": refused.message, "good": "," in device}
    with engine:
        for key in sorted(n for n in golden if n.startswith("prompt_") and n.endswith(".ids")):
            prompt = key.removesuffix(".ids")
            ids = golden[key].tolist()
            if f"{prefix}{prompt}.logits" not in golden:
                continue
            for path in worst:
                got = engine.logits(ids, path=path)
                worst[path] = max(worst[path], distance(got, golden[f"{prefix}{prompt}.logits"]))
            want = golden[f"{prefix}{prompt}.gen_ids"].tolist()
            done = engine.generate(ids, temperature=0, max_tokens=len(want), ignore_eos=True)
            greedy &= list(done.token_ids) == want
        # Of two halves a number kernels have one row.
        same = exact or alike(engine, golden["prompt_0.ids"].tolist())
    gate = EXACT_GATE if exact else GATE
    if not exact and folder.name in KNOWN:
        known = KNOWN[folder.name]
        of_machines = known["several" if "," in device else "one"]
        gate = gate | {"decode": known.get("flips", of_machines)}
    good = greedy and same and all(worst[path] <= gate[path] for path in worst)
    beyond = worst["decode"] > GATE["decode"]
    return {
        "fixture": name,
        **worst,
        "greedy": greedy,
        "alike": same,
        "good": good,
        "beyond": beyond,
    }


def check_all(device: str, chosen: set[str]) -> Iterator[dict[str, Any]]:
    """The checks that were asked for, one row each."""
    data = ROOT / "tests" / "data"
    for shape in PROMPTS if "prompts" in chosen and "," in device else ():
        with speed.shaped(shape) as folder:
            yield from checks.prompts(
                shape, folder, device, lengths=(700, 2037), runs=20, gate=GATE["prefill"]
            )
    for name in PROMPTS_ALONE if "prompts" in chosen and "," not in device else ():
        yield from checks.prompts(
            name, data / name, device, lengths=(90, 190), runs=3, gate=GATE["prefill"]
        )
    for shape in FULL if "reference" in chosen else ():
        with speed.shaped(shape) as folder:
            gates = (EXACT_GATE["decode"], GATE["decode"])
            yield checks.reference(shape, folder, device, gates)
    for shape in WIDE if "reference" in chosen and "," not in device else ():
        with speed.shaped(shape) as folder:
            yield from checks.prompts(
                shape, folder, device, lengths=(90, 190), runs=3, gate=GATE["prefill"]
            )
    if "echo" in chosen:
        times = {f"{k}_us": round(v, 2) for k, v in inside.echo(device).items()}
        good = times["p50_us"] <= ECHO_US[0] and times["p99_us"] <= ECHO_US[1]
        yield {"check": "echo", **times, "good": good}
    if "idle" in chosen:
        yield checks.idle(device)
    if "neighbours" in chosen:
        yield checks.two_engines((data / "llama", data / "laneformer_d2"), device)
        yield checks.beside_torch(data / "llama", device)
    for tool in SANITIZERS:
        for fixture in checks.SANITIZED_FIXTURES if tool in chosen else ():
            yield checks.sanitize(data / fixture, device, tool)


def weights(shape: str) -> str:
    """What a shape's weights are, as baselines say it."""
    for end, name in WEIGHTS.items():
        if shape.endswith(end):
            return name
    return "16-bit random"


def keep(path: Path, device: str, gpus: int, rows: list[dict[str, Any]]) -> None:
    """Appends the speed rows to a file of baselines."""
    about = checks.nvml(device).describe()
    with path.open("a") as file:
        for row in rows:
            figures = {name: round(row[key], 2) for key, name in KEPT.items() if key in row}
            parts = targets.split(row) or {}  # of which KEPT has the stream
            figures |= {f"us_{k}": round(v, 1) for k, v in parts.items() if k != "stream"}
            date = time.strftime("%Y-%m-%d", time.gmtime())
            name = {"batch": "decode"}.get(row["what"], row["what"])
            kept = {"bench": name, "shape": row["shape"], "gpus": gpus, "batch": row["batch"]}
            kept |= {"context": row["context"], **figures, "date": date, **about}
            kept |= {"weights": weights(row["shape"]), "what": "benches/gpu/run.py"}
            file.write(json.dumps(kept) + "\n")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    parser.add_argument(
        "--keep", type=Path, help="append the speed rows, as baselines.jsonl has them"
    )
    parser.add_argument("--shapes", help="names, or none; those of the table unless given")
    parser.add_argument("--prompts", help="lengths instead of those of the table: 128,2048")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--fixtures", default="all", help="all, none, or names")
    parser.add_argument("--exact", action="store_true", help="fixtures with exact=True, too")
    parser.add_argument(
        "--no-inside", action="store_true", help="no figures from inside the kernel"
    )
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, or none")
    given = parser.parse_args()
    given.gpus = given.device.count(",") + 1
    if given.shapes is None:
        given.shapes = ",".join(targets.shapes(given.gpus))
    given.checks = set(given.checks.split(",")) - {"none", ""}
    if unknown := given.checks - set(CHECKS + NAMED):
        parser.error(f"no checks {unknown}; there are {', '.join(CHECKS + NAMED)}")
    return given


def report(file: Path | None, found: dict[str, Any]) -> None:
    """Writes what was found, and on what, where that is asked for."""
    if file:
        about = {"kie": kie.__version__, "machine": machine.report(measure=False).to_dict()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(about | found, indent=1))
        print(f"report: {file}", file=sys.stderr)


def main() -> int:
    given = options()
    try:
        kie.Engine(device=given.device, max_seq_len=256).close()
    except kie.DeviceError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        report(given.out, {"refused": error.message})
        return 2
    checked = []
    if given.fixtures != "none":
        for golden in sorted((ROOT / "tests" / "data").glob("*/golden.safetensors")):
            if given.fixtures == "all" or golden.parent.name in given.fixtures.split(","):
                for exact in (False, True)[: 1 + given.exact]:
                    checked.append(check(golden.parent, given.device, exact))
                    print(json.dumps(checked[-1]), flush=True)
    rows: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for shape in filter(None, given.shapes.replace("none", "").split(",")):
        prompts = targets.prompts_of(shape, given.gpus)
        if given.prompts:
            prompts = [int(n) for n in given.prompts.split(",")]
        with speed.shaped(shape) as folder:
            look = not given.no_inside
            rows += speed.measure(shape, folder, given.device, prompts, given.runs, look)
            if "steady" in given.checks and shape in STEADY:
                runs = 20 if given.gpus == 1 else 100
                others.append(checks.steady(shape, folder, given.device, runs=runs, tokens=1000))
                print(checks.show(others[-1]), flush=True)
    for row in check_all(given.device, given.checks):
        others.append(row)
        print(checks.show(row), flush=True)
    report(given.out, {"fixtures": checked, "rows": rows, "checks": others})
    if given.keep:
        keep(given.keep, given.device, given.gpus, rows)
    print(f"\n{'fixture':40} decode   prefill  greedy")
    for c in checked:
        if "refused" in c:
            print(f"{c['fixture']:40} refused: {c['refused']}")
        else:
            known = f"  beyond the gate of {GATE['decode']:.0e}" if c["beyond"] else ""
            print(f"{c['fixture']:40} {c['decode']:.2e} {c['prefill']:.2e} {c['greedy']}{known}")
    print(
        f"\n{'shape':20} {'what':6} batch context  floor us   itl us   p99 us"
        "   stream  exchange     alone  ttft ms"
    )
    for r in rows:
        alone = [f"{r[kernel]:.1f}" if kernel in r else "" for kernel in inside.KERNELS[2:]]
        print(
            f"{r['shape']:20} {r['what']:6} {r['batch']:5} {r['context']:7}"
            f" {r.get('floor_us', 0):9.1f} {r['itl_us']:8.1f} {r['p99_us']:8.1f}"
            f" {alone[0]:>8} {alone[1]:>9} {alone[2]:>9}"
            f" {r.get('ttft_ms', 0):8.2f}"
        )
    print(f"\n{'a step goes to':20} context  stream     sync  others' GPUs  sampling")
    for r in rows:
        if parts := targets.split(r):
            print(
                f"{r['shape']:20} {r['context']:7} {parts['stream']:7.1f} {parts['sync']:8.1f}"
                f" {parts['collective']:13.1f} {parts['sampling']:9.1f}"
            )
    print()
    for line in targets.verdicts(rows, given.gpus):
        print(line)
    print()
    for row in others:
        print(checks.show(row))
    return 0 if all(c.get("good", True) for c in checked + others) else 1


if __name__ == "__main__":
    sys.exit(main())
