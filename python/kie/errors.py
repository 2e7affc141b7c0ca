"""Every exception that kie raises on purpose. Cancel and timeout are finish reasons instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class KieError(Exception):
    """Base class: what went wrong, a stable `code`, what to do about it, and the facts.

    Attributes:
        message: one line of cause.
        code: stable and machine-readable, such as `"context_length"`.
        hint: one line of remedy.
        context: the facts behind the message (file, tensor, wanted, got, ...).
    """

    default_code: ClassVar[str] = "error"
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        context: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else code
        self.hint = self.default_hint if hint is None else hint
        self.context: dict[str, object] = dict(context or {})

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class LoadError(KieError):
    """A model folder or one of its files is missing, cut short or not what it claims to be."""

    default_code = "load"


class UnsupportedModelError(KieError):
    """An architecture, a flag or a storage format that kie does not know."""

    default_code = "unsupported_model"


class DeviceError(KieError):
    """A device failed."""

    default_code = "device"


class NoDeviceError(DeviceError):
    """The device asked for is not in this machine."""

    default_code = "no_device"


class DriverTooOldError(DeviceError):
    """The driver is older than kie needs."""

    default_code = "driver_too_old"


class BackendMissingError(DeviceError):
    """The device is there, its software part is not."""

    default_code = "backend_missing"


class EngineHangError(DeviceError):
    """The device stopped answering; the engine must be opened again."""

    default_code = "engine_hang"

    @property
    def dump(self) -> str:
        """Step, block, slot, wanted and seen value when the wait ran out."""
        return str(self.context.get("dump", ""))


class OutOfMemoryError(KieError):
    """The plan does not fit into what is free; nothing was loaded."""

    default_code = "out_of_memory"

    @property
    def need(self) -> int:
        """Bytes that the plan needs."""
        return _integer(self.context.get("need"))

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return _integer(self.context.get("free"))

    @property
    def plan(self) -> str:
        """The printed plan, with what to lower."""
        return str(self.context.get("plan", ""))


class InvalidRequestError(KieError):
    """A request or an option that makes no sense."""

    default_code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """Prompt and tokens to generate exceed the context."""

    default_code = "context_length"


class TemplateError(InvalidRequestError):
    """The chat template is missing or refused the messages."""

    default_code = "template"


class GrammarError(InvalidRequestError):
    """A grammar that cannot be compiled, or not be kept to."""

    default_code = "grammar"


class EngineClosedError(KieError):
    """The engine was closed, or belongs to the process before a fork."""

    default_code = "engine_closed"


class QueueFullError(KieError):
    """More requests wait than `max_queue` allows."""

    default_code = "queue_full"


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
