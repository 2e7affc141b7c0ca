"""A process with little of something while it opens and asks an engine, or writes a model: address
space, data, file sizes, a disk that is full, no home, quotas of a control group.

It answers as always or says in a typed error what it lacked; nothing half-written stays.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from generators._shared import ATTACK, QUIET, TINY, apart

Case = dict[str, Any]
LIMIT_SECONDS = 120.0
LIMIT_BYTES = 64 << 30

PROMPT = [5, 6, 7]
ANSWER = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LARGE = 1 << 18
"""Bytes from which on an allocation that fails must be told; of smaller ones Rust dies."""
KINDS = ("address", "address", "data", "stack", "file", "disk", "home", "cpu", "memory")
HOMES = ("", "/dev/null", "/nonexistent", "/proc", "a file")
GROUPS = Path("/sys/fs/cgroup")


def cases(random: Random) -> Iterator[Case]:
    """What is short, and how short: more than is taken already, in bytes."""
    while True:
        kind = random.choice(KINDS)
        most = {"address": 31, "data": 31, "file": 20, "disk": 20, "stack": 23, "memory": 30}
        yield {
            "kind": kind,
            "room": int(2 ** random.uniform(8, most.get(kind, 8))),
            "work": random.choice(("open", "open", "quantize", "doctor")),
            "model": random.choice(("tiny", "default")),
            "threads": random.choice((1, 2, 8)),
            "home": random.choice(HOMES),
            "quota": random.choice((0.5, 1.0, 1.5)),
        }


def run(case: Case, folder: Path) -> bool:
    """The work in a process of its own, which sets its limits once everything is imported; false:
    the limit cannot be set on this machine."""
    words = apart("limits", case | {"folder": str(folder)})
    (folder / "cache").mkdir()
    given = os.environ | QUIET | {"KIE_CACHE": str(folder / "cache")}
    if case["kind"] == "home":
        (folder / "a file").touch()
        home = case["home"]
        given |= {"HOME": str(folder / home) if home == "a file" else home}
        for name in ("KIE_CACHE", "XDG_CACHE_HOME"):
            given.pop(name, None)
    with group(case, folder) as before:
        if before is None:
            return False
        done = subprocess.run(
            [*before, *words],
            env=given,
            cwd=ATTACK,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS - 10,
            check=False,
        )
    said = done.stderr[-3000:]
    small = re.search(r"memory allocation of (\d+) bytes failed", said)
    if small and int(small[1]) < LARGE and done.returncode == -6:
        return True
    assert done.returncode == 0, f"{done.returncode}: {said}"
    return True


@contextmanager
def group(case: Case, folder: Path) -> Iterator[list[str] | None]:
    """What comes before the command so that it runs under the limit; None: not on this machine."""
    if case["kind"] == "disk":
        mount = f"mount -t tmpfs -o size={max(case['room'], 4096)} none {folder}/cache"
        shell = ["unshare", "-rm", "/bin/sh", "-c"]
        can = subprocess.run([*shell, mount], capture_output=True, check=False).returncode == 0
        yield [*shell, f'{mount} && exec "$@"', "sh"] if can else None
        return
    files = {
        "cpu": ("cpu", {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": case["quota"] * 1e5},
                {"cpu.max": f"{case['quota'] * 1e5:.0f} 100000"}),
        "memory": ("memory", {"memory.limit_in_bytes": (64 << 20) + case["room"]},
                   {"memory.max": (64 << 20) + case["room"]}),
    }  # fmt: skip
    if case["kind"] not in files:
        yield []
        return
    controller, first, second = files[case["kind"]]
    old = (GROUPS / controller).is_dir()
    made = (GROUPS / controller if old else GROUPS) / f"kie-attack-{os.getpid()}"
    try:
        made.mkdir(exist_ok=True)
        for name, value in (first if old else second).items():
            (made / name).write_text(f"{value:.0f}" if isinstance(value, float) else str(value))
    except OSError:
        yield told(folder, second) if case["kind"] == "cpu" else None
    else:
        yield ["/bin/sh", "-c", f'echo $$ >{made}/cgroup.procs && exec "$@"', "sh"]
    finally:
        if made.is_dir():
            made.rmdir()


def told(folder: Path, files: dict[str, Any]) -> list[str] | None:
    """Before a command that is to find itself in a group of these files, which hold nobody back."""
    job = folder / "groups" / "job"
    job.mkdir(parents=True)
    for name, text in (files | {"cgroup.controllers": ""}).items():
        (job / name).write_text(text)
    (folder / "group").write_text("0::/job\n")
    mounts = f"mount --bind {job.parent} {GROUPS} && mount --bind {folder}/group /proc/$$/cgroup"
    shell = ["unshare", "-rm", "/bin/sh", "-c"]
    can = subprocess.run([*shell, mounts], capture_output=True, check=False).returncode == 0
    return [*shell, f'{mounts} && exec "$@"', "sh"] if can else None


def taken(field: str) -> int:
    """What this process has of something, in bytes (proc(5))."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def limit(case: Case) -> None:
    """Sets the limit of a process."""
    kinds = {
        "address": (resource.RLIMIT_AS, lambda: taken("VmSize")),
        "data": (resource.RLIMIT_DATA, lambda: taken("VmData")),
        "file": (resource.RLIMIT_FSIZE, lambda: 0),
        "stack": (resource.RLIMIT_STACK, lambda: 1 << 16),
    }
    if case["kind"] in kinds:
        which, base = kinds[case["kind"]]
        most = base() + case["room"]
        resource.setrlimit(which, (most, most))


def child(case: Case) -> None:
    """The process."""
    # What Python has not imported before a limit is set it cannot import afterwards.
    import importlib.metadata  # noqa: F401

    import kie
    import numpy as np  # noqa: F401
    from generators import drivers
    from kie import machine
    from kie.engine import quantize_folder

    folder = Path(case["folder"])
    path = TINY if case["model"] == "tiny" else None
    options: dict[str, Any] = {"max_batch": 1, "max_seq_len": 64}
    stores = case["kind"] in ("file", "disk", "home")
    if stores and case["work"] == "open":
        # What is compiled is kept.
        drivers.driver("cuda:0")
        path, options["device"] = TINY, "cuda:0"
    else:
        options |= {"device": "cpu", "threads": case["threads"]}
    out = folder / "cache" / "out"
    told: kie.KieError | None = None
    limit(case)
    try:
        if case["work"] == "doctor":
            used = machine.report(measure=False).will_use
            if case["kind"] == "cpu":
                threads = int(re.search(r"(\d+) threads?\)", used)[1])
                wanted = max(1, min(os.cpu_count() or 1, int(case["quota"])))
                assert threads == wanted, f"{threads} threads, {wanted} wanted"
        elif case["work"] == "quantize":
            quantize_folder(TINY, out, to="fp8")
            with kie.Engine(out, **options | {"device": "cpu"}) as engine:
                engine.generate(PROMPT, **ANSWER)
        else:
            with kie.Engine(path, **options) as engine:
                done = engine.generate(PROMPT, **ANSWER)
                assert len(done.token_ids) == ANSWER["max_tokens"]
    except kie.KieError as error:
        told = error
    except MemoryError:
        pass
    if told is not None:
        assert told.hint or isinstance(told, kie.InvalidRequestError), repr(told)
        left = [file.name for file in folder.glob("cache/out*")]
        assert not left or case["kind"] not in ("file", "disk"), left
