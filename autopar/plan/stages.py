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

#: how much longer than it has to be the longest stage may be, for less to cross.
SLACK = 1.05


def choose_cuts(program: Program, atoms: Atoms, rules: Rules, stages: int, device: Device) -> tuple[str, ...]:
    """The paths of the modules that begin all stages but the first.

    The time of a stage is that of its nodes, forward and backward, embedding and head counted. Of the cuts whose longest stage is not
    much longer than it has to be, those win between which least crosses.

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
    crossing = crossing_bytes(program, forward, places)
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


def crossing_bytes(program: Program, forward: Sequence[Node], places: Sequence[int]) -> list[float]:
    """For every place, the bytes of the values that the forward makes before it and reads after it."""
    made = {o: k for k, node in enumerate(forward) for o in node.outs if o}
    last = {r: k for k, node in enumerate(forward) for r in node.refs() if r in made}
    change = [0.0] * (len(forward) + 1)
    for value, k in last.items():
        change[made[value] + 1] += program.types[value].nbytes
        change[k + 1] -= program.types[value].nbytes
    here, sums = 0.0, []
    for step in change:
        here += step
        sums.append(here)
    return [sums[at] for at in places]


def split(seconds: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Where to begin all parts but the first of a row of blocks.

    The longest part is at most ``SLACK`` times as long as it has to be, and what crosses is then least.
    """
    count, sums = len(seconds), [0.0]
    for s in seconds:
        sums.append(sums[-1] + s)

    def solve(longest: float) -> tuple[list[int], float]:
        """The least (crossing, longest part) with parts of at most ``longest``: where they begin, and the longest part."""
        best: list[dict[int, tuple[float, float, int]]] = [{k: (0.0, sums[k], 0) for k in range(1, count + 1) if sums[k] <= longest}]
        for _ in range(1, parts):
            row: dict[int, tuple[float, float, int]] = {}
            for begin, (crossed, worst, _) in best[-1].items():
                for end in range(begin + 1, count + 1):
                    length = sums[end] - sums[begin]
                    if length > longest:
                        break
                    found = (crossed + crossing[begin], max(worst, length), begin)
                    if end not in row or found < row[end]:
                        row[end] = found
            best.append(row)
        if count not in best[-1]:
            return [], math.inf
        at, found_ = count, []
        for part in range(parts - 1, 0, -1):
            at = best[part][at][2]
            found_.append(at)
        return found_[::-1], best[-1][count][1]

    # the shortest longest part: parts filled up to a limit, the limit halved between too short and long enough
    low, high = max(max(seconds), sums[-1] / parts), sums[-1]
    for _ in range(40):
        middle = (low + high) / 2
        if _parts(seconds, middle) <= parts:
            high = middle
        else:
            low = middle
    return solve(high * SLACK)[0] or solve(math.inf)[0]


def _parts(seconds: Sequence[float], longest: float) -> int:
    """How many parts it takes if none is longer."""
    parts, length = 1, 0.0
    for s in seconds:
        if length + s > longest:
            parts, length = parts + 1, 0.0
        length += s
    return parts
