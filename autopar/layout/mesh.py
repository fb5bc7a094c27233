"""Mesh: named axes and their sizes. A pure value; it knows no processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import LayoutError

#: the axes that autopar knows: data, tensor, sequence (context), experts, pipeline stages; and microbatches, an axis in time that no
#: user's mesh has.
MICROBATCH = "mb"
AXES = ("pp", "dp", "ep", "cp", "tp", MICROBATCH)


def within(axis: str, ranks: int) -> str:
    """The part of an axis along which blocks of so many neighbours extend: ``dp%4``, of size 4."""
    return f"{axis}%{ranks}"


def across(axis: str, ranks: int) -> str:
    """The part of an axis along which such blocks follow each other: ``dp/4``."""
    return f"{axis}/{ranks}"


def axis_of(name: str) -> str:
    """The axis that an axis or a part of one belongs to."""
    return name.partition("%")[0].partition("/")[0]


def _block(name: str) -> int:
    """The length of the blocks into which a part of an axis cuts it; 0 for a whole axis."""
    return int(name[len(axis_of(name)) + 1 :] or 0)


def coordinate(coords: Mapping[str, int], name: str) -> int:
    """The coordinate along an axis or a part of one, from those along axes (axes left out count as 0)."""
    at, block = coords.get(axis_of(name), 0), _block(name)
    return at if not block else at % block if "%" in name else at // block


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost (slowest varying rank) first: ``Mesh(dp=2, tp=4)`` has 8 ranks.

    The rank of a coordinate is its row-major index. Text form: ``dp=2,tp=4`` (``Mesh.parse`` reads it back). Sizes, groups and places are
    also those of parts of axes (``within``, ``across``): of ``dp=8``, ``dp%4`` has size 4 and ``dp/4`` size 2.
    """

    axes: tuple[tuple[str, int], ...]
    device: str | None = None

    def __init__(self, axes: Iterable[tuple[str, int]] | None = None, device: str | None = None, **sizes: int) -> None:
        pairs = tuple(axes) if axes is not None else ()
        pairs += tuple(sizes.items())
        for name, size in pairs:
            if name not in AXES:
                raise LayoutError(f"unknown mesh axis {name!r}", hint=f"axes are {', '.join(AXES[:-1])}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"mesh axis {name!r} has size {size!r}", hint="sizes are integers of at least 1")
        if len({name for name, _ in pairs}) != len(pairs):
            raise LayoutError(f"a mesh axis is named twice in {pairs}")
        object.__setattr__(self, "axes", pairs)
        object.__setattr__(self, "device", device)

    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads ``dp=2,tp=4``; the empty text is the mesh of one rank."""
        pairs = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, eq, size = part.partition("=")
            if not eq or not size.strip().isdigit():
                raise LayoutError(f"mesh text {text!r} is not well formed", hint="write it like dp=2,tp=2")
            pairs.append((name.strip(), int(size)))
        return Mesh(pairs)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    def without(self, axis: str) -> Mesh:
        """The mesh of the ranks with one coordinate along an axis."""
        return Mesh([(name, size) for name, size in self.axes if name != axis], device=self.device)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def __getitem__(self, axis: str) -> int:
        """The size of an axis, or of a part of one; 1 where the mesh doesn't have it."""
        if axis in self._sizes or not _block(axis):
            return self._sizes.get(axis, 1)
        return _block(axis) if "%" in axis else self[axis_of(axis)] // _block(axis)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def count(self, axes: Iterable[str]) -> int:
        """The number of ranks along several axes together."""
        return math.prod([self[a] for a in axes])

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank along every axis."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is not on the mesh {self} of {self.size} ranks")
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at a coordinate (axes left out count as 0)."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coords.get(name, 0)
        return rank

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Position of a rank within its group over several axes, the first axis major."""
        coords, index = self.coords(rank), 0
        for axis in axes:
            index = index * self[axis] + coordinate(coords, axis)
        return index

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, in the order of ``index``."""
        axes, coords = tuple(axes), self.coords(rank)
        ranks = [coords]
        for axis in axes:
            ranks = [_moved(c, axis, i) for c in ranks for i in range(self[axis])]
        return tuple(self.rank(c) for c in ranks)

    def groups(self, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Every group over several axes, by lowest rank: the same order on every rank."""
        axes, seen = tuple(axes), set()
        for rank in range(self.size):
            group = self.group(rank, axes)
            if group[0] not in seen:
                seen.add(group[0])
                yield group


def _moved(coords: Mapping[str, int], name: str, to: int) -> dict[str, int]:
    """Coordinates with another one along an axis or a part of one."""
    axis, block = axis_of(name), _block(name)
    at = coords.get(axis, 0)
    return {**coords, axis: to if not block else at // block * block + to if "%" in name else to * block + at % block}
