"""The attack in its short form: what was found before, and a few seconds of new cases."""

from __future__ import annotations

import re
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


def test_every_test_of_the_table_of_faults_exists() -> None:
    table = (ROOT / "tests" / "attack" / "README.md").read_text(encoding="utf-8")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.rs", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    count, texts = 0, [""]
    for file, test in re.findall(r"`([\w/.]*)::(\w+)`", table):
        if file:
            paths = [path for path in listed if f"/{path}".endswith(f"/{file}")]
            texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
        assert any(re.search(rf"\b(fn|def) {test}\(", text) for text in texts), (file, test)
        count += 1
    assert count > 40
