"""Changes to a composed task, as a user asks for them in a second turn."""

from __future__ import annotations

import copy
from random import Random

from .draw import pick
from .filters import Filter, random_filter
from .grammar import capital
from .parts import AGGREGATES, OPERATIONS, mapping
from .pipeline import Pipeline, idle

Edit = tuple[Pipeline, str]

IGNORE = {
    "nonneg": "Now make it ignore negative numbers.",
    "positive": "Ignore numbers that are not positive.",
    "nonzero": "Now make it skip zeros.",
    "snonempty": "Make it skip empty strings.",
}
INSTEAD = [
    "Now use only the {n} that {p} instead.",
    "Change it to the {n} that {p}.",
    "Do the same for the {n} that {p}.",
]
ONLY = [
    "Now make it use only {n} that {p}.",
    "Only consider {n} that {p}.",
    "Now make it ignore {n} unless they {p}.",
    "Change it so that it only takes {n} that {p}.",
    "It should only include {n} that {p}.",
    "Also require that the {n} {p}.",
    "Restrict it to {n} that {p}.",
]


def edit(r: Random, task: Pipeline) -> Edit | None:
    """A changed copy and the request for it, where one can be made."""
    k = r.random()
    if k < 0.45:
        return filtered(r, task)
    if k < 0.75:
        return aggregated(r, task)
    if k < 0.9 and task.map is None:
        return mapped(r, task)
    if not task.operations and task.aggregate.key == "list":
        return operated(r, task)
    return None


def filtered(r: Random, task: Pipeline) -> Edit | None:
    """Another filter, or a second one."""
    changed = copy.copy(task)
    drawn = random_filter(r, task.source.element, False)
    said = {"n": task.source.noun[1]}
    if task.filter is None:
        changed.filter = drawn
    elif not joinable(task.filter, drawn):
        return None
    elif r.random() < 0.6:
        changed.filter = Filter(task.filter.predicates + drawn.predicates, "and")
    else:
        changed.filter = drawn
        return changed, pick(r, INSTEAD).format(p=drawn.plural(r), **said)
    key = drawn.predicates[0].key
    if (drawn.mode == "" or key == "snonempty") and key in IGNORE and r.random() < 0.6:
        return changed, IGNORE[key]
    return changed, pick(r, ONLY).format(p=drawn.plural(r), **said)


def joinable(a: Filter, b: Filter) -> bool:
    """Whether the two can be one, joined by "and"."""
    return not (a.mode or b.mode or a.key == b.key or (a.helper and b.helper))


def aggregated(r: Random, task: Pipeline) -> Edit | None:
    changed = copy.copy(task)
    for _ in range(10):
        drawn = AGGREGATES.by_type(r, task.out_type())
        final = task.operations and task.operations[-1].final
        if drawn.key != task.aggregate.key and not final and not idle(task.operations, drawn):
            break
    else:
        return None
    changed.aggregate, changed.default = drawn, None
    verb = pick(r, drawn.verbs)
    asked = ["Now {v} instead.", "Instead, {v}.", "Change it to {v}.", "{V} instead."]
    return changed, pick(r, [*asked, "It should {v}."]).format(v=verb, V=capital(verb))


def mapped(r: Random, task: Pipeline) -> Edit | None:
    changed = copy.copy(task)
    t = task.source.element
    changed.map = mapping(r, t, False, out=t if t != "C" else None)
    if changed.map.out != t:
        return None
    verb = pick(r, changed.map.verbs).replace("{them}", "them").replace("{each}", "each one")
    asked = ["First {v}.", "Before that, {v}.", "Also {v} first.", "Make it {v} first."]
    return changed, pick(r, asked).format(v=verb)


def operated(r: Random, task: Pipeline) -> Edit | None:
    changed = copy.copy(task)
    drawn = OPERATIONS.by_type(r, task.out_type())
    if drawn.params:
        return None
    changed.operations = [drawn]
    verb = pick(r, drawn.verbs)
    return changed, pick(r, ["Now also {v}.", "Then {v}.", "And {v}.", "Now {v}."]).format(v=verb)
