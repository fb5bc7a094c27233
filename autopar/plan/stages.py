"""Where to cut a model into stages: at the beginnings of modules, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.ir.program import Node, Program
from autopar.rules import Rules
from autopar.rules.atoms import Atoms


def choose_cuts(program: Program, atoms: Atoms, rules: Rules, stages: int, device: Device) -> tuple[str, ...]:
    """The paths of the modules that begin all stages but the first.

    The time of a stage is that of its nodes, forward and backward, embedding and head counted; the longest is as short as it can be, and
    among such cuts those whose crossing values are smaller win.

    Raises:
        PlanError: the model calls too few modules one after the other.
    """
    forward = [n for n in program.nodes if n.phase == "forward" and n.region == "body"]
    begins = module_begins(forward)
    if len(begins) + 1 < stages:
        raise PlanError(
            f"{stages} stages are more than this model can be cut into: {len(begins) + 1} modules follow each other",
            hint="fewer stages, or a model of more modules",
        )
    places = [0, *(at for at, _ in begins)]
    seconds = block_seconds(program, atoms, rules, device, forward, places)
    crossing = [0.0, *(crossing_bytes(program, forward, at) / device.link_bandwidth for at, _ in begins)]
    chosen = split(seconds, crossing, stages)
    return tuple(begins[k - 1][1] for k in chosen)


def module_begins(forward: Sequence[Node]) -> list[tuple[int, str]]:
    """(position, path) of the forward nodes before which a stage can begin: the first of a module that isn't the first of the model."""
    seen: set[str] = set()
    found: list[tuple[int, str]] = []
    for at, node in enumerate(forward):
        parts = node.where.module.split(".") if node.where.module else []
        paths = [".".join(parts[: k + 1]) for k in range(len(parts))]
        fresh = [p for p in paths if p not in seen]
        seen.update(paths)
        if fresh and at:
            found.append((at, fresh[0]))
    return found


def block_seconds(
    program: Program, atoms: Atoms, rules: Rules, device: Device, forward: Sequence[Node], places: Sequence[int]
) -> list[float]:
    """Seconds of the nodes between two places, with those of the backward that belong to them."""
    numbers = [forward[at].where.order for at in places]
    position = {n.name: k for k, n in enumerate(forward)}
    total = [0.0] * len(places)
    for n, node in enumerate(program.nodes):
        if node.name in position:
            block = bisect_right(places, position[node.name]) - 1
        else:
            block = max(bisect_right(numbers, node.where.order) - 1, 0)
        total[block] += _seconds(program, atoms, rules, device, n)
    return total


def _seconds(program: Program, atoms: Atoms, rules: Rules, device: Device, n: int) -> float:
    node, row = program.nodes[n], atoms.rows[n]
    if row.moves:
        return 0.0
    nbytes = sum(program.types[name].nbytes for name in (*node.refs(), *node.outs) if name)
    flops = 2.0 * math.prod(row.sizes.values()) if rules[node.op].contraction else 0.0
    return device.seconds(flops, nbytes)


def crossing_bytes(program: Program, forward: Sequence[Node], at: int) -> float:
    """Bytes of the values made before a forward position and read by the forward after it."""
    before: set[str] = set()
    read: set[str] = set()
    for k, node in enumerate(forward):
        if k < at:
            before.update(o for o in node.outs if o)
        else:
            read.update(node.refs())
    return float(sum(program.types[v].nbytes for v in before & read))


def split(seconds: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Where to begin all parts but the first of a row of blocks, so that the longest part is shortest; then the least crossing."""
    count = len(seconds)
    sums = [0.0]
    for s in seconds:
        sums.append(sums[-1] + s)
    best: list[dict[int, tuple[float, float, int]]] = [{k: (sums[k], 0.0, 0) for k in range(1, count + 1)}]
    for part in range(1, parts):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[-1][begin][0], sums[end] - sums[begin]), best[-1][begin][1] + crossing[begin], begin)
                for begin in range(part, end)
            )
        best.append(row)
    at, found = count, []
    for part in range(parts - 1, 0, -1):
        at = best[part][at][2]
        found.append(at)
    return found[::-1]
