"""Requests of one length: `latency` at one point, `sweep` over prompt lengths and over how many run
at once.

Each prompt is random from its first token on; a request that still hits the cache is an error of
the measurement and is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

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
    batch: Sequence[int] = (1,),
    step: Callable[[], object] = lambda: None,
) -> list[Run]:
    """`runs` times at each prompt length as many requests at once as `batch` says, the points
    interleaved, after `warmups` of each.

    Each request is a run of its own: rates of neighbours are never added up. `step` is called after
    every point. End-of-sequence ids do not stop a request.
    """
    ids, source = pool(engine), random.Random(seed)
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    measured: list[Run] = []
    for turn in range(warmups + runs):
        for tokens, count in ((tokens, count) for tokens in prompt_tokens for count in batch):
            label = str(tokens) if count == 1 else f"{tokens} x{count}"
            prompts = [fresh(ids, tokens, source) for _ in range(count)]
            found = _at_once(engine, prompts, label, sampling)
            most = max(run.cached_tokens for run in found)
            # Two random prompts may share a token by chance, not a page of them.
            if most * 4 > tokens:
                raise KieError(
                    f"{most} of {tokens} prompt tokens came from the cache",
                    hint="measure with another seed, or on an engine nobody else uses",
                )
            if turn >= warmups:
                measured += found
            step()
    return measured


def _at_once(
    engine: Engine, prompts: list[list[int]], label: str, sampling: dict[str, Any]
) -> list[Run]:
    def one(prompt: list[int]) -> Run:
        return request(engine, prompt, label, ignore_eos=True, **sampling)

    if len(prompts) == 1:
        return [one(prompts[0])]
    with ThreadPoolExecutor(len(prompts), "kie-bench") as threads:
        return list(threads.map(one, prompts))
