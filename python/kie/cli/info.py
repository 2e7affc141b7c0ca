"""`kie info`: what a model is and what running it takes here."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kie.cli import options


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
    print(json.dumps(report, indent=2) if given.json else "\n".join(outline(report)))


def plan(given: Namespace) -> None:
    """Prints topology, algorithms and plan of a model that is not loaded."""
    from kie.engine import plan_ahead

    found = plan_ahead(given.model, topology=given.topology, **options.engine_options(given))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    links = found["algorithms"] or "no topology: the CPU is one machine\n"
    print(f"{links}\n{found['plan']}", end="")


def outline(report: Mapping[str, Any], indent: int = 0) -> list[str]:
    """Nested data as indented lines."""
    lines: list[str] = []
    pad = "  " * indent
    for key, value in report.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:")
            lines += outline(cast(Mapping[str, Any], value), indent + 1)
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            lines.append(f"{pad}{key}:")
            rows = cast(Sequence[Mapping[str, Any]], value)
            lines += [f"{pad}  " + ", ".join(f"{k} {v}" for k, v in row.items()) for row in rows]
        elif isinstance(value, str) and "\n" in value:
            lines.append(f"{pad}{key}:")
            lines += [f"{pad}  {line}" for line in value.splitlines()]
        else:
            lines.append(f"{pad}{key}: {value}")
    return lines
