"""Tokenizers whose rules multiply, nest, contradict or stall, over texts that hurt them.

Opening ends with an engine or a LoadError; tokenizing with ids or an InvalidRequestError.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import TINY, model, typed

Case = dict[str, Any]
LIMIT_BYTES = 4 << 30
LIMIT_SECONDS = 120.0

FILE = "tokenizer.json"
TEXTS = ("", "a", "aaaa", "ab " * 50, "\u0301" * 64, "ﷺ" * 40, "\0", "é\u202e<|bos|>", "  \n\t")
PATTERNS = ("a", " ", "", ".", "(a+)+$", "(?:)", "\\s*", "[^x]", "(", "a{1,1000}{1,1000}", "\\p{L}")


def replace(random: Random) -> dict[str, Any]:
    """One writes a text for another."""
    kind = random.choice(("String", "Regex"))
    content = random.choice(("", "a", "aaaaaaaaaa", "▁", "a" * 5000))
    return {"type": "Replace", "pattern": {kind: random.choice(PATTERNS)}, "content": content}


def normalizer(random: Random, depth: int = 3) -> Any:
    """A rule, or rows of them."""
    match random.randrange(8):
        case 0 | 1 | 2:
            return replace(random)
        case 3:
            return {"type": random.choice(("NFC", "NFKD", "NFKC", "Lowercase", "Nmt"))}
        case 4:
            return {"type": "Prepend", "prepend": "a" * random.choice((1, 3000))}
        case 5 if depth == 0:
            return random.choice((None, 3, {"type": "Sequence"}, {"type": "Unknown"}))
        case 5:
            return {"type": "Precompiled", "precompiled_charsmap": random.choice(("", "AAAA", "x"))}
        case _:
            count = random.choice((1, 4, 12, 70))
            inner = [
                normalizer(random, depth - 1) if depth else replace(random) for _ in range(count)
            ]
            return {"type": "Sequence", "normalizers": inner}


def decoder(random: Random) -> Any:
    """The same the other way."""
    rows = [replace(random) for _ in range(random.choice((1, 3, 12)))]
    rows += [{"type": kind} for kind in random.sample(("ByteFallback", "Fuse", "ByteLevel"), 1)]
    random.shuffle(rows)
    return {"type": "Sequence", "decoders": rows}


def cases(random: Random) -> Iterator[Case]:
    """Changes to the tiny model's file, and texts."""
    while True:
        change: dict[str, Any] = {}
        if random.random() < 0.7:
            change["normalizer"] = normalizer(random)
        if random.random() < 0.3:
            change["decoder"] = decoder(random)
        if random.random() < 0.2:
            split = {"type": "Split", "pattern": {"Regex": random.choice(PATTERNS)},
                     "behavior": "Isolated", "invert": False}  # fmt: skip
            change["pre_tokenizer"] = split
        texts = [random.choice(TEXTS) * random.choice((1, 1, 30)) for _ in range(3)]
        yield {"change": change, "texts": texts, "timeout": random.choice((None, 0.05))}


def run(case: Case, folder: Path) -> None:
    """Opens a model with the tokenizer and has it tokenize and answer."""
    changed = copy.deepcopy(json.loads((TINY / FILE).read_text())) | case["change"]
    made = model(folder, {FILE: json.dumps(changed)})
    engine = typed(lambda: kie.Engine(made, device="cpu", threads=1, max_batch=1))
    if isinstance(engine, kie.LoadError):
        assert FILE in engine.message, engine.message
        return
    assert isinstance(engine, kie.Engine), repr(engine)
    with engine:
        for text in case["texts"]:
            ids = typed(lambda text=text: engine.tokenize(text))
            assert isinstance(ids, (list, kie.InvalidRequestError)), repr(ids)
            if isinstance(ids, list):
                typed(lambda ids=ids: engine.detokenize(ids))
        keywords = {"timeout": case["timeout"], "max_tokens": 3, "ignore_eos": True}
        done = typed(lambda: engine.generate(case["texts"][0], **keywords))
        assert isinstance(done, (kie.Completion, kie.InvalidRequestError)), repr(done)
