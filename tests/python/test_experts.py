"""Experts of shapes that no checkpoint in the repository has, on the simulator beside the CPU:
several of a column multiplied as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kie
import numpy as np
import pytest
from kie.bench import random_weights
from kie.cli import main

_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "num_experts_per_tok": 4,
}
_QWEN: dict[str, Any] = _SMALL | {"num_experts": 8, "moe_intermediate_size": 128}
_OSS: dict[str, Any] = _SMALL | {
    "num_local_experts": 8,
    "experts_per_token": 4,
    "intermediate_size": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("spec", "sizes", "device", "stacks"),
    [
        ("qwen3-30b-fp8", _QWEN, "sim:blocks=32,seed=3", {"GateUp": 2}),
        ("qwen3-30b-fp8", _QWEN, "sim:blocks=32,seed=4,ranks=2", {"GateUp": 4}),
        ("gpt-oss-120b", _OSS, "sim:blocks=32,seed=5,warp=64", {"GateUp": 2}),
    ],
)
def test_stacked_experts_are_as_on_the_cpu(
    spec: str,
    sizes: dict[str, Any],
    device: str,
    stacks: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(random_weights.SPECS, "small", random_weights.SPECS[spec] | sizes)
    folder = random_weights.write("small", tmp_path / "small")
    with pytest.raises(SystemExit):
        main(["info", str(folder), "--plan", "-v", "--device", device, "--max-seq-len", "128"])
    told = capsys.readouterr().out.splitlines()
    for matrix, experts in stacks.items():
        [line] = [line for line in told if line.startswith(f"  class 0 {matrix} ")]
        assert line.endswith(f"; {experts} experts at once"), line
    ids = [(7 * i * i + 3 * i + 5) % 200 + 3 for i in range(8)]
    ours, wanted = (_logits(folder, each, ids) for each in (device, "cpu"))
    for row, of_cpu in zip(ours, wanted, strict=True):
        assert np.linalg.norm(row - of_cpu) <= 4e-3 * np.linalg.norm(of_cpu)


def _logits(folder: Path, device: str, ids: list[int]) -> Any:
    with kie.Engine(folder, device=device, max_seq_len=128) as engine:
        return np.asarray(engine.logits(ids, path="decode"), np.float64)


@pytest.mark.parametrize("experts", [8, 200, 300])
def test_equal_logits_of_the_router_go_to_the_lower_id(experts: int, tmp_path: Path) -> None:
    sizes = _QWEN | {"num_experts": experts, "moe_intermediate_size": 32}
    config = random_weights.SPECS["qwen3-30b"] | sizes | {"num_hidden_layers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_weights.SPECS, "small", config)
        folder = random_weights.write("small", tmp_path / "small")
    path = folder / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    told = json.loads(path.read_bytes()[8 : 8 + header])["model.layers.0.mlp.gate.weight"]
    begin, end = told["data_offsets"]
    shape = (experts, (end - begin) // 2 // experts)
    router = np.memmap(path, np.uint16, "r+", 8 + header + begin, shape)
    # Alike in runs of three, which no group of experts divides.
    router[:] = router[np.arange(experts) // 3 * 3]
    router.flush()
    ids = [(11 * i * i + 5 * i + 2) % 300 + 3 for i in range(12)]
    ours, wanted = (_logits(folder, device, ids) for device in ("sim:blocks=8,seed=6", "cpu"))
    for row, of_cpu in zip(ours, wanted, strict=True):
        assert np.linalg.norm(row - of_cpu) <= 4e-3 * np.linalg.norm(of_cpu)


def test_random_weights_of_v4_flash_are_as_many_as_are_published(tmp_path: Path) -> None:
    config = random_weights.SPECS["deepseek-v4-flash"]
    sizes = (
        part.bytes
        for name, shape in random_weights.tensors(config)
        for part in random_weights.parts(config, name, shape)
    )
    assert round(sum(sizes) / 1e9, 1) == 156.0
    assert round(random_weights.bytes_a_token(config) / 1e9, 2) == 11.24
    small = config | {
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "head_dim": 64,
        "vocab_size": 4096,
        "compress_ratios": [0, 0, 4, 128, 4, 0],
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 16,
        "moe_intermediate_size": 128,
        "num_hash_layers": 1,
        "max_position_embeddings": 4096,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_weights.SPECS, "small", small)
        folder = random_weights.write("small", tmp_path / "small")
    logits = _logits(folder, "cpu", [(7 * i * i + 3 * i + 5) % 200 + 3 for i in range(20)])
    assert np.isfinite(logits).all()
    assert np.abs(logits).max() > 1
