"""Muon: momentum, then each matrix's update is orthogonalised (K. Jordan, 2024).

Every lane's matrix is orthogonalised by itself; equal shapes are stacked into one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, for a batch [n, r, c]."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Optimiser for 3-D parameters [lanes, rows, columns]."""

    def __init__(
        self, params: Iterable[nn.Parameter], weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients; the root mean square of it is 0.2, as with AdamW."""
        for shape, params in self.groups.items():
            g = torch.stack([p.grad for p in params if p.grad is not None])
            momentum = self.buffers[shape].lerp_(g, 1 - self.momentum)
            u = orthogonalise(g.lerp(momentum, self.momentum).flatten(0, 1)).view_as(g)
            scale = 0.2 * math.sqrt(max(shape[-2:]))
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
            torch._foreach_add_(params, list((u * scale).unbind(0)), alpha=-lr)

    def zero_grad(self) -> None:
        for params in self.groups.values():
            for p in params:
                p.grad = None
