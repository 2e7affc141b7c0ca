"""What drafts of tokens are worth: tokens a second with and without them, in turns.

    python benches/speculate.py [--model PATH | --shape NAME] [--device cuda:0] [--tokens 2000]
        [--context 0] [--works edit,repeat,...] [--rounds 5] [--mtp 0.09] [--record]

With a shape's random weights (kie.bench.random_weights) and a context of ids drawn at random a text
says nothing, so what is right is made from the model's own answer, drawn with a seed at temperature
1, since greedy ones of random weights go round in circles:

`mtp`, greedy: the model's own layer drafts. Random layers predict nothing, so with `--mtp` what all
layers add is next to nothing: the next token is a matter of the last one, which that layer takes in
as it is, but for noise of so much; at 0.09 four of five drafts are right. A step reads and computes
what it would. `repeat`: that answer is expected. `edit`: 5 % of its tokens are others, as in a file
before an edit. `adversarial`: ids drawn at random, sampled at a high temperature: nothing matches.
`wrong`: every match is followed by another id. `own`: nothing is expected, drafts come from the
text.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import kie
import numpy as np
from kie.bench import random_weights

BASELINES = Path(__file__).resolve().parent / "baselines.jsonl"
PROMPT = "def quicksort(items):\n"
CHANGED = 0.05
TARGETS = {"repeat": 3.5, "edit": 3.5, "adversarial": 0.98, "wrong": 0.98}
"""Of a GPU: tokens a second over those without drafts."""


def edited(ids: list[int], source: random.Random, vocab: int) -> list[int]:
    """The ids with some drawn anew."""
    return [source.randrange(4, vocab) if source.random() < CHANGED else id for id in ids]


def works(
    engine: kie.Engine, tokens: int, context: int
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name a request, and what makes it draft. `context`: ids of the prompt, drawn at random; 0
    for a line of text."""
    source = random.Random(7)
    vocab = engine.info()["vocab"]
    own: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True, "max_tokens": tokens}
    drawn = [source.randrange(4, vocab) for _ in range(context or 200)]
    prompt = drawn if context else engine.tokenize(PROMPT)
    answer = list(engine.generate(prompt, **own).token_ids)
    hot = own | {"temperature": 50.0, "seed": 5}
    # Behind each pair of the answer stands what does not follow it.
    wrong = [id for a, b in pairwise(answer) for id in (a, b, (b + 1) % vocab)]
    greedy = own | {"temperature": 0.0}
    return {
        "mtp": (greedy | {"prompt": prompt}, {"speculate": "mtp"}),
        "repeat": (own | {"prompt": prompt}, {"prediction": answer}),
        "edit": (own | {"prompt": prompt}, {"prediction": edited(answer, source, vocab)}),
        "adversarial": (hot | {"prompt": drawn}, {"speculate": "lookup"}),
        "wrong": (own | {"prompt": prompt}, {"prediction": wrong[:tokens]}),
        "own": (own | {"prompt": prompt}, {"speculate": "lookup"}),
    }


def measure(
    engine: kie.Engine, request: dict[str, Any], drafts: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Medians over rounds of a request with and without drafts, one after the other."""
    speeds: list[tuple[float, float]] = []
    for _ in range(rounds):
        plain = engine.generate(**request)
        drafted = engine.generate(**request, **drafts)
        assert drafted.token_ids == plain.token_ids, "drafts changed a token"
        pair = (plain, drafted)
        speeds.append(tuple(done.timings.predicted_per_second for done in pair))
    without, with_drafts = (statistics.median(column) for column in zip(*speeds, strict=True))
    tokens, timings = len(drafted.token_ids), drafted.timings
    return {
        "plain": without,
        "drafted": with_drafts,
        "ratio": statistics.median(b / a for a, b in speeds),
        "drafts": timings.draft_n,
        "right": timings.draft_n_accepted,
        "tokens_a_step": tokens / (tokens - timings.draft_n_accepted),
    }


@contextmanager
def folder(given: argparse.Namespace) -> Iterator[str | Path | None]:
    """The model, or random weights of a shape, in memory where that is a file system."""
    if given.shape is None:
        yield given.model
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kie-", dir=memory) as name:
        written = random_weights.write(given.shape, Path(name), mtp=given.mtp is not None)
        if given.mtp is not None:
            make_predictable(written / "model.safetensors", given.mtp)
        yield written


def make_predictable(path: Path, noise: float) -> None:
    """Has what layers add be next to nothing, and a layer of multi-token prediction take in the
    embedding of the last token, with noise of so much.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    stored = np.memmap(path, np.uint8, "r+", 8 + size)
    numbers = np.random.default_rng(5)
    for name, told in header.items():
        begin, end = told["data_offsets"]
        part, module = stored[begin:end], name.removesuffix("_scale_inv")
        if name == "mtp.fc.weight" or name == "mtp.fc.weight_scale_inv":
            rows, columns = header["mtp.fc.weight"]["shape"]
            if told["dtype"] != "BF16":
                raise SystemExit("mtp.fc is expected in BF16: modules_to_not_convert")
            taken = np.zeros((rows, columns), np.float32)
            drawn = numbers.standard_normal((rows, rows), np.float32)
            taken[:, :rows] = np.eye(rows, dtype=np.float32) + noise * rows**-0.5 * drawn
            part[:] = (taken.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
        elif module.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            if told["dtype"] == "F32":
                part.view("<f4")[:] *= 1e-4
            elif told["dtype"] == "BF16":
                wide = (part.view("<u2").astype(np.uint32) << 16).view(np.float32) * 1e-4
                part.view("<u2")[:] = (wide.view(np.uint32) >> 16).astype("<u2")


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens a second with drafts and without")
    parser.add_argument("--model")
    parser.add_argument("--shape", help="random weights of this shape instead: laneformer-2b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--context", type=int, default=0, help="ids of the prompt, at random")
    parser.add_argument("--works", help="names; all unless given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mtp", type=float, help="noise of a layer that predicts further tokens")
    parser.add_argument("--record", action="store_true", help="into the baselines")
    args = parser.parse_args()
    record: dict[str, Any] = {"bench": "speculate", "date": str(date.today())}
    options = {"device": args.device, "threads": args.threads, "max_batch": 1}
    options |= {"mtp": args.mtp is not None}
    with folder(args) as model, kie.Engine(model, **options) as engine:
        record |= {"model": args.shape or engine.info()["model"], "device": args.device}
        record |= {"tokens": args.tokens, "context": args.context}
        record["machine"] = platform.processor() or platform.machine()
        all_works = works(engine, args.tokens, args.context)
        names = args.works.split(",") if args.works else list(all_works)
        if args.mtp is None and args.works is None:
            names.remove("mtp")
        for name in names:
            found = measure(engine, *all_works[name], args.rounds)
            target = f" (a GPU's target {TARGETS[name]})" if name in TARGETS else ""
            print(
                f"{name:12} {found['plain']:8.1f} -> {found['drafted']:8.1f} tokens/s, "
                f"{found['ratio']:.2f}x{target}; {found['tokens_a_step']:.2f} tokens a step, "
                f"{found['drafts']:.0f} drafted, {found['right']:.0f} right",
                flush=True,
            )
            record[name] = found
    if args.record:
        with BASELINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
