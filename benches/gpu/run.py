"""Everything that needs a GPU, in one call: correctness on every fixture, then speed, then a table.

    python3 benches/gpu/run.py [--device cuda:0] [--out FOLDER] [--shapes NAME,...]

Needs an importable `kie` and a GPU; exits 1 if a fixture is off, 2 where there is no GPU. Speed is
measured on random weights (kie.bench.random_weights); a row is the median of five requests of 256
tokens, one after another, or of five times eight at once (x8), while all eight decode.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kie
import numpy as np
from kie.bench import latency, random_weights
from kie.bench.measure import fresh, pool

ROOT = Path(__file__).resolve().parents[2]
GATE = {"decode": 2e-3, "prefill": 1.5e-2}
KNOWN = {"own_laneformer_mixed": 2.6e-3}
"""Beyond the gate on the decode path, with the bound that holds instead (tests/monokernel.rs)."""
STREAM_BYTES_PER_US = 4.55e6
"""What one H200 streams (bytes a microsecond): the floor of a step is its bytes over this."""
TARGET_US = {
    "laneformer-2b": 1085,
    "laneformer-2b-lane": 180,
    "llama-3.2-1b": 610,
    "llama-3.1-8b": 3650,
}
BATCH = 8
BATCH_TARGET = 1.15
"""A step of BATCH requests over a step of one, both at context 128."""


def tensors(path: Path) -> tuple[dict[str, np.ndarray], set[str]]:
    """The arrays of a safetensors file that numpy knows, and all storage formats in it."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    known = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U32": np.uint32}
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] in known:
            data = raw[8 + size + begin : 8 + size + end]
            found[name] = np.frombuffer(data, known[entry["dtype"]]).reshape(entry["shape"])
    return found, {entry["dtype"] for entry in header.values()}


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 over a prompt."""
    wide = want.astype(np.float64)
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))


def check(folder: Path, device: str) -> dict[str, Any]:
    """One fixture: both paths' logits and the greedy ids, against what is recorded."""
    golden, _ = tensors(folder / "golden.safetensors")
    _, stored = tensors(folder / "model.safetensors")
    prefix = "bf16w." if stored == {"F32"} else ""
    worst = {"decode": 0.0, "prefill": 0.0}
    greedy = True
    with kie.Engine(folder, device=device) as engine:
        for name in sorted(n for n in golden if n.startswith("prompt_") and n.endswith(".ids")):
            prompt = name.removesuffix(".ids")
            ids = golden[name].tolist()
            if f"{prefix}{prompt}.logits" not in golden:
                continue
            for path in worst:
                got = engine.logits(ids, path=path)
                worst[path] = max(worst[path], distance(got, golden[f"{prefix}{prompt}.logits"]))
            want = golden[f"{prefix}{prompt}.gen_ids"].tolist()
            done = engine.generate(ids, temperature=0, max_tokens=len(want), ignore_eos=True)
            greedy &= list(done.token_ids) == want
    gate = GATE | ({"decode": KNOWN[folder.name]} if folder.name in KNOWN else {})
    good = greedy and all(worst[path] <= gate[path] for path in worst)
    return {"fixture": folder.name, **worst, "greedy": greedy, "good": good}


def weights_bytes(folder: Path) -> int:
    """Bytes that a token reads: every tensor but the embedding table."""
    config = json.loads((folder / "config.json").read_text())
    total = 0
    for name, shape in random_weights.tensors(config):
        if "embed" not in name:
            total += 2 * int(np.prod(shape))
    return total


def batch(engine: kie.Engine, tokens: int, runs: int) -> list[float]:
    """Gaps between tokens of BATCH greedy requests, while all of them run, in microseconds."""
    ids, source = pool(engine), random.Random(BATCH)
    gaps: list[float] = []
    for turn in range(1 + runs):
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(
                    engine.stream(
                        fresh(ids, tokens, source),
                        temperature=0,
                        max_tokens=256,
                        ignore_eos=True,
                    )
                )
                for _ in range(BATCH)
            ]
            moments = [[token.t_ns for token in stream] for stream in streams]
        begin, end = max(m[0] for m in moments), min(m[-1] for m in moments)
        if turn > 0:
            for m in moments:
                inside = [at for at in m if begin <= at <= end]
                gaps += [(b - a) / 1e3 for a, b in itertools.pairwise(inside)]
    return sorted(gaps)


def measure(shape: str, device: str, prompts: list[int], runs: int) -> list[dict[str, Any]]:
    """Rows of one shape: decode at each context, time to first token."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    rows = []
    with tempfile.TemporaryDirectory(prefix="kie-", dir=memory) as name:
        folder = random_weights.write(shape, Path(name))
        floor = weights_bytes(folder) / STREAM_BYTES_PER_US
        begin = time.monotonic()
        with kie.Engine(folder, device=device, max_seq_len=max(prompts) + 512) as engine:
            opened = time.monotonic() - begin
            for tokens in prompts:
                found = latency.measure(
                    engine,
                    prompt_tokens=[tokens],
                    max_tokens=256,
                    runs=runs,
                    warmups=1,
                    seed=tokens,
                )
                gaps = sorted(gap for run in found for gap in run.gaps_us)
                row = {
                    "shape": shape,
                    "context": tokens,
                    "floor_us": round(floor, 1),
                    "target_us": TARGET_US[shape] if tokens == 128 else None,
                    "itl_us": statistics.median(gaps),
                    "p99_us": gaps[len(gaps) * 99 // 100],
                    "max_us": gaps[-1],
                    "ttft_ms": statistics.median(run.ttft_ms for run in found),
                    "open_s": round(opened, 2),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
            gaps = batch(engine, 128, runs)
            row = {
                "shape": f"{shape} x{BATCH}",
                "context": 128,
                "floor_us": round(floor, 1),
                "target_us": round(BATCH_TARGET * TARGET_US[shape]),
                "itl_us": statistics.median(gaps),
                "p99_us": gaps[len(gaps) * 99 // 100],
                "max_us": gaps[-1],
                "ttft_ms": 0.0,
                "open_s": round(opened, 2),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default=",".join(random_weights.SPECS))
    parser.add_argument("--prompts", default="128")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fixtures", default="all", help="all, none, or names")
    given = parser.parse_args()
    try:
        kie.Engine(device=given.device, max_seq_len=256).close()
    except kie.DeviceError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        return 2
    checked = []
    if given.fixtures != "none":
        for golden in sorted((ROOT / "tests" / "data").glob("*/golden.safetensors")):
            if given.fixtures == "all" or golden.parent.name in given.fixtures.split(","):
                checked.append(check(golden.parent, given.device))
                print(json.dumps(checked[-1]), flush=True)
    rows: list[dict[str, Any]] = []
    for shape in filter(None, given.shapes.split(",")):
        prompts = [int(n) for n in given.prompts.split(",")]
        rows += measure(shape, given.device, prompts, given.runs)
    if given.out:
        given.out.write_text(json.dumps({"fixtures": checked, "rows": rows}, indent=1))
    print(f"\n{'fixture':40} decode   prefill  greedy")
    for c in checked:
        print(f"{c['fixture']:40} {c['decode']:.2e} {c['prefill']:.2e} {c['greedy']}")
    print(f"\n{'shape':22} context  floor us  target us   itl us   p99 us  ttft ms")
    for r in rows:
        print(
            f"{r['shape']:22} {r['context']:7} {r['floor_us']:9.1f} {r['target_us'] or '':>10}"
            f" {r['itl_us']:8.1f} {r['p99_us']:8.1f} {r['ttft_ms']:8.2f}"
        )
    return 0 if all(c["good"] for c in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
