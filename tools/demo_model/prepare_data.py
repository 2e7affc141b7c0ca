"""Collect Python source, train a tokenizer on it and write token files.

    python prepare_data.py --out data [--wheels FOLDER] [--tokenizer tokenizer.json]

Written under --out, for the splits train and val:

    tokenizer.json   byte-level BPE
    SPLIT.bin        uint16 tokens, documents one after the other, each  <s> ... </s>
    SPLIT.idx        int64 start of every document, one more than there are documents
    SPLIT.kind       uint8 kind of every document, an index into KINDS
    sources.json     packages, versions, licences, byte and token counts
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from extract import Record, process
from samples import Document, document, primer_samples, samples_of
from sources import STDLIB, find
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

KINDS = ["file", "test", "function", "chat", "primer", "talk"]
# How often a document of each kind is used in one epoch (every function has two chat variants).
EPOCH_WEIGHT = {
    "file": 1.0,
    "test": 0.4,
    "function": 1.0,
    "chat": 0.4,
    "primer": 1.5,
    "talk": 20.0,
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>"]
BOS = SPECIAL.index("<s>")

# Words take one leading space or underscore; digits stand alone; every newline is one piece and so
# is every run of spaces. A prompt that ends after ":", after the newline or after the indentation
# then splits as the training text does. No look-around: any regex engine can run it.
PATTERN = r"[ _]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n| {2,}|\s"


def keep_fresh(records: list[Record], bytes_per_package_max: float) -> list[Record]:
    """Drop exact and near duplicates: a file must not repeat over 70 % of lines seen before.

    Small packages come first, so that shared code counts for its likely origin; code before tests.
    """
    size: dict[str, int] = {}
    for record in records:
        size[record.package] = size.get(record.package, 0) + len(record.text)

    def rank(r: Record) -> tuple[bool, bool, int, str, str]:
        return r.is_test, r.package != STDLIB, size[r.package], r.package, r.order

    seen: set[str] = set()
    seen_lines: set[int] = set()
    taken: dict[str, int] = {}
    kept: list[Record] = []
    for record in sorted(records, key=rank):
        if record.sha in seen or taken.get(record.package, 0) > bytes_per_package_max:
            continue
        repeated = sum(line in seen_lines for line in record.lines)
        if record.lines and repeated > 0.7 * len(record.lines):
            continue
        seen.add(record.sha)
        seen_lines.update(record.lines)
        taken[record.package] = taken.get(record.package, 0) + len(record.text)
        kept.append(record)
    return kept


def limit_tests(records: list[Record], share: float) -> list[Record]:
    """All code, and test files up to `share` of the code's size, in a fixed random order."""
    budget = share * sum(len(r.text) for r in records if not r.is_test)
    files: list[Record] = []
    for record in sorted(records, key=lambda r: r.order):
        if record.is_test:
            if budget <= 0:
                continue
            budget -= len(record.text)
        files.append(record)
    return files


@dataclass
class Splits:
    """Training and held-out documents, and how many distinct functions they hold."""

    train: list[Document]
    val: list[Document]
    functions: int


def split(files: list[Record], packages: dict[str, dict[str, Any]], per_mille: int) -> Splits:
    """Hold out `per_mille` of the code files with their functions. Counts files in `packages`."""
    train, val = primer_samples(), list[Document]()
    keys: set[str] = set()
    for record in files:
        held_out = not record.is_test and int(record.sha[:8], 16) % 1000 < per_mille
        documents = val if held_out else train
        documents.append(("test" if record.is_test else "file", document(record.text)))
        fresh = [item for item in record.functions if item.key not in keys]
        keys.update(item.key for item in fresh)
        documents += samples_of(fresh, random.Random(record.order))
        package = packages[record.package]
        package["files"] = package.get("files", 0) + 1
        package["bytes"] = package.get("bytes", 0) + len(record.text.encode())
    random.Random(0).shuffle(train)
    return Splits(train, val, len(keys))


