"""What generators have in common."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kie

ROOT = Path(__file__).resolve().parents[3]
ATTACK = ROOT / "tests" / "attack"
TINY = ROOT / "tests" / "data" / "llama"


def model(folder: Path, changes: dict[str, Any]) -> Path:
    """The tiny model by links; files named in `changes` are texts, or keys put into their JSON."""
    made = folder / "model"
    made.mkdir()
    for file in TINY.iterdir():
        if file.name not in changes:
            (made / file.name).symlink_to(file)
    for name, change in changes.items():
        if isinstance(change, dict):
            change = json.dumps(json.loads((TINY / name).read_text()) | change)
        (made / name).write_text(change, encoding="utf-8", errors="surrogatepass")
    return made


def typed(call: Callable[[], object]) -> object:
    """What `call` returns, or its typed error; other errors are findings."""
    try:
        return call()
    except kie.KieError as error:
        # Of a request the message says all.
        told = error.hint or isinstance(error, kie.InvalidRequestError)
        if not error.message or not told:
            raise
        return error


def command(*words: str) -> list[str]:
    """`kie ...` as a process."""
    return [sys.executable, "-m", "kie", *words]


QUIET = {"RUST_BACKTRACE": "0"}
"""Of processes with too little memory: where an allocation fails Rust would print the stack, which
takes memory, and where that fails too it waits for itself.
"""


def apart(name: str, case: dict[str, Any]) -> list[str]:
    """The function `child` of a generator in a process of its own, as a command."""
    script = (
        f"import json, sys; from generators.{name} import child; child(json.loads(sys.argv[1]))"
    )
    return [sys.executable, "-c", script, json.dumps(case)]


def environment(**values: str) -> dict[str, str]:
    """Of a process: this one's, and `values`."""
    return dict(os.environ) | values
