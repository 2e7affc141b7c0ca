"""The Laneformer in PyTorch, in tensor form: all lanes at once, for training.

The hidden state exists once a lane: x[l] for l = 0 .. L-1. A lane has its own heads and its own
slice of the MLP. For both kinds of module (attention, MLP) of layer i, o[l] being its output:

    i <  delay:  x[l] += sqrt(L) * o_i[l]
    i >= delay:  x[l] += o_i[l] + sum over the other lanes j of o_{i-delay}[j]

so a lane never waits: the others' outputs arrive `delay` layers late. The head is split over the
vocabulary; lane l gives the logits of ids l*V/L .. (l+1)*V/L - 1 from its own stream.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from attend import ATTEND, MAKE_MASK, How, Mask, wide
from torch import Tensor, nn

BOS, EOS = 1, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LaneformerForCausalLM"],
    "model_type": "laneformer",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "num_lanes": 4,
    "broadcast_delay": 1,
    "use_early_comm": False,
    "use_attention_comm": True,
    "use_mlp_comm": True,
    "lm_head_type": "vocab_parallel",
    "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True,
    "sliding_window": 512,
    "swa_layers": [0, 1, 2, 3],
}
# What a tiny model for a test on a CPU changes.
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 16,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "sliding_window": 64,
    "swa_layers": [0, 1],
}
Mode = Literal["dtp", "tp"]
Rule = Literal["early", "delayed", "tp"]
Tables = tuple[Tensor, Tensor]


class LaneLinear(nn.Module):
    """One matrix a lane: weight [lanes, out, in]."""

    def __init__(self, lanes: int, out_features: int, in_features: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(lanes, out_features, in_features) * std)


class Scale(nn.Module):
    """The scale of an RMSNorm, [width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * scale).to(x.dtype)


def lane_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [lanes, tokens, in] times weight [lanes, out, in].

    On a GPU the tokens go through in a few groups with a copy of the weight each: the same product,
    and the weight's gradient becomes a larger batch of matrix products, which fills the GPU.
    """
    lanes, tokens, width = x.shape
    groups = 4 if x.is_cuda and tokens % 4096 == 0 else 1
    w = weight.to(x.dtype)
    if groups > 1:
        w = w.unsqueeze(1).expand(-1, groups, -1, -1).reshape(lanes * groups, *weight.shape[1:])
    product = torch.bmm(x.reshape(lanes * groups, tokens // groups, width), w.mT)
    return product.view(lanes, tokens, -1)


def rope_tables(length: int, dim: int, theta: float, like: Tensor, dtype: torch.dtype) -> Tables:
    """Cosines and sines, each [length, dim / 2]."""
    steps = torch.arange(0, dim, 2, device=like.device, dtype=dtype)
    angle = torch.arange(length, device=like.device, dtype=dtype)[:, None] * theta ** (-steps / dim)
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs; x [..., tokens, dim]."""
    a, b = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of every lane over its own heads."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        lanes, width, dim = c["num_lanes"], c["hidden_size"], c["head_dim"]
        heads, kv_heads = c["num_attention_heads"] // lanes, c["num_key_value_heads"] // lanes
        out_std = 0.02 / math.sqrt(2 * c["num_hidden_layers"])
        self.wq = LaneLinear(lanes, heads * dim, width, 0.02)
        self.wk = LaneLinear(lanes, kv_heads * dim, width, 0.02)
        self.wv = LaneLinear(lanes, kv_heads * dim, width, 0.02)
        self.wo = LaneLinear(lanes, width, heads * dim, out_std)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim

    def forward(
        self, h: Tensor, batch: int, tables: Tables, how: How, mask: Mask, window: int
    ) -> Tensor:
        """h [lanes, batch * length, width]; the output has the same shape."""
        lanes, tokens, _ = h.shape
        q_size, kv_size = self.heads * self.dim, self.kv_heads * self.dim
        weights = torch.cat([self.wq.weight, self.wk.weight, self.wv.weight], 1)

        def by_head(t: Tensor) -> Tensor:
            # To [batch, lanes * heads, tokens, dim]; lane-major, so that grouping stays in a lane.
            t = t.unflatten(-1, (-1, self.dim)).unflatten(1, (batch, -1))
            return t.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()

        qkv = lane_matmul(h, weights).split([q_size, kv_size, kv_size], -1)
        q, k, v = (by_head(t) for t in qkv)
        o = ATTEND[how](rope(q, *tables), rope(k, *tables), v, mask, window)
        o = o.unflatten(1, (lanes, -1)).permute(1, 0, 3, 2, 4).reshape(lanes, tokens, q_size)
        return lane_matmul(o, self.wo.weight)


