"""Store a checkpoint's matrices as FP8 (e4m3), one float32 scale a 128 x 128 block of a lane.

    python quantise_fp8.py out demo

The embedding and the norms stay in BF16. `NAME.weight` becomes F8_E4M3 of the same shape, with
scales `NAME.weight_scale_inv` [..., ceil(rows / 128), ceil(cols / 128)]. Weight = code * scale.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from export import save_shards
from safetensors import safe_open
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
SHARD_BYTES_MAX = 14 * 2**20
RELATIVE_ERROR_MAX = 0.04
KEPT = "model.tok_embeddings"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, cols] to e4m3 codes of that shape and float32 scales of the blocks."""
    *lead, rows, cols = weight.shape
    down, across = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = torch.zeros(*lead, down * BLOCK, across * BLOCK)
    padded[..., :rows, :cols] = weight.float()
    tiles = padded.view(*lead, down, BLOCK, across, BLOCK)
    scale = tiles.abs().amax((-3, -1)).clamp_min(1e-12) / E4M3_MAX
    codes = (tiles / scale[..., :, None, :, None]).view_as(padded)[..., :rows, :cols]
    return codes.contiguous().to(torch.float8_e4m3fn), scale.contiguous()


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrix that the codes and scales stand for."""
    rows, cols = codes.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return codes.float() * wide.repeat_interleave(BLOCK, -1)[..., :cols]


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a sharded checkpoint."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        with safe_open(folder / shard, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if set(tensors) != set(index):
        raise ValueError(f"{folder}: the shards do not hold what the index says")
    return tensors


def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantise the matrices; a matrix that loses more than 4 % (relative norm) is an error."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or name.startswith(KEPT):
            out[name] = tensor
            continue
        codes, scale = quantise(tensor)
        error = (dequantise(codes, scale) - tensor.float()).norm() / tensor.float().norm()
        if error >= RELATIVE_ERROR_MAX:
            raise ValueError(f"{name}: FP8 would lose {error:.3f} of its norm")
        out[name], out[name.replace(".weight", ".weight_scale_inv")] = codes, scale
    return out


def file_order(name: str) -> tuple[bool, bool, str]:
    """The embedding first, the head last."""
    return not name.startswith("model.tok"), name.startswith("lm_head"), name


def main() -> None:
    parser = argparse.ArgumentParser(description="Store a checkpoint's matrices as FP8 blocks.")
    parser.add_argument("source", type=Path, help="BF16 checkpoint folder")
    parser.add_argument("target", type=Path, help="where the FP8 checkpoint goes")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    out = convert(load(args.source))
    ordered = {name: out[name] for name in sorted(out, key=file_order)}
    total = save_shards(ordered, args.target, SHARD_BYTES_MAX)
    config = json.loads((args.source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [KEPT],
    }
    (args.target / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.source / name, args.target / name)
    print(f"{total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
