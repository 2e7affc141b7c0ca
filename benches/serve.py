"""What the server costs and bears, over loopback: `make bench-serve`.

    python benches/serve.py --requests 10000 --out serve.json

Every figure stands with what it was measured beside: the machine, the model, how many threads. One
run takes minutes; the short forms that `make test` has are in tests/python/test_serve_hostile.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

import kie  # noqa: E402
from malformed import requests  # noqa: E402
from serving import Serving, serving  # noqa: E402
from test_serve_hostile import raw, running, send  # noqa: E402

SHORT = {"model": "default", "prompt": "def f(", "temperature": 0, "max_tokens": 16}
LONG = {**SHORT, "max_tokens": 1500, "ignore_eos": True}


def rss_kb(server: Serving) -> int:
    """Resident memory of the server."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def crowd(server: Serving, count: int) -> dict[str, Any]:
    """`count` requests over 64 kept connections: memory's slope, and whether answers are equal."""
    wanted = server.post("/v1/completions", SHORT).json()["choices"]
    body = json.dumps(SHORT)
    memory: list[int] = []
    different = 0

    def one_connection(share: int) -> int:
        link = http.client.HTTPConnection(server.host, server.port, timeout=600)
        wrong = 0
        for _ in range(share):
            link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            wrong += json.loads(link.getresponse().read())["choices"] != wanted
        link.close()
        return wrong

    began = time.monotonic()
    for _ in range(10):
        with ThreadPoolExecutor(64) as pool:
            different += sum(pool.map(one_connection, [max(1, count // 640)] * 64))
        memory.append(rss_kb(server))
    done = max(1, count // 640) * 640
    seconds = time.monotonic() - began
    half = memory[len(memory) // 2 :]
    return {
        "requests": done,
        "seconds": round(seconds, 1),
        "different_answers": different,
        "rss_kb": memory,
        "rss_slope_kb_per_1000": round((half[-1] - half[0]) / (done / 2) * 1000, 1),
    }


def hostile(server: Serving, count: int) -> dict[str, Any]:
    """Malformed requests, and the same tokens afterwards."""
    wanted = server.post("/v1/completions", SHORT).json()["choices"]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda one: send(server, one), requests(count, seed=1)))
    codes = {str(code): found.count(code) for code in sorted({c for c in found if c})}
    codes["closed"] = found.count(None)
    after = server.post("/v1/completions", SHORT).json()["choices"]
    return {"requests": count, "statuses": codes, "same_tokens_afterwards": after == wanted}


def leaving(server: Serving, count: int) -> dict[str, Any]:
    """Milliseconds from a socket's close to a free slot, as /metrics shows it."""
    times: list[float] = []
    for n in range(count):
        link = server.socket()
        link.sendall(raw({**LONG, "stream": n % 2 == 0}))
        while running(server) == 0:
            time.sleep(0.001)
        time.sleep(0.02)
        began = time.perf_counter()
        link.close()
        while running(server) > 0:
            pass
        times.append((time.perf_counter() - began) * 1e3)
    return {"count": count, "p50_ms": statistics.median(times), "p99_ms": quantile(times, 0.99)}


def resting(server: Serving, count: int) -> dict[str, Any]:
    """Memory that idle connections cost, each after one request."""
    for _ in range(200):
        server.get("/health")
    before = rss_kb(server)
    links: list[socket.socket] = []
    for _ in range(count):
        link = server.socket()
        link.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert link.recv(4096).startswith(b"HTTP/1.1 200")
        links.append(link)
    grown = rss_kb(server) - before
    for link in links:
        link.close()
    return {"connections": count, "grown_mb": round(grown / 1e3, 2)}


def beside_python(server: Serving, runs: int) -> dict[str, Any]:
    """One stream through the `openai` client beside the same request in a process; alternating."""
    import openai

    inside: list[float] = []
    outside: list[float] = []
    first_inside: list[float] = []
    first_outside: list[float] = []
    asked = {"prompt": "def f(", "temperature": 0, "max_tokens": 512}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        kie.Engine(device="cpu", threads=1) as engine,
    ):
        for _ in range(runs):
            began = time.perf_counter()
            with engine.stream(**asked, ignore_eos=True) as stream:
                times = [time.perf_counter() for token in stream]
            inside.append(511 / (times[-1] - times[0]))
            first_inside.append((times[0] - began) * 1e3)
            began = time.perf_counter()
            chunks = client.completions.create(
                model="default", **asked, stream=True, extra_body={"ignore_eos": True}
            )
            times = [time.perf_counter() for chunk in chunks if chunk.choices[0].text]
            outside.append(511 / (times[-1] - times[0]))
            first_outside.append((times[0] - began) * 1e3)
    return {
        "runs": runs,
        "python_tokens_per_second": statistics.median(inside),
        "http_tokens_per_second": statistics.median(outside),
        "share": statistics.median(outside) / statistics.median(inside),
        "python_first_ms": statistics.median(first_inside),
        "http_first_ms": statistics.median(first_outside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What the server costs and bears.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=1_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    words = ("--threads", "1", "--max-queue", "256")
    with serving(*words, "--header-timeout-s", "2", "--body-timeout-s", "2") as server:
        found = {
            "resting": resting(server, 1_000),
            "leaving": leaving(server, 100),
            "beside_python": beside_python(server, 10),
            "hostile": hostile(server, given.malformed),
            "crowd": crowd(server, given.requests),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text)
    good = found["hostile"]["same_tokens_afterwards"] and found["crowd"]["different_answers"] == 0
    codes = [code for code in found["hostile"]["statuses"] if code != "closed"]
    return 0 if good and all(code.startswith("4") for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
