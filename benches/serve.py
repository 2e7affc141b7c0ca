"""What the server costs and bears, over loopback, as one table: `make bench-serve`.

    python benches/serve.py --requests 10000 --out serve.json

The model is the default one, on one thread of the CPU; for the pace it is a tiny one whose passes
are held at 5,000 a second (examples/paced_server.rs). Figures of a machine that does other things
are that machine's: run it on a quiet one. Exit code 1 where a limit is missed. The short forms that
`make test` has are in tests/python/test_serve_hostile.py and test_serve_contract.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import kie  # noqa: E402
import numpy as np  # noqa: E402
import openai  # noqa: E402
from kie import machine  # noqa: E402
from malformed import requests  # noqa: E402
from serving import Serving, serving  # noqa: E402
from test_serve_hostile import raw, send  # noqa: E402

PATH = "/v1/completions"
SHORT = {"model": "default", "prompt": "def f(", "temperature": 0, "max_tokens": 16}
LONG = {**SHORT, "max_tokens": 1500, "ignore_eos": True}
MAX_ITL_MS = 50.0


@dataclass
class Row:
    """One figure and its limit."""

    what: str
    limit: str
    measured: str
    good: bool
    raw: dict[str, Any] = field(default_factory=dict[str, Any])


class Link:
    """One kept connection, whose requests cost little."""

    def __init__(self, server: Serving) -> None:
        self._link = http.client.HTTPConnection(server.host, server.port, timeout=600)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        text = None if body is None else json.dumps(body)
        kind = {} if body is None else {"content-type": "application/json"}
        self._link.request(method, path, text, kind)
        return self._link.getresponse()

    def gauge(self, *names: str) -> float:
        """The sum of some metrics."""
        text = self.send("GET", "/metrics").read().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return sum(float(value) for name, value in lines if name in names)

    def busy(self) -> float:
        """Requests in slots or waiting for one."""
        return self.gauge("kie_requests_running", "kie_requests_waiting")


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def crowd(server: Serving, count: int) -> list[Row]:
    """`count` requests over 64 kept connections: memory's slope, and whether answers are equal."""
    wanted = server.post(PATH, SHORT).json()["choices"]
    links = [Link(server) for _ in range(64)]
    share = max(1, count // (64 * 20))

    def some(link: Link) -> int:
        answers = (json.loads(link.send("POST", PATH, SHORT).read()) for _ in range(share))
        return sum(answer["choices"] != wanted for answer in answers)

    memory: list[int] = []
    different, began = 0, time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        for _ in range(20):
            different += sum(pool.map(some, links))
            memory.append(server.rss_kb())
    seconds = time.monotonic() - began
    done = share * 64 * 20
    # Allocators settle first; a line through the second half has an error of its own.
    half = np.array(memory[10:], dtype=float)
    at = np.arange(10) * share * 64 / 1000
    (slope, _), covariance = np.polyfit(at, half, 1, cov=True)
    error = 2 * float(np.sqrt(covariance[0, 0]))
    told = {"rss_kb": memory, "seconds": round(seconds, 1)}
    return [
        Row(
            f"{done:,} requests, 64 connections: RSS slope of the second half",
            "0 within noise (or 16 kB)",
            f"{slope:.1f} ± {error:.1f} kB per 1,000",
            slope < max(error, 16.0),
            told,
        ),
        Row("the same: answers unlike the request alone", "0", str(different), different == 0),
    ]


def hostile(server: Serving, count: int) -> list[Row]:
    """Malformed requests, and the same tokens afterwards."""
    wanted = server.post(PATH, SHORT).json()["choices"]
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda one: send(server, one), requests(count, seed=1)))
    codes = {str(code): found.count(code) for code in sorted({c for c in found if c})}
    codes["closed"] = found.count(None)
    same = server.post(PATH, SHORT).json()["choices"] == wanted
    only = all(code.startswith("4") for code in codes if code != "closed")
    told = ", ".join(f"{code}: {n}" for code, n in codes.items())
    told += "; the same tokens afterwards" if same else "; OTHER TOKENS afterwards"
    what = f"{count:,} malformed requests, 32 at a time"
    return [Row(what, "only 4xx", told, only and same, {"statuses": codes})]


