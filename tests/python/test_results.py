"""What a request leaves: log-probabilities, pickles, many at once, notebooks."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from contextlib import redirect_stderr
from types import ModuleType
from typing import Any

import kie
import pytest
from conftest import DATA, TINY


def test_a_completion_has_the_logprobs_of_its_tokens(engine: kie.Engine) -> None:
    with engine.stream("abc", max_tokens=5, logprobs=2, ignore_eos=True, seed=1) as stream:
        tokens = list(stream)
        done = stream.result()
    assert done.logprobs is not None
    assert len(done.logprobs) == 5
    for token, entry in zip(tokens, done.logprobs, strict=True):
        assert (entry.id,) == token.token_ids
        assert entry.logprob == token.logprob
        assert entry.top_logprobs == token.top_logprobs
        assert len(entry.top_logprobs) == 2
    assert done.to_dict()["logprobs"][0]["top_logprobs"][1]["id"] == tokens[0].top_logprobs[1].id
    alone = engine.generate("abc", max_tokens=2, logprobs=0, ignore_eos=True).logprobs
    assert alone is not None
    assert [entry.top_logprobs for entry in alone] == [(), ()]
    assert engine.generate("abc", max_tokens=2).logprobs is None


def test_what_a_request_leaves_is_pickled(engine: kie.Engine) -> None:
    stopped = engine.generate("abc", max_tokens=9, stop="e", seed=3, logprobs=1)
    stop_id = engine.generate("abc", max_tokens=4, temperature=0, ignore_eos=True).token_ids[1]
    by_id = engine.generate("abc", max_tokens=4, temperature=0, stop_token_ids=[stop_id])
    assert by_id.stop_reason == stop_id
    with engine.stream("abc", max_tokens=2, logprobs=1) as stream:
        token = next(stream)
    for value in (stopped, by_id, stopped.usage, stopped.timings, token, token.top_logprobs[0]):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(value, protocol))
            assert again == value
            assert again.to_dict() == value.to_dict()
        assert copy.deepcopy(value) == value


def test_many_prompts_keep_their_order_and_fill_no_queue() -> None:
    with kie.Engine(TINY, device="cpu", threads=1, max_batch=2, max_queue=1) as engine:
        asked: list[Any] = [f"prompt {i}" for i in range(11)] + [[5, 6, 7]]
        sampling: Any = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        alone = [engine.generate(prompt, **sampling).token_ids for prompt in asked]
        drawn = io.StringIO()
        with redirect_stderr(drawn):
            done = engine.generate_many(asked, progress=True, **sampling)
        assert [one.token_ids for one in done] == alone
        assert "12/12" in drawn.getvalue()
        # Where others fill the queue, these wait for them.
        others = [engine.stream("x", max_tokens=200, ignore_eos=True) for _ in range(3)]
        assert [one.token_ids for one in engine.generate_many(asked[:3], **sampling)] == alone[:3]
        assert all(other.result().usage.completion_tokens == 200 for other in others)
        with pytest.raises(kie.InvalidRequestError):
            engine.generate_many(["a", "b", [1 << 30]], **sampling)
        assert engine.generate_many([]) == []


def test_a_notebook_shows_text_that_grows(
    engine: kie.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, picture: str) -> None:
            shown.append(picture)

    def display(picture: str, *, display_id: bool) -> Handle:
        assert display_id
        shown.append(picture)
        return Handle()

    fake = ModuleType("IPython.display")
    vars(fake).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    stream = engine.stream("<a>", max_tokens=9, ignore_eos=True)
    stream._ipython_display_()
    assert "9 tokens at" in shown[-1]
    assert "9 tokens at" not in shown[0]
    assert "<a>" not in "".join(shown)


def test_templates_get_variables_and_tools(engine: kie.Engine, demo: kie.Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    plain = demo.apply_chat_template(messages)
    assert demo.apply_chat_template(messages, tools=[tool], enable_thinking=False) == plain
    asked = {"max_tokens": 3, "temperature": 0}
    wanted = demo.generate(messages=messages, **asked)
    with_variables = {"enable_thinking": False}
    done = demo.generate(
        messages=messages, tools=[tool], chat_template_kwargs=with_variables, **asked
    )
    assert done.token_ids == wanted.token_ids
    with pytest.raises(kie.InvalidRequestError, match="go with messages"):
        engine.generate("x", tools=[tool])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="chat_template_kwargs must be a dict"):
        demo.stream(messages=messages, chat_template_kwargs=[1])  # type: ignore[call-overload]


def test_float32_is_rounded_on_request_only() -> None:
    with pytest.raises(kie.InvalidRequestError) as caught:
        kie.Engine(DATA / "own_mistral", device="sim:blocks=4")
    for word in ('"f16"', '"bf16"', "model.safetensors", "F32"):
        assert word in caught.value.message
    with pytest.raises(kie.InvalidRequestError, match='got "f32"'):
        kie.Engine(DATA / "own_mistral", device="sim:blocks=4", dtype="f32")


def test_mbu_is_a_part_of_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from kie import bandwidth

    monkeypatch.delenv("KIE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bandwidth.known() is None
    bandwidth.keep(5e9)
    assert bandwidth.known() == 5e9
    with kie.Engine(TINY, device="cpu") as engine:
        assert engine.info()["read_bandwidth"] == 5e9
        timings = engine.generate("abc", max_tokens=20, ignore_eos=True).timings
    wanted = timings.bytes_per_token * timings.predicted_per_second / 5e9
    assert timings.mbu == pytest.approx(wanted)
    assert timings.mbu > 0
    for text in ("", "[]", '{"x": 1}'):
        (tmp_path / "kie" / "bandwidth.json").write_text(text)
        assert bandwidth.known() is None
