"""A stream in a notebook: text that grows in place, and a line of rates when it has ended.

IPython is there wherever this is called; kie does not depend on it.
"""

from __future__ import annotations

import html
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kie.stream import Stream
    from kie.types import Completion

DRAW_EVERY_S = 0.05
"""Time between two pictures: a browser shows no more, and a token takes less."""


def show(stream: Stream) -> None:
    """Reads the stream to its end and shows it meanwhile."""
    display: Any = import_module("IPython.display")
    text, drawn = "", time.monotonic()
    handle = display.display(display.HTML(page(text, None)), display_id=True)
    try:
        for piece in stream.text_stream:
            text += piece
            if time.monotonic() - drawn > DRAW_EVERY_S:
                drawn = time.monotonic()
                handle.update(display.HTML(page(text, None)))
    except KeyboardInterrupt:
        stream.cancel()
    done = stream.result()
    handle.update(display.HTML(page(done.text, done)))


def page(text: str, done: Completion | None) -> str:
    """The picture: the text as it is, and what it cost."""
    from kie.cli.run import rate_line

    below = f"<small>{html.escape(rate_line(done))}</small>" if done is not None else "&#8230;"
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>{below}'
