"""Checkpoints of random weights in the shape of a known model, to measure speed with where the
model itself is not at hand: bfloat16, or FP8 in blocks of 128 x 128, INT4 or MXFP4 in groups of 32
where a name says so. Numbers have a standard deviation of about one over the root of a row's
length, so that activations keep their size; norm scales are near one.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kie.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

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

_QWEN3_MOE = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_GPT_OSS = {
    **_LLAMA,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    # As it is published: only the experts are quantised, by a layout of their own.
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_QWEN3_NEXT = {
    **_QWEN3_MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_theta": 5000000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}


_DEEPSEEK_V3: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": False,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
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
    "qwen3-30b": _QWEN3_MOE | _sizes(2048, 48, (32, 4, 128), 6144, 151936),
    "qwen3-coder-next": _QWEN3_NEXT | _sizes(2048, 48, (16, 2, 256), 5120, 151936),
    # Few of its layers: three with a recurrent state, one with attention.
    "qwen3-coder-next-few": _QWEN3_NEXT | _sizes(2048, 4, (16, 2, 256), 5120, 32000),
    "gpt-oss-120b": _GPT_OSS | _sizes(2880, 36, (64, 8, 64), 2880, 201088),
}


BLOCK = 128
GROUP = 32


def _fp8(keep: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": keep,
    }


def _compressed(form: str, kind: str) -> dict[str, Any]:
    """As the compressed-tensors package writes it."""
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# FP8 as checkpoints are published; the others with the head quantised, too.
_QUANTIZED = {
    "fp8": _fp8(["lm_head"]),
    "fp8-all": _fp8([]),
    "int4-all": _compressed("pack-quantized", "int"),
    "mxfp4-all": _compressed("mxfp4-pack-quantized", "float"),
}
for _name in ("laneformer-2b", "llama-3.1-8b"):
    for _scheme, _config in _QUANTIZED.items():
        SPECS[f"{_name}-{_scheme}"] = SPECS[_name] | {"quantization_config": _config}
# Few of the layers of the 120B: their experts take more than 2^32 bytes.
SPECS["gpt-oss-120b-few"] = {
    **SPECS["gpt-oss-120b"],
    "num_hidden_layers": 4,
    "layer_types": SPECS["gpt-oss-120b"]["layer_types"][:4],
}
# Few of the layers of the 20B, and few ids.
SPECS["gpt-oss-20b-few"] = {
    **_GPT_OSS,
    **_sizes(2880, 6, (64, 8, 64), 2880, 32000),
    "num_local_experts": 32,
    "layer_types": SPECS["gpt-oss-120b"]["layer_types"][:6],
}
SPECS["qwen3-30b-fp8"] = SPECS["qwen3-30b"] | {
    "quantization_config": _fp8(["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(48))])
}
# As it is published, down to what gates a recurrent state and has no whole blocks.
_WHOLE = (
    "mlp.gate",
    "mlp.shared_expert_gate",
    "conv1d",
    "in_proj_ba",
    "A_log",
    "dt_bias",
    "mtp.fc",
)
for _name in ("qwen3-coder-next", "qwen3-coder-next-few"):
    SPECS[f"{_name}-fp8"] = SPECS[_name] | {"quantization_config": _fp8(["lm_head", *_WHOLE])}


SPECS["deepseek-v3"] = _DEEPSEEK_V3 | {"quantization_config": _fp8(["lm_head", "mlp.gate."])}
# Kimi-K2's sizes: experts of INT4, all else of 16 bits.
_KIMI_PARTS = ("self_attn", "shared", "mlp.gate", "layers.0.mlp")
_KIMI_WHOLE = ["lm_head", *(f"re:.*{part}.*" for part in _KIMI_PARTS)]
SPECS["kimi-k2"] = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "rope_theta": 50000.0,
    "rope_scaling": _DEEPSEEK_V3["rope_scaling"] | {"factor": 64.0, "beta_fast": 32.0},
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "quantization_config": _compressed("pack-quantized", "int") | {"ignore": _KIMI_WHOLE},
}
# As many of its layers as one GPU holds, and as four do.
SPECS["kimi-k2-few"] = SPECS["kimi-k2"] | {"num_hidden_layers": 8}
SPECS["kimi-k2-30-layers"] = SPECS["kimi-k2"] | {"num_hidden_layers": 30}


# As it is published: a window alone in the first two layers, then entries of 4 and of 128 positions
# in turns. Experts of 4 bits, all else of 8 or 16. No layers that predict several tokens.
SPECS["deepseek-v4-flash"] = {
    **_LLAMA,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "vocab_size": 129280,
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "attention_bias": False,
    "max_position_embeddings": 1048576,
    "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0],
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "expert_dtype": "fp4",
    "quantization_config": _fp8([]) | {"scale_fmt": "ue8m0"},
}
SPECS["deepseek-v4-flash-few"] = {
    **SPECS["deepseek-v4-flash"],
    "num_hidden_layers": 8,
    "compress_ratios": SPECS["deepseek-v4-flash"]["compress_ratios"][:8],
}


class Part(NamedTuple):
    """What a checkpoint stores of a tensor."""

    end: str
    """Behind the tensor's name."""
    dtype: str
    """As safetensors names it."""
    bits: int
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.bits // 8


