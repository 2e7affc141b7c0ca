"""Small classes with some of their methods: `vocabulary/classes.txt`."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any, NamedTuple

from .draw import pick
from .grammar import capital
from .recipes import blocks
from .segments import Segment, chat


class Method(NamedTuple):
    name: str
    param: str
    # What it does, as an imperative phrase.
    does: str
    body: str

    @property
    def call(self) -> str:
        return f"{self.name}({self.param})"

    def source(self, documented: bool) -> list[str]:
        head = f"    def {self.name}(self{', ' + self.param if self.param else ''}):"
        doc = [f'        """{capital(self.does)}."""'] if documented else []
        return ["", head, *doc, *("        " + line for line in self.body.split("\n"))]


def read() -> list[tuple[str, str, str, str, list[Method]]]:
    """(name, what it is, parameters, body of __init__, methods) of every class."""
    found = []
    for head, body in blocks("classes"):
        name, what, params = (part.strip() for part in f"{head} ".split(" |"))
        first, *others = body.split("\n---\n")
        methods = []
        for method in others:
            said, _, code = method.partition("\n")
            call, _, does = said.partition(": ")
            method_name, _, param = call.rstrip(")").partition("(")
            methods.append(Method(method_name, param, does, code))
        found.append((name, what, params, first, methods))
    return found


CLASSES = read()


def try_out(r: Random, source: str, name: str, params: str, methods: list[Method]) -> None:
    """Make an instance and call the methods; an empty stack may refuse."""
    names: dict[str, Any] = {}
    exec(source, names)
    args = [p.strip() for p in params.split(",") if p.strip()]
    made = names[name](*["Rex" if arg == "name" else r.randint(1, 9) for arg in args])
    for method in methods:
        with contextlib.suppress(ValueError, IndexError):
            getattr(made, method.name)(*([3] if method.param else []))


def class_document(r: Random) -> list[Segment]:
    """A document that asks for a class, or continues one."""
    name, what, params, init, methods = pick(r, CLASSES)
    k = r.randint(2, min(4, len(methods)))
    if r.random() < 0.7:
        # A sample for every method, as the published text was drawn.
        chosen = [m for m in methods if m in r.sample(methods, k)]
    else:
        chosen = r.sample(methods, k)
    if r.random() < 0.2:
        name = "My" + name if r.random() < 0.5 else pick(r, [name, "Simple" + name])
    documented = r.random() < 0.4
    lines = [f"class {name}:"]
    if documented and r.random() < 0.6:
        lines += [f'    """{capital(what)}."""', ""]
    lines.append(f"    def __init__(self{', ' + params if params else ''}):")
    lines += ["        " + line for line in init.split("\n")]
    for method in chosen:
        lines += method.source(documented)
    source = "\n".join(lines) + "\n"
    try_out(r, source, name, params, chosen)
    asked = request(r, name, what, chosen)
    if asked is None:
        at = source.index("\n", source.index("__init__")) + 1
        learned = r.random() < 0.5
        return [("<s>", False), (source[:at], learned), (source[at:] + "</s>", True)]
    rest = [m for m in methods if m not in chosen and m.name != name]
    if r.random() < 0.25 and rest:
        more = pick(r, rest)
        asked_more = [
            f"Add a method {more.name} to {more.does}.",
            f"Now add a method `{more.name}` that should {more.does}.",
        ]
        longer = "\n".join(lines + more.source(documented)) + "\n"
        return chat([(asked, source), (pick(r, asked_more), longer)])
    return chat([(asked, source)])


def request(r: Random, name: str, what: str, methods: list[Method]) -> str | None:
    """The user's turn, or None where the class is to be continued."""
    listed = ", ".join(m.name for m in methods[:-1]) + " and " + methods[-1].name
    said = [f"{m.call if r.random() < 0.5 or not m.param else m.name} to {m.does}" for m in methods]
    x = r.random()
    if x < 0.25:
        return f"Write a class {name} for {what} with the methods {listed}."
    if x < 0.45:
        return f"Write a Python class `{name}` with methods {listed}."
    if x < 0.75:
        return f"Create a class {name} for {what}. It should have {'; '.join(said)}."
    if x < 0.85:
        return f"Implement {what} as a Python class {name} with {listed}."
    return None
