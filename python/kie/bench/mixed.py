"""A victim that decodes while an attacker's long prompts come in: what each costs the other."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from kie.bench.measure import Run, fresh, pool, request

if TYPE_CHECKING:
    from kie.engine import Engine


def measure(
    engine: Engine,
    *,
    victim_tokens: int,
    attacker_prompt: int,
    runs: int,
    seed: int = 0,
) -> list[Run]:
    """`runs` times the victim alone, then beside prompts that follow each other until it ends.

    Labels are "victim alone", "victim beside" and "attacker". Nothing comes from the cache.

    Raises what `Engine.stream` raises.
    """
    ids, source = pool(engine), random.Random(seed)
    measured: list[Run] = []
    for _ in range(runs):
        for beside in (False, True):
            prompt = fresh(ids, 32, source)
            label = "victim beside" if beside else "victim alone"
            attack = _Attack(engine, ids, attacker_prompt, source.random()) if beside else None
            try:
                run = request(
                    engine, prompt, label, max_tokens=victim_tokens, temperature=0, ignore_eos=True
                )
            finally:
                found = attack.stop() if attack else []
            measured += [run, *found]
    return measured


class _Attack:
    """One thread that sends long prompts, each of which makes one token."""

    def __init__(self, engine: Engine, ids: list[int], tokens: int, seed: float) -> None:
        self._engine, self._ids, self._tokens = engine, ids, tokens
        self._source = random.Random(seed)
        self._over = threading.Event()
        self._runs: list[Run] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._attack, name="kie-bench-attacker")
        self._thread.start()

    def _attack(self) -> None:
        try:
            while not self._over.is_set():
                prompt = fresh(self._ids, self._tokens, self._source)
                self._runs.append(
                    request(self._engine, prompt, "attacker", max_tokens=1, temperature=0)
                )
        except BaseException as failure:
            self._failure = failure

    def stop(self) -> list[Run]:
        """The attacker's runs; the one under way is waited for."""
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._runs
