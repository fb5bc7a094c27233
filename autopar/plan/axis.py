"""Choosing placements on one mesh axis: a mixed-integer program over the whole joint graph, repeated layers once.

Each group of equal nodes picks one strategy. Between a producer and its consumers flows one unit from the placement it gives to the
placement they take; the flow pays for the conversion. All consumers of one placement share a conversion.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.device import Device
from autopar.errors import LayoutError, PlanError
from autopar.ir.program import Node, Program
from autopar.layout.mesh import Mesh
from autopar.layout.reshard import LOCAL, plan_reshard, step_bytes, step_kind
from autopar.layout.sharding import REPLICATE, Placement, Sharding
from autopar.plan.solver import Model
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.rules.strategies import Strategy, rings, strategies

#: a filter over the strategies of a node on an axis: (node number, node, its strategies) to those that the axis' role allows.
Allowed = Callable[[int, Node, list[Strategy]], list[Strategy]]


@dataclass(frozen=True)
class Problem:
    """What one axis is asked: the program, where earlier axes put everything, and what this axis may do.

    Attributes:
        layout: shardings so far of every operand and output: node number to (inputs, outputs).
        inputs: shardings so far of the program's inputs.
        allowed: filters a node's strategies by the role of the axis.
        input_choices: placements that an input may have.
        fixed_params: a parameter is used as it lies: no collective on it, only slices.
        loose: parameters that may be gathered all the same (a pin cut them where an op needs them whole).
        surcharge: extra seconds of a strategy (the price of memory, for one).
        even: only what the axis divides is split; False asks what would be chosen if sizes didn't matter.
    """

    program: Program
    atoms: Atoms
    rules: Rules
    mesh: Mesh
    axis: str
    device: Device
    layout: Mapping[int, tuple[tuple[Sharding, ...], tuple[Sharding, ...]]]
    inputs: Mapping[str, Sharding]
    allowed: Allowed
    input_choices: Callable[[str], list[Placement]]
    fixed_params: bool
    surcharge: Callable[[int, Node, Strategy], float]
    loose: frozenset[str] = frozenset()
    even: bool = True


@dataclass(frozen=True)
class Choice:
    """The answer: a strategy for every node, a placement for every input, the predicted seconds, and how large the problem was."""

    nodes: Mapping[int, Strategy]
    inputs: Mapping[str, Placement]
    seconds: float
    columns: int


@dataclass
class _Group:
    """Equal nodes (or inputs): one decision."""

    options: list[Strategy]
    members: list[int | str] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    by_output: dict[tuple[int, Placement], list[int]] = field(default_factory=dict)
    by_input: dict[tuple[int, Placement], list[int]] = field(default_factory=dict)


def wildcard(path: str) -> str:
    """A module path with its numbers replaced: layers that repeat share it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def constants(program: Program) -> set[int]:
    """Numbers of the nodes that depend on no input but constants: they are computed once, so their work costs nothing."""
    known = {i.name for i in program.inputs if i.kind == "const"}
    found = set()
    for n, node in enumerate(program.nodes):
        if all(r in known for r in node.refs()):
            known.update(o for o in node.outs if o)
            found.add(n)
    return found


def options(problem: Problem, n: int) -> list[Strategy]:
    """The strategies of a node that the role of the axis allows."""
    shardings = [s for side in problem.layout[n] for s in side]
    dims, left = [s.dims for s in shardings], [s.local_dims(problem.mesh) for s in shardings]
    ways, row = problem.mesh[problem.axis] if problem.even else None, problem.atoms.rows[n]
    around = rings(row, dims, ways, left) if problem.axis == "cp" else []
    return problem.allowed(n, problem.program.nodes[n], [*strategies(row, dims, ways, left), *around])


