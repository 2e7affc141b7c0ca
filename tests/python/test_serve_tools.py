"""Tools and reasoning over chat completions, with the real `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import SCRIPTS
from serving import Serving, serving

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
]


def asked(script: str) -> list[Any]:
    """A conversation that the model answers with this script."""
    return [{"role": "system", "content": "Help."}, {"role": "user", "content": f"Go. #{script}"}]


@pytest.fixture(scope="module")
def client(talker: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    talk = asked("call")
    done = client.chat.completions.create(model="talker", messages=talk, tools=TOOLS)
    [choice] = done.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    talk += [choice.message.model_dump(exclude_none=True)]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    done = client.chat.completions.create(model="talker", messages=talk, tools=TOOLS)
    assert done.choices[0].message.content == SCRIPTS["done"]
    assert done.choices[0].finish_reason == "stop"


def test_streams_hold_the_same(client: openai.OpenAI) -> None:
    for interval in (1, 3, 100):
        chunks = list(
            client.chat.completions.create(
                model="talker",
                messages=asked("two"),
                tools=TOOLS,
                tool_choice="auto",
                stream=True,
                extra_body={"stream_interval": interval},
            )
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == ""
        pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
        heads = [piece for piece in pieces if piece.id]
        assert [
            (head.index, head.type, head.function and head.function.name) for head in heads
        ] == [
            (0, "function", "get_weather"),
            (1, "function", "get_weather"),
        ]
        assert heads[0].id != heads[1].id
        for index, city in enumerate(("Oslo", "Rome")):
            mine = [p.function.arguments or "" for p in pieces if p.index == index and p.function]
            assert json.loads("".join(mine)) == {"city": city}
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
        assert reasons == ["tool_calls"]


def test_an_asynchronous_stream(talker: Serving) -> None:
    async def ask() -> None:
        base = f"{talker.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
            stream = client.chat.completions.stream(
                model="talker", messages=asked("call"), tools=TOOLS
            )
            async with stream as events:
                kinds = {event.type async for event in events}
                final = await events.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        [call] = final.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Zürich"}

    asyncio.run(ask())


def test_what_is_no_call_is_text(talker: Serving) -> None:
    free: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
    body = {"model": "talker", "messages": asked("broken"), "tools": free}
    got = talker.post("/v1/chat/completions", body)
    assert got.status == 200
    choice = got.json()["choices"][0]
    assert choice["message"]["content"] == SCRIPTS["broken"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    # Without tools, and with a choice of none, a call is text too.
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        body = {"model": "talker", "messages": asked("call"), **more}
        choice = talker.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["message"]["content"] == SCRIPTS["call"]
    # The budget ends in the middle of one.
    body = {"model": "talker", "messages": asked("call"), "tools": TOOLS, "max_tokens": 12}
    choice = talker.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert SCRIPTS["call"].startswith(choice["message"]["content"])


def test_reasoning_is_apart(talker: Serving) -> None:
    body = {"model": "talker", "messages": asked("think")}
    message = talker.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (
        "Yes, indeed.",
        "I wonder whether.",
    )
    events = talker.events("/v1/chat/completions", {**body, "stream_interval": 2})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I wonder whether."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes, indeed."
    again = [*asked("plain"), {"role": "assistant", "content": "a", "reasoning_content": "b"}]
    longer = talker.post("/tokenize", {"messages": again}).json()["count"]
    again[-1].pop("reasoning_content")
    assert longer > talker.post("/tokenize", {"messages": again}).json()["count"]


def test_wrong_tools_are_named(talker: Serving) -> None:
    def tool(**function: Any) -> list[Any]:
        return [{"type": "function", "function": function}]

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": tool()}, "tools[0].function.name"),
        ({"tools": tool(name="")}, "tools[0].function.name"),
        ({"tools": tool(name="a b")}, "tools[0].function.name"),
        ({"tools": tool(name="x" * 129)}, "tools[0].function.name"),
        ({"tools": tool(name="f", parameters=[])}, "tools[0].function.parameters"),
        ({"tools": tool(name="f", description=1)}, "tools[0].function.description"),
        ({"tools": tool(name="f") * 2}, "tools[1].function.name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": tool(name="f"), "tool_choice": named}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": tool(name="f", strict=1)}, "tools[0].function.strict"),
        (
            {"tools": tool(name="f", strict=True, parameters={"not": {}})},
            "tools[0].function.parameters",
        ),
        (
            {"tools": tool(name="f", parameters={"not": {}}), "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"functions": []}, "functions"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**call, "id": 1}]}]},
            "messages[0].tool_calls[0].id",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [call]}]},
            "messages[0].tool_calls",
        ),
    ]
    for fields, param in wrong:
        body = {"model": "talker", "messages": asked("plain"), **fields}
        got = talker.post("/v1/chat/completions", body)
        assert (got.status, got.param) == (400, param), (fields, got.body)


def test_a_template_without_tools_still_answers() -> None:
    """The default model's: tools, calls and results become text of the prompt."""
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    body = {"model": "default", "messages": talk, "tools": TOOLS, "max_tokens": 4}
    with serving("--threads", "1") as running:
        assert running.post("/v1/chat/completions", body).status == 200
        with_tools = running.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()
        without = running.post("/tokenize", {"messages": talk}).json()
        assert with_tools["count"] > without["count"] > 20
        text = running.post("/detokenize", {"tokens": with_tools["tokens"]}).json()["prompt"]
    for part in ("get_weather", "<tool_call>", "<tool_response>\nsunny"):
        assert part in text
