"""Sharding: how one tensor is cut over the axes of a mesh. A pure value with a text form that parses back.

A tensor dim is a tuple of **atoms**, its finest factors: a fused qkv weight of 3*H*D rows has the dim ``(3 H D)``, a flattened
batch and sequence ``(B S)``. A mesh axis shards an atom, so a sharding can cut the heads of a fused weight, or the batch of
a flattened one. A local tensor keeps the rank of the global one: each dim has the product of its local atoms.

Axes that shard the same atom nest in the order of the mesh, outermost first.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.errors import LayoutError
from autopar.layout.mesh import Mesh

Combine = Literal["sum", "max", "min"]


@dataclass(frozen=True, order=True)
class Placement:
    """What one mesh axis does to one tensor: replicate it, shard an atom of it, or leave it unreduced (partial).

    ``atom`` counts the atoms of all dims from the left.
    """

    kind: Literal["replicate", "shard", "partial"]
    atom: int = -1
    combine: str = ""

    def __str__(self) -> str:
        return {"replicate": "R", "shard": f"S{self.atom}", "partial": f"P{self.combine}"}[self.kind]

    __repr__ = __str__


REPLICATE = Placement("replicate")
PARTIAL_SUM = Placement("partial", combine="sum")


def shard(atom: int) -> Placement:
    """The placement that shards atom number ``atom``."""
    return Placement("shard", atom)


def partial(combine: str) -> Placement:
    """The placement that leaves a tensor unreduced with the given combine."""
    return Placement("partial", combine=combine)


@dataclass(frozen=True)
class Sharding:
    """Atoms of every dim (global sizes) and the placement of every mesh axis that doesn't replicate, in mesh order.

    A dim of size 1 has no atoms.
    """

    dims: tuple[tuple[int, ...], ...]
    placements: tuple[tuple[str, Placement], ...] = ()

    @property
    def atoms(self) -> tuple[int, ...]:
        """Global sizes of all atoms, from the left."""
        return tuple(a for dim in self.dims for a in dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(dim) for dim in self.dims)

    def on(self, axis: str) -> Placement:
        """What an axis does."""
        return dict(self.placements).get(axis, REPLICATE)

    def with_placement(self, axis: str, placement: Placement, mesh: Mesh) -> Sharding:
        """The same sharding with one axis changed."""
        return _changed(self, axis, placement, mesh)

    def axes_of(self, atom: int) -> tuple[str, ...]:
        """The axes that shard an atom, outermost first."""
        return tuple(a for a, p in self.placements if p == shard(atom))

    def partial_axes(self) -> tuple[tuple[str, str], ...]:
        """(axis, combine) of the axes over which the value is unreduced."""
        return tuple((a, p.combine) for a, p in self.placements if p.kind == "partial")

    def local_atoms(self, mesh: Mesh) -> tuple[int, ...]:
        """Sizes of the atoms of one rank's piece. Raises LayoutError where an axis doesn't divide an atom."""
        return _local_atoms(self, mesh)

    def local_dims(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Local atoms, grouped by dim."""
        return _local_dims(self, mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's piece."""
        return _local_shape(self, mesh)

    def starts(self, mesh: Mesh, coords: dict[str, int]) -> tuple[int, ...]:
        """Where a rank's piece starts in every atom."""
        starts = []
        for i, local in enumerate(self.local_atoms(mesh)):
            index = 0
            for axis in self.axes_of(i):
                index = index * mesh[axis] + coords[axis]
            starts.append(index * local)
        return tuple(starts)

    def __str__(self) -> str:
        parts, i = [], 0
        for dim in self.dims:
            texts = []
            for size in dim:
                texts.append("@".join([str(size), *self.axes_of(i)]))
                i += 1
            parts.append("1" if not texts else texts[0] if len(texts) == 1 else f"({' '.join(texts)})")
        partials = " ".join(f"{c}:{a}" for a, c in self.partial_axes())
        return f"[{', '.join(parts)}]" + (f"{{{partials}}}" if partials else "")

    @staticmethod
    def parse(text: str) -> Sharding:
        """Reads the text form back. Axes are listed in the order in which they appear, nested axes outermost first."""
        match = re.fullmatch(r"\[(.*?)\](?:\{(.*)\})?", text.strip())
        if match is None:
            raise LayoutError(f"sharding text {text!r} is not well formed", hint="write it like [8@dp, (3 4@tp 16)]{sum:cp}")
        body, partials = match.groups()
        dims: list[tuple[int, ...]] = []
        placements: list[tuple[str, Placement]] = []
        count = 0
        for part in filter(None, (p.strip() for p in body.split(","))):
            dim = []
            for atom in part.strip("()").split():
                size, *axes = atom.split("@")
                if not size.isdigit():
                    raise LayoutError(f"sharding text {text!r}: {atom!r} is not a size")
                if size == "1" and not axes and len(part.split()) == 1:
                    continue
                dim.append(int(size))
                placements += [(a, shard(count)) for a in axes]
                count += 1
            dims.append(tuple(dim))
        for item in (partials or "").split():
            combine, _, axis = item.partition(":")
            placements.append((axis, partial(combine)))
        return Sharding(tuple(dims), tuple(placements))


# Few shardings are different, and all passes ask for the same figures of them: equal ones are made and measured once.


@lru_cache(maxsize=65536)
def _changed(sharding: Sharding, axis: str, placement: Placement, mesh: Mesh) -> Sharding:
    table = {**dict(sharding.placements), axis: placement}
    return Sharding(sharding.dims, tuple((a, table[a]) for a in mesh.names if table.get(a, REPLICATE) != REPLICATE))


@lru_cache(maxsize=65536)
def _local_atoms(sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    out = []
    for i, size in enumerate(sharding.atoms):
        ways = mesh.count(sharding.axes_of(i))
        if size % ways:
            raise LayoutError(f"{ways} ranks ({', '.join(sharding.axes_of(i))}) don't divide an atom of {size} in {sharding}")
        out.append(size // ways)
    return tuple(out)


@lru_cache(maxsize=65536)
def _local_dims(sharding: Sharding, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    sizes = iter(_local_atoms(sharding, mesh))
    return tuple(tuple(next(sizes) for _ in dim) for dim in sharding.dims)


@lru_cache(maxsize=65536)
def _local_shape(sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    return tuple(math.prod(dim) for dim in _local_dims(sharding, mesh))


@lru_cache(maxsize=65536)
def uncut(dims: tuple[tuple[int, ...], ...]) -> Sharding:
    """The sharding of a tensor of these atoms that every rank holds whole."""
    return Sharding(dims)


def whole(shape: tuple[int, ...]) -> Sharding:
    """The sharding of a replicated tensor with one atom a dim."""
    return Sharding(tuple((s,) if s != 1 else () for s in shape))
