"""One predicate, two joined by "and" or "or", or a negated one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from .grammar import insert, plural_nouns
from .parts import Part, predicate


class Undefined(IndexError):
    """The reference has no value for these arguments."""


class Filter:
    """Which elements are taken. `mode` is "", "and", "or" or "not"."""

    def __init__(self, predicates: list[Part], mode: str = "") -> None:
        self.predicates, self.mode = predicates, mode
        self.key = f"{mode}({','.join(p.key for p in predicates)})"
        self.params = [param for p in predicates for param in p.params]
        self.helper = next((p.helper for p in predicates if p.helper), None)
        self.near = [value for p in predicates for value in p.near]

    @property
    def name(self) -> str:
        return self.predicates[0].name

    def test(self, x: Any, args: Sequence[Any] = ()) -> bool:
        """Whether `x` is taken; `args` are those of the predicates' parameters."""
        found = []
        for p in self.predicates:
            own, args = args[: len(p.params)], args[len(p.params) :]
            if p.defined and not p.defined(x):
                raise Undefined
            found.append(bool(p.meaning(x, *own)))
        if self.mode == "not":
            return not found[0]
        return any(found) if self.mode == "or" else all(found)

    def code(self, x: str) -> str:
        codes = [insert(p.code, x) for p in self.predicates]
        if self.mode == "not":
            call = re.fullmatch(r"[\w.]+\([^()]*\)", codes[0])
            return f"not {codes[0]}" if call else f"not ({codes[0]})"
        if self.mode == "and":
            codes = [f"({c})" if " or " in c and not c.startswith("(") else c for c in codes]
        return (" or " if self.mode == "or" else " and ").join(codes)

    def plural(self, r: Random) -> str:
        """'are even', said of several elements; empty where it cannot be said."""
        phrases = [p.plural for p in self.predicates]
        if self.mode == "not":
            return plural_nouns(negated_plural(phrases[0]))
        if len(phrases) == 2 and all(p.startswith("are ") for p in phrases) and r.random() < 0.7:
            return plural_nouns(f"{phrases[0]} {self.mode} {phrases[1][4:]}")
        return plural_nouns(f" {self.mode} ".join(phrases))

    def singular(self) -> str:
        """'is even', said of one element; empty where it cannot be said."""
        phrases = [p.singular for p in self.predicates]
        if self.mode != "not":
            return f" {self.mode} ".join(phrases)
        phrase = phrases[0]
        if phrase.startswith("is ") and not phrase.startswith("is not"):
            return "is not " + phrase[3:]
        return "does not have " + phrase[4:] if phrase.startswith("has ") else ""

    def elements(self, r: Random, noun: tuple[str, str], place: str) -> str:
        """'even numbers in nums', without an article."""
        one, many = noun
        ps = self.predicates
        first = ps[0]
        if one == "character" and self.mode == "" and first.noun and r.random() < 0.8:
            return f"{first.noun[1]} {place}"
        if self.mode == "" and first.adjective and r.random() < 0.75:
            return f"{first.adjective} {many} {place}"
        if self.mode == "and" and all(p.adjective for p in ps) and r.random() < 0.6:
            return f"{first.adjective} {ps[1].adjective} {many} {place}"
        if self.mode == "and" and first.adjective and r.random() < 0.6:
            return f"{first.adjective} {many} {place} that {plural_nouns(ps[1].plural)}"
        phrase = self.plural(r)
        if phrase.startswith("are ") and self.mode == "" and first.bare and r.random() < 0.4:
            return f"{many} {phrase[4:]} {place}"
        return f"{many} {place} that {phrase}"


def negated_plural(phrase: str) -> str:
    if phrase.startswith("are ") and not phrase.startswith("are not"):
        return "are not " + phrase[4:]
    if phrase.startswith("have "):
        return "do not have " + phrase[5:]
    return "" if phrase.startswith(("are", "do not")) else "do not " + phrase


def random_filter(r: Random, t: str, params: bool = True) -> Filter:
    """A filter of elements of type `t`; without `params` one that adds no parameter."""
    x = r.random()
    if x < 0.80:
        return Filter([predicate(r, t, params)])
    if x < 0.85:
        p = predicate(r, t, False)
        negated = Filter([p], "not")
        sayable = negated.plural(r) and negated.singular()
        odd = p.key in ("outside", "ne") or " not " in p.singular
        return negated if sayable and not odd else Filter([p])
    a, b = predicate(r, t, params), predicate(r, t, False)
    if a.key == b.key or (a.helper and b.helper):
        return Filter([a])
    return Filter([a, b], "and" if x < 0.93 else "or")


def plain_filter(r: Random, t: str) -> Filter:
    """A filter without parameters and without a helper function."""
    while True:
        found = random_filter(r, t, False)
        if not found.helper:
            return found
