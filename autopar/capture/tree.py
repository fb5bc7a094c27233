"""Trees of the model's inputs and outputs: what is a tensor, what is baked in, and how the output is put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import TreeSpec, tree_paths, tree_unflatten
from autopar.errors import InputError

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


@dataclass(frozen=True)
class Slot:
    """Stands for the n-th tensor leaf."""

    index: int


@dataclass(frozen=True)
class Opaque:
    """Stands for an object in the model's output that is neither a tensor nor plain data nor a known container (a cache, say)."""

    kind: str


@dataclass(frozen=True)
class BatchTree:
    """A batch taken apart: paths of its tensor leaves, and how to call the model with others in their place."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    form: str

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tree_unflatten([tensors[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves], self.spec)

    def call(self, model: Any, batch: Any) -> Any:
        if self.form == "dict":
            return model(**batch)
        return model(*batch) if self.form == "tuple" else model(batch)


def take_batch(batch: Any) -> tuple[BatchTree, list[torch.Tensor]]:
    """Split a batch into its tree and its tensor leaves, in order."""
    form = "tuple" if isinstance(batch, (tuple, list)) else "dict" if isinstance(batch, Mapping) else "tensor"
    if form == "dict":
        batch = dict(batch)
        for key in batch:
            if not isinstance(key, str):
                raise InputError(f"The batch has the key {key!r}", why="a dict batch is passed as keyword arguments: model(**batch)")
    paths, leaves, spec = tree_paths(batch)
    tensors: list[torch.Tensor] = []
    slots: list[Any] = []
    names: list[str] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            slots.append(Slot(len(tensors)))
            tensors.append(leaf)
            names.append(path or "0")
            _check_leaf(path or "0", leaf)
        elif isinstance(leaf, _PLAIN):
            slots.append(leaf)
        else:
            raise InputError(
                f"The batch leaf {path or '0'!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}",
                why="leaves are tensors, numbers, strings, booleans or None, in tuples, lists and dicts",
                hint="torch.from_numpy for arrays; a container of your own can be registered with torch.utils._pytree",
            )
    if not tensors:
        raise InputError("The batch holds no tensor", hint="give a tensor, a tuple (model(*batch)) or a dict (model(**batch))")
    return BatchTree(tuple(names), tuple(slots), spec, form), tensors


def _check_leaf(path: str, leaf: torch.Tensor) -> None:
    if leaf.layout != torch.strided:
        raise InputError(f"The batch leaf {path!r} is sparse ({leaf.layout})", hint="pass it dense: .to_dense()")
    if leaf.requires_grad:
        raise InputError(f"The batch leaf {path!r} requires grad", why="a step returns gradients of parameters only", hint="detach it")


@dataclass(frozen=True)
class OutputTree:
    """The structure of a model's output, its tensors left out."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: TreeSpec


def take_output(output: Any) -> tuple[OutputTree, list[torch.Tensor]]:
    """Split a model's output into its tree and its tensor leaves, in order."""
    paths, leaves, spec = tree_paths(output)
    tensors: list[torch.Tensor] = []
    slots: list[Any] = []
    names: list[str] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            slots.append(Slot(len(tensors)))
            tensors.append(leaf)
            names.append(path)
        else:
            slots.append(leaf if isinstance(leaf, _PLAIN) else Opaque(type(leaf).__qualname__))
    return OutputTree(tuple(names), tuple(slots), spec), tensors


def rebuild_output(tree: OutputTree, leaves: Sequence[Any]) -> Any:
    """The model's output structure with ``leaves`` (one for each output of kind "output", in order) in place of its tensors."""
    return tree_unflatten([leaves[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in tree.leaves], tree.spec)
