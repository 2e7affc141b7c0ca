"""kie.serve_ray: two replicas of the default model on this machine, one of them killed.

make test-ray
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import kie
import openai
import pytest
import ray
from kie.serve_ray import (
    BLOCK,
    Known,
    application,
    failure,
    lost_event,
    prefix_hashes,
    ranks,
    told_error,
)
from ray import serve
from ray.serve.schema import ApplicationStatus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from serving import Serving, events_of, serving

CHAT: list[Any] = [{"role": "user", "content": "def fibonacci(n):"}]
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 24}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 1900}
ON = {"ignore_eos": True}
ENGINE = {"device": "cpu", "threads": 1}


def app(replicas: int) -> serve.Application:
    return application(replicas=replicas, engine=ENGINE, server={"max_body_mb": 1}, drain_s=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Ray Serve on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(2))
    made = Serving.__new__(Serving)
    made.host, made.port, made.url = "127.0.0.1", port, f"http://127.0.0.1:{port}"
    yield made
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[Serving]:
    """One server without Ray."""
    with serving("--threads", "1") as running:
        yield running


def running() -> int:
    """Replicas that run."""
    [found] = serve.status().applications.values()
    assert found.status is not ApplicationStatus.DEPLOY_FAILED
    return found.deployments["kie-replica"].replica_states.get("RUNNING", 0)


def until(seconds: float, is_so: Any) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kill(replica: str) -> None:
    """Ends a replica's process, as a machine that fails would."""
    named = ray.util.list_named_actors(all_namespaces=True)
    [actor] = [one for one in named if replica in one["name"]]
    ray.kill(ray.get_actor(**actor))


def test_answers_are_those_of_one_server(server: Serving, alone: Serving) -> None:
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**GREEDY, "messages": CHAT},
        "/v1/completions": {**GREEDY, "prompt": "def f("},
        "/v1/messages": {**GREEDY, "messages": CHAT},
        "/v1/messages/count_tokens": {"model": "default", "messages": CHAT},
        "/tokenize": {"prompt": "def f("},
    }
    kept = ("choices", "content", "input_tokens", "tokens", "stop_reason", "model")
    for path, body in paths.items():
        ours, theirs = server.post(path, body), alone.post(path, body)
        assert ours.status == theirs.status == 200, ours.body
        assert "x-kie-replica" in ours.headers
        for name in kept:
            assert ours.json().get(name) == theirs.json().get(name), (path, name)
    for method, path, body in (
        ("POST", "/v1/chat/completions", {**GREEDY, "messages": CHAT, "n": 2}),
        ("POST", "/v1/chat/completions", b"{"),
        ("POST", "/v1/messages", {"model": "x"}),
        ("POST", "/v1/completions", b"[" * 100_000),
        ("POST", "/v1/completions", b"\xff"),
        ("GET", "/v1/models/nope", None),
        ("GET", "/v1/models/%ff", None),
        ("GET", "/v1/models/a%2Fb%20c?x=%20", None),
        ("GET", "/v1/messages", None),
        ("OPTIONS", "/v1/models", None),
        ("GET", "/nope", None),
    ):
        ours, theirs = (one.request(method, path, body) for one in (server, alone))
        assert ours.status == theirs.status, (path, ours.body)
        if ours.body:
            assert ours.json()["error"] == theirs.json()["error"]
    assert server.get("/health").json() == {"status": "ok"}
    got = server.get("/v1/models", headers={"x-request-id": "mine"})
    assert got.headers["x-request-id"] == "mine"
    big = server.post("/v1/completions", b" " * (2 << 20))
    assert (big.status, big.json()["error"]["type"]) == (413, "invalid_request_error")


def test_clients_stream(server: Serving, client: openai.OpenAI, demo: kie.Engine) -> None:
    wanted = demo.generate(messages=CHAT, temperature=0, max_tokens=24).text
    chunks = client.chat.completions.create(**GREEDY, messages=CHAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as other,
        other.messages.stream(model="default", max_tokens=24, messages=CHAT) as made,
    ):
        assert "".join(made.text_stream) == wanted
    got = server.post("/v1/chat/completions", {**GREEDY, "messages": CHAT, "stream": True})
    assert list(events_of(got.body))[-1] == "[DONE]"


@pytest.fixture(scope="module")
def demo() -> Iterator[kie.Engine]:
    with kie.Engine(**ENGINE) as opened:
        yield opened


def trace(server: Serving, turns: int = 6) -> tuple[int, set[str]]:
    """Cached tokens of four agents whose turns come in between each other, and who answered."""
    agents = [f"You are agent {n}. " + f"Rule {n}: be brief and exact. " * 12 for n in range(4)]
    talks: list[list[Any]] = [[{"role": "user", "content": rules}] for rules in agents]
    cached, names = 0, set[str]()
    for turn in range(turns):
        for n, talk in enumerate(talks):
            got = server.post("/v1/chat/completions", {**GREEDY, "messages": talk})
            told = got.json()
            cached += told["usage"]["prompt_tokens_details"]["cached_tokens"]
            names.add(got.headers.get("x-kie-replica", ""))
            said = told["choices"][0]["message"]["content"]
            result = f"result {turn} of agent {n}: " + "value " * 20
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
    return cached, names


def test_turns_go_where_their_beginning_is(server: Serving, alone: Serving) -> None:
    most, _ = trace(alone)
    got, names = trace(server)
    assert most > 1000
    assert got >= 0.9 * most, (got, most)
    assert len(names) == 2, "agents are spread over both replicas"


