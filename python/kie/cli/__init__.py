"""`kie`: one file a verb, of which only the one in use is imported.

Parsed by argparse: a first token within 250 ms of process start leaves no room for more.

Exit codes: 0 done, 1 an error (one line of cause, one of remedy; `-v` shows the chain),
2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

VERBS = {
    "run": "continue one prompt and stream the text",
    "demo": "the model of the package answers prompts that suit it",
    "chat": "talk with a model, its keys and values kept between turns",
    "serve": "serve a model over HTTP, as OpenAI's clients expect it",
    "info": "print Spec, Plan, memory and roofline of a model on a device",
    "compile": "compile a model's kernels for a GPU ahead, so that it opens at once",
    "doctor": "look at this machine: what there is, what kie uses, what is missing",
    "models": "list the architectures that kie runs, with public checkpoints of each",
    "tokenize": "print the token ids of a text",
    "quantize": "write a model again with its matrices in 8 or 4 bits",
    "pull": "download a model from the hub, resuming what was begun",
    "bench": "measure, and compare what was measured",
    "completion": "print what completes these words in a shell",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    closed = _fill_descriptors()
    parsed = None
    try:
        # Prints and leaves where help or the version is asked for.
        parsed = parser(words).parse_args(words or ["--help"])
        if 1 in closed:
            raise OSError("standard output is closed")
        code = parsed.call(parsed) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = 130
    except Exception as error:
        if parsed and parsed.verbose:
            raise
        report_error(error, _verb(words))
        _drop_output()
        code = 1
    sys.exit(code)


def _fill_descriptors() -> list[int]:
    """Puts /dev/null where standard input, output or error are closed; says which were.

    Otherwise the next file that is opened gets their number, and Python has no stream for them.
    """
    closed: list[int] = []
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(descriptor)
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            stream = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    return closed


def _drop_output() -> None:
    """What cannot be written now cannot be written when Python flushes at exit, either."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _verb(words: Sequence[str]) -> str | None:
    return next((word for word in words if not word.startswith("-")), None)


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for `words`: complete only for the verb that they name."""
    root = argparse.ArgumentParser(
        prog="kie", description="Run a language model as fast as this machine allows."
    )
    root.add_argument("--version", action=_Version, nargs=0, help="version, commit and devices")
    verbs = root.add_subparsers(metavar="VERB", required=True)
    chosen = _verb(words)
    for name, line in VERBS.items():
        verb = verbs.add_parser(name, help=line, description=line)
        if name == chosen:
            import_module(f"kie.cli.{name}").define(verb)
    return root


class _Version(argparse.Action):
    """Prints what this is and what it runs on; the devices are asked for only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from kie import __version__, _kie

        gpus, _refused = _kie.gpus()
        devices = ["cpu", *(f"{gpu[0]} ({gpu[1]})" for gpu in gpus)]
        print(f"kie {__version__} ({_kie.__commit__}), devices: {', '.join(devices)}")
        parser.exit()


def report_error(error: Exception, verb: str | None) -> None:
    """Prints one line of cause and one of remedy; what is wrong with a request is in its words."""
    from kie.errors import InvalidRequestError, KieError

    details = "run again with -v for the details"
    if isinstance(error, InvalidRequestError):
        details = f"`kie {verb} --help` lists what there is to say"
    if isinstance(error, KieError):
        cause, remedy = error.message, error.hint or details
    elif isinstance(error, OSError) and error.filename is not None:
        cause = f"{error.filename}: {error.strerror}"
        remedy = "check the path, and whether it may be read and written"
    else:
        cause, remedy = f"{type(error).__name__}: {error}", details
    print(f"error: {(cause.splitlines() or [''])[0]}", file=sys.stderr)
    print(f"hint: {remedy}", file=sys.stderr)
