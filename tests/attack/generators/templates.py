"""Chat templates put together at random from what templates are made of, and what is dear in them.

A rendering ends with text or a TemplateError, within its time and a known amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import model, typed

Case = dict[str, Any]
LIMIT_BYTES = 4 << 30
LIMIT_SECONDS = 90.0

NAMES = ("messages", "ns.x", "a", "b", "messages[0].content", "ns", "loop", "f", "tools")
NUMBERS = ("0", "1", "-1", "2", "7", "1000", "99999", "10000000000", "1.5", "1e308", "n")
FILTERS = (
    *("abs", "attr('x')", "batch({n})", "batch({n}, {e})", "bool", "capitalize", "count", "d({e})"),
    *("default({e}, true)", "dictsort", "e", "first", "float", "format({e})", "format({n}, {n})"),
    *("groupby('role')", "groupby(attribute={e})", "indent({n})", "indent(width={n}, first=true)"),
    *("int", "items", "join", "join({e})", "last", "length", "lines", "list", "lower", "max"),
    *("map('upper')", "map(attribute='role')", "map('replace', '', {e})", "map('indent', {n})"),
    *("min", "pprint", "reject", "replace({e}, {e})", "replace('', {e})", "reverse", "round({n})"),
    *("safe", "select", "select('eq', {e})", "selectattr('role', 'eq', {e})", "slice({n})"),
    *("sort", "sort(reverse=true)", "split({e})", "string", "sum", "title", "tojson", "trim"),
    *("tojson(indent={n})", "tojson(separators=[{e}, {e}])", "unique", "upper", "zip({e})"),
    *("chain({e})", "urlencode", "escape"),
)
METHODS = (
    *("upper()", "count({e})", "count('')", "split({e})", "split('')", "replace({e}, {e})"),
    *("join({e})", "format({e}, {n})", "items()", "keys()", "values()", "get({e})", "strip({e})"),
    *("find({e})", "startswith({e})", "splitlines(true)", "title()", "cycle({e})", "changed({e})"),
)
TESTS = ("defined", "none", "string", "mapping", "iterable", "eq({e})", "in({e})", "lt({e})",
         "sameas({e})", "odd", "divisibleby({n})")  # fmt: skip
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", "in", "not in",
             "and", "or")  # fmt: skip
TEXTS = ("''", "'a'", "'abc'", "'%1000000000d'", "'{:>{}}'", "'%s%s%*d'", "'\\n'", "'é' * 99",
         "'x' * n")  # fmt: skip


class Writer:
    """Writes a template."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.left = 60

    def one(self, words: tuple[str, ...]) -> str:
        """A word, its places filled."""
        word = self.random.choice(words)
        while "{e}" in word or "{n}" in word:
            word = word.replace("{e}", self.expression(), 1) if "{e}" in word else word
            word = word.replace("{n}", self.random.choice(NUMBERS), 1)
        return word

    def expression(self) -> str:
        """A value."""
        self.left -= 1
        kind = self.random.randrange(14) if self.left > 0 else self.random.randrange(3)
        match kind:
            case 0:
                return self.random.choice(NAMES)
            case 1:
                return self.random.choice(NUMBERS)
            case 2:
                return self.random.choice(TEXTS)
            case 3 | 4:
                return f"({self.expression()}|{self.one(FILTERS)})"
            case 5:
                return f"({self.expression()}).{self.one(METHODS)}"
            case 6 | 7:
                operator = self.random.choice(OPERATORS)
                return f"({self.expression()} {operator} {self.expression()})"
            case 8:
                return f"[{self.expression()}, {self.expression()}]"
            case 9:
                return f"{{{self.expression()}: {self.expression()}}}"
            case 10:
                return f"({self.expression()})[{self.expression()}]"
            case 11:
                ends = [self.random.choice(("", "1", "-1", "n", "99999999999")) for _ in range(3)]
                return f"({self.expression()})[{':'.join(ends)}]"
            case 12:
                return f"({self.expression()} is {self.one(TESTS)})"
            case _:
                return self.random.choice(
                    ("range(n)", "range(100000)", "range(-5, 5, 2)", "dict(x=ns.x)", "f(a)",
                     "namespace(x=a)", f"raise_exception({self.expression()})",
                     "strftime_now('%Y' * 9)", "loop(ns.x)", "caller()")
                )  # fmt: skip

    def block(self, depth: int) -> str:
        """Statements."""
        inner = "".join(self.block(depth - 1) for _ in range(2)) if depth else ""
        e = self.expression
        match self.random.randrange(10):
            case 0 | 1:
                count = self.random.choice(("range(n)", "range(40)", e(), "messages"))
                times = self.random.choice(("", " recursive"))
                return f"{{% for a in {count}{times} %}}{inner}{{% endfor %}}"
            case 2 | 3 | 4:
                return f"{{% set ns.x = {e()} %}}{inner}"
            case 5:
                return f"{{% set b = {e()} %}}{inner}"
            case 6:
                return f"{{% if {e()} %}}{inner}{{% elif {e()} %}}{inner}{{% endif %}}"
            case 7:
                name = self.random.choice("fg")
                return f"{{% macro {name}(a, b={e()}) %}}{inner}{{% endmacro %}}{{{{ f(a) }}}}"
            case 8:
                return f"{{% set b %}}{inner}{{{{ ns.x }}}}{{{{ ns.x }}}}{{% endset %}}"
            case _:
                return f"{{{{ {e()} }}}}{inner}"


def cases(random: Random) -> Iterator[Case]:
    """Templates."""
    while True:
        writer = Writer(random)
        number = random.choice((3, 50, 99_999_999, 10**9, 10**12))
        begin = f"{{% set n = {number} %}}{{% set ns = namespace(x={writer.expression()}) %}}"
        body = begin + "".join(writer.block(random.randrange(4)) for _ in range(3))
        if random.random() < 0.2:
            # Twice as deep, or long, as often as that is.
            token = random.choice(("(", "[", "not ", "1~", "{% if 1 %}", "{% elif 1 %}", "x|list|"))
            body += "{{ " + token * random.choice((100, 2_000, 60_000)) + "1"
        yield {"template": body, "timeout": random.choice((None, None, 0.05, 2.0))}


def run(case: Case, folder: Path) -> None:
    """Opens a model with the template and asks it. Long ones are parts, and how often."""
    told = case["template"]
    template = told if isinstance(told, str) else "".join(part * times for part, times in told)
    made = model(folder, {"chat_template.jinja": template})
    with kie.Engine(made, device="cpu", threads=1, max_batch=1) as engine:
        messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d\ne"}]
        text = typed(lambda: engine.apply_chat_template(messages))
        assert isinstance(text, (str, kie.TemplateError)), repr(text)
        if case["timeout"] is not None:
            keywords = {"timeout": case["timeout"], "max_tokens": 2}
            done = typed(lambda: engine.generate(messages=messages, **keywords))
            assert isinstance(done, (kie.Completion, kie.InvalidRequestError)), repr(done)
