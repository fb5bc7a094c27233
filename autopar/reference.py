"""The one-process run that every plan must equal: the plain model, whose random ops depend on the global element index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import ReplaceMode, takes_dtype, tree_leaves, tree_map
from autopar.capture import find_loss
from autopar.capture.source import Modules
from autopar.capture.tree import take_batch
from autopar.passes.canonicalize import stem_of
from autopar.runtime import ops
from autopar.runtime.random import REPLACEMENTS, site, step_key

#: ops whose kernels have no float64, by their definition.
DEFINED: Mapping[str, Callable[..., Tensor]] = {"aten._grouped_mm.default": ops.grouped_mm}


class ReplaceRandom(ReplaceMode):
    """Answers every random op as a program of autopar does: by seed, step, module path, call number and element index.

    Args:
        exact: computes in this type wherever the model asks for another floating-point type by itself.
    """

    def __init__(self, model: nn.Module, seed: int, step: int, exact: torch.dtype | None = None) -> None:
        super().__init__()
        self._exact = exact
        self._modules = Modules(model)
        self._key = step_key(seed, step)
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._sites: list[int] = []  # of the random calls so far, in order

    def __enter__(self) -> ReplaceRandom:
        self._entered = self._modules.entered()
        self._entered.__enter__()
        # how many random calls there were is kept as the seed of torch's generator: torch.utils.checkpoint puts that back before it runs
        # a region again, whose calls then are the ones they were
        self._before = torch.get_rng_state()
        torch.default_generator.manual_seed(len(self._sites))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._before)
        self._entered.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if self._exact is None:
            return self._answer(func, args, kwargs or {})
        args, kwargs = tree_map(self._lifted, (args, kwargs or {}))
        given = tree_leaves((args, kwargs))
        free = takes_dtype(func) and kwargs.get("dtype") is None and not any(isinstance(leaf, Tensor) for leaf in given)
        if free and str(func) in REPLACEMENTS and "int" not in str(func):
            kwargs = {**kwargs, "dtype": self._exact}
        result = self._answer(func, args, kwargs)
        if str(func) not in REPLACEMENTS and any(_other_float(leaf, self._exact) for leaf in tree_leaves(result)):
            # torch's default type: of a tensor made without a type, or of a quotient of integers
            if free:
                result = func(*args, **{**kwargs, "dtype": self._exact})
            elif "where" not in str(func):
                result = func(*tree_map(self._floated, args), **kwargs)
        held = {id(leaf) for leaf in given}
        return tree_map(lambda leaf: leaf if id(leaf) in held else self._lifted(leaf), result)

    def _floated(self, leaf: Any) -> Any:
        return leaf.to(self._exact) if isinstance(leaf, Tensor) else leaf

    def _lifted(self, leaf: Any) -> Any:
        """The exact type instead of any other floating-point type; a tensor in it."""
        if isinstance(leaf, torch.dtype):
            return self._exact if leaf.is_floating_point else leaf
        return leaf.to(self._exact) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def _answer(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = str(func)
        if name in DEFINED and args[0].dtype == torch.float64:
            return DEFINED[name](*args, **kwargs)
        if name not in REPLACEMENTS:
            return func(*args, **kwargs)
        index = torch.default_generator.initial_seed()
        if index == len(self._sites):
            place = (self._modules.current, stem_of(name))
            self._sites.append(site(*place, self._calls[place]))
            self._calls[place] += 1
        torch.default_generator.manual_seed(index + 1)
        return REPLACEMENTS[name](*args, **kwargs, key=self._key, site=self._sites[index])


def _other_float(leaf: Any, exact: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != exact


@dataclass
class Trace:
    """What a run of some steps gave: a loss a step, the gradients of the last step, and the final parameters and buffers."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def plain_steps(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
    seed: int = 0,
    exact: torch.dtype | None = None,
) -> Trace:
    """Trains ``model`` itself, one step a batch, and records what happened. A recompute region's writes to buffers count once.

    Args:
        exact: computes in this type also where the model casts to another one, as many do for their norms and their loss.
    """
    trace = Trace()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    opt = optimizer(named) if optimizer is not None else None
    for number, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        tree, tensors = take_batch(batch)
        with ReplaceRandom(model, seed, number, exact):
            value = find_loss(model, tree.call(model, tree.fill([t.clone() for t in tensors])), batch, loss)
            assert value is not None
            value = value.reshape(())
            buffers = [t.detach().clone() for t in model.buffers()]
            value.backward()  # which runs what is under torch.utils.checkpoint once more
            for t, once in zip(model.buffers(), buffers, strict=True):
                t.data.copy_(once)  # what a region writes to a buffer counts once
        trace.losses.append(value.detach())
        trace.gradients = {n: p.grad.detach().clone() for n, p in named if p.grad is not None}
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in named], clip_grad_norm)
        if opt is not None:
            opt.step()
    trace.state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return trace
