"""What every API of the server does alike: fields, errors, methods, ends of answers."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import socket
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kie
import pytest
from conftest import TINY
from kie.cli import serve
from scripted import SCRIPTS
from serving import Answer, Serving, events_of, named_events, serving

PROMPT = "def fibonacci(n):"
CHAT = [{"role": "user", "content": PROMPT}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": CHAT},
}
MOST = {"/v1/responses": "max_output_tokens"}
STREAM_ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    words = ("--served-model-name", "tiny", "--max-running", "2", "--max-queue", "1")
    with serving("--threads", "1", *words) as running:
        yield running


def body(path: str, most: int | None = 12, **more: Any) -> dict[str, Any]:
    """A small request to a path."""
    made: dict[str, Any] = {"model": "default", "temperature": 0, **PATHS[path]}
    if most is not None:
        made[MOST.get(path, "max_tokens")] = most
    return {**made, **more}


def said(path: str, told: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == "/v1/chat/completions":
        return str(told["choices"][0]["message"]["content"])
    if path == "/v1/completions":
        return str(told["choices"][0]["text"])
    if path == "/v1/responses":
        parts = [part for item in told["output"] for part in item["content"]]
        return "".join(part["text"] for part in parts)
    return "".join(block["text"] for block in told["content"])


def pieces(path: str, got: Answer) -> list[str]:
    """The texts of a stream's chunks, in order."""
    if path in STREAM_ENDS:
        events = [data for _, data in named_events(got.body)]
        assert events[-1]["type"] in STREAM_ENDS[path]
        deltas = [event["delta"] for event in events if event["type"].endswith("_text.delta")]
        texts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        return deltas + [text["text"] for text in texts]
    *chunks, last = events_of(got.body)
    assert last == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
    ]


def refused(got: Answer) -> str:
    """The message of a 400, in the form of either API, with the field in front."""
    assert got.status == 400, got.body
    told = got.json()["error"]
    assert told["type"] == "invalid_request_error"
    return f"{told.get('param')}: {told['message']}"


def test_every_option_of_the_engine_is_one_of_serve() -> None:
    parser = ArgumentParser()
    serve.define(parser)
    known = {action.dest for action in parser._actions}
    other = {"max_batch": "max_running"}
    other |= {name: f"no_{name}" for name in ("prefix_cache", "reproducible")}
    names = list(inspect.signature(kie.Engine.__init__).parameters)[1:]
    assert {other.get(name, name) for name in names if name != "progress"} <= known


@pytest.mark.parametrize("path", PATHS)
def test_names_of_the_model(server: Serving, demo: kie.Engine, path: str) -> None:
    for name in ("tiny", demo.info()["model"], "default"):
        got = server.post(path, body(path, 1, model=name))
        assert got.status == 200, got.body
        assert got.json()["model"] == "tiny"
    got = server.post(path, body(path, 1, model="gpt-4o"))
    assert got.status == 404
    assert "gpt-4o" in got.json()["error"]["message"]
    assert "model" in refused(server.post(path, body(path, 1, model=3)))
    assert "model" in refused(server.post(path, {**body(path, 1), "model": None}))


@pytest.mark.parametrize("path", PATHS)
def test_sampling_is_what_python_does(server: Serving, demo: kie.Engine, path: str) -> None:
    hot = {"temperature": 0.9, "seed": 5}
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        hot,
        {**hot, "top_k": 7},
        {**hot, "top_p": 0.6},
        {**hot, "min_p": 0.2},
        {**hot, "repetition_penalty": 1.3},
        {**hot, "presence_penalty": 0.7, "frequency_penalty": -0.5},
        {**hot, "min_tokens": 12, "ignore_eos": True},
        {**hot, "stop_token_ids": [300, 301], "timeout": 30},
        {**hot, "logit_bias": {"300": 50}},
        # None is named: what the model's generation_config.json says.
        {"seed": 5},
    ]
    for sampling in asked:
        keywords = {**sampling, "max_tokens": 12}
        if bias := keywords.get("logit_bias"):
            keywords["logit_bias"] = {int(token): value for token, value in bias.items()}
        if path == "/v1/completions":
            wanted = demo.generate(PROMPT, **keywords)
        else:
            wanted = demo.generate(messages=CHAT, **keywords)
        sent = body(path, temperature=None) | sampling
        got = server.post(path, sent)
        assert got.status == 200, got.body
        assert said(path, got.json()) == wanted.text, sampling
        assert "".join(pieces(path, server.post(path, {**sent, "stream": True}))) == wanted.text