def test_a_client_that_leaves_ends_its_request(server: Serving) -> None:
    body = {**LONG, **ON, "prompt": "def left(", "stream": True}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
    link = server.socket()
    link.sendall(head.encode() + text)
    told = link.recv(4096)
    assert told.startswith(b"HTTP/1.1 200")
    [name] = [line for line in told.decode().split("\r\n") if line.startswith("x-kie-replica")]
    link.close()

    def idle() -> bool:
        got = server.get("/metrics")
        same = got.headers["x-kie-replica"] == name.split(": ")[1]
        return same and "\nkie_requests_running 0\n" in got.body.decode()

    # Its 1,900 tokens take longer than this.
    until(2, idle)


def test_a_killed_replica(server: Serving, client: openai.OpenAI, demo: kie.Engine) -> None:
    """A stream that has begun ends with an error; what has not is answered by the other one."""
    create = client.completions.with_raw_response.create
    began = create(**LONG, prompt="def lost(", stream=True, extra_body=ON)
    name = began.headers["x-kie-replica"]
    chunks = began.parse()
    next(iter(chunks))
    # A request that waits for its whole answer at the same replica: it knows the beginning.
    beginning = "x = 1\n" * BLOCK
    whole = {**GREEDY, "prompt": [5] * 40, "max_tokens": 1500, **ON}
    wanted = demo.generate([5] * 40, temperature=0, max_tokens=1500, ignore_eos=True).text
    found: list[Any] = []
    asked = [
        threading.Thread(target=lambda: found.append(server.post("/v1/completions", whole)))
        for _ in range(4)
    ]
    for one in asked:
        one.start()
    time.sleep(0.3)
    kill(name)
    with pytest.raises(openai.APIError, match="the replica was lost"):
        for _ in chunks:
            pass
    for one in asked:
        one.join(60)
        assert not one.is_alive()
    assert [got.status for got in found] == [200] * 4
    assert {got.json()["choices"][0]["text"] for got in found} == {wanted}
    assert name not in {got.headers["x-kie-replica"] for got in found}
    assert len(prefix_hashes(json.dumps({"prompt": beginning}).encode())) == 6
    until(60, lambda: running() == 2)


def test_a_replica_that_is_taken_away_ends_its_requests(server: Serving) -> None:
    """Two streams on two replicas, one of which is to go: both come to their end."""
    texts: list[bytes] = []

    def stream(prompt: str) -> None:
        got = server.post("/v1/completions", {**LONG, **ON, "prompt": prompt, "stream": True})
        texts.append(got.body)

    asked = [threading.Thread(target=stream, args=(f"# {n}",)) for n in range(4)]
    for one in asked:
        one.start()
    time.sleep(0.5)
    serve.run(app(1))
    for one in asked:
        one.join(120)
    ends = [list(events_of(text))[-2]["choices"][0]["finish_reason"] for text in texts]
    assert ends == ["length"] * 4
    assert server.post("/v1/completions", {**GREEDY, "prompt": "x"}).status == 200


def test_ranks() -> None:
    none = dict.fromkeys("abc", 0)
    assert ranks({}, {}, {}, 8) == []
    assert ranks({"a": 0, "b": 0, "c": 3}, {"a": 0, "b": 2, "c": 1}, none, 8) == [
        ["b"],
        ["c"],
        ["a"],
    ]
    # One that knows most of the prompt and is overloaded is passed over.
    assert ranks({"a": 9, "b": 1, "c": 0}, {"a": 5, "b": 2, "c": 0}, none, 8) == [
        ["b"],
        ["c"],
        ["a"],
    ]
    # A prompt that nobody knows goes where there is least to do, then where least is held.
    assert ranks({"a": 2, "b": 0, "c": 1}, none, none, 8) == [["b"], ["c"], ["a"]]
    assert ranks(none, none, {"a": 5, "b": 1, "c": 3}, 8) == [["b"], ["c"], ["a"]]


def test_beginnings() -> None:
    def of(**body: Any) -> list[int]:
        return prefix_hashes(json.dumps({"model": "m", **body}).encode())

    talk = [{"role": "user", "content": "a" * 600}]
    more = [*talk, {"role": "assistant", "content": "b" * 300}, {"role": "user", "content": "c"}]
    assert len(of(messages=talk)) == 2
    assert of(messages=more)[:2] == of(messages=talk)
    assert of(messages=talk, system="x")[0] != of(messages=talk)[0]
    assert of(prompt=[7] * 500)[:1] != of(prompt=[8] * 500)[:1]
    for odd in (b"", b"{", b"[]", b"3", b'{"messages": 3}', b'{"prompt": "\\ud800"}' * 1):
        assert prefix_hashes(odd) == []
    known = Known()
    known.add(of(messages=talk))
    assert known.length(of(messages=more)) == 2
    assert known.length(of(messages=talk, system="x")) == 0


def test_errors_have_the_form_of_their_api() -> None:
    assert told_error("/v1/messages", 413, "m")["error"]["type"] == "request_too_large"
    assert told_error("/v1/responses", 429, "m")["error"]["code"] == "rate_limit_exceeded"
    assert lost_event("/v1/completions", "m")[0] == ""
    name, told = lost_event("/v1/responses", "m")
    assert (name, told["type"], told["code"]) == ("error", "error", "server_error")
    assert failure("/v1/completions", 503, "m").headers["retry-after"] == "1"


def test_autoscaling_is_handed_on() -> None:
    bounds = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 4}
    built = application(autoscaling=bounds, engine={"max_batch": 2, "max_queue": 3})
    [replica] = built._bound_deployment.init_args[:1]
    config = replica._bound_deployment._deployment_config
    assert config.autoscaling_config.max_replicas == 3
    assert config.autoscaling_config.target_ongoing_requests == 4
    assert config.max_ongoing_requests == 13
