"""A checkpoint that says what it is told to: calls, reasoning, text, for the tests of the server.

Each token has one successor: embeddings are one-hot, the only layer is zero, and the head holds
the successors. A prompt ends with a token that begins a script: the one whose name stands behind
the last `#` of the last message, `done` behind a tool's result, else `plain`. The template has
tools, calls and reasoning in the form of Qwen's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH = 640
"""Of everything: hidden size and vocabulary."""
CALL = '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
SCRIPTS = {
    "plain": "Hello! This is a plain answer, and nothing else.",
    "call": "Let me look.\n\n" + CALL.format("Zürich"),
    "two": CALL.format("Oslo") + "\n" + CALL.format("Rome"),
    "done": "It is sunny there.",
    "think": "<think>\nI wonder whether.\n</think>\n\nYes, indeed.",
    "broken": 'Well <tool_call>{"name": "get_weather", "arguments": {"city": </tool_call> oh.',
}
TEMPLATE = """
{%- if tools %}<|system|>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %} answer with <tool_call></tool_call>
{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}
{%- set last = messages[-1] %}
{%- if last.role == "tool" %}<|done|>
{%- elif "#" in last.content %}<|{{ last.content.split("#")[-1] }}|>
{%- else %}<|plain|>
{%- endif %}
{%- endif %}"""


def letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def pieces(text: str, used: set[str], draw: random.Random) -> list[str]:
    """A text in pieces of a few bytes that no other text has: each is a token of its own."""
    table = letters()
    whole = "".join(table[byte] for byte in text.encode())
    cut: list[str] = []
    begin = 0
    while begin < len(whole):
        end = begin + draw.randrange(1, 6)
        while whole[begin:end] in used and end <= len(whole):
            end += 1
        piece = whole[begin:end]
        if piece in used:
            piece = cut.pop() + piece
        used.add(piece)
        cut.append(piece)
        begin = end
    return cut


def configuration(end: int) -> dict[str, Any]:
    """config.json of a model of one layer that ends with this token."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "num_attention_heads": 10,
        "num_hidden_layers": 1,
        "num_key_value_heads": 10,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": WIDTH,
        "eos_token_id": end,
    }


def tokens(vocab: dict[str, int], specials: list[str]) -> dict[str, Any]:
    """tokenizer.json of a vocabulary without merges."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[name], "content": name, "special": True, **flags} for name in specials
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def write(folder: Path) -> Path:
    """Writes the checkpoint."""
    table = letters()
    specials = ["</s>", *(f"<|{name}|>" for name in SCRIPTS)]
    vocab = {token: n for n, token in enumerate([*table, *specials])}
    successors: dict[int, int] = {}
    draw = random.Random(7)
    used = set(table)
    for name, text in SCRIPTS.items():
        at = vocab[f"<|{name}|>"]
        for piece in pieces(text, used, draw):
            token = vocab.setdefault(piece, len(vocab))
            successors[at] = token
            at = token
    assert len(vocab) <= WIDTH
    head = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    end = vocab["</s>"]
    # As sure as the others: requests draw, and many have no seed.
    head[end, :] = 1
    for before, after in successors.items():
        head[end, before] = 0
        head[after, before] = 1
    zero = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    small = np.zeros((64, WIDTH), dtype=np.float32)
    ones = np.ones(WIDTH, dtype=np.float32)
    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": np.eye(WIDTH, dtype=np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": head,
        f"{layer}.input_layernorm.weight": ones,
        f"{layer}.post_attention_layernorm.weight": ones,
        **{f"{layer}.self_attn.{name}_proj.weight": zero for name in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": small,
        f"{layer}.mlp.up_proj.weight": small,
        f"{layer}.mlp.down_proj.weight": small.T.copy(),
    }
    save_file({name: value.copy() for name, value in tensors.items()}, folder / "model.safetensors")
    named = {"eos_token": "</s>", "chat_template": TEMPLATE}
    files = {
        "config": configuration(end),
        "tokenizer": tokens(vocab, specials),
        "tokenizer_config": named,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    return folder
