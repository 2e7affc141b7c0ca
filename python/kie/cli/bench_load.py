"""`kie bench serve`, `layers`, `mixed`, `soak` and `coldstart`."""

from __future__ import annotations

import asyncio
import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kie.bench import chart, coldstart, layers, mixed, report, served, soak
from kie.cli import options
from kie.errors import KieError


def define(verbs: Any) -> None:
    """Defines these kinds of bench below `verbs`."""
    _define_serve(_kind(verbs, "serve", serve, "load over HTTP on kie serve or any other server"))
    line = "the same request through device, Rust, Python and HTTP, in one run"
    parser = _kind(verbs, "layers", through_layers, line)
    parser.add_argument("--base-url", metavar="URL", help="a server of the same model, with /v1")
    parser.add_argument("--api-key", metavar="KEY")
    _numbers(parser, prompt=128, tokens=256, runs=5)
    parser = _kind(verbs, "mixed", beside, "a victim that decodes beside an attacker's prompts")
    parser.add_argument(
        "--attacker-prompt", type=options.at_least_one, default=1024, metavar="N", help="tokens"
    )
    parser.add_argument(
        "--max-itl-ms", type=options.above_zero, metavar="MS", help="longest gap of the victim"
    )
    _numbers(parser, tokens=256, runs=3)
    parser = _kind(verbs, "soak", endure, "requests for a long time: memory, rate, same answers")
    parser.add_argument("--seconds", type=options.above_zero, default=60, metavar="S")
    _numbers(parser, tokens=64)
    parser = _kind(verbs, "coldstart", start, "process start to first token, phase by phase")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache")
    _numbers(parser, runs=5)


