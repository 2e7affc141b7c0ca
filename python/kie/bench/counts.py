"""What one token takes, from a config.json alone: bytes by part, and exchanges.

A *part* is read once a token. An *exchange* is a step that some blocks write and others wait for;
it *crosses* where its words come from other GPUs. Counts follow the layers as kie runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from kie.bench import random_weights
from kie.errors import UnsupportedModelError

WORD_BYTES = 4
"""Bytes of a word of an exchange, without its sequence number, a number each."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that a token reads."""

    name: str
    bytes: float
    format: str = "bf16"
    """bf16, fp8 or 4bit: how fast a device turns them into products."""
    chosen: bool = False
    """Known only once a router has chosen."""
    ranks: int = 1 << 30
    """Over how many GPUs it can be dealt at most; each of more reads its share again."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A wait for others' words, `times` times a token."""

    name: str
    times: int
    words: float
    """Words that a block gathers on one GPU."""
    split: bool = False
    """Whether each of several GPUs gathers its share only."""
    cross: bool = False
    us: float = 0.4
    """What follows the words and no stream hides: the product's end, a choice, a softmax."""
    chosen: bool = False
    """Behind it, chosen weights are asked for."""


@dataclass(slots=True)
class Counts:
    """A model, counted."""

    stored: float = 0.0
    """Bytes of the checkpoint."""
    parts: list[Part] = field(default_factory=list[Part])
    exchanges: list[Exchange] = field(default_factory=list[Exchange])

    @property
    def bytes(self) -> float:
        """Bytes a token."""
        return sum(part.bytes for part in self.parts)

    def weights(
        self, name: str, layers: int, each: float, width: float, all_of: float = 1.0, **more: Any
    ) -> None:
        """`layers` times `each` numbers of `width` bytes; `all_of` times as many are stored."""
        kind = "bf16" if width >= 2 else "fp8" if width >= 1 else "4bit"
        self.parts.append(Part(name, layers * each * width, kind, **more))
        self.stored += layers * each * width * all_of

    def head(self, vocab: int, hidden: int, width: float = 2) -> None:
        """Output matrix and the choice of the token; the embedding beside it is only stored."""
        self.weights("head", 1, vocab * hidden, width)
        self.stored += vocab * hidden * 2
        self.exchanges.append(Exchange("head", 1, hidden, cross=True, us=0.4))
        self.exchanges.append(Exchange("choice of the token", 1, 0, us=8))


def count(config: Mapping[str, Any], context: int) -> Counts:
    """Counts a model at `context` positions.

    Raises UnsupportedModelError for an architecture that is not counted here, or a field that is
    missing.
    """
    config = config.get("text_config", config)
    kind = config.get("model_type", "")
    counters = {
        "qwen3_next": _qwen3_next,
        "gpt_oss": _gpt_oss,
        "deepseek_v4": _deepseek_v4,
        "deepseek_v3": _latent,
        "kimi_k2": _latent,
        "kimi_k25": _latent,
        **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), _dense),
        **dict.fromkeys(("laneformer", "laneformer_tp"), _dense),
    }
    if kind not in counters:
        raise UnsupportedModelError(
            f"config.json: model_type {kind!r} is not counted",
            hint=f"there are {', '.join(counters)}",
            context={"field": "model_type"},
        )
    found = Counts()
    try:
        counters[kind](found, config, context)
    except KeyError as cause:
        raise UnsupportedModelError(
            f"config.json of a {kind}: {cause.args[0]} is missing",
            context={"field": str(cause.args[0])},
        ) from cause
    return found


def _fp8(config: Mapping[str, Any], default: float = 2) -> float:
    """Bytes of a number that the checkpoint's FP8 covers: a byte and its share of the scales."""
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "fp8":
        return default
    scale = 1 if quantization.get("scale_fmt") == "ue8m0" else 2
    return 1 + scale / prod(quantization.get("weight_block_size") or (128, 128))


def _attention(
    found: Counts, layers: int, hidden: int, out: float, *, cross: bool = True, merge: bool = True
) -> None:
    """Exchanges of ordinary attention: queries, softmax, parts merged, output."""
    found.exchanges.append(Exchange("x", layers, hidden, cross=cross))
    found.exchanges.append(Exchange("queries to attention", layers, 640, us=0.8))
    if merge:
        found.exchanges.append(Exchange("parts to merge", layers, 0, us=0.28))
    found.exchanges.append(Exchange("attention to output", layers, out, split=True))


def _experts(
    found: Counts, layers: int, hidden: int, scores: float, act: float, choose_us: float
) -> None:
    """Exchanges of a mixture: router, choice, output."""
    found.exchanges.append(Exchange("h to router", layers, hidden, cross=True))
    choice = Exchange("scores to experts", layers, scores, us=0.4 + choose_us, chosen=True)
    found.exchanges.append(choice)
    found.exchanges.append(Exchange("experts to output", layers, act, split=True))


