"""The server, as the real `openai` client and plain HTTP see it."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator

import kie
import openai
import pytest
from serving import Serving, serving, start

PROMPT = "def fibonacci(n):"
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "default", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The default model on one thread, whose bits are those of any number of threads."""
    with serving("--threads", "1", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_chat_is_what_python_says(client: openai.OpenAI, demo: kie.Engine) -> None:
    wanted = demo.generate(messages=CHAT, temperature=0, max_tokens=24)
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_completion_tokens=24, seed=7
    )
    assert done.object == "chat.completion"
    assert done.model == "tiny"
    [choice] = done.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == wanted.text
    assert choice.finish_reason == wanted.finish_reason
    assert done.usage is not None
    assert done.usage.prompt_tokens == wanted.usage.prompt_tokens
    assert done.usage.completion_tokens == wanted.usage.completion_tokens
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens is not None
    assert done.system_fingerprint is not None
    assert done.system_fingerprint.startswith(f"kie-{kie.__version__}-")
    more = done.model_extra or {}
    assert more["seed"] == 7
    assert more["timings"]["predicted_n"] == wanted.usage.completion_tokens


def test_chat_streams_the_same(client: openai.OpenAI, demo: kie.Engine) -> None:
    wanted = demo.generate(messages=CHAT, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="default",
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    *body, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == wanted.text
    assert [c.choices[0].finish_reason for c in body if c.choices[0].finish_reason] == [
        wanted.finish_reason
    ]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == wanted.usage.completion_tokens
    assert (last.model_extra or {})["timings"]["predicted_n"] == wanted.usage.completion_tokens


def test_completions_take_text_and_ids(client: openai.OpenAI, demo: kie.Engine) -> None:
    wanted = demo.generate(PROMPT, temperature=0, max_tokens=24)
    ids = demo.tokenize(PROMPT)
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        done = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=24)
        assert done.choices[0].text == wanted.text
        stream = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == wanted.text


def test_asynchronous_clients(server: Serving, demo: kie.Engine) -> None:
    wanted = demo.generate(messages=CHAT, temperature=0, max_tokens=24).text

    async def ask() -> None:
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client:

            async def one(stream: bool) -> str:
                create = client.chat.completions.create
                if not stream:
                    done = await create(model="tiny", messages=CHAT, temperature=0, max_tokens=24)
                    return done.choices[0].message.content or ""
                chunks = await create(
                    model="tiny", messages=CHAT, temperature=0, max_tokens=24, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            texts = await asyncio.gather(*(one(n % 2 == 0) for n in range(12)))
            assert texts == [wanted] * 12

    asyncio.run(ask())


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("default").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("nope")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=CHAT)


