"""Checkpoints of random weights in the shape of a known model, to measure speed with where the
model itself is not at hand: bfloat16, or FP8 in blocks of 128 x 128 where a name says so. Numbers
have a standard deviation of one over the root of a row's length, so that activations keep their
size; norm scales are near one.
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


BLOCK = 128


def _fp8(name: str, keep: list[str]) -> dict[str, Any]:
    """A shape with FP8 matrices, but for the embedding and those that are to be kept."""
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": keep,
    }
    return SPECS[name] | {"quantization_config": quantization}


# As checkpoints are published, and with the head in FP8, too.
for _name in ("laneformer-2b", "llama-3.1-8b"):
    SPECS[f"{_name}-fp8"] = _fp8(_name, ["lm_head"])
    SPECS[f"{_name}-fp8-all"] = _fp8(_name, [])


def is_fp8(config: dict[str, Any], name: str) -> bool:
    """Whether a tensor's numbers are FP8: matrices, where the config says so."""
    keep = config.get("quantization_config", {}).get("modules_to_not_convert", [""])
    return not any(part in name for part in ("norm", "embed", *keep))


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

    Raises InvalidRequestError for an unknown name.
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
        parts = [(name, "BF16", 2, shape)]
        if is_fp8(config, name):
            grid = (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))
            parts = [(name + "_scale_inv", "F32", 4, grid), (name, "F8_E4M3", 1, shape)]
        for part, dtype, each, sizes in parts:
            size = each * int(np.prod(sizes))
            header[part] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)
    file = np.memmap(path, np.uint8, "r+", 8 + len(text), (at,))
    # The root mean square of all codes but NaN.
    values = np.arange(1, 0x7F)
    exponents = np.maximum(values >> 3, 1) - 10.0
    codes = ((values & 7) + 8 * (values >= 8)) * 2.0**exponents
    spread = float(np.sqrt(np.mean(codes**2)))

    def fill(index: int, name: str) -> None:
        entry = header[name]
        begin, end = entry["data_offsets"]
        numbers = np.random.default_rng([seed, index])
        scale = entry["shape"][-1] ** -0.5
        if entry["dtype"] == "F32":
            width = int(header[name.removesuffix("_scale_inv")]["shape"][-1])
            drawn = np.asarray(numbers.uniform(0.8, 1.2, (end - begin) // 4), np.float64)
            stored = np.asarray(drawn * (width**-0.5 / spread), np.dtype("<f4"))
            file[begin:end] = np.frombuffer(stored.tobytes(), np.uint8)
            return
        for first in range(begin, end, 1 << 23):
            last = min(end, first + (1 << 23))
            if entry["dtype"] == "F8_E4M3":
                drawn = numbers.integers(0, 256, last - first, np.uint8)
                file[first:last] = drawn - ((drawn & 0x7F) == 0x7F)  # NaN
                continue
            shift = 1 if len(entry["shape"]) == 1 else 0
            drawn = np.asarray(numbers.standard_normal((last - first) // 2, np.float32), np.float32)
            drawn = (drawn * np.float32(scale) + np.float32(shift)).astype(np.float32)
            halves = (np.frombuffer(drawn, np.uint32) >> 16).astype("<u2")
            file[first:last] = np.frombuffer(halves.tobytes(), np.uint8)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(fill, index, name) for index, name in enumerate(header)]:
            done.result()
    return folder
