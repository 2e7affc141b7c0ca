"""What `run.py` measures of speed, on random weights: decode, eight at once, prompts, and a
sequence that decodes beside a long prompt.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import kie
from kie.bench import inside, latency, random_weights
from kie.bench.measure import fresh, pool
from kie.bench.report import quantile
from targets import GAP_MS, TABLE

STREAM_BYTES_PER_US = 4.55e6
"""What one H200 streams (bytes a microsecond): the floor of a step is its bytes over this."""
BATCH = 8
ANSWER = 256
"""Tokens behind each prompt."""
LONG = 2048
"""From here on fewer runs are made of a prompt."""


def weights_bytes(folder: Path) -> float:
    """Bytes that a token reads."""
    config = json.loads((folder / "config.json").read_text())
    return random_weights.bytes_a_token(config)


@contextmanager
def shaped(shape: str) -> Iterator[Path]:
    """A folder with random weights of a shape, in memory where that is a file system."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kie-", dir=memory) as name:
        yield random_weights.write(shape, Path(name))


def show_load(shape: str, load: dict[str, Any]) -> None:
    """Prints where the time of opening went, the longest parts first."""
    phases = sorted(load["phases"], key=lambda phase: -phase["seconds"])
    print(f"{shape}: opened again in {load['seconds']:.3f} s")
    for phase in phases:
        if phase["seconds"] >= 1e-3:
            rate = phase["bytes"] / phase["seconds"] / 1e9
            gained = f"{rate:8.1f} GB/s" if phase["bytes"] else ""
            print(f"  {phase['name']:32} {1e3 * phase['seconds']:8.1f} ms{gained}")


def spread(gaps: list[float]) -> dict[str, float]:
    """Median, p99 and largest of some gaps in microseconds."""
    return {
        "itl_us": statistics.median(gaps),
        "p99_us": quantile(gaps, 0.99),
        "max_us": max(gaps),
    }


def batch(engine: kie.Engine, tokens: int, runs: int) -> list[float]:
    """Gaps between tokens of BATCH greedy requests, while all of them run, in microseconds."""
    # Where prompts take the columns that decoding leaves, shorter ones meet.
    return _together(engine, tokens, runs) or _together(engine, tokens // 4, runs)


def _together(engine: kie.Engine, tokens: int, runs: int) -> list[float]:
    ids, source = pool(engine), random.Random(BATCH)
    gaps: list[float] = []
    for turn in range(1 + runs):
        with ExitStack() as stack:
            streams = [
                stack.enter_context(
                    engine.stream(
                        fresh(ids, tokens, source),
                        temperature=0,
                        max_tokens=ANSWER,
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
    return gaps


def beside(shape: str, folder: Path, device: str, tokens: int, runs: int) -> dict[str, Any]:
    """A greedy request that decodes while another's prompt of so many tokens is computed: its gaps
    that touch the time from that one's call to its first token, and how long that one waited.
    """
    gaps: list[float] = []
    waits: list[float] = []
    context, most = 128, 4096
    with kie.Engine(
        folder, device=device, max_seq_len=tokens + 512, max_itl_ms=GAP_MS, prefix_cache=False
    ) as engine:
        ids, source = pool(engine), random.Random(tokens)
        for turn in range(1 + runs):
            moments: list[int] = []
            go, stop = threading.Event(), threading.Event()

            def victim(moments: list[int], go: threading.Event, stop: threading.Event) -> None:
                prompt = fresh(ids, context, source)
                with engine.stream(
                    prompt, temperature=0, max_tokens=most, ignore_eos=True
                ) as stream:
                    for token in stream:
                        moments.append(token.t_ns)
                        if len(moments) == 16:
                            go.set()
                        if stop.is_set():
                            break

            thread = threading.Thread(target=victim, args=(moments, go, stop))
            thread.start()
            go.wait()
            prompt = fresh(ids, tokens, source)
            called = time.monotonic_ns()
            with engine.stream(prompt, temperature=0, max_tokens=2, ignore_eos=True) as stream:
                first = next(iter(stream)).t_ns
            stop.set()
            thread.join()
            if turn > 0:
                touched = [(a, b) for a, b in itertools.pairwise(moments) if b > called]
                gaps += [(b - a) / 1e3 for a, b in touched if a < first]
                waits.append((first - called) / 1e6)
    return {
        "shape": shape,
        "what": "beside",
        "batch": 1,
        "context": tokens,
        "max_itl_ms": GAP_MS,
        **spread(gaps),
        "ttft_ms": statistics.median(waits),
    }


def measure(
    shape: str, folder: Path, device: str, prompts: list[int], runs: int, look: bool
) -> list[dict[str, Any]]:
    """Rows of one shape: decode at each context, time to first token; with `look` also what the
    step takes without waits and without weights, and its phases.
    """
    rows: list[dict[str, Any]] = []
    floor = round(weights_bytes(folder) / STREAM_BYTES_PER_US, 1)
    longest = max(prompts) + ANSWER
    begin = time.monotonic()
    kie.Engine(folder, device=device, max_seq_len=longest).close()
    opened = time.monotonic() - begin
    # Once more, with the file in the page cache and the kernels in theirs.
    with kie.Engine(folder, device=device, max_seq_len=longest) as engine:
        load = engine.info()["load"]
        show_load(shape, load)
        for tokens in prompts:
            times = runs if tokens < LONG else max(5, runs // 8)
            found = latency.measure(
                engine,
                prompt_tokens=[tokens],
                max_tokens=ANSWER,
                runs=times,
                warmups=1,
                seed=tokens,
            )
            row = {"shape": shape, "what": "decode", "batch": 1, "context": tokens}
            row |= {"runs": times, "floor_us": floor}
            row |= spread([gap for run in found for gap in run.gaps_us])
            row |= {"ttft_ms": statistics.median(run.ttft_ms for run in found)}
            row |= {"open_s": round(opened, 2), "reopen_s": round(load["seconds"], 3)}
            rows.append(row | {"load": load["phases"]})
        together = {"shape": shape, "what": "batch", "batch": BATCH, "context": 128}
        together |= {"floor_us": floor, **spread(batch(engine, 128, min(runs, 5)))}
    for row in rows if look else []:
        seen = inside.measure(
            folder, device=device, prompt_tokens=row["context"], runs=5, max_tokens=ANSWER
        )
        row |= {kernel: seen[kernel]["p50"] for kernel in inside.KERNELS if kernel in seen}
        row["phases"] = seen["phases"]
        print(inside.table(seen))
    rows.append(together)
    for target in TABLE:
        if target.shape == shape and target.what == "beside" and target.at <= max(prompts):
            rows.append(beside(shape, folder, device, target.at, 5))
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k not in ("phases", "load")}), flush=True)
    return rows
