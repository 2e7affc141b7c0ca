"""Files of a checkpoint that change at a random moment of loading, or later: opening ends with a
typed error, or with an engine whose tokens are those of the files as they were.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import TINY, typed

Case = dict[str, Any]
LIMIT_SECONDS = 60.0

FILES = ("model.safetensors", "model.safetensors", "config.json", "tokenizer.json")
CHANGES = ("cut", "empty", "flip", "append", "remove", "replace", "pipe", "folder", "lock")
PROMPT = [5, 6, 7]
ANSWER = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def cases(random: Random) -> Iterator[Case]:
    """What changes how, at which report of progress; later than any means on the open engine."""
    while True:
        yield {
            "file": random.choice(FILES),
            "change": random.choice(CHANGES),
            "at": random.choice((0, 1, 1, 2, 3, 5, 8, 10**6)),
            "place": random.random(),
        }


def change(file: Path, how: str, place: float) -> None:
    """Does it; a file that is gone stays gone."""
    if not file.is_file():
        return
    size = file.stat().st_size
    match how:
        case "cut":
            os.truncate(file, int(place * size))
        case "empty":
            os.truncate(file, 0)
        case "flip":
            with file.open("r+b") as raw:
                raw.seek(int(place * size))
                byte = raw.read(1) or b"\0"
                raw.seek(-len(byte) if raw.tell() else 0, os.SEEK_CUR)
                raw.write(bytes([byte[0] ^ 0x41]))
        case "append":
            with file.open("ab") as raw:
                raw.write(b"\0" * 4096)
        case "lock":
            file.chmod(0)
        case "replace":
            other = file.with_suffix(".other")
            other.write_bytes(os.urandom(size))
            other.replace(file)
        case _:
            file.unlink()
            if how == "pipe":
                os.mkfifo(file)
            elif how == "folder":
                file.mkdir()


def run(case: Case, folder: Path) -> None:
    """Opens a copy that changes meanwhile."""
    global WANTED
    if WANTED is None:
        with kie.Engine(TINY, device="cpu", threads=1, max_batch=1) as engine:
            WANTED = engine.generate(PROMPT, **ANSWER).token_ids
    copy = folder / "model"
    shutil.copytree(TINY, copy)
    file, reports = copy / case["file"], 0

    def progress(_stage: str, _done: int, _total: int) -> None:
        nonlocal reports
        if reports == case["at"]:
            change(file, case["change"], case["place"])
        reports += 1

    options: dict[str, Any] = {"device": "cpu", "threads": 1, "max_batch": 1}
    engine = typed(lambda: kie.Engine(copy, progress=progress, **options))
    if not isinstance(engine, kie.Engine):
        return
    with engine:
        first = engine.generate(PROMPT, **ANSWER).token_ids
        change(file, case["change"], case["place"])
        again = engine.generate(PROMPT * 2, **ANSWER)
        assert len(again.token_ids) == ANSWER["max_tokens"]
        assert engine.generate(PROMPT, **ANSWER).token_ids == first
    assert first == WANTED


WANTED: tuple[int, ...] | None = None
