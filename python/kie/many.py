"""Many requests of one caller, in order, without filling the engine's queue."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

from kie.errors import QueueFullError
from kie.stream import Stream
from kie.types import Completion, Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from kie.engine import Engine

AGAIN_S = 0.005
"""Time between two tries where the queue is full of other callers' requests."""


def generate_many(
    engine: Engine,
    prompts: Iterable[str | Sequence[int] | Sequence[Message]],
    keywords: Mapping[str, Any],
    progress: bool,
) -> list[Completion]:
    """See `Engine.generate_many`."""
    if isinstance(prompts, str):
        raise TypeError("prompts must be a sequence of prompts, got str")
    asked = list(prompts)
    info = engine.info()
    # Enough that a slot which becomes free finds the next one there.
    most = info["max_batch"] + min(info["max_batch"], info["max_queue"])
    done: list[Completion] = []
    running: deque[Stream] = deque()
    with ExitStack() as open_streams, _bar(progress, len(asked)) as advance:

        def finish() -> None:
            done.append(running.popleft().result())
            advance()

        for prompt in asked:
            if len(running) == most:
                finish()
            while (stream := _start(engine, prompt, keywords)) is None:
                if running:
                    finish()
                else:
                    time.sleep(AGAIN_S)
            running.append(open_streams.enter_context(stream))
        while running:
            finish()
    return done


def _start(
    engine: Engine,
    prompt: str | Sequence[int] | Sequence[Message],
    keywords: Mapping[str, Any],
) -> Stream | None:
    """The request, None where the queue is full."""
    try:
        # The engine names what is no prompt at all.
        is_list = isinstance(cast("object", prompt), Sequence) and not isinstance(prompt, str)
        if is_list and prompt and isinstance(prompt[0], Mapping):
            return engine.stream(messages=cast("Sequence[Message]", prompt), **keywords)
        return engine.stream(cast("str | Sequence[int]", prompt), **keywords)
    except QueueFullError:
        return None


@contextmanager
def _bar(wanted: bool, total: int) -> Generator[Callable[[], None]]:
    """Draws how many are done, where that is wanted."""
    if not wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as drawn:
        task = drawn.add_task("generate", total=total)
        yield lambda: drawn.advance(task)
