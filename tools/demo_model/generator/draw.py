"""Draws: one of a list, and the numbers, words, sentences and matrices that programs are run on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

WORDS = """apple banana cherry date level radar hello world python code civic noon kayak tree house
river mountain ocean sun
moon star cat dog bird fish lion tiger bear wolf fox red green blue yellow orange purple black white
small large quick slow
happy sad bright dark run jump swim fly walk sing dance read write play running jumping reading
walked played nested eel
Alice Bob Carol Dave Eve Frank Grace Anna Otto Ivan Paris London Berlin Rome Tokyo Madrid Oslo Lima
stats wow mom dad pop
table chair window door floor wall roof garden street city town village north south east west winter
summer spring autumn
a I be to it of an ox up go no yes maybe never always letter mess book food moon cool Zoo NASA USA
OK abc xyz a1 b2 c3d 42 7
100 x9 room101 data science model train test value key item list queue stack array string number
letter banana apple eye""".split()
NAMES = """Alice Bob Carol Dave Eve Frank Grace Heidi Ivan Judy Mallory Anna Otto Zoe""".split()

# Key, plural, names of the list, what an entry is.
RECORDS = [
    ("age", "ages", ["people", "users", "persons"], "person"),
    ("price", "prices", ["products", "items"], "product"),
    ("score", "scores", ["students", "players", "results"], "student"),
    ("quantity", "quantities", ["items", "orders", "stock"], "item"),
    ("salary", "salaries", ["employees", "workers"], "employee"),
    ("year", "years", ["books", "movies"], "book"),
    ("points", "points", ["teams", "players"], "team"),
]


def pick(r: Random, options: Sequence[T]) -> T:
    return options[int(r.random() * len(options))]


def constant(r: Random) -> int:
    """A number to compare with."""
    return pick(r, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 50, 100, r.randrange(1, 100)])


def quoted(r: Random, text: str) -> str:
    return f'"{text}"' if r.random() < 0.85 else f"'{text}'"


def ints(
    r: Random,
    near: Sequence[Any] = (),
    n: int | None = None,
    lo: int | None = None,
    hi: int | None = None,
) -> list[int]:
    """Integers, some of them from `near`: the values at which a predicate changes."""
    n = pick(r, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) if n is None else n
    lo = pick(r, [-20, -9, 0, 1]) if lo is None else lo
    hi = pick(r, [9, 30, 120]) if hi is None else hi
    out = [pick(r, near) if near and r.random() < 0.3 else r.randint(lo, hi) for _ in range(n)]
    if out and r.random() < 0.4:
        out[r.randrange(n)] = pick(r, out)
    return out


def strs(r: Random, near: Sequence[Any] = (), n: int | None = None) -> list[str]:
    """Words, some of them from `near`, seldom an empty one."""
    n = pick(r, [0, 1, 2, 3, 4, 5, 6, 7]) if n is None else n
    out = [pick(r, near) if near and r.random() < 0.3 else pick(r, WORDS) for _ in range(n)]
    if out and r.random() < 0.4:
        out[r.randrange(n)] = pick(r, out)
    if out and r.random() < 0.07:
        out[r.randrange(n)] = ""
    return out


def sentence(r: Random, near: Sequence[Any] = ()) -> str:
    text = " ".join(w for w in strs(r, near, pick(r, [0, 1, 2, 3, 4, 5, 6])) if w)
    return text + pick(r, ["", "", "", "!", ".", "?"]) if r.random() < 0.3 else text


def matrix(r: Random, near: Sequence[Any] = (), square: bool = False) -> list[list[int]]:
    n = r.randint(1, 4)
    m = n if square else r.randint(1, 4)
    return [ints(r, near, m) for _ in range(n)]
