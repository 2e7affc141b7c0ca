"""What a caller gets: plain, frozen data.

`Token`, `TopLogprob`, `Completion`, `Usage` and `Timings` are made by the extension module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kie._kie import Completion, Timings, Token, TopLogprob, Usage

__all__ = [
    "Completion",
    "FinishReason",
    "Message",
    "Timings",
    "Token",
    "TopLogprob",
    "Usage",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout", "error"]

Message = Mapping[str, Any]
"""One chat message, `{"role": ..., "content": ...}`; what else it may hold is the template's."""
