"""`kie chat`: turns of a conversation, their KV kept."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kie.cli import lines, options
from kie.cli.conversation import Conversation
from kie.cli.demo import PROMPTS
from kie.cli.run import rate_line
from kie.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from kie.stream import Stream
    from kie.types import Completion

HELP = """\
/undo          forget the last turn
/reset         forget all of them
/system TEXT   set the system message; without TEXT, remove it
/save FILE     write the conversation
/load FILE     go on with one that was written
/help          print this
/exit, Ctrl-D  end; Ctrl-C stops an answer and keeps the conversation"""

TRY = "\n  ".join(("The default model writes small Python functions. Try:", *PROMPTS[:3]))
THEN = "and then: Now make it ignore zeros."

ROOM = 256
"""Tokens that are left for the answer when the oldest turns are dropped."""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser, "-m", "--model")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    options.engine(parser)
    options.sampling(parser)
    options.verb(parser, chat)


def chat(given: Namespace) -> int:
    """One turn an entry; without a chat template, plain text goes on turn by turn.

    An entry that is refused (too long, say) is told and is no turn; 1 where there was one.
    """
    refused = 0
    asks = sys.stdin.isatty()
    keywords = options.sampling_options(given)
    with options.opened(given.model, max_batch=1, **options.engine_options(given)) as engine:
        if asks:
            print("/help lists commands", file=sys.stderr)
            if given.model is None:
                print(TRY, THEN, sep="\n", file=sys.stderr)
        talk = Conversation(engine, given.system)
        read = lines.reader(asks)
        while True:
            try:
                entry = read()
            except KeyboardInterrupt:
                if not asks:
                    raise
                print("Ctrl-D or /exit ends", file=sys.stderr)
                continue
            if entry is None or entry.strip() == "/exit":
                return refused
            if entry.strip():
                try:
                    refused |= _entry(talk, entry, keywords, asks)
                except KeyboardInterrupt:
                    if not asks:
                        raise
                    print(file=sys.stderr)


def _entry(talk: Conversation, entry: str, keywords: dict[str, Any], asks: bool) -> int:
    """Follows a command or answers; 1 where that was refused and nobody is there to read it."""
    from kie.cli import report_error

    try:
        if entry.startswith("/"):
            _command(talk, entry.strip())
        else:
            _turn(talk, entry, keywords, asks)
    except (InvalidRequestError, OSError) as error:
        report_error(error, "chat")
        return 0 if asks else 1
    return 0


def _command(talk: Conversation, entry: str) -> None:
    word, _, rest = entry.partition(" ")
    rest = rest.strip()
    if word == "/undo":
        del talk.turns[-1:]
    elif word == "/reset":
        talk.turns.clear()
    elif word == "/system":
        talk.system = rest or None
    elif word in ("/save", "/load") and rest:
        (talk.save if word == "/save" else talk.load)(rest)
        print(f"{len(talk.turns)} turns, {rest}", file=sys.stderr)
    elif word == "/help":
        print(HELP, file=sys.stderr)
    else:
        raise InvalidRequestError(f"no such command: {entry}", hint="/help lists them")


def _turn(talk: Conversation, text: str, keywords: dict[str, Any], asks: bool) -> None:
    """A question and its answer. A full context is told; on a terminal the oldest turns can go."""
    try:
        done = answer(talk.ask(text, **keywords), asks)
    except ContextLengthError:
        if not (asks and talk.turns and _agrees(talk)):
            raise
        dropped = talk.shorten(text, keywords["max_tokens"] or ROOM)
        print(f"forgot the oldest turns: {dropped}", file=sys.stderr)
        done = answer(talk.ask(text, **keywords), asks)
    talk.answered(text, done.text)
    if asks and done.finish_reason == "length" and keywords["max_tokens"] is None:
        print("the context is full: the answer ends here", file=sys.stderr)


def _agrees(talk: Conversation) -> bool:
    """Whether the oldest turns may go."""
    print(f"The context is full: {len(talk.turns)} turns and this one.", file=sys.stderr)
    try:
        reply = input("Forget the oldest turns, as many as it takes? [Y/n] ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return False
    return reply.strip().lower() in ("", "y", "yes")


def answer(stream: Stream, asks: bool) -> Completion:
    """Prints one answer; on a terminal the first Ctrl-C ends it, not the conversation."""
    with stream:
        try:
            for piece in stream.text_stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not asks:
                raise
            stream.cancel()
        done = stream.result()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if asks:
        print(rate_line(done), file=sys.stderr)
    return done
