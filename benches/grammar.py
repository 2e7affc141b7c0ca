"""What a grammar costs: the first token of a new schema, and each token after it.

    python benches/grammar.py [MODEL] [--device cuda:0] [--threads N]

Requests with and without a grammar alternate, so that both see the same machine. The free ones have
the seed, the budget and the number of tokens of the others. Masks by themselves are measured by

    cargo test -p kie-core --lib grammar::tests::times -- --ignored --nocapture
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import kie

ROUNDS = 15
TOKENS = 160


def schema(n: int) -> dict[str, Any]:
    """About 2 kB that no other number gives."""
    member = {"type": "string", "description": f"Member of schema {n}, as tools describe theirs."}
    kinds = [member, {"type": "integer", "minimum": n}, {"enum": ["a", "b", str(n)]}]
    members = {f"member_{n}_{k}": kinds[k % 3] for k in range(24)}
    return {
        "type": "object",
        "properties": members,
        "required": list(members)[:8],
        "additionalProperties": False,
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    prompt = "# A function with its arguments.\ndef call("
    keywords: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": False}
    with kie.Engine(given.model, device=given.device, threads=given.threads) as engine:
        engine.warmup()
        engine.generate(prompt, **keywords)
        size = len(kie.JsonSchema(schema(0)).definition)
        first: dict[str, list[float]] = {"free": [], "new": [], "kept": []}
        each: dict[str, list[float]] = {"free": [], "grammar": []}
        drafted = accepted = tokens = 0
        for n in range(ROUNDS):
            grammar = kie.JsonSchema(schema(n))
            new = engine.generate(prompt, grammar=grammar, seed=n, **keywords)
            kept = engine.generate(prompt, grammar=grammar, seed=n, **keywords)
            count = len(new.token_ids)
            same: Any = {**keywords, "max_tokens": count, "min_tokens": count}
            free = engine.generate(prompt, seed=n, **same)
            for name, done in (("new", new), ("kept", kept), ("free", free)):
                first[name].append(done.timings.ttft_ms)
            for name, done in (("grammar", kept), ("free", free)):
                each[name].append(done.timings.predicted_ms / (len(done.token_ids) - 1))
            for done in (new, kept):
                drafted += done.timings.draft_n
                accepted += done.timings.draft_n_accepted
                tokens += len(done.token_ids)
        info = engine.info()
    print(
        f"{info['model']}, {info['device_model']}, {info['threads']} threads, {info['vocab']} ids"
    )
    middle = {name: statistics.median(all_) for name, all_ in first.items()}
    print(
        f"first token, {size} bytes of schema: "
        + ", ".join(f"{k} {v:.1f} ms" for k, v in middle.items())
    )
    a, b = (statistics.median(each[name]) for name in ("free", "grammar"))
    print(
        f"each token: free {a * 1e3:.0f} us, grammar {b * 1e3:.0f} us, {100 * (b / a - 1):+.1f} %"
    )
    print(f"drafted beside masks: {drafted} of {tokens} tokens, {accepted} accepted")


if __name__ == "__main__":
    main()
