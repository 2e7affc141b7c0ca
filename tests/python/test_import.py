"""`import kie` is quick and light, and `kie run` speaks at once."""

from __future__ import annotations

import subprocess
import sys
import time

HEAVY = ("numpy", "typer", "rich", "click", "asyncio", "torch", "cupy", "ctypes", "huggingface_hub")


def test_import_loads_nothing_heavy() -> None:
    script = f"import sys, kie; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == "[]"


def test_import_takes_60_ms_at_most() -> None:
    script = "import time; t = time.perf_counter(); import kie; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", script]
    times = [float(subprocess.check_output(command, text=True)) for _ in range(7)]
    assert min(times) <= 0.060


def test_run_prints_its_first_token_within_250_ms() -> None:
    command = [sys.executable, "-m", "kie", "run", "def fibonacci(n):", "-n", "8", "-q"]
    times: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            times.append(time.perf_counter() - start)
            process.stdout.read()
        assert process.returncode == 0
    assert min(times) <= 0.250
