"""Reads that fail while a model loads, each in its turn, and memory that is too little: a typed
error that says which file or how much, or an engine that answers as always; nothing stays open,
mapped or at work.

faults.c, put before libc, does that. The memory is that of allocations of a megabyte and more: a
smaller one that fails ends the process, as Rust has it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from generators._shared import ATTACK, QUIET, TINY, apart

Case = dict[str, Any]
LIMIT_SECONDS = 120.0
LIMIT_BYTES = 16 << 30

ERRORS = ("EIO", "EINTR", "ENOMEM", "EMFILE", "EACCES", "half")
"""What a read answers; half: fewer bytes than it was asked for, which is no fault."""
PROMPT = [5, 6, 7]
ANSWER = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
ENDLESS = 2**64 - 1
OPTIONS = {"device": "cpu", "threads": 1, "max_batch": 1}


def cases(random: Random) -> Iterator[Case]:
    """From which call on reads fail, one at a time, and how; or shares of the memory needed.

    A count of 0 stands for all calls.
    """
    while True:
        yield {
            "what": random.choice((*ERRORS, "memory", "memory", "memory")),
            "model": random.choice(("tiny", "tiny", "default")),
            "positions": random.choice((64, 2048)),
            "from": random.random(),
            "count": 12,
        }


@cache
def shim() -> Path:
    """faults.c, built once a process."""
    folder = Path(tempfile.mkdtemp(prefix="kie-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "faults.so"
    flags = ["-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run(["cc", *flags, str(ATTACK / "faults.c"), "-o", str(file), "-ldl"], check=True)
    return file


def run(case: Case, folder: Path) -> None:
    """A process with the shim in front opens the model again and again."""
    done = subprocess.run(
        apart("faults", case),
        env=os.environ | QUIET | {"LD_PRELOAD": str(shim()), "KIE_CACHE": str(folder)},
        cwd=ATTACK,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS - 10,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def held() -> tuple[int, int]:
    """Open files, and maps of weights."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count(".safetensors")


def code_of(library: str) -> tuple[int, int]:
    """Where a library's code lies."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if library in line]
    return int(spans[0][0], 16), int(spans[-1][1], 16)


def settled(before: tuple[int, int], at_work: int) -> str:
    """What is held beyond `before`, once threads that were left behind have ended."""
    until = time.monotonic() + 10
    while threads() > at_work and time.monotonic() < until:
        time.sleep(0.005)
    now = held()
    if now == before and threads() <= at_work:
        return ""
    return f"files and maps {before} before, {now} now; threads {at_work}, {threads()} now"


def child(case: Case) -> None:
    """The process: each fault by itself; those that may end it in forks."""
    import kie

    library = ctypes.CDLL(None)
    library.faults_failed.restype = ctypes.c_char_p
    library.faults_count.restype = ctypes.c_long
    library.faults_peak.restype = library.faults_refused.restype = ctypes.c_size_t
    library.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_size_t]
    library.faults_watch(*map(ctypes.c_size_t, code_of("_kie.")))
    what = case["what"]
    # All of the tiny model is small.
    path = TINY if case["model"] == "tiny" and what != "memory" else None
    positions = 64 if path else case["positions"]

    def life() -> tuple[int, ...]:
        with kie.Engine(path, **OPTIONS, max_seq_len=positions) as engine:
            return engine.generate(PROMPT, **ANSWER).token_ids

    def arm(at: int = -1, budget: int = ENDLESS) -> None:
        number = getattr(errno, what) if what.startswith("E") else 0
        library.faults_arm(at, number, budget)

    def judge() -> str:
        """What is wrong with a life under what is armed."""
        try:
            ids = life()
            said = "" if ids == wanted else f"answered {ids}"
        except kie.KieError as told:
            call, refused = library.faults_failed().decode(), library.faults_refused()
            # Reads are made again.
            again = what == "half" or (what == "EINTR" and call in ("read", "pread64", "open64"))
            bad = not told.hint or again or not (call or refused)
            said = f"{call}, {refused} bytes refused: {told!r}" if bad else ""
        return said

    def forked() -> str:
        """The same in a fork."""
        one = os.fork()
        if one == 0:
            said = judge()
            print(said, file=sys.stderr, flush=True)
            os._exit(1 if said else 0)
        ended = os.waitstatus_to_exitcode(os.waitpid(one, 0)[1])
        return f"ended with {ended}" if ended else ""

    wanted = life()
    arm()
    life()
    calls, peak = library.faults_count(), library.faults_peak()
    assert calls > 0
    assert peak > 0 or what != "memory"
    before, at_work = held(), threads()
    wrong: list[str] = []
    for n in range(case["count"] or calls):
        if what == "memory":
            budget = int((case["from"] + n) / case["count"] * peak)
            arm(budget=budget)
            said = forked()
            name = f"{budget} of {peak} bytes"
        else:
            at = int(case["from"] * calls) + n
            arm(at)
            said = judge()
            name = f"{what} at call {at} of {calls} ({library.faults_failed().decode()})"
        arm()
        said = said or settled(before, at_work)
        wrong += [f"{name}: {said}"] if said else []
    assert life() == wanted
    assert not wrong, "\n".join(wrong)