class FeedForward(nn.Module):
    """The gated MLP of every lane."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        lanes, width, inner = c["num_lanes"], c["hidden_size"], c["intermediate_size"]
        self.w1 = LaneLinear(lanes, inner // lanes, width, 0.02)
        self.w3 = LaneLinear(lanes, inner // lanes, width, 0.02)
        std = 0.02 / math.sqrt(2 * c["num_hidden_layers"])
        self.w2 = LaneLinear(lanes, width, inner // lanes, std)

    def forward(self, h: Tensor) -> Tensor:
        both = lane_matmul(h, torch.cat([self.w1.weight, self.w3.weight], 1))
        gate, up = both.chunk(2, -1)
        return lane_matmul((F.silu(wide(gate)) * wide(up)).to(h.dtype), self.w2.weight)


class Layer(nn.Module):
    """Attention and MLP with their exchange between lanes."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm = Scale(c["hidden_size"])
        self.attention = Attention(c)
        self.ffn_norm = Scale(c["hidden_size"])
        self.feed_forward = FeedForward(c)
        self.lanes: int = c["num_lanes"]
        self.eps: float = c["norm_eps"]

    def add(self, x: Tensor, out: Tensor, late: Tensor | None, rule: Rule) -> Tensor:
        """The streams after a module put `out` [lanes, tokens, width]."""
        if rule == "early":  # nothing has arrived yet
            return x + math.sqrt(self.lanes) * out
        if rule == "delayed":  # own output at once, the others' late
            assert late is not None, "a delayed layer has layers before it"
            late = wide(late)
            others = late.sum(0, keepdim=True) - late
            return (wide(x) + wide(out) + others).to(x.dtype)
        return (wide(x) + wide(out).sum(0, keepdim=True)).to(x.dtype)

    def forward(
        self,
        x: Tensor,
        late: tuple[Tensor | None, Tensor | None],
        rule: Rule,
        batch: int,
        tables: Tables,
        how: How,
        mask: Mask,
        window: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: the streams [lanes, tokens, width], or [1, ...] while all are the same.

        `late` are the outputs of attention and MLP `delay` layers ago. Returns the streams and this
        layer's own two outputs.
        """
        h = rms_norm(x, self.attention_norm.weight, self.eps).expand(self.lanes, -1, -1)
        a = self.attention(h, batch, tables, how, mask, window)
        x = self.add(x, a, late[0], rule)
        h = rms_norm(x, self.ffn_norm.weight, self.eps).expand(self.lanes, -1, -1)
        m = self.feed_forward(h)
        return self.add(x, m, late[1], rule), a, m


class Backbone(nn.Module):
    """Embedding, layers, final norm; the names are the checkpoint's."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.tok_embeddings.weight, std=0.1)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Scale(c["hidden_size"])


class Laneformer(nn.Module):
    """Mode "dtp" is the model. Mode "tp" is its ordinary tensor-parallel twin, for comparison: the
    same tensors, with the outputs of all lanes summed at once into one stream.
    """

    def __init__(self, c: dict[str, Any], mode: Mode = "dtp") -> None:
        super().__init__()
        self.c, self.mode = c, mode
        self.model = Backbone(c)
        lanes = c["num_lanes"]
        self.lm_head = LaneLinear(lanes, c["vocab_size"] // lanes, c["hidden_size"], 0.02)

    def streams(self, ids: Tensor, dtype: torch.dtype, how: How) -> Tensor:
        """The streams after the last layer. Attention stays inside a document, from <s> on."""
        c, (batch, length) = self.c, ids.shape
        accurate = torch.float64 if dtype == torch.float64 else torch.float32
        tables = rope_tables(length, c["head_dim"], c["rope_theta"], ids, accurate)
        doc = (ids == BOS).cumsum(1, dtype=torch.int32)
        masks = {window: MAKE_MASK[how](doc, window) for window in (0, c["sliding_window"])}
        x = F.embedding(ids.flatten(), self.model.tok_embeddings.weight).to(dtype).unsqueeze(0)
        outputs: list[tuple[Tensor, Tensor]] = []
        for i, layer in enumerate(self.model.layers):
            past = i - c["broadcast_delay"]
            rule: Rule = "tp" if self.mode == "tp" else "early" if past < 0 else "delayed"
            late = outputs[past] if rule == "delayed" else (None, None)
            window = c["sliding_window"] if i in c["swa_layers"] else 0
            call = layer.forward if how == "dense" else layer  # the dense form stays uncompiled
            x, a, m = call(x, late, rule, batch, tables, how, masks[window], window)
            outputs.append((a, m))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[lanes, tokens, vocab / lanes]"""
        z = rms_norm(x, self.model.norm.weight, self.c["norm_eps"])
        return lane_matmul(z.expand(self.c["num_lanes"], -1, -1), self.lm_head.weight)

    def forward(
        self, ids: Tensor, dtype: torch.dtype = torch.bfloat16, how: How = "dense"
    ) -> Tensor:
        """Logits [batch * length, vocab] of ids [batch, length]."""
        return self.logits(self.streams(ids, dtype, how)).transpose(0, 1).flatten(1)

    def head_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        z = self.logits(x).transpose(0, 1).flatten(1)
        return F.cross_entropy(wide(z), targets, reduction="none") * (targets != BOS)

    def token_losses(
        self,
        ids: Tensor,
        targets: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        how: How = "dense",
    ) -> Tensor:
        """Cross-entropy of every position, [batch * length]; 0 where the target is <s>."""
        return self.head_losses(self.streams(ids, dtype, how), targets.flatten())

    def compile_parts(self) -> None:
        """Compile the layers (equal ones share their kernels) and the head."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.head_losses = torch.compile(self.head_losses, dynamic=False)
