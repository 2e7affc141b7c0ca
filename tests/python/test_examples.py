"""Every example runs with the default model and does what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ASKED = (
    "Write a function sum_even_squares(numbers) that returns "
    "the sum of the squares of the even numbers."
)


def run(name: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_examples_are_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    # ray_serve.py runs in `make test-ray`.
    assert names == {"agent.py", "batch.py", "chat.py", "ray_serve.py", "web.py"}
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["notebook.ipynb"]


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    space: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is kept without outputs"
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    assert "def count_vowels" in capsys.readouterr().out
    assert space["session"].turns == 1


def test_chat_answers_and_edits() -> None:
    out = run("chat.py", f"{ASKED}\nNow make it ignore negative numbers.\n\nnever read\n")
    first, second = out.strip().split("def ")[1:]
    assert "n % 2 == 0)" in first
    assert "n >= 0" in second


def test_the_agent_keeps_the_edit_that_passes() -> None:
    out = run("agent.py")
    heads = [line for line in out.splitlines() if line.startswith("# ")]
    assert heads[:4] == [
        "# Add a docstring. fails",
        "# Rename it to total. fails",
        "# Use a loop instead. fails",
        "# Now make it ignore negative numbers. passes",
    ]
    _, renamed = out.split("# and renamed:")
    assert "def solve(" in renamed
    assert ">= 0" in renamed, "the branch that passed goes on"


def test_a_batch_keeps_the_order() -> None:
    nouns = ("even", "odd", "positive", "negative", "even", "odd")
    prompts = [f"Write a function that counts the {noun} numbers in a list." for noun in nouns]
    rows = [json.loads(line) for line in run("batch.py", "\n".join(prompts)).splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["end"] == "stop" and row["text"].startswith("def ") for row in rows)
    assert rows[0]["text"] == rows[4]["text"] != rows[1]["text"] == rows[5]["text"]


def test_the_web_handler_serves_several_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "web.py", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            base = server.stdout.readline().strip()

            def fetch(prompt: str) -> str:
                query = urllib.parse.urlencode({"prompt": prompt})
                with urllib.request.urlopen(f"{base}?{query}", timeout=60) as response:
                    return response.read().decode()

            with ThreadPoolExecutor(4) as pool:
                texts = list(pool.map(fetch, ["def mean(values):"] * 3 + ["def add(a, b):"]))
            assert texts[0] == texts[1] == texts[2] != texts[3]
            assert "return" in texts[0]
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(base, timeout=60)
        finally:
            server.terminate()
