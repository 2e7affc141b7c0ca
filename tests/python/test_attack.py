"""The attack in its short form: what was found before, and a few seconds of new cases."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_nothing_that_was_found_comes_back() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "attack"), "--short", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "0 findings" in done.stdout
