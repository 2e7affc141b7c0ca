"""What PyTorch makes of the same shapes: batch 1 decode at context 128, random bfloat16 weights,
`torch.compile` and a CUDA graph a token.

    python3 benches/gpu/peers.py [SHAPE ...]

Prints one JSON line a shape: the median, least and largest of seven rounds of 200 tokens, in
microseconds a token. Needs torch and a GPU; says so and exits 2 where one is missing.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from kie.bench.random_weights import SPECS

CONTEXT = 128
POSITIONS = 1024
ROUNDS, TOKENS = 7, 200


def missing() -> str | None:
    """What cannot be measured here and why."""
    try:
        import torch
    except ImportError:
        return "torch is missing: pip install torch"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


def decoder(config: dict[str, Any]) -> Any:
    """A function from (token, position) to the next token, over caches of its own."""
    import torch
    from torch.nn import functional

    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, ffn, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    half = width // 2
    place = {"device": "cuda", "dtype": torch.bfloat16}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, **place) * columns**-0.5

    table, head = matrix(vocab, hidden), matrix(vocab, hidden)
    shapes = ((heads + 2 * kv_heads) * width, hidden), (hidden, heads * width)
    shapes += (2 * ffn, hidden), (hidden, ffn)
    weights = [[matrix(*shape) for shape in shapes] for _ in range(layers)]
    caches = [torch.zeros(2, 1, kv_heads, POSITIONS, width, **place) for _ in range(layers)]
    norm = torch.ones(hidden, **place)
    turns = config["rope_theta"] ** (-torch.arange(half, device="cuda") / half)
    angles = torch.outer(torch.arange(POSITIONS, device="cuda"), turns)
    cosines, sines = angles.cos(), angles.sin()
    reach = torch.ones(POSITIONS, POSITIONS, device="cuda", dtype=torch.bool).tril()

    def normed(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (hidden,), norm, 1e-5)

    def turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        a, b = x[..., :half], x[..., half:]
        c, s = cosines[at], sines[at]
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

    def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = table[token]
        for (qkv, out, gate_up, down), cache in zip(weights, caches, strict=True):
            all_heads = functional.linear(normed(x), qkv).view(1, 1, -1, width).transpose(1, 2)
            query = turned(all_heads[:, :heads], at)
            cache[0][:, :, at] = turned(all_heads[:, heads : heads + kv_heads], at)
            cache[1][:, :, at] = all_heads[:, heads + kv_heads :]
            seen = functional.scaled_dot_product_attention(
                query, cache[0], cache[1], attn_mask=reach[at][None, None], enable_gqa=True
            )
            x = x + functional.linear(seen.transpose(1, 2).reshape(1, 1, -1), out)
            gate, up = functional.linear(normed(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(normed(x), head).float().argmax(-1)

    return step


def measure(shape: str) -> dict[str, Any]:
    """One shape's row."""
    import torch

    torch.manual_seed(0)
    step = torch.compile(decoder(SPECS[shape]), fullgraph=True, mode="max-autotune-no-cudagraphs")
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    position = torch.tensor([CONTEXT], device="cuda")
    with torch.no_grad():
        for _ in range(3):
            token.copy_(step(token, position))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(step(token, position))
        rounds: list[float] = []
        for _ in range(ROUNDS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(TOKENS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            rounds.append(begin.elapsed_time(end) * 1e3 / TOKENS)
    rounds = rounds[1:]  # the first one warms up
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return {
        "peer": f"torch {torch.__version__}, compile + CUDA graph",
        "device": torch.cuda.get_device_name(),
        "shape": shape,
        "context": CONTEXT,
        "us_per_token": round(statistics.median(rounds), 1),
        "us_min": round(min(rounds), 1),
        "us_max": round(max(rounds), 1),
    }


def main() -> int:
    shapes = sys.argv[1:] or list(SPECS)
    unknown = [shape for shape in shapes if shape not in SPECS]
    if unknown:
        print(f"no shapes {', '.join(unknown)}; there are {', '.join(SPECS)}", file=sys.stderr)
        return 1
    if why := missing():
        print(f"no peers are measured: {why}", file=sys.stderr)
        return 2
    for shape in shapes:
        # Lanes make no difference to PyTorch: the same matrices, one after another.
        print(json.dumps(measure(shape)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
