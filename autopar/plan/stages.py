"""Where to cut a model into stages: at beginnings of modules, so that the slowest is as fast, and the fullest as small, as can be."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.ir.program import Node, Program
from autopar.rules import Rules
from autopar.rules.atoms import Atoms

#: how much longer than it has to be the longest stage may be, for less memory, and how much more the fullest may hold, for less to cross.
SLACK = 1.05


def choose_cuts(program: Program, atoms: Atoms, rules: Rules, live: Sequence[int], device: Device) -> tuple[str, ...]:
    """The paths of the modules that begin all stages but the first.

    The time of a stage is that of its nodes, forward and backward, embedding and head counted; its memory that of its parameters with
    gradients and optimizer state, and of what its microbatches keep. Of the cuts whose longest stage is not much longer than it has to be
    and whose fullest then doesn't hold much more, those win between which least crosses.

    Args:
        live: for every stage, how many microbatches it keeps alive at most.

    Raises:
        PlanError: the model calls too few modules one after the other.
    """
    forward, stages = [n for n in program.nodes if n.phase == "forward" and n.region == "body"], len(live)
    begins = module_begins(forward)
    if len(begins) + 1 < stages:
        raise PlanError(
            f"{stages} stages are more than this model can be cut into: {len(begins) + 1} modules follow each other",
            hint="fewer stages, or a model of more modules",
        )
    places = [0, *(at for at, _ in begins)]
    seconds = block_seconds(program, atoms, rules, device, forward, places)
    crossing = crossing_bytes(program, forward, places)
    held, kept = block_bytes(program, atoms, forward, places)
    chosen = split(seconds, crossing, stages, [[h + count * k for h, k in zip(held, kept, strict=True)] for count in live])
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
    for node, seconds in zip(program.nodes, node_seconds(program, atoms, rules, device), strict=True):
        if node.name in position:
            block = bisect_right(places, position[node.name]) - 1
        else:
            block = max(bisect_right(numbers, node.where.order) - 1, 0)
        total[block] += seconds
    return total


def node_seconds(program: Program, atoms: Atoms, rules: Rules, device: Device) -> list[float]:
    """Predicted seconds of every node, on one device; views take none."""
    found = []
    for n, node in enumerate(program.nodes):
        row = atoms.rows[n]
        nbytes = sum(program.types[name].nbytes for name in (*node.refs(), *node.outs) if name)
        flops = 2.0 * math.prod(row.sizes.values()) if rules[node.op].contraction else 0.0
        found.append(0.0 if row.moves else device.seconds(flops, nbytes))
    return found


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


def block_bytes(program: Program, atoms: Atoms, forward: Sequence[Node], places: Sequence[int]) -> tuple[list[float], list[float]]:
    """Bytes that the nodes between two places hold all the time, and those that they keep of each microbatch for the backward.

    A trained parameter counts four times (its gradient, and two states of the optimizer), in the block that reads it first.
    """
    position = {n.name: k for k, n in enumerate(forward)}
    producers = program.producers()
    views = {node.name for n, node in enumerate(program.nodes) if atoms.rows[n].moves and node.refs()}
    first: dict[str, int] = {}
    for node in reversed(program.nodes):
        if node.phase == "forward":
            at = position.get(node.name, min((first[o] for o in node.outs if o in first), default=len(forward)))
            for r in node.refs():
                first[r] = min(first.get(r, at), at)
    held, kept = [0.0] * len(places), [0.0] * len(places)
    trained = {o.path for o in program.outputs_of("grad")}
    for i in program.inputs_of("param"):
        if first.get(i.name, len(forward)) < len(forward):
            held[bisect_right(places, first[i.name]) - 1] += program.types[i.name].nbytes * (4 if i.path in trained else 1)
    saved: set[str] = set()
    for node in program.nodes:
        if node.phase == "backward":
            for r in node.refs():
                while r in producers and producers[r].name in position and producers[r].name in views:
                    r = producers[r].refs()[0]  # a view keeps what it looks at
                if r in producers and producers[r].name in position:
                    saved.add(r)
    for r in saved:
        kept[bisect_right(places, position[producers[r].name]) - 1] += program.types[r].nbytes
    return held, kept


def split(seconds: Sequence[float], crossing: Sequence[float], parts: int, memory: Sequence[Sequence[float]] | None = None) -> list[int]:
    """Where to begin all parts but the first of a row of blocks.

    The longest part is at most ``SLACK`` times as long as it has to be; of such cuts the largest part holds at most ``SLACK`` times what it
    has to; and what crosses is then least.

    Args:
        memory: for every part, what each block holds if it is in that part.
    """
    count, sums = len(seconds), _sums(seconds)
    sizes = [_sums(row) for row in memory] if memory is not None else []

    def solve(longest: float, most: float) -> list[int]:
        """The least crossing with parts of at most ``longest`` and ``most``, then the shortest longest part; [] where there is none."""
        best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
        for part in range(parts):
            row: dict[int, tuple[float, float, int]] = {}
            for begin, (crossed, worst, _) in best[-1].items():
                crossed += crossing[begin] if part and begin < count else 0.0
                for end in range(begin + 1, reach(part, begin, longest, most) + 1):
                    found = (crossed, max(worst, sums[end] - sums[begin]), begin)
                    if end not in row or found < row[end]:
                        row[end] = found
            best.append(row)
        if count not in best[-1]:
            return []
        at, begins = count, []
        for part in range(parts, 1, -1):
            at = best[part][at][2]
            begins.append(at)
        return begins[::-1]

    def reach(part: int, begin: int, longest: float, most: float) -> int:
        """How far a part that begins there may go."""
        end = bisect_right(sums, sums[begin] + longest) - 1
        return min(end, bisect_right(sizes[part], sizes[part][begin] + most) - 1) if sizes else end

    def possible(longest: float, most: float) -> bool:
        """Whether there are such parts: those that end anywhere between their shortest and longest, part by part."""
        ends = [True] + [False] * count
        for part in range(parts):
            edge = [0] * (count + 2)
            for begin, there in enumerate(ends[:count]):
                if there and (far := reach(part, begin, longest, most)) > begin:
                    edge[begin + 1] += 1
                    edge[far + 1] -= 1
            ends = [n > 0 for n in accumulate(edge[: count + 1])]
        return ends[count]

    # the least limits, halved between too small and large enough
    longest = _least(max(max(seconds), sums[-1] / parts), sums[-1], lambda limit: possible(limit, math.inf)) * SLACK
    most = math.inf
    if sizes:
        top = max(row[-1] for row in sizes)
        most = _least(0.0, top, lambda limit: possible(longest, limit)) * SLACK
    return solve(longest, most)


def _sums(row: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(row)]


def _least(low: float, high: float, enough: Callable[[float], bool]) -> float:
    """About the least limit between two that is enough; ``high`` is."""
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
