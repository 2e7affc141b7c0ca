"""The same request through each layer, in one run: device, Rust, Python, HTTP.

*device*: what the engine's own clock says of the tokens. *rust*: a completion that is asked for as
a whole, so that each token stays below Python. *python*: an iteration over the stream. *http*: the
openai client against `kie serve` in a process of its own. The layers take turns, so that a machine
whose clock changes changes all of them.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kie.bench.measure import fresh, pool, request
from kie.bench.report import quantile
from kie.bench.served import Load, closed, connect, model_of
from kie.errors import KieError

if TYPE_CHECKING:
    from kie.engine import Engine

LAYERS = ("device", "rust", "python", "http")


@contextmanager
def serving(words: Sequence[str], timeout_s: float = 300) -> Generator[str]:
    """`kie serve` with these words on a free port, until the block ends; gives its URL.

    Raises KieError with its last line where it ends or says nothing within `timeout_s`.
    """
    command = [sys.executable, "-m", "kie", "serve", "--port", "0", *words]
    # Its messages go to a file: a pipe that nobody reads would stop it once it is full.
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
        late = threading.Timer(timeout_s, child.kill)
        late.start()
        try:
            line = child.stdout.readline().strip() if child.stdout else ""
            if not line.startswith("http"):
                child.kill()
                child.wait()
                told.seek(0)
                last = (told.read().strip().splitlines() or ["no message"])[-1]
                raise KieError(f"kie serve: wanted a URL on its first line, got {line!r} ({last})")
            late.cancel()
            yield line.rstrip("/")
        finally:
            late.cancel()
            child.terminate()
            try:
                child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()


def measure(
    engine: Engine,
    base_url: str,
    *,
    prompt_tokens: int,
    max_tokens: int,
    runs: int,
    api_key: str | None = None,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Tokens a second and time to the first token, in ms, of each layer: medians of `runs`.

    `base_url` (with /v1) serves the same model. The first round is not counted.
    """
    ids, source = pool(engine), random.Random(seed)
    rates: dict[str, list[float]] = {layer: [] for layer in LAYERS}
    first: dict[str, list[float]] = {layer: [] for layer in LAYERS}
    for turn in range(runs + 1):
        for layer, (rate, ttft) in _round(
            engine, base_url, api_key, fresh(ids, prompt_tokens, source), max_tokens, turn
        ).items():
            if turn:
                rates[layer].append(rate)
                first[layer].append(ttft)
    return {
        layer: {
            "tokens_per_second": quantile(rates[layer], 0.5),
            "ttft_ms": quantile(first[layer], 0.5),
        }
        for layer in LAYERS
    }


def _round(
    engine: Engine,
    base_url: str,
    api_key: str | None,
    prompt: list[int],
    max_tokens: int,
    turn: int,
) -> Mapping[str, tuple[float, float]]:
    """Rate and first token of each layer; rates are of the tokens behind the first."""
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    # Each way has a prompt of its own, or the second would find the first one's keys.
    ways = [prompt[n:] + prompt[:n] for n in range(2)]
    start = time.monotonic_ns()
    whole = engine.generate(ways[0], **sampling)
    spent_ms = (time.monotonic_ns() - start) / 1e6
    spans, behind_ms = whole.usage.completion_tokens - 1, spent_ms - whole.timings.ttft_ms
    run = request(engine, ways[1], "python", **sampling)
    arrived_us = [a / 1e3 + h for a, h in zip(run.token_ns, run.handover_us, strict=True)]
    load = Load(
        requests=1, prompt_words=len(prompt) // 2, max_tokens=max_tokens, seed=turn,
        endpoint="completions", extra={"ignore_eos": True},
    )  # fmt: skip
    (call,) = asyncio.run(_http(base_url, api_key, load))
    if call.error:
        raise KieError(f"{base_url}: {call.error}")
    return {
        "device": (_rate(spans, run.token_ns[-1] / 1e6), run.prefill_ms),
        "rust": (_rate(spans, behind_ms), whole.timings.ttft_ms),
        "python": (_rate(spans, (arrived_us[-1] - arrived_us[0]) / 1e3), run.ttft_ms),
        "http": (1e3 / call.tpot_ms if call.tpot_ms else 0.0, call.ttft_ms),
    }


def _rate(tokens: int, ms: float) -> float:
    return tokens * 1e3 / ms if ms > 0 else 0.0


async def _http(base_url: str, api_key: str | None, load: Load) -> list[Any]:
    async with connect(base_url, api_key, 600) as client:
        return list(await closed(client, await model_of(client), load, 1))


def markdown(found: Mapping[str, Mapping[str, float]]) -> str:
    """A row a layer; the share is of the device's rate."""
    device = found["device"]["tokens_per_second"]
    lines = ["| layer | tok/s | of the device | ttft ms |", "|---|--:|--:|--:|"]
    for layer in LAYERS:
        rate = found[layer]["tokens_per_second"]
        share = rate / device if device else 0.0
        lines.append(f"| {layer} | {rate:.1f} | {share:.1%} | {found[layer]['ttft_ms']:.2f} |")
    return "\n".join(lines)
