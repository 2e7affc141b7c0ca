"""Train the default model on the token files of prepare_data.py.

    python prepare_data.py --out data && python train.py --seconds 850

Needs one CUDA GPU with BF16; lower --micro-tokens for a small one. `--small` trains a tiny model
and also runs on a CPU. The checkpoint lands in --out in the form that inference engines read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attend import How
from export import export
from model import BOS, CONFIG, SMALL, Laneformer
from muon import Muon
from stream import Stream, evaluate
from torch import Tensor, nn

SHORT, LONG = 1024, 2048
LOG_EVERY = 50


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Laneformer on token files.")
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("out"), help="where the weights go")
    add("--log", type=Path, default=Path("log.json"))
    add("--mode", choices=["dtp", "tp"], default="dtp", help="tp: the twin without a delay")
    add("--steps", type=int, default=4000, help="length of the run, unless --seconds")
    add("--seconds", type=float, default=0, help="length of the run in seconds of training")
    add("--stop-after", type=float, default=0, help="checkpoint and stop after these seconds")
    add("--checkpoint", type=Path, help="continue from this file if it exists; write it at the end")
    add("--batch-tokens", type=int, default=262_144)
    add("--micro-tokens", type=int, default=131_072)
    add("--long-from", type=float, default=0.85, help="share of the run before long sequences")
    add("--lr", type=float, default=4e-3, help="Muon's, for the layers' matrices")
    add("--adam-lr", type=float, default=4e-3, help="AdamW's, for the rest")
    add("--weight-decay", type=float, default=0.2)
    add("--warmup", type=int, default=100)
    add("--eval-every", type=int, default=500)
    add("--seed", type=int, default=0)
    add("--small", action="store_true", help="a tiny model, for a test on a CPU")
    return parser.parse_args()


def random_batch(rows: int, length: int, device: str, vocab: int) -> tuple[Tensor, Tensor]:
    """Random documents of about 400 tokens."""
    t = torch.randint(3, vocab, (rows * length + 1,), device=device)
    t[torch.rand(len(t), device=device) < 1 / 400] = BOS
    return t[:-1].view(rows, length), t[1:].view(rows, length)


def pick_attention(model: Laneformer, length: int, rows: int, device: str) -> How:
    """The first fast attention whose losses and gradients agree with the dense float32 form."""
    x, y = random_batch(rows, length, device, model.c["vocab_size"])
    model.zero_grad(set_to_none=True)
    logits = model(x[:2], dtype=torch.float32)
    want = F.cross_entropy(logits, y[:2].flatten(), reduction="none") * (y[:2].flatten() != BOS)
    want.sum().backward()
    want = want.detach()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values()))
    choices: tuple[How, ...] = ("flex", "sdpa")
    for how in choices:
        model.zero_grad(set_to_none=True)
        try:
            got = model.token_losses(x, y, how=how)[: 2 * length]
            got.sum().backward()
        except Exception as error:  # a kernel that this machine cannot build is not used
            print(f"length {length}, {how}: {type(error).__name__}: {error}", flush=True)
            continue
        loss_error = float((got.detach() - want).norm() / want.norm())
        off = sum(
            float((p.grad - gradients[n]).norm()) ** 2
            for n, p in model.named_parameters()
            if p.grad is not None
        )
        model.zero_grad(set_to_none=True)
        gradient_error = math.sqrt(off) / norm
        print(f"length {length}, {how}: off by {loss_error:.1e}, {gradient_error:.1e}", flush=True)
        if loss_error < 0.02 and gradient_error < 0.1:
            return how
    raise RuntimeError("no attention implementation agrees with the dense form")


class Trainer:
    """A run: the model, its two optimisers, the data and the progress."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.born = time.time()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        config = CONFIG | SMALL if args.small else dict(CONFIG)
        self.model = Laneformer(config, args.mode).to(self.device)
        if self.device == "cuda":
            self.model.compile_parts()
        named = list(self.model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 3 and "layers" in n]
        self.others = [p for n, p in named if p.ndim != 3 or "layers" not in n]
        self.muon = Muon(matrices, weight_decay=args.weight_decay)
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in self.others if p.ndim > 1], "weight_decay": 0.01},
                {"params": [p for p in self.others if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=args.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=self.device == "cuda",
        )
        weights: dict[str, float] = json.loads((args.data / "sources.json").read_text())[
            "epoch_weight"
        ]
        self.kinds = list(weights)
        self.stream = Stream(args.data, "train", self.device, list(weights.values()), args.seed)
        self.attention: dict[int, How] = {}
        self.state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "log": []}
        self.losses: list[Tensor] = []
        self.warm: set[int] = set()

    def say(self, *words: object) -> None:
        print(f"[{time.time() - self.born:6.1f}s]", *words, flush=True)

    def how(self, length: int) -> How:
        """The attention for sequences of this length, checked once."""
        if length not in self.attention:
            fast = self.device == "cuda"
            rows = self.args.micro_tokens // length
            picked = pick_attention(self.model, length, rows, self.device) if fast else "dense"
            self.attention[length] = picked
        return self.attention[length]

    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        if self.args.seconds:
            return min(1.0, self.state["seconds"] / self.args.seconds)
        return self.state["step"] / self.args.steps

    def length(self) -> int:
        """Sequence length of the next step."""
        length = LONG if self.progress() >= self.args.long_from else SHORT
        return length // 8 if self.args.small else length

    def rate(self) -> float:
        """Factor on the learning rates: linear warm-up, then a cosine down to 1 %."""
        warm = min(1.0, (self.state["step"] + 1) / self.args.warmup)
        return warm * max(0.01, 0.5 * (1 + math.cos(math.pi * self.progress())))

    def optimise(self, length: int, factor: float) -> Tensor:
        """One step over `batch_tokens`; returns the mean loss."""
        args = self.args
        rows = args.micro_tokens // length
        micro = max(1, args.batch_tokens // args.micro_tokens)
        total = torch.zeros((), device=self.device)
        for _ in range(micro):
            x, y = self.stream.next(rows, length)
            losses = self.model.token_losses(x, y, how=self.how(length))
            loss = losses.sum() / (args.micro_tokens * micro)
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = args.adam_lr * factor
        self.adam.step()
        self.muon.step(args.lr * factor)
        self.adam.zero_grad(set_to_none=True)
        self.muon.zero_grad()
        return total

    def evaluate(self, length: int) -> dict[str, float]:
        rows = self.args.micro_tokens // length
        how = self.how(length)
        return evaluate(self.model, how, self.args.data, rows, length, self.kinds)

    def record(self, length: int) -> None:
        """Log the mean of the last losses, with the held-out loss now and then."""
        state, last = self.state, self.progress() >= 1.0
        if state["step"] % LOG_EVERY and not last:
            return
        mean = float(torch.stack(self.losses[-LOG_EVERY:]).mean())
        if not math.isfinite(mean):
            raise RuntimeError(f"step {state['step']}: the loss is not finite")
        entry: dict[str, Any] = {
            "step": state["step"],
            "tokens": state["tokens"],
            "epoch": self.stream.epoch,
            "seconds": round(state["seconds"], 1),
            "train": round(mean, 4),
        }
        if state["step"] % self.args.eval_every == 0 or last:
            entry["val"] = self.evaluate(length)
        state["log"].append(entry)
        self.say(entry)

    def step(self) -> None:
        length, factor = self.length(), self.rate()
        self.how(length)
        began = time.time()
        self.losses.append(self.optimise(length, factor))
        if self.device == "cuda":
            torch.cuda.synchronize()
        if length in self.warm or not self.args.seconds:  # compiling is not training time
            self.state["seconds"] += time.time() - began
        self.warm.add(length)
        self.state["step"] += 1
        self.state["tokens"] += self.args.batch_tokens
        self.record(length)

    def restore(self) -> None:
        """Continue from the checkpoint if there is one."""
        if not self.args.checkpoint or not self.args.checkpoint.exists():
            return
        saved = torch.load(self.args.checkpoint, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        self.adam.load_state_dict(saved["adam"])
        for shape, buffer in self.muon.buffers.items():
            buffer.copy_(saved["muon"][shape])
        self.state = saved["state"]
        self.stream.epoch, self.stream.pos = saved["epoch"], saved["pos"]
        self.say(f"continuing at step {self.state['step']}")

    def save(self) -> None:
        if self.args.checkpoint:
            saved = {
                "model": self.model.state_dict(),
                "adam": self.adam.state_dict(),
                "muon": self.muon.buffers,
                "state": self.state,
                "epoch": self.stream.epoch,
                "pos": self.stream.pos,
            }
            torch.save(saved, self.args.checkpoint)

    @torch.no_grad()
    def final_loss(self) -> None:
        """The held-out loss of the weights as they are saved, rounded to BF16."""
        for weight in self.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
        length = LONG // 8 if self.args.small else LONG
        val = self.evaluate(length)
        self.state["final"] = {"bf16_weights": True, "length": length, "val": val}
        self.say(self.state["final"])

    def run(self) -> None:
        self.restore()
        while self.progress() < 1.0:
            if self.args.stop_after and time.time() - self.born > self.args.stop_after:
                break
            self.step()
        self.save()
        if self.progress() >= 1.0:
            self.final_loss()
        self.state["torch"] = torch.__version__
        self.state["args"] = {k: str(v) for k, v in vars(self.args).items()}
        self.args.log.write_text(json.dumps(self.state))
        export(self.model, self.args.data, self.args.out)


if __name__ == "__main__":
    Trainer(arguments()).run()
