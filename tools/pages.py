"""Pages of the manual that are made from the code, and the hook by which mkdocs asks for them.

The command line is described by its own parsers, the Python interface by its signatures and
docstrings, figures and history are the files of benches/gpu: none of it can differ from what runs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kie
from kie import cli, kccl, sampling

ROOT = Path(__file__).resolve().parents[1]
EMPTY = inspect.Parameter.empty
INTERFACE = (kie.Engine, kie.Session, kie.Stream, sampling.SamplingParams)
GRAMMARS = (kie.JsonSchema, kie.Regex, kie.Lark)
RESULTS = (kie.Completion, kie.Token, kie.TokenLogprob, kie.TopLogprob, kie.Usage, kie.Timings)
# Files of the repository that are pages of the site, and what links to them become.
COPIED = {
    "figures-gpu.md": "benches/gpu/RESULTS.md",
    "history-gpu.md": "benches/gpu/HISTORY.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
SOURCE = "https://github.com/kie-project/kie/blob/main/"


def cell(text: object) -> str:
    """Text for one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    """The same as code, in which nothing needs an escape; empty for nothing."""
    return f"`{' '.join(str(text).split())}`" if str(text) else ""


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# -- the command line ------------------------------------------------------------------------------


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The verbs that a parser itself defines; none for one without."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def commands() -> Iterator[argparse.ArgumentParser]:
    """Every command of `kie`, completely defined."""
    for name in cli.VERBS:
        parser = verbs(cli.parser([name]))[name]
        yield from verbs(parser).values() or [parser]


def spelled(action: argparse.Action) -> str:
    """An option as it is written, or an argument's name."""
    value = "" if action.nargs == 0 else f" {action.metavar or (action.dest).upper()}"
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return ", ".join(action.option_strings) + value


def default_of(action: argparse.Action) -> str:
    plain = action.default in (None, False, argparse.SUPPRESS) or action.default == []
    return "" if plain else code(action.default)


def command_table(parser: argparse.ArgumentParser) -> list[str]:
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        meaning = action.help or ""
        if action.choices:
            meaning = f"{meaning} ({', '.join(map(str, action.choices))})".strip()
        rows.append(f"| {code(spelled(action))} | {cell(meaning)} | {default_of(action)} |")
    return rows


def command_page() -> str:
    """All commands with their options."""
    lines = [
        "# Command line",
        "",
        "Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.",
    ]
    for parser in commands():
        lines += ["", f"## {parser.prog}", "", f"{sentence(parser.description or '')}", ""]
        lines += command_table(parser)
    return "\n".join(lines) + "\n"


# -- the Python interface --------------------------------------------------------------------------


def arguments_of(text: str) -> dict[str, str]:
    """The `Args:` section of a docstring by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        if entry := re.fullmatch(r"    (\w+): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return found


def without_arguments(text: str) -> str:
    return re.sub(r"^Args:\n(.*?)(?=^\S|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).strip()


def signature_table(call: Callable[..., Any], text: str) -> list[str]:
    """Parameters with types, defaults and what the docstring says."""
    meant = arguments_of(text)
    rows = ["| argument | type | default | meaning |", "|---|---|---|---|"]
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self":
            continue
        kind = "" if parameter.annotation is EMPTY else code(parameter.annotation)
        default = "" if parameter.default is EMPTY else code(repr(parameter.default))
        rows.append(f"| `{name}` | {kind} | {default} | {cell(meant.get(name, ''))} |")
    return rows


def field_table(cls: type) -> list[str]:
    """Fields of a dataclass with the strings below them."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef), "the source of a class is one"
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            meaning = ast.literal_eval(below.value)
            default = ast.unparse(field.value) if field.value else ""
            name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
            rows.append(f"| `{name}` | {code(kind)} | {code(default)} | {cell(meaning)} |")
    return rows


