"""From runs to the document that `kie bench --json` writes, and to its CSV and Markdown forms.

`summary` has vLLM's flat keys, so that what reads those reads these; beside them stand the
device's own gaps, one-second windows and stalls, which answer "peak or sustained?".
"""

from __future__ import annotations

import csv
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kie.bench.measure import Run

SCHEMA_VERSION = 1
STALL_FACTOR = 3.0
"""A gap of more than this many medians is a stall."""


def document(
    runs: Sequence[Run],
    config: Mapping[str, Any],
    engine: Mapping[str, Any],
    *,
    duration_s: float,
) -> dict[str, Any]:
    """`schema_version, env, config, runs[], summary`."""
    labels = list(dict.fromkeys(run.label for run in runs))
    return {
        **opening(config, {"engine": dict(engine)}),
        "runs": [record(run) for run in runs],
        "summary": summary(runs, duration_s),
        "points": [
            {"label": label, **summary([run for run in runs if run.label == label], None)}
            for label in labels
        ],
    }


def opening(config: Mapping[str, Any], what: Mapping[str, Any]) -> dict[str, Any]:
    """What every document begins with: the schema, the machine, what was measured and how."""
    from kie import machine

    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "schema_version": SCHEMA_VERSION,
        "env": {"machine": machine.report().to_dict(), **what, "time": moment},
        "config": dict(config),
    }


def record(run: Run) -> dict[str, Any]:
    """One run with its numbers and, for a closer look, the moment of every token."""
    fields = asdict(run)
    handover = fields.pop("handover_us")
    fields["tpot_ms"] = run.tpot_ms
    fields["device_itl_us"] = spread(run.gaps_us)
    fields["handover_us"] = spread(handover)
    return fields


def summary(runs: Sequence[Run], duration_s: float | None) -> dict[str, Any]:
    """The numbers of many runs; `duration_s` is None for what ran interleaved with others."""
    seconds = sum(run.e2e_ms for run in runs) / 1e3 if duration_s is None else duration_s
    output = sum(run.completion_tokens for run in runs)
    given = sum(run.prompt_tokens for run in runs)
    gaps = [gap for run in runs for gap in run.gaps_us]
    flat = totals(len(runs), seconds, given, output)
    flat |= statistic("ttft_ms", [run.ttft_ms for run in runs])
    flat |= statistic("tpot_ms", [run.tpot_ms for run in runs if run.gaps_us])
    flat |= statistic("itl_ms", [gap / 1e3 for gap in gaps])
    flat |= statistic("e2el_ms", [run.e2e_ms for run in runs])
    rates = [1e3 / run.tpot_ms for run in runs if run.tpot_ms]
    prefills = [run.prompt_tokens * 1e3 / run.prefill_ms for run in runs if run.prefill_ms]
    flat["decode_tokens_per_second"] = quantile(rates, 0.5)
    flat["decode_tokens_per_second_iqr"] = quantile(rates, 0.75) - quantile(rates, 0.25)
    flat["prefill_tokens_per_second"] = quantile(prefills, 0.5)
    flat["cached_tokens"] = sum(run.cached_tokens for run in runs)
    flat["device_itl_us"] = spread(gaps)
    flat["handover_us"] = spread([us for run in runs for us in run.handover_us])
    flat["bytes_per_token"] = round(quantile([run.bytes_per_token for run in runs], 0.5))
    flat["mbu"] = quantile([run.mbu for run in runs], 0.5)
    flat["windows"] = [w for index, run in enumerate(runs) for w in windows(index, run)]
    flat["stalls"] = [s for index, run in enumerate(runs) for s in stalls(index, run)]
    return flat


def totals(completed: int, seconds: float, given: int, output: int) -> dict[str, Any]:
    """vLLM's keys for a whole measurement; `given` and `output` are tokens."""
    return {
        "completed": completed,
        "duration": seconds,
        "total_input_tokens": given,
        "total_output_tokens": output,
        "request_throughput": completed / seconds if seconds else 0.0,
        "output_throughput": output / seconds if seconds else 0.0,
        "total_token_throughput": (output + given) / seconds if seconds else 0.0,
    }


