"""Pass rates of a model on small programming tasks, by running what it writes.

    python tools/demo_model/evaluate.py [MODEL] [--tasks FILE ...] [--temperature T] [--json OUT]

A task is a docstring whose function the model continues, or a chat request that it answers. It
passes if every one of its tests holds. Programs run one a process, under limits of time, memory and
file size, with few builtins and modules: a guard against accidents, not against malice.

Without --tasks there are three sets: compositions that the generator of the training text holds
out, drawn anew, and the handwritten ones of the folder `tasks`.
"""

from __future__ import annotations

import argparse
import bz2
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kie
import sandbox
from generator.documents import held_out_tasks

TASKS = Path(__file__).parent / "tasks"
HELD_OUT, HELD_OUT_TASKS = "heldout_compositions", 500
SETS = (HELD_OUT, "handwritten_docstring", "handwritten_chat")
AT_ONCE = 8


def read(file: Path) -> list[dict[str, Any]]:
    """The tasks of a file, which may be compressed."""
    raw = file.read_bytes()
    return json.loads(bz2.decompress(raw) if file.suffix == ".bz2" else raw)


def tasks_of(name: str) -> list[dict[str, Any]]:
    """The tasks of one of `SETS`."""
    return held_out_tasks(HELD_OUT_TASKS) if name == HELD_OUT else read(TASKS / f"{name}.json.bz2")


def asked(task: dict[str, Any]) -> dict[str, Any]:
    """The prompt or the messages of a task, as `Engine.stream` takes them."""
    if task["form"] == "chat":
        return {"messages": [{"role": "user", "content": task["prompt"].strip()}]}
    return {"prompt": task["prompt"]}


def program(task: dict[str, Any], text: str) -> str:
    """What to run: a continued function up to its end, a chat answer without its fences."""
    if task["form"] == "chat":
        fenced = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
        return fenced.group(1) if fenced else text
    lines = text.split("\n")
    ends = (n for n, line in enumerate(lines) if line.strip() and line[0] not in " \t)]}")
    return task["prompt"] + "\n".join(lines[: next(ends, len(lines))]) + "\n"


def answers(
    engine: kie.Engine, tasks: list[dict[str, Any]], temperature: float, max_tokens: int
) -> Iterator[str]:
    """The answers in order, `AT_ONCE` requests at a time."""
    for first in range(0, len(tasks), AT_ONCE):
        streams = [
            engine.stream(**asked(task), temperature=temperature, seed=0, max_tokens=max_tokens)
            for task in tasks[first : first + AT_ONCE]
        ]
        for stream in streams:
            with stream:
                yield stream.result().text


def evaluate(
    engine: kie.Engine,
    name: str,
    tasks: list[dict[str, Any]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 256,
) -> dict[str, Any]:
    """Runs the tasks of a set; `{set, passed, tasks, results}`."""
    texts = answers(engine, tasks, temperature, max_tokens)
    jobs = [(program(task, text), task["tests"]) for task, text in zip(tasks, texts, strict=True)]
    results = [
        {"name": task["name"], "result": result}
        for task, result in zip(tasks, sandbox.run(jobs), strict=True)
    ]
    passed = sum(entry["result"] == sandbox.PASSED for entry in results)
    return {
        "set": name,
        "passed": passed,
        "tasks": len(tasks),
        "results": results,
    }


def main() -> int:
    """Prints a line a set; exit code 1 where a task's own solution fails its tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tasks", nargs="*", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sets = [(file.name.split(".")[0], read(file)) for file in args.tasks or ()]
    sets = sets or [(name, tasks_of(name)) for name in SETS]
    runs: list[dict[str, Any]] = []
    with kie.Engine(args.model, device=args.device) as engine:
        for name, tasks in sets:
            run = evaluate(
                engine, name, tasks, temperature=args.temperature, max_tokens=args.max_tokens
            )
            runs.append(run)
            share = 100 * run["passed"] / max(run["tasks"], 1)
            print(
                f"{run['set']:24} {run['passed']:4} of {run['tasks']:4}  {share:5.1f} %", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
