"""Load over HTTP, through the real openai client, on any server that speaks OpenAI's API.

*Closed*: so many requests are under way at any time. *Open*: requests come at a rate whatever is
under way, and each is timed from the moment it was due, so that a server which falls behind shows
it. Gaps are between chunks as the client got them; what the engine itself measured stands beside
them where the server says it (`timings`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from kie.bench import report
from kie.errors import InvalidRequestError, KieError

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the server."""

    requests: int = 32
    prompt_words: int = 64
    max_tokens: int = 128
    temperature: float = 0.0
    endpoint: Literal["chat", "completions"] = "chat"
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of a request's body."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one request did, as its client saw it; times in milliseconds."""

    label: str
    start_ms: float
    """From the start of the measurement to the moment the request was due."""
    ttft_ms: float
    e2e_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    error: str
    """Empty where it worked."""
    timings: Mapping[str, float]
    """The engine's own, where the server tells them."""
    chunk_ms: tuple[float, ...]
    """When each chunk with text came, from the request's start."""

    @property
    def gaps_ms(self) -> list[float]:
        """Gaps between chunks."""
        return [after - before for before, after in pairwise(self.chunk_ms)]

    @property
    def tpot_ms(self) -> float:
        """Mean time of a token after the first."""
        spans = self.completion_tokens - 1
        return (self.chunk_ms[-1] - self.chunk_ms[0]) / spans if spans > 0 else 0.0


