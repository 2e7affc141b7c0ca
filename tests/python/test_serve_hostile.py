"""The server under clients that leave, stall, or send no request: 4xx, and nothing else."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from malformed import odd, requests
from serving import Serving, serving

BASE = {"model": "default", "prompt": "def f(", "temperature": 0, "max_tokens": 16}
LONG = {**BASE, "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    words = ("--max-running", "2", "--max-queue", "1", "--max-body-mb", "1")
    with serving("--threads", "1", *words, "--header-timeout-s", "1", "--body-timeout-s", "1") as s:
        yield s


def raw(body: dict[str, Any]) -> bytes:
    """A completion request as bytes."""
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + text


def running(server: Serving) -> float:
    """Requests in slots or waiting for one."""
    text = server.get("/metrics").body.decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(found["kie_requests_running"]) + float(found["kie_requests_waiting"])


def until(what: str, seconds: float, is_so: Any) -> None:
    """Waits for something that a slow machine may take its time for."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_leaves_is_cancelled(server: Serving, stream: bool, how: str) -> None:
    link = server.socket()
    link.sendall(raw({**LONG, "stream": stream}))
    if stream:
        assert link.recv(1000).startswith(b"HTTP/1.1 200")
    until("it runs", 20, lambda: running(server) == 1)
    if how == "reset":
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "half":
        link.shutdown(socket.SHUT_WR)
    else:
        link.close()
    # Its 1,900 tokens take longer than this.
    until("it is cancelled", 1.5, lambda: running(server) == 0)
    link.close()


def test_a_full_queue_is_429(server: Serving) -> None:
    links = [server.socket() for _ in range(3)]
    for link in links:
        link.sendall(raw(LONG))
    until("two run, one waits", 20, lambda: running(server) == 3)
    got = server.post("/v1/completions", BASE)
    assert got.status == 429
    assert int(got.headers["retry-after"]) >= 1
    assert got.json()["error"]["code"] == "rate_limit_exceeded"
    for link in links:
        link.close()
    until("all are cancelled", 5, lambda: running(server) == 0)


def test_a_slow_reader_stalls_nobody(server: Serving) -> None:
    wanted = server.post("/v1/completions", BASE).json()["choices"]
    link = server.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    link.sendall(raw({**LONG, "max_tokens": 800, "stream": True, "stream_interval": 1}))
    for _ in range(3):
        assert server.post("/v1/completions", BASE).json()["choices"] == wanted
    # The engine has ended it, though nothing was read.
    until("its slot is free", 60, lambda: running(server) == 0)
    text = b""
    while text.count(b"data: {") <= 100:
        piece = link.recv(65536)
        assert piece, text[-200:]
        text += piece
    link.close()


def test_slow_heads_and_bodies_are_408(server: Serving) -> None:
    for part in (b"POST /v1/comple", raw(BASE)[:-5]):
        with server.socket() as link:
            began = time.monotonic()
            link.sendall(part)
            answer = everything(link)
            assert answer.startswith(b"HTTP/1.1 408"), answer[:100]
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"]
            assert time.monotonic() - began > 0.9
    with server.socket() as link:
        link.settimeout(30)
        # A byte now and then is no progress.
        for byte in raw(BASE)[:20]:
            try:
                link.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.1)
        assert everything(link).startswith(b"HTTP/1.1 408")


def test_connections_are_kept(server: Serving) -> None:
    link = http.client.HTTPConnection(server.host, server.port, timeout=30)
    for _ in range(3):
        link.request("GET", "/health")
        assert link.getresponse().read()
        # Longer than a head may take: resting is no slow head.
        time.sleep(0.6)
    link.close()
    with server.socket() as both:
        both.sendall(raw(BASE) + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        text = b""
        while text.count(b"HTTP/1.1 200") < 2:
            piece = both.recv(65536)
            assert piece, text
            text += piece
        assert text.index(b"text_completion") < text.index(b'"status":"ok"')


def test_http2_without_a_handshake(server: Serving) -> None:
    with server.socket() as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        # SETTINGS is the first frame of an answer.
        assert link.recv(9)[3:4] == b"\4"


def test_malformed_requests(server: Serving) -> None:
    wanted = server.post("/v1/completions", BASE).json()["choices"]
    statuses: list[int | None] = []
    with ThreadPoolExecutor(8) as pool:
        statuses.extend(pool.map(lambda one: send(server, one), requests(200, seed=12)))
    strange = [s for s in statuses if s is not None and not 400 <= s < 500]
    assert strange == []
    assert len([s for s in statuses if s is not None]) > 150
    assert server.get("/health").status == 200
    assert server.post("/v1/completions", BASE).json()["choices"] == wanted


def test_odd_requests_are_answered_or_refused_by_name(server: Serving) -> None:
    statuses = []
    for path, sent in odd(300, seed=13):
        got = server.post(path, sent)
        statuses.append(got.status)
        assert got.status in (200, 400), (path, sent, got.body)
        if got.status == 400 and path != "/v1/messages":
            assert got.param, (path, sent, got.body)
    assert statuses.count(200) > 20


def send(server: Serving, request: bytes) -> int | None:
    """The status that some bytes get; None: the connection was closed without one."""
    with server.socket() as link:
        try:
            link.sendall(request)
            link.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = everything(link)
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.") else None


def everything(link: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    text = b""
    try:
        while piece := link.recv(65536):
            text += piece
    except ConnectionResetError:
        pass
    return text


def test_many_at_once_are_alike() -> None:
    with serving("--threads", "2", "--max-running", "8") as server:
        wanted = server.post("/v1/completions", BASE).json()["choices"]
        order = random.Random(3)
        bodies = [{**BASE, "stream": order.random() < 0.5} for _ in range(48)]
        found: list[Any] = []
        lock = threading.Lock()

        def one(body: dict[str, Any]) -> None:
            got = server.post("/v1/completions", body)
            assert got.status == 200
            with lock:
                found.append(got)

        with ThreadPoolExecutor(24) as pool:
            list(pool.map(one, bodies))
        assert len(found) == 48
        for got in found:
            if got.headers["content-type"] == "application/json":
                assert got.json()["choices"] == wanted
            else:
                pieces = [line for line in got.body.decode().split("\n\n") if line]
                chunks = [json.loads(p.removeprefix("data: ")) for p in pieces[:-1]]
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                assert text == wanted[0]["text"]