def _kind(
    verbs: Any, name: str, call: Callable[[Namespace], int | None], line: str
) -> ArgumentParser:
    parser: ArgumentParser = verbs.add_parser(name, help=line, description=line)
    options.model(parser, nargs="?")
    options.engine(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; - prints it")
    parser.add_argument("--seed", type=int, default=0, help="key of prompts and arrivals")
    options.verb(parser, call)
    return parser


def _numbers(
    parser: ArgumentParser,
    prompt: int | None = None,
    tokens: int | None = None,
    runs: int | None = None,
) -> None:
    if prompt is not None:
        parser.add_argument(
            "-p", "--prompt", type=options.at_least_one, default=prompt, metavar="N"
        )
    if tokens is not None:
        parser.add_argument(
            "-n", "--tokens", type=options.at_least_one, default=tokens, metavar="N"
        )
    if runs is not None:
        parser.add_argument("--runs", type=options.at_least_one, default=runs, metavar="N")


def _define_serve(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--base-url", metavar="URL", help="a running server, with /v1; default: starts kie serve"
    )
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--served-model", metavar="NAME", help="default: the first it names")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument(
        "--requests", type=options.at_least_one, default=32, metavar="N", help="a point"
    )
    parser.add_argument(
        "-c", "--concurrency", type=several, default=[1, 2, 4, 8], metavar="N,N,..."
    )
    parser.add_argument("--rate", type=rates, metavar="R,R,...", help="open loop: requests/s")
    parser.add_argument("--ignore-eos", action="store_true", help="all answers have all tokens")
    parser.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="more fields")
    parser.add_argument(
        "--timeout", type=options.above_zero, default=600, metavar="S", help="of a request"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw a .png or .svg")
    parser.add_argument("--csv", action="store_true", help="print the table as CSV")
    parser.add_argument("--md", action="store_true", help="print the table as Markdown")
    _numbers(parser, prompt=64, tokens=128)


def several(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [options.at_least_one(word) for word in text.split(",")]


def rates(text: str) -> list[float]:
    """Rates above 0 separated by commas."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise ArgumentTypeError(f"{text!r} is no list of rates above 0")
    return found


def _words(given: Namespace) -> list[str]:
    """The words for `kie serve` that open the same engine."""
    words = [given.model] if given.model else []
    for name, value in options.engine_options(given).items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value not in (None, False):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def serve(given: Namespace) -> int:
    """Measures each point, writes and prints the report; 1 if a request failed."""
    with ExitStack() as stack:
        base_url = given.base_url
        if base_url is None:
            base_url = stack.enter_context(layers.serving(_words(given))) + "/v1"
        found = asyncio.run(_serve(given, base_url))
    if given.chart is not None:
        chart.draw(found, given.chart)
    columns = served.COLUMNS
    if given.csv:
        text = report.comma_separated(found, columns)
    elif given.md:
        text = report.markdown(found, columns)
    else:
        text = report.plain(found, columns)
    _write(given, found, text)
    return min(1, found["summary"]["failed"])


async def _serve(given: Namespace, base_url: str) -> dict[str, Any]:
    extra = {**({"ignore_eos": True} if given.ignore_eos else {}), **given.extra}
    load = served.Load(
        requests=given.requests,
        prompt_words=given.prompt,
        max_tokens=given.tokens,
        endpoint=given.endpoint,
        seed=given.seed,
        extra=extra,
    )
    points: dict[str, tuple[Sequence[served.Call], float]] = {}
    loads: Sequence[float] = given.rate or given.concurrency
    async with served.connect(base_url, given.api_key, given.timeout) as client:
        model = given.served_model or await served.model_of(client)
        for number, one in enumerate(loads):
            # Other prompts at every point, or the second would find the first one's.
            asked = served.Load(**{**_fields(load), "seed": given.seed + 1000 * number})
            begun = time.perf_counter()
            way = served.opened if given.rate else served.closed
            calls = await way(client, model, asked, one)  # pyright: ignore[reportArgumentType]
            label = f"{one:g}/s" if given.rate else f"{one:g}"
            points[label] = (calls, time.perf_counter() - begun)
    config = {"kind": "open" if given.rate else "closed", "loads": list(loads), **_fields(load)}
    return served.document(points, config, {"base_url": base_url, "model": model})


def _fields(load: served.Load) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(load)


def through_layers(given: Namespace) -> None:
    """Prints a row a layer."""
    with ExitStack() as stack:
        base_url = given.base_url
        if base_url is None:
            base_url = stack.enter_context(layers.serving(_words(given))) + "/v1"
        engine = stack.enter_context(options.opened(given.model, **options.engine_options(given)))
        config = {
            "prompt_tokens": given.prompt,
            "max_tokens": given.tokens,
            "runs": given.runs,
            "seed": given.seed,
        }
        found = layers.measure(engine, base_url, api_key=given.api_key, **config)
        opening = report.opening(config, {"engine": engine.info()})
    _write(given, opening | {"layers": found}, layers.markdown(found))


def beside(given: Namespace) -> None:
    """Prints the victim's gaps alone and beside, and the attacker's time to first token."""
    opening = {**options.engine_options(given), "max_itl_ms": given.max_itl_ms}
    config = {
        "victim_tokens": given.tokens,
        "attacker_prompt": given.attacker_prompt,
        "runs": given.runs,
        "seed": given.seed,
    }
    with options.opened(given.model, **opening) as engine:
        begun = time.monotonic()
        runs = mixed.measure(engine, **config)
        seconds = time.monotonic() - begun
        settings = {"model": given.model, **opening, **config}
        found = report.document(runs, settings, engine.info(), duration_s=seconds)
    _write(given, found, report.plain(found))


def endure(given: Namespace) -> None:
    """Prints what became of memory, rate and answers; fails where answers differ."""
    opening = options.engine_options(given)
    config = {"seconds": given.seconds, "max_tokens": given.tokens, "seed": given.seed}
    with options.opened(given.model, **opening) as engine:
        begun = time.monotonic()
        runs, health = soak.measure(engine, **config)
        seconds = time.monotonic() - begun
        settings = {"model": given.model, **opening, **config}
        found = report.document(runs, settings, engine.info(), duration_s=seconds)
    _write(given, found | {"soak": health}, soak.plain(health))
    if health["fixed_answers"] != 1:
        raise KieError(f"the fixed request had {health['fixed_answers']} different answers")


def start(given: Namespace) -> None:
    """Prints the time of each phase."""
    opening = {"model": given.model, **options.engine_options(given)}
    phases = coldstart.measure(opening, runs=given.runs, cold=given.cold)
    summary = coldstart.summary(phases)
    config = {**opening, "runs": given.runs, "cold": given.cold}
    found = report.opening(config, {}) | {"runs": phases, "summary": summary}
    _write(given, found, coldstart.plain(summary))


def _write(given: Namespace, found: Mapping[str, Any], text: str) -> None:
    """The report where `--json` says, and the text unless the report is printed."""
    if given.json is not None and str(given.json) == "-":
        print(json.dumps(found))
        return
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")
    print(text)
