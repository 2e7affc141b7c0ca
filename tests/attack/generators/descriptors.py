"""The command line with closed, full or odd descriptors, small limits and no room in its caches.

It ends in time, with a code that it documents, without a traceback and without a signal.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from generators._shared import TINY, command, environment

Case = dict[str, Any]
LIMIT_BYTES = 16 << 30
LIMIT_SECONDS = 150.0

# TINY stands for the path of the model.
LINES = (
    ("run", "abc", "-m", "TINY", "-n", "5"),
    ("run", "-", "-m", "TINY", "-n", "5"),
    ("chat", "-m", "TINY", "-n", "3"),
    ("doctor",),
    ("doctor", "--json"),
    ("tokenize", "abc", "-m", "TINY"),
    ("info", "TINY", "--json"),
    ("--version",),
    ("info", "TINY", "--plan", "--device", "cpu"),
)
STREAMS = (
    "",
    "",
    "",
    "<&-",
    ">&-",
    "2>&-",
    "</dev/full",
    ">/dev/full",
    "2>/dev/full",
    "</dev/zero",
)
INPUT = ("", "abc\n", "abc\n/undo\n/exit\n", "x " * 9000 + "\nabc\n", "\0\u00e9\ud800\n")
# Kilobytes of address space; file sizes in blocks; descriptors; processes are left alone.
LIMITS = ("", "", "ulimit -v 700000;", "ulimit -v 1500000;", "ulimit -v 4000000;", "ulimit -f 8;",
          "ulimit -f 0;", "ulimit -n 16;", "ulimit -n 32;", "ulimit -s 256;")  # fmt: skip
COMPILERS = ("", "", "/bin/true", "/bin/cat", "yes", "sleep 9", "g++ -nosuch", "\u00e9")


def cases(random: Random) -> Iterator[Case]:
    """A verb and what is wrong around it."""
    while True:
        yield {
            "words": list(random.choice(LINES)),
            "streams": random.sample(STREAMS, random.randrange(3)),
            "input": random.choice(INPUT),
            "limit": random.choice(LIMITS),
            "cxx": random.choice(COMPILERS),
            "simulated": random.random() < 0.1,
        }


def run(case: Case, folder: Path) -> None:
    """Runs the line in a shell that changes its streams."""
    words = [str(TINY) if word == "TINY" else word for word in case["words"]]
    if case["simulated"] and words[0] == "run":
        words = [*words, "--device", "sim"]
    given = environment(CXX=case["cxx"], KIE_CACHE=str(folder / "cache"))
    if not case["cxx"]:
        del given["CXX"]
    if "</dev/zero" in case["streams"] and "-" in words:
        # A prompt without an end is read until there is no memory: the caller's own.
        return
    script = f'{case["limit"]} exec "$@" {" ".join(case["streams"])}'
    done = subprocess.run(
        ["/bin/bash", "-c", script, "bash", *command(*words)],
        input=case["input"].encode(errors="surrogatepass"),
        capture_output=True,
        timeout=LIMIT_SECONDS - 10,
        env=given,
        cwd=folder,
        check=False,
    )
    said = done.stderr.decode(errors="replace")
    if case["limit"] and done.returncode not in (0, 1) and b"kie" not in done.stderr:
        # Python itself did not start.
        return
    assert done.returncode in (0, 1, 2), f"{done.returncode}: {said}"
    assert "Traceback" not in said, said
    assert "panicked" not in said, said
    if done.returncode == 1 and not any(s.startswith("2>") for s in case["streams"]):
        assert said.count("error: ") >= 1, said
    assert not os.listdir(folder) or set(os.listdir(folder)) <= {"cache"}
