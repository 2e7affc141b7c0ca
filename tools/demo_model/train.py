"""Train the default model on token files of real source and on shards of generated tasks.

    python prepare_data.py --out data && torchrun --nproc_per_node 2 train.py --synth synth

Needs CUDA GPUs with BF16, one process each; lower --micro-tokens for small ones. `--small` trains a
tiny model and also runs on a CPU. The checkpoint lands in --out in the form that inference engines
read. Half of every batch is real source, and less in the last fifth of the run.
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
from ranks import Ranks
from stream import Mixture, Shards, Stream, evaluate
from torch import Tensor, nn

SHORT, LONG = 1024, 2048
LOG_EVERY = 50
LAST_FIFTH = 0.8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Laneformer on token files.")
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("out"), help="where the weights go")
    add("--report", type=Path, default=Path("log.json"))
    add("--synth", type=Path, help="folder with shards of generated tasks")
    add("--real-share", type=float, default=0.5, help="rows of real source, of all rows")
    add("--real-share-end", type=float, default=0.35, help="the same in the last fifth of the run")
    add("--mode", choices=["dtp", "tp"], default="dtp", help="tp: the twin without a delay")
    add("--steps", type=int, default=4000, help="length of the run, unless --seconds")
    add("--seconds", type=float, default=0, help="length of the run in seconds of training")
    add("--until", type=float, default=0, help="be done by this time, in seconds since 1970")
    add("--stop-after", type=float, default=0, help="checkpoint and stop after these seconds")
    add("--save-every", type=float, default=150, help="seconds between saves of latest.pt in --out")
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
    add("--dry-run", action="store_true", help="check attention, time both lengths, write nothing")
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
        self.born = self.saved = time.time()
        self.ranks = Ranks()
        self.device = self.ranks.device
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
        rank, world = self.ranks.rank, self.ranks.world
        seed = args.seed + 7919 * rank
        real = Stream(args.data, "train", self.device, list(weights.values()), seed)
        shards = Shards(args.synth, self.device, rank, world, args.seed) if args.synth else None
        self.stream = Mixture(real, shards)
        self.attention: dict[int, How] = {}
        self.state: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "log": []}
        self.losses: list[Tensor] = []
        self.done = 0.0
        self.warm: set[int] = set()

    def say(self, *words: object) -> None:
        if self.ranks.rank == 0:
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
        """Share of the run that is done, 0 to 1, the same on all ranks."""
        args, done = self.args, self.state["step"] / self.args.steps
        if args.seconds:
            done = min(1.0, self.state["seconds"] / args.seconds)
        if args.until:
            done = max(done, min(1.0, (time.time() - self.born) / (args.until - self.born)))
        return self.ranks.agree(done)

    def length(self) -> int:
        """Sequence length of the next step."""
        length = LONG if self.done >= self.args.long_from else SHORT
        return length // 8 if self.args.small else length

    def rate(self) -> float:
        """Factor on the learning rates: linear warm-up, then a cosine down to 1 %."""
        warm = min(1.0, (self.state["step"] + 1) / self.args.warmup)
        return warm * max(0.01, 0.5 * (1 + math.cos(math.pi * self.done)))

    def optimise(self, length: int, factor: float) -> Tensor:
        """One step over `batch_tokens`; returns the mean loss."""
        args = self.args
        rows = args.micro_tokens // length
        micro = max(1, args.batch_tokens // args.micro_tokens // self.ranks.world)
        share = args.real_share if self.done < LAST_FIFTH else args.real_share_end
        total = torch.zeros((), device=self.device)
        for _ in range(micro):
            x, y = self.stream.next(rows, length, share)
            losses = self.model.token_losses(x, y, how=self.how(length))
            loss = losses.sum() / (args.micro_tokens * micro)
            loss.backward()
            total = total + loss.detach()
        self.ranks.average(p.grad for p in self.model.parameters() if p.grad is not None)
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
        state, last = self.state, self.done >= 1.0
        if state["step"] % LOG_EVERY and not last:
            return
        mean = float(torch.stack(self.losses[-LOG_EVERY:]).mean())
        if not math.isfinite(mean):
            raise RuntimeError(f"step {state['step']}: the loss is not finite")
        entry: dict[str, Any] = {
            "step": state["step"],
            "tokens": state["tokens"],
            "real": self.stream.real_tokens * self.ranks.world,
            "generated": self.stream.generated_tokens * self.ranks.world,
            "epoch": self.stream.real.epoch,
            "seconds": round(state["seconds"], 1),
            "train": round(mean, 4),
        }
        if (state["step"] % self.args.eval_every == 0 or last) and self.ranks.rank == 0:
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
        self.done = self.progress()
        self.record(length)
        if self.ranks.rank == 0 and time.time() - self.saved > self.args.save_every:
            self.save_weights()

    def save_weights(self) -> None:
        """The weights so far as `latest.pt`, BF16."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        weights = {k: v.to(torch.bfloat16) for k, v in self.model.state_dict().items()}
        part = self.args.out / "latest.tmp"
        torch.save({"model": weights, "step": self.state["step"]}, part)
        part.rename(self.args.out / "latest.pt")
        self.saved = time.time()

    def dry_run(self) -> None:
        """Whether attention agrees with its dense form at both lengths, and what a step takes."""
        for length in (SHORT, LONG):
            how = self.how(length)
            self.optimise(length, 1e-3)
            began = time.time()
            for _ in range(4):
                loss = self.optimise(length, 1e-3)
            rate = 4 * self.args.batch_tokens / (time.time() - began)
            self.say(f"length {length}, {how}: {rate / 1e6:.3f} M tokens/s, loss {float(loss):.3f}")

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
        self.stream.real.epoch, self.stream.real.pos = saved["epoch"], saved["pos"]
        self.done = self.progress()
        self.say(f"continuing at step {self.state['step']}")

    def save(self) -> None:
        if self.args.checkpoint:
            saved = {
                "model": self.model.state_dict(),
                "adam": self.adam.state_dict(),
                "muon": self.muon.buffers,
                "state": self.state,
                "epoch": self.stream.real.epoch,
                "pos": self.stream.real.pos,
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
        if self.args.dry_run:
            self.dry_run()
            return
        self.restore()
        while self.done < 1.0:
            if self.args.stop_after and time.time() - self.born > self.args.stop_after:
                break
            self.step()
        if self.ranks.rank != 0:
            return
        self.save()
        if self.done >= 1.0:
            self.final_loss()
        self.state["torch"] = torch.__version__
        self.state["args"] = {k: str(v) for k, v in vars(self.args).items()}
        self.args.report.write_text(json.dumps(self.state))
        export(self.model, self.args.data, self.args.out)


if __name__ == "__main__":
    Trainer(arguments()).run()
