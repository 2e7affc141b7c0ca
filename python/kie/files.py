"""Files that a user names: text and JSON, of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

BYTES_MAX = 64 << 20
"""More than any of these files has; /dev/zero has no end."""


def read_text(path: str | Path) -> str:
    """The text of a file, or of a pipe up to its end.

    Raises OSError where it cannot be read, ValueError where it is no UTF-8 or too long.
    """
    with Path(path).open("rb") as file:
        found = file.read(BYTES_MAX + 1)
    if len(found) > BYTES_MAX:
        raise ValueError(f"more than {BYTES_MAX >> 20} MB")
    return found.decode()


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises OSError where it cannot be read, ValueError where it is none.
    """
    try:
        found = json.loads(read_text(path))
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, no object")
    return cast("dict[str, Any]", found)
