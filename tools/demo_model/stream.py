"""Training windows from token files and from shards of generated tasks; the held-out loss."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from attend import How
from model import BOS, Laneformer
from torch import Tensor


class Stream:
    """Documents in a new random order every epoch, one after the other, cut into windows.

    `weights` says how often a document of each kind is used in an epoch; without it the documents
    come once and in file order.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        device: str,
        weights: list[float] | None = None,
        seed: int = 0,
    ) -> None:
        def load(end: str, dtype: type[np.generic]) -> np.ndarray:
            return np.fromfile(folder / f"{split}.{end}", dtype)

        self.tokens = torch.from_numpy(load("bin", np.uint16).astype(np.int16)).to(device)
        self.starts = torch.from_numpy(load("idx", np.int64)).to(device)
        self.kinds = torch.from_numpy(load("kind", np.uint8)).to(device)
        self.weights, self.seed = weights, seed
        self.epoch = self.pos = 0
        self.order: Tensor | None = None
        self.order_kind: Tensor | None = None

    def build(self) -> Tensor:
        """Lay out this epoch's tokens; the order follows from the seed and the epoch."""
        device, n = self.tokens.device, len(self.kinds)
        gen = torch.Generator(device).manual_seed(self.seed * 100_003 + self.epoch)
        docs = torch.arange(n, device=device)
        if self.weights:
            w = torch.tensor(self.weights, device=device)[self.kinds.long()]
            times = (w + torch.rand(n, device=device, generator=gen)).floor().long()
            docs = docs.repeat_interleave(times)
            docs = docs[torch.randperm(len(docs), device=device, generator=gen)]
        length = (self.starts[1:] - self.starts[:-1])[docs]
        end = length.cumsum(0)
        shift = (self.starts[docs] - (end - length)).repeat_interleave(length)
        self.order = self.tokens[torch.arange(int(end[-1]), device=device) + shift]
        if not self.weights:
            self.order_kind = self.kinds[docs].repeat_interleave(length)
        return self.order

    def next(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [rows, length]."""
        order = self.build() if self.order is None else self.order
        n = rows * length
        if self.pos + n + 1 > len(order):
            self.epoch, self.pos = self.epoch + 1, 0
            order = self.build()
        t = order[self.pos : self.pos + n + 1].long()
        self.pos += n
        return t[:-1].view(rows, length), t[1:].view(rows, length)


CONTEXT_ONLY = 0x4000
"""Bit of a token that is read and not learned: its target becomes <s>, which has no loss."""


class Shards:
    """Generated tasks from `synth_00000.bin`, ... of a folder, which may still be growing.

    Process `rank` of `world` takes every `world`-th shard. Where the next one is not there yet, an
    old one is repeated; where there is none at all, the first is waited for.
    """

    def __init__(self, folder: Path, device: str, rank: int, world: int, seed: int) -> None:
        self.folder, self.device, self.world, self.number = folder, device, world, rank
        self.rng = np.random.default_rng(seed * 1000 + rank)
        self.seen: list[Path] = []
        self.repeats = 0
        self.left = torch.zeros(0, dtype=torch.int16, device=device)

    def following(self) -> Path:
        while True:
            path = self.folder / f"synth_{self.number:05d}.bin"
            if path.exists():
                self.seen.append(path)
                self.number += self.world
                return path
            if self.seen:
                self.repeats += 1
                return self.seen[self.rng.integers(len(self.seen))]
            time.sleep(0.2)

    def next(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [rows, length]."""
        n = rows * length
        while len(self.left) < n + 1:
            tokens = np.fromfile(self.following(), np.uint16).astype(np.int16)
            self.left = torch.cat([self.left, torch.from_numpy(tokens).to(self.device)])
        t = self.left[: n + 1].long()
        self.left = self.left[n:]
        ids = t & (CONTEXT_ONLY - 1)
        targets = torch.where(t & CONTEXT_ONLY != 0, BOS, ids)
        return ids[:-1].view(rows, length), targets[1:].view(rows, length)


class Mixture:
    """Rows of real source and of generated tasks, in a share that the caller names."""

    def __init__(self, real: Stream, generated: Shards | None) -> None:
        self.real, self.generated = real, generated
        self.real_tokens = self.generated_tokens = 0

    def next(self, rows: int, length: int, real_share: float) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [rows, length]; real rows first."""
        real = rows if self.generated is None else round(rows * real_share)
        self.real_tokens += real * length
        self.generated_tokens += (rows - real) * length
        if self.generated is None or real == rows:
            return self.real.next(rows, length)
        if real == 0:
            return self.generated.next(rows, length)
        x, y = self.real.next(real, length)
        more_x, more_y = self.generated.next(rows - real, length)
        return torch.cat([x, more_x]), torch.cat([y, more_y])


@torch.no_grad()
def evaluate(
    model: Laneformer, how: How, folder: Path, rows: int, length: int, kinds: list[str]
) -> dict[str, float]:
    """Mean held-out loss by kind of document, in nats a token; targets <s> are left out."""
    device = str(next(model.parameters()).device)
    val = Stream(folder, "val", device)
    order, step = val.build(), rows * length
    assert val.order_kind is not None, "a stream without weights knows its kinds"
    total, count = torch.zeros(8, device=device), torch.zeros(8, device=device)
    for start in range(0, len(order) - 1, step):
        t = order[start : start + step + 1].long()
        kind = val.order_kind[start + 1 : start + step + 1].long()
        x = torch.full((step + 1,), BOS, device=device)
        x[: len(t)] = t
        inputs, targets = x[:-1].view(rows, length), x[1:].view(rows, length)
        loss = model.token_losses(inputs, targets, how=how)
        valid = (t[1:] != BOS).float()
        total.index_add_(0, kind, loss[: len(kind)] * valid)
        count.index_add_(0, kind, valid)
    means = {name: float(total[i] / count[i]) for i, name in enumerate(kinds) if count[i] > 0}
    means["all"] = float(total.sum() / count.sum())
    return {name: round(mean, 4) for name, mean in means.items()}
