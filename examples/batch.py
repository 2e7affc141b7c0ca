"""Many prompts through one engine: a line of JSON an answer, in the order of the prompts.

    python examples/batch.py [MODEL] < prompts.txt

As many requests run as the engine has slots; the next one starts when the oldest has ended.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator

import kie

SLOTS = 4


def complete_all(engine: kie.Engine, prompts: Iterable[str]) -> Iterator[kie.Completion]:
    """The prompts' completions, in order; at most SLOTS requests are in the engine."""
    running: deque[kie.Stream] = deque()
    for prompt in prompts:
        if len(running) == SLOTS:
            yield running.popleft().result()
        messages = [{"role": "user", "content": prompt}]
        running.append(engine.stream(messages=messages, temperature=0, max_tokens=128))
    while running:
        yield running.popleft().result()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    prompts = [line.strip() for line in sys.stdin if line.strip()]
    with kie.Engine(model, max_batch=SLOTS) as engine:
        for prompt, done in zip(prompts, complete_all(engine, prompts), strict=True):
            print(json.dumps({"prompt": prompt, "text": done.text, "end": done.finish_reason}))


if __name__ == "__main__":
    main()
