"""Causal attention of a piece of the queries, which torch's fused ops don't have: they take the first query to be at the first key.

Scores are made for some queries at a time and of the keys that these see, so what is masked costs nothing and no matrix of all scores
is ever held. Sums over keys go by the logsumexp of the scores, as in every fused attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: elements of the scores that are made at a time.
_SCORES = 2**22


def _by_key_heads(x: Tensor, heads: int) -> Tensor:
    """[b, h, q, d] as [b, heads, h / heads, q, d]: query heads that share a key head."""
    return x.unflatten(1, (heads, x.shape[1] // heads))


def _rows(q: Tensor, k: Tensor, start: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Some queries at a time: which, how many of the first keys they see, and the mask [rows, keys] of what each doesn't."""
    size = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if torch.compiler.is_compiling() or type(q) is not Tensor:  # only shapes, or code being made: one turn
        size = q.shape[2]
    for first in range(0, q.shape[2], size):
        last = min(first + size, q.shape[2])
        count = min(start + last, k.shape[2])
        hidden = torch.ones((last - first, count), dtype=torch.bool, device=q.device).triu(start + first + 1)
        yield slice(first, last), count, hidden


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of queries [b, h, q, d] at positions ``start`` and after over the keys and values [b, g, k, d] at no later position.

    The output [b, h, q, e], and the logsumexp of the scores [b, h, q].
    """
    scale, heads = _scale(q, scale), k.shape[1]
    grouped, out, lse = _by_key_heads(q, heads), [], []
    for rows, count, hidden in _rows(q, k, start):
        scores = _wide(grouped[..., rows, :] @ k[:, :, None, :count].mT).mul_(scale).masked_fill_(hidden, -math.inf)
        lse.append(torch.logsumexp(scores, -1))
        out.append(scores.sub_(lse[-1].unsqueeze(-1)).exp_().to(v.dtype) @ v[:, :, None, :count])
    return torch.cat(out, -2).flatten(1, 2), torch.cat(lse, -1).flatten(1, 2)


def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, start: int, *, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of such queries [b, h, q, d], and what they add to those of the keys [b, g, k, d] and values [b, g, k, e].

    ``out`` and ``lse`` are the results of the forward.
    """
    scale, heads = _scale(q, scale), k.shape[1]
    grad, q_, lse = _by_key_heads(grad, heads), _by_key_heads(q, heads), lse.unflatten(1, (heads, -1))
    mean = (_wide(grad) * _by_key_heads(out, heads)).sum(-1, keepdim=True)
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, count, hidden in _rows(q, k, start):
        near, far = k[:, :, None, :count], v[:, :, None, :count]
        scores = _wide(q_[..., rows, :] @ near.mT).mul_(scale).masked_fill_(hidden, -math.inf)
        weight = scores.sub_(lse[..., rows].unsqueeze(-1)).exp_()
        dv[:, :, :count] += (weight.to(v.dtype).mT @ grad[..., rows, :]).sum(2)
        slope = _wide(grad[..., rows, :] @ far.mT).sub_(mean[..., rows, :]).mul_(weight).mul_(scale).to(k.dtype)
        dq.append(slope @ near)
        dk[:, :, :count] += (slope.mT @ q_[..., rows, :]).sum(2)
    return torch.cat(dq, -2).flatten(1, 2), dk, dv


def _wide(x: Tensor) -> Tensor:
    """Scores are summed in float32 where they are of a half type, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
