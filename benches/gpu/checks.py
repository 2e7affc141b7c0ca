"""What `run.py` checks besides logits and speed: that tokens repeat, that the GPU is free when
nobody asks, that an engine bears neighbours, and that a sanitizer finds nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import kie
import numpy as np
from kie.bench.measure import fresh, pool
from kie.bench.report import quantile

FREE_WITHIN_S = 1.0
"""The GPU's own counter covers up to a second before it is read; see `idle`."""


def steady(shape: str, folder: Path, device: str, *, runs: int, tokens: int) -> dict[str, Any]:
    """The same greedy request again and again: one hash of its tokens, and all gaps between them,
    of which none is ten times the median.

    Prompts are not shared between runs, so each is computed anew.
    """
    hashes: list[str] = []
    gaps: list[float] = []
    context = 128
    with kie.Engine(
        folder, device=device, max_seq_len=context + tokens, max_batch=1, prefix_cache=False
    ) as engine:
        prompt = fresh(pool(engine), context, random.Random(context))
        for _ in range(runs):
            ids, moments = [], []
            with engine.stream(prompt, temperature=0, max_tokens=tokens, ignore_eos=True) as stream:
                for token in stream:
                    ids.extend(token.token_ids)
                    moments.append(token.t_ns)
            assert len(ids) == tokens, f"{len(ids)} of {tokens} tokens"
            hashes.append(hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16])
            gaps += [(after - before) / 1e3 for before, after in pairwise(moments)]
    return {
        "check": "steady",
        "shape": shape,
        "runs": runs,
        "tokens": runs * tokens,
        "hash": hashes[0],
        "good": len(set(hashes)) == 1 and max(gaps) <= 10 * quantile(gaps, 0.5),
        "hashes": len(set(hashes)),
        "p50_us": round(quantile(gaps, 0.5), 1),
        "p99_us": round(quantile(gaps, 0.99), 1),
        "max_us": round(max(gaps), 1),
    }


def behind(engine: kie.Engine, ids: list[int], tokens: int) -> list[tuple[int, dict[int, float]]]:
    """Greedy tokens behind a prompt, each with the log-probabilities of the 20 likeliest ids."""
    asked = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 20}
    with engine.stream(ids, **asked) as stream:
        return [(t.token_ids[0], {top.id: top.logprob for top in t.top_logprobs}) for t in stream]


def prompts(
    shape: str, folder: Path, device: str, *, lengths: tuple[int, ...], runs: int, gate: float
) -> Iterator[dict[str, Any]]:
    """Long prompts: log-probabilities behind them, relative to how large logits are, beside those
    of the first of several GPUs alone, or of the exact mode of one, whose prompts go through the
    decode kernel; and one continuation with the same bits in all runs.

    Prompts are not shared between runs, so each is computed anew.
    """
    options = {"max_seq_len": max(lengths) + 64, "max_batch": 1, "prefix_cache": False}
    alone, _, others = device.partition(",")
    with kie.Engine(folder, device=alone, exact=not others, **options) as engine:
        drawn = [fresh(pool(engine), n, random.Random(n)) for n in lengths]
        wanted = [behind(engine, ids, 1)[0] for ids in drawn]
        size = float(np.sqrt(np.mean(np.square(engine.logits(drawn[0][:8], path="decode")))))
    with kie.Engine(folder, device=device, **options) as engine:
        for ids, (_, want) in zip(drawn, wanted, strict=True):
            found = [behind(engine, ids, 8) for _ in range(runs)]
            got = found[0][0][1]
            both = sorted(want.keys() & got.keys())
            off = np.array([got[i] - want[i] for i in both])
            distance = float(np.sqrt(np.mean(np.square(off)))) / size if both else float("inf")
            alike = sum(one == found[0] for one in found)
            yield {
                "check": "prompts",
                "shape": shape,
                "gpus": device.count(",") + 1,
                "ids": len(ids),
                "distance": round(distance, 6),
                "likeliest_shared": len(both),
                "runs_alike": f"{alike} of {runs}",
                "good": distance <= gate and len(both) >= 15 and alike == runs,
            }


