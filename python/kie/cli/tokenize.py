"""`kie tokenize`: the ids of a text."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from kie.cli import options


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("text", nargs="?", help="the text; default: what is piped in")
    options.model(parser, "-m", "--model")
    parser.add_argument(
        "--no-special", action="store_true", help="without the special tokens in front"
    )
    parser.add_argument("--json", action="store_true", help="print the ids as JSON")
    options.verb(parser, tokenize)


def tokenize(given: Namespace) -> None:
    """Prints each id with its piece."""
    text = options.read_prompt(given.text)
    with options.opened(given.model, device="cpu") as engine:
        ids = engine.tokenize(text, add_special=not given.no_special)
        pieces = [engine.detokenize([token], skip_special=False) for token in ids]
    if given.json:
        print(json.dumps(ids))
        return
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>8}  {piece!r}")
