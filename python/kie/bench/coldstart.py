"""From the start of a process to its first token, phase by phase, with and without the model's
files in the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kie.bench.report import quantile
from kie.errors import KieError

PHASES = ("process_ms", "import_ms", "open_ms", "first_token_ms", "total_ms")
"""Interpreter up, `import kie`, `kie.Engine(...)`, prompt to first token, all of them."""

_CHILD = """
import json, sys, time
clock = time.monotonic_ns
up = clock()
import kie
imported = clock()
with kie.Engine(**json.loads(sys.argv[1])) as engine:
    opened = clock()
    with engine.stream("def add(a, b):", max_tokens=1, temperature=0) as stream:
        next(iter(stream))
        first = clock()
print(json.dumps([up, imported, opened, first]))
"""


def measure(
    options: Mapping[str, Any], *, runs: int, cold: bool = False, timeout_s: float = 600
) -> list[dict[str, float]]:
    """`runs` processes one after another; `options` are keywords of `Engine`, `model` among them.

    `cold` asks the kernel to forget the model's files before each, which needs a folder's path.

    Raises KieError with the child's last words where it fails or takes longer than `timeout_s`.
    """
    found: list[dict[str, float]] = []
    for _ in range(runs):
        if cold:
            forget(options.get("model"))
        command = [sys.executable, "-c", _CHILD, json.dumps(dict(options))]
        start = time.monotonic_ns()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as cause:
            raise KieError(f"no first token within {timeout_s:g} s") from cause
        if done.returncode:
            last = " ".join(done.stderr.strip().splitlines()[-2:]) or "no message"
            raise KieError(f"the process ended with code {done.returncode}: {last}")
        moments: list[int] = [start, *json.loads(done.stdout)]
        spans = [(b - a) / 1e6 for a, b in pairwise(moments)]
        found.append(dict(zip(PHASES, [*spans, sum(spans)], strict=True)))
    return found


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """p50 and the greatest of each phase."""
    return {
        phase: {
            "p50": quantile([one[phase] for one in found], 0.5),
            "max": max(one[phase] for one in found),
        }
        for phase in PHASES
    }


def forget(model: Any) -> None:
    """Drops a model's files from the page cache, as far as no one else has them open; None: the
    model of the package."""
    folder = Path(model) if model else Path(__file__).parent.parent / "demo"
    for path in sorted(folder.glob("*")):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def plain(found: Mapping[str, Mapping[str, float]]) -> str:
    """A line a phase for a terminal."""
    return "\n".join(
        f"{phase.removesuffix('_ms').replace('_', ' '):12}{times['p50']:10.1f} ms   "
        f"max {times['max']:.1f} ms"
        for phase, times in found.items()
    )
