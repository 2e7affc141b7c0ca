"""`kie chat`: turns of a conversation, their KV kept."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from kie.cli import options
from kie.cli.run import rate_line

if TYPE_CHECKING:
    from kie.stream import Stream

HELP = "/undo forgets the last turn, /reset all of them, /exit or Ctrl-D ends"


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    options.model(parser, "-m", "--model")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    options.engine(parser)
    options.sampling(parser)
    options.verb(parser, chat)


def chat(given: Namespace) -> int:
    """One turn a line; without a chat template, plain text goes on turn by turn.

    A line that is refused (too long, say) is told and is no turn; 1 where there was one.
    """
    from kie.cli import report_error
    from kie.errors import InvalidRequestError

    refused = 0
    asks = sys.stdin.isatty()
    keywords = options.sampling_options(given)
    with (
        options.opened(given.model, max_batch=1, **options.engine_options(given)) as engine,
        engine.session(given.system) as session,
    ):
        if asks:
            print(HELP, file=sys.stderr)
        while (line := _line(asks)) not in (None, "/exit"):
            if line == "/undo":
                session.rollback(max(session.turns - 1, 0))
            elif line == "/reset":
                session.rollback(0)
            elif line and line.strip():
                try:
                    with session.stream(line, **keywords) as stream:
                        _answer(stream, asks)
                except InvalidRequestError as error:
                    report_error(error)
                    refused = 0 if asks else 1
    return refused


def _answer(stream: Stream, asks: bool) -> None:
    """Prints one answer; on a terminal the first Ctrl-C ends it, not the conversation."""
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


def _line(asks: bool) -> str | None:
    """The next line without its end, None at the end of the input."""
    if asks:
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
