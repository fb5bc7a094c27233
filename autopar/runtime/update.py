"""The end of a step: every bucket is updated as soon as its gradient is there, and its gather for the next step begun."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.comm import Comm, Handle
from autopar.runtime.executor import State


def update_order(gathers: Sequence[int], count: int) -> list[int]:
    """In which order buckets are updated: those that no gather follows, then the others as the next step needs them.

    The bucket of the first layers is the first to be needed and the last whose gradient is reduced: another one is updated meanwhile.

    Args:
        gathers: indices of the gathered buckets, in the order in which a step waits for them.
        count: how many buckets there are, numbered as their gradients are made.
    """
    alone, order = [k for k in range(count) if k not in gathers], list(gathers)
    if len(order) > 1 and order[0] == count - 1:
        order[:2] = order[1::-1]
    return alone + order


def update(
    state: State, grads: Sequence[Tensor | Handle], optimizer: torch.optim.Optimizer, gathers: Sequence[int], comm: Comm
) -> tuple[Tensor, ...]:
    """Updates bucket by bucket with an optimizer that can step some of its parameters at a time; gives the gradients."""
    done: set[int] = set()
    waiting = list(gathers)
    found: dict[int, Tensor] = {}
    state.changed()
    for k in update_order(gathers, len(state.parts)):
        grad = grads[k]
        state.parts[k].grad = found[k] = grad.wait() if isinstance(grad, Handle) else grad
        optimizer.step()
        state.parts[k].grad = None
        done.add(k)
        while waiting and waiting[0] in done:  # messages travel in the order in which they were sent
            state.begin_gather(waiting.pop(0), comm)
    return tuple(found[k] for k in range(len(state.parts)))
