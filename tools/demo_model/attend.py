"""Attention with exact masks: causal, inside one document, and at most `window` keys if it is set.

Three implementations of one function. "dense" is the obvious one and the yardstick; "flex"
and "sdpa" are fast and are used only where their losses and gradients agree with it.
q [batch, heads, tokens, dim], k and v [batch, kv_heads, tokens, dim]. A window counts the
current key.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

How = Literal["dense", "sdpa", "flex"]
Mask = Any  # what the matching maker returns
BLOCK = 128


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def dense_mask(doc: Tensor, window: int) -> Tensor:
    """True where a query sees a key, [batch, 1, tokens, tokens]; doc [batch, tokens]."""
    p = torch.arange(doc.shape[1], device=doc.device)
    seen = (p[:, None] >= p) & (doc[:, :, None] == doc[:, None, :])
    return (seen & (p[:, None] - p < window) if window else seen)[:, None]


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int) -> Tensor:
    k, v = repeat_kv(q, k, v)
    s = wide(q @ k.mT) / math.sqrt(q.shape[-1])
    return s.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


def sdpa_mask(doc: Tensor, window: int) -> Tensor:
    seen = dense_mask(doc, window)
    return torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, float("-inf"))


def sdpa_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int) -> Tensor:
    k, v = repeat_kv(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def flex_mask(doc: Tensor, window: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Which 128 x 128 blocks flex_attention must visit.

    That follows from the first and the last document of each block, since document numbers only
    grow along a sequence. Built outside the compiled part, as plain tensors.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first, last = doc[:, ::BLOCK], doc[:, BLOCK - 1 :: BLOCK]
    i = torch.arange(doc.shape[1] // BLOCK, device=doc.device)
    gap = i[:, None] - i  # query block minus key block
    need = (gap >= 0) & (last[:, None, :] >= first[:, :, None])
    full = need & (gap > 0) & (first[:, None, :] == last[:, :, None])
    if window:
        need = need & (gap * BLOCK - (BLOCK - 1) < window)
        full = full & (gap * BLOCK + (BLOCK - 1) < window)

    def ordered(m: Tensor) -> tuple[Tensor, Tensor]:
        m = m[:, None].to(torch.int32)
        count = m.sum(-1).to(torch.int32)
        order = m.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return count.contiguous(), order.contiguous()

    b = BlockMask.from_kv_blocks(*ordered(need & ~full), *ordered(full), BLOCK_SIZE=BLOCK)
    by_query = (b.kv_num_blocks, b.kv_indices, b.full_kv_num_blocks, b.full_kv_indices)
    by_key = (b.q_num_blocks, b.q_indices, b.full_q_num_blocks, b.full_q_indices)
    return doc.contiguous(), tuple(t.contiguous() for t in by_query + by_key)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    doc, parts = mask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= j) & (doc[b, i] == doc[b, j])
        return seen & (i - j < window) if window else seen

    size = (doc.shape[1], doc.shape[1])
    blocks = BlockMask(size, *parts, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)


MAKE_MASK = {"dense": dense_mask, "sdpa": sdpa_mask, "flex": flex_mask}
ATTEND = {"dense": dense_attend, "sdpa": sdpa_attend, "flex": flex_attend}
