"""Composed tasks: a source, then a filter, a map, operations on the list, an aggregate."""

from __future__ import annotations

import ast
import hashlib
import re
from random import Random
from typing import Any

from . import rendering, wording
from .draw import ints, pick
from .filters import Filter, Undefined, random_filter
from .parts import AGGREGATES, JOIN, OPERATIONS, Param, Part, mapping
from .sources import Source, source
from .task import GENERIC

# Operations that only order, and aggregates that no order changes.
ORDERING = """sort sortdesc reverse sortlen sortlendesc sortlast sortlow sortabs sortdig rotate
sortuniq""".split()
ORDERLESS = """sum product count max min mean median range second counter nunique set exists alluniq
totlen lendict issorted alphafirst alphalast""".split()
DEFAULTS = {
    "int": ["None", "0", "None", "-1"],
    "float": ["None", "0", "0", "0.0"],
    "str": ["None", '""', '""'],
    "x": ["None", "None"],
}
# Names that a function should not hide.
TAKEN = """sum max min list set tuple sorted reversed is not or and range filter map chunks
len""".split()
ELEMENT = {"I": "int", "S": "str", "C": "str"}


def held_out(key: str) -> bool:
    """2.5 % of the compositions are never trained on."""
    return int(hashlib.sha1(key.encode()).hexdigest()[:8], 16) % 40 == 0


def idle(operations: list[Part], aggregate: Part) -> bool:
    """Whether the last operation makes no difference to the aggregate."""
    return bool(operations) and operations[-1].key in ORDERING and aggregate.key in ORDERLESS


