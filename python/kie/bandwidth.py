"""What this machine's cores read from memory a second, as `kie doctor` measured it.

It is kept in the user's folder of caches, by processor and number of cores, so that an engine on
the CPU can say which part of it a decode uses (`Timings.mbu`) without measuring for a second.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from kie import _kie


def _file() -> Path:
    cache = os.environ.get("KIE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "kie" / "bandwidth.json"


def _machine() -> str:
    return f"{_kie.host()[0]}, {len(os.sched_getaffinity(0))} cores"


def known() -> float | None:
    """Bytes a second, None where nobody has measured it on as many cores of this processor."""
    # Whatever is wrong with the file, or with there being none: it is as if nobody had.
    with suppress(OSError, ValueError, AttributeError, RuntimeError):
        value = json.loads(_file().read_bytes()).get(_machine())
        if isinstance(value, float) and 0.0 < value < 1e15:
            return value
    return None


def keep(bytes_per_second: float) -> None:
    """Remembers what was measured; where that fails it is measured again."""
    with suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({_machine(): bytes_per_second}))
        beside.replace(file)
