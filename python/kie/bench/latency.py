"""One request at a time: `latency` at one point, `sweep` over prompt lengths.

Each prompt is random from its first token on; a request that still hits the cache is an error of
the measurement and is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kie.bench.measure import Run, fresh, pool, request
from kie.errors import KieError

if TYPE_CHECKING:
    from kie.engine import Engine


def measure(
    engine: Engine,
    *,
    prompt_tokens: Sequence[int],
    max_tokens: int,
    runs: int,
    warmups: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    step: Callable[[], object] = lambda: None,
) -> list[Run]:
    """`runs` requests at each prompt length, the lengths interleaved, after `warmups` of each.

    `step` is called after every request. End-of-sequence ids do not stop a request.
    """
    ids, source = pool(engine), random.Random(seed)
    measured: list[Run] = []
    for turn in range(warmups + runs):
        for tokens in prompt_tokens:
            run = request(
                engine,
                fresh(ids, tokens, source),
                str(tokens),
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                ignore_eos=True,
            )
            # Two random prompts may share a token by chance, not a page of them.
            if run.cached_tokens * 4 > tokens:
                raise KieError(
                    f"{run.cached_tokens} of {tokens} prompt tokens came from the cache",
                    hint="measure with another seed, or on an engine nobody else uses",
                )
            if turn >= warmups:
                measured.append(run)
            step()
    return measured