def solve(problem: Problem) -> Choice:
    """Finds the cheapest strategies. Raises PlanError where a node has none left."""
    program, axis, ways = problem.program, problem.axis, problem.mesh[problem.axis]
    groups: dict[tuple[object, ...], _Group] = {}
    group_of: dict[int | str, _Group] = {}
    for i in program.inputs:
        path, kind = wildcard(i.path) if i.kind != "batch" else i.path, program.types[i.name].dtype
        key: tuple[object, ...] = ("input", i.kind, path, problem.inputs[i.name], kind, tuple(problem.input_choices(i.name)))
        if key not in groups:
            groups[key] = _Group([Strategy((), (p,)) for p in problem.input_choices(i.name)])
        groups[key].members.append(i.name)
        group_of[i.name] = groups[key]
    # the first layer's backward is often another: only where a layer does all the same may its nodes be counted off against another's
    done: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for node in program.nodes:
        done[node.phase, node.region, node.where.module].append(node.op)
    numbers: dict[tuple[str, ...], int] = {}
    same = {place: numbers.setdefault(tuple(ops), len(numbers)) for place, ops in done.items()}
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    for n, node in enumerate(program.nodes):
        place = (node.phase, node.region, node.where.module)
        seen[place] += 1
        inputs, outputs = problem.layout[n]
        key = (*place[:2], wildcard(place[2]), same[place], seen[place], node.op, inputs, outputs, str(problem.atoms.rows[n]),
               tuple(program.types[o].dtype if o else None for o in node.outs))  # fmt: skip
        if key not in groups:
            allowed = options(problem, n)
            if not allowed:
                raise PlanError(f"{node.op} has no placement that the role of axis {axis!r} allows", where=str(node.where))
            groups[key] = _Group(allowed)
        groups[key].members.append(n)
        group_of[n] = groups[key]

    model = Model()
    free = constants(program)
    for group in groups.values():
        weight = len(group.members)
        for option in group.options:
            first = group.members[0]
            seconds = 0.0 if isinstance(first, str) or first in free else _work(problem, first, option, ways)
            if not isinstance(first, str):
                seconds += problem.surcharge(first, program.nodes[first], option)
                seconds *= runs_of(program, program.nodes[first])
            column = model.binary(weight * seconds * 1e6)
            group.columns.append(column)
            for k, p in enumerate(option.outputs):
                group.by_output.setdefault((k, p), []).append(column)
            for k, p in enumerate(option.inputs):
                group.by_input.setdefault((k, p), []).append(column)
        model.row([(c, 1.0) for c in group.columns], 1.0, 1.0)

    _edges(problem, model, group_of)
    values = model.solve()
    chosen_nodes: dict[int, Strategy] = {}
    chosen_inputs: dict[str, Placement] = {}
    for group in groups.values():
        option = group.options[max(range(len(group.columns)), key=lambda i: values[group.columns[i]])]
        for member in group.members:
            if isinstance(member, str):
                chosen_inputs[member] = option.outputs[0]
            else:
                chosen_nodes[member] = option
    seconds = sum(c * v for c, v in zip(model.cost, values, strict=True)) * 1e-6
    return Choice(chosen_nodes, chosen_inputs, seconds, len(model.cost))


