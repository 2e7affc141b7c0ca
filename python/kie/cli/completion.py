"""`kie completion`: words for a shell, taken from the parsers themselves."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any, cast

from kie.cli import options

BASH = """\
_kie() {{
  local verb=${{COMP_WORDS[1]}} word=${{COMP_WORDS[COMP_CWORD]}}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case $verb in
{cases}
  esac
  [ "${{word#-}}" = "$word" ] && COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -o filenames -F _kie kie
"""

ZSH = """\
#compdef kie
autoload -U +X bashcompinit && bashcompinit
"""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    options.verb(parser, completion)


def completion(given: Namespace) -> None:
    """Prints the script; `eval "$(kie completion bash)"` in ~/.bashrc loads it."""
    known = words()
    if given.shell == "fish":
        print(_fish(known), end="")
        return
    print((ZSH if given.shell == "zsh" else "") + _bash(known), end="")


def words() -> dict[str, list[str]]:
    """The words that may follow each verb."""
    from kie.cli import VERBS

    found: dict[str, list[str]] = {}
    for verb in VERBS:
        parser = ArgumentParser(prog=f"kie {verb}")
        import_module(f"kie.cli.{verb}").define(parser)
        found[verb] = sorted(_words(parser))
    return found


def _words(parser: ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:  # argparse has no other list of them
        found.update(word for word in action.option_strings if word.startswith("--"))
        choices: Any = action.choices
        if isinstance(choices, dict):  # verbs of a verb
            children = cast("dict[str, ArgumentParser]", choices)
            for name, child in children.items():
                found |= {name, *_words(child)}
        elif choices is not None and not action.option_strings:
            found.update(map(str, choices))
    return found


def _bash(known: dict[str, list[str]]) -> str:
    line = '    {}) COMPREPLY=($(compgen -W "{}" -- "$word")) ;;'
    cases = "\n".join(line.format(verb, " ".join(follow)) for verb, follow in known.items())
    return BASH.format(verbs=" ".join(known), cases=cases)


def _fish(known: dict[str, list[str]]) -> str:
    from kie.cli import VERBS

    lines: list[str] = []
    for verb, follow in known.items():
        help_line = VERBS[verb].replace("'", "")
        lines.append(f"complete -c kie -n __fish_use_subcommand -a {verb} -d '{help_line}'")
        for word in follow:
            how = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c kie -n '__fish_seen_subcommand_from {verb}' {how}")
    return "\n".join(lines) + "\n"