class Pipeline:
    """A composed task with its draws made."""

    family = "pipeline"
    kind = None

    def __init__(self, r: Random) -> None:
        self.source: Source = source(r)
        t = self.source.element
        self.filter: Filter | None = None
        self.map: Part | None = None
        if r.random() < (0.75 if t != "C" else 0.85):
            self.filter = random_filter(r, t)
        if r.random() < (0.45 if t != "C" else 0.35):
            self.map = mapping(r, t)
        self.operations: list[Part] = []
        if r.random() < 0.28:
            self._draw_operations(r)
        self.aggregate = self._draw_aggregate(r)
        if self.aggregate.key in ("count", "exists") and self.map and not self.map.params:
            self.map, self.operations = None, []
        self.default = self._draw_default(r)

    def _draw_operations(self, r: Random) -> None:
        for _ in range(2 if r.random() < 0.2 else 1):
            drawn = OPERATIONS.by_type(r, self.out_type())
            if not any(o.key == drawn.key or o.final for o in self.operations):
                self.operations.append(drawn)

    def _draw_aggregate(self, r: Random) -> Part:
        t = self.out_type()
        drawn = None
        for _ in range(20):
            if self.operations and self.operations[-1].final:
                drawn = AGGREGATES.get(r, "list")
            elif self.size_before_aggregate() and self.operations and r.random() < 0.5:
                plain = t != "C" or r.random() < 0.4
                drawn = AGGREGATES.get(r, "list" if plain else JOIN)
            else:
                drawn = AGGREGATES.by_type(r, t)
                nothing = not self.size_before_aggregate() and not self.source.inner
                if drawn.key == "list" and nothing:
                    continue
            if t == "C" and drawn.key == "list" and r.random() < 0.6:
                continue
            if not idle(self.operations, drawn):
                break
        assert drawn
        return drawn

    def _draw_default(self, r: Random) -> str | None:
        if self.aggregate.total or self.aggregate.key == "second" or r.random() >= 0.3:
            return None
        options = DEFAULTS[self.aggregate.out]
        return pick(r, [*options, "raise"] if r.random() < 0.5 else options)

    def out_type(self) -> str:
        """Type of the elements that are aggregated."""
        return self.map.out if self.map else self.source.element

    @property
    def key(self) -> str:
        operations = "+".join(o.key for o in self.operations)
        middle = [part.key if part else "-" for part in (self.filter, self.map)]
        return "|".join([self.source.key, *middle, operations or "-", self.aggregate.key])

    def size_before_aggregate(self) -> int:
        return bool(self.filter) + bool(self.map) + len(self.operations)

    def size(self) -> int:
        """How many parts are composed."""
        return self.size_before_aggregate() + (self.aggregate.key != "list")

    def params(self) -> list[Param]:
        parts = [part for part in (self.filter, self.map) if part] + self.operations
        return self.source.params + [param for part in parts for param in part.params]

    def valid(self) -> bool:
        names = [p[0].lstrip("*") for p in self.params()]
        if self.source.key == "args" and len(names) > 1:
            return False
        inner = re.split(r"\W+", self.source.inner[0]) if self.source.inner else []
        free = self.source.variable not in names and not set(inner) & set(names)
        return len(set(names)) == len(names) and free

    def inputs(self, r: Random) -> tuple[Any, ...]:
        near = [v for part in (self.filter, self.map) if part for v in part.near]
        if self.source.key == "args":
            return tuple(ints(r, near))
        return tuple(p[2](r, near) for p in self.params())

    def reference(self, *args: Any) -> Any:
        """The parts' meanings, one after the other."""
        if self.source.key == "args":
            found, rest = list(args), ()
        else:
            n = len(self.source.params)
            found, rest = self.source.meaning(*args[:n]), args[n:]
        if self.filter:
            n = len(self.filter.params)
            found, rest = [x for x in found if self.filter.test(x, rest[:n])], rest[n:]
        if self.map:
            n = len(self.map.params)
            if self.map.defined and not all(map(self.map.defined, found)):
                raise Undefined
            found, rest = [self.map.meaning(x, *rest[:n]) for x in found], rest[n:]
        for o in self.operations:
            n = len(o.params)
            if o.defined and not o.defined(found):
                raise Undefined
            found, rest = o.meaning(found, *rest[:n]), rest[n:]
        if found or self.default is None:
            return self.aggregate.meaning(found)
        if self.default == "raise":
            raise Undefined
        return ast.literal_eval(self.default)

    def returns(self) -> str:
        element = ELEMENT[self.out_type()]
        last = self.operations[-1].key if self.operations else ""
        if last in ("pairs", "enum"):
            return "list[tuple]"
        if last == "chunk":
            return f"list[list[{element}]]"
        out = self.aggregate.out
        made = {"list": f"list[{element}]", "set": f"set[{element}]", "x": element}
        made |= {"tuple": f"tuple[{element}, ...]", "dict": f"dict[{element}, int]"}
        return made.get(out, out)

    def name(self, r: Random) -> str:
        if r.random() < 0.1:
            return pick(r, GENERIC)
        operation = self.operations[-1].name if self.operations else ""
        words = [self.aggregate.name, operation, self.map.name if self.map else ""]
        words.append(self._filter_name())
        words.append(self.source.name or pick(r, ["", "", self.source.noun[1].split()[-1]]))
        words = [re.sub(r"\W", "_", word) for word in words if word]
        if r.random() < 0.35 and len(words) > 2:
            words = [words[0], pick(r, words[1:])]
        if (self.aggregate.key == "list" or not words) and r.random() < 0.6:
            verbs = ["get", "filter", "find", "list", "collect", "select"]
            words.insert(0, pick(r, ["get", "map", "make", "compute"] if self.map else verbs))
        name = "_".join("_".join(words).split("_")[:5]).lower().strip("_")
        if r.random() < 0.06:
            name = re.sub(r"_(\w)", lambda m: m.group(1).upper(), name)
        name = name if name and not name[0].isdigit() else "get_" + name
        taken = TAKEN + [p[0].lstrip("*") for p in self.params()]
        return name + "_values" if name in taken else name

    def _filter_name(self) -> str:
        if not self.filter:
            return ""
        names = [p.name for p in self.filter.predicates]
        if self.filter.mode == "not":
            return "not_" + names[0]
        return ("_or_" if self.filter.mode == "or" else "_").join(names)

    def sentence(self, r: Random) -> str:
        return wording.sentence(self, r)

    def request_forms(self, r: Random, named: bool) -> tuple[str, str, str]:
        return wording.request_forms(self, r, named)

    def explain(self, r: Random) -> str:
        return wording.explain(self, r)

    def body(self, r: Random) -> tuple[list[str], set[str], str | None]:
        return rendering.body(self, r)