def leaving(server: Serving, count: int) -> list[Row]:
    """Milliseconds from a socket's close to a free slot, as /metrics shows it."""
    times: list[float] = []
    with Link(server) as link:
        for n in range(count):
            left = server.socket()
            left.sendall(raw({**LONG, "stream": n % 2 == 0}))
            while link.busy() == 0:
                time.sleep(0.001)
            time.sleep(0.02)
            began = time.perf_counter()
            left.close()
            while link.busy() > 0:
                pass
            times.append((time.perf_counter() - began) * 1e3)
    p50, p99 = statistics.median(times), quantile(times, 0.99)
    what = f"a client's close to a free slot, {count} times"
    told = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    return [Row(what, "p99 <= 5 ms", told, p99 <= 5, {"ms": times})]


def resting(server: Serving, count: int) -> list[Row]:
    """Memory that idle connections cost, each after one request."""
    for _ in range(200):
        server.get("/health")
    before = server.rss_kb()
    links: list[socket.socket] = []
    for _ in range(count):
        link = server.socket()
        link.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert link.recv(4096).startswith(b"HTTP/1.1 200")
        links.append(link)
    grown = (server.rss_kb() - before) * 1024 / 1e6
    for link in links:
        link.close()
    return [Row(f"{count:,} idle connections", "< 20 MB", f"{grown:.1f} MB", grown < 20)]


def beside_python(server: Serving, runs: int) -> list[Row]:
    """One stream over HTTP beside the same request in this process, in turns."""
    asked: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "max_tokens": 512}
    rates: dict[str, list[float]] = {"in this process": [], "openai": []}
    firsts: dict[str, list[float]] = {"in this process": [], "http": []}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        kie.Engine(device="cpu", threads=1) as engine,
        Link(server) as link,
    ):
        for _ in range(runs):
            began = time.perf_counter()
            with engine.stream(**asked, ignore_eos=True) as stream:
                times = [time.perf_counter() for _ in stream]
            rates["in this process"].append(511 / (times[-1] - times[0]))
            firsts["in this process"].append((times[0] - began) * 1e3)
            chunks = client.completions.create(
                model="default", **asked, stream=True, extra_body={"ignore_eos": True}
            )
            times = [time.perf_counter() for chunk in chunks if chunk.choices[0].text]
            rates["openai"].append(511 / (times[-1] - times[0]))
            began = time.perf_counter()
            answer = link.send("POST", PATH, {**SHORT, "stream": True})
            answer.read(1)
            firsts["http"].append((time.perf_counter() - began) * 1e3)
            answer.read()
    own, theirs = (statistics.median(values) for values in rates.values())
    first, later = (statistics.median(values) for values in firsts.values())
    told = f"{100 * theirs / own:.1f} % ({theirs:.0f} of {own:.0f} tok/s)"
    return [
        Row("one stream through openai, of the rate in a process", ">= 95 %", told,
            theirs >= 0.95 * own, rates),
        Row("first byte, later than in a process", "<= 1 ms",
            f"{later - first:.2f} ms ({later:.2f} and {first:.2f})", later - first <= 1, firsts),
    ]  # fmt: skip


def beside_a_prompt(runs: int) -> list[Row]:
    """Gaps of a stream beside prompts of 1,900 tokens, by the engine's stamps, as HTTP tells."""
    gaps: list[float] = []
    words = ("--threads", "1", "--no-prefix-cache", "--max-itl-ms", str(MAX_ITL_MS))
    with serving(*words) as server, Link(server) as link:
        for _ in range(runs):
            with ThreadPoolExecutor(1) as pool:
                victim = {**LONG, "prompt": [5] * 64, "max_tokens": 1000}
                told = pool.submit(server.post, PATH, victim, timeout=600)
                while not told.done():
                    link.send("POST", PATH, {**SHORT, "prompt": [7] * 1900, "max_tokens": 1}).read()
            gaps.append(told.result().json()["timings"]["itl_p99_us"] / 1e3)
    p99 = statistics.median(gaps)
    what = f"a stream's gaps beside long prompts, max_itl_ms {MAX_ITL_MS:.0f}"
    return [Row(what, f"p99 <= {MAX_ITL_MS:.0f} ms", f"p99 {p99:.1f} ms", p99 <= MAX_ITL_MS)]


