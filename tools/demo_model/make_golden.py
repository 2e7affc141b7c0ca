"""Record what a checkpoint says: greedy continuations of five prompts, with margins.

    python make_golden.py demo

Float32 arithmetic from the stored weights (FP8 blocks dequantised), the whole prompt recomputed for
every token, on the CPU. The forward pass here goes lane by lane with a mailbox of what the others
sent, as separate devices would; it is independent of the tensor form in model.py, and the two are
compared first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch
from model import BOS, EOS, Laneformer
from quantise_fp8 import dequantise, load
from tokenizers import Tokenizer
from torch import Tensor

STEPS = 64
FORMS_DIFFER_MAX = 1e-3
LONG = Path(__file__).resolve().parent / "primer" / "long_prompt.txt"
QUEUE = """\
class Queue:
    def __init__(self):
        self.items = []

    def enqueue(self, item):
"""
USER = "Write a Python function that checks if a string is a palindrome."


def load_float32(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's weights in float32, FP8 blocks dequantised."""
    stored = load(folder)
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if not name.endswith("_scale_inv"):
            scale = stored.get(name + "_scale_inv")
            out[name] = tensor.float() if scale is None else dequantise(tensor, scale)
    return out


class Lanes:
    """The model one lane after the other, as `num_lanes` devices would run it."""

    def __init__(self, c: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.c, self.w = c, weights
        self.lanes, self.dim = c["num_lanes"], c["head_dim"]
        self.heads = c["num_attention_heads"] // self.lanes
        self.kv_heads = c["num_key_value_heads"] // self.lanes

    def norm(self, x: Tensor, name: str) -> Tensor:
        rms = torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["norm_eps"])
        return x / rms * self.w[name + ".weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """Adjacent pairs as complex numbers; x [tokens, heads, dim]."""
        j = torch.arange(0, self.dim, 2, dtype=torch.float64)
        position = torch.arange(len(x), dtype=torch.float64)[:, None]
        angle = position * self.c["rope_theta"] ** (-j / self.dim)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = x.double().reshape(len(x), -1, self.dim // 2, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * turn).reshape(x.shape).to(x.dtype)

    def attention(self, x: Tensor, lane: int, layer: int) -> Tensor:
        p, tokens = f"model.layers.{layer}.attention", len(x)
        h = self.norm(x, p + "_norm")
        q = self.rotate((h @ self.w[p + ".wq.weight"][lane].T).view(tokens, self.heads, self.dim))
        k = self.rotate(
            (h @ self.w[p + ".wk.weight"][lane].T).view(tokens, self.kv_heads, self.dim)
        )
        v = (h @ self.w[p + ".wv.weight"][lane].T).view(tokens, self.kv_heads, self.dim)
        window = self.c["sliding_window"] if layer in self.c["swa_layers"] else tokens
        rows, cols = torch.arange(tokens)[:, None], torch.arange(tokens)
        hidden = ~((cols <= rows) & (cols > rows - window))
        out = torch.zeros_like(q)
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            score = q[:, head] @ k[:, kv].T / math.sqrt(self.dim)
            out[:, head] = score.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, kv]
        return out.reshape(tokens, -1) @ self.w[p + ".wo.weight"][lane].T

    def mlp(self, x: Tensor, lane: int, layer: int) -> Tensor:
        p = f"model.layers.{layer}."
        h = self.norm(x, p + "ffn_norm")
        gate = h @ self.w[p + "feed_forward.w1.weight"][lane].T
        up = h @ self.w[p + "feed_forward.w3.weight"][lane].T
        return (gate / (1 + torch.exp(-gate)) * up) @ self.w[p + "feed_forward.w2.weight"][lane].T

    def logits(self, ids: list[int]) -> Tensor:
        """[tokens, vocab]"""
        delay, layers = self.c["broadcast_delay"], self.c["num_hidden_layers"]
        x = [self.w["model.tok_embeddings.weight"][ids].clone() for _ in range(self.lanes)]
        mailbox: dict[tuple[str, int, int], Tensor] = {}
        for layer in range(layers):
            for kind, module in (("attention", self.attention), ("mlp", self.mlp)):
                out = [module(x[lane], lane, layer) for lane in range(self.lanes)]
                for lane in range(self.lanes):
                    if layer + delay < layers:
                        mailbox[kind, layer, lane] = out[lane]
                    if layer < delay:
                        x[lane] = x[lane] + math.sqrt(self.lanes) * out[lane]
                        continue
                    x[lane] = x[lane] + out[lane]
                    for other in set(range(self.lanes)) - {lane}:
                        x[lane] = x[lane] + mailbox[kind, layer - delay, other]
        z = [self.norm(stream, "model.norm") for stream in x]
        return torch.cat([z[n] @ self.w["lm_head.weight"][n].T for n in range(self.lanes)], -1)


def prompts(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, dict[str, Any], list[int]]]:
    """Name, what is recorded of the prompt, and its ids."""
    texts = {
        "function": "def fibonacci(n):",
        "script": "import os\n\ndef list_files(path):",
        "class": QUEUE,
    }
    for name, text in texts.items():
        yield name, {"prompt": text}, tokenizer.encode(text).ids
    config = json.loads((folder / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": USER}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        config["chat_template"]
    )
    chat = template.render(
        messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    ids = tokenizer.encode(chat, add_special_tokens=False).ids
    yield "chat", {"messages": messages, "prompt": chat}, ids
    long = LONG.read_text()
    yield "long", {"prompt": long}, tokenizer.encode(long).ids


def greedy(model: Lanes, tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """64 greedy tokens with their margins; </s> does not stop them."""
    sequence, margins = list(ids), list[float]()
    first: Tensor | None = None
    for _ in range(STEPS):
        row = model.logits(sequence)[-1]
        first = row if first is None else first
        top = row.topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        sequence.append(int(top.indices[0]))
    assert first is not None, "at least one step ran"
    new = sequence[len(ids) :]
    end = new.index(EOS) if EOS in new else None
    top5 = first.topk(5)
    pairs = zip(top5.indices.tolist(), top5.values.tolist(), strict=True)
    return {
        "prompt_ids": ids,
        "prompt_tokens": len(ids),
        "greedy_ids": new,
        "eos_at": end,
        "text": tokenizer.decode(new[:end]),
        "min_margin": round(min(margins), 5),
        "margins": [round(m, 4) for m in margins],
        "first_logits_top5": [[i, round(value, 5)] for i, value in pairs],
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Record golden.json of a checkpoint folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="default: FOLDER/golden.json")
    parser.add_argument("--only", help="this prompt only")
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    weights = load_float32(args.folder)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    lanes, tensor_form = Lanes(config, weights), Laneformer(config)
    tensor_form.load_state_dict(weights)
    cases: list[dict[str, Any]] = []
    apart = 0.0
    for name, what, ids in prompts(args.folder, tokenizer):
        if args.only not in (None, name):
            continue
        if ids.count(BOS) != 1 or ids[0] != BOS:
            raise ValueError(f"{name}: a prompt begins with the only <s>")
        other = tensor_form(torch.tensor([ids]), dtype=torch.float32)
        apart = max(apart, float((lanes.logits(ids) - other).abs().max()))
        cases.append({"name": name, **what, **greedy(lanes, tokenizer, ids)})
        print(f"{name}: smallest margin {cases[-1]['min_margin']}", flush=True)
    if apart > FORMS_DIFFER_MAX:
        raise RuntimeError(f"lane form and tensor form differ by {apart:.1e}")
    note = (
        "Greedy continuation of 64 tokens, </s> ignored while generating (eos_at: index of the "
        "first </s>, text ends there); float32 from the dequantised FP8 weights, full recompute "
        "per token, CPU. margins: best minus second best logit."
    )
    document = {
        "note": note,
        "lane_form_against_tensor_form_float32": apart,
        "prompts": cases,
    }
    text = json.dumps(document, separators=(",", ":"))
    (args.out or args.folder / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