def statistic(name: str, values: Sequence[float]) -> dict[str, float]:
    """vLLM's keys for one quantity: mean_, median_, std_, p90_, p99_."""
    return {
        f"mean_{name}": statistics.fmean(values) if values else 0.0,
        f"median_{name}": quantile(values, 0.5),
        f"std_{name}": statistics.pstdev(values) if values else 0.0,
        f"p90_{name}": quantile(values, 0.9),
        f"p99_{name}": quantile(values, 0.99),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99, p999 and max."""
    points = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: quantile(values, point) for name, point in points.items()}


def quantile(values: Sequence[float], point: float) -> float:
    """Linear between neighbours, as NumPy has it; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = point * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def windows(index: int, run: Run) -> list[dict[str, float]]:
    """Tokens a second in each full second of a run, or in the whole of a shorter one."""
    if len(run.token_ns) < 2:
        return []
    total_ns = run.token_ns[-1]
    width = min(10**9, total_ns)
    counts = [0] * (total_ns // width)
    for moment in run.token_ns[1:]:
        # A token belongs to the window in which the wait for it ended.
        place = (moment - 1) // width
        if place < len(counts):
            counts[place] += 1
    return [
        {
            "run": index,
            "start_s": place * width / 1e9,
            "seconds": width / 1e9,
            "tokens": count,
            "tokens_per_second": count * 1e9 / width,
        }
        for place, count in enumerate(counts)
    ]


def stalls(index: int, run: Run) -> list[dict[str, float]]:
    """Gaps of more than `STALL_FACTOR` medians."""
    gaps = run.gaps_us
    median = quantile(gaps, 0.5)
    return [
        {"run": index, "token": place + 1, "gap_us": gap, "medians": gap / median}
        for place, gap in enumerate(gaps)
        if median and gap > STALL_FACTOR * median
    ]


COLUMNS = (
    ("prompt", "label"),
    ("runs", "completed"),
    ("ttft ms", "median_ttft_ms"),
    ("prefill/s", "prefill_tokens_per_second"),
    ("tok/s", "decode_tokens_per_second"),
    ("± iqr", "decode_tokens_per_second_iqr"),
    ("p50 us", "device_itl_us.p50"),
    ("p99", "device_itl_us.p99"),
    ("max", "device_itl_us.max"),
    ("MBU", "mbu"),
)
"""Of one request at a time; at most 80 columns of a terminal wide. p50 to max are gaps between
tokens."""


Columns = Sequence[tuple[str, str]]
"""Titles, and where in a point their numbers stand."""


def table(report: Mapping[str, Any], columns: Columns = COLUMNS) -> list[list[str]]:
    """A heading and a row for each point."""
    rows = [[title for title, _ in columns]]
    for point in report["points"]:
        rows.append([_show(_pick(point, path)) for _, path in columns])
    return rows


def markdown(report: Mapping[str, Any], columns: Columns = COLUMNS) -> str:
    """The table for pasting."""
    heading, *rows = table(report, columns)
    lines = [heading, ["---:"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(report: Mapping[str, Any], columns: Columns = COLUMNS) -> str:
    """The table for a terminal, with the answers to the usual doubts underneath."""
    rows = table(report, columns)
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    total = report["summary"]
    rates = [window["tokens_per_second"] for window in total["windows"]]
    lines.append(
        f"windows: min {quantile(rates, 0):.1f}, p50 {quantile(rates, 0.5):.1f}, "
        f"max {quantile(rates, 1):.1f} tok/s"
    )
    if len(rates) > 1:
        lines.append(f"tok/s     {sparkline(rates)}")
    lines.append(
        f"stalls over {STALL_FACTOR:g} medians: {len(total['stalls'])}; "
        f"cached prompt tokens: {total['cached_tokens']}"
    )
    return "\n".join(lines)


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], most: int = 68) -> str:
    """Values over time as bars of eighths of the largest; means of neighbours where many."""
    each = -(-len(values) // most)
    parts = [values[at : at + each] for at in range(0, len(values), each)]
    means = [sum(part) / len(part) for part in parts]
    top = max(means, default=0.0) or 1.0
    return "".join(BLOCKS[min(7, int(8 * mean / top))] for mean in means)


def comma_separated(report: Mapping[str, Any], columns: Columns = COLUMNS) -> str:
    """The table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table(report, columns))
    return out.getvalue().rstrip("\n")


def _pick(point: Mapping[str, Any], path: str) -> Any:
    value: Any = point
    for key in path.split("."):
        value = value[key]
    return value


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.{0 if abs(value) > 999 else 1}f}"
    return str(value)
