"""Tasks of other shapes than a pipeline: templates filled with filters and maps.

A family draws its parts and gives its wordings' and programs' places by its local names: see
`vocabulary/families.txt`, where each block is

    ## name -> annotation of the result | names for the function
    a wording a line
    ---  or  --- if expression
    a program
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from itertools import dropwhile, groupby, takewhile
from random import Random
from typing import Any

from .draw import NAMES, RECORDS, ints, matrix, pick, sentence, strs
from .filters import Filter, Undefined, plain_filter, random_filter
from .grammar import insert
from .parts import MAPS, PREDICATES, Param, Part, mapping
from .recipes import blocks, expression, fill
from .sources import Source, list_source, source
from .task import CLOSURE, DECORATOR, GENERATOR
from .template import Template

DICTS = ["d", "data", "mapping", "scores", "table", "counts", "prices", "inventory"]
PAIRS = [("a", "b"), ("xs", "ys"), ("list1", "list2"), ("first", "second"), ("left", "right")]
LABELS = """small medium large|low mid high|A B C|yes maybe no|red green blue|cold warm hot
first second other|bad ok good|x y z|fizz buzz none""".replace("\n", "|").split("|")
ELEMENT = {"I": "int", "S": "str"}
FORMS = {head.split(" ")[0]: (head, body) for head, body in blocks("families")}


def form(
    name: str,
    known: dict[str, Any],
    key: str,
    params: list[Param],
    meaning: Callable[..., Any],
    near: Sequence[Any] = (),
    kind: str | None = None,
    family: str = "",
) -> Template:
    """The task of the block `name`, its places filled with the names in `known`."""
    names = {"pick": pick, "insert": insert, "place": place, "of": of, **known}
    head, body = FORMS[name]
    returns, _, called = head.removeprefix(name).partition("|")
    said, *programs = body.split("\n---")
    wordings = [fill(line, names) for line in said.split("\n")]
    written = []
    for program in programs:
        condition, _, code = program.partition("\n")
        if not condition or eval(expression(condition.removeprefix(" if ")), names):
            written.append(fill(code, names))
    return Template(
        family or name,
        key,
        params,
        wordings,
        written,
        [fill(word, names) for word in called.split()],
        meaning,
        fill(returns.strip().removeprefix("-> "), names),
        near,
        kind,
    )


def listed(r: Random, t: str | None = None) -> tuple[Source, str, str, str, Filter]:
    """A list and a filter: source, element type, names of an element and of the list, filter."""
    t = t or ("I" if r.random() < 0.6 else "S")
    s = list_source(r, t)
    return s, t, s.variable, s.iterable, plain_filter(r, t)


def place(r: Random, s: Source) -> str:
    return pick(r, s.named_places if r.random() < 0.7 else s.places)


def of(phrase: str, many: str, each: str) -> str:
    """A map's verb, said of `many` or of `each`, whichever it takes."""
    return phrase.replace("{them}", many).replace("{each}", each)


def single(t: str) -> Callable[[Random, Any], Any]:
    """Draws one element of type `t`."""
    draw = {"I": ints, "S": strs}[t]
    return lambda r, near: draw(r, near, 1)[0]


