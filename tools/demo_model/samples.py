"""Turn functions into training documents: bare code, and a request with the code as its answer.

Also reads the primer, the short classic functions, scripts and small talk in `primer/`.
"""

from __future__ import annotations

import ast
import json
import random
import re
from dataclasses import replace
from pathlib import Path

from extract import Function, cut

PRIMER = Path(__file__).resolve().parent / "primer"
Document = tuple[str, str]  # kind, text with the special tokens written out

VERBS = frozenset(
    """
        return compute calculate get set check create convert find build make determine
        generate extract parse read write load save remove add apply evaluate compare
        test validate format print sort filter merge split join replace update normalize
        transform construct count sum estimate fit plot draw render open close start
        stop run execute call invoke register unregister yield iterate decode encode
        serialize deserialize initialize reset clear delete insert append push pop copy
        clone move map reduce group select search match lookup fetch download upload
        send receive wrap unwrap expand collapse flatten reshape resize crop pad rotate
        shift scale multiply divide subtract raise ensure verify assert handle process
        resolve infer show display list dump store cache pack unpack compile translate
        rename strip trim escape quote perform simplify integrate differentiate solve
        sample draw simulate factor partition enumerate visit walk traverse swap reverse
        encrypt concatenate interpolate broadcast define assign query retrieve provide
        collect configure log measure predict train score rank round clip mask truncate
        tokenize wait sleep connect disconnect fill import export look turn produce give
        take use implement emit decorate warn combine change construct reconstruct
        recursively attach detach mark
    """.split()
)
# What a primer sample imports when its code uses the module.
IMPORTS = ["os", "math", "json", "random", "re", "csv", "time", "collections"]


def document(text: str) -> str:
    return f"<s>{text}</s>"


def chat(turns: list[tuple[str, str]]) -> str:
    """The chat template as text; the header markers become special tokens when encoded."""
    parts = [
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}</s>"
        for role, content in turns
    ]
    return "<s>" + "".join(parts)


def verb_forms(summary: str) -> tuple[str, str] | None:
    """('return the sum', 'returns the sum') for 'Return the sum.' or 'Returns the sum.'."""
    first, _, rest = summary.rstrip(". ").partition(" ")
    word = first.lower()
    base = word if word in VERBS else None
    if base is None and word.endswith("s"):
        base = next((b for b in (word[:-1], word[:-2], word[:-3] + "y") if b in VERBS), None)
    if base is None or not rest:
        return None
    if re.search(r"[^aeiou]y$", base):
        third = base[:-1] + "ies"
    elif re.search(r"(s|x|ch|sh|z)$", base):
        third = base + "es"
    else:
        third = base + "s"
    return f"{base} {rest}", f"{third} {rest}"


def class_requests(item: Function, words: str) -> list[str]:
    sentence = item.summary.rstrip(".")
    return [
        f"Write a Python class `{item.name}`. {item.summary}",
        f"Write a Python class called {item.name}: {sentence}.",
        f"Implement the class `{item.name}` in Python.",
        f"Create a Python class for {words}.",
        f"Write a class {item.name} in Python. {item.summary}",
        f"Python class {item.name}",
    ]


def method_requests(item: Function, args: str) -> list[str]:
    return [
        f"Write a method `{item.name}` for the class `{item.owner}`. {item.summary}",
        f"Write the Python method `{item.name}({args})`. {item.summary}",
        f"Implement `{item.owner}.{item.name}`: {item.summary}",
        f"Complete this method:\n\n{item.head}",
    ]


def function_requests(item: Function, args: str, words: str, rng: random.Random) -> list[str]:
    name, summary = item.name, item.summary
    plain = [
        f"Write a Python function `{name}`. {summary}",
        f"Implement `{name}({args})` in Python. {summary}",
        f"Complete this Python function:\n\n{item.head}",
        f"Write a function {name}({args}): {summary}",
        f"Write a Python function called {name}.",
        f"Write a Python function for {words}.",
        f'Write the body of this function:\n\n{item.head}\n    """{summary}"""',
    ]
    forms = verb_forms(summary)
    if forms is None:
        return plain
    imperative, third = forms
    return [
        *plain[:4],
        rng.choice(plain[4:]),
        f"Write a Python function to {imperative}.",
        f"Write a Python function that {third}.",
        f"Write a function to {imperative}.",
        f"Write a function that {third}.",
        f"Write a Python function called `{name}` that {third}.",
        f"How do I {imperative} in Python?",
        f"Python function to {imperative}",
        f"Can you write a Python function that {third}?",
        f"I need a function to {imperative}.",
        summary,
        f"Please {imperative} in Python.",
        f"Write `{name}({args})` in Python. It should {imperative}.",
    ]


