"""`/v1/messages`, as the real `anthropic` client and a coding agent's requests see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from scripted import SCRIPTS
from serving import Serving, named_events

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]
SYSTEM: Any = [
    {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Be brief."},
]


def asked(script: str) -> list[Any]:
    return [{"role": "user", "content": f"Go. #{script}"}]


@pytest.fixture(scope="module")
def client(talker: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=talker.url, api_key="unused", max_retries=0) as made:
        yield made


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    talk = asked("call")
    made = client.messages.create(
        model="talker", max_tokens=200, system=SYSTEM, tools=TOOLS, messages=talk
    )
    assert (made.type, made.role, made.model) == ("message", "assistant", "talker")
    assert made.id.startswith("msg_")
    assert made.stop_reason == "tool_use"
    text, call = made.content
    assert (text.type, text.type == "text" and text.text) == ("text", "Let me look.")
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Zürich"})
    assert made.usage.output_tokens > 5
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [], "is_error": False}
    result["content"] = [{"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}]
    talk += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    made = client.messages.create(model="talker", max_tokens=200, tools=TOOLS, messages=talk)
    assert made.stop_reason == "end_turn"
    [text] = made.content
    assert text.type == "text"
    assert text.text == SCRIPTS["done"]
    counted = client.messages.count_tokens(model="talker", tools=TOOLS, messages=talk)
    used = made.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    more = client.messages.count_tokens(model="talker", system="x", tools=TOOLS, messages=talk)
    assert more.input_tokens > counted.input_tokens


def test_streams_hold_the_same(client: anthropic.Anthropic) -> None:
    for script in ("plain", "call", "two", "think"):
        asks: Any = {
            "model": "talker",
            "max_tokens": 200,
            "tools": TOOLS,
            "messages": asked(script),
        }
        whole = client.messages.create(**asks)
        with client.messages.stream(**asks, extra_body={"stream_interval": 2}) as stream:
            kinds = [event.type for event in stream]
            made = stream.get_final_message()
        assert {"message_start", "content_block_delta", "message_stop"} <= set(kinds)
        assert made.stop_reason == whole.stop_reason
        for ours, theirs in zip(made.content, whole.content, strict=True):
            unlike = {"id"} if ours.type == "tool_use" else set()
            drop = {*unlike, "parsed_output"}
            assert ours.model_dump(exclude=drop) == theirs.model_dump(exclude=drop)
        assert made.usage.output_tokens == whole.usage.output_tokens


def test_events_come_in_order(talker: Serving) -> None:
    body = {"model": "talker", "max_tokens": 200, "tools": TOOLS, "messages": asked("call")}
    got = talker.post("/v1/messages", {**body, "stream": True})
    events = named_events(got.body)
    assert all(name == data["type"] for name, data in events)
    kinds = [name for name, _ in events]
    short = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == [
        *("message_start", "content_block_start", "ping", *block[1:]),
        *(*block, "message_delta", "message_stop"),
    ]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["timings"]["predicted_n"] == end["usage"]["output_tokens"]


def test_asynchronous_clients(talker: Serving) -> None:
    async def ask() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=talker.url, api_key="x", max_retries=0
        ) as client:
            asks: Any = {"model": "talker", "max_tokens": 99, "messages": asked("plain")}
            whole = await client.messages.create(**asks)
            assert whole.content[0].type == "text"
            async with client.messages.stream(**asks) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            assert text == whole.content[0].text == SCRIPTS["plain"]

    asyncio.run(ask())


def test_stops_and_reasoning(client: anthropic.Anthropic) -> None:
    made = client.messages.create(
        model="talker", max_tokens=99, messages=asked("plain"), stop_sequences=["plain"]
    )
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "plain")
    made = client.messages.create(model="talker", max_tokens=2, messages=asked("plain"))
    assert made.stop_reason == "max_tokens"
    made = client.messages.create(
        model="talker",
        max_tokens=2000,
        messages=asked("think"),
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    thought, text = made.content
    assert thought.type == "thinking"
    assert thought.thinking == "I wonder whether."
    assert text.type == "text"
    assert text.text == "Yes, indeed."
    begun: Any = [*asked("plain"), {"role": "assistant", "content": "<|plain|>"}]
    made = client.messages.create(model="talker", max_tokens=99, messages=begun)
    assert made.content[0].type == "text"
    assert made.content[0].text == SCRIPTS["plain"]


def test_what_a_coding_agent_sends(talker: Serving) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    body = {
        "model": "talker",
        "max_tokens": 100,
        "stream": True,
        "temperature": 1,
        "system": [{**block, "cache_control": mark} for block in SYSTEM],
        "tools": [{**TOOLS[0], "cache_control": mark, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": mark}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}},
                    {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {"city": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t2", "cache_control": mark},
                    {"type": "text", "text": "go on #plain"},
                ],
            },
        ],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "request-id": "mine"}
    got = talker.post("/v1/messages?beta=true", body, headers=headers)
    assert got.status == 200, got.body
    assert got.headers["request-id"] == "mine"
    texts = [d["delta"].get("text", "") for n, d in named_events(got.body) if n.endswith("_delta")]
    assert "".join(texts) == SCRIPTS["plain"]
    kept = ("model", "system", "tools", "tool_choice", "thinking", "messages")
    count = {name: body[name] for name in kept}
    assert talker.post("/v1/messages/count_tokens?beta=true", count).json()["input_tokens"] > 50


def test_errors_are_anthropics(client: anthropic.Anthropic, talker: Serving) -> None:
    base = {"model": "talker", "max_tokens": 9, "messages": asked("plain")}

    def said(content: Any, role: str = "user") -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content}]}

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        (said("x", "system"), "messages[0].role"),
        (said(3), "messages[0].content"),
        (said([3]), "messages[0].content[0]"),
        (said([{"text": "x"}]), "messages[0].content[0].type"),
        (said([{"type": "text"}]), "messages[0].content[0].text"),
        (said([{"type": "image", "source": {}}]), "messages[0].content[0]"),
        (said([{"type": "tool_result"}]), "messages[0].content[0].tool_use_id"),
        (said([{"type": "tool_use"}], "assistant"), "messages[0].content[0].id"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stream": 1}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ]
    for fields, name in wrong:
        got = talker.post("/v1/messages", {**base, **fields})
        assert got.status == 400, (fields, got.body)
        told = got.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert told["request_id"] == got.headers["request-id"]
        assert name in told["error"]["message"], (fields, told)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nope", max_tokens=9, messages=asked("plain"))
    assert json.loads(unknown.value.response.text)["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(
            model="talker", max_tokens=9, messages=[{"role": "user", "content": "x" * 5000}]
        )
    assert talker.get("/v1/messages").json()["type"] == "error"
    got = talker.post("/v1/messages/count_tokens", {**base, "max_tokens": 9})
    assert got.status == 400
