"""What ends the opening of an engine: exceptions of `progress=`, Ctrl-C, files that change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import kie
import pytest
from conftest import TINY


class Halt(Exception):
    """Of these tests alone."""


def test_what_progress_raises_ends_loading() -> None:
    before = len(os.listdir("/proc/self/task"))
    for after in (0, 5, 10, 20, 10**9):

        def progress(stage: str, done: int, total: int, after: int = after) -> None:
            if done >= min(after, total):  # the last call has all of it
                raise Halt(stage)

        with pytest.raises(Halt):
            kie.Engine(TINY, device="cpu", progress=progress)
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
    assert str(TINY) not in Path("/proc/self/maps").read_text()


def test_progress_is_called_where_the_engine_is_opened() -> None:
    threads = set[int]()
    with kie.Engine(TINY, progress=lambda *_: threads.add(threading.get_ident())):
        assert threads == {threading.get_ident()}


def test_a_signal_inside_progress_is_not_lost() -> None:
    # As on a terminal, where the bars are drawn while Ctrl-C is pressed.
    with pytest.raises(KeyboardInterrupt):
        kie.Engine(TINY, device="cpu", progress=lambda *_: os.kill(os.getpid(), signal.SIGINT))


def test_ctrl_c_at_any_moment_of_loading_is_heard() -> None:
    script = f"""
        import os, random, signal, threading, time, kie
        source, heard = random.Random(20261122), 0
        for turn in range(40):
            press = threading.Timer(
                source.random() * 0.03, os.kill, (os.getpid(), signal.SIGINT))
            try:
                press.start()
                with kie.Engine({str(TINY)!r}, device="cpu", threads=1, progress=lambda *_: None):
                    while True:
                        time.sleep(0.01)
            except KeyboardInterrupt:
                heard += 1
            press.join()
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(heard, len(os.listdir("/proc/self/task")))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert result.stdout.split() == ["40", "1"]


def test_ctrl_c_does_not_wait_for_a_compiler(tmp_path: Path) -> None:
    # The simulator's kernels take seconds to compile, and nothing in there looks at signals.
    script = f"""
        import os, signal, threading, time, kie, kie.engine
        pressed = []
        def press():
            time.sleep(0.2)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            kie.engine.compile_ahead({str(TINY)!r}, device="sim:warp=32,blocks=4")
        except KeyboardInterrupt:
            print(time.monotonic() - pressed[0], flush=True)
        os._exit(0)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "KIE_CACHE": str(tmp_path)},
    )
    # 50 ms on a machine that does nothing else; a compile takes several seconds.
    assert float(result.stdout) < 1.0


def test_weights_cut_short_while_loading_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    kept = weights.read_bytes()
    refused, blamed = 0, set[object]()
    for turn in range(30):
        weights.write_bytes(kept)
        moment = threading.Timer(turn * 0.0005, os.truncate, (weights, 4096))
        moment.start()
        try:
            with kie.Engine(folder, device="cpu", threads=1) as engine:
                moment.join()
                assert len(engine.generate("abc", max_tokens=4, ignore_eos=True).token_ids) == 4
        except kie.LoadError as error:
            refused += 1
            blamed.add(error.context["file"])
        moment.join()
    assert refused > 0
    assert blamed == {str(weights)}