class Nvml:
    """How busy a GPU has been lately, as its driver says."""

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check("nvmlInit_v2", self._library.nvmlInit_v2())
        self._device = ctypes.c_void_p()
        found = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device))
        self._check("nvmlDeviceGetHandleByIndex_v2", found)

    def describe(self) -> dict[str, Any]:
        """Name, driver, and clocks now in MHz."""
        text = ctypes.create_string_buffer(96)
        self._check(
            "nvmlSystemGetDriverVersion", self._library.nvmlSystemGetDriverVersion(text, 96)
        )
        driver = text.value.decode()
        self._check("nvmlDeviceGetName", self._library.nvmlDeviceGetName(self._device, text, 96))
        clocks = []
        for kind in (1, 2):  # of the multiprocessors, of the memory
            clock = ctypes.c_uint()
            found = self._library.nvmlDeviceGetClockInfo(self._device, kind, ctypes.byref(clock))
            self._check("nvmlDeviceGetClockInfo", found)
            clocks.append(clock.value)
        return {"device": text.value.decode(), "driver": driver, "clocks_mhz": clocks}

    def busy_percent(self) -> int:
        """Share of the last sample period (up to a second) in which some kernel ran."""
        rates = (ctypes.c_uint * 2)()
        found = self._library.nvmlDeviceGetUtilizationRates(self._device, rates)
        self._check("nvmlDeviceGetUtilizationRates", found)
        return int(rates[0])

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise OSError(f"{call} failed with {code}")


def nvml(device: str) -> Nvml:
    """The driver's counters of `cuda:N`. Raises OSError where there are none."""
    return Nvml(int(device.partition(":")[2].split(",")[0] or 0))


def idle(device: str) -> dict[str, Any]:
    """How soon after the last request the driver calls the GPU idle, the engine still open, and
    what the process then costs the CPU.
    """
    try:
        meter = nvml(device)
    except OSError as error:
        return {"check": "idle", "skipped": f"NVML: {error}"}
    with kie.Engine(device=device, max_seq_len=1024, max_batch=1) as engine:
        until, busy = time.monotonic() + 2, 0
        while time.monotonic() < until:
            engine.generate([1, 2, 3], temperature=0, max_tokens=1000, ignore_eos=True)
            busy = max(busy, meter.busy_percent())
        end = time.monotonic()
        last_busy = end
        while time.monotonic() < end + 3:
            if meter.busy_percent():
                last_busy = time.monotonic()
            time.sleep(0.02)
        cpu = time.process_time()
        time.sleep(1)
        cpu = time.process_time() - cpu
    free = last_busy - end
    return {
        "check": "idle",
        "busy_percent": busy,
        "free_after_s": round(free, 2),
        "idle_cpu_percent": round(cpu * 100, 2),
        "good": busy > 0 and free <= FREE_WITHIN_S,
    }


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


def recorded(folder: Path) -> tuple[list[int], list[int]]:
    """A fixture's first prompt and what follows it."""
    golden, _ = tensors(folder / "golden.safetensors")
    prefix = "bf16w." if "bf16w.prompt_0.gen_ids" in golden else ""
    return golden["prompt_0.ids"].tolist(), golden[f"{prefix}prompt_0.gen_ids"].tolist()


def _faults(engine: kie.Engine, folder: Path, rounds: int) -> int:
    """How many of some answers are not as recorded."""
    prompt, wanted = recorded(folder)
    wrong = 0
    for _ in range(rounds):
        done = engine.generate(prompt, temperature=0, max_tokens=len(wanted), ignore_eos=True)
        wrong += list(done.token_ids) != wanted
    return wrong


def two_engines(folders: tuple[Path, Path], device: str, rounds: int = 25) -> dict[str, Any]:
    """Two engines of one process on one GPU, asked at the same time."""
    wrong = [rounds, rounds]
    with kie.Engine(folders[0], device=device) as one, kie.Engine(folders[1], device=device) as two:

        def ask(index: int, engine: kie.Engine) -> None:
            wrong[index] = _faults(engine, folders[index], rounds)

        asking = [threading.Thread(target=ask, args=pair) for pair in enumerate((one, two))]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    return {"check": "two engines", "answers": 2 * rounds, "wrong": wrong, "good": not any(wrong)}