def partition(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c, plural = f.code(x), f.plural(r)
    one, many = s.noun
    options = [("yes", "no"), ("matching", "others"), ("first", "second"), ("a", "b")]
    a, b = pick(r, [*options, ("left", "right")])
    do = "are" if plural.startswith("are") else "do"

    def meaning(values: list[Any]) -> tuple[list[Any], list[Any]]:
        return [v for v in values if f.test(v)], [v for v in values if not f.test(v)]

    return form("partition", locals(), t + f.key, s.params, meaning, f.near)


def take(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c, plural = f.code(x), f.plural(r)
    many = s.noun[1]
    if r.random() < 0.5:
        prefix = lambda values: list(takewhile(f.test, values))
        return form("takewhile", locals(), t + f.key, s.params, prefix, f.near)
    rest = lambda values: list(dropwhile(f.test, values))
    return form("dropwhile", locals(), t + f.key, s.params, rest, f.near)


def index(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c, phrase = f.code(x), f.singular()
    one, many = s.noun
    i = pick(r, ["i", "idx", "index"]) if x != "i" else "k"
    at = f.code(f"{xs}[{i}]")
    key = t + f.key

    def found(values: list[Any]) -> list[int]:
        return [j for j, v in enumerate(values) if f.test(v)]

    def first(values: list[Any], default: Any = None) -> Any:
        return next((v for v in values if f.test(v)), default)

    k = r.random()
    if k < 0.35:
        d = pick(r, ["-1", "-1", "None"])

        def first_index(values: list[Any]) -> Any:
            return next((j for j, v in enumerate(values) if f.test(v)), ast.literal_eval(d))

        name = "firstindex" + d
        return form("firstindex", locals(), key, s.params, first_index, f.near, family=name)
    if k < 0.65:
        return form("allindices", locals(), key, s.params, found, f.near)
    if k < 0.8:
        last = lambda values: first(values[::-1])
        return form("lastmatch", locals(), key, s.params, last, f.near)
    return form("firstmatch", locals(), key, s.params, first, f.near)


def longest_run(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c, plural = f.code(x), f.plural(r)
    many = s.noun[1]
    options = [("current", "best"), ("count", "longest"), ("run", "best"), ("current", "longest")]
    run, best = pick(r, options)

    def meaning(values: list[Any]) -> int:
        runs = [len(list(group)) for taken, group in groupby(values, f.test) if taken]
        return max(runs, default=0)

    return form("longestrun", locals(), t + f.key, s.params, meaning, f.near)


def all_any(r: Random) -> Template:
    if r.random() < 0.7:
        s, t, x, xs, f = listed(r)
    else:
        s = source(r, "chars")
        t, x, xs, f = "C", s.variable, s.iterable, plain_filter(r, "C")
    c, plural, phrase = f.code(x), f.plural(r), f.singular()
    one, many = s.noun
    k = r.random()
    name = "all" if k < 0.45 else "any" if k < 0.85 else "none"
    meaning = {
        "all": lambda values: all(f.test(v) for v in values),
        "any": lambda values: any(f.test(v) for v in values),
        "none": lambda values: not any(f.test(v) for v in values),
    }[name]
    return form(name, locals(), t + f.key, s.params, meaning, f.near)


def replace(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c, phrase = f.code(x), f.singular()
    m = mapping(r, t, False, out=t)
    mapped = insert(m.code, x)
    one, many = s.noun
    k = r.random()
    verb = pick(r, m.verbs)
    if k < 0.4:
        codes = ["0", "1", "-1", "None", "10"] if t == "I" else ['""', '"x"', "None", '"?"']
        code = pick(r, codes)
        value = ast.literal_eval(code)
        said = "an empty string" if value == "" else code
        constant = lambda values: [value if f.test(v) else v for v in values]
        return form("replace", locals(), t + f.key + code, s.params, constant, f.near)
    if k < 0.75:
        some = lambda values: [m.meaning(v) if f.test(v) else v for v in values]
        return form("mapif", locals(), t + f.key + m.key, s.params, some, f.near)
    m2 = mapping(r, t, False, out=t)
    mapped2 = insert(m2.code, x)
    others = of(pick(r, m2.verbs), "all others", "each other one")

    def both(values: list[Any]) -> list[Any]:
        return [m.meaning(v) if f.test(v) else m2.meaning(v) for v in values]

    return form("mapifelse", locals(), t + f.key + m.key + m2.key, s.params, both, f.near)


def check(r: Random) -> Template:
    """One value: predicate, classification, validation, conditional result."""
    t = "I" if r.random() < 0.65 else "S"
    names = {"I": "n x number num value n", "S": "s word text string name"}
    p = pick(r, names[t].split())
    params = [(p, ELEMENT[t], single(t))]
    f = plain_filter(r, t)
    c, phrase = f.code(p), f.singular()
    k = r.random()
    if k < 0.35:
        truth = f"bool({c})" if c.endswith("% 2") or c == p else c
        return form("check", locals(), t + f.key, params, f.test, f.near)
    if k < 0.75:
        return label(r, t, p, params, f)
    m, m2 = mapping(r, t, False), mapping(r, t, False)
    mapped, mapped2 = insert(m.code, p), insert(m2.code, p)
    if k < 0.9 and m.out == m2.out and m.key != m2.key:
        returns = ELEMENT[m.out]
        either = lambda v: m.meaning(v) if f.test(v) else m2.meaning(v)
        return form("condmap", locals(), t + f.key + m.key + m2.key, params, either, f.near)
    d = pick(r, ["None", "0", "-1"] if t == "I" else ["None", '""'])
    said = "an empty string" if d == '""' else d
    if r.random() < 0.5:
        msg = pick(r, ["invalid value", "bad input", f"{p} is not valid", f"invalid {p}"])
        returns = ELEMENT[m.out]

        def validated(v: Any) -> Any:
            if f.test(v):
                raise Undefined
            return m.meaning(v)

        return form("validate", locals(), t + f.key + m.key, params, validated, f.near)
    guarded = lambda v: m.meaning(v) if f.test(v) else ast.literal_eval(d)
    return form("guard", locals(), t + f.key + m.key, params, guarded, f.near)


def label(r: Random, t: str, p: str, params: list[Param], f: Filter) -> Template:
    """One of two or three strings by the value of `p`."""
    c, phrase = f.code(p), f.singular()
    labels = pick(r, LABELS).split()
    r.shuffle(labels)
    a, b, d = labels
    while (g := plain_filter(r, t)).key == f.key:
        pass
    c2, phrase2 = g.code(p), g.singular()
    if r.random() < 0.45:
        two = lambda v: a if f.test(v) else b
        return form("label2", locals(), t + f.key, params, two, f.near)
    three = lambda v: a if f.test(v) else b if g.test(v) else d
    return form("label3", locals(), t + f.key + g.key, params, three, f.near + g.near)


def dictionary(r: Random) -> Template:
    """A dictionary from strings to integers; a filter on its values or its keys."""
    p = pick(r, DICTS)

    def drawn(r: Random, near: list[Any]) -> dict[str, int]:
        keys = strs(r, [n for n in near if isinstance(n, str)], pick(r, [0, 1, 2, 4, 6]))
        numbers = near if near and isinstance(near[0], int) else []
        return {
            k: pick(r, numbers) if numbers and r.random() < 0.3 else r.randint(-9, 40)
            for k in dict.fromkeys(keys)
        }

    params = [(p, "dict[str, int]", drawn)]
    key, value = pick(r, [("k", "v"), ("key", "value"), ("k", "v"), ("name", "value")])
    t = "I" if r.random() < 0.6 else "S"
    side = "value" if t == "I" else "key"
    f = plain_filter(r, t)
    if p in (key, value):
        key, value = "k", "v"
    tested, other = (value, key) if t == "I" else (key, value)
    c, phrase, plural = f.code(tested), f.singular(), f.plural(r)
    said = pick(r, [p, p, "a dictionary", "the dictionary", f"the dictionary {p}"])
    k = r.random()

    def kept(d: dict[str, int]) -> dict[str, int]:
        return {a: b for a, b in d.items() if f.test(b if t == "I" else a)}

    known = locals()
    if k < 0.25:
        return form("dictfilter", known, t + f.key, params, kept, f.near)
    if k < 0.4:
        known["others"] = "keys" if t == "I" else "values"
        picked = lambda d: list(kept(d) if t == "I" else kept(d).values())
        return form("dictpick", known, t + f.key, params, picked, f.near)
    if k < 0.52:
        total = lambda d: sum(kept(d).values())
        return form("dictsum", known, t + f.key, params, total, f.near)
    if k < 0.75:
        return mapped_dictionary(r, known)
    return from_list(r, grouped=k < 0.85)


def mapped_dictionary(r: Random, known: dict[str, Any]) -> Template:
    """A dictionary with its values or keys mapped, all or those that a filter takes."""
    t, f, side, c = (known[name] for name in ("t", "f", "side", "c"))
    m = mapping(r, t, False)
    some = r.random() < 0.4
    if t == "S" and m.out != "S":
        m = mapping(r, "S", False, out="S")
    mapped = insert(m.code, known["tested"])
    new_key, new_value = (known["key"], mapped) if t == "I" else (mapped, known["value"])
    where = f" if {c}" if some else ""
    only = f", only for items whose {side} {known['phrase']}" if some else ""
    verb = pick(r, m.verbs)

    def meaning(d: dict[str, int]) -> dict[str, Any]:
        if t == "I":
            return {a: m.meaning(b) for a, b in d.items() if not some or f.test(b)}
        return {m.meaning(a): b for a, b in d.items() if not some or f.test(a)}

    composition = t + (f.key if some else "") + m.key
    return form("dictmap", {**known, **locals()}, composition, known["params"], meaning, f.near)


def from_list(r: Random, grouped: bool) -> Template:
    """A dictionary made from a list."""
    t = "S"
    if grouped:
        m = mapping(r, t, False)
        s = list_source(r, "S")
    else:
        t = pick(r, "IS")
        s = list_source(r, t)
        m = mapping(r, t, False)
    x, xs = s.variable, s.iterable
    one, many = s.noun
    mapped = insert(m.code, x)
    groups = lambda values: grouped_by(values, m)
    if grouped:
        return form("groupby", locals(), m.key, s.params, groups)
    some = r.random() < 0.4
    g = plain_filter(r, t)
    where = f" if {g.code(x)}" if some else ""
    those = f" that {g.plural(r)}" if some else ""
    if r.random() < 0.65:
        made = lambda values: {v: m.meaning(v) for v in values if not some or g.test(v)}
        key = t + m.key + (g.key if some else "")
        return form("todict", locals(), key, s.params, made, g.near if some else [])
    counts = lambda values: {a: len(b) for a, b in groups(values).items()}
    return form("countby", locals(), t + m.key, s.params, counts)


def grouped_by(values: list[Any], m: Part) -> dict[Any, list[Any]]:
    out: dict[Any, list[Any]] = {}
    for v in values:
        if m.defined and not m.defined(v):
            raise Undefined
        out.setdefault(m.meaning(v), []).append(v)
    return out


def rows(r: Random) -> Template:
    """A matrix: its numbers, rows and columns."""
    p = pick(r, ["matrix", "grid", "m", "rows", "table"])
    options = [("row", "x"), ("row", "value"), ("line", "v"), ("r", "x"), ("row", "n")]
    row, x = pick(r, options)
    params: list[Param] = [(p, "list[list[int]]", matrix)]
    f = plain_filter(r, "I")
    c, plural = f.code(x), f.plural(r)
    m = mapping(r, "I", False)
    mapped = insert(m.code, x)
    said = pick(r, [f"the matrix {p}", p, "a matrix", "a matrix given as a list of rows"])
    functions = [("sum", sum), ("largest", max), ("smallest", min), ("number of values", len)]
    what, function = pick(r, functions)
    call = function.__name__
    k = r.random()
    if k < 0.2:
        meaning = lambda a: [[m.meaning(v) for v in w] for w in a]
        return form("matmap", locals(), m.key, params, meaning)
    if k < 0.4:
        meaning = lambda a: [sum(map(f.test, w)) for w in a]
        return form("matrowcount", locals(), f.key, params, meaning, f.near)
    if k < 0.55:
        meaning = lambda a: [function(w) for w in a]
        return form("matrowagg", locals(), what, params, meaning)
    if k < 0.7:
        meaning = lambda a: [function(w) for w in zip(*a, strict=True)]
        return form("matcolagg", locals(), what, params, meaning)
    if k < 0.85:
        f = plain_filter(r, "I")
        meaning = lambda a: [w for w in a if f.test(function(w))]
        return form("matrowfilter", locals(), call + f.key, params, meaning, f.near)
    meaning = lambda a: [[v for v in w if f.test(v)] for w in a]
    return form("matrowkeep", locals(), f.key, params, meaning, f.near)


def two_lists(r: Random) -> Template:
    a, b = pick(r, PAIRS)
    numbers = lambda r, near: ints(r, near, hi=pick(r, [6, 12, 30]))
    params = [(a, "list[int]", numbers), (b, "list[int]", numbers)]
    u, v = pick(r, [("p", "q"), ("x", "y")]) if a != "xs" else ("p", "q")
    f = plain_filter(r, "I")
    c, plural = f.code("x"), f.plural(r)
    some = r.random() < 0.5
    test = f" and {f'({c})' if f.mode == 'or' else c}" if some else ""
    that = f" and that {plural}" if some else ""
    takes = lambda w: not some or f.test(w)
    key, near = (f.key, f.near) if some else ("", [])
    k = r.random()
    if k < 0.25:
        meaning = lambda p, q: [w for w in p if w in q and takes(w)]
        return form("intersect", locals(), key, params, meaning, near)
    if k < 0.5:
        meaning = lambda p, q: [w for w in p if w not in q and takes(w)]
        return form("differ", locals(), key, params, meaning, near)
    if k < 0.75:
        return compared(r, a, b, u, v, params)
    what, code, function = pick(r, binary(u, v))

    def meaning(p: list[int], q: list[int]) -> list[int]:
        return [w for i in p for j in q for w in [function(i, j)] if takes(w)]

    return form("pairs", locals(), key, params, meaning, near, family="pairs" + what)


def binary(u: str, v: str) -> list[tuple[str, str, Callable[[int, int], int]]]:
    """(what it is, code, meaning) of functions of two numbers."""
    return [
        ("sum", f"{u} + {v}", lambda p, q: p + q),
        ("product", f"{u} * {v}", lambda p, q: p * q),
        ("absolute difference", f"abs({u} - {v})", lambda p, q: abs(p - q)),
        ("larger value", f"max({u}, {v})", max),
        ("smaller value", f"min({u}, {v})", min),
    ]


def compared(r: Random, a: str, b: str, u: str, v: str, params: list[Param]) -> Template:
    """Positions at which two lists compare in some way."""
    options = [
        ("are equal", "==", lambda p, q: p == q),
        ("differ", "!=", lambda p, q: p != q),
        (f"have a larger number in {a}", ">", lambda p, q: p > q),
        (f"have a smaller number in {a}", "<", lambda p, q: p < q),
    ]
    relation, sign, holds = pick(r, options)
    found = lambda p, q: [i for i, pair in enumerate(zip(p, q, strict=False)) if holds(*pair)]
    if r.random() < 0.5:
        count = lambda p, q: len(found(p, q))
        return form("zipcount", locals(), "", params, count, family="zipcount" + sign)
    return form("zipidx", locals(), "", params, found, family="zipidx" + sign)


def mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def window(r: Random) -> Template:
    s = list_source(r, "I")
    xs = s.iterable
    k = r.randrange(2, 5)
    options = [("sum", sum), ("maximum", max), ("minimum", min), ("average", mean)]
    what, function = pick(r, options)
    call = function.__name__
    params = list(s.params)
    n = pick(r, ["k", "size", "n"]) if r.random() < 0.6 else ""
    if n and n not in (xs, s.variable):
        params.append((n, "int", lambda r, near: r.randrange(1, 5)))
    else:
        n = str(k)
    part = f"{xs}[i:i + {n}]"
    code = "sum({}) / " + n if call == "mean" else call + "({})"
    windows = f"for i in range(len({xs}) - {n} + 1)"
    name, verb = ("mean", "average") if call == "mean" else (call, call)

    def meaning(values: list[int], n: int = k) -> list[Any]:
        return [function(values[i : i + n]) for i in range(len(values) - n + 1)]

    if r.random() < 0.6:
        return form("window", locals(), what, params, meaning)
    which, best = pick(r, [("largest", max), ("smallest", min)])
    best_call = best.__name__
    extreme = lambda *args: best(meaning(*args))
    return form("bestwindow", locals(), what + which, params, extreme)


def pairs(r: Random) -> Template:
    """Pairs of places in one list."""
    s = list_source(r, "I")
    xs = s.iterable
    key = pick(r, ["sum", "diff", "sumdiv", "equal", "inv"])
    t = pick(r, ["target", "k", "total", "goal"])
    k = r.randrange(2, 6)
    params: list[Param] = [(xs, "list[int]", lambda r, near: ints(r, lo=0, hi=9))]
    if key in ("sum", "diff"):
        params.append((t, "int", lambda r, near: r.randrange(0, 15)))
    later = "where the earlier number is larger than the later one"
    a, b = f"{xs}[i]", f"{xs}[j]"
    options: dict[str, tuple[str, str, Callable[..., bool]]] = {
        "sum": (f"{a} + {b} == {t}", f"whose sum is {t}", lambda p, q, t: p + q == t),
        "diff": (
            f"abs({a} - {b}) == {t}",
            f"whose absolute difference is {t}",
            lambda p, q, t: abs(p - q) == t,
        ),
        "sumdiv": (
            f"({a} + {b}) % {k} == 0",
            f"whose sum is divisible by {k}",
            lambda p, q: (p + q) % k == 0,
        ),
        "equal": (f"{a} == {b}", "that are equal", lambda p, q: p == q),
        "inv": (f"{a} > {b}", later, lambda p, q: p > q),
    }
    condition, said, holds = options[key]

    def found(values: list[int], *args: int) -> list[tuple[int, int]]:
        n = len(values)
        all_pairs = [(values[i], values[j]) for i in range(n) for j in range(i + 1, n)]
        return [pair for pair in all_pairs if holds(*pair, *args)]

    w = r.random()
    if w < 0.4:
        return form("paircount", locals(), key, params, lambda *args: len(found(*args)))
    if w < 0.7:
        return form("pairlist", locals(), key, params, found)
    return form("pairany", locals(), key, params, lambda *args: bool(found(*args)))


def records(r: Random) -> Template:
    """A list of dictionaries with a name, a number and a group."""
    number, numbers, options, one = pick(r, RECORDS)
    p = pick(r, options)
    v = pick(r, ["r", "item", "rec", "row", "d"])
    groups = [("city", "Oslo Rome Lima"), ("team", "red blue"), ("category", "a b c")]
    group, values = pick(r, [*groups, ("department", "IT HR Sales")])

    def drawn(r: Random, near: list[Any]) -> list[dict[str, Any]]:
        names = [pick(r, NAMES) for _ in range(9)]
        return [
            {"name": name, number: x, group: pick(r, values.split())}
            for name, x in zip(names, ints(r, near, lo=1), strict=False)
        ]

    params = [(p, "list[dict]", drawn)]
    f = plain_filter(r, "I")
    entry = f'{v}["{number}"]'
    c, phrase = f.code(entry), f.singular()
    keys = f'(a list of dictionaries with the keys "name", "{number}" and "{group}")'
    said = pick(r, [f"{p} {keys}", p, f"the list of dictionaries {p}"])
    k = r.random()
    kept = lambda d: [x for x in d if f.test(x[number])]
    if k < 0.22:
        names = lambda d: [x["name"] for x in kept(d)]
        return form("recnames", locals(), f.key, params, names, f.near)
    if k < 0.4:
        return form("recfilter", locals(), f.key, params, kept, f.near)
    if k < 0.6:
        down = r.random() < 0.5
        only = r.random() < 0.5
        reverse = ", reverse=True" if down else ""
        ordered = f"sorted({p}, key=lambda {v}: {entry}{reverse})"

        def in_order(d: list[dict[str, Any]]) -> list[Any]:
            found = sorted(d, key=lambda x: x[number], reverse=down)
            return [x["name"] for x in found] if only else found

        return form("recsort", locals(), f"{down}{only}", params, in_order)
    if k < 0.8:
        sums = [(f"sum of the {numbers}", sum), (f"number of {one}s", len)]
        what, function = pick(r, [*sums, (f"largest {number}", max)])
        name = {sum: "total", len: "count", max: "max"}[function]

        def by_group(d: list[dict[str, Any]]) -> dict[str, int]:
            found: dict[str, list[int]] = {}
            for x in d:
                found.setdefault(x[group], []).append(x[number])
            return {a: function(b) for a, b in found.items()}

        return form("recgroup", locals(), what, params, by_group)
    big = r.random() < 0.5
    which = pick(r, ["highest", "largest"] if big else ["lowest", "smallest"])
    best = max if big else min
    name_of = lambda d: best(d, key=lambda x: x[number])["name"]
    return form("recbest", locals(), str(big), params, name_of)


def chars(r: Random) -> Template:
    """The characters of a string."""
    s = source(r, "chars")
    p, x = s.iterable, s.variable
    f = plain_filter(r, "C")
    c, plural = f.code(x), f.plural(r)
    said = f.elements(r, s.noun, pick(r, s.named_places))
    phrase = f.singular()
    k = r.random()
    if k < 0.25:
        removed = lambda text: "".join(v for v in text if not f.test(v))
        return form("charremove", locals(), f.key, s.params, removed, f.near)
    if k < 0.5:
        sign = pick(r, ["*", "_", "-", "#", "?", "x", "."])
        masked = lambda text: "".join(sign if f.test(v) else v for v in text)
        return form("charreplace", locals(), f.key, s.params, masked, f.near)
    if k < 0.7:
        while (m := mapping(r, "C")).out == "I":
            pass
        mapped = insert(m.code, x)
        some = lambda text: "".join(m.meaning(v) if f.test(v) else v for v in text)
        return form("charmapif", locals(), f.key + m.key, s.params, some, f.near)
    if k < 0.85:
        while (g := plain_filter(r, "C")).key == f.key:
            pass
        c2 = g.code(x)
        both = lambda text: (sum(map(f.test, text)), sum(map(g.test, text)))
        return form("charcount2", locals(), f.key + g.key, s.params, both, f.near + g.near)
    most = lambda text: 2 * sum(map(f.test, text)) > len(text)
    return form("charsplit", locals(), f.key, s.params, most, f.near)


def words(r: Random) -> Template:
    """Sentence in, sentence out."""
    p = pick(r, ["text", "sentence", "s", "phrase"])
    w = pick(r, ["w", "word"])
    params: list[Param] = [(p, "str", sentence)]
    f = plain_filter(r, "S")
    m = mapping(r, "S", False, out="S")
    mapped, c = insert(m.code, w), f.code(w)
    phrase = f.singular()
    k = r.random()
    verb = pick(r, m.verbs)
    if k < 0.4:
        each = lambda text: " ".join(map(m.meaning, text.split()))
        return form("wordmap", locals(), m.key, params, each)
    if k < 0.7:

        def some(text: str) -> str:
            return " ".join(m.meaning(v) if f.test(v) else v for v in text.split())

        return form("wordmapif", locals(), f.key + m.key, params, some, f.near)
    others = lambda text: " ".join(v for v in text.split() if not f.test(v))
    return form("wordfilter", locals(), f.key, params, others, f.near)


def generator(r: Random) -> Template:
    s, t, x, xs, f = listed(r)
    c = f.code(x)
    m = mapping(r, t, False) if r.random() < 0.4 else None
    mapped = insert(m.code, x) if m else x
    said = "the " + f.elements(r, s.noun, place(r, s))
    said = pick(r, m.phrases).replace("{X}", said) if m else said
    meaning = lambda values: mapped_where(values, f, m)
    key = t + f.key + (m.key if m else "")
    return form("generator", locals(), key, s.params, meaning, f.near, GENERATOR)


def mapped_where(values: list[Any], f: Filter, m: Part | None) -> list[Any]:
    return [m.meaning(v) if m else v for v in values if f.test(v)]


def recursive(r: Random) -> Template:
    s, t, x, xs, f = listed(r, "I")
    first = xs + "[0]"
    c = f.code(first)
    m = mapping(r, "I", False, out="I") if r.random() < 0.5 else None
    mapped = insert(m.code, first) if m else first
    k = r.random()
    taken = f.elements(r, s.noun, place(r, s))
    said = pick(r, m.phrases).replace("{X}", "the " + taken) if m else "the " + taken
    key = f.key + (m.key if m else "")
    how = pick(r, ["recursively", "using recursion", "with recursion"])
    meaning = lambda values: mapped_where(values, f, m)
    if k < 0.4:
        total = lambda values: sum(meaning(values))
        return form("recsum", locals(), key, s.params, total, f.near)
    if k < 0.7:
        count = lambda values: sum(map(f.test, values))
        return form("reccount", locals(), f.key, s.params, count, f.near)
    return form("recfilterlist", locals(), key, s.params, meaning, f.near)


def parse(r: Random) -> Template:
    """A string of pairs into a dictionary."""
    p = pick(r, ["text", "s", "line", "string"])
    signs = [(";", "semicolons"), (",", "commas"), ("&", "ampersands"), ("|", "vertical bars")]
    sign, said = pick(r, [*signs, ("\\n", "newlines")])
    equals = pick(r, ["=", ":", "->"])
    between = "\n" if sign == "\\n" else sign
    m = mapping(r, "I", False, out="I") if r.random() < 0.5 else None
    numeric = m is not None or r.random() < 0.6

    def drawn(r: Random, near: list[Any]) -> str:
        keys = dict.fromkeys(w for w in strs(r, (), 5) if w)
        found = (f"{k}{equals}{v}" for k, v in zip(keys, ints(r, near, 5), strict=False))
        return between.join(found) or f"a{equals}1"

    part = pick(r, ["part", "item", "pair", "chunk"])
    code = "int(value)" if numeric else "value"
    code = insert(m.code, code) if m else code

    def meaning(text: str) -> dict[str, Any]:
        found = dict(pair.split(equals) for pair in text.split(between))
        if not numeric:
            return found
        return {a: m.meaning(int(b)) if m else int(b) for a, b in found.items()}

    what = f"key{equals}value pairs separated by {said}"
    extra = ", with the values converted to integers" if numeric else ""
    if m:
        extra = f", where each value is converted to an integer and replaced by {m.its}"
    if numeric:
        r.random()  # Drawn and not used, as in the published text.
    key = m.key if m else str(numeric)
    family = "parsekv" + equals + sign
    return form("parsekv", locals(), key, [(p, "str", drawn)], meaning, family=family)


def steps(r: Random) -> Template:
    """How often something can be done; loops over digits."""
    p = pick(r, ["n", "number", "num", "x"])
    k = pick(r, [2, 3, 5, 10])
    which = r.random()
    if which < 0.3:

        def multiple(r: Random, near: list[Any]) -> int:
            return r.choice([r.randint(1, 100), k ** r.randint(0, 5) * r.randint(1, 9)])

        def divisions(v: int) -> int:
            count = 0
            while v % k == 0:
                v //= k
                count += 1
            return count

        return form("divcount", locals(), str(k), [(p, "int", multiple)], divisions)
    if which < 0.6:
        return digits(r, p)
    # Two parts are drawn and not used, as in the published text.
    MAPS["I"].get(r, "floordiv")
    MAPS["I"].get(r, pick(r, ["plus", "times", "minus"]))
    least = pick(r, [0, 1])

    def halvings(v: int) -> int:
        count = 0
        while v > least:
            v = v // 2 if v % 2 == 0 else v - 1
            count += 1
        return count

    numbers = lambda r, near: r.randint(0, 200)
    return form("reduce", locals(), str(least), [(p, "int", numbers)], halvings)


def digits(r: Random, p: str) -> Template:
    """Sum, product or number of some digits, by arithmetic."""
    bag = PREDICATES["I"]
    if r.random() < 0.5:
        tested = bag.get(r, pick(r, ["even", "odd", "gt", "prime"]))
    else:
        r.random()  # Drawn and not used, as in the published text.
        tested = bag.draw(r, False)
    options = [("sum", "result += digit", 0, sum), ("product", "result *= digit", 1, math.prod)]
    what, update, first, function = pick(r, [*options, ("number", "result += 1", 0, len)])
    if tested.helper:
        tested = bag.get(r, "odd")
    f = Filter([tested])
    c = f.code("digit")
    numbers = lambda r, near: r.randint(1, 10 ** r.randint(1, 7))
    meaning = lambda v: function([d for d in map(int, str(v)) if f.test(d)])
    return form("digitloop", locals(), what + f.key, [(p, "int", numbers)], meaning)


def fizz(r: Random) -> Template:
    p = pick(r, ["n", "limit", "m"])
    a, b = r.sample([2, 3, 4, 5, 7], 2)
    options = [("Fizz", "Buzz"), ("Foo", "Bar"), ("Tick", "Tock"), ("Ping", "Pong"), ("A", "B")]
    u, v = pick(r, options)
    r.random()  # Drawn and not used, as in the published text.

    def meaning(n: int) -> list[str]:
        return [u * (i % a == 0) + v * (i % b == 0) or str(i) for i in range(1, n + 1)]

    numbers = lambda r, near: r.randint(0, 35)
    return form("fizz", locals(), f"{a}{b}{u}", [(p, "int", numbers)], meaning)


def formatted(r: Random) -> Template:
    """Pairs as one string."""
    p = pick(r, ["pairs", "items", "people", "entries"])
    options = [("name", "age"), ("key", "value"), ("name", "score"), ("item", "price")]
    a, b = pick(r, [*options, ("word", "count")])
    inside = pick(r, [": ", "=", " - ", "->", " (", ":"])
    between = pick(r, [", ", "\\n", "; ", " | ", "&"])
    end = ")" if inside == " (" else ""
    sign = "newlines" if between == "\\n" else f'"{between}"'
    is_dict = r.random() < 0.4
    made = dict if is_dict else list
    drawn = lambda r, near: made(zip(strs(r, (), 4), ints(r, near, 4), strict=True))
    p = pick(r, DICTS) if is_dict else p
    items = f"{p}.items()" if is_dict else p

    def meaning(found: Any) -> str:
        listed = found.items() if is_dict else found
        return between.replace("\\n", "\n").join(f"{x}{inside}{y}{end}" for x, y in listed)

    annotation = "dict[str, int]" if is_dict else "list[tuple[str, int]]"
    key, family = between + str(is_dict), "format" + inside
    return form("format", locals(), key, [(p, annotation, drawn)], meaning, family=family)


def decorator(r: Random) -> Template:
    t = "I" if r.random() < 0.6 else "S"
    m = mapping(r, t, False)
    name = pick(r, [m.name, m.name + "_result", "decorate", "transform_result", "modify"])
    function = pick(r, ["func", "f", "fn", "function"])
    wrapper = pick(r, ["wrapper", "wrapped", "inner"])
    value = pick(r, ["result", "value"])
    mapped = insert(m.code, value)
    once = m.code.count("{x}") == 1
    called = insert(m.code, f"{function}(*args)")
    params: list[Param] = [(function, "", single(t))]
    return form("decorator", locals(), t + m.key, params, m.meaning, kind=DECORATOR)


def closure(r: Random) -> Template:
    n = pick(r, ["n", "k", "amount", "factor", "x"])
    x = pick(r, ["y", "value", "v", "number"])
    options = [
        ("adder", "{x} + {n}", "adds {n} to its argument"),
        ("multiplier", "{x} * {n}", "multiplies its argument by {n}"),
        ("power", "{x} ** {n}", "raises its argument to the power {n}"),
        ("subtractor", "{x} - {n}", "subtracts {n} from its argument"),
        ("checker", "{x} > {n}", "checks whether its argument is greater than {n}"),
        ("divider", "{x} % {n} == 0", "checks whether its argument is divisible by {n}"),
        ("capper", "min({x}, {n})", "limits its argument to at most {n}"),
    ]
    what, code, said = pick(r, options)
    inner = pick(r, ["inner", "f", "func", what.rstrip("r")])
    meaning = eval("lambda n, x: " + code.format(x="x", n="n"))
    code, said = code.format(x=x, n=n), said.format(n=n)
    params: list[Param] = [
        (n, "int", lambda r, near: r.randint(1, 6)),
        ("_x", "int", lambda r, near: r.randint(0, 9)),
    ]
    return form("closure", locals(), what, params, meaning, kind=CLOSURE)


def conversion(r: Random) -> Template:
    """Strings that may not be numbers."""
    p = pick(r, ["s", "text", "value"])
    type_, said = pick(r, [(int, "an integer"), (float, "a float")])
    call = type_.__name__
    d = pick(r, ["None", "0", "-1"])
    default = ast.literal_eval(d)
    m = mapping(r, "I", False, out="I") if type_ is int and r.random() < 0.6 else None
    texts = ["12", "7", "-3", "abc", "", "4.5", "x1", "100", " 8 "]
    drawn = lambda r, near: pick(r, texts)
    code = insert(m.code, "number") if m else "number"
    key = m.key if m else ""
    if r.random() < 0.55:

        def one(text: str) -> Any:
            try:
                number = type_(text)
            except ValueError:
                return default
            return m.meaning(number) if m else number

        params: list[Param] = [(p, "str", drawn)]
        return form("tryconv", locals(), key + d, params, one, family="tryconv" + call)
    q = pick(r, ["items", "strings", "tokens", "values"])
    skip = r.random() < 0.6
    x = pick(r, ["x", "item", "t"])
    otherwise = "skipping those that are not valid integers"
    otherwise = otherwise if skip else f"using {d} for those that are not valid"

    def several(found: list[str]) -> list[Any]:
        out = []
        for text in found:
            try:
                number = int(text)
            except ValueError:
                out += [] if skip else [default]
                continue
            out.append(m.meaning(number) if m else number)
        return out

    some = lambda r, near: [pick(r, texts) for _ in range(r.randint(0, 6))]
    return form("tryconvlist", locals(), key + str(skip), [(q, "list[str]", some)], several)


def ordered(r: Random) -> Template:
    """A list by a map of its elements: sorted, or its best one."""
    t = "I" if r.random() < 0.4 else "S"
    s = list_source(r, t)
    x, xs = s.variable, s.iterable
    one, many = s.noun
    m = mapping(r, t, False)
    down = r.random() < 0.35
    k = r.random()
    mapped = insert(m.code, x)

    def defined(values: list[Any]) -> list[Any]:
        if m.defined and not all(map(m.defined, values)):
            raise Undefined
        return values

    if k < 0.6:
        element = ELEMENT[t]
        by = lambda values: sorted(defined(values), key=m.meaning, reverse=down)
        return form("sortkey", locals(), t + m.key + str(down), s.params, by)
    big = r.random() < 0.6
    best = max if big else min
    call, sign, which = ("max", ">", "largest") if big else ("min", "<", "smallest")
    best_mapped = insert(m.code, "best")
    best_one = lambda values: best(defined(values), key=m.meaning)
    return form("argbest", locals(), t + m.key + call, s.params, best_one)


def difference(r: Random) -> Template:
    """Two filtered sums or counts, subtracted or compared."""
    s = list_source(r, "I")
    x, xs = s.variable, s.iterable
    while True:
        f, g = random_filter(r, "I", False), random_filter(r, "I", False)
        if not f.helper and not g.helper and f.key != g.key:
            break
    what, added, function = pick(r, [("sum", x, sum), ("number", "1", len)])
    c, c2 = f.code(x), g.code(x)
    code, code2 = (f"sum({added} for {x} in {xs} if {test})" for test in (c, c2))
    article = "" if what == "number" else "the "
    said = f"the {what} of {article}{f.elements(r, s.noun, pick(r, s.named_places))}"
    said2 = f"the {what} of those that {g.plural(r)}"
    free = not {x, xs} & {"a", "b"}
    k = r.random()
    first = lambda values: function([v for v in values if f.test(v)])
    second = lambda values: function([v for v in values if g.test(v)])
    key, near = what + f.key + g.key, f.near + g.near
    if k < 0.5:
        minus = lambda values: first(values) - second(values)
        return form("aggdiff", locals(), key, s.params, minus, near)
    more = lambda values: first(values) > second(values)
    return form("aggcmp", locals(), key, s.params, more, near)


WEIGHTS = {
    partition: 2,
    take: 3,
    index: 5,
    longest_run: 2,
    all_any: 6,
    replace: 6,
    check: 10,
    dictionary: 12,
    rows: 6,
    two_lists: 6,
    window: 3,
    pairs: 3,
    records: 6,
    chars: 7,
    words: 5,
    generator: 3,
    recursive: 3,
    parse: 3,
    steps: 3,
    fizz: 1,
    formatted: 2,
    decorator: 2,
    closure: 1,
    conversion: 3,
    ordered: 4,
    difference: 2,
}
ALL = [family for family, weight in WEIGHTS.items() for _ in range(weight)]


def random_family(r: Random) -> Template:
    return pick(r, ALL)(r)
