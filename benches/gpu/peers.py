"""What PyTorch makes of the same shapes on one GPU: random bfloat16 weights, `torch.compile`, batch
1. Decoding is one CUDA graph a token; a prompt is one compiled pass with causal attention up to the
first token. Which contexts and prompts: those of the table (targets.py).

    python3 benches/gpu/peers.py [SHAPE ...]

Prints one JSON line for each: the median, least and largest of seven rounds (of 200 tokens, or of
one prompt), in microseconds. Needs torch and a GPU; says so and exits 2 where one is missing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import targets
from kie.bench.random_weights import SPECS

ROUNDS, TOKENS = 7, 200
SPARE = 256
"""Places of a cache behind its context: attention reads a cache whole, so it is kept short."""


def missing() -> str | None:
    """What cannot be measured here and why."""
    try:
        import torch
    except ImportError:
        return "torch is missing: pip install torch"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


class Model:
    """Weights of a shape, and the two passes over them."""

    def __init__(self, config: dict[str, Any], positions: int) -> None:
        import torch

        hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width, ffn = config["head_dim"], config["intermediate_size"]
        place = {"device": "cuda", "dtype": torch.bfloat16}

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, **place) * columns**-0.5

        self.table, self.head = (matrix(config["vocab_size"], hidden) for _ in range(2))
        all_heads = (self.heads + 2 * self.kv_heads) * self.width
        sizes = (all_heads, hidden), (hidden, self.heads * self.width)
        sizes += (2 * ffn, hidden), (hidden, ffn)
        # Lanes make no difference to PyTorch: the same matrices, one after another.
        self.weights = [[matrix(*size) for size in sizes] for _ in range(self.layers)]
        self.norm = torch.ones(hidden, **place)
        half = self.width // 2
        turns = config["rope_theta"] ** (-torch.arange(half, device="cuda") / half)
        angles = torch.outer(torch.arange(positions, device="cuda"), turns)
        self.cosines, self.sines = angles.cos(), angles.sin()

    def normed(self, x: Any) -> Any:
        from torch.nn import functional

        return functional.rms_norm(x, self.norm.shape, self.norm, 1e-5)

    def turned(self, x: Any, at: Any) -> Any:
        import torch

        a, b = x.chunk(2, -1)
        c, s = self.cosines[at], self.sines[at]
        return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

    def run(self, tokens: Any, at: Any, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        """The next token behind `tokens` [1, n] at positions `at` [n]; `attend` takes a layer's
        number and its query, key and value [1, heads, n, width].
        """
        from torch.nn import functional

        x = self.table[tokens]
        for layer, (qkv, out, gate_up, down) in enumerate(self.weights):
            every = functional.linear(self.normed(x), qkv).view(1, tokens.shape[1], -1, self.width)
            query, key, value = every.transpose(1, 2).split(
                (self.heads, self.kv_heads, self.kv_heads), 1
            )
            seen = attend(layer, self.turned(query, at), self.turned(key, at), value)
            x = x + functional.linear(seen.transpose(1, 2).flatten(2), out)
            gate, up = functional.linear(self.normed(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self.normed(x[:, -1:]), self.head).float().argmax(-1)

    def step(self, places: int) -> Callable[[Any, Any], Any]:
        """A function from (token [1, 1], position [1]) to the next one, over caches of its own."""
        import torch

        size = 2, 1, self.kv_heads, places, self.width
        caches = [
            torch.zeros(size, device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)
        ]
        order = torch.arange(places, device="cuda")

        def step(token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            future = torch.where(order <= at, 0.0, -torch.inf)

            def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
                # Written out: for one query the compiler makes less of its own attention.
                cache = caches[layer]
                cache[0][:, :, at], cache[1][:, :, at] = key, value
                query = query.view(1, self.kv_heads, -1, self.width) * self.width**-0.5
                scores = (query @ cache[0].transpose(2, 3)).float() + future
                seen = scores.softmax(-1).to(query.dtype) @ cache[1]
                return seen.view(1, self.heads, 1, self.width)

            return self.run(token, at, attend)

        return step

    def prompt(self, tokens: Any, at: Any) -> Any:
        """The first token behind a prompt [1, n]; keys and values are made and dropped."""
        from torch.nn import functional

        def attend(_layer: int, query: Any, key: Any, value: Any) -> Any:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

        return self.run(tokens, at, attend)


def timed(work: Callable[[], object], count: int) -> float:
    """Microseconds of one of `count` repetitions, by the GPU's events."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def decode(model: Model, context: int) -> list[float]:
    """Rounds of a token at a context."""
    import torch

    step = torch.compile(
        model.step(context + SPARE), fullgraph=True, mode="max-autotune-no-cudagraphs"
    )
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    position = torch.tensor([context], device="cuda")
    for _ in range(3):
        token.copy_(step(token, position))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(step(token, position))
    return [timed(graph.replay, TOKENS) for _ in range(ROUNDS + 1)]


def prompt(model: Model, length: int) -> list[float]:
    """Rounds of a prompt up to its first token."""
    import torch

    run = torch.compile(model.prompt, fullgraph=True)
    tokens = torch.randint(3, 1000, (1, length), device="cuda")
    at = torch.arange(length, device="cuda")
    for _ in range(3):
        run(tokens, at)
    torch.cuda.synchronize()
    return [timed(lambda: run(tokens, at), 1) for _ in range(ROUNDS + 1)]


def measure(shape: str) -> Iterator[dict[str, Any]]:
    """One shape's rows."""
    import torch

    torch.manual_seed(0)
    wanted = [t for t in targets.asked() if t.shape == shape and t.what in ("decode", "prompt")]
    model = Model(SPECS[shape], max((t.at for t in wanted), default=128) + SPARE)
    for target in wanted:
        with torch.no_grad():
            rounds = (decode if target.what == "decode" else prompt)(model, target.at)[1:]
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        graphed = " + CUDA graph" if target.what == "decode" else ""
        yield {
            "peer": f"torch {torch.__version__}, compile{graphed}",
            "device": torch.cuda.get_device_name(),
            "bench": target.what,
            "gpus": 1,
            "batch": 1,
            "shape": shape,
            "context": target.at,
            "us_per_token" if target.what == "decode" else "us": round(
                statistics.median(rounds), 1
            ),
            "us_min": round(min(rounds), 1),
            "us_max": round(max(rounds), 1),
        }


def main() -> int:
    # Its weights have 16 bits.
    plain = [shape for shape in targets.shapes() if "quantization_config" not in SPECS[shape]]
    shapes = sys.argv[1:] or plain
    unknown = [shape for shape in shapes if shape not in SPECS]
    if unknown:
        print(f"no shapes {', '.join(unknown)}; there are {', '.join(SPECS)}", file=sys.stderr)
        return 1
    if why := missing():
        print(f"no peers are measured: {why}", file=sys.stderr)
        return 2
    for shape in shapes:
        for row in measure(shape):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
