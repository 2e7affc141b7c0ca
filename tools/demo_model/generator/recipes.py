"""The text files of `vocabulary/`: blocks that begin with `## `, and texts with places to fill.

`$name` and `${expression}` in a text are Python, evaluated from left to right when the text is
filled. A recipe is a block of lines that are carried out in order:

    ## key weight
    name = expression        a value
    name: text | text        one of the texts, drawn (a single text takes no draw)
    verbs: text | text       all of the texts, for the names in `LISTS`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

from .draw import pick

FOLDER = Path(__file__).parent / "vocabulary"
LISTS = {"phrases", "verbs", "places", "named_places"}


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """(head, body) of every block of a file; what stands before the first one is for readers."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    for block in text.split("\n## ")[1:]:
        head, _, body = block.rstrip("\n").partition("\n")
        yield head, body


@cache
def expression(source: str) -> CodeType:
    return compile(source.strip(), "<vocabulary>", "eval")


def closing(text: str) -> int:
    """Where the brace that `text` begins with is closed."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if not depth:
            return at
    raise ValueError(f"no closing brace in {text!r}")


@cache
def pieces(text: str) -> tuple[str | CodeType, ...]:
    """A text apart: literals, and the expressions between them."""
    out: list[str | CodeType] = []
    while "$" in text:
        before, _, text = text.partition("$")
        out.append(before)
        if text.startswith("{"):
            end = closing(text)
            source, text = text[1:end], text[end + 1 :]
        else:
            source = re.match(r"\w+", text)[0]  # type: ignore[index]
            text = text[len(source) :]
        out.append(expression(source))
    return (*out, text)


def fill(text: str, names: dict[str, Any]) -> str:
    """`text` with its places filled from `names`."""
    return "".join(p if isinstance(p, str) else str(eval(p, names)) for p in pieces(text))


@dataclass(frozen=True)
class Recipe:
    """A part of a task before its draws: see the head of this module."""

    key: str
    weight: int
    steps: tuple[tuple[str, str, tuple[str, ...]], ...]

    @classmethod
    def read(cls, head: str, body: str) -> Recipe:
        key, _, weight = head.rpartition(" ")
        steps = []
        for line in body.split("\n"):
            name, mark, value = re.fullmatch(r"([\w, ]+?)( =|:) (.*)", line).groups()  # type: ignore[union-attr]
            texts = (value,) if mark == " =" else tuple(t.strip() for t in value.split(" | "))
            steps.append((name, mark, texts))
        return cls(key, int(weight), tuple(steps))

    def names(self, name: str) -> tuple[str, ...] | None:
        """The texts of the line `name`, unfilled."""
        return next((texts for step, _, texts in self.steps if step == name), None)

    def draw(self, r: Random, known: Mapping[str, Any]) -> dict[str, Any]:
        """Every name of the recipe with its value, besides `key` and what is `known`."""
        names: dict[str, Any] = {**known, "r": r}
        for name, mark, texts in self.steps:
            if mark == " =":
                value = eval(expression(texts[0]), names)
                targets = name.split(", ")
                names.update(
                    zip(targets, value, strict=True) if len(targets) > 1 else [(name, value)]
                )
                continue
            filled = [fill(text, names) for text in texts]
            if name in LISTS:
                names[name] = filled
            else:
                names[name] = pick(r, filled) if len(filled) > 1 else filled[0]
        names["key"] = fill(self.key, names)
        return names


def recipes(name: str) -> list[Recipe]:
    return [Recipe.read(head, body) for head, body in blocks(name)]


def weighted(found: list[Recipe]) -> list[Recipe]:
    return [recipe for recipe in found for _ in range(recipe.weight)]
