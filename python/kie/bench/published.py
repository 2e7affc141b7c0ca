"""Sizes of models that are not at hand: the fields of their config.json that a token's bytes follow
from, and what others project for them."""

from __future__ import annotations

from typing import Any

from kie.bench.random_weights import SPECS

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: config | {"torch_dtype": "bfloat16"} for name, config in SPECS.items()},
    "llama-3.1-70b": SPECS["llama-3.1-8b"]
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"intermediate_size": 28672, "torch_dtype": "bfloat16"},
    "llama-3.1-8b-fp8": SPECS["llama-3.1-8b"]
    | {"torch_dtype": "bfloat16", "quantization_config": _FP8},
    "qwen3-coder-next": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "quantization_config": _FP8,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "kimi-k2.6": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "vocab_size": 163840,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
    },
}

PROJECTED: dict[tuple[str, str], tuple[float, str]] = {
    ("qwen3-coder-next", "8xH200"): (3650, "Kog, projection"),
    ("gpt-oss-120b", "8xH200"): (2200, "Kog, projection"),
    ("deepseek-v4-flash", "8xH200"): (1160, "Kog, projection"),
    ("kimi-k2.6", "8xH200"): (325, "Kog, projection"),
    ("laneformer-2b", "8xH200"): (2100, "Kog, measured"),
    ("laneformer-2b", "8xMI300X"): (3000, "Kog, measured"),
}
"""Tokens a second at batch 1 that others print (blog.kog.ai, May 2026), and what they call it."""
