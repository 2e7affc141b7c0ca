"""Lines that a person types: editing, history and pasted text, as far as this machine has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "> "


def reader(asks: bool) -> Callable[[], str | None]:
    """A function that returns the next entry, None at the end of the input.

    On a terminal it is edited with prompt_toolkit, where that is installed, else with readline, and
    a pasted text is one entry whatever its lines. Elsewhere an entry is a line.
    """
    if not asks:
        return _plain
    try:
        return _edited()
    except ImportError:
        return _readline()


def _plain() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _history() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache) / "kie"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "chat_history")


def _edited() -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    # Answers go to standard output, which may be a file.
    session: PromptSession[str] = PromptSession(
        history=FileHistory(_history()), output=create_output(sys.stderr)
    )

    def read() -> str | None:
        try:
            return session.prompt(PROMPT)
        except EOFError:
            return None

    return read


def _readline() -> Callable[[], str | None]:
    from importlib import import_module

    try:
        # Importing it is what makes `input` edit lines.
        editor: Any = import_module("readline")
    except ImportError:
        editor = None

    def read() -> str | None:
        try:
            line = input(PROMPT)
        except EOFError:
            return None
        if editor is not None:
            editor.set_auto_history(True)
        return line

    return read
