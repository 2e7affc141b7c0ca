"""Write a trained model as a checkpoint folder: BF16 shards, index, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from model import BOS, EOS, Laneformer
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES_MAX = 15 * 2**20 - 65536  # room for the header
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% elif message['role'] == 'user' or message['role'] == 'assistant' %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('Unknown role: ' + message['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def save_shards(tensors: dict[str, Tensor], out: Path, bytes_max: int) -> int:
    """Write shards and index in the given order; returns the tensors' bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        if size + count > bytes_max and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += count
        total += count
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def export(model: Laneformer, data: Path, out: Path) -> None:
    """Write everything an inference engine reads into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    state = model.state_dict()
    tensors = {k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in state.items()}
    save_shards(tensors, out, SHARD_BYTES_MAX)
    documents: dict[str, dict[str, Any]] = {
        "config.json": model.c,
        "generation_config.json": {
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "</s>",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.c["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2))
    shutil.copy(data / "tokenizer.json", out)
