"""`kie quantize`: a model's folder written again with the matrices of its layers quantised."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from kie.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kie.engine import Engine

WINDOW = 512
"""Most tokens that are read at a time; each window begins without a past."""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser)
    parser.add_argument("out", help="the new folder; it must not exist")
    parser.add_argument("--to", required=True, metavar="SCHEME", help="fp8, int4 or mxfp4")
    parser.add_argument("--revision", metavar="REV", help="of a hub id: branch, tag or commit")
    parser.add_argument(
        "--eval",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts whose perplexity before and after is printed",
    )
    options.verb(parser, quantize)


def quantize(given: Namespace) -> None:
    """Writes the folder; prints what it saved, and with --eval what it costs."""
    from kie.engine import Engine, quantize_folder

    texts = [options.text_of("--eval", path) for path in given.eval or ()]
    with options.loading() as progress:
        note = quantize_folder(
            given.model, given.out, to=given.to, revision=given.revision, progress=progress
        )
    print(note)
    if not texts:
        return
    for name, model, revision in (
        ("before", given.model, given.revision),
        ("after", given.out, None),
    ):
        with Engine(model, revision=revision, device="cpu", prefix_cache=False) as engine:
            tokens, value = perplexity(engine, texts)
        print(f"perplexity {name:6} {value:.4f} over {tokens} tokens")
        sys.stdout.flush()


def perplexity(engine: Engine, texts: Sequence[str]) -> tuple[int, float]:
    """How many tokens of the texts were guessed, and e to the mean of their losses in nats.

    Each text is cut into windows of `WINDOW` tokens, whose first token is given.
    """
    import numpy as np

    window = min(WINDOW, int(engine.info()["context"]))
    count, loss = 0, 0.0
    for text in texts:
        ids = engine.tokenize(text)
        for begin in range(0, len(ids) - 1, window):
            part = ids[begin : begin + window]
            logits = engine.logits(part)[:-1].astype(np.float64)
            most = logits.max(axis=1)
            total = np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most
            wanted = logits[np.arange(len(part) - 1), part[1:]]
            count += len(part) - 1
            loss += float((total - wanted).sum())
    return count, math.exp(loss / max(count, 1))
