"""The processes that torchrun started, one a GPU; one by itself without it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WAIT_MAX = datetime.timedelta(seconds=400)


class Ranks:
    """Who this process is, and what all of them agree on."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        gpu = torch.cuda.is_available()
        self.device = "cuda" if gpu else "cpu"
        if self.world == 1:
            return
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if gpu else "gloo", timeout=WAIT_MAX)

    def agree(self, value: float) -> float:
        """Rank 0's value, on all."""
        if self.world == 1:
            return value
        word = torch.tensor([value], device=self.device, dtype=torch.float64)
        distributed.broadcast(word, 0)
        return float(word)

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Every gradient becomes its mean over the ranks."""
        if self.world == 1:
            return
        each = list(gradients)
        flat = parameters_to_vector(each)
        distributed.all_reduce(flat)
        vector_to_parameters(flat / self.world, each)
