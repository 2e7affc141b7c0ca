"""kie: an inference engine that makes one request as fast as the hardware allows.

    import kie

    with kie.Engine() as engine:                     # the default model of the package
        for token in engine.stream("def fibonacci(n):"):
            print(token.text, end="")

Importing this package loads neither NumPy nor any GPU library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kie._kie import __version__
from kie.engine import Engine, Session
from kie.errors import (
    BackendMissingError,
    ContextLengthError,
    DeviceError,
    DriverTooOldError,
    EngineClosedError,
    EngineHangError,
    GrammarError,
    InvalidRequestError,
    KieError,
    LoadError,
    NoDeviceError,
    OutOfMemoryError,
    QueueFullError,
    TemplateError,
    UnsupportedModelError,
)
from kie.stream import Stream
from kie.types import (
    Completion,
    FinishReason,
    Info,
    Message,
    Metrics,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from kie.grammar import JsonSchema, Lark, Regex
    from kie.machine import Report
    from kie.sampling import Sampling, SamplingParams

__all__ = [
    "BackendMissingError",
    "Completion",
    "ContextLengthError",
    "DeviceError",
    "DriverTooOldError",
    "Engine",
    "EngineClosedError",
    "EngineHangError",
    "FinishReason",
    "GrammarError",
    "Info",
    "InvalidRequestError",
    "JsonSchema",
    "KieError",
    "Lark",
    "LoadError",
    "Message",
    "Metrics",
    "NoDeviceError",
    "OutOfMemoryError",
    "QueueFullError",
    "Regex",
    "Sampling",
    "SamplingParams",
    "Session",
    "Stream",
    "TemplateError",
    "Timings",
    "Token",
    "TokenLogprob",
    "TopLogprob",
    "UnsupportedModelError",
    "Usage",
    "__version__",
    "doctor",
]


def __getattr__(name: str) -> object:
    # These bring `dataclasses` along, a fifth of the time of the whole import.
    if name in ("Sampling", "SamplingParams"):
        from kie import sampling

        return getattr(sampling, name)
    if name in ("JsonSchema", "Lark", "Regex"):
        from kie import grammar

        return getattr(grammar, name)
    raise AttributeError(f"module 'kie' has no attribute {name!r}")


def doctor() -> Report:
    """What this machine has, what kie will use, what is missing and the command that mends it."""
    from kie import machine

    return machine.report()
