"""What `make gpu` says of figures, without a GPU: the table, the chart, the sanitizer's report."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

import chart  # noqa: E402
import checks  # noqa: E402
import targets  # noqa: E402
import trust  # noqa: E402

INSIDE: dict[str, Any] = {
    "full": 300.0,
    "alone": 294.0,
    "stream_only": 280.0,
    "phases": [{"name": "token: candidates, choice", "us_mean": 9.0}],
}


def row(shape: str, us: float, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "what": "decode", "context": 128, "itl_us": us, "p99_us": us, **more}


def test_each_row_of_the_table_is_met_missed_or_not_measured() -> None:
    rows = [row("laneformer-2b", 300.0, **INSIDE), row("laneformer-2b-half", 220.0)]
    lines = {
        line[:44].rstrip(): line[44:].split() for line in list(targets.verdicts(rows, gpus=4))[1:]
    }
    assert len(lines) == sum(t.gpus == 4 for t in targets.TABLE)
    assert lines["laneformer-2b, decode at 128"] == ["244", "333", "300.0"]
    assert lines["laneformer-2b, exposed at 128"] == ["9", "6.0"]
    assert lines["laneformer-2b-half, decode at 128"][-2:] == ["missed:", "1.10x"]
    assert lines["llama-3.1-8b, decode at 128"][-2:] == ["not", "measured"]
    assert targets.split(rows[0]) == {
        "stream": 280.0,
        "sync": 5.0,
        "collective": 6.0,
        "sampling": 9.0,
    }
    assert targets.split(rows[1]) is None


def test_the_chart_has_lanes_beside_the_same_sizes_without() -> None:
    def line(shape: str, gpus: int, us: float, date: str = "2026-11-22") -> dict[str, Any]:
        about = {"bench": "decode", "batch": 1, "context": 128, "device": "H200", "date": date}
        return about | {"shape": shape, "gpus": gpus, "us_per_token": us, "floor_us": 976.0}

    lines = [
        line("laneformer-2b", 4, 400.0, "2026-11-21"),
        line("laneformer-2b", 1, 1000.0),
        line("laneformer-2b", 4, 290.0),
        line("laneformer-2b-plain", 4, 330.0),
        line("llama-3.1-8b", 1, 3500.0),  # on one GPU only: nothing to compare
    ]
    rows = chart.scaling(lines)
    assert [(r["name"], r["us"]) for r in rows] == [
        ("Laneformer 2B x 1", 1000.0),
        ("Laneformer 2B x 4", 290.0),
        ("2B without lanes x 4", 330.0),
    ]
    assert rows[1]["floor"] == 244.0
    drawn = chart.draw(rows)
    assert "290 µs" in drawn
    assert "H200, 2026-11-22" in drawn


def test_a_race_is_explained_by_both_its_functions_or_not_at_all() -> None:
    def pair(first: str, second: str) -> list[str]:
        return [
            f"Error: Race reported between Write access at {first}+0x10 in ring.h:1",
            f"    and Read access at {second}+0x20 in matvec.h:41 [8 hazards]",
        ]

    take = "UnitCodes<T1> take_codes<Tiling<(int)4>>(const unsigned char *, int)"
    known = [
        *pair("copy_part(Slot *, void *)", take),
        *pair("quad_copy(void *, const void *)", "take_old(Pipe &, bool)"),
        *pair("meet(Watch &)", "await_feed(Watch &)"),
    ]
    assert checks.races(known) == ([], 3)
    faults, explained = checks.races([*known, *pair("copy_part(Slot *)", "vector_free(Block &)")])
    assert (len(faults), explained) == (1, 3)
    assert faults[0].startswith("copy_part, vector_free: ")
    # Two writers of one word, and a third access to a known place.
    report = [*pair("run_steps(Ring &)", "run_steps(Ring &)"), *pair(take, "feed_stream(Feed &)")]
    assert len(checks.races(report)[0]) == 2


def test_what_explains_a_race_is_in_the_kernels() -> None:
    kernels = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.h"))
    for name in {name for pair in checks.ORDERED for names in pair for name in names}:
        assert re.search(rf"\b{name}\b", kernels), name


def test_what_an_engine_must_bear_is_judged() -> None:
    """On the CPU, which bears it as well."""
    rows = [*trust.killed("cpu", rounds=1), trust.checks.two_engines(TWO, "cpu", rounds=1)]
    assert [row["good"] for row in rows] == [True, True, True], rows
    late = trust.sanitized("memcheck", "cuda:0", list(TWO), jobs=1, until=time.monotonic())
    assert [checks.show(row).split()[2:4] for row in late] == [["BAD", "fixture"]] * 2


TWO = (trust.DATA / "llama", trust.DATA / "laneformer_d2")
