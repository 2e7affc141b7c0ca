"""An agent that tries four edits of its code at once, keeps the one that passes, and goes on there.

    python examples/agent.py [MODEL]

A fork shares everything said so far, and nothing is copied: the four branches decode side by side
over the same keys and values. A rollback forgets turns that led nowhere.
"""

from __future__ import annotations

import sys

import kie

TASK = (
    "Write a function sum_even_squares(numbers) that returns "
    "the sum of the squares of the even numbers."
)
EDITS = (
    "Add a docstring.",
    "Rename it to total.",
    "Use a loop instead.",
    "Now make it ignore negative numbers.",
)
SAMPLING = {"temperature": 0, "max_tokens": 128}


def turn(text: str) -> list[kie.Message]:
    return [{"role": "user", "content": text}]


def passes(code: str) -> bool:
    """What the agent wants of the edit. Code of a model wants a sandbox outside an example."""
    space: dict[str, object] = {"__builtins__": {"sum": sum, "range": range, "len": len}}
    try:
        exec(code, space)
        function = next(value for name, value in space.items() if name != "__builtins__")
        return callable(function) and function([1, 2, -2, 4]) == 20
    except Exception:
        return False


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with kie.Engine(model) as engine:
        session = engine.session()
        print(session.stream(messages=turn(TASK), **SAMPLING).result().text)

        branches = [session.fork() for _ in EDITS]
        running = [
            branch.stream(messages=turn(edit), **SAMPLING)
            for branch, edit in zip(branches, EDITS, strict=True)
        ]
        kept = None
        for branch, edit, stream in zip(branches, EDITS, running, strict=True):
            answer = stream.result().text
            good = passes(answer)
            print(f"\n# {edit} {'passes' if good else 'fails'}\n{answer}")
            kept = branch if good else kept

        if kept is None:
            raise SystemExit("no edit passes")
        kept.stream(messages=turn("Explain it."), **SAMPLING).result()
        kept.rollback(to=2)  # the explanation is forgotten, task and edit stay
        print("\n# and renamed:")
        print(kept.stream(messages=turn("Rename it to solve."), **SAMPLING).result().text)


if __name__ == "__main__":
    main()
