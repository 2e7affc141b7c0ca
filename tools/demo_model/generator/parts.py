"""The parts of a composed task: predicates, maps, operations on a list, aggregates.

A part has wordings, code over `{x}` (or `{L}` for a list), and its meaning as a function: the
reference against which every program is run. Where a recipe gives no meaning, it is that of its
first code. Element types are "I" (integer), "S" (string) and "C" (character).
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from random import Random
from typing import Any

from .draw import constant, pick, quoted
from .grammar import plural_verb
from .recipes import Recipe, fill, recipes, weighted

# Name, annotation, and how to draw an argument near certain values.
Param = tuple[str, str, Callable[[Random, list[Any]], Any]]

PRIME_INLINE = "{x} > 1 and all({x} % d != 0 for d in range(2, int({x} ** 0.5) + 1))"
PRIME_HELPERS = [
    """def is_prime(n):
    if n < 2:
        return False
    for i in range(2, int(n ** 0.5) + 1):
        if n % i == 0:
            return False
    return True""",
    """def is_prime(n):
    return n > 1 and all(n % d != 0 for d in range(2, int(n ** 0.5) + 1))""",
    """def is_prime(n):
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True""",
]
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def running_totals(numbers: list[int]) -> list[int]:
    out, total = [], 0
    for number in numbers:
        total += number
        out.append(total)
    return out


def most_common(values: list[Any]) -> Any:
    return max(values, key=values.count)


# What the recipes of parts may use.
KNOWN: dict[str, Any] = {
    **{f.__name__: f for f in (pick, constant, quoted, is_prime, running_totals, most_common)},
    **{m.__name__: m for m in (collections, math, statistics)},
    "COUNTS": COUNTS,
    "PRIME_INLINE": PRIME_INLINE,
    "PRIME_HELPERS": PRIME_HELPERS,
}


@dataclass
class Part:
    """One part with its draws made."""

    key: str
    name: str
    meaning: Callable[..., Any]
    code: str = ""
    params: list[Param] = field(default_factory=list)
    # Values at which the meaning changes.
    near: list[Any] = field(default_factory=list)
    # Where the meaning is defined at all.
    defined: Callable[[Any], bool] | None = None

    # A predicate: "even", "is even", "are even"; bare: "numbers even in xs" can be said.
    adjective: str | None = None
    singular: str = ""
    bare: bool = True
    helper: str | None = None
    noun: tuple[str, str] | None = None

    # A map: "the squares of {X}", "square {them}", "its square", and the type of what comes out.
    phrases: list[str] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)
    its: str = ""
    out: str = ""

    # An operation or an aggregate: element types that it takes.
    types: str = ""
    final: bool = False
    # An aggregate: (initial value, statement over {acc} and {m}) of its loop; whether it has a
    # value for an empty list; whether its code takes a generator, or the list twice.
    loop: tuple[str, str] | None = None
    total: bool = True
    lazy: bool = True
    twice: bool = False

    @property
    def plural(self) -> str:
        return plural_verb(self.singular)


PART_FIELDS = {f.name for f in fields(Part)}


@cache
def meaning_of(code: str, params: tuple[str, ...]) -> Callable[..., Any]:
    """The function that a part's code computes."""
    over = "L" if "{L}" in code else "x"
    body = code.replace("{L}", "L").replace("{x}", "x")
    return eval(f"lambda {', '.join((over, *params))}: {body}", {**KNOWN})


def make(r: Random, recipe: Recipe) -> Part:
    names = recipe.draw(r, KNOWN)
    if "meaning" not in names:
        first = recipe.names("code")
        assert first
        params = tuple(p[0] for p in names.get("params", []))
        names["meaning"] = meaning_of(fill(first[0], names), params)
    part = Part(**{name: value for name, value in names.items() if name in PART_FIELDS})
    part.bare &= part.singular.startswith("is ")
    return part


class Bag:
    """The parts of a file, each as often as it weighs."""

    def __init__(self, name: str) -> None:
        found = recipes(name)
        self.named = {recipe.key: recipe for recipe in found}
        self.all = weighted(found)
        self.fixed = [recipe for recipe in self.all if recipe.names("params") is None]

    def draw(self, r: Random, params: bool = True) -> Part:
        """One of them; without `params` one that adds no parameter to the function."""
        return make(r, pick(r, self.all if params else self.fixed))

    def by_type(self, r: Random, t: str) -> Part:
        """One of those that take a list of elements of type `t`."""
        return make(r, pick(r, [recipe for recipe in self.all if t in self.types(recipe)]))

    def get(self, r: Random, key: str) -> Part:
        return make(r, self.named[key])

    @staticmethod
    def types(recipe: Recipe) -> str:
        return (recipe.names("types") or ("",))[0]


PREDICATES = {
    t: Bag(f"predicates_{name}") for t, name in (("I", "int"), ("S", "str"), ("C", "char"))
}
MAPS = {t: Bag(f"maps_{name}") for t, name in (("I", "int"), ("S", "str"), ("C", "char"))}
OPERATIONS = Bag("operations")
AGGREGATES = Bag("aggregates")
JOIN = "${'join' if s else 'concat'}"


def predicate(r: Random, t: str, params: bool = True) -> Part:
    return PREDICATES[t].draw(r, params)


def mapping(r: Random, t: str, params: bool = True, out: str | None = None) -> Part:
    """A map of elements of type `t`, into type `out` where given."""
    while True:
        part = MAPS[t].draw(r, params)
        if out in (None, part.out):
            return part
