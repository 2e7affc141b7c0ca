"""`/v1/responses`, as the real `openai` client and a coding agent's requests see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import SCRIPTS
from serving import Serving, named_events

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def client(talker: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    talk: list[Any] = [{"role": "user", "content": "Go. #call"}]
    made = client.responses.create(
        model="talker", instructions="Help.", input=talk, tools=TOOLS, store=False
    )
    assert (made.object, made.status, made.model) == ("response", "completed", "talker")
    assert made.instructions == "Help."
    assert made.output_text == "Let me look."
    message, call = made.output
    assert (message.type, call.type) == ("message", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Zürich"})
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    talk += made.output
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    made = client.responses.create(model="talker", input=talk, tools=TOOLS)
    assert made.output_text == SCRIPTS["done"]
    assert (made.model_extra or {})["timings"]["predicted_n"] == made.usage.output_tokens


def test_text_reasoning_and_the_budget(client: openai.OpenAI) -> None:
    made = client.responses.create(model="talker", input="x #think")
    thought, message = made.output
    assert thought.type == "reasoning"
    assert thought.content[0].text == "I wonder whether."
    assert message.content[0].text == "Yes, indeed."
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    again: Any = [{"role": "user", "content": "x"}, *made.output, {"role": "user", "content": "y"}]
    assert client.responses.create(model="talker", input=again).output_text == SCRIPTS["plain"]
    cut = client.responses.create(model="talker", input="x", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert SCRIPTS["plain"].startswith(cut.output_text)
    assert [item.status for item in cut.output] == ["incomplete"]
    thought = client.responses.create(model="talker", input="x #think", max_output_tokens=12)
    assert thought.status == "incomplete"
    assert [item.status for item in thought.output] == ["completed", "incomplete"]


def test_streams_hold_the_same(client: openai.OpenAI) -> None:
    for script in ("plain", "call", "two", "think"):
        asks: Any = {"model": "talker", "input": f"x #{script}", "tools": TOOLS}
        whole = client.responses.create(**asks)
        with client.responses.stream(**asks, extra_body={"stream_interval": 2}) as stream:
            for _ in stream:
                pass
            made = stream.get_final_response()
        assert made.status == "completed"
        assert made.output_text == whole.output_text
        unlike = {"id", "call_id", "parsed_arguments", "content"}
        for ours, theirs in zip(made.output, whole.output, strict=True):
            assert ours.model_dump(exclude=unlike) == theirs.model_dump(exclude=unlike)


def test_events_come_in_order(talker: Serving) -> None:
    body = {"model": "talker", "input": "x #call", "tools": TOOLS, "stream": True}
    events = named_events(talker.post(PATH, body).body)
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = [name.removeprefix("response.") for name, _ in events]
    short = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    assert short == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    last = events[-1][1]["response"]
    assert [item["type"] for item in last["output"]] == ["message", "function_call"]
    assert last["timings"]["predicted_n"] == last["usage"]["output_tokens"]
    cut = named_events(talker.post(PATH, {**body, "max_output_tokens": 2}).body)
    assert cut[-1][0] == "response.incomplete"


def test_an_asynchronous_client(talker: Serving) -> None:
    async def ask() -> None:
        base = f"{talker.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
            whole = await client.responses.create(model="talker", input="x")
            assert whole.output_text == SCRIPTS["plain"]
            events = await client.responses.create(model="talker", input="x", stream=True)
            text = [e.delta async for e in events if e.type == "response.output_text.delta"]
            assert "".join(text) == SCRIPTS["plain"]

    asyncio.run(ask())


def test_what_a_coding_agent_sends(talker: Serving) -> None:
    text = [{"type": "input_text", "text": "Do it."}]
    said = [{"type": "output_text", "text": "Yes.", "annotations": []}]
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c1"}
    body = {
        "model": "talker",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": text},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": said},
            {**call, "name": "get_weather", "arguments": '{"city": "Rome"}'},
            {**call, "call_id": "c2", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": text},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": "b"},
    }
    got = talker.post(PATH, body)
    assert got.status == 200, got.body
    assert named_events(got.body)[-1][1]["response"]["output"][0]["type"] == "message"


def test_errors_name_the_field(talker: Serving) -> None:
    base = {"model": "talker", "input": "x"}

    def item(**fields: Any) -> dict[str, Any]:
        return {"input": [fields]}

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        (item(type=3), "input[0].type"),
        (item(type="item_reference", id="x"), "input[0].type"),
        (item(type="web_search_call"), "input[0].type"),
        (item(role="robot", content="x"), "input[0].role"),
        (item(role="user", content=3), "input[0].content"),
        (item(role="user", content=[{"type": "input_image"}]), "input[0].content"),
        (item(role="user", content="x", nonsense=1), "input[0].nonsense"),
        (item(type="function_call", name="f", arguments="{}"), "input[0].call_id"),
        (item(type="function_call", call_id="c", name="f", arguments={}), "input[0].arguments"),
        (item(type="function_call_output", call_id="c"), "input[0].output"),
        ({"instructions": []}, "instructions"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"nonsense": 1}}, "text.nonsense"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"nonsense": 1}, "nonsense"),
    ]
    for fields, param in wrong:
        got = talker.post(PATH, {**base, **fields})
        assert (got.status, got.param) == (400, param), (fields, got.body)
    assert talker.post(PATH, {**base, "model": "nope"}).status == 404
