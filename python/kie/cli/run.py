"""`kie run`: one prompt; the text streams to standard output, a rate line to standard error."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from kie.cli import options
from kie.types import Completion

if TYPE_CHECKING:
    from kie.stream import Stream

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("prompt", nargs="?", help="the text to continue; default: what is piped in")
    options.model(parser, "-m", "--model")
    options.engine(parser)
    options.sampling(parser)
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message, through the chat template"
    )
    parser.add_argument(
        "--json-schema", metavar="FILE", help="the text is JSON that is valid by it"
    )
    parser.add_argument("--json", action="store_true", help="print the whole completion as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="no rate line")
    options.verb(parser, run)


def run(given: Namespace) -> None:
    """Streams one completion."""
    text = options.read_prompt(given.prompt)
    keywords = options.sampling_options(given)
    if given.json_schema is not None:
        keywords["grammar"] = options.json_schema(given.json_schema)
    with options.opened(given.model, max_batch=1, **options.engine_options(given)) as engine:
        if given.chat:
            stream = engine.stream(messages=[{"role": "user", "content": text}], **keywords)
        else:
            stream = engine.stream(text, **keywords)
        with stream:
            done = stream.result() if given.json else _show(stream, "" if given.chat else text)
    if given.json:
        print(json.dumps(done.to_dict()))
    if not given.quiet:
        print(rate_line(done), file=sys.stderr)


def _show(stream: Stream, prompt: str) -> Completion:
    """Writes the text as it comes; on a terminal behind its prompt, which is dimmed."""
    if sys.stdout.isatty():
        sys.stdout.write(f"{DIM}{prompt}{PLAIN}")
    for piece in stream.text_stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    done = stream.result()
    if not done.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return done


def rate_line(done: Completion) -> str:
    """What the request cost, in one line."""
    timings, usage = done.timings, done.usage
    parts = [
        f"{usage.prompt_tokens} prompt tokens in {timings.prompt_ms:.1f} ms",
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s",
        f"p99 {timings.itl_p99_us:.0f} us",
        f"seed {done.seed}",
        done.finish_reason,
    ]
    return " · ".join(parts)
