"""A composed task as code: as one expression, with a named list, or as a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from .draw import pick
from .grammar import bracketed, insert

if TYPE_CHECKING:
    from .pipeline import Pipeline

RESULTS = ["result", "result", "output", "res", "mapped", "new"]
SELECTED = """result result result selected filtered output out res picked""".split()
# Names of what a loop accumulates, by aggregate.
ACCUMULATORS = {
    "sum": ["total", "result", "s", "total_sum"],
    "count": ["count", "total", "counter", "n_found"],
    "product": ["product", "result", "p"],
    "list": ["result", "result", "output", "res", "out"],
    "max": ["largest", "best", "maximum"],
    "min": ["smallest", "best", "minimum"],
    "counter": ["counts", "freq", "result"],
    "longest": ["longest", "best"],
    "concat": ["result", "out", "joined"],
}
# Built-in functions that take `default=`.
BUILT_IN = {
    "max": "max",
    "min": "min",
    "longest": "max",
    "shortest": "min",
    "alphafirst": "min",
    "alphalast": "max",
}


def indented(text: str, by: int) -> list[str]:
    return [" " * by + line for line in text.split("\n")]


class Body:
    """The lines of a function while they are written."""

    def __init__(self, task: Pipeline, r: Random) -> None:
        self.task, self.r = task, r
        self.lines: list[str] = []
        self.imports: set[str] = set()
        self.names = {p[0].lstrip("*") for p in task.params()} | {task.source.variable}
        self._iterate()
        self._comprehend()
        aggregate = task.aggregate
        self.loop = r.random() < 0.38 and not self.plain
        if self.plain:
            short = r.random() < 0.2
            self.loop = short and aggregate.loop is not None and not task.operations
        both = task.filter and task.map and not self.inner
        self.two_steps = bool(both) and r.random() < 0.15
        # The expression of the list as it is so far, and the variable that holds it, if any.
        self.value, self.held = self.base, ""

    # What is iterated.

    def _iterate(self) -> None:
        """`iterable`, `variable` and `element`: `for variable in iterable`, with its element."""
        task, r = self.task, self.r
        source = task.source
        self.variable = self.element = source.variable
        self.iterable, self.inner = source.iterable, source.inner
        if source.inner:
            uses = task.filter.code("{x}").count("{x}") if task.filter else 0
            uses += task.map.code.count("{x}") if task.map else 1
            variable, element = source.inner
            if uses <= 2 and r.random() < 0.65:
                self.variable, self.element = variable, element
                return
            made = f"[{element} for {variable} in {source.iterable}]"
            self._name_iterable(made, ["values", "items", "parsed"], "numbers")
            self.inner = None
        elif source.iterable.startswith("[") and r.random() < 0.5:
            last = "flat" if source.key == "flatten" else "items"
            self._name_iterable(source.iterable, ["values", last], "numbers")

    def _name_iterable(self, code: str, names: list[str], first: str) -> None:
        name = self._fresh([self.task.source.name or first, *names])
        self.names.add(name)
        self.lines.append(f"{name} = {code}")
        self.iterable = name

    def _comprehend(self) -> None:
        """`base`: the mapped and filtered elements as a list."""
        task, r = self.task, self.r
        self.mapped = insert(task.map.code, self.element) if task.map else self.element
        self.condition = task.filter.code(self.element) if task.filter else ""
        self.plain = not task.map and not task.filter and not self.inner
        self.where = f" if {self.condition}" if self.condition else ""
        self.generator = f"{self.mapped} for {self.variable} in {self.iterable}{self.where}"
        self.result = self._fresh(SELECTED if task.filter else RESULTS)
        self.names.add(self.result)
        if self.plain:
            self.base = self.iterable if task.source.is_list else f"list({self.iterable})"
            return
        self.base = f"[{self.generator}]"
        over = f"(lambda {self.variable}: {{}}, {self.iterable})"
        if task.map and self.condition:
            if r.random() < 0.07 and not self.inner:
                kept = "filter" + over.format(self.condition)
                self.base = f"[{self.mapped} for {self.variable} in {kept}]"
        elif not self.inner and r.random() < 0.1:
            code = self.mapped if task.map else self.condition
            self.base = f"list({'map' if task.map else 'filter'}{over.format(code)})"

    def _fresh(self, options: Sequence[str]) -> str:
        """One of the names that is not in use."""
        drawn = [pick(self.r, options), *options]
        return next((name for name in drawn if name not in self.names), "result_list")

    def _value_name(self) -> str:
        return "item" if "value" in self.names else "value"

    # The list in a variable.

    def _hold(self, code: str) -> str:
        """Let a variable hold `code`, and give its name."""
        if not self.held:
            if self.loop and code == self.base and not self.plain and code.startswith("["):
                self._append_in_loop()
            elif self.two_steps and code == self.base:
                kept = self._fresh(["kept", "selected", "matching", "chosen"])
                self.names.add(kept)
                x = self.variable
                self.lines.append(f"{kept} = [{x} for {x} in {self.iterable}{self.where}]")
                self.lines.append(f"{self.result} = [{self.mapped} for {x} in {kept}]")
            else:
                self.lines.append(f"{self.result} = {code}")
            self.held = self.result
        elif code != self.held:
            self.lines.append(f"{self.held} = {code}")
        return self.held

    def _append_in_loop(self) -> None:
        self.lines += [f"{self.result} = []", f"for {self.variable} in {self.iterable}:"]
        append = f"{self.result}.append({self.mapped})"
        if self.condition:
            self.lines += [f"    if {self.condition}:", "        " + append]
        else:
            self.lines.append("    " + append)

    def _short(self) -> str:
        """The list as something that can be written several times."""
        if not re.fullmatch(r"\w+", self.value):
            self.value = self._hold(self.value)
        return self.value

    # The parts, in order.

    def write(self) -> list[str]:
        if self._accumulates():
            self._accumulate()
            return self.lines
        for operation in self.task.operations:
            if operation.key == "running":
                self._running()
            else:
                self._operate(operation.code, operation is self.task.operations[-1])
        if self.task.default is None or not self._defaults(self.task.default):
            finish = getattr(self, f"_finish_{self.task.aggregate.key}", self._finish)
            finish()
        return self.lines

    def _accumulates(self) -> bool:
        """Whether the aggregate is computed in the loop over the elements."""
        aggregate = self.task.aggregate
        if self.task.operations or self.task.default is not None:
            return False
        if not self.loop or not aggregate.loop:
            return False
        compound = "(" in self.mapped or " " in self.mapped
        if aggregate.key in ("max", "min") and compound:
            return False
        return not (aggregate.key == "longest" and "(" in self.mapped)

    def _accumulate(self) -> None:
        aggregate, condition = self.task.aggregate, self.condition
        assert aggregate.loop
        first, update = aggregate.loop
        name = self._fresh(ACCUMULATORS.get(aggregate.key, ["result", "total"]))
        self.lines += [f"{name} = {first}", f"for {self.variable} in {self.iterable}:"]
        update = update.replace("{acc}", name).replace("{m}", self.mapped)
        if condition and self.r.random() < 0.1 and self._is_divisibility():
            self.lines += [f"    if {condition[:-4]}!= 0:", "        continue"]
            condition = ""
        if condition:
            self.lines.append(f"    if {condition}:")
        self.lines += indented(update, 8 if condition else 4)
        self.lines.append(f"return {name}")

    def _is_divisibility(self) -> bool:
        """Whether the elements that are not divisible by a number are left out of a sum or so."""
        assert self.task.filter
        divisible = re.fullmatch(r".+ % \d+ == 0", self.condition) is not None
        return self.task.aggregate.key != "count" and self.task.filter.mode == "" and divisible

    def _running(self) -> None:
        if self.r.random() < 0.3:
            self.imports.add("from itertools import accumulate")
            self.value = f"list(accumulate({self.held or self.value}))"
            if self.held:
                self.lines.append(f"{self.held} = {self.value}")
                self.value = self.held
            return
        totals = self._fresh(["totals", "running", "sums"])
        total = self._fresh(["total", "current", "acc"])
        self.names |= {totals, total}
        value = self._value_name()
        self.lines += [f"{totals} = []", f"{total} = 0"]
        self.lines += [f"for {value} in {self.held or self.value}:"]
        self.lines += [f"    {total} += {value}", f"    {totals}.append({total})"]
        self.held = self.value = totals

    def _operate(self, code: str, is_last: bool) -> None:
        if not self.held:
            often = code.count("{L}") > 1 or self.loop or self.two_steps
            changed = self.value != self.base or len(self.task.operations) > 1
            if often or self.r.random() < 0.5 or changed:
                self.value = self._hold(self.value)
        inside = code.startswith(("sorted({L}", "list(")) or self.value.startswith("[")
        value = self.value if inside else bracketed(self.value)
        self.value = code.replace("{L}", self.held or value)
        if self.held and not (is_last and self.r.random() < 0.6):
            self.value = self._hold(self.value)

    def _defaults(self, default: str) -> bool:
        """Write what is returned for an empty list; whether nothing else is left to write."""
        task, source = self.task, self.task.source
        key = task.aggregate.key
        short = default != "raise" and key in BUILT_IN and self.r.random() < 0.5
        if short and not task.operations and not self.loop:
            by = ", key=len" if key in ("longest", "shortest") else ""
            values = self.iterable if self.plain else f"({self.generator})"
            self.lines.append(f"return {BUILT_IN[key]}({values}{by}, default={default})")
            return True
        parameter = self.plain and source.is_list and not task.operations
        if not self.held and parameter and re.fullmatch(r"\w+", self.iterable):
            self.held = self.value = self.iterable
        elif not self.held:
            self.lines.append(f"{self.result} = {self.value}")
            self.held = self.value = self.result
        elif self.value != self.held:
            self.lines.append(f"{self.held} = {self.value}")
            self.value = self.held
        self.lines.append(f"if not {self.held}:")
        if default == "raise":
            words = ["no matching values", "nothing found", "empty input"]
            words.append(f"no {source.noun[1]} found")
            self.lines.append(f'    raise ValueError("{pick(self.r, words)}")')
        else:
            self.lines.append(f"    return {default}")
        return False

    # The aggregate.

    @property
    def _direct(self) -> bool:
        """Whether the elements can be generated where they are aggregated."""
        return not self.held and not self.plain and not self.task.operations

    @property
    def _bare(self) -> bool:
        """Whether the iterable itself is aggregated."""
        return not self.held and self.plain and not self.task.operations

    def _finish_list(self) -> None:
        plain_value = not self.held and not self.task.operations
        if plain_value and (self.loop or self.two_steps or self.r.random() < 0.12):
            self.value = self._hold(self.value)
        self.lines.append(f"return {self.value}")

    def _finish_count(self) -> None:
        if not (self._direct and self.task.filter) or (self.task.map and self.r.random() < 0.3):
            self.lines.append(f"return len({self.value})")
            return
        loop = f"for {self.variable} in {self.iterable}{self.where}"
        listed = 1 if "," in self.variable else self.variable
        counted = [f"sum(1 {loop})"] * 3 + [f"len([{listed} {loop}])"]
        self.lines.append("return " + pick(self.r, counted))

    def _finish_product(self) -> None:
        if self.task.aggregate.code != "LOOP" and self.r.random() >= 0.5:
            self._finish()
            return
        name, value = self._fresh(["product", "result2", "prod"]), self._value_name()
        self.lines += [f"{name} = 1", f"for {value} in {self.value}:"]
        self.lines += [f"    {name} *= {value}", f"return {name}"]

    def _finish_first(self) -> None:
        if not self._direct or self.r.random() >= 0.6:
            value = self.value if self.value.startswith("[") else bracketed(self.value)
            self.lines.append(f"return {value}[0]")
        elif self.r.random() < 0.5:
            self.lines.append(f"return next({self.generator})")
        else:
            self.lines.append(f"for {self.variable} in {self.iterable}:")
            if self.condition:
                self.lines.append(f"    if {self.condition}:")
            self.lines += indented(f"return {self.mapped}", 8 if self.condition else 4)

    def _finish_counter(self) -> None:
        if self.r.random() < 0.4:
            self.imports.add("from collections import Counter")
            counted = self.generator if self._direct else self.value
            self.lines.append(f"return dict(Counter({counted}))")
            return
        name = self._fresh(["counts", "freq", "frequency", "counter"])
        own = not self.held and self.plain
        value = self.task.source.variable if own else self._value_name()
        self.lines.append(f"{name} = {{}}")
        self.lines.append(f"for {value} in {self.iterable if self._bare else self.value}:")
        self.lines.append(f"    {name}[{value}] = {name}.get({value}, 0) + 1")
        self.lines.append(f"return {name}")

    def _finish_mostcommon(self) -> None:
        values = self._short()
        if self.r.random() < 0.5:
            self.imports.add("from collections import Counter")
            self.lines.append(f"return Counter({values}).most_common(1)[0][0]")
        else:
            self.lines.append(f"return max({values}, key={values}.count)")

    def _finish_alt(self) -> None:
        i, v = ("a", "b") if self.names & {"v", "i"} else ("i", "v")
        signed = f"{v} if {i} % 2 == 0 else -{v}"
        self.lines.append(f"return sum({signed} for {i}, {v} in enumerate({self.value}))")

    def _finish_exists(self) -> None:
        if self._direct and self.condition:
            loop = f"for {self.variable} in {self.iterable}"
            self.lines.append(f"return any({self.condition} {loop})")
        else:
            self.lines.append(f"return len({self.value}) > 0")

    def _finish(self) -> None:
        """Any other aggregate: its code, over the list or over a generator."""
        code = self.task.aggregate.code
        self.imports |= {f"import {m}" for m in ("math", "statistics") if f"{m}." in code}
        if code.count("{L}") > 1:
            values = self._short()
        elif self._direct and self.task.aggregate.lazy and re.match(r'[\w.]*\(\{L\}|"', code):
            values = self.generator if code.endswith("({L})") else f"({self.generator})"
            if code.startswith('"') and self.r.random() < 0.4:
                values = f"[{self.generator}]"
        else:
            values = self.iterable if self._bare else self.value
            if code.startswith("{L}"):
                if not self.task.source.is_list and values == self.iterable:
                    values = f"list({values})"
                values = values if values.startswith("[") else bracketed(values)
        self.lines.append("return " + code.replace("{L}", values))


def body(task: Pipeline, r: Random) -> tuple[list[str], set[str], str | None]:
    """Lines, imports and a helper function: see `task.Task`."""
    writer = Body(task, r)
    lines = writer.write()
    return lines, writer.imports, task.filter.helper if task.filter else None
