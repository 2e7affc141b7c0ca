"""How long an engine takes to open a checkpoint of very many small tensors: what a tensor costs.

    python benches/tensors.py [--layers 12 94] [--devices cpu sim:blocks=2]

A mixture of 128 experts a layer in FP8, each matrix with its scales, all of them 32 wide: 94 layers
(Qwen3-235B-A22B has as many) are 73,417 tensors in 47 MB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import kie
from kie.bench import random_weights


def narrow(layers: int) -> dict[str, Any]:
    """Qwen3-30B-A3B in FP8 with so many layers, and 32 where it has thousands."""
    sizes = dict.fromkeys(("hidden_size", "head_dim", "moe_intermediate_size"), 32)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config: dict[str, Any] = random_weights.SPECS["qwen3-30b-fp8"] | sizes | heads
    keep = ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(layers))]
    quantization = config["quantization_config"] | {"modules_to_not_convert": keep}
    counts = {"num_hidden_layers": layers, "vocab_size": 4096}
    return config | counts | {"quantization_config": quantization}


def main() -> None:
    parser = argparse.ArgumentParser(description="what a tensor costs while an engine opens")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 94])
    parser.add_argument("--devices", nargs="+", default=["cpu", "sim:blocks=2"])
    args = parser.parse_args()
    for layers in args.layers:
        config = random_weights.SPECS["narrow"] = narrow(layers)
        tensors = random_weights.tensors(config)
        count = sum(len(random_weights.parts(config, *tensor)) for tensor in tensors)
        with tempfile.TemporaryDirectory() as folder:
            random_weights.write("narrow", Path(folder))
            for device in args.devices:
                begin = time.perf_counter()
                kie.Engine(folder, device=device, max_seq_len=64, max_batch=1).close()
                took = time.perf_counter() - begin
                each = took / count * 1e6
                print(f"{count:,} tensors, {device}: {took:.2f} s, {each:.1f} us a tensor")


if __name__ == "__main__":
    main()
