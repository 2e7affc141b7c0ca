"""`kie bench`: latency at one point, a sweep over prompt lengths, the host's answer to a token, two
reports compared; load and limits are defined beside it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kie.bench import chart, inside, random_weights, report
from kie.bench import latency as requests
from kie.bench.compare import compare as judge
from kie.cli import bench_load, bench_roofline, options
from kie.errors import InvalidRequestError
from kie.files import read_object


def define(parser: ArgumentParser) -> None:
    """Defines the verb and its own verbs."""
    verbs = parser.add_subparsers(metavar="KIND", required=True)
    line = "one request at a time at one prompt length"
    latency = verbs.add_parser("latency", help=line, description=line)
    latency.add_argument("-p", "--prompt", type=lengths, default=[128], metavar="N")
    _define_measurement(latency, tokens=256)
    latency.add_argument(
        "--trace",
        action="store_true",
        help="also time a step from inside the kernel, phase by phase (GPUs only)",
    )
    line = "over several prompt lengths, interleaved, and as many requests at once as asked"
    sweep = verbs.add_parser("sweep", help=line, description=line)
    sweep.add_argument("-p", "--prompt", type=lengths, default=[32, 128, 512], metavar="N,N,...")
    line = "requests at once, each a row of its own rate"
    sweep.add_argument("-b", "--batch", type=lengths, default=[1], metavar="N,N,...", help=line)
    _define_measurement(sweep, tokens=128)
    latency.set_defaults(batch=[1])
    sweep.set_defaults(trace=False)
    line = "how long the host takes to answer a token, timed by the GPU"
    echo = verbs.add_parser("echo", help=line, description=line)
    echo.add_argument("--device", default="cuda:0", help="cuda:0, ...")
    echo.add_argument("--rounds", type=options.at_least_one, default=10_000, metavar="N")
    echo.add_argument("--json", action="store_true", help="print JSON")
    options.verb(echo, answer)
    bench_load.define(verbs)
    bench_roofline.define(verbs)
    line = "compare two reports; exit code 1 if the second is worse"
    compared = verbs.add_parser("compare", help=line, description=line)
    compared.add_argument("before", type=Path, help="a report of `kie bench ... --json`")
    compared.add_argument("after", type=Path, help="a later one")
    compared.add_argument(
        "--threshold", type=float, default=0.05, help="share by which a number may be worse"
    )
    options.verb(compared, compare)


def _define_measurement(parser: ArgumentParser, tokens: int) -> None:
    options.model(parser, nargs="?")
    parser.add_argument(
        "--random-weights",
        metavar="SPEC",
        help="in place of MODEL: random 16-bit weights of a known shape, such as llama-3.2-1b",
    )
    parser.add_argument("-n", "--tokens", type=options.at_least_one, default=tokens, metavar="N")
    parser.add_argument(
        "--runs", type=options.at_least_one, default=5, help="measured requests a point"
    )
    parser.add_argument("--warmups", type=int, default=1, help="requests before, not counted")
    parser.add_argument("-t", "--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--seed", type=int, default=0, help="key of prompts and sampling")
    options.engine(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; - prints it")
    chart = "draw a .png or .svg"
    parser.add_argument("--chart", "--png", type=Path, metavar="FILE", help=chart)
    parser.add_argument("--csv", action="store_true", help="print the table as CSV")
    parser.add_argument("--md", action="store_true", help="print the table as Markdown")
    options.verb(parser, measure)


def lengths(text: str) -> list[int]:
    """Prompt lengths separated by commas."""
    return [options.at_least_one(word) for word in text.split(",")]


@contextmanager
def _model(given: Namespace) -> Generator[str | None]:
    """The model that was asked for: a folder or name, or a folder of random weights."""
    if given.random_weights is None:
        yield given.model
        return
    if given.model is not None:
        raise InvalidRequestError(
            f"both a model ({given.model}) and --random-weights {given.random_weights} are given",
            hint="pass one of them",
            context={"param": "random_weights"},
        )
    # In memory where that is a file system: the disk is not what is measured.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kie-", dir=memory) as folder:
        print(f"writing random weights of {given.random_weights}", file=sys.stderr)
        yield str(random_weights.write(given.random_weights, Path(folder), given.seed))


def measure(given: Namespace) -> None:
    """Measures, writes the report and prints the table."""
    opening = options.engine_options(given)
    config: dict[str, Any] = {
        "prompt_tokens": given.prompt,
        "max_tokens": given.tokens,
        "runs": given.runs,
        "warmups": given.warmups,
        "temperature": given.temperature,
        "seed": given.seed,
        "batch": given.batch,
    }
    opening["max_batch"] = max(8, *given.batch)
    with _model(given) as model:
        # First what may be refused.
        seen = [_inside(given, model, tokens) for tokens in given.prompt if given.trace]
        if given.device in ("auto", "cpu") and given.threads is None:
            _measure_bandwidth()
        with options.opened(model, **opening) as engine:
            total = (given.runs + given.warmups) * len(given.prompt) * len(given.batch)
            with _bar("requests", total) as step:
                start = time.monotonic()
                runs = requests.measure(engine, step=step, **config)
                seconds = time.monotonic() - start
            settings = {"model": given.random_weights or given.model, **opening, **config}
            found = report.document(runs, settings, engine.info(), duration_s=seconds)
    if seen:
        found["inside"] = seen
    if given.chart is not None:
        chart.draw(found, given.chart)
    if given.json is not None and str(given.json) == "-":
        print(json.dumps(found))
        return
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")
    form = report.comma_separated if given.csv else report.markdown if given.md else report.plain
    print(form(found))
    for one in seen:
        print(f"\n{inside.table(one)}")


def _measure_bandwidth() -> None:
    """What MBU is a part of, where nobody has measured it on this machine: takes a second."""
    from kie import bandwidth, machine

    if bandwidth.known() is None:
        machine.measure_bandwidth()


def _inside(given: Namespace, model: str | None, tokens: int) -> dict[str, Any]:
    return inside.measure(
        model,
        device=given.device,
        dtype=given.dtype,
        max_seq_len=given.max_seq_len,
        prompt_tokens=tokens,
        max_tokens=given.tokens,
        runs=given.runs,
    )


def answer(given: Namespace) -> None:
    """Prints the spread of the round trips."""
    found = inside.echo(given.device, rounds=given.rounds)
    text = ", ".join(f"{name} {us:.2f}" for name, us in found.items())
    print(json.dumps(found) if given.json else f"{given.rounds} round trips in us: {text}")


def compare(given: Namespace) -> int:
    """Prints each change; 1 if one is worse than the threshold allows."""
    worse, changes = 0, judge(_read(given.before), _read(given.after))
    heading = f"{'prompt':>8}  {'quantity':<28}{'before':>12}{'after':>12}{'better':>9}"
    print(heading)
    for change in changes:
        bad = change.worse_by > given.threshold
        worse += bad
        mark = "WORSE" if bad else "ok"
        print(
            f"{change.label:>8}  {change.name:<28}{change.before:>12.3f}{change.after:>12.3f}"
            f"{-change.worse_by:>+9.1%}  {mark}"
        )
    return min(worse, 1)


@contextmanager
def _bar(title: str, total: int) -> Generator[Callable[[], object]]:
    """A bar on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as cause:
        raise InvalidRequestError(
            f"{path}: wanted a report as JSON, got {type(cause).__name__}: {cause}",
            hint="write one with `kie bench latency --json FILE`",
        ) from cause
