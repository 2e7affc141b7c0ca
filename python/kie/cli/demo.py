"""`kie demo`: the model of the package answers prompts that suit it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator

from kie.cli import lines, options

PROMPTS = (
    "Write a function that returns the sum of the squares of the even numbers in a list.",
    "Write a function that returns the words of a text that are longer than three letters, sorted.",
    "Write a function that counts the negative numbers in a list.",
    "Write a function that returns the word that occurs most often in a list of words.",
)
"""What the default model answers rightly; a test runs the answers."""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    text = "answer prompt N and end; default: on a terminal offer them, elsewhere answer the first"
    parser.add_argument("prompt", nargs="?", type=numbered, metavar="N", help=text)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    options.verb(parser, demo)


def numbered(text: str) -> str:
    """The prompt of a number."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= len(PROMPTS)):
        raise ArgumentTypeError(f"{text!r} is no prompt: wanted 1 to {len(PROMPTS)}")
    return PROMPTS[int(text) - 1]


def demo(given: Namespace) -> None:
    """Answers one prompt, or on a terminal one after the other."""
    from kie.cli.chat import answer
    from kie.cli.run import rate_line

    asks = given.prompt is None and sys.stdin.isatty()
    with options.opened(None, device=given.device, max_batch=1) as engine:
        for prompt in _chosen() if asks else [given.prompt or PROMPTS[0]]:
            print(f"{prompt}\n", file=sys.stderr)
            stream = engine.stream(messages=[{"role": "user", "content": prompt}], temperature=0)
            done = answer(stream, asks)
            if not asks:
                print(rate_line(done), file=sys.stderr)


def _chosen() -> Iterator[str]:
    """Prompts that are chosen by their numbers, or typed."""
    print("The default model writes small Python functions:", file=sys.stderr)
    for number, prompt in enumerate(PROMPTS, 1):
        print(f"  {number}  {prompt}", file=sys.stderr)
    print("Type a number, or a request of your own; Ctrl-D ends.", file=sys.stderr)
    read = lines.reader(True)
    while (entry := read()) is not None:
        try:
            yield numbered(entry.strip())
        except ArgumentTypeError:
            if entry.strip():
                yield entry
