"""Requests that wait, a server that loads or leaves: what their clients are told meanwhile."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from typing import Any

import kie
from kie import _kie
from serving import Serving, named_events, serving

LONG = {"model": "default", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}
TALK = [{"role": "user", "content": "def f("}]


def send(server: Serving, path: str, body: dict[str, Any]) -> socket.socket:
    """A streamed request, unread."""
    text = json.dumps({**LONG, **body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n\r\n"
    link = server.socket()
    link.sendall(head.encode() + text)
    return link


def read_until(link: socket.socket, pattern: bytes) -> bytes:
    """All that comes until this is there."""
    text = b""
    while not re.search(pattern, text):
        piece = link.recv(65536)
        assert piece, text[-500:]
        text += piece
    return text


def waiting(server: Serving, count: int) -> None:
    """Waits until this many requests wait or run."""
    deadline = time.monotonic() + 20
    while True:
        text = server.get("/metrics").body.decode()
        names = ("running", "waiting")
        found = sum(float(re.findall(rf"^kie_requests_{n} (.+)$", text, re.M)[0]) for n in names)
        if found == count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_waits_hears_its_position() -> None:
    words = ("--threads", "1", "--max-running", "1", "--max-queue", "2", "--silence-s", "0.02")
    with serving(*words) as server:
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/messages"]
        bodies: list[dict[str, Any]] = [{"prompt": "def f("}, {"messages": TALK}]
        bodies.append({"messages": TALK})
        links = []
        for count, (path, body) in enumerate(zip(paths, bodies, strict=True), 1):
            links.append(send(server, path, body))
            waiting(server, count)
        read_until(links[1], rb"\n: queued, position 1\n\n")
        read_until(links[2], rb"\n: queued, position 2\n\n")
        refused = server.post("/v1/completions", {**LONG, "prompt": "x"})
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        links[0].close()
        read_until(links[2], rb"\n: queued, position 1\n\n")
        links[1].close()
        read_until(links[2], rb"content_block_delta")
        links[2].close()


def test_a_server_that_loads_says_so() -> None:
    server = _kie.Server(host="127.0.0.1", port=0)
    host, port = server.address()
    client = Serving.__new__(Serving)
    client.host, client.port = host, port
    got = client.get("/health")
    assert (got.status, got.json()) == (503, {"status": "loading"})
    for path, body in (("/v1/chat/completions", {}), ("/v1/responses", {}), ("/v1/messages", {})):
        got = client.post(path, body)
        assert got.status == 503
        assert int(got.headers["retry-after"]) >= 1
        told = got.json()
        assert told["error"]["type"] in ("server_error", "overloaded_error")
        assert "loading" in told["error"]["message"]
    with kie.Engine(device="cpu", threads=1) as engine:
        server.serve(engine.core())
        assert client.get("/health").status == 200
    server.drain()
    assert server.wait(10)


def test_a_stream_beyond_the_grace_ends_with_an_error() -> None:
    with serving("--threads", "1", "--drain-s", "0.1", "--max-running", "4") as server:
        completion = send(server, "/v1/completions", {"prompt": "def f("})
        chat = send(server, "/v1/chat/completions", {"messages": TALK})
        response = send(server, "/v1/responses", {"input": "def f(", "max_tokens": None})
        message = send(server, "/v1/messages", {"messages": TALK})
        links = [completion, chat, response, message]
        texts = [read_until(link, rb"data: ") for link in links]
        server.process.send_signal(signal.SIGTERM)
        for n, link in enumerate(links):
            while piece := link.recv(65536):
                texts[n] += piece
        assert server.process.wait(30) == 0
    for text in texts[:2]:
        last = unchunked(text).split(b"\n\n")[-2]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert "shutting down" in error["message"]
    name, data = named_events(unchunked(texts[2]))[-1]
    assert (name, data["type"], data["code"]) == ("error", "error", "server_error")
    name, data = named_events(unchunked(texts[3]))[-1]
    assert (name, data["error"]["type"]) == ("error", "overloaded_error")


def unchunked(answer: bytes) -> bytes:
    """The body of an answer in chunks."""
    rest, body = answer.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    return body
