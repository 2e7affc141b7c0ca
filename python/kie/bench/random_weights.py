"""Checkpoints of random 16-bit weights in the shape of a known model, to measure speed with where
the model itself is not at hand. Numbers are normal with a standard deviation of one over the root
of a row's length, so that activations keep their size; norm scales are near one.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kie.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LANEFORMER = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "hidden_act": "silu",
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "broadcast_delay": 2,
    "use_early_comm": True,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "vocab_parallel",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "sliding_window": 512,
    "swa_layers": list(range(10)),
}


def _sizes(
    hidden: int, layers: int, heads: tuple[int, int, int], ffn: int, vocab: int
) -> dict[str, int]:
    query, kv, dim = heads
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


SPECS: dict[str, dict[str, Any]] = {
    "laneformer-2b": _LANEFORMER | _sizes(3072, 15, (32, 16, 96), 12288, 32000) | {"num_lanes": 8},
    # What each of eight GPUs does: one lane, with a slice of the vocabulary (4,096 ids where the
    # model's is 4,000, as the tokenizer needs them).
    "laneformer-2b-lane": _LLAMA | _sizes(3072, 15, (4, 2, 96), 1536, 4096),
    # Four of its lanes: on four GPUs each has the load that each of eight has of the whole model.
    "laneformer-2b-half": _LANEFORMER
    | _sizes(3072, 15, (16, 8, 96), 6144, 16000)
    | {"num_lanes": 4},
    # The same sizes without lanes, for tensor parallelism beside delayed sums.
    "laneformer-2b-plain": _LLAMA | _sizes(3072, 15, (32, 16, 96), 12288, 32000),
    "llama-3.2-1b": _LLAMA | _sizes(2048, 16, (32, 8, 64), 8192, 128256),
    # Few of the layers of the next one, for what does not depend on how many there are.
    "llama-3.1-8b-few": _LLAMA | _sizes(4096, 4, (32, 8, 128), 14336, 32000),
    "llama-3.1-8b": _LLAMA | _sizes(4096, 32, (32, 8, 128), 14336, 128256),
}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a config's tensors."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    ffn, vocab, lanes = config["intermediate_size"], config["vocab_size"], config.get("num_lanes")
    if lanes is None:
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        norms = ["input_layernorm", "post_attention_layernorm"]
        embedding, lane = "model.embed_tokens.weight", ()
    else:
        names = [f"attention.w{matrix}" for matrix in "qkvo"]
        names += [f"feed_forward.w{matrix}" for matrix in (1, 3, 2)]
        norms = ["attention_norm", "ffn_norm"]
        embedding, lane = "model.tok_embeddings.weight", (lanes,)
        query, kv, ffn = query // lanes, kv // lanes, ffn // lanes
    shapes = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
    shapes += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    yield embedding, (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in zip(names, shapes, strict=True):
            yield f"model.layers.{layer}.{name}.weight", (*lane, *shape)
        for name in norms:
            yield f"model.layers.{layer}.{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if lanes is None:
        yield "lm_head.weight", (vocab, hidden)
    else:
        yield "lm_head.weight", (lanes, vocab // lanes, hidden)


def write(spec: str, folder: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of `spec` (a key of SPECS) with the default model's tokenizer.

    Raises InvalidRequestError for an unknown name. Numbers are bfloat16.
    """
    import numpy as np

    if spec not in SPECS:
        raise InvalidRequestError(
            f"no shape {spec!r}",
            hint=f"there are {', '.join(SPECS)}",
            context={"param": "random_weights"},
        )
    config = SPECS[spec]
    folder.mkdir(parents=True, exist_ok=True)
    demo = Path(__file__).parent.parent / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)
    file = np.memmap(path, np.uint16, "r+", 8 + len(text), (at // 2,))

    def fill(index: int, name: str) -> None:
        entry = header[name]
        begin, end = (offset // 2 for offset in entry["data_offsets"])
        numbers = np.random.default_rng([seed, index])
        scale = entry["shape"][-1] ** -0.5
        for first in range(begin, end, 1 << 22):
            last = min(end, first + (1 << 22))
            shift = 1 if len(entry["shape"]) == 1 else 0
            drawn = np.asarray(numbers.standard_normal(last - first, np.float32), np.float32)
            drawn = (drawn * np.float32(scale) + np.float32(shift)).astype(np.float32)
            file[first:last] = np.frombuffer(drawn, np.uint32) >> 16

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(fill, index, name) for index, name in enumerate(header)]:
            done.result()
    return folder
