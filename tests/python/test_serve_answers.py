"""What answers of the server hold: log-probabilities, stops, chunks, metrics, logs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import kie
import pytest
from serving import Serving, serving, start

PROMPT = "def fibonacci(n):"
CHAT = [{"role": "user", "content": PROMPT}]
BASE = {"model": "default", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--threads", "1", "--max-running", "2", "--max-queue", "1") as running:
        yield running


def complete(server: Serving, **more: Any) -> Any:
    got = server.post("/v1/completions", {**BASE, "prompt": PROMPT, **more})
    assert got.status == 200, got.body
    return got.json()


def test_logprobs_of_chat(server: Serving) -> None:
    asked = {**BASE, "messages": CHAT, "logprobs": True, "top_logprobs": 3}
    whole = server.post("/v1/chat/completions", asked).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert len(entries) == 12
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text == whole["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        # Greedy: the chosen token is the most probable.
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0
    chunks = server.events("/v1/chat/completions", asked)[:-1]
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e for part in streamed if part for e in part["content"]] == entries
    alone = server.post("/v1/chat/completions", {**asked, "logprobs": False})
    assert (alone.status, alone.param) == (400, "top_logprobs")
    alone = server.post("/v1/chat/completions", {**asked, "top_logprobs": 21})
    assert (alone.status, alone.param) == (400, "top_logprobs")


def test_echo_and_logprobs_of_completions(server: Serving, demo: kie.Engine) -> None:
    import numpy as np

    plain = complete(server)["choices"][0]["text"]
    whole = complete(server, echo=True, logprobs=2)["choices"][0]
    assert whole["text"] == PROMPT + plain
    found = whole["logprobs"]
    ids = demo.tokenize(PROMPT)
    assert len(found["tokens"]) == len(ids) + 12
    assert found["token_logprobs"][0] is None
    raw = demo.logits(ids).astype(np.float64)
    wanted = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    for at in range(1, len(ids)):
        assert abs(found["token_logprobs"][at] - wanted[at - 1, ids[at]]) < 1e-4
        assert len(found["top_logprobs"][at]) <= 2
    for at, token in list(enumerate(found["tokens"]))[1:]:
        begin = found["text_offset"][at]
        assert whole["text"][begin : begin + len(token)] == token
    only = complete(server, echo=True, logprobs=2, max_tokens=0)
    assert only["choices"][0]["text"] == PROMPT
    assert only["choices"][0]["logprobs"]["tokens"] == found["tokens"][: len(ids)]
    assert only["usage"]["completion_tokens"] == 0
    streamed = server.events(
        "/v1/completions", {**BASE, "prompt": PROMPT, "echo": True, "logprobs": 2}
    )
    parts = [c["choices"][0]["logprobs"] for c in streamed[:-1] if c["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == found[name]
    by_ids = complete(server, prompt=ids, echo=True)["choices"][0]["text"]
    assert by_ids == PROMPT + plain


def test_why_it_stopped(server: Serving, demo: kie.Engine) -> None:
    text = complete(server)["choices"][0]["text"]
    stop = text[4:7]
    choice = complete(server, stop=[stop, "\u2603"])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]
    ids = demo.generate(PROMPT, temperature=0, max_tokens=12).token_ids
    choice = complete(server, stop_token_ids=[ids[3]])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[3])
    choice = complete(server)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    late = {"max_tokens": 2000, "ignore_eos": True, "timeout": 0.05}
    choice = complete(server, **late)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")


def test_seeds_repeat(server: Serving) -> None:
    hot = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    first = complete(server, seed=11, **hot)
    assert complete(server, seed=11, **hot)["choices"] == first["choices"]
    drawn = complete(server, **hot)
    assert 0 <= drawn["seed"] < 2**53
    assert complete(server, seed=drawn["seed"], **hot)["choices"] == drawn["choices"]


def test_chunks_by_interval(server: Serving) -> None:
    asked = {**BASE, "prompt": PROMPT, "logprobs": 0}
    for interval, counts in ((1, [1] * 12), (5, [1, 5, 5, 1])):
        events = server.events("/v1/completions", {**asked, "stream_interval": interval})
        assert events[-1] == "[DONE]"
        found = [e["choices"][0]["logprobs"] for e in events[:-2]]
        assert [len(part["tokens"]) for part in found] == counts
    own = server.events("/v1/completions", {**asked, "max_tokens": 200, "ignore_eos": True})
    counts = [len(e["choices"][0]["logprobs"]["tokens"]) for e in own[:-2]]
    assert counts[0] == 1
    assert max(counts) <= 8
    assert sum(counts) == 200
    assert own[-2]["timings"]["predicted_n"] == 200


def test_tokenize_and_back(server: Serving, demo: kie.Engine) -> None:
    for text in (PROMPT, "d\u00e9f \u2603 \U0001f600", "", " x", "<s></s>"):
        got = server.post("/tokenize", {"prompt": text}).json()
        assert got["tokens"] == demo.tokenize(text)
        assert got["count"] == len(got["tokens"])
        assert server.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    used = server.post("/v1/chat/completions", {**BASE, "messages": CHAT}).json()["usage"]
    assert chat["count"] == used["prompt_tokens"]
    for body, param in (({}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": "x", "y": 1}, "y")):
        got = server.post("/tokenize", body)
        assert (got.status, got.param) == (400, param)
    assert server.post("/detokenize", {"tokens": [10**9]}).status == 400
    assert server.post("/detokenize", {"tokens": ["x"]}).status == 400


def test_messages_of_every_kind(server: Serving) -> None:
    """A template that has no place for a system message still gets its text."""
    parts = [{"type": "text", "text": "def f(", "cache_control": {"type": "ephemeral"}}]
    turns = [
        {"role": "developer", "content": "Write Python."},
        {"role": "user", "content": parts, "name": "ada"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": []},
        {"role": "user", "content": "go on"},
    ]
    got = server.post("/v1/chat/completions", {**BASE, "messages": turns})
    assert got.status == 200, got.body
    with_system = server.post("/tokenize", {"messages": turns}).json()["count"]
    without = server.post("/tokenize", {"messages": turns[1:]}).json()["count"]
    assert with_system > without
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    got = server.post(
        "/v1/chat/completions", {**BASE, "messages": [{"role": "user", "content": image}]}
    )
    assert (got.status, got.param) == (400, "messages[0].content")
    assert "unsupported content" in got.json()["error"]["message"]


def test_metrics(server: Serving) -> None:
    before = values(server)
    complete(server)
    server.get("/v1/models/default")
    server.get("/somewhere")
    after = values(server)

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("kie_generation_tokens_total") == 12
    assert grew("kie_prompt_tokens_total") > 0
    assert grew('kie_requests_total{finish_reason="length"}') == 1
    assert grew("kie_time_to_first_token_seconds_count") == 1
    assert grew("kie_inter_token_latency_seconds_count") == 11
    assert grew("kie_e2e_request_latency_seconds_count") == 1
    assert grew("kie_request_queue_time_seconds_count") == 1
    assert grew("kie_request_prefill_time_seconds_count") == 1
    assert grew("kie_request_decode_time_seconds_count") == 1
    assert grew('kie_http_requests_total{path="/v1/completions",code="200"}') == 1
    assert grew('kie_http_requests_total{path="/v1/models/{id}",code="200"}') == 1
    assert grew('kie_http_requests_total{path="other",code="404"}') == 1
    assert grew("kie_prefix_cache_queried_tokens_total") == grew("kie_prompt_tokens_total")
    names = """kie_prefix_cache_hit_tokens_total kie_requests_running kie_requests_waiting
        kie_kv_cache_usage_ratio kie_decode_tokens_per_second kie_watchdog_trips_total
        kie_memory_bandwidth_utilization_ratio kie_grammar_mask_seconds_count""".split()
    assert not [name for name in names if name not in after]
    assert any(name.startswith("kie_stalls_total{cause=") for name in after)
    assert any(name.startswith("kie_build_info{version=") for name in after)
    text = server.get("/metrics").body.decode()
    bounds = re.findall(r'kie_inter_token_latency_seconds_bucket\{le="(.+?)"\}', text)
    wanted = [50, 100, 150, 200, 300, 400, 500, 700, 1e3, 1.5e3, 2e3, 3e3, 5e3, 1e4]
    wanted += [25e3, 50e3, 1e5, 25e4, 5e5, 1e6]
    assert [round(float(bound) * 1e6) for bound in bounds[:-1]] == [round(w) for w in wanted]
    assert bounds[-1] == "+Inf"


def test_metrics_of_drafts(server: Serving) -> None:
    before = values(server)
    expected = complete(server)["choices"][0]["text"]
    timings = complete(server, prediction={"type": "content", "content": expected})["timings"]
    after = values(server)
    assert timings["draft_n_accepted"] > 0
    for name, count in (("", "draft_n"), ("_accepted", "draft_n_accepted")):
        name = f"kie_draft_tokens{name}_total"
        assert after[name] - before[name] == timings[count]


def values(server: Serving) -> dict[str, float]:
    """All samples of /metrics by name and labels."""
    text = server.get("/metrics").body.decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_page(server: Serving) -> None:
    got = server.get("/")
    assert got.headers["content-security-policy"] == "default-src 'self'"
    assert got.headers["content-type"].startswith("text/html")
    linked = re.findall(r'(?:src|href)="([^"#]+)"', got.body.decode())
    assert linked
    for path in linked:
        assert server.get(f"/{path}").status == 200, path


def test_logs_hold_no_text() -> None:
    secret = "vErYsEcReT"
    words = ("--threads", "1", "--log-json", "--metrics-compat", "vllm", "--protect-metrics")
    with serving(*words, "--api-key", "k") as running:
        key = {"authorization": "Bearer k"}
        body = {**BASE, "prompt": f"{secret} = ", "user": secret}
        got = running.post("/v1/completions", body, headers={**key, "x-request-id": "id-7"})
        assert got.status == 200
        talk = {"model": "default", "messages": [{"role": "user", "content": secret}]}
        tool = {"type": "function", "name": secret, "parameters": {"description": secret}}
        others = {
            "/v1/chat/completions": {**talk, "max_tokens": 2},
            "/v1/messages": {**talk, "max_tokens": 2, "system": secret},
            "/v1/responses": {
                "model": "default",
                "input": secret,
                "tools": [tool],
                "max_output_tokens": 2,
            },
        }
        for path, other in others.items():
            assert running.post(path, other, headers=key).status == 200
            assert running.post(path, {**other, "x": secret}, headers=key).status == 400
        assert running.get("/metrics").status == 401
        assert "vllm:num_requests_running" in running.get("/metrics", headers=key).body.decode()
        assert running.get("/").status == 200
        assert running.stop() == 0
        assert running.process.stderr is not None
        said = running.process.stderr.read()
    assert secret not in said
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    mine = [line for line in lines if line["request_id"] == "id-7"]
    assert [line["event"] for line in mine] == ["generation", "request"]
    assert mine[0]["completion_tokens"] == 12
    assert (mine[1]["status"], mine[1]["path"]) == (200, "/v1/completions")


def test_a_port_in_use_and_a_model_that_is_not_there(server: Serving) -> None:
    taken = start("--port", str(server.port))
    out, said = taken.communicate(timeout=60)
    assert (taken.returncode, out) == (1, "")
    assert str(server.port) in said
    assert len(said.splitlines()) == 2
    absent: subprocess.Popen[str] = start("/nowhere/at/all")
    out, said = absent.communicate(timeout=60)
    assert (absent.returncode, out) == (1, "")
    assert "/nowhere/at/all" in said