class Bare(str):
    """A type as it is written in the source, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def shown(call: Callable[..., Any]) -> str:
    """A signature without `self`."""
    signature = inspect.signature(call)
    parameters = [
        p if p.annotation is EMPTY else p.replace(annotation=Bare(p.annotation))
        for name, p in signature.parameters.items()
        if name != "self"
    ]
    result = signature.return_annotation
    result = result if result is EMPTY else Bare(result)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def members(cls: type) -> Iterator[tuple[str, str]]:
    """Public methods with their signatures and properties, each with its docstring."""
    for name, member in vars(cls).items():
        text = inspect.getdoc(member)
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property) or not callable(member):
            yield name, text
        else:
            yield f"{name}{shown(member)}", text


def class_section(cls: type) -> list[str]:
    text = inspect.getdoc(cls) or ""
    lines = ["", f"## kie.{cls.__name__}", "", block(without_arguments(text)), ""]
    if cls is sampling.SamplingParams:
        return lines + field_table(cls)
    if arguments_of(text):
        lines += signature_table(cls.__init__, text)
    for head, said in members(cls):
        lines += ["", f"### `{head.partition('(')[0]}`", ""]
        lines += ["```text", head, "```", ""] if "(" in head else []
        lines += [block(said)]
    return lines


def block(text: str) -> str:
    """A docstring as Markdown: sections as bold heads, their entries as a list."""
    text = re.sub(r"^(Args|Raises|Attributes):$", r"\n**\1**\n", text, flags=re.MULTILINE)
    return re.sub(r"^    (?=\S)", "- ", text, flags=re.MULTILINE)


def errors() -> Iterator[type[kie.KieError]]:
    for name in kie.__all__:
        found = getattr(kie, name)
        if isinstance(found, type) and issubclass(found, kie.KieError):
            yield found


def python_page() -> str:
    """Classes, results, errors and collectives."""
    lines = ["# Python", "", "`import kie` loads neither NumPy nor any GPU library."]
    for cls in INTERFACE:
        lines += class_section(cls)
    lines += ["", "## Grammars"]
    for cls in GRAMMARS:
        lines += ["", f"### kie.{cls.__name__}", "", block(inspect.getdoc(cls) or "")]
    lines += [
        "",
        "## Results",
        "",
        "Frozen data, made by the engine; `to_dict()` gives all fields.",
    ]
    for cls in RESULTS:
        lines += ["", f"### kie.{cls.__name__}", "", inspect.getdoc(cls) or "", ""]
        lines += [f"- `{n}`: {t}" for n, t in members(cls) if "(" not in n and t]
    lines += ["", "## Errors", "", "| class | code | meaning |", "|---|---|---|"]
    for error in errors():
        meaning = cell((inspect.getdoc(error) or "").split("\n\n")[0])
        lines.append(f"| `kie.{error.__name__}` | `{error.default_code}` | {meaning} |")
    lines += ["", "## kie.kccl", "", block(inspect.getdoc(kccl) or ""), ""]
    text = inspect.getdoc(kccl.Communicator) or ""
    return "\n".join(lines + signature_table(kccl.Communicator.__init__, text)) + "\n"


# -- the site --------------------------------------------------------------------------------------


def copied_page(path: str) -> str:
    """A file of the repository as a page: its links lead to pages, or to the source."""
    pages = {source: page for page, source in COPIED.items()}
    folder = (ROOT / path).parent

    def link(match: re.Match[str]) -> str:
        target, anchor = match[2].partition("#")[::2]
        if not target or "://" in target:
            return match[0]
        file = (folder / target).resolve().relative_to(ROOT).as_posix()
        return f"{match[1]}({pages.get(file, SOURCE + file)}{'#' + anchor if anchor else ''})"

    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"(\[[^\]]*\])\(([^)\s]+)\)", link, text)


def pages() -> dict[str, str]:
    """Every page that is made, by its place in the site."""
    made = {"reference/command-line.md": command_page(), "reference/python.md": python_page()}
    return made | {page: copied_page(source) for page, source in COPIED.items()}


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: adds the pages that are made, and the charts that they show."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    for chart in ("decode.svg", "scaling.svg"):
        content = (ROOT / "benches" / chart).read_text(encoding="utf-8")
        files.append(File.generated(config, f"pictures/{chart}", content=content))
    return files
