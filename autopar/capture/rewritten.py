"""Functions of torch written out in other ops, because of how torch (2.13) traces them.

Several recurrent layers in one call lose the dropout between them; the multi-label margin loss reads labels behind the end mark; a
bag of embeddings is one op whose bags can't be cut.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _layers(
    func: Callable[..., Any], x: Tensor, hx: Any, params: list[Tensor], biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """What ``func`` gives for all layers: outputs, then final states. Masks lie as in torch: over (sequence, batch, features)."""
    states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    of_layer, ways = len(params) // layers, 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    last: list[tuple[Tensor, ...]] = []
    for k in range(layers):
        own = [s[k * ways : (k + 1) * ways] for s in states]
        given = own if isinstance(hx, (tuple, list)) else own[0]
        x, *ends = func(x, given, params[k * of_layer : (k + 1) * of_layer], biases, 1, 0.0, train, bidirectional, False)
        last.append(tuple(ends))
        if k < layers - 1:
            x = torch.dropout(x, dropout, train)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*last, strict=True)))


def _split(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # packed sequences have their batch sizes second, and the rest one further; capture refuses them, since shapes depend on data
        if kwargs or len(args) != 9 or not isinstance(args[3], bool) or not (args[5] and args[6] and args[4] > 1):
            return func(*args, **kwargs)
        return _layers(func, *args)

    return run


def _multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """``sum over labels l and other classes c of max(0, 1 - x[l] + x[c]) / classes``; labels [..., classes] end at the first below 0."""
    if size_average is not None or reduce is not None:  # the older way to say it
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    counts = (target >= 0).cumprod(-1) > 0
    labels = torch.where(counts, target, 0)
    labelled = (F.one_hot(labels, input.shape[-1]) * counts[..., None]).amax(-2) > 0
    margin = 1 - input.gather(-1, labels)[..., :, None] + input[..., None, :]
    kept = counts[..., :, None] & ~labelled[..., None, :]
    loss = torch.where(kept, margin.clamp(min=0), 0).sum((-2, -1)) / input.shape[-1]
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum, mean or maximum of the rows of every bag; ids [bags, length], or [ids] that ``offsets`` cuts into bags."""
    flat = input.dim() == 1 and offsets is not None
    if max_norm is not None or sparse or (flat and mode == "max") or input.dim() != (1 if flat else 2):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    kept = torch.ones_like(input, dtype=torch.bool) if padding is None else input != padding
    if mode == "max":
        best = torch.where(kept[..., None], rows, -torch.inf).max(1).values
        return torch.where(kept.any(1, keepdim=True), best, 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    rows = torch.where(kept[..., None], rows, 0)
    count = kept.to(rows.dtype)
    if flat:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        bag = torch.searchsorted(starts, torch.arange(len(input)), right=True) - 1
        total = rows.new_zeros(len(starts), weight.shape[1]).index_add(0, bag, rows)
        count = count.new_zeros(len(starts)).index_add(0, bag, count)
    else:
        total, count = rows.sum(1), count.sum(1)
    return total if mode == "sum" else total / count.clamp(min=1)[:, None]


#: a function of torch to the one that is traced in its place.
REWRITTEN = MappingProxyType({
    **{func: _split(func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    F.multilabel_margin_loss: _multilabel_margin_loss,
    F.embedding_bag: _embedding_bag,
})  # fmt: skip
