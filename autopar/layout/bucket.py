"""Bucket: a flat tensor whose members lie at offsets. What ZeRO shards, and what gives every element one owner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.layout.mesh import Mesh, across, within
from autopar.layout.sharding import Sharding


@dataclass(frozen=True)
class Member:
    """A parameter's local piece inside a bucket: its first element and shape, and how the whole parameter is sharded."""

    path: str
    offset: int
    shape: tuple[int, ...]
    sharding: Sharding

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype and optimizer group that the same ranks hold.

    Attributes:
        axes: the axes over which every member is replicated: their ranks share the flat tensor, each owning one equal part.
        partial: those of them, and of ``copies``, over which the gradients are still unreduced.
        numel: elements with padding at the end, a multiple of the number of owners.
        copies: axes over which members are replicated too, but whose ranks own the same part.
    """

    name: str
    dtype: torch.dtype
    group: int
    axes: tuple[str, ...]
    partial: tuple[str, ...]
    members: tuple[Member, ...]
    numel: int
    copies: tuple[str, ...] = ()

    @property
    def scattered(self) -> tuple[str, ...]:
        """The axes over which gradients are reduced so that each owner has its part."""
        return tuple(a for a in self.partial if a in self.axes)

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which the gradients of a part are summed then."""
        return tuple(a for a in self.partial if a in self.copies)

    def owners(self, mesh: Mesh) -> int:
        """How many ranks share the bucket."""
        return mesh.count(self.axes)

    def part(self, mesh: Mesh) -> int:
        """Elements that one rank owns."""
        return self.numel // self.owners(mesh)


def share_out(axes: Iterable[str], mesh: Mesh, ranks: int | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes whose ranks own parts of what is replicated over ``axes``, and those whose ranks hold copies of these parts.

    Args:
        ranks: neighbours along ``dp`` that share out (hybrid sharding); None: all.
    """
    if ranks is None or ranks == mesh["dp"] or "dp" not in (axes := tuple(axes)):
        return tuple(axes), ()
    if ranks == 1:
        return tuple(a for a in axes if a != "dp"), ("dp",)
    return tuple(within(a, ranks) if a == "dp" else a for a in axes), (across("dp", ranks),)


def kept_bytes(buckets: Iterable[Bucket], mesh: Mesh, zero: int) -> tuple[int, int]:
    """Bytes of the parameters and of the gradients in buckets that a rank keeps between steps."""
    whole = sum(b.numel * b.dtype.itemsize for b in buckets)
    part = sum(b.part(mesh) * b.dtype.itemsize for b in buckets)
    return part if zero == 3 else whole, part if zero >= 2 else whole


def padded(numel: int, owners: int) -> int:
    """The least multiple of ``owners`` that holds ``numel`` elements."""
    return -(-numel // owners) * owners
