"""Torch's recurrent layers, one after the other: its own tracing of several forgets the dropout between them (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
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


#: torch's functions of several recurrent layers to the ones that are traced in their place.
LAYERED = MappingProxyType({func: _split(func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)})
