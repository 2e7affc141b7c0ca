"""A random user: requests, cancels, sessions, forks and rollbacks, from threads and tasks.

Whatever the order, a stream's tokens are numbered from 0, its texts join to the completion's
text, its reason is one it may have, and a greedy request gives the same ids as ever.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kie
from conftest import TINY
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

PROMPTS = st.text(alphabet="abc \n{}λ🙂", min_size=1, max_size=30)
COUNTS = st.integers(1, 24)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": COUNTS, "ignore_eos": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 20]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.lists(st.sampled_from(["a", "e", " t", "\n", "é"]), max_size=2),
        "logprobs": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
    },
)


def check(stream: kie.Stream, seen: list[kie.Token], sampling: dict[str, Any]) -> None:
    """What holds for every finished stream."""
    done = stream.result()
    assert stream.finished
    assert [token.index for token in seen] == list(range(len(seen)))
    assert done.finish_reason in ("stop", "length", "cancelled")
    assert len(done.token_ids) <= sampling["max_tokens"]
    assert done.usage.completion_tokens == len(done.token_ids)
    if done.finish_reason != "cancelled":
        assert "".join(token.text for token in seen) == done.text
        assert all(stop not in done.text for stop in sampling.get("stop", ()))
    if "seed" in sampling:
        assert done.seed == sampling["seed"]


class User(RuleBasedStateMachine):
    """One engine of three slots and all that is open on it."""

    streams = Bundle("streams")
    sessions = Bundle("sessions")

    @initialize()
    def open(self) -> None:
        self.engine = kie.Engine(TINY, threads=1, max_batch=3, max_queue=16)
        self.greedy: dict[str, tuple[int, ...]] = {}
        self.open_streams = 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()

    @rule(target=streams, prompt=PROMPTS, sampling=SAMPLING)
    def start(self, prompt: str, sampling: dict[str, Any]) -> Any:
        if self.open_streams >= 12:
            return multiple()
        self.open_streams += 1
        return self.engine.stream(prompt, **sampling), [], sampling

    @rule(entry=streams, count=COUNTS)
    def read_some(self, entry: Any, count: int) -> None:
        stream, seen, _ = entry
        for _, token in zip(range(count), stream, strict=False):
            seen.append(token)

    @rule(entry=streams)
    def read_what_is_there(self, entry: Any) -> None:
        stream, seen, _ = entry
        seen += stream.read_available()

    @rule(entry=consumes(streams), cancel=st.booleans())
    def finish(self, entry: Any, cancel: bool) -> None:
        stream, seen, sampling = entry
        with stream:
            if cancel:
                stream.cancel()
            seen += list(stream)
        self.open_streams -= 1
        check(stream, seen, sampling)

    @rule(entry=consumes(streams))
    def walk_away(self, entry: Any) -> None:
        self.open_streams -= 1
        with entry[0]:
            pass

    @rule(requests=st.lists(st.tuples(PROMPTS, SAMPLING), min_size=2, max_size=4))
    def from_tasks(self, requests: list[tuple[str, dict[str, Any]]]) -> None:
        async def one(prompt: str, sampling: dict[str, Any]) -> None:
            async with self.engine.stream(prompt, **sampling) as stream:
                seen = [token async for token in stream]
                check(stream, seen, sampling)

        async def main() -> None:
            await asyncio.gather(*(one(*request) for request in requests))

        asyncio.run(main())

    @rule(requests=st.lists(st.tuples(PROMPTS, SAMPLING), min_size=2, max_size=4))
    def from_threads(self, requests: list[tuple[str, dict[str, Any]]]) -> None:
        def one(request: tuple[str, dict[str, Any]]) -> None:
            prompt, sampling = request
            with self.engine.stream(prompt, **sampling) as stream:
                check(stream, list(stream), sampling)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(one, requests))

    @rule(prompt=st.sampled_from(["a", "ab", "abc abc"]))
    def greedy_is_always_the_same(self, prompt: str) -> None:
        done = self.engine.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True)
        assert self.greedy.setdefault(prompt, done.token_ids) == done.token_ids

    @rule(target=sessions)
    def begin_session(self) -> Any:
        return self.engine.session()

    @rule(chat=sessions, prompt=PROMPTS, sampling=SAMPLING)
    def take_turn(self, chat: kie.Session, prompt: str, sampling: dict[str, Any]) -> None:
        if chat.turns >= 6:
            chat.rollback(to=0)
        before = chat.turns
        with chat.stream(prompt, **sampling) as stream:
            check(stream, list(stream), sampling)
        assert chat.turns == before + 1

    @rule(target=sessions, chat=sessions)
    def fork(self, chat: kie.Session) -> Any:
        other = chat.fork()
        assert other.turns == chat.turns
        return other

    @rule(chat=sessions, to=st.integers(0, 6))
    def roll_back(self, chat: kie.Session, to: int) -> None:
        if to <= chat.turns:
            chat.rollback(to=to)
            assert chat.turns == to

    @invariant()
    def is_open(self) -> None:
        assert not getattr(self, "engine", None) or not self.engine.closed


User.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestUser = User.TestCase
