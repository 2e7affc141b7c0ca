"""Random histories of requests, sessions, forks, rollbacks and cancels: every answer is that of an
engine that remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import model

Case = dict[str, Any]
LIMIT_SECONDS = 120.0

STEPS = ("ask", "ask", "turn", "turn", "fork", "rollback", "cancel", "together")
VOCAB = 512


def cases(random: Random) -> Iterator[Case]:
    """A seed draws the steps, so that a case is small."""
    while True:
        yield {"seed": random.randrange(2**32), "steps": random.randrange(4, 14)}


class Life:
    """One warm engine, and what was said to it."""

    def __init__(self, source: Random, folder: Path) -> None:
        # Without a template a session takes ids.
        tiny = model(folder, {"tokenizer_config.json": {"chat_template": None}})
        self.source = source
        self.warm = kie.Engine(tiny, device="cpu", threads=1, max_batch=3)
        self.cold = kie.Engine(tiny, device="cpu", threads=1, max_batch=1, prefix_cache=False)
        self.said: list[list[int]] = [[]]
        self.chats: list[tuple[kie.Session, list[list[int]]]] = []

    def prompt(self) -> list[int]:
        """A beginning that was there before, cut anywhere or near a page's edge, and more."""
        past = self.source.choice(self.said)
        edge = 64 * self.source.randrange(4) + self.source.randrange(-1, 2)
        kept = self.source.choice((len(past), max(0, edge), self.source.randrange(len(past) + 1)))
        more = self.source.choice((1, 3, 63, 64, 90))
        return past[: min(kept, 160)] + [self.source.randrange(VOCAB) for _ in range(more)]

    def options(self) -> dict[str, Any]:
        """Of an answer."""
        return {
            "temperature": self.source.choice((0.0, 0.8)),
            "seed": self.source.randrange(1000),
            "max_tokens": self.source.choice((1, 2, 30, 66)),
            "ignore_eos": True,
        }

    def same(self, ids: list[int], options: dict[str, Any], got: tuple[int, ...]) -> None:
        """Compares with the engine that remembers nothing."""
        wanted = self.cold.generate(ids, **options).token_ids
        assert got == wanted, f"prompt of {len(ids)}, {options}: {got} {wanted}"
        self.said.append(ids + list(got))

    def step(self, name: str) -> None:
        """One of STEPS."""
        options, ids = self.options(), self.prompt()
        if name in ("turn", "fork", "rollback") and not self.chats:
            self.chats.append((self.warm.session(), [[]]))
        match name:
            case "ask":
                self.same(ids, options, self.warm.generate(ids, **options).token_ids)
            case "cancel":
                with self.warm.stream(ids, **options) as stream:
                    next(stream)
            case "together":
                asked = [(self.prompt(), self.options()) for _ in range(3)]
                streams = [self.warm.stream(ids, **options) for ids, options in asked]
                for (ids, options), stream in zip(asked, streams, strict=True):
                    self.same(ids, options, stream.result().token_ids)
            case "turn":
                chat, turns = self.source.choice(self.chats)
                if len(turns[-1]) > 200:
                    return
                got = chat.stream(ids[-90:], **options).result().token_ids
                whole = turns[-1] + ids[-90:]
                self.same(whole, options, got)
                turns.append(whole + list(got))
            case "fork":
                chat, turns = self.source.choice(self.chats)
                self.chats.append((chat.fork(), list(turns)))
            case _:
                chat, turns = self.source.choice(self.chats)
                to = self.source.randrange(len(turns))
                chat.rollback(to=to)
                del turns[to + 1 :]


def run(case: Case, folder: Path) -> None:
    """Lives it."""
    source = Random(case["seed"])
    life = Life(source, folder)
    with life.warm, life.cold:
        for _ in range(case["steps"]):
            life.step(source.choice(STEPS))
