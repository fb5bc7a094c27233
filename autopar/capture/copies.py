"""Copies of a model: as it is, without values, or with memory to be filled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def copied(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy. What a forward computed and a module keeps (the older weight norm keeps its weight) is copied without its graph.

    ``memo``: copies to take for objects, by their id.
    """
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
    return copy.deepcopy(model, {**{id(value): value.detach().clone() for value in kept}, **(memo or {})})


def without_values(model: nn.Module) -> nn.Module | None:
    """A copy of a model whose parameters and buffers are on meta, ties kept. None where a model can't be copied."""
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(t, device="meta")
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    try:
        return copied(model, memo)
    except Exception:  # noqa: BLE001 - whatever the model holds: it is then kept itself
        return None


def filled(model: nn.Module) -> nn.Module:
    """A copy of a model on meta with memory on the CPU, ties kept. Floats are NaN, so that what isn't initialised shows."""
    out = copied(model)
    names: dict[int, list[str]] = {}
    for name, p in out.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    out = out.to_empty(device="cpu")
    for first, *others in names.values():  # to_empty makes a new parameter for every name
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(out.get_submodule(path), attribute, out.get_parameter(first))
    with torch.no_grad():
        for t in (*out.parameters(), *out.buffers()):
            t.fill_(torch.nan) if t.is_floating_point() or t.is_complex() else t.zero_()
    return out
