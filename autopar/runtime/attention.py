"""Attention of a piece of the queries, which torch's fused ops don't have: they take the first query to be at the first key.

``causal_attention`` sees all keys; ``ring_attention`` sees those of one rank at a time, as they come around (Ring Attention,
arXiv 2310.01889), and keeps what it has so far normalised by the logsumexp so far.

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


def _rows(q: Tensor, k: Tensor, start: int) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Some queries at a time: which, how many of the first keys they see, and the mask [rows, keys] of what some of them don't."""
    size = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    if torch.compiler.is_compiling() or type(q) is not Tensor:  # only shapes, or code being made: one turn
        size = q.shape[2]
    for first in range(0, q.shape[2], size):
        last = min(first + size, q.shape[2])
        count = min(start + last, k.shape[2])
        if start + first + 1 >= count:
            yield slice(first, last), count, None
        else:
            yield slice(first, last), count, torch.ones((last - first, count), dtype=torch.bool, device=q.device).triu(start + first + 1)


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    scores = _wide(q @ k.mT).mul_(scale)
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of queries [b, h, q, d] at positions ``start`` and after over the keys and values [b, g, k, d] at no later position.

    The output [b, h, q, e], and the logsumexp of the scores [b, h, q].
    """
    scale, heads = _scale(q, scale), k.shape[1]
    grouped, out, lse = _by_key_heads(q, heads), [], []
    for rows, count, hidden in _rows(q, k, start):
        scores = _scores(grouped[..., rows, :], k[:, :, None, :count], scale, hidden)
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
        weight = _scores(q_[..., rows, :], near, scale, hidden).sub_(lse[..., rows].unsqueeze(-1)).exp_()
        dv[:, :, :count] += (weight.to(v.dtype).mT @ grad[..., rows, :]).sum(2)
        slope = _wide(grad[..., rows, :] @ far.mT).sub_(mean[..., rows, :]).mul_(weight).mul_(scale).to(k.dtype)
        dq.append(slope @ near)
        dk[:, :, :count] += (slope.mT @ q_[..., rows, :]).sum(2)
    return torch.cat(dq, -2).flatten(1, 2), dk, dv


def _parts(queries: int, keys: int, index: int, turn: int, ranks: int, causal: bool, zigzag: bool) -> list[tuple[slice, int]]:
    """The queries of rank ``index`` that see what it holds after ``turn`` turns, and where each part of them begins among those keys."""
    if not causal:
        return [(slice(0, queries), keys)]
    block, half = (index - turn) % ranks, queries // 2
    if zigzag:  # the second half is of the rank as far from the last as this one is from the first
        found = [(slice(0, half), (index - block) * keys), (slice(half, queries), (ranks - 1 - index - block) * keys + half)]
    else:
        found = [(slice(0, queries), (index - block) * keys)]
    return [(rows, start) for rows, start in found if start >= 0]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, index: int, turn: int, ranks: int, causal: bool,
    zigzag: bool, *, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One turn of attention around a ring: ``out`` [b, h, q, e] and ``lse`` [b, h, q] of the keys so far, and of one rank's [b, g, k, d].

    Rank ``index`` of ``ranks`` holds the keys of rank ``index - turn``; where ``causal``, there are as many queries as keys. With
    ``zigzag`` its queries are a first and a second half of two ranks' (``comm.mirror``), so that all see as many keys (Striped Attention,
    arXiv 2311.09431, has the same aim). In the first turn ``out`` is None; after the last it has the type of ``v``, until then that in
    which scores are summed.
    """
    if out is None or lse is None:
        kind = _wide(v[:0]).dtype
        out, lse = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=kind), q.new_full(q.shape[:3], -math.inf, dtype=kind)
    outs, sums, at = [], [], 0
    for rows, start in _parts(q.shape[2], k.shape[2], index, turn, ranks, causal, zigzag):
        more, by = causal_attention(q[:, :, rows], k, v, start, scale=scale)
        both = torch.logaddexp(lse[:, :, rows], by)
        before, now = (lse[:, :, rows] - both).exp_().unsqueeze(-1), (by - both).exp_().unsqueeze(-1)
        outs += [out[:, :, at : rows.start], out[:, :, rows] * before + more * now]
        sums += [lse[:, :, at : rows.start], both]
        at = rows.stop
    out, lse = torch.cat([*outs, out[:, :, at:]], 2), torch.cat([*sums, lse[:, :, at:]], 2)
    return out.to(v.dtype) if turn == ranks - 1 else out, lse


def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    index: int, turn: int, ranks: int, causal: bool, zigzag: bool, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One turn of its backward: the gradient of the queries so far, and those of the keys and values that this rank has in this turn."""
    dq, dk, dv = (torch.zeros_like(x) if so_far is None else so_far.clone() for x, so_far in ((q, dq), (k, dk), (v, dv)))
    for rows, start in _parts(q.shape[2], k.shape[2], index, turn, ranks, causal, zigzag):
        own, near, far = causal_attention_backward(
            grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], start, scale=scale
        )
        dq[:, :, rows] += own
        dk += near
        dv += far
    return dq, dk, dv


def _wide(x: Tensor) -> Tensor:
    """Scores are summed in float32 where they are of a half type, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
