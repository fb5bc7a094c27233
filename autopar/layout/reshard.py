"""Resharding: from one sharding to another by the cheapest sequence of legal single-axis steps.

A step changes what one axis does to a tensor. It is legal only where the local pieces stay rectangular and in order: an axis may
leave or enter an atom only as the innermost of the axes that shard it, and an axis enters only behind outer axes. Whatever sequence
of such steps reaches the target is right; the planner finds the cheapest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import LayoutError
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import REPLICATE, Placement, Sharding
from autopar.layout.traffic import bytes_sent

#: steps that send nothing.
LOCAL = ("slice", "once")


@dataclass(frozen=True)
class Step:
    """One single-axis change: ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, or the local ``slice`` and ``once``."""

    kind: str
    axis: str
    before: Sharding
    after: Sharding

    @property
    def source(self) -> Placement:
        return self.before.on(self.axis)

    @property
    def target(self) -> Placement:
        return self.after.on(self.axis)


def step_kind(source: Placement, target: Placement) -> str | None:
    """Which collective turns one placement into another; None where nothing does.

    A whole value becomes a sum by being there on one rank only (``once``): what is added to an unreduced value waits with it for the sum.
    """
    if target.kind == "partial" and target.combine != "sum":
        return None
    kinds = {
        ("shard", "replicate"): "all_gather",
        ("partial", "replicate"): "all_reduce",
        ("partial", "shard"): "reduce_scatter",
        ("shard", "shard"): "all_to_all",
        ("replicate", "shard"): "slice",
        ("replicate", "partial"): "once",
    }
    return kinds.get((source.kind, target.kind))


def step_bytes(kind: str, local_numel: int, itemsize: int, ranks: int) -> int:
    """Bytes that a rank sends for a step on a local tensor of so many elements."""
    return 0 if kind in LOCAL else bytes_sent(kind, local_numel, itemsize, ranks)


def _steps(state: Sharding, goal: Sharding, mesh: Mesh) -> Iterator[Step]:
    wanted = {p.atom for _, p in goal.placements if p.kind == "shard"} | {p.atom for _, p in state.placements if p.kind == "shard"}
    for axis in mesh.names:
        source = state.on(axis)
        targets = [REPLICATE, *(Placement("shard", a) for a in sorted(wanted))]
        if goal.on(axis).kind == "partial":
            targets.append(goal.on(axis))
        for target in targets:
            kind = step_kind(source, target)
            if source == target or kind is None:
                continue
            if source.kind == "shard" and state.axes_of(source.atom)[-1] != axis:
                continue
            after = state.with_placement(axis, target, mesh)
            if target.kind == "shard":
                if after.axes_of(target.atom)[-1] != axis or after.atoms[target.atom] % mesh.count(after.axes_of(target.atom)):
                    continue
            yield Step(kind, axis, state, after)


Price = Callable[[str, str, int], float]


def plan_reshard(source: Sharding, goal: Sharding, mesh: Mesh, itemsize: int = 4, price: Price | None = None) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``goal``.

    Args:
        price: seconds of a step by (kind, axis, bytes sent by a rank); default: bytes plus a latency worth 4096 bytes.

    Raises LayoutError where no sequence exists (the goal is a maximum over ranks where the source isn't).
    """
    if source == goal:
        return ()
    return _search(source, goal, mesh, itemsize, price or _default_price)


def _default_price(kind: str, axis: str, sent: int) -> float:
    return 1.0 if kind in LOCAL else sent + 4096.0


@lru_cache(maxsize=4096)
def _search(source: Sharding, goal: Sharding, mesh: Mesh, itemsize: int, price: Price) -> tuple[Step, ...]:
    best: dict[Sharding, float] = {source: 0.0}
    came: dict[Sharding, Step] = {}
    queue: list[tuple[float, int, Sharding]] = [(0.0, 0, source)]
    count = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if state == goal:
            path = []
            while state != source:
                path.append(came[state])
                state = came[state].before
            return tuple(reversed(path))
        numel = math.prod(state.local_atoms(mesh))
        for step in _steps(state, goal, mesh):
            total = cost + price(step.kind, step.axis, step_bytes(step.kind, numel, itemsize, mesh[step.axis]))
            if total < best.get(step.after, math.inf):
                best[step.after], came[step.after] = total, step
                count += 1
                heapq.heappush(queue, (total, count, step.after))
    raise LayoutError(f"no way from sharding {source} to {goal} on mesh {mesh}")
