"""`kie info`: what a model is and what running it takes here."""

from __future__ import annotations

import contextlib
import json
import os
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, cast

from kie.cli import options
from kie.engine import GPU_NODES
from kie.errors import KieError

if TYPE_CHECKING:
    from kie.types import Info


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser, nargs="?")
    options.engine(parser)
    parser.add_argument(
        "--plan", action="store_true", help="plan only: topology, algorithms, plan over ranks"
    )
    parser.add_argument(
        "--topology", metavar="FILE", help="with --plan: a recorded machine, which --device names"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.verb(parser, info)


def info(given: Namespace) -> None:
    """Prints the engine's own report, or a plan without one."""
    if given.plan:
        plan(given)
        return
    if given.topology is not None:
        from kie.errors import InvalidRequestError

        why = "--topology is for plans: nothing runs on a recorded machine"
        raise InvalidRequestError(why, hint="add --plan")
    with options.opened(given.model, **options.engine_options(given)) as engine:
        report = engine.info()
    print(json.dumps(report, indent=2) if given.json else "\n".join(readable(report)))


def plan(given: Namespace) -> None:
    """Prints topology, algorithms and plan of a model that is not loaded."""
    from kie.engine import plan_ahead

    opening = options.engine_options(given)
    del opening["max_launch_ms"]  # plans are the same
    found = plan_ahead(given.model, topology=given.topology, **opening)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(found["plan"], end="")
    # Not of every recorded machine and every model is so much known.
    with contextlib.suppress(KieError):
        if given.topology is not None:
            from kie.bench import roofline

            on = roofline.machine("auto", given.topology)
            print(f"\n{roofline.table(roofline.roofline(given.model, on))}")
    if given.verbose:
        if found["lowered"]:
            print(f"\n{found['lowered']}", end="")
        links = found["algorithms"] or "no topology: the CPU is one machine\n"
        print(f"\n{links}", end="")
    elif found["algorithms"]:
        print("-v also prints the links, the way of every message and what the kernels are given")


def readable(report: Info) -> list[str]:
    """The report for people: sizes with units, load phases as a table, the plan last."""
    sizes = ("kv_bytes", "kv_bytes_per_position", "weight_bytes", "bytes_per_token")
    lines: list[str] = []
    for key, value in report.items():
        if key in ("plan", "load") or value is None:
            continue
        if key in sizes:
            value = human(cast(int, value))
        elif key == "read_bandwidth":
            value = f"{human(cast(float, value))}/s"
        elif key == "parameters":
            value = f"{cast(int, value):,}"
        # On a machine without a GPU what its driver did not say is no news.
        if key == "passed_over" and not any(map(os.path.exists, GPU_NODES)):
            continue
        lines.append(f"{key.replace('_', ' '):<24}{value}")
    lines += ["", f"{'opened in':<40}{report['load']['seconds'] * 1e3:>9.1f} ms"]
    for phase in report["load"]["phases"]:
        moved = human(phase["bytes"]) if phase["bytes"] else ""
        lines.append(f"  {phase['name']:<38}{phase['seconds'] * 1e3:>9.1f} ms{moved:>12}")
    return [*lines, "", *report["plan"].splitlines()]


def human(number: float) -> str:
    """A number of bytes, in the units of a data sheet."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.1f} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1000
    return f"{number:.1f} TB"
