"""Is the second report worse than the first?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kie.bench.report import SCHEMA_VERSION
from kie.errors import InvalidRequestError

MORE_IS_BETTER = ("decode_tokens_per_second", "prefill_tokens_per_second")
LESS_IS_BETTER = ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity at one point, before and after."""

    label: str
    name: str
    before: float
    after: float
    worse_by: float
    """Share by which it got worse; negative where it got better."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The changes at all points that both reports have.

    Raises:
        InvalidRequestError: a document of another schema, or no point in common.
    """
    for name, report in (("first", before), ("second", after)):
        if report.get("schema_version") != SCHEMA_VERSION:
            got = report.get("schema_version")
            raise InvalidRequestError(
                f"the {name} report: wanted schema_version {SCHEMA_VERSION}, got {got}",
                hint="compare files that `kie bench ... --json` of one version wrote",
            )
    later = {point["label"]: point for point in after["points"]}
    changes = [
        _change(point["label"], name, float(point[name]), float(later[point["label"]][name]))
        for point in before["points"]
        if point["label"] in later
        for name in MORE_IS_BETTER + LESS_IS_BETTER
        if name in point and name in later[point["label"]]
    ]
    if not changes:
        raise InvalidRequestError(
            "the reports have no prompt length in common", hint="measure the same points"
        )
    return changes


def _change(label: str, name: str, before: float, after: float) -> Change:
    low, high = (after, before) if name in MORE_IS_BETTER else (before, after)
    worse_by = 0.0 if low == high else high / low - 1 if low else float("inf")
    return Change(label, name, before, after, worse_by)