@contextmanager
def paced(rate: float) -> Iterator[str]:
    """The URL of kie's server before an engine that makes `rate` tokens a second."""
    build = ["cargo", "build", "--release", "--quiet", "--locked", "-p", "kie-server"]
    subprocess.run([*build, "--example", "paced_server"], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(ROOT / "tests" / "data" / "llama", Path(folder) / "llama")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        command = [target / "release" / "examples" / "paced_server", model, str(rate)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            yield process.stderr.readline().strip()
            process.kill()


def kept_up(runs: int) -> list[Row]:
    """Tokens a second that a plain openai client receives from an engine of 5,000 a second."""
    rates: list[float] = []
    made: list[float] = []
    bytes_read: list[float] = []
    with paced(5_000) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for _ in range(runs):
            chunks = client.completions.create(
                model="default",
                prompt="x",
                max_tokens=4000,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            came = [(time.perf_counter(), chunk) for chunk in chunks]
            times, last = [at for at, _ in came], came[-1][1]
            assert last.usage is not None
            # The last two hold the end and the usage; the first one holds one token.
            rates.append((last.usage.completion_tokens - 1) / (times[-3] - times[0]))
            made.append((last.model_extra or {})["timings"]["predicted_per_second"])
            bytes_read.append(read_as_bytes(url))
    rate, engine = statistics.median(rates), statistics.median(made)
    what = "a plain openai client before an engine of 5,000 tok/s"
    told = f"{rate:.0f} tok/s (made: {engine:.0f}"
    told += f"; before a reader of bytes: {statistics.median(bytes_read):.0f})"
    raw = {"received": rates, "made": made, "made before a reader of bytes": bytes_read}
    return [Row(what, ">= 4,900 tok/s", told, rate >= 4900, raw)]


def read_as_bytes(url: str) -> float:
    """The rate at which the engine makes the tokens of a stream that nobody parses."""
    link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    asked = {**LONG, "prompt": "x", "max_tokens": 4000, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    link.request("POST", PATH, json.dumps(asked), {"content-type": "application/json"})
    events = link.getresponse().read().split(b"\n\n")
    link.close()
    last = next(event for event in reversed(events) if b'"timings"' in event)
    return json.loads(last.removeprefix(b"data: "))["timings"]["predicted_per_second"]


def conditions() -> str:
    """Where and when this was measured."""
    cpu, load = machine.report().cpu, os.getloadavg()[0]
    return (
        f"{cpu}, {os.cpu_count()} cores, load {load:.1f} before; Python {platform.python_version()}"
        f"; kie {kie.__version__}, default model, device cpu, 1 thread, loopback; "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="What the server costs and bears.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=1_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    where = conditions()
    words = ("--threads", "1", "--max-queue", "256")
    slow = ("--header-timeout-s", "2", "--body-timeout-s", "2")
    rows: list[Row] = []

    def show(found: list[Row]) -> None:
        for row in found:
            verdict = "ok" if row.good else "MISSED"
            print(f"| {row.what} | {row.limit} | {row.measured} | {verdict} |", flush=True)
        rows.extend(found)

    print(f"{where}\n\n| what | limit | measured | |\n|---|---|---|---|", flush=True)
    show(kept_up(10))
    with serving(*words, *slow) as server:
        show(resting(server, 1_000))
        show(leaving(server, 200))
        show(beside_python(server, 15))
        show(hostile(server, given.malformed))
        show(crowd(server, given.requests))
    show(beside_a_prompt(3))
    if given.out:
        found = {"conditions": where, "rows": [asdict(row) for row in rows]}
        given.out.write_text(json.dumps(found, indent=1))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
