"""A report as a picture: rates by point, and how long gaps between tokens are. PNG or SVG."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from kie.errors import InvalidRequestError

ENDINGS = (".png", ".svg")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Writes the chart of a report of `kie bench` to `path`.

    Raises InvalidRequestError for another ending, or where matplotlib is not installed.
    """
    if path.suffix not in ENDINGS:
        raise InvalidRequestError(
            f"{path}: wanted a name that ends in {' or '.join(ENDINGS)}",
            context={"param": "chart"},
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise InvalidRequestError(
            "matplotlib is not installed", hint="pip install 'kie[bench]'"
        ) from cause
    # Any of it is untyped: matplotlib ships partial types.
    figure: Any = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    rates, gaps = figure.subplots(1, 2)
    labels = [point["label"] for point in report["points"]]
    values = [point["decode_tokens_per_second"] for point in report["points"]]
    rates.bar(labels, values, color="#5b8c00")
    rates.set_ylabel("tokens a second, one request")
    rates.set_ylim(bottom=0)
    for label in labels:
        ordered = sorted(_gaps_ms(report, label))
        if ordered:
            shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
            gaps.plot(ordered, shares, label=label, drawstyle="steps-post")
    gaps.set_xscale("log")
    gaps.set_xlabel("gap between tokens, ms")
    gaps.set_ylabel("share of gaps not longer")
    if labels:
        gaps.legend(fontsize="small")
    machine = report["env"]["machine"]
    where = machine["gpus"][0]["model"] if machine["gpus"] else machine["cpu"]
    figure.suptitle(f"kie bench on {where}, {report['env']['time']}", fontsize="small")
    figure.savefig(path, dpi=150)


def _gaps_ms(report: Mapping[str, Any], label: str) -> list[float]:
    """Gaps of a point's runs: of the device, or of chunks where there was HTTP between."""
    found: list[float] = []
    for run in report["runs"]:
        if run["label"] != label:
            continue
        moments = run.get("chunk_ms") or [ns / 1e6 for ns in run.get("token_ns", ())]
        found += [max(1e-4, after - before) for before, after in pairwise(moments)]
    return found
