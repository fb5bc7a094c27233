"""Rows that data ranks hold unevenly, as of a short last batch: dealt out evenly where they divide, else all computed by everyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.comm import Comm


@dataclass
class Dealt:
    """What a rank computes instead of the rows it brought.

    Attributes:
        tensors: rows of this rank, or (``whole``) those of all.
        brought: of the whole batch, the ranks' rows one after the other: the first row that this rank brought, how many it brought, and
            how many rows ``tensors`` has.
        how: what was done, in words.
    """

    tensors: list[Tensor]
    brought: tuple[int, int, int]
    whole: bool
    how: str


def deal(comm: Comm, tensors: Sequence[Tensor], dims: Sequence[int | None], cut: bool) -> Dealt:
    """Deals rows out. Collective.

    Args:
        dims: which dim of each tensor counts samples; None where none does.
        cut: whether a rank may compute rows that it didn't bring. Else, and where they don't divide, every rank computes all.
    """
    mesh, ways, index = comm.mesh, comm.mesh["dp"], comm.coords.get("dp", 0)
    ranks = comm.exchange([t.cpu() for t in tensors], site="rows")
    firsts = [next(r for r in range(mesh.size) if mesh.coords(r).get("dp", 0) == at) for at in range(ways)]
    whole = [t if d is None else torch.cat([ranks[r][k] for r in firsts], d) for k, (t, d) in enumerate(zip(tensors, dims, strict=True))]
    counts = sorted({w.shape[d] for w, d in zip(whole, dims, strict=True) if d is not None})
    if not counts or not counts[0]:
        raise InputError("the batch has no rows on any rank").alike()
    even = cut and all(n % ways == 0 for n in counts)
    if even:
        whole = [w if d is None else w.tensor_split(ways, d)[index].contiguous() for w, d in zip(whole, dims, strict=True)]
    k, dim = next((k, d) for k, d in enumerate(dims) if d is not None)
    before = sum(ranks[r][k].shape[dim] for r in firsts[:index])
    how = "dealt out evenly" if even else f"{counts} rows don't divide by dp={ways}: every data rank computes all of them"
    return Dealt(whole, (before, tensors[k].shape[dim], whole[k].shape[dim]), not even, how)
