"""Where a task's elements come from: a list, a range, digits, a dictionary's values, ..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from . import draw
from .draw import pick
from .parts import Param
from .recipes import recipes, weighted

KNOWN = {
    name: getattr(draw, name)
    for name in "pick ints strs sentence matrix WORDS NAMES RECORDS".split()
}


@dataclass
class Source:
    """A source with its draws made."""

    key: str
    # Type of an element: see `parts`.
    element: str
    params: list[Param]
    # Singular and plural of an element.
    noun: tuple[str, str]
    # "in a list", "in xs": without and with the parameter's name.
    places: list[str]
    named_places: list[str]
    # Code of what is iterated, and whether it is a list.
    iterable: str
    # The elements from the arguments.
    meaning: Callable[..., list[Any]]
    # Name of an element in a loop.
    variable: str
    # (loop variable, element computed from it) where the iterable does not give elements.
    inner: tuple[str, str] | None = None
    is_list: bool = False
    name: str = ""


FIELDS = {f.name for f in fields(Source)}
NAMED = {recipe.key: recipe for recipe in recipes("sources")}
ALL = weighted(list(NAMED.values()))


def source(r: Random, key: str | None = None) -> Source:
    """A drawn source, or the one called `key`."""
    recipe = pick(r, ALL) if key is None else NAMED[key]
    names = recipe.draw(r, KNOWN)
    return Source(**{name: value for name, value in names.items() if name in FIELDS})


def list_source(r: Random, t: str) -> Source:
    """A plain list of elements of type `t`."""
    return source(r, {"I": "list", "S": "slist"}[t])
