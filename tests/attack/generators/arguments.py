"""Calls with arguments of every kind, odd sizes and odd types, on a live engine.

Each ends with a result, a typed error or a TypeError that names the argument, and the engine
answers the same afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import TINY

Case = dict[str, Any]
LIMIT_BYTES = 6 << 30
LIMIT_SECONDS = 90.0

VALUES = (
    *("None", "True", "0", "1", "-1", "5", "2**31", "2**64", "10**30", "0.0", "0.5", "-0.5"),
    *("1e308", "float('nan')", "float('inf')", "''", "'a'", "'\\ud800'", "b'a'", "[]", "[1]"),
    *("[-1]", "['a']", "[1, None]", "[True]", "range(3)", "range(10**12)", "itertools.count()"),
    *("itertools.repeat('a')", "{}", "{1: 2.0}", "{1: None}", "{'a': 1}", "object()", "iter([1])"),
    *("(x for x in 'ab')", "...", "[[1]]", "{1, 2}", "'a' * 100000", "[1] * 100000", "type"),
    *("len", "float", "Endless()"),
)
NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
    *("presence_penalty", "frequency_penalty", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("seed", "logprobs", "logit_bias", "timeout", "nonsense"),
)
CALLS = ("generate", "stream", "logits", "tokenize", "detokenize", "apply_chat_template", "session",
         "messages", "open")  # fmt: skip
OPTIONS = ("device", "dtype", "max_seq_len", "max_batch", "max_queue", "kv_bytes", "threads",
           "prefix_cache", "idle", "max_itl_ms", "max_launch_ms", "hang_timeout_s",
           "cache_dir")  # fmt: skip


class Endless:
    """Says that it is short and never ends."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(1)


def cases(random: Random) -> Iterator[Case]:
    """A call and its arguments, as Python."""
    while True:
        count = random.choice((0, 1, 1, 2))
        yield {
            "call": random.choice(CALLS),
            "value": random.choice(VALUES),
            "keywords": {random.choice(NAMES): random.choice(VALUES) for _ in range(count)},
            "options": {random.choice(OPTIONS): random.choice(VALUES)},
        }


def value(text: str) -> Any:
    """What a case's text stands for."""
    return eval(text, {"itertools": itertools, "Endless": Endless})


def run(case: Case, folder: Path) -> None:
    """Calls, then asks for what is known."""
    global ENGINE
    if ENGINE is None:
        ENGINE = kie.Engine(TINY, device="cpu", threads=1, max_batch=2)
    keywords = {name: value(text) for name, text in case["keywords"].items()}
    keywords.setdefault("max_tokens", 3)
    first = value(case["value"])
    try:
        match case["call"]:
            case "generate":
                ENGINE.generate(first, **keywords)
            case "stream":
                with ENGINE.stream(first, **keywords) as stream:
                    next(stream)
            case "messages":
                ENGINE.generate(messages=first, **keywords)
            case "logits":
                ENGINE.logits(first, path="decode")
            case "session":
                ENGINE.session(first).fork()
            case "open":
                options = {name: value(text) for name, text in case["options"].items()}
                kie.Engine(TINY, **({"device": "cpu"} | options)).close()
            case name:
                getattr(ENGINE, name)(first)
    except StopIteration:
        pass
    except (kie.KieError, TypeError) as error:
        if not str(error):
            raise
    done = ENGINE.generate([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True)
    assert WANTED is None or done.token_ids == WANTED
    remember(done.token_ids)


ENGINE: kie.Engine | None = None
WANTED: tuple[int, ...] | None = None


def remember(ids: tuple[int, ...]) -> None:
    """What the engine answered first."""
    global WANTED
    WANTED = ids