def request(item: Function, rng: random.Random) -> str:
    """One of many ways to ask for this function, class or method."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", item.name).replace("_", " ").strip().lower()
    args = ", ".join(item.args)
    if item.is_class:
        return rng.choice(class_requests(item, words))
    if item.owner:
        return rng.choice(method_requests(item, args))
    return rng.choice(function_requests(item, args, words, rng))


def samples_of(functions: list[Function], rng: random.Random) -> list[Document]:
    """One bare and two chat documents for each function of a file; some chats have two turns."""
    out: list[Document] = []
    for i, item in enumerate(functions):
        draw = rng.random()
        code = item.none if draw < 0.35 else item.short if draw < 0.75 else item.full
        out.append(("function", document(code)))
        for _ in range(2):
            extra = [functions[i - 1]] if i and rng.random() < 0.08 else []
            turns: list[tuple[str, str]] = []
            for each in [item, *extra]:
                draw = rng.random()
                answer = each.short if draw < 0.5 else each.none if draw < 0.85 else each.full
                turns += [("user", request(each, rng)), ("assistant", answer)]
            out.append(("chat", chat(turns)))
    return out


# -- the primer ------------------------------------------------------------------------------------


def primer_items() -> list[Function]:
    """The primer's functions, then its classes."""
    items: list[Function] = []
    for name in ("functions.py", "classes.py"):
        text = (PRIMER / name).read_text(encoding="utf-8")
        nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        found = [cut(text.split("\n"), node) for node in nodes]
        items += [item for item in found if item]
    return items


def renamed(item: Function, swap: dict[str, str]) -> Function:
    """The same function with whole words replaced."""

    def text(source: str) -> str:
        return re.sub(r"\b\w+\b", lambda m: swap.get(m.group(), m.group()), source)

    return replace(
        item,
        full=text(item.full),
        short=text(item.short),
        none=text(item.none),
        head=text(item.head),
        name=swap[item.name],
        args=[swap.get(a, a) for a in item.args],
    )


def with_imports(code: str, variant: int, rng: random.Random) -> str:
    """The code below the imports it needs, in three of four variants."""
    used = sorted(f"import {name}" for name in IMPORTS if re.search(rf"\b{name}\.", code))
    if not used or variant % 4 == 3:
        return code
    return "\n".join(used) + "\n\n" + ("\n" if rng.random() < 0.5 else "") + code


def primer_samples() -> list[Document]:
    """Twelve variants of each primer function under other names, the scripts and the small talk."""
    rng = random.Random(1)
    aliases = json.loads((PRIMER / "aliases.json").read_text())
    out: list[Document] = []
    for base in primer_items():
        names = [base.name] * 2 + aliases["names"].get(base.name, [])
        for variant in range(12):
            swap = {base.name: names[variant % len(names)]}
            for arg in base.args if variant >= 4 else []:
                if arg in aliases["arguments"] and rng.random() < 0.7:
                    new = rng.choice(aliases["arguments"][arg])
                    if not re.search(rf"\b{new}\b", base.full):
                        swap[arg] = new
            item = renamed(base, swap)
            code = with_imports(item.short if variant % 3 == 0 else item.none, variant, rng)
            out.append(("primer", document(code)))
            if variant % 2 == 0:
                answer = item.short if variant % 4 else item.none
                turns = [("user", request(item, rng)), ("assistant", answer)]
                out.append(("primer", chat(turns)))
    scripts = [p.read_text(encoding="utf-8") for p in sorted(PRIMER.glob("scripts/*.py"))]
    out += [("primer", document(script)) for script in scripts for _ in range(4)]
    talk = json.loads((PRIMER / "talk.json").read_text())
    return out + [("talk", chat([("user", q), ("assistant", a)])) for q, a in talk]
