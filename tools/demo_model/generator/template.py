"""A task with fixed wordings and programs, of which one is drawn each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from .draw import pick
from .grammar import capital, third
from .parts import Param
from .task import GENERIC


class Template:
    """See `task.Task`. The wordings are imperative phrases, the programs bodies of a function."""

    default = None

    def __init__(
        self,
        family: str,
        key: str,
        params: list[Param],
        wordings: list[str],
        programs: list[str],
        names: list[str],
        meaning: Callable[..., Any],
        returns: str = "",
        near: Sequence[Any] = (),
        kind: str | None = None,
    ) -> None:
        self.family, self.key, self.kind = family, f"{family}|{key}", kind
        self.reference = meaning
        self._params, self._returns, self._near = params, returns, list(near)
        self._wordings, self._programs, self._names = wordings, programs, names

    def valid(self) -> bool:
        names = [p[0] for p in self._params]
        return len(set(names)) == len(names)

    def params(self) -> list[Param]:
        return self._params

    def inputs(self, r: Random) -> tuple[Any, ...]:
        return tuple(p[2](r, self._near) for p in self._params)

    def returns(self) -> str:
        return self._returns

    def name(self, r: Random) -> str:
        name = pick(r, GENERIC) if r.random() < 0.06 else pick(r, self._names)
        name = re.sub(r"\W", "_", name).lower()
        return name + "_values" if name in [p[0] for p in self._params] else name

    def sentence(self, r: Random) -> str:
        return capital(pick(r, self._wordings)) + "."

    def request_forms(self, r: Random, named: bool) -> tuple[str, str, str]:
        said = pick(r, self._wordings)
        return said, third(said), ""

    def explain(self, r: Random) -> str:
        subject = pick(r, ["It", "The function", "This function"])
        return f"{subject} {third(pick(r, self._wordings))}."

    def body(self, r: Random) -> tuple[list[str], set[str], str | None]:
        lines = pick(r, self._programs).split("\n")
        imports = set()
        while lines[0].startswith(("import ", "from ")):
            imports.add(lines.pop(0))
        return lines, imports, None
