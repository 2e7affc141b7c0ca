"""What a caller gets: plain, frozen data.

`Token`, `TopLogprob`, `Completion`, `Usage` and `Timings` are made by the extension module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from kie._kie import Completion, Timings, Token, TokenLogprob, TopLogprob, Usage

__all__ = [
    "Completion",
    "FinishReason",
    "Info",
    "LoadPhase",
    "LoadReport",
    "Message",
    "Metrics",
    "Timings",
    "Token",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout", "error"]

Message = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`; what else it may hold is the template's."""


class LoadPhase(TypedDict):
    """A part of opening an engine."""

    name: str
    seconds: float
    bytes: int


class LoadReport(TypedDict):
    """Where the time of opening an engine went."""

    seconds: float
    phases: list[LoadPhase]


class Info(TypedDict):
    """What `Engine.info()` returns."""

    model: str
    adapter: str | None
    device: str
    passed_over: str | None
    device_model: str
    device_arch: str
    threads: int
    arch: str
    dtype: str
    parameters: int
    vocab: int
    context: int
    max_batch: int
    max_queue: int
    kv_pages: list[int]
    kv_bytes: int
    kv_bytes_per_position: int
    weight_bytes: int
    bytes_per_token: int
    read_bandwidth: float | None
    plan: str
    load: LoadReport


class Metrics(TypedDict):
    """What `Engine.metrics()` returns: counters since the engine was opened, and gauges."""

    requests_stop: int
    requests_length: int
    requests_cancelled: int
    requests_timeout: int
    requests_error: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preempted: int
    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_pages: int
    uptime_s: float
