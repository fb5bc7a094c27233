"""Faults planted in communication: simulated ranks whose collectives go wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm import Call, Group
from autopar.runtime.sim import SimComm


def _collective(kind: str | None, change: Callable[[SimComm, Call, list[Tensor]], list[Tensor]]) -> type[SimComm]:
    """A comm that combines changed inputs in collectives of a kind (None: in all)."""

    class Faulty(SimComm):
        def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
            if kind is None or call.kind == kind:
                parts = change(self, call, list(parts))
            return super()._combine(call, parts)

    return Faulty


def _asked(kind: str, change: Callable[[Call], None]) -> type[SimComm]:
    """A comm that understands a call of a kind otherwise than it was meant."""

    class Faulty(SimComm):
        def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
            if call.kind == kind:
                change(call)
            return super()._combine(call, parts)

    return Faulty


def _after(kind: str, change: Callable[[SimComm, Call, Tensor], Tensor]) -> type[SimComm]:
    """A comm whose results of a kind are changed."""

    class Faulty(SimComm):
        def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
            out = super()._combine(call, parts)
            return change(self, call, out) if call.kind == kind else out

    return Faulty


def _zeros(parts: list[Tensor], at: int) -> list[Tensor]:
    """Parts of which one is empty of content."""
    return [torch.zeros_like(p) if i == at else p for i, p in enumerate(parts)]


def _set(**fields: Any) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        for name, value in fields.items():
            setattr(call, name, value)

    return change


def _other_dim(call: Call) -> None:
    """The next dim whose pieces have the same shape, if there is one."""
    same = [d for d in range(call.x.dim()) if d != call.dim and call.x.shape[d] == call.x.shape[call.dim]]
    if same:
        call.dim = same[0]


def _swap_dims(call: Call) -> None:
    call.dim, call.concat_dim = call.concat_dim, call.dim


def _average(comm: SimComm, call: Call, out: Tensor) -> Tensor:
    return out / call.group.size if call.op == "sum" and out.is_floating_point() else out


def _rounded(comm: SimComm, call: Call, out: Tensor) -> Tensor:
    return out.float().to(out.dtype) if out.is_floating_point() else out


def _one_rank_only(comm: SimComm, call: Call, out: Tensor) -> Tensor:
    return out.mul(1 + 1e-9) if comm.rank == comm.mesh.size - 1 and out.is_floating_point() else out


def _shifted(comm: SimComm, call: Call, out: Tensor) -> Tensor:
    return out.reshape(-1).roll(1).reshape(out.shape)


class _Stale(SimComm):
    """Gives the result of the collective before, where shapes agree."""

    kind = "all_reduce"

    def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
        out = super()._combine(call, parts)
        held: dict[Any, Tensor] = self.__dict__.setdefault("held", {})
        key = (call.kind, tuple(out.shape), out.dtype)
        before = held.get(key)
        held[key] = out
        return before.clone() if before is not None and call.kind == self.kind else out


class _StaleGather(_Stale):
    kind = "all_gather"


class _OnlyFirstMicrobatch(SimComm):
    """Forgets every second all-reduce of one place: keeps the own input."""

    def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
        held: dict[Any, int] = self.__dict__.setdefault("held", {})
        held[call.site] = held.get(call.site, 0) + 1
        out = super()._combine(call, parts)
        return call.x.clone() if call.kind == "all_reduce" and held[call.site] % 2 == 0 else out


class _CutTooFar(SimComm):
    """Pieces one element to the right, where there is room."""

    def _cut(self, x: Tensor, parts: int, dim: int) -> list[Tensor]:
        return super()._cut(x.roll(1, dim), parts, dim)


class _CutOtherDim(SimComm):
    def _cut(self, x: Tensor, parts: int, dim: int) -> list[Tensor]:
        other = next((d for d in range(x.dim()) if d != dim and x.shape[d] == x.shape[dim]), dim)
        return super()._cut(x.transpose(dim, other), parts, dim)


class _CutBackwards(SimComm):
    def _cut(self, x: Tensor, parts: int, dim: int) -> list[Tensor]:
        return super()._cut(x, parts, dim)[::-1]


class _GroupBackwards(SimComm):
    """The same ranks in the other order, on all ranks alike."""

    def group(self, axes: Sequence[str]) -> Group:
        found = super().group(axes)
        return Group(found.axes, found.ranks[::-1], found.size - 1 - found.index)


class _GroupOfOtherAxis(SimComm):
    """Where a mesh has two axes of one size, the groups of the other."""

    def group(self, axes: Sequence[str]) -> Group:
        axes = tuple(axes)
        names = self.mesh.names
        if len(axes) == 1 and len(names) == 2 and len({n for _, n in self.mesh.axes}) == 1:
            other = (names[1 - names.index(axes[0])],)
            return Group(axes, self.mesh.group(self.rank, other), self.mesh.index(self.rank, other))
        return super().group(axes)


class _WrongIndex(SimComm):
    """Takes the neighbour's piece."""

    def group(self, axes: Sequence[str]) -> Group:
        found = super().group(axes)
        return Group(found.axes, found.ranks, (found.index + 1) % found.size)