def reference(shape: str, folder: Path, device: str, gates: tuple[float, float]) -> dict[str, Any]:
    """Logits of three tokens at full width beside those of the CPU, which reads the stored bytes in
    the file's order and adds up in float32: relative L2 with two halves a number and with one, and
    whether the likeliest ids agree. Tensors that lie beyond 2^32 bytes are read as all others.

    `gates`: with two halves, with one. Choices of experts that fall the other way count against the
    second.
    """
    ids = [7, 109, 31]
    wanted, found = None, {}
    for name, on, exact in (
        ("cpu", "cpu", False),
        ("exact", device, True),
        ("halves", device, False),
    ):
        with kie.Engine(folder, device=on, exact=exact, max_seq_len=256, max_batch=1) as engine:
            logits = engine.logits(ids, path="decode").astype(np.float64)
        if wanted is None:
            wanted = logits
            continue
        error = float(np.linalg.norm(logits - wanted) / np.linalg.norm(wanted))
        found[name] = error
        found[f"{name}_ids"] = bool((logits.argmax(-1) == wanted.argmax(-1)).all())
    good = found["exact"] <= gates[0] and found["halves"] <= gates[1] and found["exact_ids"]
    return {"check": "reference", "shape": shape, **found, "good": good}


@contextmanager
def _busy(work: Callable[[], object]) -> Iterator[None]:
    """Calls `work` over and over on another thread."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def beside_torch(folder: Path, device: str, rounds: int = 25) -> dict[str, Any]:
    """An engine beside PyTorch in one process: memory of its own, matrix products meanwhile."""
    try:
        import torch
    except ImportError:
        return {"check": "beside torch", "skipped": "torch is missing: pip install torch"}
    place = torch.device(device)
    kept = torch.arange(1 << 28, dtype=torch.int32, device=place)
    matrix = torch.eye(2048, device=place)
    products = 0

    def work() -> None:
        nonlocal products
        assert torch.equal(matrix @ matrix, matrix)
        products += 1

    answers, wrong = 0, 0
    with kie.Engine(folder, device=device) as engine, _busy(work):
        # Its first product takes PyTorch long; then both are to have some of the other's time.
        until = time.monotonic() + 10
        while answers < rounds or (products < rounds and time.monotonic() < until):
            answers, wrong = answers + 1, wrong + _faults(engine, folder, 1)
    intact = bool((kept == torch.arange(1 << 28, dtype=torch.int32, device=place)).all())
    return {
        "check": "beside torch",
        "answers": answers,
        "wrong": wrong,
        "products": products,
        "good": not wrong and intact and products >= rounds,
    }


SANITIZED = """
import json, sys
import kie
folder, device, prompt, wanted, most, dtype = json.loads(sys.argv[1])
options = dict(hang_timeout_s=300, max_seq_len=most, max_batch=4, prefix_cache=False, dtype=dtype)
with kie.Engine(folder, device=device, **options) as engine:
    def ask(ids):
        return engine.stream(ids, temperature=0, max_tokens=len(wanted), ignore_eos=True)
    def answer(stream):
        return [one for token in stream for one in token.token_ids]
    right = answer(ask(prompt)) == wanted
    engine.logits(prompt, path="decode")
    # Prompts of both prefill kernels; where pages come through the ring, a context that needs it.
    for count in (100, 300, 800):
        if count + len(wanted) <= most:
            answer(ask([3 + (37 * i + count) % 300 for i in range(count)]))
    # Several columns.
    streams = [ask(prompt) for _ in range(3)] + [ask(list(range(3, 43)))]
    right &= [answer(stream) for stream in streams][:3] == 3 * [wanted]
