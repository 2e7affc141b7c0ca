"""`kie compile`: a model's kernels, compiled into the cache ahead of its first use."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace

from kie.cli import options


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser, nargs="?")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, ...")
    parser.add_argument("--dtype", default="auto", help="auto, f32, f16, bf16, fp8, int4 or mxfp4")
    parser.add_argument("--exact", action="store_true", help="as in float32, slower")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="longest sequence, tokens")
    options.verb(parser, compile_model)


def compile_model(given: Namespace) -> None:
    """Compiles, prints the plan and how long it took."""
    from kie.engine import compile_ahead

    start = time.monotonic()
    names = ("device", "dtype", "exact", "max_seq_len")
    plan = compile_ahead(given.model, **{name: getattr(given, name) for name in names})
    print(plan, end="")
    print(f"compiled in {time.monotonic() - start:.1f} s", file=sys.stderr)