def parts(config: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Part]:
    """What is stored of a tensor of so many numbers, by the config's quantisation."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return [Part("", "BF16", 16, shape)]
    if quantization["quant_method"] == "mxfp4":
        return _gpt_oss_parts(name, shape)
    if config["model_type"] == "deepseek_v4":
        return _deepseek_v4_parts(name, shape)
    keep: list[str] = ["norm", "embed", *quantization.get("modules_to_not_convert", ())]
    ignored: list[str] = quantization.get("ignore", [])
    keep += [pattern.removeprefix("re:.*").removesuffix(".*") for pattern in ignored]
    if any(part in name for part in keep):
        return [Part("", "BF16", 16, shape)]
    *lead, rows, columns = shape
    if quantization["quant_method"] == "fp8":
        grid = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
        return [Part("_scale_inv", "F32", 32, grid), Part("", "F8_E4M3", 8, shape)]
    grid = (*lead, rows, columns // GROUP)
    if quantization["format"] == "pack-quantized":
        return [
            Part("_scale", "BF16", 16, grid),
            Part("_packed", "I32", 32, (*lead, rows, columns // 8)),
            Part("_shape", "I64", 64, (len(shape),)),
        ]
    return [Part("_scale", "U8", 8, grid), Part("_packed", "U8", 8, (*lead, rows, columns // 2))]


def _gpt_oss_parts(name: str, shape: tuple[int, ...]) -> list[Part]:
    """The same as GPT-OSS is published: experts of all of a layer in one tensor."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return [Part("", "BF16", 16, shape)]
    *lead, columns = shape
    grid = (*lead, columns // GROUP)
    return [Part("_scales", "U8", 8, grid), Part("_blocks", "U8", 8, (*grid, GROUP // 2))]


def _deepseek_v4_parts(name: str, shape: tuple[int, ...]) -> list[Part]:
    """The same as DeepSeek-V4 is published; names are those of modules, or of bare tensors."""
    if name.endswith("tid2eid"):
        return [Part("", "I64", 64, shape)]
    if name.endswith((".bias", "sink", "ape", "_base", "_fn", "_scale")):
        return [Part("", "F32", 32, shape)]
    *_, rows, columns = (1, *shape)
    if ".experts." in name:
        grid = (rows, columns // GROUP)
        packed = Part(".weight", "I8", 8, (rows, columns // 2))
        return [Part(".scale", "F8_E8M0", 8, grid), packed]
    plain = ("norm", "embed", "head", "compressor", "weights_proj", "gate")
    if any(part in name for part in plain):
        return [Part(".weight", "BF16", 16, shape)]
    grid = (-(-rows // BLOCK), -(-columns // BLOCK))
    return [Part(".scale", "F8_E8M0", 8, grid), Part(".weight", "F8_E4M3", 8, shape)]


def _chosen(config: dict[str, Any]) -> tuple[int, int]:
    """Experts of a layer and of a token; (1, 1) without them."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[key] for key in keys if key in config), 1)
    return count, config.get("num_experts_per_tok", 1)


def bytes_a_token(config: dict[str, Any]) -> float:
    """Bytes that a token reads: all but the embedding table, of experts as many as are chosen."""
    count, chosen = _chosen(config)
    read = 0.0
    for name, shape in tensors(config):
        share = chosen / count if ".experts." in name else 1.0
        if "embed" not in name:
            read += share * sum(part.bytes for part in parts(config, name, shape))
    return read


def _mixture(config: dict[str, Any], layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's tensors beside those of dense models' attention."""
    hidden, (count, _) = config["hidden_size"], _chosen(config)
    if config["model_type"] != "gpt_oss":
        inner: int = config["moe_intermediate_size"]
        experts = [(f"experts.{expert}", inner) for expert in range(count)]
        shared: int | None = config.get("shared_expert_intermediate_size")
        if shared is not None:
            experts.append(("shared_expert", shared))
            yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden)
        yield f"{layer}.mlp.gate.weight", (count, hidden)
        for expert, width in experts:
            yield from _gated(f"{layer}.mlp.{expert}", width, hidden)
        return
    inner, heads = config["intermediate_size"], config["num_attention_heads"]
    query, kv = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    yield f"{layer}.self_attn.sinks", (heads,)
    for name, rows in zip("qkvo", (query, kv, kv, hidden), strict=True):
        yield f"{layer}.self_attn.{name}_proj.bias", (rows,)
    yield f"{layer}.mlp.router.weight", (count, hidden)
    yield f"{layer}.mlp.router.bias", (count,)
    for name, rows, columns in (
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ):
        yield f"{layer}.mlp.experts.{name}", (count, rows, columns)
        yield f"{layer}.mlp.experts.{name}_bias", (count, rows)


def _gated(name: str, inner: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def _latents(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of a model with latent attention: DeepSeek-V3's names."""
    hidden, heads, count = (
        config[key] for key in ("hidden_size", "num_attention_heads", "n_routed_experts")
    )
    query, rank, plain, turned, value = (
        config[key]
        for key in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    )
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        attention = f"{layer}.self_attn"
        yield f"{attention}.q_a_proj.weight", (query, hidden)
        yield f"{attention}.q_a_layernorm.weight", (query,)
        yield f"{attention}.q_b_proj.weight", (heads * (plain + turned), query)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (rank + turned, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (rank,)
        yield f"{attention}.kv_b_proj.weight", (heads * (plain + value), rank)
        yield f"{attention}.o_proj.weight", (hidden, heads * value)
        if number < config["first_k_dense_replace"]:
            yield from _gated(f"{layer}.mlp", config["intermediate_size"], hidden)
            continue
        inner = config["moe_intermediate_size"]
        yield f"{layer}.mlp.gate.weight", (count, hidden)
        yield f"{layer}.mlp.gate.e_score_correction_bias", (count,)
        for expert in range(count):
            yield from _gated(f"{layer}.mlp.experts.{expert}", inner, hidden)
        shared = config["n_shared_experts"] * inner
        yield from _gated(f"{layer}.mlp.shared_experts", shared, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of DeepSeek-V4: attention over a window and entries, several residual streams."""
    hidden, heads, dim = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    (query, groups, rank), (index_heads, index_dim), streams = (
        tuple(config[key] for key in ("q_lora_rank", "o_groups", "o_lora_rank")),
        tuple(config[key] for key in ("index_n_heads", "index_head_dim")),
        config["hc_mult"],
    )

    def compressor(name: str, ratio: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        rows = width * (2 if ratio == 4 else 1)  # short ones overlap
        yield f"{name}.ape", (ratio, rows)
        yield f"{name}.norm", (width,)
        yield f"{name}.wgate", (rows, hidden)
        yield f"{name}.wkv", (rows, hidden)

    yield "embed", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer, ratio = f"layers.{number}", config["compress_ratios"][number]
        for kind in ("attn", "ffn"):
            yield f"{layer}.{kind}_norm", (hidden,)
            yield f"{layer}.hc_{kind}_base", (streams * (streams + 2),)
            yield f"{layer}.hc_{kind}_fn", (streams * (streams + 2), streams * hidden)
            yield f"{layer}.hc_{kind}_scale", (3,)
        attention = f"{layer}.attn"
        yield f"{attention}.attn_sink", (heads,)
        yield f"{attention}.wq_a", (query, hidden)
        yield f"{attention}.q_norm", (query,)
        yield f"{attention}.wq_b", (heads * dim, query)
        yield f"{attention}.wkv", (dim, hidden)
        yield f"{attention}.kv_norm", (dim,)
        yield f"{attention}.wo_a", (groups * rank, heads * dim // groups)
        yield f"{attention}.wo_b", (hidden, groups * rank)
        if ratio:
            yield from compressor(f"{attention}.compressor", ratio, dim)
        if ratio == 4:
            yield from compressor(f"{attention}.indexer.compressor", ratio, index_dim)
            yield f"{attention}.indexer.wq_b", (index_heads * index_dim, query)
            yield f"{attention}.indexer.weights_proj", (index_heads, hidden)
        count, chosen = _chosen(config)
        yield f"{layer}.ffn.gate", (count, hidden)
        if number < config["num_hash_layers"]:
            yield f"{layer}.ffn.gate.tid2eid", (config["vocab_size"], chosen)
        else:
            yield f"{layer}.ffn.gate.bias", (count,)
        inner = config["moe_intermediate_size"]
        for expert in (*(f"experts.{n}" for n in range(count)), "shared_experts"):
            yield f"{layer}.ffn.{expert}.w1", (inner, hidden)
            yield f"{layer}.ffn.{expert}.w3", (inner, hidden)
            yield f"{layer}.ffn.{expert}.w2", (hidden, inner)
    yield "hc_head_base", (streams,)
    yield "hc_head_fn", (streams, streams * hidden)
    yield "hc_head_scale", (1,)
    yield "norm", (hidden,)
    yield "head", (config["vocab_size"], hidden)


def _recurrent(config: dict[str, Any], layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a gated delta rule's tensors."""
    hidden, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
    (keys, key), (values, value) = (
        (config[f"linear_num_{kind}_heads"], config[f"linear_{kind}_head_dim"])
        for kind in ("key", "value")
    )
    channels = 2 * keys * key + values * value
    yield f"{layer}.in_proj_qkvz.weight", (channels + values * value, hidden)
    yield f"{layer}.in_proj_ba.weight", (2 * values, hidden)
    yield f"{layer}.conv1d.weight", (channels, 1, taps)
    yield f"{layer}.A_log", (values,)
    yield f"{layer}.dt_bias", (values,)
    yield f"{layer}.norm.weight", (value,)
    yield f"{layer}.out_proj.weight", (hidden, values * value)


def tensors(config: dict[str, Any], *, mtp: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a config's tensors; with those of Qwen3-Next's layer that predicts
    further tokens.
    """
    if mtp:
        if "full_attention_interval" not in config:
            raise InvalidRequestError(
                "no layer of multi-token prediction is known of this shape",
                hint="there is one of qwen3-coder-next-fp8",
                context={"param": "mtp"},
            )
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}.weight", (hidden,)
        # A layer of attention as the model's.
        every = config["full_attention_interval"]
        path = f"model.layers.{every - 1}."
        for name, shape in tensors(config | {"num_hidden_layers": min(every, layers)}):
            if name.startswith(path):
                yield name.replace(path, "mtp.layers.0."), shape
    if "kv_lora_rank" in config:
        yield from _latents(config)
        return
    if "compress_ratios" in config:
        yield from _entries(config)
        return
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
    is_mixture, every = _chosen(config)[0] > 1, config.get("full_attention_interval", 1)
    if is_mixture:
        names, shapes = names[:4], shapes[:4]
    if every > 1:
        shapes[0] = (2 * query, hidden)  # with gates of attention's output
    yield embedding, (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        if (layer + 1) % every != 0:
            yield from _recurrent(config, f"model.layers.{layer}.linear_attn")
        else:
            for name, shape in zip(names, shapes, strict=True):
                yield f"model.layers.{layer}.{name}.weight", (*lane, *shape)
            if "qwen3" in config["model_type"]:
                for name in ("q_norm", "k_norm"):
                    yield f"model.layers.{layer}.self_attn.{name}.weight", (dim,)
        for name in norms:
            yield f"model.layers.{layer}.{name}.weight", (hidden,)
        if is_mixture:
            yield from _mixture(config, f"model.layers.{layer}")
    yield "model.norm.weight", (hidden,)
    if lanes is None:
        yield "lm_head.weight", (vocab, hidden)
    else:
        yield "lm_head.weight", (lanes, vocab // lanes, hidden)


def write(spec: str, folder: Path, seed: int = 0, *, mtp: bool = False) -> Path:
    """Writes a checkpoint of `spec` (a key of SPECS) with the default model's tokenizer, and with
    a layer that predicts further tokens for `mtp`.

    Raises InvalidRequestError for an unknown name, and for a shape that has no such layer.
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
    drawn: list[tuple[str, tuple[int, ...], Part]] = []
    at = 0
    for name, shape in tensors(config, mtp=mtp):
        for part in parts(config, name, shape):
            span = [at, at := at + part.bytes]
            header[name + part.end] = {"dtype": part.dtype, "shape": part.shape}
            header[name + part.end]["data_offsets"] = span
            drawn.append((name, shape, part))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)
    file = np.memmap(path, np.uint8, "r+", 8 + len(text), (at,))

    def fill(index: int, name: str, shape: tuple[int, ...], part: Part) -> None:
        begin, end = header[name + part.end]["data_offsets"]
        numbers = np.random.default_rng([seed, index])
        for first in range(begin, end, 1 << 23):
            last = min(end, first + (1 << 23))
            drawn = _draw(numbers, name, shape, part, last - first)
            file[first:last] = np.frombuffer(drawn, np.uint8)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(fill, index, *each) for index, each in enumerate(drawn)]:
            done.result()
    return folder


def _draw(
    numbers: np.random.Generator, name: str, shape: tuple[int, ...], part: Part, size: int
) -> bytes | NDArray[np.uint64]:
    """So many bytes of a part of a tensor, as they are stored."""
    import numpy as np

    wanted = shape[-1] ** -0.5
    match part:
        case Part("_shape"):
            return np.array(shape, "<i8").tobytes()
        case Part("" | ".weight", "BF16"):
            drawn = numbers.standard_normal(size // 2, np.float32) * np.float32(wanted)
            return _bf16(drawn + np.float32(name.endswith(("norm.weight", "norm"))))
        case Part("", "F32"):
            return (numbers.standard_normal(size // 4, np.float32) * np.float32(wanted)).tobytes()
        case Part("", "I64"):  # experts of each id: an odd step in a power of two meets none twice
            rows, chosen = size // 8 // shape[-1], np.arange(shape[-1])
            first, step = (numbers.integers(0, 128, (2, rows, 1)) * 2 + 1).astype("<i8")
            return ((first + step * chosen) % 256).astype("<i8").tobytes()
        case Part("" | ".weight", "F8_E4M3"):
            codes = numbers.integers(0, 256, size, np.uint8)
            return (codes - ((codes & 0x7F) == 0x7F)).tobytes()  # no NaN
        case Part("_packed") | Part(".weight", "I8"):
            return numbers.bytes(size)
        case Part("_blocks"):  # tens of gigabytes: by all threads at once
            return numbers.bit_generator.random_raw(size // 8)
        case Part(".scale") if ".experts." not in name:  # e8m0 of FP8
            return _two_powers(numbers, round(np.log2(wanted / _rms_e4m3())) - 1, size)
        case Part("_scale_inv"):
            scale = wanted / _rms_e4m3()
            return (numbers.uniform(0.8, 1.2, size // 4) * scale).astype("<f4").tobytes()
        case Part("_scale", "BF16"):
            scale = wanted / np.sqrt(np.mean(np.arange(-8.0, 8.0) ** 2))
            return _bf16((numbers.uniform(0.8, 1.2, size // 2) * scale).astype(np.float32))
        case _:  # e8m0 of MXFP4
            codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            exponent = round(np.log2(wanted / np.sqrt(np.mean(codes**2))))
            return _two_powers(numbers, exponent, size)


def _two_powers(numbers: np.random.Generator, least: int, size: int) -> bytes:
    """2^least and the next one, as e8m0."""
    import numpy as np

    return (numbers.integers(0, 2, size, np.uint8) + (127 + least)).astype("u1").tobytes()


def _rms_e4m3() -> float:
    """Of all codes that are numbers."""
    import numpy as np

    values = np.arange(0x7F)
    exponents = np.maximum(values >> 3, 1) - 10.0
    codes = ((values & 7) + 8 * (values >= 8)) * 2.0**exponents
    return float(np.sqrt(np.mean(codes**2)))


def _bf16(numbers: NDArray[np.float32]) -> bytes:
    import numpy as np

    return (np.frombuffer(numbers.tobytes(), "<u4") >> 16).astype("<u2").tobytes()
