"""Throws hostile cases at kie, and reports those that kill it, hang it or confuse its errors.

    python tests/attack [--seconds 600] [--seed N] [--only NAME] [--short]

Each file of `generators/` is a plug-in with

    def cases(random: Random) -> Iterator[Case]     endless; a case is JSON: a dict
    def run(case: Case, folder: Path) -> None       raises what must not happen; `folder` is empty
    LIMIT_BYTES: int                                address space of the process that runs it
    LIMIT_SECONDS: float                            most that a case may take

and knows nothing of the others. Cases run one after the other in a child process, which is
replaced when it dies. A finding (a death, a time out, an exception that `run` lets out) is written
to `corpus/` as `NAME-HASH.json` and told; what is mended stays there, is replayed first in every
run, and has a line in CHANGELOG.md. The same seed draws the same cases.

Exit codes: 0 nothing found, 1 findings.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
Case = dict[str, Any]

# Of a plug-in that names none.
LIMIT_BYTES = 6 << 30
LIMIT_SECONDS = 60.0


def plugins() -> list[str]:
    """Names of the generators."""
    found = sorted(file.stem for file in (HERE / "generators").glob("*.py"))
    return [name for name in found if not name.startswith("_")]


def plugin(name: str) -> ModuleType:
    """A generator."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module(f"generators.{name}")


def corpus(name: str) -> Iterator[Case]:
    """Cases that were found before."""
    for file in sorted(CORPUS.glob(f"{name}-*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


@dataclass
class Finding:
    """A case and what it did."""

    name: str
    case: Case
    what: str

    def write(self) -> Path:
        """Adds it to the corpus."""
        text = json.dumps(self.case, sort_keys=True, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        CORPUS.mkdir(exist_ok=True)
        file = CORPUS / f"{self.name}-{digest}.json"
        file.write_text(text + "\n", encoding="utf-8")
        return file


class Child:
    """A process that runs cases of one generator."""

    def __init__(self, name: str) -> None:
        module = plugin(name)
        self.name = name
        self.seconds = float(getattr(module, "LIMIT_SECONDS", LIMIT_SECONDS))
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )

    def run(self, case: Case) -> str | None:
        """What went wrong, if anything did; the child may be gone then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(case).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self.end()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(self.seconds):
                self.end()
                return f"took more than {self.seconds:g} s"
        answer = self.process.stdout.readline()
        if not answer:
            return self.end()
        return json.loads(answer)

    def end(self) -> str:
        """Kills it with all that it started; how it ended and what it said last."""
        try:
            code = self.process.wait(1 if self.process.poll() is None else None)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()[-2000:].decode(errors="replace")
        self.errors.close()
        how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{how}: {said}".strip()

    @property
    def is_alive(self) -> bool:
        """Whether it takes another case."""
        return not self.errors.closed and self.process.poll() is None


def serve(name: str) -> None:
    """The child: a case a line in, null or what went wrong out."""
    module = plugin(name)
    most = int(getattr(module, "LIMIT_BYTES", LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Cases may close or fill what is standard.
    lines = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    for line in lines:
        wrong = None
        with tempfile.TemporaryDirectory(prefix="kie-attack-") as folder:
            try:
                module.run(json.loads(line), Path(folder))
            except BaseException:
                wrong = traceback.format_exc(limit=-6)
        answers.write(json.dumps(wrong).encode() + b"\n")
        answers.flush()


def attack(names: list[str], seed: int, seconds: float, replay: bool) -> list[Finding]:
    """Replays the corpus, then draws cases in turn until the time is over."""
    findings: list[Finding] = []
    counts = dict.fromkeys(names, 0)
    children = {name: Child(name) for name in names}

    def throw(name: str, case: Case) -> None:
        child = children[name]
        if not child.is_alive:
            child = children[name] = Child(name)
        counts[name] += 1
        wrong = child.run(case)
        if wrong is not None:
            findings.append(Finding(name, case, wrong))

    if replay:
        for name in names:
            for case in corpus(name):
                throw(name, case)
    drawn = {name: plugin(name).cases(random.Random(f"{seed}-{name}")) for name in names}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # Each gets as long as the others, however many cases that is.
        for name in names:
            slot = time.monotonic() + min(2.0, seconds / len(names) / 2)
            while time.monotonic() < min(slot, until):
                throw(name, next(drawn[name]))
    for child in children.values():
        child.end()
    print(", ".join(f"{name} {count}" for name, count in counts.items()), "cases")
    return findings


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests/attack", description="Attacks kie.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of drawn cases")
    parser.add_argument("--seed", type=int, default=20261121, help="draws the cases")
    parser.add_argument("--only", action="append", choices=plugins(), help="repeatable")
    parser.add_argument("--short", action="store_true", help="the corpus and 8 s of new cases")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        serve(given.child)
        return 0
    seconds = 8.0 if given.short else given.seconds
    findings = attack(given.only or plugins(), given.seed, seconds, replay=True)
    for finding in findings:
        print(f"\n{finding.name}: {finding.write()}\n{finding.what}", file=sys.stderr)
    print(f"{len(findings)} findings, seed {given.seed}")
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main())
