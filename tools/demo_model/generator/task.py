"""What a task is: parameters, a reference, wordings and programs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from .parts import Param

# Names that say nothing about a function.
GENERIC = """solve f process compute func my_function transform get_result calculate run helper foo
answer""".split()

# What a task's function is, besides a plain one: it yields, decorates, or returns a function.
GENERATOR, DECORATOR, CLOSURE = "generator", "decorator", "closure"


class Task(Protocol):
    """Something that a function can be written for."""

    @property
    def family(self) -> str: ...

    @property
    def key(self) -> str:
        """The composition. A share of the compositions is held out of training."""
        ...

    @property
    def kind(self) -> str | None:
        """None, GENERATOR, DECORATOR or CLOSURE."""
        ...

    @property
    def default(self) -> str | None:
        """What the function does where there is no element; None where nothing is said."""
        ...

    def valid(self) -> bool:
        """Whether its names go together."""
        ...

    def params(self) -> list[Param]: ...

    def inputs(self, r: Random) -> tuple[Any, ...]:
        """Arguments to run a program with."""
        ...

    @property
    def reference(self) -> Callable[..., Any]:
        """What the function has to return, by its arguments."""
        ...

    def returns(self) -> str:
        """The annotation of the result, or ""."""
        ...

    def name(self, r: Random) -> str: ...

    def sentence(self, r: Random) -> str:
        """What it does, for a docstring."""
        ...

    def request_forms(self, r: Random, named: bool) -> tuple[str, str, str]:
        """'return ...', 'returns ...', and what is said behind it; `named` with parameter names."""
        ...

    def explain(self, r: Random) -> str: ...

    def body(self, r: Random) -> tuple[list[str], set[str], str | None]:
        """Lines of the function's body, imports, and a helper function."""
        ...
