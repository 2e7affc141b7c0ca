"""Turns, forks and rollbacks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kie
import pytest
from conftest import TINY

# Longer than a page of keys and values, so that there is something to find again.
OPENING = "def add(a, b):\n" + "".join(f"    x{i} = a + {i} * b\n" for i in range(20))
TURN = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_a_session_continues_and_reuses_its_keys(demo: kie.Engine) -> None:
    with demo.session() as chat:
        first = chat.stream(OPENING, **TURN).result()
        second = chat.stream("\n\ndef sub(a, b):", **TURN).result()
        assert chat.turns == 2
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.cached_tokens > 0


TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor -%}
{%- if brief %}<brief>{% endif -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor -%}
<assistant>"""


def test_a_turn_has_tools_and_variables(tmp_path: Path) -> None:
    folder = tmp_path / "talks"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    said = [{"role": "user", "content": "a" * 100}]
    asked = TURN | {"max_tokens": 3}
    with kie.Engine(folder, device="cpu", threads=1) as talks:
        wanted = talks.generate(messages=said, tools=tools, **asked)
        plain = talks.generate(messages=said, **asked)
        assert wanted.usage.prompt_tokens > plain.usage.prompt_tokens
        many = talks.generate_many([said, said], tools=tools, **asked)
        assert [one.token_ids for one in many] == [wanted.token_ids] * 2
        with pytest.raises(kie.InvalidRequestError, match="not with a prompt"):
            talks.generate_many([said, "b"], tools=tools, **asked)
        chat = talks.session()
        first = chat.stream(said[0]["content"], tools=tools, **asked).result()
        assert first.token_ids == wanted.token_ids
        # The same ones again: what was said stays computed. Others: another prompt.
        second = chat.stream("b", tools=tools, **asked).result()
        assert second.usage.cached_tokens >= 64
        chat.rollback(to=1)
        brief = {"brief": True}
        third = chat.stream("b", tools=tools, chat_template_kwargs=brief, **asked).result()
        assert third.usage.prompt_tokens > second.usage.prompt_tokens
        with pytest.raises(TypeError, match="chat_template_kwargs must be a dict"):
            chat.stream("b", chat_template_kwargs=[1])  # type: ignore[call-overload]
        assert chat.turns == 2
    # Without a template nobody would read them.
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with (
        kie.Engine(folder, device="cpu", threads=1) as writes,
        pytest.raises(kie.TemplateError, match="go through one"),
    ):
        writes.session().stream("b", tools=tools)


def test_a_fork_goes_its_own_way(demo: kie.Engine) -> None:
    chat = demo.session()
    chat.stream(OPENING, **TURN).result()
    other = chat.fork()
    mine = chat.stream("\n# one", **TURN).result()
    chat.stream("\n# two", **TURN).result()
    assert (chat.turns, other.turns) == (3, 1)
    same = other.stream("\n# one", **TURN).result()
    assert same.token_ids == mine.token_ids
    assert same.usage.cached_tokens > 0


def test_rollback_forgets(demo: kie.Engine) -> None:
    chat = demo.session()
    chat.stream("def add(a, b):", **TURN).result()
    second = chat.stream("\n# one", **TURN).result()
    chat.stream("\n# two", **TURN).result()
    chat.rollback(to=1)
    assert chat.turns == 1
    assert chat.stream("\n# one", **TURN).result().token_ids == second.token_ids
    chat.rollback(to=0)
    assert chat.turns == 0
    with pytest.raises(kie.InvalidRequestError):
        chat.rollback(to=5)
    for wrong in (-1, 2**70):
        with pytest.raises(kie.InvalidRequestError):
            chat.rollback(to=wrong)
    with pytest.raises(TypeError):
        chat.rollback(to="1")  # type: ignore[arg-type]


def test_sessions_refuse_what_engines_refuse(demo: kie.Engine) -> None:
    chat = demo.session(system="Be brief.")
    with pytest.raises(TypeError):
        chat.stream()  # type: ignore[call-overload]
    with pytest.raises(kie.InvalidRequestError):
        chat.stream("\ud800")
    with pytest.raises(kie.InvalidRequestError):
        chat.stream([4096])
    with pytest.raises(kie.InvalidRequestError):
        demo.session(system="\ud800")
    assert chat.turns == 0


def test_idle_sessions_leave_room_for_others() -> None:
    """Each holds more pages than its share: what is gone is computed again when it speaks."""
    with kie.Engine(max_batch=1) as engine:
        chats = [engine.session() for _ in range(14)]
        first = [chat.stream(f"# {i}\n" + OPENING, **TURN).result() for i, chat in enumerate(chats)]
        pages = sum(engine.info()["kv_pages"][:1])
        assert sum(done.usage.prompt_tokens // 64 for done in first) > pages
        assert engine.generate("def f(", stop="\n").finish_reason in ("stop", "length")
        forgotten = chats[0].stream("\n# more", **TURN).result()
        assert forgotten.usage.cached_tokens == 0
        assert forgotten.usage.completion_tokens == 8
        assert engine.metrics()["kv_pages_used"] == 0


def test_more_requests_than_pages_all_end_as_alone() -> None:
    """The youngest begins anew where pages run out, and tells nothing twice."""
    wanted = {"max_tokens": 190, "ignore_eos": True, "temperature": 1}
    with kie.Engine(max_batch=4, max_seq_len=256) as engine:
        alone = [engine.generate("def f(", seed=seed, **wanted).token_ids for seed in range(3)]
    with pytest.raises(kie.InvalidRequestError, match="at least") as caught:
        kie.Engine(max_batch=4, max_seq_len=256, kv_bytes=1)
    # Rings of windowed layers, and one of the longest sequences.
    few = int(str(caught.value).split("at least ")[1].split(",")[0])
    with kie.Engine(max_batch=4, max_seq_len=256, kv_bytes=few) as engine:
        for _ in range(20):  # where this thread is held up they may pass one behind another
            streams = [engine.stream("def f(", seed=seed, **wanted) for seed in range(3)]
            assert [stream.result().token_ids for stream in streams] == alone
            if engine.metrics()["preempted"]:
                break
        assert engine.metrics()["preempted"] > 0
