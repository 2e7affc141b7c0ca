"""`kie doctor`: what this machine has, what kie will use, what is missing."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from kie.cli import options
from kie.machine import Report, report


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.verb(parser, doctor)


def doctor(given: Namespace) -> None:
    """Prints the report."""
    found = report()
    print(json.dumps(found.to_dict(), indent=2) if given.json else "\n".join(lines(found)))


def lines(found: Report) -> list[str]:
    """The report for people."""
    gib = 1 << 30
    read = found.read_bandwidth
    rows = [
        ("kie", f"{found.kie}, Python {found.python}, {found.system}"),
        ("cpu", f"{found.cpu}, {found.cores} cores, {found.isa}"),
        (
            "memory",
            f"{found.memory_free_bytes / gib:.1f} of {found.memory_bytes / gib:.1f} GiB free",
        ),
        ("reads at", f"{read / 1e9:.1f} GB/s" if read else "not measured"),
        *(
            (
                gpu.name,
                f"{gpu.model}, {gpu.arch}, {gpu.multiprocessors} multiprocessors, "
                f"{gpu.free_bytes / gib:.1f} of {gpu.memory_bytes / gib:.1f} GiB free",
            )
            for gpu in found.gpus
        ),
        ("gpus", f"{len(found.gpus)} usable, nodes: {', '.join(found.gpu_nodes) or 'none'}"),
        ("libcuda", found.libcuda or "not found"),
        ("nvrtc", "installed" if found.nvrtc else "not installed"),
        ("compiler", found.compiler or "none"),
        ("hub", found.hub or "not installed"),
        ("will use", found.will_use),
    ]
    text = [f"{name:<10}{value}" for name, value in rows]
    for finding in found.missing:
        text += [f"missing   {finding.what}", f"          {finding.command}"]
    return text
