"""The default model's generated training text: see `generator/`.

    python generate.py shards OUT TOKENIZER FIRST LAST DOCUMENTS [--workers N]
    python generate.py text COUNT OUT          plain text, for the tokenizer
    python generate.py show COUNT [--seed S]   documents, what is not learned in brackets
    python generate.py held-out COUNT OUT      tasks of compositions that are never trained on

A shard is a flat file of uint16 tokens. Bit 14 marks a token that is read and not learned. Shard N
has the seed 1,000,003 * (N + 1).
"""

from __future__ import annotations

import argparse
import json
import os
import re
from multiprocessing import Pool
from pathlib import Path

from generator.documents import documents, held_out_tasks

NOT_LEARNED = 0x4000
TEXT_SEED = 99


def write_shard(job: tuple[Path, Path, int, int]) -> tuple[int, int]:
    """Make one shard unless it is there: its number and its tokens."""
    import numpy as np
    from tokenizers import Tokenizer

    out, tokenizer, shard, count = job
    path = out / f"synth_{shard:05d}.bin"
    if path.exists():
        return shard, 0
    segments = [segment for d in documents(1_000_003 * (shard + 1), count) for segment in d]
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch_fast(
        [text for text, _ in segments], add_special_tokens=False
    )
    tokens = np.concatenate(
        [
            np.array(part.ids, np.uint16) | (0 if learned else NOT_LEARNED)
            for part, (_, learned) in zip(encoded, segments, strict=True)
        ]
    ).astype(np.uint16)
    partial = path.with_suffix(".tmp")
    tokens.tofile(partial)
    partial.rename(path)
    return shard, len(tokens)


def shards(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs = [(args.out, args.tokenizer, n, args.documents) for n in range(args.first, args.last)]
    total = 0
    with Pool(args.workers) as pool:
        for shard, tokens in pool.imap_unordered(write_shard, jobs):
            total += tokens
            print(f"shard {shard}: {total / 1e6:.1f} M tokens", flush=True)


def text(args: argparse.Namespace) -> None:
    with args.out.open("w", encoding="utf-8") as file:
        for found in documents(TEXT_SEED, args.count):
            plain = re.sub(r"</?s>|<\|\w+\|>", "", "".join(part for part, _ in found))
            file.write(plain + "\n")


def show(args: argparse.Namespace) -> None:
    for found in documents(args.seed, args.count):
        print("-" * 60)
        print("".join(part if learned else f"[{part}]" for part, learned in found))


def held_out(args: argparse.Namespace) -> None:
    args.out.write_text(json.dumps(held_out_tasks(args.count), indent=1), encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The default model's generated training text.")
    commands = parser.add_subparsers(required=True)
    for run, name in ((shards, "shards"), (text, "text"), (show, "show"), (held_out, "held-out")):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        if run is shards:
            command.add_argument("out", type=Path)
            command.add_argument("tokenizer", type=Path)
            for number in ("first", "last", "documents"):
                command.add_argument(number, type=int)
            command.add_argument("--workers", type=int)
            continue
        command.add_argument("count", type=int)
        if run is show:
            command.add_argument("--seed", type=int, default=5)
        else:
            command.add_argument("out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    args = parsed()
    args.run(args)