def _dense(found: Counts, config: Mapping[str, Any], context: int) -> None:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    config = {"head_dim": hidden // config["num_attention_heads"], **config}
    width = _fp8(config, 4 if config.get("torch_dtype") == "float32" else 2)
    shapes = dict(random_weights.tensors(dict(config)))
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    embedding = config["vocab_size"] * hidden
    outputs = sum(size for name, size in matrices.items() if name.startswith("lm_head"))
    inside = sum(matrices.values()) - embedding - outputs
    found.weights("attention and mlp", 1, inside, width)
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    window = config.get("sliding_window") or context
    windowed = len(config.get("swa_layers", ()) or ()) or config.get("sliding_window_n_layers", 0)
    if config.get("model_type") == "mistral":
        windowed = layers
    positions = windowed * min(window, context) + (layers - windowed) * context
    kv = Part("keys and values", positions * 2 * kv_heads * dim * 2, ranks=kv_heads)
    found.parts.append(kv)
    delayed = "num_lanes" in config
    heads = config["num_attention_heads"] * dim
    _attention(found, layers, hidden, heads, cross=not delayed)
    found.exchanges.append(Exchange("h", layers, hidden, cross=not delayed))
    found.exchanges.append(Exchange("mlp", layers, config["intermediate_size"], split=True))
    found.head(config["vocab_size"], hidden, width if delayed else 2)
    if config.get("tie_word_embeddings"):
        found.stored -= embedding * 2


def _qwen3_next(found: Counts, config: Mapping[str, Any], context: int) -> None:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    full = layers // config["full_attention_interval"]
    delta, width = layers - full, _fp8(config)
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    projections = hidden * (2 * keys + 2 * values) + hidden * values
    found.weights("delta-net projections", delta, projections, width)
    small = 2 * config["linear_num_value_heads"] * hidden
    small += (2 * keys + values) * config["linear_conv_kernel_dim"]
    found.weights("delta-net gates and convolution", delta, small, 2)
    dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    heads = config["num_attention_heads"] * dim
    found.weights("attention", full, hidden * (3 * heads + 2 * kv_heads * dim), width)
    found.weights("router", layers, config["num_experts"] * hidden, 2, ranks=1)
    shared = config["shared_expert_intermediate_size"]
    found.weights("shared expert", layers, 3 * hidden * shared, width)
    found.weights("shared expert's gate", layers, hidden, 2)
    inner, chosen = config["moe_intermediate_size"], config["num_experts_per_tok"]
    one = 3 * hidden * inner * chosen
    more = config["num_experts"] / chosen
    found.weights("chosen experts", layers, one, width, more, chosen=True)
    state = delta * config["linear_num_value_heads"] * config["linear_key_head_dim"]
    state *= config["linear_value_head_dim"] * 4 * 2
    found.parts.append(Part("state, read and written", state))
    kv = full * context * 2 * kv_heads * dim * 2
    found.parts.append(Part("keys and values", kv, ranks=kv_heads))
    found.exchanges.append(Exchange("x", delta, hidden, cross=True))
    found.exchanges.append(Exchange("projections to state", delta, 640, us=0.55))
    found.exchanges.append(Exchange("state to output", delta, values, split=True))
    _attention(found, full, hidden, heads)
    # Scores are float32 with their sequence number: twice the bytes.
    scores, act = 2 * config["num_experts"], chosen * inner + shared
    _experts(found, layers, hidden, scores, act, 0.3)
    found.head(config["vocab_size"], hidden)


def _gpt_oss(found: Counts, config: Mapping[str, Any], context: int) -> None:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    windowed = sum(kind == "sliding_attention" for kind in config["layer_types"])
    dim, kv_heads = config["head_dim"], config["num_key_value_heads"]
    heads, chosen = config["num_attention_heads"] * dim, config["num_experts_per_tok"]
    inner, experts = config["intermediate_size"], config["num_local_experts"]
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    mxfp4 = quantization.get("quant_method") == "mxfp4"
    found.weights("attention", layers, hidden * (2 * heads + 2 * kv_heads * dim), 2)
    found.weights("router", layers, experts * hidden, 2, ranks=1)
    width = 4.25 / 8 if mxfp4 else 2
    biases = 2 * (2 * inner + hidden) / width
    each, more = chosen * (3 * hidden * inner + biases), experts / chosen
    found.weights("chosen experts", layers, each, width, more, chosen=True)
    positions = windowed * min(config["sliding_window"], context) + (layers - windowed) * context
    kv = positions * 2 * kv_heads * dim * 2
    found.parts.append(Part("keys and values", kv, ranks=kv_heads))
    _attention(found, windowed, hidden, heads, merge=False)
    _attention(found, layers - windowed, hidden, heads)
    _experts(found, layers, hidden, 2 * experts, chosen * inner, 0.15)
    found.head(config["vocab_size"], hidden)


def _latent(found: Counts, config: Mapping[str, Any], context: int) -> None:
    """DeepSeek-V3's attention: all heads read one latent vector a position."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense = config["first_k_dense_replace"]
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    width = _fp8(config)
    packed = quantization.get("quant_method") == "compressed-tensors"
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    query = config["q_lora_rank"]
    attention = hidden * query + query * heads * (nope + rope) + hidden * (rank + rope)
    attention += heads * (nope + value) * rank + hidden * heads * value
    found.weights("attention", layers, attention, width)
    found.weights("dense mlp", dense, 3 * hidden * config["intermediate_size"], width)
    mixed, inner = layers - dense, config["moe_intermediate_size"]
    found.weights("router", mixed, config["n_routed_experts"] * hidden, 2, ranks=1)
    shared = config["n_shared_experts"] * inner
    found.weights("shared expert", mixed, 3 * hidden * shared, width)
    chosen = config["num_experts_per_tok"]
    more = config["n_routed_experts"] / chosen
    each, four = chosen * 3 * hidden * inner, 4.5 / 8
    expert = four if packed else width
    found.weights("chosen experts", mixed, each, expert, more, chosen=True)
    # One latent a position for all heads: every GPU reads all of them.
    found.parts.append(Part("latents", layers * context * (rank + rope) * 2, ranks=1))
    found.exchanges += [
        Exchange("x", layers, hidden, cross=True),
        Exchange("latents", layers, query + rank + rope, cross=True),
        Exchange("queries to absorption", layers, 384, us=0.3),
        Exchange("absorbed to attention", layers, heads * (rank + rope) / 4, split=True, us=1.0),
        Exchange("parts to merge", layers, 0, us=0.33),
        Exchange("merged to values", layers, heads * value / 2, split=True, us=0.3),
        Exchange("values to output", layers, heads * value, split=True),
        Exchange("h", dense, hidden, cross=True),
        Exchange("mlp", dense, config["intermediate_size"], split=True),
    ]
    _experts(found, mixed, hidden, 768, chosen * inner + shared, 0.25)
    found.head(config["vocab_size"], hidden)


def _deepseek_v4(found: Counts, config: Mapping[str, Any], context: int) -> None:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    ratios = list(config["compress_ratios"])[:layers]
    sparse, heavy = ratios.count(4), ratios.count(128)
    width, dim = _fp8(config), config["head_dim"]
    heads, query = config["num_attention_heads"] * dim, config["q_lora_rank"]
    rows, groups = config["o_groups"] * config["o_lora_rank"], config["o_groups"]
    attention = hidden * query + query * heads + hidden * dim
    attention += rows * heads // groups + hidden * rows
    found.weights("attention", layers, attention, width)
    index, index_dim = config["index_n_heads"], config["index_head_dim"]
    entries = hidden * (4 * dim + 4 * index_dim + index)
    found.weights("compressors", 1, sparse * entries + heavy * hidden * 2 * dim, 2)
    found.weights("indexer", sparse, index * index_dim * query, width)
    streams = config["hc_mult"]
    mixes = 2 * (2 * streams + streams**2) * streams * hidden
    found.weights("hyper-connections", layers, mixes, 4)
    found.weights("router", layers, config["n_routed_experts"] * hidden, 2, ranks=1)
    inner, chosen = config["moe_intermediate_size"], config["num_experts_per_tok"]
    shared = config["n_shared_experts"] * inner
    found.weights("shared expert", layers, 3 * hidden * shared, width)
    more, each = config["n_routed_experts"] / chosen, chosen * 3 * hidden * inner
    expert = 4.25 / 8 if config.get("expert_dtype") == "fp4" else width
    found.weights("chosen experts", layers, each, expert, more, chosen=True)
    window, top = config["sliding_window"], config["index_topk"]
    keys = 2 * dim
    kv = sparse * ((min(top, context // 4) + window) * keys + context // 4 * 2 * index_dim)
    kv += (heavy * (context // 128 + window) + (layers - sparse - heavy) * window) * keys
    found.parts.append(Part("keys and index keys", kv, ranks=1))
    found.exchanges += [
        Exchange("stream dots", 2 * layers, 4400, cross=True, us=0.35),
        Exchange("x", layers, hidden),
        Exchange("latents", layers, query, cross=True),
        Exchange("queries to attention", layers, 640, us=1.0),
        Exchange("parts to merge", layers, 0, us=0.33),
        Exchange("attention to groups", layers, heads / groups),
        Exchange("groups to output", layers, rows, split=True),
    ]
    if context > 4 * top:
        found.exchanges.append(Exchange("index scores", sparse, context / 2, cross=True, us=2.2))
    _experts(found, layers, hidden, 256, chosen * inner + shared, 0.2)
    # Its h comes with the second dots: the router's exchange crosses nothing.
    found.exchanges[-3] = Exchange("h to router", layers, hidden)
    found.head(config["vocab_size"], hidden)
    found.exchanges.append(Exchange("streams to one", 1, 4400, cross=True, us=0.2))
