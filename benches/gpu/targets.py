"""How fast what should be on one H200 and on four, and what was measured beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

GAP_MS = 5.0
"""What `max_itl_ms` is where a sequence decodes beside a prompt."""


class Target(NamedTuple):
    """A row of the table: what of which shape, and how long it may take on so many H200."""

    shape: str
    what: str
    """decode: median gap; batch: the same of BATCH requests, its target a factor on one's; prompt:
    to the first token; beside: p99 of the gap beside a prompt; load: opening once more; exposed:
    what of the median gap is there because of the other GPUs, its target a factor on the rest."""
    at: int
    """Tokens of the prompt."""
    floor_us: float | None
    target_us: float
    gpus: int = 1


TABLE = (
    Target("laneformer-2b", "decode", 128, 977, 1085),
    Target("llama-3.2-1b", "decode", 128, 543, 610),
    Target("llama-3.1-8b", "decode", 128, 3300, 3650),
    Target("laneformer-2b-lane", "decode", 128, 122, 180),
    Target("laneformer-2b", "decode", 3840, 1060, 1.15 * 1060),
    Target("llama-3.1-8b", "decode", 4096, 3420, 1.15 * 3420),
    Target("llama-3.1-8b", "decode", 32768, 4240, 1.15 * 4240),
    Target("laneformer-2b", "batch", 128, None, 1.15),
    Target("llama-3.1-8b", "batch", 128, None, 1.15),
    Target("llama-3.1-8b", "prompt", 2048, 37_600, 2 * 37_600),
    Target("llama-3.1-8b", "prompt", 8192, 167_000, 2 * 167_000),
    Target("llama-3.1-8b", "beside", 8192, None, 1000 * GAP_MS),
    Target("laneformer-2b", "prompt", 128, 1000, 3000),
    Target("laneformer-2b", "load", 128, 90_000, 1_500_000),
    Target("laneformer-2b", "decode", 128, 244, 1e6 / 3000, gpus=4),
    Target("laneformer-2b", "exposed", 128, None, 0.03, gpus=4),
    Target("laneformer-2b-half", "decode", 128, 122, 200, gpus=4),
    Target("laneformer-2b-half", "exposed", 128, None, 0.03, gpus=4),
    Target("llama-3.1-8b", "decode", 128, 830, 1000, gpus=4),
    Target("laneformer-2b", "decode", 128, 122, 200, gpus=8),
    Target("laneformer-2b-fp8-all", "decode", 128, 489, 550),
    Target("llama-3.1-8b-fp8-all", "decode", 128, 1650, 1790),
    Target("llama-3.1-8b-fp8-all", "prompt", 2037, 37_600, 52_000),
    Target("llama-3.1-8b-int4-all", "decode", 128, 928, 1060),
    Target("llama-3.1-8b-mxfp4-all", "decode", 128, 877, 1010),
    Target("laneformer-2b-fp8-all", "decode", 128, 122, 185, gpus=4),
    Target("gpt-oss-120b", "decode", 128, 1134, 1310),
    Target("qwen3-30b-fp8", "decode", 128, 740, 925),
    # Three times the rate of one GPU.
    Target("llama-3.1-8b", "prompt", 2048, None, 47_100 / 3, gpus=4),
)
BESIDE = ("laneformer-2b-plain", "llama-3.2-1b")
"""Measured on several GPUs without a target: what lanes buy, and a small model."""
DECODE_TARGET_US = {
    (t.shape, t.gpus): t.target_us for t in TABLE if t.what == "decode" and t.at == 128
}


def asked(gpus: int = 1) -> list[Target]:
    """Rows of the table that so many GPUs measure: those of one GPU, or those of several."""
    return [t for t in TABLE if (t.gpus > 1) == (gpus > 1)]


def shapes(gpus: int = 1) -> list[str]:
    """What the table asks for on so many GPUs."""
    return list(dict.fromkeys([*(t.shape for t in asked(gpus)), *(BESIDE if gpus > 1 else ())]))


def prompts_of(shape: str, gpus: int = 1) -> list[int]:
    """Lengths of prompts that the table asks for, shortest first."""
    of = [t for t in asked(gpus) if t.shape == shape and t.what in ("decode", "prompt")]
    return sorted({t.at for t in of} | {128})


def figure(target: Target, rows: list[dict[str, Any]]) -> tuple[float, float] | None:
    """What was measured for a target, in microseconds, and the target in microseconds."""
    wanted = target.what if target.what in ("batch", "beside") else "decode"
    mine = [r for r in rows if r["shape"] == target.shape]
    row = next((r for r in mine if r["what"] == wanted and r["context"] == target.at), None)
    if row is None:
        return None
    if target.what == "batch":
        one = next((r for r in mine if r["what"] == "decode" and r["context"] == target.at), None)
        return (row["itl_us"], target.target_us * one["itl_us"]) if one else None
    if target.what == "exposed":
        return (exposed_us(row), target.target_us * row["alone"]) if "alone" in row else None
    found = {
        "decode": row["itl_us"],
        "prompt": 1e3 * row.get("ttft_ms", 0),
        "beside": row["p99_us"],
        "load": 1e6 * row.get("reopen_s", 0),
    }
    return found[target.what], target.target_us


def exposed_us(row: dict[str, Any]) -> float:
    """What other GPUs add to a step, next to the same step without them."""
    return row["full"] - row["alone"]


def split(row: dict[str, Any]) -> dict[str, float] | None:
    """Where a decode step's microseconds go, if it was looked inside: the stream of weights by
    itself, what other GPUs add, choosing the token, and what waiting for each other adds else.
    """
    if "stream_only" not in row:
        return None
    collective = exposed_us(row) if "alone" in row else 0.0
    sampling = sum(p["us_mean"] for p in row["phases"] if p["name"].startswith("token"))
    rest = row["full"] - row["stream_only"] - collective - sampling
    return {
        "stream": row["stream_only"],
        "sync": rest,
        "collective": collective,
        "sampling": sampling,
    }


def verdicts(rows: list[dict[str, Any]], gpus: int = 1) -> Iterator[str]:
    """The table of so many GPUs, a line each row."""
    yield f"{'work':44} {'floor us':>9} {'target us':>10} {'us':>10}"
    for target in (t for t in TABLE if t.gpus == gpus):
        floor = f"{target.floor_us:.0f}" if target.floor_us else ""
        work = f"{target.shape}, {target.what} at {target.at}"
        found = figure(target, rows)
        if found is None:
            yield f"{work:44} {floor:>9} {'':10} not measured"
            continue
        us, limit = found
        missed = "" if us <= limit else f"  missed: {us / limit:.2f}x"
        yield f"{work:44} {floor:>9} {limit:10.0f} {us:10.1f}{missed}"
