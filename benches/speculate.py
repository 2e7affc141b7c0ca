"""What drafts of tokens are worth: tokens a second with and without them, in turns.

    python benches/speculate.py [--model PATH] [--tokens 2000] [--rounds 5] [--record]

`edit`: an answer is expected of which 5 % of the tokens were changed, as a file is before an edit.
So that this holds for any model, the answer is the model's own greedy one, and what is expected is
made from it. `own repetitions`: nothing is expected, drafts come from the text. `nothing matches`:
ids drawn at random, sampled at a high temperature. `wrong`: every match is followed by another id.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import kie

BASELINES = Path(__file__).resolve().parent / "baselines.jsonl"
PROMPT = "def quicksort(items):\n"
CHANGED = 0.05


def edited(ids: list[int], source: random.Random, vocab: int) -> list[int]:
    """The ids with some drawn anew."""
    return [source.randrange(4, vocab) if source.random() < CHANGED else id for id in ids]


def works(engine: kie.Engine, tokens: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name a request, and what makes it draft."""
    source = random.Random(7)
    vocab = engine.info()["vocab"]
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
    prompt = engine.tokenize(PROMPT)
    answer = list(engine.generate(prompt, **greedy).token_ids)
    drawn = [source.randrange(4, vocab) for _ in range(200)]
    hot = greedy | {"temperature": 50.0, "seed": 5}
    # Behind each pair of the answer stands what does not follow it.
    wrong = [id for a, b in pairwise(answer) for id in (a, b, (b + 1) % vocab)]
    return {
        "edit": (greedy | {"prompt": prompt}, {"prediction": edited(answer, source, vocab)}),
        "nothing matches": (hot | {"prompt": drawn}, {"speculate": "lookup"}),
        "wrong": (greedy | {"prompt": prompt}, {"prediction": wrong[:tokens]}),
        "own repetitions": (greedy | {"prompt": prompt}, {"speculate": "lookup"}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens a second with drafts and without")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="into the baselines")
    args = parser.parse_args()
    record: dict[str, Any] = {"bench": "speculate", "date": str(date.today())}
    options = {"device": args.device, "threads": args.threads, "max_batch": 1}
    with kie.Engine(args.model, **options) as engine:
        record |= {"model": engine.info()["model"], "device": args.device, "tokens": args.tokens}
        record["machine"] = platform.processor() or platform.machine()
        for name, (request, drafts) in works(engine, args.tokens).items():
            speeds: list[tuple[float, float]] = []
            for _ in range(args.rounds):
                plain = engine.generate(**request)
                drafted = engine.generate(**request, **drafts)
                assert drafted.token_ids == plain.token_ids, name
                pair = (plain, drafted)
                speeds.append(tuple(done.timings.predicted_per_second for done in pair))
            without, with_drafts = (
                statistics.median(column) for column in zip(*speeds, strict=True)
            )
            ratio = statistics.median(b / a for a, b in speeds)
            timings = drafted.timings
            share = timings.draft_n_accepted / max(1, timings.draft_n)
            print(
                f"{name:16} {without:8.1f} -> {with_drafts:8.1f} tokens/s, {ratio:.2f}x; "
                f"{timings.draft_n} drafted, {share:.0%} right"
            )
            record[name] = {"plain": without, "drafted": with_drafts, "ratio": ratio}
    if args.record:
        with BASELINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