def train_tokenizer(
    documents: list[Document], more: list[str], vocab: int, characters_max: float
) -> Tokenizer:
    """Byte-level BPE over the first `characters_max` characters of code and chats, and `more`."""
    texts = list(more)
    left = characters_max
    for kind, text in documents:
        if left > 0 and kind in ("file", "function", "chat", "primer"):
            texts.append(re.sub(r"</?s>|<\|\w+\|>", "", text))
            left -= len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", BOS)]
    )
    if [tokenizer.token_to_id(s) for s in SPECIAL] != list(range(len(SPECIAL))):
        raise RuntimeError("the special tokens are not the first ids")
    if tokenizer.get_vocab_size() != vocab:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} ids, wanted {vocab}: too little text")
    return tokenizer


def write(out: Path, name: str, documents: list[Document], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write one split; documents, tokens and bytes of each kind come back."""
    ids: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
    for start in range(0, len(documents), 4096):
        texts = [text for _, text in documents[start : start + 4096]]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids += [np.array(e.ids, np.uint16) for e in encoded]
    lengths = np.array([len(i) for i in ids], np.int64)
    kinds = np.array([KINDS.index(kind) for kind, _ in documents], np.uint8)
    np.concatenate(ids).tofile(out / f"{name}.bin")
    np.concatenate([[0], lengths.cumsum()]).astype(np.int64).tofile(out / f"{name}.idx")
    kinds.tofile(out / f"{name}.kind")
    return {
        kind: {
            "documents": int((kinds == i).sum()),
            "tokens": int(lengths[kinds == i].sum()),
            "bytes": sum(len(text.encode()) for k, text in documents if k == kind),
        }
        for i, kind in enumerate(KINDS)
    }


def check_round_trip(tokenizer: Tokenizer, documents: list[Document]) -> None:
    text = next(text for kind, text in documents if kind == "file")[3:-4]
    if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) != text:
        raise RuntimeError("encoding and decoding a file does not give it back")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collect Python source and write token files.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("data"))
    add("--vocab", type=int, default=4096)
    add("--package-mb-max", type=float, default=20, help="most text taken from one package")
    add("--test-share", type=float, default=0.2, help="test code as a share of the other code")
    add("--tokenizer-mb", type=float, default=60, help="text the tokenizer is trained on")
    add("--val-per-mille", type=int, default=10)
    add("--wheels", type=Path, help="a folder of wheels, as pip download leaves them")
    add("--tokenizer", type=Path, help="use this tokenizer.json, train none")
    add("--generated-text", type=Path, help="text of generated tasks for the tokenizer")
    add("--files-max", type=int, default=0, help="look at this many files only, for a smoke test")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found = find(args.wheels)
    jobs = found.jobs
    if args.files_max:
        jobs = random.Random(0).sample(jobs, min(args.files_max, len(jobs)))
    print(f"{len(jobs)} files, {len(found.packages)} packages", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        records = [r for r in pool.map(process, jobs, chunksize=64) if r]
    files = limit_tests(keep_fresh(records, args.package_mb_max * 1e6), args.test_share)
    print(f"{len(records)} files accepted, {len(files)} kept", flush=True)

    splits = split(files, found.packages, args.val_per_mille)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        more = args.generated_text.read_text().split("\n\n\n") if args.generated_text else []
        tokenizer = train_tokenizer(splits.train, more, args.vocab, args.tokenizer_mb * 1e6)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    check_round_trip(tokenizer, splits.train)
    counts = {
        "train": write(args.out, "train", splits.train, tokenizer),
        "val": write(args.out, "val", splits.val, tokenizer),
    }
    used = {name: entry for name, entry in sorted(found.packages.items()) if entry.get("bytes")}
    report = {
        "python": platform.python_version(),
        "packages": used,
        "excluded": found.excluded,
        "functions": splits.functions,
        "epoch_weight": EPOCH_WEIGHT,
        "counts": counts,
    }
    (args.out / "sources.json").write_text(json.dumps(report, indent=1))
    for name, kinds in counts.items():
        for kind, count in kinds.items():
            rate = count["bytes"] / max(1, count["tokens"])
            print(f"{name} {kind}: {count['tokens']} tokens, {rate:.2f} bytes a token")
    print("excluded:", ", ".join(sorted(found.excluded)))


if __name__ == "__main__":
    main()