def _edges(problem: Problem, model: Model, group_of: Mapping[int | str, _Group]) -> None:
    """Flows between producers and consumers, and the conversions that consumers share."""
    program, ways = problem.program, problem.mesh[problem.axis]
    source: dict[str, tuple[int | str, int]] = {i.name: (i.name, 0) for i in program.inputs}
    for n, node in enumerate(program.nodes):
        source.update({o: (n, k) for k, o in enumerate(node.outs) if o})
    fixed = {i.name for i in program.inputs_of("param")} - problem.loose
    param_of_path = {i.path: i.name for i in program.inputs_of("param")}

    # every value to its uses: (consumer, operand) -> how often it is used so in a step; and the local size of what a producer gives
    uses: dict[str, dict[tuple[int, int | str], int]] = defaultdict(dict)
    objects: dict[int, _Group] = {}
    shape: dict[tuple[int, int], tuple[Sharding, int]] = {}
    is_fixed: dict[tuple[int, int], bool] = {}

    def add(value: str, consumer: _Group, operand: int | str, turns: int = 1) -> None:
        member, out = source[value]
        producer = group_of[member]
        objects[id(producer)], objects[id(consumer)] = producer, consumer
        uses[value][id(consumer), operand] = max(uses[value].get((id(consumer), operand), 0), turns)
        if (id(producer), out) not in shape:  # members of a group are equal
            sharding = problem.inputs[value] if isinstance(member, str) else problem.layout[member][1][out]
            shape[id(producer), out] = sharding, program.types[value].dtype.itemsize
        is_fixed[id(producer), out] = value in fixed

    for n, node in enumerate(program.nodes):
        for k, name in enumerate(node.refs()):
            add(name, group_of[n], k, runs_of(program, node))
    for output in program.outputs:
        if output.kind == "grad":
            add(output.value, group_of[param_of_path[output.path]], "grad")
        else:
            add(output.value, _SINK if output.kind in ("loss", "buffer") else _ANY, "sink")

    tails = {(id(group_of[source[v][0]]), source[v][1]) for v in gradients(program, problem.atoms)}
    # values of one producer that are used alike are converted alike: the last of the layers that repeat isn't used as the others are
    alike: dict[tuple[int, int], dict[tuple[tuple[tuple[int, int | str], int], ...], int]] = defaultdict(lambda: defaultdict(int))
    order = {key: k for k, key in enumerate(objects)}  # no addresses: every rank must ask the solver the same
    for value, found in uses.items():
        member, out = source[value]
        used = tuple(sorted(found.items(), key=lambda use: (order[use[0][0]], str(use[0][1]))))
        alike[id(group_of[member]), out][used] += 1
    edges = dict.fromkeys((p_id, out, *use) for (p_id, out), kinds in alike.items() for kind in kinds for use, _ in kind)
    shared: dict[tuple[object, ...], int] = {}
    for p_id, out, c_id, operand in edges:
        producer, consumer = objects[p_id], objects[c_id]
        sharding, itemsize = shape[p_id, out]
        numel = math.prod(sharding.local_shape(problem.mesh))
        if consumer is _ANY:
            continue
        if consumer is _SINK:
            needs: Sequence[tuple[Placement, list[int] | None]] = [(REPLICATE, None)]
        elif operand == "grad":
            needs = [(p, columns) for (_, p), columns in consumer.by_output.items()]
        else:
            needs = [(p, columns) for (k, p), columns in consumer.by_input.items() if k == operand]
        gives = [(p, columns) for (k, p), columns in producer.by_output.items() if k == out]
        into: dict[Placement, list[int]] = defaultdict(list)
        for have, have_columns in gives:
            row = [(c, -1.0) for c in have_columns]
            for want, _ in needs:
                kind = "keep" if have == want else step_kind(have, want)
                if kind is None or (is_fixed[p_id, out] and problem.fixed_params and kind not in ("keep", *LOCAL)):
                    continue
                nested = kind != "keep" and _nested(problem, sharding, have, want)
                way = _way(problem, sharding, have, want, itemsize) if nested else 0.0
                if way is None:
                    continue
                flow = model.real()
                row.append((flow, 1.0))
                into[want].append(flow)
                if kind == "keep" or (kind == "slice" and not nested):
                    continue
                if operand == "grad" and kind == "all_reduce":
                    kind = "reduce_scatter"  # the owner needs its part only
                if nested:
                    seconds = way
                elif kind == "once":  # on the other ranks zeros take its place
                    seconds = _ONCE + problem.device.seconds(0.0, numel * itemsize)
                else:
                    piece = numel // ways if have.kind == "shard" else numel
                    seconds = problem.device.comm_seconds(step_bytes(kind, piece, itemsize, ways))
                if (p_id, out) in tails and kind == "all_gather":
                    seconds += _SCATTERED_GRADIENT
                for used, count in alike[p_id, out].items():
                    turns = dict(used)
                    if (c_id, operand) not in turns:
                        continue
                    key = (p_id, out, have, want, kind, used)
                    if key not in shared:
                        shared[key] = model.real(max(turns.values()) * count * seconds * 1e6)
                    model.row([(shared[key], 1.0), (flow, -1.0)], 0.0, math.inf)
            model.row(row, 0.0, 0.0)
        for want, want_columns in needs:
            flows = [(f, 1.0) for f in into[want]]
            if want_columns is None:
                model.row(flows, 1.0, 1.0)
            else:
                model.row([*flows, *((c, -1.0) for c in want_columns)], 0.0, 0.0)


def _nested(problem: Problem, sharding: Sharding, have: Placement, want: Placement) -> bool:
    """Whether an axis inside of this one cuts what this one enters or leaves: then it has to make way."""
    inner = problem.mesh.names[problem.mesh.names.index(problem.axis) + 1 :]
    return problem.even and any(p.kind == "shard" and set(inner) & set(sharding.axes_of(p.atom)) for p in (have, want))


def _way(problem: Problem, sharding: Sharding, have: Placement, want: Placement, itemsize: int) -> float | None:
    """Seconds of a conversion by all the steps that it takes; None where there is no way: the axes don't divide a size together."""
    mesh, axis = problem.mesh, problem.axis
    try:
        steps = plan_reshard(sharding.with_placement(axis, have, mesh), sharding.with_placement(axis, want, mesh), mesh, itemsize)
    except LayoutError:
        return None
    return sum(
        problem.device.comm_seconds(step_bytes(s.kind, math.prod(s.before.local_atoms(mesh)), itemsize, mesh[s.axis]))
        for s in steps
        if s.kind not in LOCAL
    )