sys.exit(0 if right else 3)
"""
SANITIZED_FIXTURES = ("llama", "qwen3", "laneformer_d2")
"""Heads that share a key; norms of heads and a context of several pages a block; lanes, delays."""


ORDERED = (
    # A bulk copy into a slot of the ring, which waits on one mbarrier for the slot's readers and is
    # waited for on another.
    # Both stand in the kernel itself, too, where the compiler keeps no name of theirs.
    (
        {"copy_part"},
        {"load_fragment", "load_run", "take_codes", "kie_decode", "score_keys", "add_values"}
        | {"store_key", "store_value", "page_quad"},
    ),
    ({"kie_decode"}, {"load_run", "take_codes"}),
    # The same in the prefill kernel: stages of weights, positions and the old residual.
    ({"stage_copy"}, {"take_narrow", "take_share", "take_codes", "kie_prefill", "add_quad"}),
    ({"stage_copy", "kie_prefill"}, {"take_old"}),
    # There pages lie where stages did and will: between the two lies a phase, whose number the
    # workers, who have met, set and each copying warp polls.
    (
        {"quad_copy"},
        {"take_narrow", "take_share", "take_codes", "kie_prefill", "take_old", "stage_copy"},
    ),
    # Words of shared memory that warps which meet nobody poll: stop, steps made, order seen, the
    # phase, stages passed, which experts were chosen.
    ({"run_steps"}, {"await_slot", "feed_stream", "watch_host", "look"}),
    ({"watch_host"}, {"publish_candidate"}),
    ({"choose_column", "list_experts"}, {"look"}),
    ({"meet", "kie_prefill"}, {"await_feed"}),
    ({"feed_residual"}, {"await_second"}),
)
"""Pairs of functions whose accesses to shared memory racecheck calls a race since it does not
follow what orders them; RESULTS.md says for each why it is none.
"""


def own_name(signature: str) -> str:
    """A function's name: without its result, the arguments of templates and its own."""
    inner = re.compile(r"<[^<>]*>")
    while inner.search(signature):
        signature = inner.sub("", signature)
    return signature.partition("(")[0].split()[-1]


def races(report: list[str]) -> tuple[list[str], int]:
    """The pairs of accesses in racecheck's report that nothing explains, and how many others."""
    faults, explained, first = [], 0, ""
    for line in report:
        found = re.search(r"(between|and) (?:Read|Write) access at (.+?)\+0x", line)
        if not found:
            continue
        name = own_name(found[2])
        if found[1] == "between":
            first = name
        elif any({first, name} <= a | b and (first in a) != (name in a) for a, b in ORDERED):
            explained += 1
        else:
            faults.append(f"{first}, {name}: {line.strip(' =')}")
    return faults, explained


def sanitize(folder: Path, device: str, tool: str, timeout_s: float = 300) -> dict[str, Any]:
    """A small model under compute-sanitizer, with waits that bear its slowness."""
    row = {"check": f"sanitizer {tool}", "fixture": folder.name}
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(program, os.X_OK):
        return row | {"skipped": "compute-sanitizer is missing: install the CUDA toolkit"}
    prompt, wanted = recorded(folder)
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    # What is stored in float32 is rounded as what is recorded was.
    _, stored = tensors(folder / "model.safetensors")
    dtype = "bf16" if stored == {"F32"} else "auto"
    given = json.dumps([str(folder), device, prompt, wanted[:4], min(positions, 1024), dtype])
    # Not what calls of the driver answer: some are asked for what may not be there.
    command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    command += ["--print-limit", "2000" if tool == "racecheck" else "5"]
    # Of more than this racecheck looks at none.
    environment = os.environ | {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": str(1 << 30)}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", SANITIZED, given],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return row | {"good": False, "said": f"not done within {timeout_s} s"}
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    refused = [line for line in said if "UnsupportedModelError" in line]
    if refused:
        return row | {"skipped": refused[0].partition(": ")[2]}
    row["seconds"] = round(time.monotonic() - begin, 1)
    if tool == "racecheck" and done.returncode == 9:
        faults, explained = races(said)
        # Each race has a second access: nothing was left out of what explains it.
        left_out = any("not displayed" in line or "Maximum number" in line for line in said)
        good = explained > 0 and not faults and not left_out
        # A report of nothing is none: what it says instead tells why.
        told = faults or (said[-1:] if explained else said[-30:])
        return row | {"good": good, "explained": explained, "said": told}
    return row | {
        "good": done.returncode == 0,
        "said": said[-1:] if done.returncode == 0 else said[-30:],
    }


def show(row: dict[str, Any]) -> str:
    """One line."""
    if "skipped" in row:
        fixture = f" {row['fixture']}" if "fixture" in row else ""
        return f"{row['check']:24} skipped{fixture}: {row['skipped']}"
    rest = {k: v for k, v in row.items() if k not in ("check", "good")}
    verdict = "good" if row["good"] else "BAD"
    return f"{row['check']:24} {verdict:5} " + ", ".join(f"{k} {v}" for k, v in rest.items())
