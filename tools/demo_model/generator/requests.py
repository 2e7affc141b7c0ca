"""How a task is asked for: docstrings, and the user's turn of a chat."""

from __future__ import annotations

import textwrap
from random import Random

from .draw import pick
from .grammar import capital, third
from .pipeline import Pipeline
from .program import Program, Test
from .task import Task
from .wording import nested, tail

# What an argument of a type is called.
DESCRIBED = {
    "list[int]": "a list of integers|a list of numbers|a list of numbers|a list",
    "list[str]": "a list of strings|a list of words|a list of strings",
    "str": "a string|a string|a text",
    "int": "an integer|a number|an int",
    "dict[str, int]": "a dictionary|a dict",
    "list[list[int]]": "a matrix|a list of lists|a list of lists of integers",
    "float": "a number|a float",
    "list[dict]": "a list of dictionaries",
    "list": "a list",
    "bool": "a boolean",
    "list[tuple]": "a list of tuples",
    "list[tuple[int, int]]": "a list of pairs|a list of tuples",
    "list[tuple[str, int]]": "a list of pairs|a list of tuples",
}
TWO = {
    "list[int]": "two lists",
    "str": "two strings",
    "int": "two integers",
    "dict[str, int]": "two dictionaries",
    "list[list[int]]": "two matrices",
}
# Places that speak of the argument without its name, by source.
INSIDE = {
    "list": "in it|in the list|in this list|in the input list",
    "slist": "in it|in the list|in this list",
    "chars": "in it|in the string|of the string",
    "words": "in it|in the string|in the sentence",
    "digits": "of it|of this number",
    "dictvalues": "in it|in the dictionary",
    "dictkeys": "in it|in the dictionary",
    "flatten": "in it|in all of its lists",
    "divisors": "of it",
    "lengths": "of the strings in it",
}
FUNCTION = [
    "Python function",
    "function",
    "Python function",
    "function",
    "short Python function",
    "python function",
]
PLEASE = """Please write|Write|Write me|Can you write|Could you write|I need|Give me|Create|Make
Define|Implement|I want|Show me|Code""".replace("\n", "|").split("|")
EXPLAIN = [
    "Explain it.",
    "What does it do?",
    "Explain this function.",
    "Can you explain the code?",
    "How does it work?",
    "Explain the code in one sentence.",
    "What does this function do?",
]


def takes(r: Random, task: Task, named: bool = True) -> str | None:
    """'a list of integers nums and an integer k', or None where it cannot be said."""
    params = task.params()
    sayable = all(p[1] in DESCRIBED and not p[0].startswith("*") for p in params)
    if task.kind or not params or not sayable or (not named and len(params) > 1):
        return None
    said = [pick(r, DESCRIBED[p[1]].split("|")) + (" " + p[0] if named else "") for p in params]
    if len(params) == 2 and params[0][1] == params[1][1] and named and r.random() < 0.7:
        two = TWO.get(params[0][1])
        if two:
            return f"{two} {params[0][0]} and {params[1][0]}"
    return " and ".join([", ".join(said[:-1]), said[-1]] if said[:-1] else said)


def introduced(r: Random, sentence: str, task: Task) -> str:
    """The sentence of a docstring in the third person, or with what the function takes."""
    first = sentence.partition(" ")[0]
    if not first.isalpha() or first in ("From", "Given", "Take") or r.random() >= 0.3:
        return sentence
    said = first.lower() + sentence[len(first) :]
    argument = takes(r, task) if r.random() < 0.5 else None
    if argument:
        given = f"Given {argument}, {said}"
        return pick(r, [given, f"Takes {argument} and {third(said)}", given])
    return capital(third(said)) if r.random() < 0.6 else sentence


def docstring(
    r: Random, sentence: str, program: Program, tests: list[Test], examples: bool | None = None
) -> list[str]:
    """Lines of the docstring, with quotes."""
    with_examples = r.random() < 0.4 if examples is None else examples
    sentence = introduced(r, sentence, program.task)
    quotes = '"""' if r.random() < 0.93 else "'''"
    sentence = sentence.replace("\\", "\\\\")
    lines = [sentence]
    if len(sentence) > 90 and r.random() < 0.7:
        lines = textwrap.wrap(sentence, 88)
    short = [test for test in tests if len(repr(test)) < 110]
    if with_examples and short:
        r.shuffle(short)
        for test in short[: pick(r, [1, 2, 2, 3])]:
            lines += example_lines(r, program, test)
    if len(lines) == 1 and r.random() < 0.85:
        return [quotes + lines[0] + quotes]
    if r.random() < 0.5:
        gap = r.random() < 0.4 and len(lines) > 1 and lines[1].startswith(">>>")
        return [quotes + lines[0], *([""] if gap else []), *lines[1:], quotes]
    return [quotes, *lines, quotes]


def example_lines(r: Random, program: Program, test: Test) -> list[str]:
    call, want = program.example(*test)
    if "\\" in call + want or '"""' in call + want:
        return []
    drawn = pick(r, [0, 0, 0, 1]) if program.example_style is None else program.example_style
    program.example_style = drawn
    if drawn:
        return [f"{call} => {want}" if r.random() < 0.5 else f"{call} returns {want}"]
    return [f">>> {call}"] if want == "None" else [f">>> {call}", want]