class _MinorFirst(SimComm):
    """Groups over several axes with the last axis major."""

    def group(self, axes: Sequence[str]) -> Group:
        found = super().group(tuple(axes)[::-1])
        return Group(tuple(axes), found.ranks, found.index)


class _NoScatterOverTwo(SimComm):
    """Reductions over two axes reduce over the first only: half of the ranks' parts are missing."""

    def _reduce(self, parts: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
        return super()._reduce(parts[: max(2, len(parts) // 2)], op, out)


class _DoubledFirst(SimComm):
    """The accumulator is begun with the first part twice."""

    def _reduce(self, parts: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
        return super()._reduce([parts[0], *parts], op, out)


class _OwnFirst(SimComm):
    """Every rank sums in an order of its own: the result differs in its last bits."""

    def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
        if call.kind == "all_reduce":
            parts = parts[self.rank % len(parts) :] + parts[: self.rank % len(parts)]
        return super()._combine(call, parts)


class _NoExchange(SimComm):
    """Exchanged objects are the own one from everybody."""

    def exchange_later(self, obj: Any, *, site: str = "") -> Callable[[], list[Any]]:
        finish = super().exchange_later(obj, site=site)
        return lambda: [finish()[self.rank]] * self.mesh.size


class _ExchangeBackwards(SimComm):
    def exchange_later(self, obj: Any, *, site: str = "") -> Callable[[], list[Any]]:
        finish = super().exchange_later(obj, site=site)
        return lambda: finish()[::-1]


class _WrongCoordinates(SimComm):
    """Believes it is its neighbour."""

    def __init__(self, world: Any, rank: int, device: Any = None) -> None:
        super().__init__(world, rank, device)
        self.coords = self.mesh.coords((rank + 1) % self.mesh.size)


class _SwappedCoordinates(SimComm):
    """Reads the coordinates of a rank with the wrong axis fastest."""

    def __init__(self, world: Any, rank: int, device: Any = None) -> None:
        super().__init__(world, rank, device)
        coords, rest = {}, rank
        for name, size in self.mesh.axes:
            rest, coords[name] = divmod(rest, size)
        self.coords = coords


class _Tardy(SimComm):
    """Reads the input when it is waited for, not when it is started: of a rank whose program has gone on."""

    def _begin(self, call: Call) -> Callable[[], Tensor]:
        finish = super()._begin(call)
        if call.kind == "all_gather":
            call.x.mul_(1.5) if call.x.is_floating_point() else call.x.add_(1)
        return finish


class _NoNaN(SimComm):
    """Replaces everything that is no finite number."""

    def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
        out = super()._combine(call, parts)
        return out.clamp(-1e-3, 1e-3) if out.is_floating_point() else out


#: what goes wrong, in words, and the comm that does it.
COMMS: dict[str, type[SimComm]] = {
    "all-reduce: max instead of sum": _asked("all_reduce", lambda c: setattr(c, "op", {"sum": "max"}.get(c.op, c.op))),
    "all-reduce: sum instead of max": _asked("all_reduce", lambda c: setattr(c, "op", {"max": "sum"}.get(c.op, c.op))),
    "all-reduce: min instead of max": _asked("all_reduce", lambda c: setattr(c, "op", {"max": "min"}.get(c.op, c.op))),
    "all-reduce: average instead of sum": _after("all_reduce", _average),
    "all-reduce: the last rank is missing": _collective("all_reduce", lambda s, c, p: p[:-1] + ([p[0] * 0] if c.op == "sum" else [p[0]])),
    "all-reduce: the first rank counts twice": _collective("all_reduce", lambda s, c, p: [p[0], *p[:1], *p[2:]]),
    "all-reduce: nothing happens": _after("all_reduce", lambda s, c, out: c.x.clone()),
    "all-reduce: the own part counts twice": _after("all_reduce", lambda s, c, out: out + c.x if c.op == "sum" else out),
    "all-reduce: the result of the last one": _Stale,
    "all-reduce: every second is forgotten": _OnlyFirstMicrobatch,
    "all-reduce: elements shifted by one": _after("all_reduce", _shifted),
    "all-reduce: through float32": _after("all_reduce", _rounded),
    "all-reduce: the last rank is off by 1e-9": _after("all_reduce", _one_rank_only),
    "all-reduce: every rank sums in its own order": _OwnFirst,
    "all-gather: the other order": _collective("all_gather", lambda s, c, p: p[::-1]),
    "all-gather: order rotated": _collective("all_gather", lambda s, c, p: p[1:] + p[:1]),
    "all-gather: the own piece everywhere": _collective("all_gather", lambda s, c, p: [c.x] * len(p)),
    "all-gather: the first piece twice": _collective("all_gather", lambda s, c, p: [p[0], p[0], *p[2:]]),
    "all-gather: the last piece is zero": _collective("all_gather", lambda s, c, p: _zeros(p, len(p) - 1)),
    "all-gather: another dim": _asked("all_gather", _other_dim),
    "all-gather: the result of the last one": _StaleGather,
    "all-gather: through float32": _after("all_gather", _rounded),
    "all-gather: the last rank is off by 1e-9": _after("all_gather", _one_rank_only),
    "all-gather: the input changes under way": _Tardy,
    "reduce-scatter: max instead of sum": _asked("reduce_scatter", _set(op="max")),
    "reduce-scatter: average instead of sum": _after("reduce_scatter", _average),
    "reduce-scatter: the last rank is missing": _collective("reduce_scatter", lambda s, c, p: _zeros(p, len(p) - 1)),
    "reduce-scatter: only the own part": _collective("reduce_scatter", lambda s, c, p: [c.x, *[torch.zeros_like(q) for q in p[1:]]]),
    "reduce-scatter: the other order of pieces": _collective(
        "reduce_scatter", lambda s, c, p: [torch.cat(list(q.tensor_split(len(p), c.dim))[::-1], c.dim) for q in p]
    ),
    "reduce-scatter: another dim": _asked("reduce_scatter", _other_dim),
    "reduce-scatter: elements shifted by one": _after("reduce_scatter", _shifted),
    "reduce-scatter: through float32": _after("reduce_scatter", _rounded),
    "all-to-all: the other order": _collective("all_to_all", lambda s, c, p: p[::-1]),
    "all-to-all: the own piece from everybody": _collective("all_to_all", lambda s, c, p: [c.x] * len(p)),
    "all-to-all: the last piece is zero": _collective("all_to_all", lambda s, c, p: _zeros(p, len(p) - 1)),
    "all-to-all: dims swapped": _asked("all_to_all", _swap_dims),
    "cuts: one element too far": _CutTooFar,
    "cuts: another dim": _CutOtherDim,
    "cuts: the other order": _CutBackwards,
    "sums: half of the parts": _NoScatterOverTwo,
    "sums: the first part twice": _DoubledFirst,
    "groups: the other order, index alike": _GroupBackwards,
    "groups: of the other axis": _GroupOfOtherAxis,
    "groups: the neighbour's index": _WrongIndex,
    "groups: the minor axis first": _MinorFirst,
    "exchange: the own object from everybody": _NoExchange,
    "exchange: the other order": _ExchangeBackwards,
    "coordinates: the neighbour's": _WrongCoordinates,
    "coordinates: the wrong axis is fastest": _SwappedCoordinates,
    "results: cut off at 1e-3": _NoNaN,
}
