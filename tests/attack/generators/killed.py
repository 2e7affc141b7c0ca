"""A process that is killed while it loads, compiles, generates or writes a model: the next one with
the same folders works at once, and finds no half-written thing in its way.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators import drivers
from generators._shared import ATTACK, TINY, apart
from kie.engine import quantize_folder

Case = dict[str, Any]
LIMIT_BYTES = 64 << 30
LIMIT_SECONDS = 400.0

PROMPT = [5, 6, 7]
ANSWER = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
WORKS = ("cpu", "cpu", "cuda:0", "cuda:0", "quantize", "quantize")
OPENS_WITHIN_S = 10.0


def cases(random: Random) -> Iterator[Case]:
    """What runs, and how long until it is killed; at times on the simulated kernel."""
    while True:
        simulated = random.random() < 0.02
        yield {
            "work": "sim" if simulated else random.choice(WORKS),
            "after_s": 10 ** random.uniform(-3.0, -0.3),
        }


def work(kind: str, folder: Path) -> tuple[int, ...]:
    """Opens an engine and asks it, or writes a model and opens that."""
    path, device = TINY, "cpu" if kind == "quantize" else kind
    if kind == "quantize":
        path = folder / "out"
        if not path.is_dir():
            quantize_folder(TINY, path, to="fp8")
    options = {"max_batch": 1, "max_seq_len": 256}
    with kie.Engine(path, device=device, **options) as engine:
        return engine.generate(PROMPT, **ANSWER).token_ids


def run(case: Case, folder: Path) -> None:
    """A process that works until it is killed, then this one."""
    kind = case["work"]
    os.environ["KIE_CACHE"] = str(folder / "cache")
    if kind == "cuda:0":
        stub = drivers.driver(kind)
        stub.library.script_heal()
        stub.arm(-1, 0)
    words = apart("killed", case | {"folder": str(folder)})
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ATTACK, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "ready"
        time.sleep(case["after_s"])
        other.kill()
    begun = time.monotonic()
    ids = work(kind, folder)
    took = time.monotonic() - begun
    assert WANTED.setdefault(kind, ids) == ids, f"{ids} after a kill"
    assert kind == "sim" or took < OPENS_WITHIN_S, f"{took:.1f} s"
    left = [file.name for file in folder.iterdir() if "partial" in file.name]
    assert not left, left


def child(case: Case) -> None:
    """The process that is killed."""
    kind = case["work"]
    if kind == "cuda:0":
        drivers.driver(kind)
    print("ready", flush=True)
    while True:
        work(kind, Path(case["folder"]))


WANTED: dict[str, tuple[int, ...]] = {}
