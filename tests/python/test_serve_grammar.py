"""Answers of a form, and calls that are legal, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from conftest import TINY
from scripted import SCRIPTS
from serving import Serving, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASKED: Any = [{"role": "user", "content": "Go. #plain"}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def noise() -> Iterator[Serving]:
    """`kie serve` with random weights."""
    with serving(str(TINY), "--threads", "1", "--served-model-name", "noise") as running:
        yield running


def chat(server: Serving, **more: Any) -> Any:
    """The choice of an answer."""
    body = {"model": "default", "messages": ASKED, "max_tokens": 200, "seed": 3, **more}
    got = server.post("/v1/chat/completions", body)
    assert got.status == 200, got.body
    return got.json()["choices"][0]


@pytest.mark.parametrize("which", ["noise", "talker"])
def test_forms_of_chats(which: str, request: pytest.FixtureRequest) -> None:
    server: Serving = request.getfixturevalue(which)
    objects = [
        {"response_format": FORM},
        {"structured_outputs": {"json": SCHEMA}},
        {"grammar": {"syntax": "json_schema", "definition": SCHEMA}},
    ]
    for form in objects:
        choice = chat(server, **form)
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    value = json.loads(chat(server, response_format={"type": "json_object"})["message"]["content"])
    assert isinstance(value, dict)
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-f]{3}/[0-9]"}
    for form in ({"response_format": regex}, {"structured_outputs": {"regex": "[a-f]{3}/[0-9]"}}):
        assert re.fullmatch("[a-f]{3}/[0-9]", chat(server, **form)["message"]["content"])
    lark = 'start: "yes" | "no"'
    choices: list[Any] = [{"grammar": lark}, {"structured_outputs": {"grammar": lark}}]
    choices.append({"structured_outputs": {"choice": ["yes", "no"]}})
    for form in choices:
        choice = chat(server, **form)
        assert choice["message"]["content"] in ("yes", "no")
        assert choice["finish_reason"] == "stop"


def test_other_paths(noise: Serving) -> None:
    body = {"model": "default", "prompt": "x", "max_tokens": 200, "seed": 3}
    body["response_format"] = FORM
    got = noise.post("/v1/completions", body)
    jsonschema.validate(json.loads(got.json()["choices"][0]["text"]), SCHEMA)
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    body = {"model": "default", "input": "x", "max_output_tokens": 200, "seed": 3}
    body["text"] = {"format": form}
    told = noise.post("/v1/responses", body).json()
    jsonschema.validate(json.loads(told["output"][0]["content"][0]["text"]), SCHEMA)
    assert told["text"]["format"] == form
    body = {"model": "default", "max_tokens": 200, "messages": ASKED, "seed": 3}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    told = noise.post("/v1/messages", body).json()
    jsonschema.validate(json.loads(told["content"][0]["text"]), SCHEMA)


def test_the_client_parses(talker: Serving) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        days: int

    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="unused", max_retries=0) as client:
        done = client.chat.completions.parse(
            model="talker",
            messages=ASKED,
            response_format=Weather,
            max_tokens=300,
            seed=3,
        )
    assert isinstance(done.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("which", ["noise", "talker"])
def test_forced_calls(which: str, request: pytest.FixtureRequest) -> None:
    server: Serving = request.getfixturevalue(which)
    named = {"type": "function", "function": {"name": "get_weather"}}
    other: Any = {"type": "function", "function": {"name": "other", "parameters": {}}}
    for forced in ("required", named):
        tools = TOOLS if forced == "required" else [*TOOLS, other]
        choice = chat(server, tools=tools, tool_choice=forced)
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert choice["message"]["content"] is None
    flat = [{"type": "function", **FUNCTION}]
    body = {"model": "default", "input": "x", "tools": flat, "tool_choice": "required", "seed": 3}
    # A model may reason before it calls.
    told = server.post("/v1/responses", {**body, "max_output_tokens": 200}).json()
    *thoughts, item = told["output"]
    assert all(thought["type"] == "reasoning" for thought in thoughts)
    assert item["type"] == "function_call"
    jsonschema.validate(json.loads(item["arguments"]), SCHEMA)
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        body = {"model": "default", "max_tokens": 200, "messages": ASKED, "tools": [tool]}
        body["seed"] = 3
        told = server.post("/v1/messages", {**body, "tool_choice": choice}).json()
        assert told["stop_reason"] == "tool_use"
        jsonschema.validate(told["content"][-1]["input"], SCHEMA)


def test_strict_tools_leave_text_alone(talker: Serving) -> None:
    strict = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    choice = chat(talker, tools=strict)
    assert choice["message"]["content"] == SCRIPTS["plain"]
    # The script's call lacks a member, so it cannot be made as it stands there.
    called = [{"role": "user", "content": "Go. #call"}]
    choice = chat(talker, tools=strict, messages=called, max_tokens=300)
    assert choice["message"]["content"] == "Let me look."
    for call in choice["message"].get("tool_calls", []):
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_budgets_and_streams(noise: Serving) -> None:
    choice = chat(noise, response_format=FORM, max_tokens=60)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert chat(noise, response_format=FORM, max_tokens=2)["finish_reason"] == "length"
    body = {"model": "default", "messages": ASKED, "max_tokens": 200, "response_format": FORM}
    events = noise.events("/v1/chat/completions", {**body, "stream": True, "seed": 3})
    text = "".join(
        e["choices"][0]["delta"].get("content") or "" for e in events[:-1] if e["choices"]
    )
    assert text == chat(noise, response_format=FORM)["message"]["content"]


def test_what_is_refused_is_named(noise: Serving) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    two = {"grammar": 'start: "a"', "response_format": FORM}
    for fields, param, word in [
        ({"response_format": form}, "response_format", '#/properties/a: "uniqueItems"'),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        (two, "grammar", "already"),
        ({"grammar": 'start: "a"', "ignore_eos": True}, "grammar", "ignore_eos"),
    ]:
        body = {"model": "default", "messages": ASKED, **fields}
        got = noise.post("/v1/chat/completions", body)
        assert (got.status, got.param) == (400, param), got.body
        assert word in got.json()["error"]["message"]
    text = noise.get("/metrics").body.decode()
    count = re.search(r"kie_grammar_mask_seconds_count (\d+)", text)
    assert count
    assert int(count[1]) > 0
