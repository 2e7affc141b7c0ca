"""How long a session takes to a file and back: `python benches/session.py`.

The model of the package on the CPU, a session of `--tokens` tokens. Loading is measured in an
engine that is open, whose cache holds nothing of the session; the file was just written, so its
bytes lie in the system's page cache. The limit is 50 ms; exit code 1 beyond it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import kie

LIMIT_MS = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    saves, loads, size = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.kie"
        with kie.Engine(device="cpu") as engine:
            session = engine.session()
            text = "x = 1\n"
            one = len(engine.tokenize(text * 100, add_special=False)) / 100
            text *= int(given.tokens / one)
            session.stream(text, max_tokens=1, temperature=0).result()
            for _ in range(given.rounds):
                began = time.perf_counter()
                session.save(path)
                saves.append(1e3 * (time.perf_counter() - began))
            size = path.stat().st_size
            prompt = session.stream("y", max_tokens=1, temperature=0).result().usage
        for _ in range(given.rounds):
            with kie.Engine(device="cpu") as engine:
                engine.warmup()
                began = time.perf_counter()
                loaded = engine.load_session(path)
                loads.append(1e3 * (time.perf_counter() - began))
                usage = loaded.stream("y", max_tokens=1, temperature=0).result().usage
                assert usage.cached_tokens == prompt.cached_tokens, usage
    saved, loaded_ms = statistics.median(saves), statistics.median(loads)
    print(
        f"{prompt.prompt_tokens} tokens, {prompt.cached_tokens} cached, {size / 1e6:.1f} MB: "
        f"saved in {saved:.1f} ms, loaded in {loaded_ms:.1f} ms (medians of {given.rounds}; limit"
        f" {LIMIT_MS:.0f} ms)"
    )
    return int(loaded_ms > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
