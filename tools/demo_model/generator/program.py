"""One program for a task: written, and run against the task's reference."""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

from .task import CLOSURE, DECORATOR, GENERATOR, Task

# What a reference may raise where it has no value.
UNDEFINED = (ValueError, IndexError, ZeroDivisionError, KeyError, OverflowError)

# Arguments with the result.
Test = tuple[tuple[Any, ...], Any]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(1, abs(a))
    return a == b and type(a) is type(b)


def written(value: Any) -> str:
    """`repr`, with a set of strings in order: their own differs from process to process."""
    if isinstance(value, set) and any(isinstance(item, str) for item in value):
        return "{" + ", ".join(map(repr, sorted(value))) + "}"
    return repr(value)


class Program:
    """A function with its name, annotations and body drawn."""

    # How a docstring shows an example; drawn with the first one.
    example_style: int | None = None

    def __init__(
        self, r: Random, task: Task, name: str | None = None, hints: bool | None = None
    ) -> None:
        self.task = task
        self.name = name or task.name(r)
        self.hints = r.random() < 0.22 if hints is None else hints
        params = task.params()[:1] if task.kind == CLOSURE else task.params()
        self.args = ", ".join(p[0] for p in params)
        typed = [f"{p[0]}: {p[1]}" if self.hints and p[1] else p[0] for p in params]
        returns = task.returns() if self.hints and task.kind != GENERATOR else ""
        if returns and task.default == "None":
            returns += " | None"
        arrow = f" -> {returns}" if returns else ""
        self.head = f"def {self.name}({', '.join(typed)}){arrow}:"
        lines, self.imports, self.helper = task.body(r)
        self.lines = [line.replace("NAME(", self.name + "(") for line in lines]

    def renamed(self, name: str) -> Program:
        other = copy.copy(self)
        other.name, other.head = name, self.head.replace(f"def {self.name}(", f"def {name}(")
        other.lines = [re.sub(rf"\b{self.name}\(", name + "(", line) for line in self.lines]
        return other

    def source(
        self,
        doc: list[str] | None = None,
        nested: bool = False,
        inner_imports: bool = False,
        comment: str | None = None,
    ) -> str:
        """The whole text; `nested` with the helper, and then the imports, inside the function."""
        out, body = [], list(doc or [])
        imports, helper = sorted(self.imports), self.helper.split("\n") if self.helper else []
        if nested and inner_imports:
            body += imports
        elif imports:
            out += [*imports, "", ""]
        if helper and nested:
            body += [*helper, ""]
        elif helper:
            out += [*helper, "", ""]
        if comment:
            out.append("# " + comment)
        out.append(self.head)
        out += ["    " + line if line else "" for line in body + self.lines]
        return "\n".join(out) + "\n"

    def call(self, function: Any, args: Any) -> Any:
        if self.task.kind == GENERATOR:
            return list(function(*args))
        if self.task.kind == DECORATOR:
            return function(lambda v: v)(*args)
        if self.task.kind == CLOSURE:
            return function(args[0])(args[1])
        return function(*args)

    def example(self, args: tuple[Any, ...], want: Any) -> tuple[str, str]:
        """A call and its result, as text."""
        said = ", ".join(map(repr, args))
        call = f"{self.name}({said})"
        if self.task.kind == GENERATOR:
            call = f"list({call})"
        elif self.task.kind == DECORATOR:
            call = f"{self.name}(lambda v: v)({said})"
        elif self.task.kind == CLOSURE:
            call = f"{self.name}({args[0]!r})({args[1]!r})"
        return call, written(want)

    def asserts(self, tests: list[Test]) -> str:
        return "\n".join("assert {} == {}".format(*self.example(*test)) for test in tests)

    def verify(self, r: Random, count: int, need: int = 3) -> list[Test] | None:
        """Run it on `count` arguments: tests, or None where it is wrong or too few are defined."""
        names: dict[str, Any] = {}
        exec(compile(self.source(), "<task>", "exec"), names)
        tests: dict[str, Test] = {}
        for _ in range(count * 3):
            args = self.task.inputs(r)
            try:
                want = self.task.reference(*copy.deepcopy(args))
            except UNDEFINED:
                continue
            if not same(self.call(names[self.name], copy.deepcopy(args)), want):
                return None
            tests.setdefault(repr(args), (args, want))
            if len(tests) >= count:
                break
        if any(p[1] == "bool" for p in self.task.params()):
            need = 2
        return list(tests.values()) if len(tests) >= need else None