def inside(r: Random, task: Pipeline) -> tuple[str, str, str] | None:
    """The forms of a request that speak of 'it' instead of the parameter."""
    places = INSIDE.get(task.source.key)
    if places is None:
        return None
    said = nested(task, r, places.split("|"))
    return said, third(said), tail(task, r)


def request(r: Random, task: Task, program: Program) -> str:
    """The user's turn."""
    does, does3, after = task.request_forms(r, r.random() < 0.6)
    name, kind = program.name, pick(r, FUNCTION)
    tick = "`" if r.random() < 0.5 else ""
    k = r.random()
    if r.random() < 0.14:
        said = described(r, task, program, kind, tick, (does, does3, after))
        if said:
            return said
    if task.family == "single" and r.random() < 0.07:
        return by_name(r, program, kind, tick)
    return phrased(r, program, k, kind, (does, does3, after), f"{tick}{name}{tick}", tick)


def ended(r: Random, said: str, after: str) -> str:
    return said + ("." if r.random() < 0.8 or after else "") + after


def described(
    r: Random, task: Task, program: Program, kind: str, tick: str, forms: tuple[str, str, str]
) -> str | None:
    """A request that says what the function takes, where that can be said."""
    argument = None
    if isinstance(task, Pipeline) and r.random() < 0.7:
        without_name = inside(r, task)
        argument = takes(r, task, False) if without_name else None
        if argument and without_name:
            forms = without_name
    argument = argument or takes(r, task)
    if not argument:
        return None
    does, does3, after = forms
    quoted = f"{tick}{program.name}{tick}"
    called = ["", "", f" {quoted}", f" called {program.name}", f" named {quoted}"]
    function = kind + pick(r, called)
    x = r.random()
    if x < 0.6:
        verbs = ["Write", "Write", "Create", "Implement", "I need", "Give me", "Please write"]
        said = f"{pick(r, verbs)} a {function} that takes {argument} and {does3}"
    elif x < 0.85:
        said = f"Given {argument}, {does}"
    else:
        verb = pick(r, ["Write", "Create"])
        said = f"{verb} a {function}. It takes {argument} and should {does}"
    return ended(r, said, after)


def by_name(r: Random, program: Program, kind: str, tick: str) -> str:
    """A request with nothing but the name, for tasks that everybody knows."""
    name = program.name
    words = name.replace("_", " ")
    options = [
        f"Write a {kind} called {tick}{name}{tick}.",
        f"Write a {kind} {tick}{name}({program.args}){tick}.",
        f"Implement {tick}{name}{tick} in Python.",
        words,
        f"{words} in Python",
        f"python {words}",
        f"Write a {kind} for {words}.",
    ]
    return pick(r, options)


def phrased(
    r: Random,
    program: Program,
    k: float,
    kind: str,
    forms: tuple[str, str, str],
    name: str,
    tick: str,
) -> str:
    """A request in one of many forms; `k` in [0, 1) chooses."""
    does, does3, after = forms
    call = f"{tick}{program.name}({program.args}){tick}"
    simple = {
        0.14: f"Write a {kind} {call} that {does3}",
        0.26: f"Write a {kind} {name} that {does3}",
        0.42: f"Write a {kind} that {does3}",
        0.50: f"Write a {kind} to {does}",
        0.55: f"Write a {kind} called {name} that {does3}",
    }
    said = next((text for below, text in simple.items() if k < below), "")
    if said:
        return ended(r, said, after)
    if k < 0.60:
        please = pick(r, PLEASE)
        mark = "?" if please.startswith(("Can", "Could")) else "."
        return f"{please} a {kind} that {does3}{mark}{after}"
    if k < 0.64:
        how = pick(r, ["How do I", "How can I", "How would you", "How to"])
        return f"{how} {does} in Python?{after}"
    if k < 0.70:
        first = r.random() < 0.5
        said = f"Implement {call}: {does}" if first else ""
        return ended(r, said or f"Implement a {kind} {name} which {does3}", after)
    if k < 0.76:
        return ended(r, capital(does) if r.random() < 0.6 else does, after)
    if k < 0.80:
        opening = pick(r, ["Python function", "function", "python code", "def", "Python"])
        what = f"that {does3}" if r.random() < 0.5 else f"to {does}"
        return ended(r, f"{opening} {what}", after)
    if k < 0.86:
        if r.random() < 0.7:
            doc = f'    """{capital(does)}.{after}"""'
            return f"Complete this function:\n\n{program.head}\n{doc}"
        return f"Complete the following Python code:\n\n{program.head}\n    # {does}"
    if k < 0.92:
        args = program.args or "no arguments"
        return ended(r, f"Define a {kind} named {name} that takes {args} and {does3}", after)
    if k < 0.96:
        return ended(r, f"Write {call} in Python. It should {does}", after)
    return ended(r, f"{program.name}: {does}", after)
