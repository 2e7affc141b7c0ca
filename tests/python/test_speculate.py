"""Drafts of tokens change when tokens come, and never which."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kie
import pytest
from conftest import DATA, fixture_folders
from hypothesis import given, settings
from hypothesis import strategies as st


def told(done: kie.Completion) -> tuple[Any, ...]:
    """All of an answer but its times."""
    return done.text, done.token_ids, done.finish_reason, done.stop_reason, done.logprobs


@pytest.mark.parametrize("folder", fixture_folders(), ids=lambda path: path.name)
def test_every_fixture_says_the_same(folder: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 6, 7, 8] * 4
    wanted: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2, "seed": 3}
    with kie.Engine(folder, device="cpu", threads=1, max_seq_len=128) as engine:
        for temperature in (0.0, 0.9):
            plain = engine.generate(prompt, temperature=temperature, **wanted)
            wrong = [*plain.token_ids[:9], 4, *plain.token_ids[12:]]
            for prediction, least in ((None, 0), (plain.token_ids, 30), (wrong, 10)):
                drafted = engine.generate(
                    prompt,
                    temperature=temperature,
                    speculate="lookup",
                    prediction=prediction,
                    **wanted,
                )
                assert told(drafted) == told(plain)
                assert drafted.timings.draft_n >= drafted.timings.draft_n_accepted >= least
            assert plain.timings.draft_n == 0
            assert pickle.loads(pickle.dumps(drafted)).timings == drafted.timings


@pytest.fixture(scope="module")
def two() -> Iterator[kie.Engine]:
    """Eight slots over two virtual ranks."""
    with kie.Engine(DATA / "laneformer_d2", device="cpu:0,1", threads=1) as opened:
        yield opened


ids = st.lists(st.integers(3, 12), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(
    prompt=ids,
    prediction=st.none() | ids,
    params=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 1.0]),
            "top_k": st.integers(1, 5),
            "top_p": st.floats(0.1, 1.0),
            "min_p": st.floats(0.0, 0.5),
            "repetition_penalty": st.floats(0.5, 2.0),
            "presence_penalty": st.floats(-1.0, 1.0),
            "frequency_penalty": st.floats(-1.0, 1.0),
            "logprobs": st.integers(0, 3),
            "min_tokens": st.integers(0, 3),
            "stop_token_ids": st.lists(st.integers(0, 500), max_size=3),
            "stop": st.sampled_from(["e", "th", "\n"]),
            "logit_bias": st.dictionaries(st.integers(3, 12), st.floats(0.0, 9.0), max_size=4),
            "max_tokens": st.integers(3, 60),
        },
    ),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_asked(
    two: kie.Engine,
    prompt: list[int],
    prediction: list[int] | None,
    params: dict[str, Any],
    seed: int,
) -> None:
    params = {"max_tokens": 40, **params, "seed": seed}
    plain = two.generate(prompt, **params)
    with ThreadPoolExecutor(3) as pool:
        drafts = {"speculate": "lookup", "prediction": prediction or plain.token_ids}
        jobs = [pool.submit(two.generate, prompt, **params, **drafts) for _ in range(3)]
        assert all(told(job.result()) == told(plain) for job in jobs)


def test_turns_and_forks(engine: kie.Engine) -> None:
    answers = []
    for speculate in (None, "lookup"):
        with engine.session() as chat:
            params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "speculate": speculate}
            turns = [chat.stream("ab ab ab", **params).result()]
            other = chat.fork()
            turns += [chat.stream("ab", **params).result()]
            turns += [other.stream("cd", **params).result()]
            chat.rollback(to=1)
            turns.append(chat.stream("e", **params).result())
            answers.append([told(turn) for turn in turns])
    assert answers[0] == answers[1]


def test_drafts_stop_where_the_context_does(engine: kie.Engine) -> None:
    prompt = [5, 6, 7] * 30
    context = engine.info()["context"]
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    plain = engine.generate(prompt, **params)
    drafted = engine.generate(prompt, prediction=plain.token_ids, **params)
    assert told(drafted) == told(plain)
    assert len(drafted.token_ids) == context - len(prompt)
    # A prediction longer than what can come, and one that is empty.
    for prediction in ([5] * 5000, [], ""):
        done = engine.generate(prompt, prediction=prediction, max_tokens=2, temperature=0)
        assert done.token_ids == plain.token_ids[:2]


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"speculate": "mtp"}, kie.InvalidRequestError, "opened with mtp=True"),
        ({"speculate": "all"}, kie.InvalidRequestError, 'must be "lookup", "mtp" or None'),
        ({"speculate": 1}, TypeError, "speculate must be"),
        ({"prediction": [5, 99999]}, kie.InvalidRequestError, "prediction token 1 must be below"),
        ({"prediction": 1.5}, TypeError, "prediction"),
    ],
)
def test_what_is_wrong_is_told(
    engine: kie.Engine, params: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        engine.generate([5], max_tokens=1, **params)
