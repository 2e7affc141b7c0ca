"""Options that several verbs share, and what goes with them."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kie.errors import InvalidRequestError
from kie.files import read_text

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kie.engine import Engine
    from kie.grammar import JsonSchema


def verb(parser: ArgumentParser, call: Callable[[Namespace], int | None]) -> None:
    """What every verb has: the function behind it, and `-v`."""
    parser.set_defaults(call=call)
    parser.add_argument("-v", "--verbose", action="store_true", help="on error, show the chain")


def model(parser: ArgumentParser, *names: str, **how: Any) -> None:
    """The model, as an option or, without names, as the first argument."""
    how["help"] = "folder or hub id; default: the model of the package"
    parser.add_argument(*(names or ("model",)), **how)


def engine(parser: ArgumentParser) -> None:
    """How an engine is opened; `engine_options` reads it."""
    parser.add_argument("--revision", metavar="REV", help="of a hub id: branch, tag or commit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    parser.add_argument("--dtype", default="auto", help="auto, f32, f16, bf16, fp8, int4 or mxfp4")
    parser.add_argument("--exact", action="store_true", help="on a GPU: as in float32, slower")
    parser.add_argument(
        "--mtp", action="store_true", help="with layers that predict further tokens"
    )
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapter (PEFT), merged at load")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="longest sequence, tokens")
    parser.add_argument(
        "--max-launch-ms", type=float, metavar="MS", help="a GPU with a display: longest launch"
    )


def engine_options(given: Namespace) -> dict[str, Any]:
    """Keywords for `opened` from what `engine` defined."""
    names = "revision device dtype exact mtp adapter threads max_seq_len max_launch_ms"
    opening = {name: getattr(given, name) for name in names.split()}
    # Who wants drafts of those layers wants the layers.
    return opening | {"mtp": given.mtp or getattr(given, "speculate", None) == "mtp"}


def sampling(parser: ArgumentParser) -> None:
    """How tokens are chosen; `sampling_options` reads it."""
    parser.add_argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens")
    parser.add_argument("-t", "--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="probability mass to choose from")
    parser.add_argument("--top-k", type=int, metavar="K", help="tokens to choose from; 0: all")
    parser.add_argument("--min-p", type=float, metavar="P", help="least share of the best's")
    parser.add_argument("--seed", type=int, metavar="N", help="key of the random numbers")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends it; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the model's end")
    penalty = "of tokens that were there: above 1 against them"
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help=penalty)
    for name in ("presence", "frequency"):
        line = f"taken from generated tokens' logits, by {name}"
        parser.add_argument(f"--{name}-penalty", type=float, default=0.0, metavar="X", help=line)
    parser.add_argument(
        "--stop-token-id", type=int, action="append", default=[], metavar="ID", help="ends it, too"
    )
    parser.add_argument("--min-tokens", type=int, default=0, metavar="N", help="least tokens")
    parser.add_argument("--logprobs", type=int, metavar="K", help="with K alternatives (--json)")
    parser.add_argument(
        "--logit-bias", type=biased, action="append", default=[], metavar="ID=X", help="repeatable"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which it ends")
    parser.add_argument(
        "--speculate", choices=["lookup", "mtp"], help="steps check drafts: the same tokens sooner"
    )


def biased(text: str) -> tuple[int, float]:
    """`ID=X` of --logit-bias."""
    name, _, value = text.partition("=")
    return int(name), float(value)


SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logprobs",
    "timeout",
    "speculate",
)


def sampling_options(given: Namespace) -> dict[str, Any]:
    """Sampling keywords from what `sampling` defined."""
    keywords: dict[str, Any] = {name: getattr(given, name) for name in SAMPLING}
    return {
        **keywords,
        "stop_token_ids": given.stop_token_id,
        "logit_bias": dict(given.logit_bias) or None,
    }


def json_schema(file: str) -> JsonSchema:
    """The grammar of --json-schema."""
    from kie.grammar import JsonSchema

    return JsonSchema(text_of("--json-schema", file))


def text_of(option: str, file: str | Path) -> str:
    """The text of the file that an option names."""
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{option} {file}: {error}") from error


@contextmanager
def opened(model: str | None, **options: Any) -> Generator[Engine]:
    """An engine, loaded with a progress bar where someone is looking."""
    from kie.engine import Engine

    with loading() as progress, Engine(model, progress=progress, **options) as engine:
        if progress is not None:
            progress("", 1, 1)
        if options.get("dtype", "auto") != "auto":
            lines = engine.info()["plan"].splitlines()
            told = [line for line in lines if line.startswith("converted ")]
            print(*told, sep="\n", end="\n" if told else "", file=sys.stderr)
        yield engine


@contextmanager
def loading() -> Generator[Callable[[str, int, int], None] | None]:
    """A progress callback that draws one line on a terminal, else None.

    Drawn by hand: importing `rich` would come before the first token.
    """
    if not sys.stderr.isatty():
        yield None
        return
    drawn = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal drawn
        width = 24
        filled = width * done // total if total else width
        line = f"{stage:<12} [{'=' * filled}{' ' * (width - filled)}]" if stage else ""
        if line != drawn:
            drawn = line
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        show("", 0, 0)


def read_prompt(prompt: str | None) -> str:
    """The prompt; standard input for `-`, and where none is given and something is piped in.

    Raises InvalidRequestError where nothing is given and nothing comes.
    """
    if prompt is not None and prompt != "-":
        return prompt
    waits = prompt is None and sys.stdin.isatty()
    text = "" if waits else sys.stdin.buffer.read().decode(errors="surrogateescape")
    if prompt is None and not text:
        raise InvalidRequestError(
            "no text is given",
            hint="pass one, or pipe it in; `kie chat` is for typing",
            context={"param": "prompt"},
        )
    return text


def at_least_one(text: str) -> int:
    """A number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def port(text: str) -> int:
    """A TCP port; 0: a free one."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise ArgumentTypeError(f"{text!r} is no port (0 to 65535)")
    return int(text)