def connect(base_url: str, api_key: str | None, timeout_s: float) -> AsyncOpenAI:
    """A client of the server at `base_url` (with its /v1). It tries nothing twice.

    Raises InvalidRequestError where openai is not installed.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError as cause:
        raise InvalidRequestError(
            "the openai client is not installed", hint="pip install 'kie[bench]'"
        ) from cause
    key = api_key or "none"
    return AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout_s, max_retries=0)


async def model_of(client: AsyncOpenAI) -> str:
    """The first model that the server names."""
    try:
        return (await client.models.list()).data[0].id
    except Exception as cause:
        got = f"{type(cause).__name__}: {cause}"
        raise KieError(
            f"{client.base_url}models: wanted a list of models, got {got}",
            hint="start the server, or pass its --base-url with /v1, and --api-key",
        ) from cause


def prompts(load: Load) -> list[str]:
    """Texts that differ from their first words on, so that no cache helps."""
    source = random.Random(load.seed)
    words = sorted(set(Path(__file__).read_text().split()))
    return [
        " ".join(source.choice(words) for _ in range(load.prompt_words))
        for _ in range(load.requests)
    ]


async def closed(
    client: AsyncOpenAI,
    model: str,
    load: Load,
    concurrency: int,
    step: Callable[[], object] = lambda: None,
) -> list[Call]:
    """`load.requests` requests, `concurrency` of them at a time."""
    waiting = iter(prompts(load))
    begun = time.perf_counter()
    calls: list[Call] = []

    async def worker() -> None:
        for prompt in waiting:
            due = time.perf_counter()
            calls.append(await _call(client, model, load, prompt, str(concurrency), due, begun))
            step()

    await asyncio.gather(*(worker() for _ in range(min(concurrency, load.requests))))
    return calls


async def opened(
    client: AsyncOpenAI,
    model: str,
    load: Load,
    rate: float,
    step: Callable[[], object] = lambda: None,
) -> list[Call]:
    """`load.requests` requests that come at `rate` a second, with exponential gaps between."""
    source = random.Random(load.seed + 1)
    begun = time.perf_counter()
    due = begun
    tasks: list[asyncio.Task[Call]] = []
    for prompt in prompts(load):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        call = _call(client, model, load, prompt, f"{rate:g}/s", due, begun)
        tasks.append(asyncio.create_task(call))
        tasks[-1].add_done_callback(lambda _: step())
        due += source.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def _call(
    client: AsyncOpenAI,
    model: str,
    load: Load,
    prompt: str,
    label: str,
    due: float,
    begun: float,
) -> Call:
    moments: list[float] = []
    told: dict[str, Any] = {"usage": None, "timings": {}, "finish_reason": ""}
    error = ""
    try:
        async for chunk in await _start(client, model, load, prompt):
            _take(chunk.model_dump(), told, moments)
    except Exception as cause:
        # A request that fails is a result; only the measurement itself may not.
        error = f"{type(cause).__name__}: {cause}"
    end = time.perf_counter()
    usage: Mapping[str, Any] = told["usage"] or {}
    details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
    chunks = tuple((moment - due) * 1e3 for moment in moments)
    return Call(
        label=label,
        start_ms=(due - begun) * 1e3,
        ttft_ms=chunks[0] if chunks else 0.0,
        e2e_ms=(end - due) * 1e3,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or len(chunks),
        cached_tokens=details.get("cached_tokens") or 0,
        finish_reason=told["finish_reason"],
        error=error,
        timings=told["timings"],
        chunk_ms=chunks,
    )


async def _start(client: AsyncOpenAI, model: str, load: Load, prompt: str) -> Any:
    shared: dict[str, Any] = {
        "model": model,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": dict(load.extra) or None,
    }
    # Overloads know the types of named arguments only; these are data.
    untyped = cast(Any, client)
    if load.endpoint == "completions":
        return await untyped.completions.create(prompt=prompt, **shared)
    messages = [{"role": "user", "content": prompt}]
    return await untyped.chat.completions.create(messages=messages, **shared)


def _take(chunk: Mapping[str, Any], told: dict[str, Any], moments: list[float]) -> None:
    """Keeps what a chunk says, and when it came if it has text."""
    for name in ("usage", "timings"):
        if chunk.get(name):
            told[name] = chunk[name]
    for choice in cast(list[dict[str, Any]], chunk.get("choices") or []):
        told["finish_reason"] = choice.get("finish_reason") or told["finish_reason"]
        delta = cast(dict[str, Any], choice.get("delta") or {})
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            moments.append(time.perf_counter())


def document(
    points: Mapping[str, tuple[Sequence[Call], float]],
    config: Mapping[str, Any],
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """`schema_version, env, config, runs[], summary, points[]`; `points` has calls and seconds."""
    calls = [call for some, _ in points.values() for call in some]
    seconds = sum(duration for _, duration in points.values())
    return {
        **report.opening(config, {"server": dict(server)}),
        "runs": [asdict(call) | {"tpot_ms": call.tpot_ms} for call in calls],
        "summary": summary(calls, seconds),
        "points": [
            {"label": label, **summary(some, duration)}
            for label, (some, duration) in points.items()
        ],
    }


def summary(calls: Sequence[Call], seconds: float) -> dict[str, Any]:
    """vLLM's flat keys over all calls that worked, then what only kie tells."""
    good = [call for call in calls if not call.error]
    output = sum(call.completion_tokens for call in good)
    given = sum(call.prompt_tokens for call in good)
    flat = report.totals(len(good), seconds, given, output)
    flat["failed"] = len(calls) - len(good)
    flat["errors"] = sorted({call.error for call in calls if call.error})
    flat |= report.statistic("ttft_ms", [call.ttft_ms for call in good])
    flat |= report.statistic("tpot_ms", [call.tpot_ms for call in good if call.tpot_ms])
    gaps = [gap for call in good for gap in call.gaps_ms]
    flat |= report.statistic("itl_ms", gaps)
    flat |= report.statistic("e2el_ms", [call.e2e_ms for call in good])
    rates = [1e3 / call.tpot_ms for call in good if call.tpot_ms]
    flat["decode_tokens_per_second"] = report.quantile(rates, 0.5)
    flat["cached_tokens"] = sum(call.cached_tokens for call in good)
    timed = [call.timings for call in good if call.timings.get("itl_p50_us")]
    flat["device_itl_us"] = {
        "p50": report.quantile([one["itl_p50_us"] for one in timed], 0.5),
        "p99": report.quantile([one["itl_p99_us"] for one in timed], 0.5),
        "max": max((one["itl_max_us"] for one in timed), default=0.0),
    }
    flat["mbu"] = report.quantile([one.get("mbu", 0.0) for one in timed], 0.5)
    sizes = [one.get("bytes_per_token", 0.0) for one in timed]
    flat["bytes_per_token"] = round(report.quantile(sizes, 0.5))
    flat["windows"] = _windows(good)
    usual = report.quantile(gaps, 0.5)
    flat["stalls"] = [
        {"run": index, "token": place + 1, "gap_us": gap * 1e3, "medians": gap / usual}
        for index, call in enumerate(good)
        for place, gap in enumerate(call.gaps_ms)
        if usual and gap > report.STALL_FACTOR * usual
    ]
    return flat


def _windows(calls: Sequence[Call]) -> list[dict[str, float]]:
    """Tokens a second of all requests together, in each full second."""
    arrivals = sorted(
        (call.start_ms + moment, call.completion_tokens / len(call.chunk_ms))
        for call in calls
        for moment in call.chunk_ms
    )
    counts = [0.0] * (int(arrivals[-1][0] // 1000) if arrivals else 0)
    for moment, tokens in arrivals:
        if moment < len(counts) * 1000:
            counts[int(moment // 1000)] += tokens
    return [
        {"start_s": second, "seconds": 1.0, "tokens": count, "tokens_per_second": count}
        for second, count in enumerate(counts)
    ]


COLUMNS = (
    ("load", "label"),
    ("requests", "completed"),
    ("failed", "failed"),
    ("ttft p50 ms", "median_ttft_ms"),
    ("p99", "p99_ttft_ms"),
    ("tpot p50 ms", "median_tpot_ms"),
    ("gap p99 ms", "p99_itl_ms"),
    ("tok/s a request", "decode_tokens_per_second"),
    ("tok/s in all", "output_throughput"),
    ("device itl p50 us", "device_itl_us.p50"),
    ("MBU", "mbu"),
)
