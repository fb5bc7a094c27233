"""Bucket: a flat tensor whose members lie at offsets. What ZeRO shards, and what gives every element one owner."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autopar.layout.mesh import Mesh
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
        partial: those of them over which the gradients are still unreduced.
        numel: elements with padding at the end, a multiple of the number of owners.
    """

    name: str
    dtype: torch.dtype
    group: int
    axes: tuple[str, ...]
    partial: tuple[str, ...]
    members: tuple[Member, ...]
    numel: int

    def owners(self, mesh: Mesh) -> int:
        """How many ranks share the bucket."""
        return mesh.count(self.axes)

    def part(self, mesh: Mesh) -> int:
        """Elements that one rank owns."""
        return self.numel // self.owners(mesh)


def padded(numel: int, owners: int) -> int:
    """The least multiple of ``owners`` that holds ``numel`` elements."""
    return -(-numel // owners) * owners
