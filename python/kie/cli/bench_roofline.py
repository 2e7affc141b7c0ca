"""`kie bench roofline`: how fast one sequence could be, on machines that need not be at hand."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from kie.bench import roofline
from kie.cli import options


def define(verbs: Any) -> None:
    """Defines the kind of bench below `verbs`."""
    line = "ceiling and estimate of one sequence, from a config.json alone"
    parser: ArgumentParser = verbs.add_parser("roofline", help=line, description=line)
    parser.add_argument(
        "spec",
        nargs="*",
        metavar="SPEC",
        help="folder, config.json or known name such as gpt-oss-120b; default: the default model",
    )
    parser.add_argument(
        "--device", default="auto", metavar="NxNAME", help="8xH200, 8xMI300X, ..., cpu"
    )
    parser.add_argument("--topology", metavar="FILE", help="GPUs of a recorded machine")
    parser.add_argument(
        "--context", type=options.at_least_one, default=4096, metavar="N", help="positions"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.verb(parser, run)


def run(given: Namespace) -> None:
    """Prints one roofline with its terms, or a line for each of several."""
    on = roofline.machine(given.device, given.topology)
    specs: list[str | None] = given.spec or [None]
    found = [roofline.roofline(spec, on, given.context) for spec in specs]
    if given.json:
        print(json.dumps([one.to_dict() for one in found]))
    elif len(found) == 1:
        print(roofline.table(found[0]))
    else:
        print(roofline.markdown(found))