def test_errors_name_the_field(server: Serving) -> None:
    chat, legacy = "/v1/chat/completions", "/v1/completions"
    base = {"model": "tiny", "messages": CHAT}
    wrong = [
        (chat, {**base, "temperature": -1}, "temperature"),
        (chat, {**base, "temperature": "hot"}, "temperature"),
        (chat, {**base, "n": 2}, "n"),
        (chat, {**base, "audio": {}}, "audio"),
        (chat, {**base, "nonsense": 1}, "nonsense"),
        (chat, {**base, "max_tokens": 0}, "max_tokens"),
        (chat, {**base, "store": True}, "store"),
        (chat, {**base, "stop": [""]}, "stop"),
        (chat, {**base, "logit_bias": {"x": 1}}, "logit_bias"),
        (chat, {**base, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (chat, {**base, "speculate": "ngram"}, "speculate"),
        (chat, {**base, "prediction": {"type": "image"}}, "prediction"),
        (chat, {**base, "prediction": [99999]}, "prediction"),
        (chat, {**base, "response_format": {"type": "xml"}}, "response_format.type"),
        (chat, {"model": "tiny"}, "messages"),
        (chat, {"messages": CHAT}, "model"),
        (chat, {"model": "tiny", "messages": [{"role": "user"}]}, "messages[0].content"),
        (legacy, {"model": "tiny", "prompt": ["a", "b"]}, "prompt"),
        (legacy, {"model": "tiny", "prompt": []}, "prompt"),
        (legacy, {"model": "tiny", "prompt": [99999]}, "prompt"),
        (legacy, {"model": "tiny", "prompt": "x", "suffix": "y"}, "suffix"),
    ]
    for path, body, param in wrong:
        got = server.post(path, body)
        assert (got.status, got.param) == (400, param), (body, got.body)
        error = got.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}


def test_drafts_change_no_token(server: Serving) -> None:
    path, asked = "/v1/chat/completions", {**GREEDY, "messages": CHAT, "max_tokens": 24}
    plain = server.post(path, asked).json()
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    for prediction in (text, {"type": "content", "content": text}, parts, [5, 6]):
        got = server.post(path, {**asked, "prediction": prediction, "speculate": "lookup"}).json()
        assert got["choices"] == plain["choices"]
        assert got["timings"]["draft_n"] >= got["timings"]["draft_n_accepted"]


def test_what_has_no_effect_is_taken(server: Serving) -> None:
    plain = server.post("/v1/chat/completions", {**GREEDY, "messages": CHAT}).json()
    same = {
        "user": "u",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "modalities": ["text"],
        "n": 1,
        "include": [],
        "truncation": "disabled",
        "background": False,
        "thinking": {"type": "disabled"},
        "response_format": {"type": "text"},
        "tools": None,
        "audio": None,
        "stop": None,
        "seed": None,
    }
    got = server.post("/v1/chat/completions?beta=true", {**GREEDY, "messages": CHAT, **same})
    assert got.status == 200, got.body
    assert got.json()["choices"] == plain["choices"]
    assert 0 <= got.json()["seed"] < 2**53


def test_the_context_is_the_limit(server: Serving) -> None:
    got = server.post("/v1/completions", {"model": "tiny", "prompt": [5] * 3000})
    assert got.status == 400
    assert got.json()["error"]["code"] == "context_length_exceeded"
    assert got.param == "prompt"
    body = {"model": "tiny", "prompt": [5] * 2040, "max_tokens": 10**9, "ignore_eos": True}
    done = server.post("/v1/completions", body).json()
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["completion_tokens"] == 8


def test_paths_and_methods(server: Serving) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    got = server.get("/nope")
    assert got.status == 404
    assert "error" in got.json()
    got = server.get("/v1/chat/completions")
    assert got.status == 405
    assert "POST" in got.headers["allow"]
    assert "error" in got.json()
    got = server.request("OPTIONS", "/v1/models")
    assert got.status == 204
    assert {"GET", "HEAD", "OPTIONS"} == set(got.headers["allow"].split(","))
    got = server.request("HEAD", "/v1/models")
    assert (got.status, got.body) == (200, b"")
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.post("/v1/completions", body, headers=form).status == 415
    assert server.post("/v1/completions", body).status == 200
    assert server.post("/v1/completions", b"{" + body).status == 400
    assert server.post("/v1/completions", b'{"x": "' + b"y" * (9 << 20) + b'"}').status == 413


def test_request_ids(server: Serving) -> None:
    got = server.get("/health", headers={"x-request-id": "mine-1"})
    assert got.headers["x-request-id"] == "mine-1"
    for strange in ("", "x" * 129, "a b", "\u00e9"):
        got = server.get("/health", headers={"x-request-id": strange})
        assert got.headers["x-request-id"].startswith("req_")


def test_foreign_hosts_are_refused(server: Serving) -> None:
    for host in ("evil.org", "evil.org:8000", "localhost.evil.org"):
        assert server.get("/v1/models", headers={"host": host}).status == 403
    for host in ("localhost", f"localhost:{server.port}", "[::1]:80", "127.0.0.1"):
        assert server.get("/v1/models", headers={"host": host}).status == 200


def test_a_key_is_wanted() -> None:
    words = ("--host", "0.0.0.0", "--cors-origin", "https://a.example")
    process = start("--threads", "1", *words, env={"KIE_API_KEY": ""})
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "--api-key" in said
    with serving("--threads", "1", *words, env={"KIE_API_KEY": "secret"}) as running:
        running.host = "127.0.0.1"
        assert running.get("/health").status == 200
        got = running.get("/v1/models")
        assert (got.status, got.json()["error"]["code"]) == (401, "invalid_api_key")
        for wrong in ("Bearer secre", "Bearer secrets", "Basic secret", "Bearer "):
            assert running.get("/v1/models", headers={"authorization": wrong}).status == 401
        for right in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert running.get("/v1/models", headers=right).status == 200
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        got = running.request("OPTIONS", "/v1/chat/completions", headers=asked)
        assert got.status == 200
        assert got.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in got.headers["access-control-allow-methods"]


def test_a_drained_server_ends_its_streams() -> None:
    with serving("--threads", "1") as running:
        body = {**GREEDY, "prompt": PROMPT, "ignore_eos": True, "max_tokens": 500}
        link = running.socket()
        text = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}"
        link.sendall(head.encode() + b"\r\n\r\n" + text)
        first = link.recv(4096)
        assert first.startswith(b"HTTP/1.1 200")
        running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while (got := running.get("/health")).status == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (got.status, got.json()) == (503, {"status": "draining"})
        refused = running.post("/v1/completions", body)
        assert refused.status == 503
        assert refused.headers["connection"] == "close"
        rest = first
        while piece := link.recv(65536):
            rest += piece
        assert b"data: [DONE]" in rest
        assert running.process.wait(60) == 0


def test_a_second_signal_ends_at_once() -> None:
    with serving("--threads", "1") as running:
        body = {**GREEDY, "prompt": PROMPT, "ignore_eos": True, "max_tokens": 2000}
        asked = threading.Thread(target=lambda: quiet(running, body))
        asked.start()
        time.sleep(0.3)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(10) in (0, 128 + signal.SIGINT)
        asked.join()


def quiet(running: Serving, body: dict[str, object]) -> None:
    """A request whose connection may be cut."""
    try:
        running.post("/v1/completions", body)
    except (OSError, http.client.HTTPException):
        return
