"""`kie chat` as a person uses it: on a terminal, through a pty."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kie
import pytest
from conftest import TINY
from kie.cli.conversation import Conversation

ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")
WITHOUT_PROMPT_TOOLKIT = (
    "import sys; sys.modules['prompt_toolkit'] = None; from kie.cli import main; main()"
)


class Terminal:
    """A process on a pty: what it showed, and what is typed."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.descriptor, self.process, self.seen = descriptor, process, ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def until(self, wanted: str, timeout: float = 90) -> str:
        """Reads until `wanted` was shown; returns all that came before, escapes left out."""
        end = time.monotonic() + timeout
        while wanted not in self.seen:
            ready, _, _ = select.select([self.descriptor], [], [], end - time.monotonic())
            assert ready, f"{wanted!r} never came after {self.seen!r}"
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:
                data = b""
            assert data, f"ended before {wanted!r}: {self.seen!r}"
            if b"\x1b[6n" in data:
                os.write(self.descriptor, b"\x1b[1;1R")  # where the cursor is
            self.seen += ESCAPES.sub("", data.decode(errors="replace"))
        before, _, self.seen = self.seen.partition(wanted)
        return before


@contextmanager
def chat(
    tmp_path: Path, *words: str, code: str | None = None, verb: str = "chat"
) -> Iterator[Terminal]:
    """`kie chat` on a terminal of 100 columns, with a history of its own."""
    parent, child = pty.openpty()
    start = ["-m", "kie"] if code is None else ["-c", code]
    process = subprocess.Popen(
        [sys.executable, *start, verb, *words],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(child)
    try:
        yield Terminal(parent, process)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


@pytest.mark.parametrize("code", [None, WITHOUT_PROMPT_TOOLKIT], ids=["edited", "readline"])
def test_a_chat_on_a_terminal(tmp_path: Path, code: str | None) -> None:
    file = tmp_path / "kept.json"
    with chat(tmp_path, "-t", "0", "-n", "8", "--ignore-eos", code=code) as shown:
        assert "Write a function" in shown.until(">")
        shown.type("/help\r")
        assert "/save FILE" in shown.until("Ctrl-C stops")
        shown.type("Write a function that counts the zeros.\r")
        shown.until("8 tokens at")
        shown.type("and again\r")
        shown.until("8 tokens at")
        shown.type(f"/save {file}\r")
        shown.until("2 turns")
        shown.type("/system Be brief.\r/reset\r")
        shown.type(f"/load {file}\r")
        shown.until("2 turns")
        shown.type("/nonsense\r")
        shown.until("no such command: /nonsense")
        shown.type("/exit\r")
        assert shown.process.wait(60) == 0
    kept = json.loads(file.read_text())
    assert [turn["user"] for turn in kept["turns"]][1] == "and again"
    assert all(turn["assistant"] for turn in kept["turns"])


def test_demo_on_a_terminal_offers_prompts(tmp_path: Path) -> None:
    with chat(tmp_path, verb="demo") as shown:
        assert "4  Write a function" in shown.until("Ctrl-D ends.")
        for typed, answered in (("3", "def count_negative"), ("Write a function f.", "def f(")):
            shown.until(">")
            shown.type(f"{typed}\r")
            shown.until(answered)
            shown.until("tokens at")
        shown.until(">")
        shown.type("\x04")
        assert shown.process.wait(60) == 0


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(tmp_path: Path) -> None:
    with chat(tmp_path, "--ignore-eos", "-t", "0") as shown:
        shown.until(">")
        shown.type("Write a function that counts the zeros in a list.\r")
        shown.until("def ")
        os.killpg(shown.process.pid, signal.SIGINT)
        shown.until("cancelled")
        shown.type("/help\r")
        shown.until("/save FILE")
        shown.type("/exit\r")
        assert shown.process.wait(60) == 0


def test_pasted_lines_are_one_turn(tmp_path: Path) -> None:
    with chat(tmp_path, "-t", "0", "-n", "2", "--ignore-eos") as shown:
        shown.until(">")
        shown.type("\x1b[200~first line\nsecond line\x1b[201~\r")
        shown.until("2 tokens at")
        shown.type(f"/save {tmp_path / 'kept.json'}\r")
        shown.until("1 turns")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [turn["user"] for turn in kept["turns"]] == ["first line\nsecond line"]


def test_a_full_context_says_so_and_drops_the_oldest_turns(tmp_path: Path) -> None:
    with chat(tmp_path, "-m", str(TINY), "-n", "60", "--ignore-eos", "--max-seq-len", "130") as it:
        it.until(">")
        it.type("one two three four five six seven\r")
        it.until("60 tokens at")
        it.type("one two three four five six seven\r")
        it.until("The context is full")
        it.until("[Y/n] ")
        it.type("y\r")
        it.until("forgot the oldest turns")
        it.until("60 tokens at")
        it.type("/exit\r")
        assert it.process.wait(60) == 0


def test_a_file_that_is_no_conversation(tmp_path: Path, engine: kie.Engine) -> None:
    talk = Conversation(engine, None)
    talk.answered("a", "b")
    for text in ("", "{}", "[]", '{"format": "kie chat 1", "system": null, "turns": [1]}'):
        (tmp_path / "file").write_text(text)
        with pytest.raises(kie.InvalidRequestError, match="wanted a conversation"):
            talk.load(str(tmp_path / "file"))
        assert talk.turns == [("a", "b")]