def gradients(program: Program, atoms: Atoms) -> set[str]:
    """The gradients of parameters, also before the last ops that only move their elements."""
    found = {o.value for o in program.outputs_of("grad")}
    for n in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[n]
        if atoms.rows[n].moves and any(o in found for o in node.outs):
            found.update(node.refs())
    return found


#: seconds added where a gradient is made in pieces of a parameter that isn't cut: a collective more for every such parameter, which only
#: pays where there is no other way.
_SCATTERED_GRADIENT = 1e-3
#: seconds of an op more, whatever its size: a conversion that saves no collective isn't worth one.
_ONCE = 1e-6
#: share of an op's bytes that it costs more on unreduced values: where the sum is needed too, both are held; so it waits only if that
#: saves a collective.
_UNREDUCED = 0.1
_SINK = _Group([])  # a value that must end replicated
_ANY = _Group([])  # a value that may end as it is


def products(problem: Problem, n: int) -> float:
    """Floating-point operations of a node that contracts, in one run by a rank, as earlier axes cut it; 0 for others."""
    node, row = problem.program.nodes[n], problem.atoms.rows[n]
    if not problem.rules[node.op].contraction:
        return 0.0
    inputs, outputs = problem.layout[n]
    cut = max((math.prod(s.shape) / max(math.prod(s.local_shape(problem.mesh)), 1) for s in (*inputs, *outputs)), default=1.0)
    apart = problem.rules[node.op].apart
    common = math.prod(size for factor, size in row.sizes.items() if factor not in apart)
    return 2.0 * common * (sum(row.sizes.get(f, 1) for f in apart) or 1) / cut


def runs_of(program: Program, node: Node) -> int:
    """How often a node runs in one step."""
    return program.microbatches if node.region == "body" or node.op == "autopar.accumulate" else 1


def _work(problem: Problem, n: int, option: Strategy, ways: int) -> float:
    """Seconds of one node under a strategy, before any communication."""
    node, row = problem.program.nodes[n], problem.atoms.rows[n]
    if row.moves:
        return 0.0
    inputs, outputs = problem.layout[n]
    share = ways if option.factor else 1
    types = problem.program.types
    nbytes = sum(
        math.prod(s.local_shape(problem.mesh)) * types[name].dtype.itemsize
        for s, name in zip((*inputs, *outputs), (*node.refs(), *node.outs), strict=True)
        if name
    )
    flops = products(problem, n)
    causal = flops and any(k.startswith("offset") for k in row.kinds.values())
    if causal:  # a mask by position leaves half of the work, but the last piece of the queries sees all keys
        flops *= 0.5 if option.travels or not row.kind(option.factor).startswith("offset") else 1 - 1 / (2 * ways)
    waiting = _UNREDUCED * nbytes if any(p.kind == "partial" for p in option.inputs) else 0.0
    seconds = problem.device.seconds(flops / share, nbytes / share) + problem.device.seconds(0.0, waiting)
    if not option.travels:
        return seconds
    around, aside = _around(problem, n, option, ways)
    return max(seconds, around) + (aside if causal else 0.0)


def _around(problem: Problem, n: int, option: Strategy, ways: int) -> tuple[float, float]:
    """Seconds in which what a node reads goes around a ring, and what it adds to on the way comes home: it computes meanwhile; and those
    in which halves of the rest change places before and after, so that a mask leaves every rank the same work."""
    node, row, device = problem.program.nodes[n], problem.atoms.rows[n], problem.device
    around, aside = (ways - 1) * device.latency, 0.0
    for k, (name, term) in enumerate(zip((*node.refs(), *node.outs), (*row.inputs, *row.outputs), strict=True)):
        if name:
            operand = k < len(row.inputs)
            sharding = problem.layout[n][0][k] if operand else problem.layout[n][1][k - len(row.inputs)]
            nbytes = math.prod(sharding.local_shape(problem.mesh)) / ways * problem.program.types[name].dtype.itemsize
            if any(option.travels in dim for dim in term):
                around += nbytes * (ways - 1 if operand else ways) / device.link_bandwidth
            elif any(option.factor in dim for dim in term):
                aside += device.comm_seconds(nbytes / 2)
    return around, aside
