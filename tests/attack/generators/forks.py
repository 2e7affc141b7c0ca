"""Children made by fork at random moments: they are told so, whatever they touch, and the parent's
answer is the one it would have been.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import TINY

Case = dict[str, Any]
LIMIT_SECONDS = 60.0

TOUCHES = ("generate", "next", "cancel", "turn", "fork", "rollback", "logits", "metrics", "close")
CHILD_S = 30.0
PROMPT = [5, 6, 7]
ANSWER = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def cases(random: Random) -> Iterator[Case]:
    """How many tokens the parent reads before it forks, and what its child touches."""
    while True:
        count = random.randrange(1, 5)
        yield {
            "read": random.choice((0, 1, 5, 39, 40)),
            "children": random.choice((1, 1, 2, 4)),
            "touches": [random.choice(TOUCHES) for _ in range(count)],
        }


def wrong(touches: list[str], engine: kie.Engine, stream: kie.Stream, chat: kie.Session) -> int:
    """The child: how many of the calls did anything but say that this is a fork."""
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(PROMPT, **ANSWER),
        "next": lambda: next(stream),
        "cancel": stream.cancel,
        "turn": lambda: chat.stream("a", **ANSWER),
        "fork": chat.fork,
        "rollback": lambda: chat.rollback(to=0),
        "logits": lambda: engine.logits(PROMPT),
        "metrics": engine.metrics,
        "close": engine.close,
    }
    count = 0
    for touch in touches:
        try:
            calls[touch]()
        except kie.KieError as error:
            count += error.code not in ("forked", "closed")
        except StopIteration:
            pass
        else:
            # These neither wait for the parent's threads nor change what is the parent's.
            count += touch in ("generate", "turn", "logits")
    return count


def ended(child: int) -> int:
    """How a child ended; one that hangs is a finding."""
    until = time.monotonic() + CHILD_S
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


def run(case: Case, folder: Path) -> None:
    """Forks in the middle of an answer."""
    global ENGINE, WANTED
    if ENGINE is None:
        ENGINE = kie.Engine(TINY, device="cpu", threads=1, max_batch=2)
        WANTED = ENGINE.generate(PROMPT, **ANSWER).token_ids
    chat = ENGINE.session()
    with ENGINE.stream(PROMPT, **ANSWER) as stream:
        ids = [next(stream).token_ids[0] for _ in range(case["read"])]
        children = []
        for _ in range(case["children"]):
            child = os.fork()
            if child == 0:
                code = 99
                try:
                    code = wrong(case["touches"], ENGINE, stream, chat)
                finally:
                    os._exit(code)
            children.append(child)
        codes = [ended(child) for child in children]
        ids += [id for token in stream for id in token.token_ids]
    assert codes == [0] * len(codes), f"children ended with {codes}"
    assert tuple(ids) == WANTED
    assert len(chat.stream("a", **ANSWER).result().token_ids) == ANSWER["max_tokens"]


ENGINE: kie.Engine | None = None
WANTED: tuple[int, ...] | None = None