@pytest.mark.parametrize("own", [{}, {"do_sample": True, "temperature": 0.6, "top_p": 0.8}])
def test_a_temperature_that_nobody_names(tmp_path: Path, own: dict[str, Any]) -> None:
    for file in ("config", "tokenizer", "tokenizer_config"):
        shutil.copy(TINY / f"{file}.json", tmp_path)
    shutil.copy(TINY / "model.safetensors", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    named = {"temperature": own.get("temperature", 1.0), "top_p": own.get("top_p", 1.0)}
    asked = {"model": "default", "prompt": "x", "seed": 4, "max_tokens": 20, "ignore_eos": True}
    with serving(str(tmp_path), "--threads", "1") as other:
        texts = [
            other.post("/v1/completions", {**asked, **more}).json()["choices"][0]["text"]
            for more in ({}, named, {"temperature": 0})
        ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_there_is_named(server: Serving, path: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    formats: list[Any] = [{"type": "xml"}, schema, {"type": "grammar", "syntax": "lark"}, "text"]
    wrong: list[tuple[str, Any]] = [
        *(("structured_outputs", {kind: 3}) for kind in ("json", "regex", "choice", "grammar")),
        *(("structured_outputs", value) for value in ({}, {"regex": "a", "grammar": "b"}, "a")),
        *(("structured_outputs", {kind: "("}) for kind in ("json", "regex", "grammar")),
        *(("response_format", form) for form in formats),
        *(("grammar", "x"), ("grammar", {"syntax": "ebnf", "definition": "x"}), ("grammar", 3)),
        *(("speculate", "mtp"), ("prediction", {"content": "x"})),
        *(("n", 2), ("audio", {}), ("web_search_options", {}), ("previous_response_id", "r")),
        *(("conversation", "c"), ("background", True), ("store", True), ("nonsense", 1)),
        *(("functions", []), ("function_call", "auto"), ("best_of", 2), ("suffix", "x")),
        *(("modalities", ["text", "audio"]), ("service_tier", "flex"), ("truncation", "auto")),
        *(("include", ["x"]), ("thinking", {"type": "magic"}), ("prompt_template", "x")),
    ]
    for name, value in wrong:
        message = refused(server.post(path, body(path, **{name: value})))
        assert name in message, (name, message)
    streamed = server.post(path, body(path, stream=True, nonsense=1))
    assert "nonsense" in refused(streamed)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_types_are_named(server: Serving, path: str) -> None:
    texts: list[Any] = [3, True, [], {}]
    numbers: list[Any] = ["1", True, [], {}]
    flags: list[Any] = [1, "true", [], {}]
    wrong: dict[str, list[Any]] = {
        "model": texts,
        **{name: [*numbers, -1] for name in ("temperature", "top_p", "min_p", "timeout")},
        **{name: [*numbers, -1, 1.5, 2**70] for name in ("top_k", "min_tokens")},
        "seed": [*numbers, 1.5, 2**70],
        "stop_token_ids": ["1", 1, [1.5], ["1"], [-1], [2**40], {}],
        "logit_bias": [[], 3, {"x": 1}, {"1": "x"}, {"-1": 1}, {"99999": 1}],
        "ignore_eos": flags,
        "stream": flags,
        MOST.get(path, "max_tokens"): [*numbers, -1, 0, 1.5],
    }
    if path == "/v1/messages":
        wrong |= {"metadata": texts[:3], "system": [3, {}], "stop_sequences": [3, "x", [3], [""]]}
    else:
        wrong |= {"user": texts, "metadata": texts[:3], "parallel_tool_calls": flags}
        wrong |= {"stop": [3, [3], {}, "", [""]], "prompt_cache_key": texts}
        wrong |= {"stream_options": [3, "x", []], "n": [0, 2, "1", True, 1.5]}
    if path != "/v1/completions":
        wrong |= {"tools": [3, "x", {}, [3], [{}]]}
    if path == "/v1/chat/completions":
        wrong |= {"logprobs": [1, "x"], "top_logprobs": ["x", -1], "messages": [3, {}, "x", [3]]}
    if path == "/v1/completions":
        wrong |= {"logprobs": [True, "x", -1, 21], "echo": flags, "prompt": [3, {}, [{}], [-1]]}
    for name, values in wrong.items():
        for value in values:
            sent = body(path, **{"stream": True, name: value})
            message = refused(server.post(path, sent))
            assert name in message, (name, value, message)


def test_a_wrong_id_is_named(server: Serving) -> None:
    for tokens, param in (([5, -1], "tokens[1]"), ([5, 99999], "tokens"), ("x", "tokens")):
        got = server.post("/detokenize", {"tokens": tokens})
        assert (got.status, got.param) == (400, param), got.body


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_json(server: Serving, path: str) -> None:
    sound = json.dumps(body(path, 1)).encode()
    wrong = [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"3",
        sound[:-1],
        sound + b"x",
        b"\xef\xbb\xbf" + sound,
        sound.replace(b"def", b"d\xe9f"),
        sound.replace(b"def", b"\\ud800"),
        sound.replace(b'"temperature": 0', b'"temperature": NaN'),
        sound.replace(b'"temperature": 0', b'"temperature": Infinity'),
        sound.replace(b'"temperature": 0', b'"temperature": 1e999'),
        sound.replace(b'"temperature": 0', b'"temperature": 00'),
        sound.replace(b'"temperature": 0', b"'temperature': 0"),
        sound.replace(b"{", b'{"user": ' + b"[" * 500 + b"]" * 500 + b", ", 1),
    ]
    for sent in wrong:
        assert sent != sound
        got = server.post(path, sent)
        assert refused(got), sent
    # Of a field that is there twice the last one counts, as in Python.
    twice = sound.replace(b'"temperature": 0', b'"temperature": -1, "temperature": 0')
    assert server.post(path, twice).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_types_of_bodies(server: Serving, path: str) -> None:
    sound = json.dumps(body(path, 1)).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert server.post(path, sound, headers={"content-type": kind}).status == 200
    for name, value in (
        *(("content-type", kind) for kind in ("text/plain", "multipart/form-data", "x")),
        ("content-encoding", "gzip"),
    ):
        got = server.post(path, sound, headers={"content-type": "application/json", name: value})
        assert got.status == 415
        assert name in got.json()["error"]["message"]


def test_null_is_absent_everywhere(server: Serving) -> None:
    part = {"type": "text", "text": PROMPT, "cache_control": None}
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": [part], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "1", "name": None},
        {"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": None},
        {"role": "user", "content": "y"},
    ]
    more = {
        "tools": [{"type": "function", "function": function}],
        "stream_options": None,
        "tool_choice": None,
        "stop": None,
        "logit_bias": None,
        "metadata": None,
    }
    path = "/v1/chat/completions"
    got = server.post(path, body(path, 2, messages=turns, **more))
    assert got.status == 200, got.body
    options = {"stream": True, "stream_options": {"include_usage": None}}
    assert server.post(path, body(path, 2, **options)).status == 200
    path = "/v1/messages"
    block = {"type": "text", "text": "x", "cache_control": None}
    turns = [{"role": "user", "content": [block]}]
    tool = {"name": "f", "description": None, "input_schema": {"type": "object"}, "type": None}
    more = {"tools": [tool], "system": None, "stop_sequences": None, "thinking": None}
    got = server.post(path, body(path, 2, messages=turns, **more))
    assert got.status == 200, got.body
    path = "/v1/responses"
    item = {"type": None, "role": "user", "content": "x", "id": None, "status": None}
    more = {"reasoning": {"effort": None, "summary": None}, "text": {"format": None}}
    got = server.post(path, body(path, 2, input=[item], **more))
    assert got.status == 200, got.body


def test_what_has_no_effect_inside(server: Serving) -> None:
    mark = {"type": "ephemeral"}
    schema = {"$schema": "https://json-schema.org/x", "type": "object", "properties": {}}
    function = {"name": "f", "parameters": schema, "strict": True, "cache_control": mark}
    path = "/v1/chat/completions"
    part = {"type": "text", "text": "x", "annotations": [], "cache_control": mark}
    turns = [{"role": "user", "content": [part], "cache_control": mark, "annotations": []}]
    more = {"tools": [{"type": "function", "function": function, "cache_control": mark}]}
    got = server.post(f"{path}?api-version=1&beta=true", body(path, 2, messages=turns, **more))
    assert got.status == 200, got.body
    # What tunes caching or telemetry.
    tuning: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"prompt_cache_options": {"ttl": "30m"}},
        "/v1/responses": {"prompt_cache_options": {"mode": "explicit"}},
        "/v1/messages": {"diagnostics": {}, "user_profile_id": "u", "speed": "standard"},
    }
    for path, more in tuning.items():
        got = server.post(path, body(path, 1, **more))
        assert got.status == 200, got.body


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_answer_is_one(server: Serving, demo: kie.Engine, path: str) -> None:
    if path == "/v1/completions":
        [first, *_] = demo.generate(PROMPT, temperature=0, max_tokens=2).token_ids
    else:
        [first, *_] = demo.generate(messages=CHAT, temperature=0, max_tokens=2).token_ids
    sent = body(path, stop_token_ids=[first])
    told = server.post(path, sent).json()
    assert said(path, told) == ""
    ends = {"/v1/responses": told.get("status"), "/v1/messages": told.get("stop_reason")}
    end = ends.get(path) or told["choices"][0]["finish_reason"]
    assert end == {"/v1/responses": "completed", "/v1/messages": "end_turn"}.get(path, "stop")
    assert "".join(pieces(path, server.post(path, {**sent, "stream": True}))) == ""


