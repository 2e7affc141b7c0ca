"""A signal at a random moment of a call: the handler's exception ends the call soon, and the engine
answers the same afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import kie

# An import that a signal cuts short cannot be made again: that is not kie's.
import numpy as np  # noqa: F401
from generators._shared import TINY

Case = dict[str, Any]
LIMIT_SECONDS = 60.0

CALLS = ("open", "generate", "stream", "turn", "logits", "tokenize", "template", "close")
SOON_S = 5.0
"""From the signal to the exception, on a busy machine."""
PROMPT = [5, 6, 7]


class Rung(Exception):
    """What the handler raises."""


def cases(random: Random) -> Iterator[Case]:
    """A call and the time until the signal, spread evenly over magnitudes."""
    while True:
        yield {"call": random.choice(CALLS), "after_s": 10 ** random.uniform(-4.5, -0.5)}


def call(name: str, engine: kie.Engine) -> None:
    """Something that takes a while."""
    match name:
        case "open":
            kie.Engine(TINY, device="cpu", threads=1, max_batch=1).close()
        case "generate":
            engine.generate(PROMPT, max_tokens=200, ignore_eos=True)
        case "stream":
            with engine.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
                for _ in stream:
                    pass
        case "turn":
            engine.session().stream(PROMPT, max_tokens=100, ignore_eos=True).result()
        case "logits":
            engine.logits(PROMPT * 60, path="decode")
        case "tokenize":
            engine.tokenize("a b " * 20_000)
        case "template":
            engine.apply_chat_template([{"role": "user", "content": "a"}] * 500)
        case _:
            with contextlib.closing(kie.Engine(TINY, device="cpu", threads=1)) as other:
                other.stream(PROMPT, max_tokens=200, ignore_eos=True)


def run(case: Case, folder: Path) -> None:
    """Calls with a timer set, then asks for what is known."""
    global ENGINE, WANTED
    if ENGINE is None:
        ENGINE = kie.Engine(TINY, device="cpu", threads=1, max_batch=2)
    rang: list[float] = []

    def ring(_number: int, _frame: FrameType | None) -> None:
        rang.append(time.monotonic())
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, case["after_s"])
        with contextlib.suppress(kie.KieError):
            call(case["call"], ENGINE)
        ended = time.monotonic()
    except Rung:
        ended = time.monotonic()
    finally:
        with contextlib.suppress(Rung):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not rang or ended - rang[0] < SOON_S, f"{ended - rang[0]:.1f} s after the signal"
    done = ENGINE.generate(PROMPT, temperature=0, max_tokens=4, ignore_eos=True)
    assert WANTED is None or done.token_ids == WANTED
    WANTED = done.token_ids


ENGINE: kie.Engine | None = None
WANTED: tuple[int, ...] | None = None
