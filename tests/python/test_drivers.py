"""Drivers of GPUs that fail, each call in its turn, and reads while a model loads: see drivers.py
and faults.py in tests/attack/generators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "attack"))

from generators import faults

CALLS = {"cuda:0": 40, "cuda:0,1": 40, "hip:0": 35}
"""How many different calls an engine makes at least."""


@pytest.mark.parametrize("device", CALLS)
def test_every_call_may_fail(device: str, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from generators import drivers
print(drivers.walk({device!r}, Path({str(tmp_path)!r})))
"""
    # A process of its own: the driver stays under its name as long as one lives.
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT / "tests" / "attack",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) >= CALLS[device]


@pytest.mark.parametrize(("what", "count"), [("EIO", 0), ("half", 0), ("memory", 12)])
def test_every_read_of_loading_may_fail(what: str, count: int, tmp_path: Path) -> None:
    """And memory may end anywhere, in twelve steps."""
    faults.run(
        {"what": what, "model": "tiny", "positions": 64, "from": 0, "count": count}, tmp_path
    )
