"""Runs small untrusted programs with their tests: a process each, under limits.

Limits keep accidents in: endless loops, memory, files, forks. It is no security boundary.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PASSED = "pass"
SECONDS = 4
MEMORY_BYTES = 512 << 20
MODULES = frozenset(
    "abc bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions "
    "functools heapq itertools json math numbers operator random re statistics string textwrap "
    "time typing unicodedata __future__".split()
)
WITHOUT = ("open", "input", "exit", "quit", "breakpoint")


def same(a: Any, b: Any) -> bool:
    """Equal in value and type; floats within a millionth."""
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict) and len(a) == len(b):
        return all(key in b and same(value, b[key]) for key, value in a.items())
    if isinstance(a, float) or isinstance(b, float):
        try:
            return bool(abs(a - b) <= 1e-6 * max(1, abs(a)))
        except TypeError:
            return False
    return type(a) is type(b) and bool(a == b)


def raises(error: type[BaseException], call: Any, *args: Any) -> bool:
    """Whether `call(*args)` raises `error`."""
    try:
        call(*args)
    except error:
        return True
    return False


def _execute(code: str, tests: list[str]) -> str:
    """In the child: the program, then its tests, in one namespace of few builtins."""
    import builtins

    real = builtins.__import__

    def guarded(name: str, *rest: Any) -> Any:
        if name.split(".")[0] not in MODULES:
            raise ImportError(name)
        return real(name, *rest)

    safe = {name: value for name, value in vars(builtins).items() if name not in WITHOUT}
    safe["__import__"] = guarded
    space: dict[str, Any] = {"__builtins__": safe, "__name__": "task"}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(code, "<answer>", "exec"), space)
            space.update(same=same, raises=raises)
            for test in tests:
                exec(test, space)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return PASSED


def _child() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = json.load(sys.stdin)
    # The verdict goes out on a descriptor that the program cannot name.
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    verdict = _execute(job["code"], job["tests"])
    os.write(out, json.dumps(verdict).encode())


def _one(job: tuple[str, list[str]]) -> str:
    code, tests = job
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", __file__],
                input=json.dumps({"code": code, "tests": tests}),
                capture_output=True,
                text=True,
                timeout=2 * SECONDS,
                cwd=folder,
                env={},
            )
        except subprocess.TimeoutExpired:
            return f"TimeoutError: over {2 * SECONDS} s"
    try:
        return str(json.loads(done.stdout))
    except json.JSONDecodeError:
        return f"died: exit status {done.returncode}"


def run(jobs: list[tuple[str, list[str]]]) -> list[str]:
    """`(code, tests)` -> `PASSED` or the error of each, in order."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(_one, jobs))


if __name__ == "__main__":
    _child()
