"""`kie doctor`: what this machine has, what kie will use, what is missing."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from kie.bench import roofline
from kie.cli import options
from kie.machine import Report, report


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="say also what one sequence of it would reach here: folder, config.json, name",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--topology", metavar="FILE", help="only write the GPUs and their links to FILE, as JSON"
    )
    options.verb(parser, doctor)


def doctor(given: Namespace) -> None:
    """Prints the report, or writes the topology."""
    if given.topology is not None:
        record(given.topology)
        return
    model: str | None = given.model
    if model is not None:
        roofline.config_of(model)  # a wrong name is told before anything is measured
    found = report()
    expected = [] if model is None else expectations(model, found)
    if given.json:
        print(json.dumps(found.to_dict() | {"expected": [one.to_dict() for one in expected]}))
        return
    print("\n".join(lines(found)))
    for one in expected:
        print(f"{'expect':<10}{one.model} on {one.device}: {told(one)}")


def expectations(model: str, found: Report) -> list[roofline.Roofline]:
    """What one sequence of a model would reach on each GPU whose memory was measured, or else on
    the CPU."""
    on = [roofline.here(gpu) for gpu in found.gpus if gpu.read_bandwidth is not None]
    return [roofline.roofline(model, one) for one in on or [roofline.machine("cpu")]]


def told(one: roofline.Roofline) -> str:
    """One expectation in words."""
    size = f"{one.stored_bytes / 1e9:.1f} GB"
    if not one.fits:
        return f"{size} of weights do not fit"
    return (
        f"about {1e6 / one.estimate_us:,.0f} tokens/s of one sequence at {one.context} positions, "
        f"{1e6 / one.ceiling_us:,.0f} by the bytes alone (an estimate; {size})"
    )


def record(file: str) -> None:
    """Writes the topology of this machine, which `kie info --plan --topology` takes."""
    from kie import _kie
    from kie.errors import NoDeviceError

    found = _kie.topology()
    if found is None:
        raise NoDeviceError(
            "no GPU here whose links could be recorded", hint="`kie doctor` says what is missing"
        )
    text = json.dumps(json.loads(found[1]), indent=2)
    Path(file).write_text(text + "\n", encoding="utf-8")
    print(found[0], end="")


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
                f"{gpu.free_bytes / gib:.1f} of {gpu.memory_bytes / gib:.1f} GiB free, reads at "
                + (f"{gpu.read_bandwidth / 1e9:,.0f} GB/s" if gpu.read_bandwidth else "(unknown)"),
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
    if found.topology is None:
        text.append("topology  no GPUs, nothing to link")
    else:
        text += ["topology", *(f"  {line}".rstrip() for line in found.topology.splitlines())]
    for finding in found.missing:
        text += [f"missing   {finding.what}", f"          {finding.command}"]
    return text
