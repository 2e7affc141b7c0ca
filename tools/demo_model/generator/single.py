"""Tasks that are not composed: `vocabulary/single.txt`, with names that vary."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from .draw import WORDS, ints, matrix, pick, sentence, strs
from .parts import Param
from .recipes import blocks
from .template import Template

LETTERS = "abcAB 12-,!"
NESTED = [[1, [2, 3], [[4]]], [], [[], [1]], [5, [6, [7, [8]]]], [1, 2]]
BRACKETS = ["()", "([])", "(]", "", "{[()]}", "((", "())", "[{}]()", "a(b)c"]
ROMAN = ["I", "IV", "IX", "XII", "XL", "XCIX", "MCMXCIV", "DCCC", "LVIII"]
MIXED = [1, "a", None, 2.5, 0, "", True, 7]

# What the parameters of a task are: annotation, and how an argument is drawn.
ARGUMENTS: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "int": ("int", lambda r: r.randint(-50, 100)),
    "pos": ("int", lambda r: r.randint(1, 60)),
    "nat": ("int", lambda r: r.randint(0, 30)),
    "small": ("int", lambda r: r.randint(0, 8)),
    "big": ("int", lambda r: r.randint(0, 10 ** r.randint(1, 7))),
    "k": ("int", lambda r: r.randint(1, 5)),
    "year": ("int", lambda r: r.choice([1900, 2000, 2004, 2023, 2024, 2100, r.randint(1, 3000)])),
    "base": ("int", lambda r: r.randint(2, 9)),
    "nzint": ("int", lambda r: r.choice([-3, 1, 2, 4, 5, 7])),
    "bool": ("bool", lambda r: r.random() < 0.5),
    "float": ("float", lambda r: round(r.uniform(-40, 120), 1)),
    "posfloat": ("float", lambda r: round(r.uniform(0.5, 20), 1)),
    "list": ("list[int]", ints),
    "nelist": ("list[int]", lambda r: ints(r, n=r.randint(1, 8))),
    "list2": ("list[int]", lambda r: ints(r, n=r.randint(2, 8))),
    "smalllist": ("list[int]", lambda r: [r.randint(0, 6) for _ in range(r.randint(0, 9))]),
    "nesmalllist": ("list[int]", lambda r: [r.randint(0, 6) for _ in range(r.randint(1, 9))]),
    "sorted": ("list[int]", lambda r: sorted(ints(r))),
    "unique": ("list[int]", lambda r: r.sample(range(30), r.randint(1, 6))),
    "strs": ("list[str]", strs),
    "nestrs": ("list[str]", lambda r: strs(r, n=r.randint(1, 6))),
    "mixed": ("list", lambda r: [r.choice(MIXED) for _ in range(r.randint(0, 7))]),
    "nested": ("list", lambda r: r.choice(NESTED)),
    "pairs": ("list[tuple]", lambda r: list(zip(strs(r, n=4), ints(r, n=4), strict=True))),
    "matrix": ("list[list[int]]", matrix),
    "square": ("list[list[int]]", lambda r: matrix(r, square=True)),
    "listlist": (
        "list[list[int]]",
        lambda r: [ints(r, n=r.randint(0, 4)) for _ in range(r.randint(0, 4))],
    ),
    "dict": ("dict[str, int]", lambda r: {k: r.randint(-5, 30) for k in strs(r)}),
    "nedict": (
        "dict[str, int]",
        lambda r: {k: r.randint(-5, 30) for k in strs(r, n=r.randint(1, 5))},
    ),
    "str": ("str", lambda r: r.choice([sentence(r), r.choice(WORDS), letters(r)])),
    "word": ("str", lambda r: r.choice(WORDS)),
    "text": ("str", sentence),
    "netext": ("str", lambda r: sentence(r) or "one word"),
    "char": ("str", lambda r: r.choice("aeiostrnlx")),
    "bits": ("str", lambda r: "".join(r.choice("01") for _ in range(r.randint(1, 9)))),
    "brackets": ("str", lambda r: r.choice(BRACKETS)),
    "roman": ("str", lambda r: r.choice(ROMAN)),
    "time": ("str", lambda r: f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"),
    "rle": ("str", lambda r: r.choice(["aaabbc", "", "abc", "zzzz", "aabbaa"])),
    "snake": ("str", lambda r: r.choice(["hello_world", "a", "my_long_name", "x_y"])),
    "camel": ("str", lambda r: r.choice(["helloWorld", "a", "myLongName", "xY"])),
    "op": ("str", lambda r: r.choice("+-*/")),
}

# Other names for a parameter or a local variable.
ALIASES = {
    "n": ["n", "n", "number", "num", "x", "value"],
    "numbers": ["numbers", "nums", "lst", "arr", "values", "data", "xs"],
    "items": ["items", "lst", "values", "arr", "elements", "data"],
    "text": ["text", "s", "string", "text"],
    "s": ["s", "text", "string", "word"],
    "word": ["word", "s", "w", "string"],
    "words": ["words", "strings", "lst", "names"],
    "matrix": ["matrix", "grid", "m", "mat"],
    "d": ["d", "data", "dictionary", "mapping"],
    "a": ["a", "a", "x", "first"],
    "b": ["b", "b", "y", "second"],
    "k": ["k", "n", "size", "count"],
    "target": ["target", "value", "x"],
    "result": ["result", "result", "res", "output", "out"],
    "total": ["total", "total", "result", "s"],
    "count": ["count", "count", "counter", "c"],
    "c": ["c", "ch", "char"],
    "x": ["x", "item", "value", "num"],
    "w": ["w", "word"],
    "i": ["i", "i", "idx"],
    "best": ["best", "largest", "result"],
    "sentence": ["sentence", "text", "s"],
}
LOCALS = {"result", "total", "count", "c", "x", "w", "i", "best"}


def letters(r: Random) -> str:
    return "".join(r.choice(LETTERS) for _ in range(r.randint(0, 9)))


def read() -> list[tuple[list[str], list[list[str]], list[str], list[str]]]:
    """(names, parameters, wordings, programs) of every task."""
    tasks = []
    for head, body in blocks("single"):
        names, _, params = head.partition("|")
        said, *programs = body.split("\n---\n")
        wordings = [line for line in said.split("\n") if line.strip()]
        tasks.append((names.split(), [p.split(":") for p in params.split()], wordings, programs))
    return tasks


TASKS = read()


@cache
def reference(name: str, params: str, program: str) -> Callable[..., Any]:
    """The function that `program` is the body of."""
    body = "\n".join("    " + line for line in program.replace("NAME(", f"{name}(").split("\n"))
    names: dict[str, Any] = {}
    exec(f"def {name}({params}):\n{body}", names)
    return names[name]


def renamed(r: Random, params: list[str], programs: list[str]) -> dict[str, str]:
    """Other names for some of the task's."""
    text = " ".join(programs)
    new: dict[str, str] = {}
    for name in sorted({*params, *LOCALS}):
        if name in ALIASES and r.random() < 0.7:
            other = pick(r, ALIASES[name])
            used = other in new.values() or other in params or re.search(rf"\b{other}\b", text)
            if other != name and not used:
                new[name] = other
    return new


def random_single(r: Random) -> Template:
    names, typed, wordings, programs = pick(r, TASKS)
    params = [name for name, _ in typed]
    new = renamed(r, params, programs)

    def name_of(match: re.Match[str]) -> str:
        return new.get(match.group(1), match.group(1))

    arguments: list[Param] = []
    for name, what in typed:
        annotation, drawn = ARGUMENTS[what]
        arguments.append((new.get(name, name), annotation, lambda r, near, drawn=drawn: drawn(r)))
    return Template(
        "single",
        names[0],
        arguments,
        [re.sub(r"\{(\w+)\}", name_of, line) for line in wordings],
        # A name, but no attribute and no word of a string.
        [re.sub(r"(?<![\w.'\"])(\w+)\b(?!['\"])", name_of, code) for code in programs],
        names,
        reference(names[0], ", ".join(params), programs[0]),
    )
