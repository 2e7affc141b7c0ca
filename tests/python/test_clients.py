"""What sits on the clients: LangChain, LiteLLM, pydantic-ai; streaming or not, sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from scripted import SCRIPTS
from serving import Serving

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def test_langchain(talker: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="talker", base_url=f"{talker.url}/v1", api_key="x", max_retries=0)
    assert model.invoke("x").content == SCRIPTS["plain"]
    calling = model.bind_tools(TOOLS)
    asked = HumanMessage("x #call")
    made = calling.invoke([asked])
    [call] = made.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Zürich"})
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert calling.invoke([asked, made, result]).content == SCRIPTS["done"]
    whole: Any = None
    for chunk in calling.stream("x #two"):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]

    async def ask() -> str:
        return "".join([str(chunk.content) async for chunk in model.astream("x")])

    assert asyncio.run(ask()) == SCRIPTS["plain"]


def test_litellm(talker: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its list of prices comes from its own package.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    kie: Any = {"api_base": f"{talker.url}/v1", "api_key": "x", "max_retries": 0}
    kie["model"] = "openai/talker"
    claude = {**kie, "api_base": talker.url, "model": "anthropic/talker", "max_tokens": 99}
    asked = [{"role": "user", "content": "x #call"}]
    for more in (kie, claude):
        made: Any = litellm.completion(messages=asked, tools=TOOLS, **more)
        [choice] = made.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
        streamed: Any = litellm.completion(
            messages=[{"role": "user", "content": "x"}], stream=True, **more
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == SCRIPTS["plain"]

    async def ask() -> str:
        made: Any = await litellm.acompletion(
            messages=[{"role": "user", "content": "x #think"}], **kie
        )
        return made.choices[0].message.reasoning_content

    assert asyncio.run(ask()) == "I wonder whether."


def test_pydantic_ai(talker: Serving) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{talker.url}/v1", api_key="x")
    agent = Agent(OpenAIChatModel("talker", provider=provider))
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    assert agent.run_sync("x #call").output == SCRIPTS["done"]
    assert cities == ["Zürich"]

    async def ask() -> str:
        async with agent.run_stream("x #two") as streamed:
            return await streamed.get_output()

    assert asyncio.run(ask()) == SCRIPTS["done"]
    # Tools that are asked for together run in threads.
    assert (cities[0], sorted(cities[1:])) == ("Zürich", ["Oslo", "Rome"])
