"""One measured request, and prompts that no cache has seen.

Gaps are differences of `Token.t_ns`, the moments at which the device chose the tokens; what the
caller saw on top of that is `handover_us`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kie.engine import Engine


@dataclass(frozen=True, slots=True)
class Run:
    """What one request did; times in milliseconds unless the name says otherwise."""

    label: str
    """The point of the sweep that it belongs to."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_ms: float
    """From the call to the first token in the caller's hands."""
    prefill_ms: float
    """From admission to the first token, by the engine's clock."""
    e2e_ms: float
    seed: int
    finish_reason: str
    bytes_per_token: int
    mbu: float
    token_ns: tuple[int, ...]
    """When each token was chosen, in nanoseconds since the first."""
    handover_us: tuple[float, ...]
    """From the device's choice to the caller, each token."""

    @property
    def gaps_us(self) -> list[float]:
        """Gaps between tokens in microseconds, in order."""
        return [(after - before) / 1e3 for before, after in pairwise(self.token_ns)]

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first."""
        gaps = self.gaps_us
        return sum(gaps) / len(gaps) / 1e3 if gaps else 0.0


def request(engine: Engine, prompt: Sequence[int], label: str, **sampling: Any) -> Run:
    """Streams one request and keeps its times."""
    clock = time.monotonic_ns
    chosen: list[int] = []
    arrived: list[int] = []
    start = clock()
    with engine.stream(prompt, **sampling) as stream:
        for token in stream:
            arrived.append(clock())
            chosen.append(token.t_ns)
        done = stream.result()
    end = clock()
    first = chosen[0] if chosen else 0
    return Run(
        label=label,
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached_tokens=done.usage.cached_tokens,
        ttft_ms=(arrived[0] - start) / 1e6 if arrived else 0.0,
        prefill_ms=done.timings.prompt_ms,
        e2e_ms=(end - start) / 1e6,
        seed=done.seed,
        finish_reason=done.finish_reason,
        bytes_per_token=done.timings.bytes_per_token,
        mbu=done.timings.mbu,
        token_ns=tuple(moment - first for moment in chosen),
        handover_us=tuple((a - c) / 1e3 for a, c in zip(arrived, chosen, strict=True)),
    )


def pool(engine: Engine) -> list[int]:
    """Ids that any tokenizer has and that are no special tokens: those of this very file."""
    return sorted(set(engine.tokenize(Path(__file__).read_text(), add_special=False)))


def fresh(ids: Sequence[int], tokens: int, source: random.Random) -> list[int]:
    """A prompt whose very first tokens differ from those of other prompts."""
    return [source.choice(ids) for _ in range(tokens)]
