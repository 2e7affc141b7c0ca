"""How long calls go on behind Ctrl-C, and behind `timeout=`.

    python benches/interrupts.py [--rounds 20] [--only NAME,...]

A signal comes at a random moment of a call that would take much longer; the time is from the
signal to KeyboardInterrupt in the caller. Of `timeout=` it is what the call takes beyond it. Prints
p50 and the longest of each, in milliseconds; more than 50 is too long on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import kie

# An import that a signal cuts short cannot be made again.
import numpy as np  # noqa: F401

WANTED_MS = 50.0
TEXT_ROUNDS = 4
IDS = [5] * 10**7
WORDS = "some words, and more. " * 340_000  # 7.5 MB
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "llama"
MESSAGES = [{"role": "user", "content": "a"}]


def pressed(call: Callable[[], object], after_s: float) -> float | None:
    """Seconds from a signal to the exception; None where the call ended before."""
    moment = 0.0

    def press() -> None:
        nonlocal moment
        time.sleep(after_s)
        moment = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    try:
        finger.start()
        call()
        ended = True
        finger.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        late = time.perf_counter() - moment
        finger.join()
        return None if "ended" in locals() else late
    return None


def beyond(call: Callable[[float], object], limit_s: float) -> float:
    """Seconds that a call takes beyond its timeout."""
    begun = time.perf_counter()
    with contextlib.suppress(kie.KieError):
        call(limit_s)
    return time.perf_counter() - begun - limit_s


def hung(folder: Path) -> kie.Engine:
    """An engine whose chat template does not end by itself."""
    for file in TINY.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    return kie.Engine(folder, device="cpu", threads=1)


def calls(
    engine: kie.Engine, stuck: kie.Engine
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[float], object]]]:
    """What is interrupted, and what is given a timeout."""
    long = {"max_tokens": 1800, "ignore_eos": True}
    # A pass of 512 positions takes as long as any, and a fresh session computes all of them.
    prompt = "def f(x):\n    return x + 1\n" * 100

    def queued() -> object:
        with engine.session() as chat, chat.stream("def f", **long):
            return chat.stream("b", max_tokens=5)

    def turn(limit_s: float) -> object:
        with engine.session() as chat:
            return chat.stream(f"{random.random()} {prompt}", timeout=limit_s).result()

    signals: dict[str, Callable[[], object]] = {
        "open": lambda: kie.Engine(device="cpu").close(),
        "open, tiny": lambda: [kie.Engine(TINY, device="cpu").close() for _ in range(50)],
        "open, quantised": lambda: [
            kie.Engine(TINY, device="cpu", dtype="fp8").close() for _ in range(50)
        ],
        "generate": lambda: engine.generate("def f", **long),
        "stream": lambda: list(engine.stream("def f", **long)),
        "turn behind a turn": queued,
        "logits, decode": lambda: engine.logits([5] * 1900, path="decode"),
        "logits, prefill": lambda: [engine.logits([5] * 1900) for _ in range(9)],
        "detokenize": lambda: engine.detokenize(IDS),
        "template": lambda: stuck.apply_chat_template(MESSAGES),
        "generate on messages": lambda: stuck.generate(messages=MESSAGES),
        "tokenize 7.5 MB": lambda: engine.tokenize(WORDS),
        "generate on 7.5 MB": lambda: engine.generate(WORDS),
    }
    timeouts: dict[str, Callable[[float], object]] = {
        "generate": lambda t: engine.generate("def f", timeout=t, **long),
        "generate on messages": lambda t: stuck.generate(messages=MESSAGES, timeout=t),
        "turn": turn,
        "generate on 7.5 MB": lambda t: engine.generate(WORDS, timeout=t),
    }
    return signals, timeouts


def main() -> int:
    """Measures all and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="names, with commas between")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    late: dict[str, list[float]] = {}

    def rounds(name: str) -> int:
        # What is given up of a long text works on for seconds, 16 at a time at most.
        most = TEXT_ROUNDS if "7.5 MB" in name else given.rounds
        return most if not only or name in only else 0

    with (
        tempfile.TemporaryDirectory() as folder,
        kie.Engine(device="cpu") as engine,
        hung(Path(folder)) as stuck,
    ):
        signals, timeouts = calls(engine, stuck)
        # Those with long texts come last: what is given up of them takes time from the others.
        for texts in (False, True):
            for name, call in signals.items():
                for _ in range(rounds(name) if ("7.5 MB" in name) == texts else 0):
                    after = pressed(call, random.uniform(0.002, 0.2))
                    if after is not None:
                        late.setdefault(f"Ctrl-C: {name}", []).append(after)
            for name, timed in timeouts.items():
                for _ in range(rounds(name) if ("7.5 MB" in name) == texts else 0):
                    found = beyond(timed, random.uniform(0.02, 0.2))
                    late.setdefault(f"timeout=: {name}", []).append(found)
        begun = time.perf_counter()
        with contextlib.suppress(kie.KieError):
            engine.generate(range(10**12))
        late["generate(range(10**12)), refused"] = [time.perf_counter() - begun]
    print(f"{'call':36} {'times':>5} {'p50 ms':>8} {'max ms':>8}")
    for name, times in late.items():
        p50, most = statistics.median(times) * 1e3, max(times) * 1e3
        mark = "" if most <= WANTED_MS else f"  more than {WANTED_MS:.0f}"
        print(f"{name:36} {len(times):5} {p50:8.1f} {most:8.1f}{mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
