"""Training documents and held-out tasks, made of checked programs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from .classes import class_document
from .draw import pick
from .edits import edit
from .families import random_family
from .grammar import capital
from .pipeline import Pipeline, held_out
from .program import Program, Test
from .requests import EXPLAIN, docstring, request
from .segments import Segment, chat
from .single import random_single
from .task import Task

Document = list[Segment]

EXPLAIN_CODE = [
    "What does this function do?",
    "Explain this code.",
    "Explain this function:",
    "Describe what this code does.",
]
LOOP = ["Use a loop instead.", "Can you write it with a for loop?", "Rewrite it with a loop."]
TESTS = ["Add some tests.", "Write asserts for it.", "Give me a few tests."]
DOCUMENT = ["Add a docstring.", "Now add a docstring.", "Please document it.", "Add documentation."]
SECONDS_A_DOCUMENT = 1.0


def random_task(r: Random) -> Task:
    """A task whose composition is not held out."""
    while True:
        x = r.random()
        if x >= 0.84:
            return random_single(r)
        task: Task = Pipeline(r) if x < 0.44 else random_family(r)
        if task.valid() and not held_out(task.key):
            return task


class Draft:
    """A task with a first program and its tests, of which a document is made."""

    def __init__(self, r: Random, task: Task, program: Program, tests: list[Test]) -> None:
        self.r, self.task, self.program, self.tests = r, task, program, tests

    def docstring(self, program: Program | None = None, examples: bool | None = None) -> list[str]:
        sentence = self.task.sentence(self.r)
        return docstring(self.r, sentence, program or self.program, self.tests, examples)

    def completed(self) -> Document:
        """Signature and docstring, then the body."""
        r, program = self.r, self.program
        doc = self.docstring()
        source = program.source(doc, nested=True, inner_imports=r.random() < 0.5)
        at = source.index("\n", source.index(program.head)) + 1
        at += sum(len("    " + line if line else "") + 1 for line in doc)
        learned = r.random() < 0.4
        after = ""
        if r.random() < 0.06:
            after = "\n\n" + program.asserts(self.tests[:3]) + "\n"
        return [("<s>", False), (source[:at], learned), (source[at:] + after + "</s>", True)]

    def commented(self) -> Document:
        """A comment, then the function."""
        r, program = self.r, self.program
        does, does3, after = self.task.request_forms(r, True)
        comments = [
            capital(does) + "." + after,
            does,
            f"A function that {does3}.{after}",
            f"Function that {does3}",
        ]
        source = program.source(comment=pick(r, comments), nested=r.random() < 0.5)
        at = source.index("\n", source.index("# ")) + 1
        if r.random() < 0.5:
            at = source.index("\n", source.index(program.head)) + 1
        return [("<s>", False), (source[:at], r.random() < 0.4), (source[at:] + "</s>", True)]

    def answer(self, program: Program, documented: bool) -> str:
        doc = self.docstring(program, examples=False) if documented else None
        return program.source(doc, nested=self.r.random() < 0.3)

    def followed_up(self, first: tuple[str, str], documented: bool) -> Document | None:
        """A chat of one question, or with a second one about the same program."""
        r, task, program = self.r, self.task, self.program
        x = r.random()
        if x < 0.06:
            return chat([first, (pick(r, EXPLAIN), task.explain(r))])
        if x < 0.10:
            question = pick(r, EXPLAIN_CODE) + "\n\n" + program.source()
            return chat([(question, task.explain(r))])
        if x < 0.14:
            return self._rewritten(first, documented)
        if x < 0.20:
            return self._renamed_or_documented(first[0])
        if x < 0.24 and not program.helper:
            tests = program.asserts([test for test in self.tests[:3] if len(repr(test)) < 160])
            if tests:
                return chat([first, (pick(r, TESTS), tests)])
        return chat([first])

    def _rewritten(self, first: tuple[str, str], documented: bool) -> Document | None:
        """The same program in another form."""
        r, program = self.r, self.program
        for _ in range(6):
            other = Program(r, self.task, name=program.name, hints=program.hints)
            if other.lines != program.lines and not other.imports and not program.imports:
                break
        else:
            return chat([first])
        if other.verify(r, 3) is None:
            return None
        had_loop, has_loop = (
            any(line.startswith("for ") for line in p.lines) for p in (program, other)
        )
        compact = not has_loop and any(" for " in line for line in other.lines)
        if has_loop and not had_loop:
            asked = LOOP
        elif compact and len(other.lines) < len(program.lines):
            one_line = len(other.lines) == 1
            last = "Can you write it in one line?" if one_line else "Write it more compactly."
            asked = ["Make it shorter.", "Use a comprehension instead.", last]
        else:
            asked = ["Write it another way.", "Show me a different version."]
        return chat([first, (pick(r, asked), self.answer(other, documented))])

    def _renamed_or_documented(self, question: str) -> Document:
        r, program = self.r, self.program
        name = self.task.name(r)
        if r.random() < 0.5 and name != program.name:
            asked = ["Rename it to {}.", "Call it {} instead.", "Change the name to {}."]
            other = program.renamed(name)
            second = (pick(r, asked).format(name), other.source())
            return chat([(question, program.source()), second])
        sentence = self.task.sentence(r)
        doc = docstring(r, sentence, program, self.tests, examples=r.random() < 0.3)
        return chat([(question, program.source()), (pick(r, DOCUMENT), program.source(doc))])

    def edited(self, first: tuple[str, str]) -> Document | None:
        """A chat in which the composition is changed."""
        assert isinstance(self.task, Pipeline)
        made = edit(self.r, self.task)
        if made is None or held_out(made[0].key) or not made[0].valid():
            return chat([first])
        changed, asked = made
        second = Program(self.r, changed, name=self.program.name, hints=self.program.hints)
        if second.verify(self.r, 4) is None:
            return None
        return chat([(first[0], self.program.source()), (asked, second.source())])

    def beside_another(self, first: tuple[str, str]) -> Document | None:
        """Two tasks that have nothing to do with each other."""
        r = self.r
        task = random_task(r)
        program = Program(r, task)
        tests = program.verify(r, 4)
        if tests is None or program.name == self.program.name:
            return None
        if r.random() < 0.5:
            return chat([first, (request(r, task, program), program.source())])
        other = Draft(r, task, program, tests)
        a, b = (
            draft.program.source(draft.docstring(examples=shown), nested=True, inner_imports=True)
            for draft, shown in ((self, False), (other, None))
        )
        return [("<s>" + a + "\n\n" + b + "</s>", True)]


def document(r: Random) -> Document | None:
    """One training document, or None where a program fails its check."""
    if r.random() < 0.035:
        return class_document(r)
    task = random_task(r)
    program = Program(r, task)
    tests = program.verify(r, 4)
    if tests is None:
        return None
    draft = Draft(r, task, program, tests)
    k = r.random()
    documented = r.random() < 0.25
    if k < 0.34:
        return draft.completed()
    if k < 0.42:
        return draft.commented()
    first = (request(r, task, program), draft.answer(program, documented))
    if k < 0.78 or (k < 0.92 and not isinstance(task, Pipeline)):
        return draft.followed_up(first, documented)
    return draft.edited(first) if k < 0.92 else draft.beside_another(first)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`: a drawn power may be enormous."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def documents(seed: int, count: int) -> Iterator[Document]:
    """`count` documents. What fails, or raises, is left out."""
    r = Random(seed)
    made = 0
    while made < count:
        try:
            with time_limit(SECONDS_A_DOCUMENT):
                found = document(r)
        # Drawn programs raise whatever Python can.
        except Exception:
            continue
        if found is not None:
            made += 1
            yield found


def held_out_tasks(count: int, seed: int = 77) -> list[dict[str, Any]]:
    """Tasks whose compositions are never trained on, docstrings and chat requests by turns."""
    r = Random(seed)
    out: list[dict[str, Any]] = []
    keys = set()
    while len(out) < count:
        task: Task = Pipeline(r) if r.random() < 0.5 else random_family(r)
        if isinstance(task, Pipeline) and task.size() < 2:
            continue
        if not task.valid() or not held_out(task.key) or task.key in keys:
            continue
        try:
            program = Program(r, task, hints=False)
            tests = program.verify(r, 8, 5)
        except Exception:
            continue
        if tests and len({repr(want) for _, want in tests}) > 1:
            keys.add(task.key)
            form = "docstring" if len(out) % 2 else "chat"
            prompt = docstring_prompt if len(out) % 2 else chat_prompt
            asserts = ["assert same({}, {})".format(*program.example(*test)) for test in tests]
            found = {"name": program.name, "form": form, "prompt": prompt(r, program, tests)}
            out.append({**found, "tests": asserts, "solution": program.source()})
    return out


def docstring_prompt(r: Random, program: Program, tests: list[Test]) -> str:
    sentence = program.task.sentence(r)
    doc = docstring(r, sentence, program, tests[:2], examples=r.random() < 0.4)
    return "\n".join([program.head, *("    " + line if line else "" for line in doc)]) + "\n"


def chat_prompt(r: Random, program: Program, tests: list[Test]) -> str:
    """A request that names the function, so that the tests can call it."""
    prompt = ""
    for _ in range(50):
        prompt = request(r, program.task, program)
        if re.search(rf"\b{program.name}\b", prompt):
            break
    return prompt