def test_the_end_of_the_sequence_counts(talker: Serving) -> None:
    asked = {"model": "talker", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    told = talker.post("/v1/chat/completions", asked).json()
    choice, entries = told["choices"][0], told["choices"][0]["logprobs"]["content"]
    assert choice["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] == len(entries)
    assert entries[-1]["token"] == "</s>"
    assert choice["message"]["content"] == SCRIPTS["plain"]
    assert "".join(entry["token"] for entry in entries[:-1]) == SCRIPTS["plain"]
    got = talker.events("/v1/chat/completions", asked)
    parts = [e["choices"][0]["logprobs"] for e in got[:-1] if e["choices"]]
    assert [entry for part in parts if part for entry in part["content"]] == entries


@pytest.mark.parametrize("path", PATHS)
def test_no_chunk_splits_a_character(talker: Serving, path: str) -> None:
    """Tokens of the script are cut between bytes; without tools its call is text."""
    asked = "x #call"
    told = {"messages": [{"role": "user", "content": asked}], "prompt": "x<|call|>"}
    key = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    sent = {"model": "talker", key: asked if key == "input" else told[key], "stream_interval": 1}
    sent["max_tokens" if key != "input" else "max_output_tokens"] = 200
    texts = pieces(path, talker.post(path, {**sent, "stream": True}))
    assert "".join(texts) == SCRIPTS["call"]
    assert len(texts) > 10
    assert not any("\ufffd" in text for text in texts)


def test_without_a_number_it_goes_to_the_end_of_the_context(server: Serving) -> None:
    path = "/v1/completions"
    told = server.post(path, body(path, None, prompt=[5] * 2030, ignore_eos=True)).json()
    assert told["usage"]["completion_tokens"] == 18
    assert told["choices"][0]["finish_reason"] == "length"


def test_what_comes_from_the_cache_is_told(server: Serving) -> None:
    long = "# " + "numbers and their sums, " * 60
    asked = {
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/v1/responses": {"input": [{"role": "user", "content": "a " + long}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "b " + long}]},
    }
    for path, more in asked.items():
        first, second = (server.post(path, body(path, 2, **more)).json()["usage"] for _ in "12")
        if path == "/v1/messages":
            cached = [usage["cache_read_input_tokens"] for usage in (first, second)]
            assert first["input_tokens"] + cached[0] == second["input_tokens"] + cached[1]
        elif path == "/v1/responses":
            cached = [usage["input_tokens_details"]["cached_tokens"] for usage in (first, second)]
        else:
            cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
        assert cached[0] < 100 < cached[1], (path, cached)


def test_chunks_before_the_last_have_no_usage_yet(server: Serving) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        options = {"stream_options": {"include_usage": True}}
        *chunks, last, done = server.events(path, body(path, 3, **options))
        assert done == "[DONE]"
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["usage"]["completion_tokens"] == 3
        assert "usage" not in server.events(path, body(path, 3))[0]


def test_seeds_are_in_streams(server: Serving) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        events = server.events(path, body(path, 3, seed=77))
        assert 77 in [event.get("seed") for event in events[:-1]]


@pytest.mark.parametrize("path", PATHS)
def test_timings_are_told(server: Serving, path: str) -> None:
    wanted = set(kie.Timings.__match_args__)
    assert set(server.post(path, body(path, 3)).json()["timings"]) == wanted
    got = server.post(path, body(path, 3, stream=True))
    if path in STREAM_ENDS:
        told = [data.get("response", data) for _, data in named_events(got.body)]
    else:
        told = [data for data in events_of(got.body) if data != "[DONE]"]
    [timings] = [data["timings"] for data in told if "timings" in data]
    assert set(timings) == wanted


def test_the_page_asks_nobody_else(server: Serving) -> None:
    """No script in its HTML, and no address of another host in any of its files."""
    html = server.get("/").body.decode()
    assert re.findall(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|<style", html) == []
    for path in ["/", *(f"/{name}" for name in re.findall(r'(?:src|href)="([^"#]+)"', html))]:
        got = server.get(path)
        assert got.headers["content-security-policy"] == "default-src 'self'"
        for address in re.findall(rb"https?://[^\s\"'`)]+", got.body):
            assert address.startswith((b"http://www.w3.org/", b"http://127.0.0.1")), address


def test_turns_of_one_side_are_one(server: Serving) -> None:
    """As Anthropic's API has it; a template may refuse two turns of the user in a row."""
    path = "/v1/messages/count_tokens"
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    one = [{"role": "user", "content": "a\nb"}]
    counts = [
        server.post(path, {"model": "tiny", "messages": turns}).json() for turns in (two, one)
    ]
    assert counts[0] == counts[1]


def test_methods(server: Serving) -> None:
    gets = ("/", "/health", "/metrics", "/v1/models", "/v1/models/tiny")
    posts = (*PATHS, "/v1/messages/count_tokens", "/tokenize", "/detokenize")
    for path in (*gets, *posts):
        own = "GET" if path in gets else "POST"
        got = server.request("OPTIONS", path)
        assert (got.status, got.body) == (204, b"")
        allowed = set(got.headers["allow"].split(","))
        assert allowed == {own, "OPTIONS"} | ({"HEAD"} if own == "GET" else set())
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "GET" if own == "POST" else "POST"):
            got = server.request(method, path)
            assert got.status == 405, (method, path)
            assert own in got.headers["allow"]
            told = got.json()
            assert told["error"]["type"] == "invalid_request_error"
            assert ("type" in told) == path.startswith("/v1/messages")
        got = server.request("HEAD", path)
        assert (got.status, got.body) == (200 if own == "GET" else 405, b"")


def test_paths_that_are_not_there(server: Serving) -> None:
    for path in ("/v1", "/v1/", "/v1/chat", "/v1/models/", "//v1/models", "/v1/embeddings", "/x y"):
        got = server.get(path.replace(" ", "%20"))
        assert got.status == 404, path
        assert got.json()["error"]["type"] == "invalid_request_error"
    for name in ("nope", "%ff", "%00", "a%2Fb", "%"):
        got = server.get(f"/v1/models/{name}")
        assert (got.status, got.json()["error"]["code"]) == (404, "model_not_found"), name
    got = server.post("/v1/messages/batches", {})
    assert (got.status, got.json()["error"]["type"]) == (404, "not_found_error")


def test_errors_have_the_form_of_their_api() -> None:
    words = ("--threads", "1", "--max-running", "1", "--max-queue", "1", "--max-body-mb", "1")
    more = ("--api-key", "k", "--protect-page", "--protect-metrics", "--allowed-host", "kie.lan")
    key = {"authorization": "Bearer k"}
    with serving(*words, *more) as server:
        for path in PATHS:
            theirs = path == "/v1/messages"
            big = b'{"x": "' + b"y" * (1 << 20) + b'"}'
            found = {
                401: server.post(path, body(path, 1)),
                404: server.post(path, body(path, 1, model="x"), headers=key),
                405: server.get(path, headers=key),
                413: server.post(path, big, headers=key),
                415: server.post(path, b"{}", headers={**key, "content-type": "text/plain"}),
            }
            kinds = {401: "authentication_error"}
            kinds |= {404: "not_found_error", 413: "request_too_large"} if theirs else {}
            for status, got in found.items():
                assert got.status == status, (path, status, got.body)
                told = got.json()
                assert told["error"]["type"] == kinds.get(status, "invalid_request_error")
                assert set(told) == ({"type", "error", "request_id"} if theirs else {"error"})
                assert ("request-id" if theirs else "x-request-id") in got.headers
            assert found[401].headers["www-authenticate"] == "Bearer"
        for path in ("/", "/app.js", "/metrics", "/v1/models", "/tokenize"):
            assert server.get(path).status == 401, path
        for path in ("/", "/app.js", "/metrics", "/v1/models"):
            assert server.get(path, headers=key).status == 200, path
        assert server.get("/health").status == 200
        for host, status in (("kie.lan", 200), ("KIE.lan:80", 200), ("evil.lan", 403)):
            assert server.get("/v1/models", headers={**key, "host": host}).status == status


def test_other_sites_pages() -> None:
    origin = {"origin": "https://a.example"}
    with serving("--threads", "1", "--cors-origin", "https://a.example") as server:
        for path, status in (("/v1/models", 200), ("/nope", 404)):
            got = server.get(path, headers=origin)
            assert got.status == status
            assert got.headers["access-control-allow-origin"] == "https://a.example"
            assert "x-request-id" in got.headers["access-control-expose-headers"]
        got = server.get("/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in got.headers
        asks = {"access-control-request-method": "POST"}
        asks |= {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
        got = server.request("OPTIONS", "/v1/chat/completions", headers={**origin, **asks})
        allowed = got.headers["access-control-allow-headers"]
        assert set(allowed.split(",")) >= {"authorization", "content-type", "x-stainless-os"}


def test_heads_that_are_odd(server: Serving) -> None:
    sound = json.dumps(body("/v1/completions", 1)).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    whole = b"content-length: %d\r\n\r\n" % len(sound) + sound
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(sound) + sound + b"\r\n0\r\n\r\n"
    absolute = post.replace(b" /v1", b" http://localhost:%d/v1" % server.port)
    for sent in (
        *(post + whole, post + chunked, absolute + whole),
        post + b"expect: 100-continue\r\n" + whole,
        post + b"authorization: Bearer \xff\r\n" + whole,
        post + b"x-request-id: \xff\xfe\r\n" + whole,
        post.replace(b"1.1", b"1.0") + whole,
    ):
        statuses = exchange(server, sent)
        assert statuses[-1] == 200, (sent, statuses)
    for sent in (
        post + b"content-length: 5\r\n" + whole,
        post + b"transfer-encoding: gzip\r\n" + whole,
        post + b" folded: x\r\n" + whole,
        post + b"bad name: x\r\n" + whole,
        b"POST  /v1/completions HTTP/1.1\r\n" + whole,
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ):
        statuses = exchange(server, sent)
        assert all(400 <= status < 500 for status in statuses), (sent, statuses)


def exchange(server: Serving, sent: bytes) -> list[int]:
    """The statuses that some bytes get before the connection is closed."""
    with server.socket() as link:
        link.sendall(sent)
        answer = b""
        link.settimeout(2)
        try:
            while piece := link.recv(65536):
                answer += piece
                if b"\r\n\r\n{" in answer and answer.endswith(b"}"):
                    break
        except (ConnectionResetError, TimeoutError):
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", answer)]


def test_what_is_counted(server: Serving) -> None:
    """Refused requests are no requests; one that leaves the queue was cancelled."""
    path = "/v1/completions"
    long = body(path, 1900, ignore_eos=True, stream=True)
    before = ends(server)
    text = json.dumps(long).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
    links = []
    for count in range(1, 4):
        links.append(server.socket())
        links[-1].sendall(head.encode() + text)
        until(lambda count=count: gauge(server, "running") + gauge(server, "waiting") == count)
    assert server.post(path, long).status == 429
    assert server.post(path, body(path, temperature=-1)).status == 400
    assert ends(server) == before
    links[2].close()
    until(lambda: gauge(server, "waiting") == 0)
    until(lambda: ends(server)["cancelled"] == before["cancelled"] + 1)
    for link in links[:2]:
        link.close()
    until(lambda: ends(server)["cancelled"] == before["cancelled"] + 3)
    after = ends(server)
    assert {**after, "cancelled": 0} == {**before, "cancelled": 0}


def ends(server: Serving) -> dict[str, float]:
    """Requests by how they ended."""
    text = server.get("/metrics").body.decode()
    found = re.findall(r'^kie_requests_total\{finish_reason="(\w+)"\} (\S+)$', text, re.M)
    return {reason: float(count) for reason, count in found}


def gauge(server: Serving, name: str) -> float:
    """`kie_requests_...`"""
    text = server.get("/metrics").body.decode()
    return float(re.findall(rf"^kie_requests_{name} (.+)$", text, re.M)[0])


def until(is_so: Any) -> None:
    """Waits for what a slow machine may take its time for."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_build_and_labels(server: Serving) -> None:
    text = server.get("/metrics").body.decode()
    [labels] = re.findall(r"^kie_build_info\{(.+)\} 1$", text, re.M)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    assert found == {"version": kie.__version__, "backend": "cpu", "model": "tiny"}


def test_resting_connections_hold_little_beside_their_buffers(server: Serving) -> None:
    """Each takes 12 KiB, with what it touches of hyper's buffers; of a thousand less than 20 MB are
    wanted."""
    links: list[socket.socket] = []

    def rest(count: int) -> None:
        for _ in range(count):
            link = server.socket()
            link.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert link.recv(4096).startswith(b"HTTP/1.1 200")
            links.append(link)

    rest(100)
    before = server.rss_kb()
    rest(400)
    grown = server.rss_kb() - before
    for link in links:
        link.close()
    assert grown / 400 < 16, f"{grown} KiB for 400 connections"


def test_a_prompt_beside_leaves_gaps_short() -> None:
    """Beside a prompt of 1,000 tokens a stream gets tokens all the time, each within the bound."""
    most_ms = 60
    path = "/v1/completions"
    with serving("--threads", "1", "--max-itl-ms", str(most_ms), "--no-prefix-cache") as server:
        # Its own prompt tells the engine what a column costs.
        sent = body(path, 700, prompt=[5] * 64, ignore_eos=True, stream=True, stream_interval=1)
        text = json.dumps(sent).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
        best = float("inf")
        for _ in range(3):
            with server.socket() as link:
                link.sendall(head.encode() + text)
                told = link.recv(65536)
                counts = [generated(server)]
                attacker = server.post(path, body(path, 1, prompt=[7] * 1000)).json()
                counts.append(generated(server))
                while b"data: [DONE]" not in told:
                    told += link.recv(65536)
            assert attacker["usage"]["completion_tokens"] == 1
            [p99] = re.findall(rb'"itl_p99_us":([0-9.]+)', told)
            best = min(best, float(p99) / 1e3)
            if best <= most_ms:
                break
        # Whole chunks of 512 would leave room for two or three.
        assert counts[1] - counts[0] > 8, counts
        assert best <= most_ms


def generated(server: Serving) -> float:
    """Tokens so far."""
    text = server.get("/metrics").body.decode()
    return float(re.findall(r"^kie_generation_tokens_total (.+)$", text, re.M)[0])
