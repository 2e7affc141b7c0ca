"""The evaluation of the default model: its sandbox holds, its tasks are sound, and it passes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import kie
import pytest
from kie.cli.demo import PROMPTS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "demo_model"))

import evaluate  # noqa: E402
import sandbox  # noqa: E402
from generator.documents import held_out_tasks  # noqa: E402


@pytest.mark.parametrize("name", evaluate.SETS)
def test_the_reference_programs_of_tasks_pass_their_tests(name: str) -> None:
    drawn = name == evaluate.HELD_OUT  # all of them are another test's
    tasks = held_out_tasks(50) if drawn else evaluate.tasks_of(name)[::10]
    jobs = [(task["solution"], task["tests"]) for task in tasks]
    assert sandbox.run(jobs) == [sandbox.PASSED] * len(tasks)


def test_what_a_program_must_not_do_is_no_pass() -> None:
    programs = {
        "wrong": "def f():\n    return 2\n",
        "syntax": "def f(:\n",
        "file": "def f():\n    return len(open('/etc/passwd').read())\n",
        "module": "import os\ndef f():\n    return 1\n",
        "memory": "def f():\n    return len('x' * 10**10)\n",
        "loop": "def f():\n    while True:\n        pass\n",
        "quits": "def f():\n    raise SystemExit(0)\n",
        "right": "def f():\n    print('pass')\n    return 1\n",
    }
    jobs = [(code, ["assert same(f(), 1)"]) for code in programs.values()]
    results = dict(zip(programs, sandbox.run(jobs), strict=True))
    assert results.pop("right") == sandbox.PASSED
    assert sandbox.PASSED not in results.values(), results
    assert results["module"].startswith("ImportError")
    assert results["file"].startswith("NameError")
    assert results["loop"].startswith(("died", "TimeoutError"))


def test_the_default_model_writes_programs_that_run(demo: kie.Engine) -> None:
    run = evaluate.evaluate(demo, evaluate.HELD_OUT, held_out_tasks(16))
    assert run["tasks"] == 16
    assert run["passed"] >= 15, run["results"]


def test_what_kie_demo_offers_is_answered_rightly(demo: kie.Engine) -> None:
    wanted = (
        "f([1, 2, 3, 4]), 20",
        "f('some words are not so long'), ['long', 'some', 'words']",
        "f([-1, 2, -3]), 2",
        "f(['a', 'b', 'a', 'c']), 'a'",
    )
    tasks = [{"form": "chat", "prompt": prompt} for prompt in PROMPTS]
    jobs = []
    for text, right in zip(evaluate.answers(demo, tasks, 0.0, 256), wanted, strict=True):
        [name] = re.findall(r"^def (\w+)", text, re.M)
        jobs.append((f"{text}\nf = {name}\n", [f"assert same({right})"]))
    assert sandbox.run(jobs) == [sandbox.PASSED] * len(PROMPTS)
