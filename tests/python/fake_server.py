"""The playground's files and the server's wire as SERVER.md has it, at any pace, with any fault.

It stands in for `kie serve` where a test wants 5,000 tokens a second, a full queue or a line that
breaks, which a real engine does not do when asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "crates" / "kie-server" / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
ANSWER = '''def sum_of_even_squares(numbers):
    """Return the sum of the squares of the even numbers in numbers."""
    total = 0  # nothing yet
    for n in numbers:
        if n % 2 == 0:
            total += n ** 2
    return total


'''
"""Text that is streamed, again and again, up to max_tokens; a token is four characters."""


@dataclass
class Behaviour:
    """What the server does; a test sets it and reads what came."""

    rate: float = 5_000.0
    """Tokens a second."""
    answer: str = ANSWER
    status: str = "ok"
    """What /health says."""
    refuse: list[tuple[int, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Status, headers and body of the next requests, first come first."""
    key: str = ""
    break_after: int = 0
    """Tokens after which the line breaks; 0 never."""
    error_after: int = 0
    """Tokens after which an error event comes; 0 never."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of what came."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client went away in mid-stream."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        """Nothing: pytest shows what fails."""

    def do_GET(self) -> None:
        """Page, health and models."""
        does = self.server.behaviour
        path = self.path.split("?")[0]
        if path == "/health":
            self._json(200 if does.status == "ok" else 503, {"status": does.status})
        elif path == "/v1/models" and self._allowed():
            self._json(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif path != "/v1/models":
            self._file(PAGE / (path.lstrip("/") or "index.html"))

    def do_POST(self) -> None:
        """A request for tokens."""
        does = self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        does.requests.append((self.path, body))
        if does.refuse:
            status, headers, told = does.refuse.pop(0)
            self._json(status, told, headers)
        elif self._allowed():
            if body.get("stream"):
                self._stream(body)
            else:
                self._json(200, {"choices": [{"message": {"content": does.answer}}]})

    def _allowed(self) -> bool:
        key = self.server.behaviour.key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json(401, {"error": {"message": "wrong key", "code": "invalid_api_key"}})
        return False

    def _json(self, status: int, told: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(told).encode(), headers)

    def _file(self, path: Path) -> None:
        if path.parent == PAGE and path.is_file():
            csp = {"Content-Security-Policy": "default-src 'self'"}
            self._send(200, TYPES[path.suffix], path.read_bytes(), csp)
        else:
            self._send(404, "text/plain", b"not found")

    def _send(
        self, status: int, kind: str, told: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events(self.path, body, self.server.behaviour):
                self.wfile.write(f"data: {event}\n\n".encode())
        except OSError:
            self.server.behaviour.gone.set()


def events(path: str, body: dict[str, Any], does: Behaviour) -> Iterator[str]:
    """The stream's events, each when it is due."""
    chat = path.endswith("/chat/completions")
    total = int(body.get("max_tokens", 256))
    start = time.perf_counter()
    for n in range(total):
        due = start + n / does.rate
        # A millisecond's tokens go out together: sleeps are not finer than that.
        if due - time.perf_counter() > 0.001:
            time.sleep(due - time.perf_counter())
        if does.break_after and n == does.break_after:
            return
        if does.error_after and n == does.error_after:
            yield json.dumps({"error": {"message": "the device hung", "type": "server_error"}})
            return
        text = (does.answer * (n * 4 // len(does.answer) + 2))[n * 4 : n * 4 + 4]
        choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
        yield json.dumps({"choices": [{**choice, "finish_reason": None}], "model": "fake"})
    seconds = time.perf_counter() - start
    closing: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    closing |= {"delta": {}} if chat else {"text": ""}
    yield json.dumps({"choices": [closing], "model": "fake", "seed": 7})
    timings = {
        "predicted_n": total,
        "predicted_per_second": total / seconds,
        "ttft_ms": 1.5,
        "itl_p50_us": 1e6 / does.rate,
        "itl_p99_us": 1.2e6 / does.rate,
        "itl_max_us": 2e6 / does.rate,
        "mbu": 0.91,
    }
    usage = {"prompt_tokens": 24, "completion_tokens": total, "total_tokens": 24 + total}
    usage |= {"prompt_tokens_details": {"cached_tokens": 16}}
    yield json.dumps({"choices": [], "model": "fake", "usage": usage, "timings": timings})
    yield "[DONE]"


class FakeServer(ThreadingHTTPServer):
    """Serves on a free port of this machine until `stop`."""

    daemon_threads = True
    # Python's own log of connections that a browser drops would end up in pytest's output.
    handle_error = lambda *_: None  # noqa: E731

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = Behaviour()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        """Ends; the port is free afterwards."""
        self.shutdown()
        self.server_close()
        self._thread.join()
