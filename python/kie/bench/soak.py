"""Many requests for a long time: does memory grow, does the rate fall, do answers stay the same?"""

from __future__ import annotations

import hashlib
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kie.bench.measure import Run, fresh, pool, request
from kie.bench.report import quantile

if TYPE_CHECKING:
    from kie.engine import Engine


def measure(
    engine: Engine,
    *,
    seconds: float,
    max_tokens: int,
    seed: int = 0,
    step: Callable[[], object] = lambda: None,
) -> tuple[list[Run], dict[str, Any]]:
    """Requests of random lengths until `seconds` are over, each tenth a fixed one, greedy.

    Returns the runs and what became of the process: `rss_bytes_per_request` (slope of the
    resident memory over the second half, when caches are full), first and last rate, and how many
    different answers the fixed request had (1 is right).
    """
    ids, source = pool(engine), random.Random(seed)
    fixed = fresh(ids, 24, source)
    longest = engine.info()["context"] - max_tokens
    runs: list[Run] = []
    sizes: list[tuple[float, float]] = []
    answers: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(runs) < 2:
        if len(runs) % 10 == 0:
            with engine.stream(fixed, max_tokens=max_tokens, temperature=0) as stream:
                ids_of = repr(stream.result().token_ids)
            answers.add(hashlib.sha256(ids_of.encode()).hexdigest())
        prompt = fresh(ids, source.randint(1, max(1, min(512, longest))), source)
        tokens = source.randint(1, max_tokens)
        run = request(
            engine, prompt, "soak", max_tokens=tokens, temperature=1.0, seed=len(runs),
            ignore_eos=True,
        )  # fmt: skip
        runs.append(run)
        sizes.append((float(len(runs)), float(resident_bytes())))
        step()
    return runs, health(runs, sizes, len(answers))


def health(
    runs: Sequence[Run], sizes: Sequence[tuple[float, float]], answers: int
) -> dict[str, Any]:
    """The numbers of a soak from its runs and the (request, resident bytes) points."""
    rates = [1e3 / run.tpot_ms for run in runs if run.tpot_ms]
    tenth = max(1, len(rates) // 10)
    late = sizes[len(sizes) // 2 :]
    return {
        "requests": len(runs),
        "rss_bytes": sizes[-1][1] if sizes else 0.0,
        "rss_bytes_per_request": slope(late),
        "first_tokens_per_second": quantile(rates[:tenth], 0.5),
        "last_tokens_per_second": quantile(rates[-tenth:], 0.5),
        "fixed_answers": answers,
    }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares; 0 of fewer than two points."""
    if len(points) < 2:
        return 0.0
    middle = sum(x for x, _ in points) / len(points)
    mean = sum(y for _, y in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * (y - mean) for x, y in points) / spread if spread else 0.0


def resident_bytes() -> int:
    """Resident memory of this process; its greatest so far where /proc is not."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(found: Mapping[str, Any]) -> str:
    """One line for a terminal."""
    same = "all the same" if found["fixed_answers"] == 1 else f"{found['fixed_answers']} DIFFERENT"
    return (
        f"{found['requests']} requests; memory {found['rss_bytes'] / 1e6:.1f} MB, "
        f"{found['rss_bytes_per_request']:+.0f} bytes a request over the second half; decode "
        f"{found['first_tokens_per_second']:.1f} tok/s at first, "
        f"{found['last_tokens_per_second']:.1f} at the end; answers of the fixed request: {same}"
    )
