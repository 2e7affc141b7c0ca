"""`kie serve` as a process, and raw HTTP to it, for the tests of the server."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """One HTTP answer, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def param(self) -> str | None:
        """The field that an error of OpenAI's form names."""
        return self.json()["error"]["param"]


class Serving:
    """A running `kie serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self.host, self.port = host, int(port)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        """One request on a connection of its own; what is not bytes is sent as JSON."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        link = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            link.request(method, path, body=body, headers=sent)
            got = link.getresponse()
            named = {name.lower(): value for name, value in got.getheaders()}
            return Answer(got.status, named, got.read())
        finally:
            link.close()

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def events(self, path: str, body: Any) -> list[Any]:
        """The `data` of each event of a stream; the last of OpenAI's is the text [DONE]."""
        got = self.post(path, {**body, "stream": True})
        assert got.status == 200, got.body
        assert got.headers["content-type"] == "text/event-stream"
        return list(events_of(got.body))

    def socket(self, timeout: float = 30) -> socket.socket:
        """A connection, for what no client would send."""
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def rss_kb(self) -> int:
        """Resident memory of the process, in KiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Asks it to end, and its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


def events_of(body: bytes) -> Iterator[Any]:
    """The `data` of each event."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        text = block.removeprefix("data: ")
        yield text if text == "[DONE]" else json.loads(text)


def named_events(body: bytes) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream whose events have names."""
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    found: list[tuple[str, Any]] = []
    for block in blocks:
        if not block.startswith(":"):
            name, data = block.split("\n")
            assert (name[:7], data[:6]) == ("event: ", "data: ")
            found.append((name[7:], json.loads(data[6:])))
    return found


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The process, before it says anything."""
    command = [sys.executable, "-m", "kie", "serve", "--port", "0", "--device", "cpu", *words]
    everything = {**os.environ, **(env or {})}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=everything
    )


@contextmanager
def serving(*words: str, env: dict[str, str] | None = None) -> Iterator[Serving]:
    """`kie serve` with these options, ready."""
    process = start(*words, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            _, said = process.communicate(timeout=60)
            raise AssertionError(f"kie serve: {said}")
        yield Serving(process, line)
    finally:
        process.kill()
        process.wait(60)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
