"""What a composed task does, in words: as one nested phrase or step by step."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING

from .draw import pick
from .grammar import capital, third

if TYPE_CHECKING:
    from .pipeline import Pipeline


def tail(task: Pipeline, r: Random) -> str:
    """What happens where there is no element, with a space before it."""
    if task.default is None:
        return ""
    if task.filter or r.random() < 0.3 or not task.source.is_list:
        what = "there are none"
    else:
        what = pick(r, ["it is empty", "there are none"])
    if task.filter and r.random() < 0.4:
        one, many = task.source.noun
        what = pick(r, [f"there are no such {many}", "nothing matches", f"no {one} matches"])
    if task.default == "raise":
        return pick(r, [f" Raise a ValueError if {what}.", f" If {what}, raise a ValueError."])
    value = {'""': pick(r, ["an empty string", '""'])}.get(task.default, task.default)
    return pick(r, [f" Return {value} if {what}.", f" If {what}, return {value}."])


def nested(task: Pipeline, r: Random, places: list[str]) -> str:
    """'return the sum of the squares of the even numbers in xs'."""
    place = pick(r, places)
    noun = task.source.noun
    inner = task.filter.elements(r, noun, place) if task.filter else f"{noun[1]} {place}"
    what = ("all " if r.random() < 0.12 and not task.map else "the ") + inner
    if task.map:
        what = pick(r, task.map.phrases).replace("{X}", what)
    for operation in task.operations:
        what = pick(r, operation.phrases).replace("{X}", what)
    phrase = pick(r, task.aggregate.phrases)
    bare = re.sub(r"^(the|all) ", "", what)
    if task.aggregate.key == "count" and r.random() < 0.45:
        return "count " + (what if r.random() < 0.7 else bare)
    phrase = phrase.replace("{X-}", bare).replace("{X}", what)
    if task.aggregate.key == "sum" and r.random() < 0.12:
        return pick(r, ["sum ", "add up "]) + what
    return f"{verb(task, r, phrase)} {phrase}"


def verb(task: Pipeline, r: Random, phrase: str) -> str:
    if phrase.startswith(("how many", "whether")):
        return pick(r, ["return", "determine", "find out" if phrase.startswith("how") else "check"])
    found = "return"
    if not phrase.startswith("True"):
        found = pick(r, ["return"] * 7 + ["compute", "calculate", "find", "get"])
    if task.aggregate.key == "list" and r.random() < 0.2:
        found = pick(r, ["collect", "list", "get", "find"])
    return found


def filter_step(task: Pipeline, r: Random) -> str:
    assert task.filter
    one, many = task.source.noun
    found = task.filter
    if r.random() < 0.2 and found.mode == "" and found.singular():
        if r.random() >= 0.3:
            return f"keep only each {one} that {found.singular()}"
        return pick(r, ["ignore", "skip", "drop"]) + f" every {one} unless it {found.singular()}"
    adjective = found.predicates[0].adjective
    if found.mode == "" and adjective and r.random() < 0.6:
        keep = pick(r, ["keep only", "select", "keep", "take"])
        return f"{keep} the {adjective} " + pick(r, ["ones", many])
    keep = pick(r, ["keep only", "keep", "select", "take", "filter for"])
    which = "the ones" if r.random() < 0.3 else f"the {many}"
    return f"{keep} {which} that {found.plural(r)}"


def steps(task: Pipeline, r: Random) -> list[str]:
    """'keep only the even ones', 'square them', 'return their sum'."""
    out = [filter_step(task, r)] if task.filter else []
    if task.map:
        step = pick(r, task.map.verbs)
        step = step.replace("{them}", pick(r, ["them", "each of them", "each one"]))
        each = pick(r, ["each one", "each of them", f"each {task.source.noun[0]}"])
        out.append(step.replace("{each}", each))
    out += [pick(r, operation.verbs) for operation in task.operations]
    if task.aggregate.key != "list" or not out or r.random() < 0.7:
        out.append(pick(r, task.aggregate.verbs))
    return out


def sequential(task: Pipeline, r: Random, third_person: bool = False) -> str:
    """The steps as one phrase."""
    said = steps(task, r)
    said = [third(step) for step in said] if third_person else said
    if len(said) == 1:
        return said[0]
    before = ", ".join(said[:-1])
    if r.random() < 0.5:
        return before + (", and " if len(said) > 2 or r.random() < 0.4 else " and ") + said[-1]
    return ", then ".join(said) if len(said) < 4 else f"{before}, then {said[-1]}"


def elements(task: Pipeline, r: Random, named: bool = True) -> str:
    """'the numbers in xs'."""
    places = task.source.named_places if named else task.source.places
    return f"the {task.source.noun[1]} {pick(r, places)}"


def sentence(task: Pipeline, r: Random) -> str:
    if r.random() < 0.72 or task.size() < 2:
        said = capital(nested(task, r, task.source.named_places)) + "."
    else:
        x = r.random()
        word = "From" if x < 0.5 else "Given" if x < 0.8 else "Take"
        said = f"{word} {elements(task, r)}, {sequential(task, r)}."
    return said + tail(task, r)


def request_forms(task: Pipeline, r: Random, named: bool) -> tuple[str, str, str]:
    if r.random() < 0.75 or task.size() < 2:
        places = task.source.named_places if named else task.source.places
        said = nested(task, r, places)
        return said, third(said), tail(task, r)
    after = sequential(task, r)
    what = elements(task, r, named)
    said = f"takes {what}, {sequential(task, r, True)}"
    return f"take {what}, {after}", said, tail(task, r)


def explain(task: Pipeline, r: Random) -> str:
    done = sequential(task, r, True)
    said = [
        f"It takes {elements(task, r)}, {done}.",
        f"It goes through {elements(task, r)}, {done}.",
    ]
    if task.size() < 2:
        said.append(f"The function {done}, using {elements(task, r)}.")
    else:
        said.append(f"It works on {elements(task, r)}: it {done}.")
    return pick(r, said)
