"""Where every tensor lives: one axis after the other, each by the program of ``plan.axis`` under the role of the axis."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.cost.device import GENERIC, Device
from autopar.errors import PlanError
from autopar.ir.program import Node, Program
from autopar.layout.mesh import Mesh
from autopar.layout.reshard import step_kind
from autopar.layout.sharding import REPLICATE, Placement, Sharding, shard
from autopar.plan.axis import Choice, Problem, gradients, solve
from autopar.plan.context import check_context, relates
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.rules.strategies import Strategy, rings, strategies

NodeShardings = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]


@dataclass(frozen=True)
class Layout:
    """Shardings of every input and of every node's operands and outputs (by node number), and notes on what could not be had."""

    inputs: Mapping[str, Sharding]
    nodes: Mapping[int, NodeShardings]
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def replicated(program: Program, atoms: Atoms) -> Layout:
    """The layout in which every rank does everything: the start of every search."""
    inputs = {i.name: atoms.replicated(i.name) for i in program.inputs}
    nodes = {}
    for n, node in enumerate(program.nodes):
        row = atoms.rows[n]
        outs = tuple(atoms.replicated(o) if o else Sharding(()) for o in node.outs)
        nodes[n] = (tuple(atoms.replicated(r) for r in node.refs()), outs)
        assert len(row.inputs) == len(nodes[n][0])
    return Layout(inputs, nodes)


def apply(layout: Layout, axis: str, mesh: Mesh, nodes: Mapping[int, Strategy], inputs: Mapping[str, Placement]) -> Layout:
    """The layout with the placements chosen on one more axis."""
    new_nodes = {}
    for n, (operands, outputs) in layout.nodes.items():
        s = nodes[n]
        new_nodes[n] = (
            tuple(x.with_placement(axis, p, mesh) for x, p in zip(operands, s.inputs, strict=True)),
            tuple(x.with_placement(axis, p, mesh) for x, p in zip(outputs, s.outputs, strict=True)),
        )
    new_inputs = {name: x.with_placement(axis, inputs[name], mesh) for name, x in layout.inputs.items()}
    return Layout(new_inputs, new_nodes, layout.notes, layout.seconds)


def from_params(program: Program, rules: Rules) -> dict[str, str]:
    """Parameters, and the values that only move or convert a parameter's elements, to the parameter's name."""
    found = {i.name: i.name for i in program.inputs_of("param")}
    for node in program.nodes:
        refs = node.refs()
        if (
            len(refs) == 1
            and refs[0] in found
            and node.op in rules
            and (rules[node.op].linear == "moves" or node.op == "aten._to_copy.default")
        ):
            found.update({o: found[refs[0]] for o in node.outs if o})
    return found


def from_batch(program: Program) -> set[str]:
    """Values that depend on the batch."""
    found = {i.name for i in program.inputs_of("batch")}
    for node in program.nodes:
        if any(r in found for r in node.refs()):
            found.update(o for o in node.outs if o)
    return found


@dataclass(frozen=True)
class _Roles:
    """What the name of an axis means for the search: constraints, not hopes."""

    program: Program
    atoms: Atoms
    rules: Rules
    mesh: Mesh
    axis: str
    layout: Layout
    sequence: bool
    pins: Mapping[str, Placement]
    device: Device
    params: Mapping[str, str]
    batch: set[str]
    kinds: Mapping[str, str]
    gradients: set[str]
    even: bool = True
    context: str | None = None

    def may_shard(self, value: str, atom: int) -> bool:
        """Whether this axis may shard an atom of a value.

        ``dp``: samples only. ``tp``: the features inside of layers, not the stream between them; with ``sequence`` also what is
        neither sample nor feature. ``cp``: the latter, and features (heads) of anything but parameters and their gradients.
        """
        marks = self.atoms.marks[value][atom]
        if self.axis == "dp":
            return "batch" in marks and "mb" not in marks
        if self.axis == "cp":
            own = value in self.params or value in self.gradients
            return "batch" not in marks and ("feature" not in marks or not own)
        if "stream" in marks and not self.pinned_stream:
            return False
        return "batch" not in marks and ("feature" in marks or self.sequence)

    @property
    def pinned_stream(self) -> bool:
        """Whether a pin cuts the stream: then it may be cut."""
        return any(p.kind == "shard" and "stream" in self.atoms.marks[name][p.atom] for name, p in self.pins.items())

    def allowed(self, n: int, node: Node, options: list[Strategy]) -> list[Strategy]:
        names = (*node.refs(), *node.outs)
        kept = []
        if any(r in self.params and self.pins.get(self.params[r], REPLICATE) != REPLICATE for r in node.refs()):
            return options  # what reads a parameter that the user cut may do whatever that takes
        for option in options:
            pairs = zip(names, (*option.inputs, *option.outputs), strict=True)
            if all(p.kind != "shard" or (name and self.may_shard(name, p.atom)) for name, p in pairs):
                kept.append(option)
        if self.axis == "dp":  # the batch splits: a node that can split samples does
            return [s for s in kept if s.factor or s.inputs != (REPLICATE,) * len(s.inputs)] if any(s.factor for s in kept) else kept
        if self.axis == "cp":  # with parameters whole, a product with one, or that makes its gradient, splits the sequence
            must = self.rules[node.op].contraction or any(k == "offset-sum" for k in self.atoms.rows[n].kinds.values())
            must = must or any(o in self.gradients for o in node.outs)
            must = (must or relates(self.program, self.atoms, n, self.params)) and any(x in self.batch for x in names)
            kept = [s for s in kept if s.factor] or kept if must else kept
            return self.pinned_context(n, node, kept) if self.context is not None and self.atoms.rows[n].ring is not None else kept
        if self.axis != "tp":
            return kept
        row = self.atoms.rows[n]
        whole = {name for name, p in self.pins.items() if p == REPLICATE}
        weights = [k for k, r in enumerate(node.refs()) if r in self.params and self.params[r] not in whole]
        split = kept
        if weights and self.rules[node.op].contraction:
            split = [s for s in kept if all(s.inputs[k].kind == "shard" for k in weights)]
        elif weights and any(kind == "offset-sum" for kind in row.kinds.values()) and any(r in self.batch for r in node.refs()):
            split = [s for s in kept if row.kind(s.factor) == "offset-sum"]
        return split or kept

    def pinned_context(self, n: int, node: Node, kept: list[Strategy]) -> list[Strategy]:
        """The strategies of an attention in the form that the user asked for. Raises PlanError where it has none."""
        ring = self.atoms.rows[n].ring
        assert ring is not None
        forms = {
            "ring": [s for s in kept if s.travels], "gather": [s for s in kept if s.factor == ring[0] and not s.travels],
            "heads": [s for s in kept if s.factor and s.factor not in ring],
        }  # fmt: skip
        found = forms[self.context or ""]
        if not found:
            raise PlanError(
                f"Plan(context={self.context!r}): {node.op} can't be split so over cp={self.mesh['cp']}", where=str(node.where),
                why=f"its row is {self.atoms.rows[n]}", hint="another form, or leave context out",
            )  # fmt: skip
        return found

    def input_choices(self, name: str) -> list[Placement]:
        kind = self.kinds[name]
        if self.axis == "dp":
            return [sample_placement(self.program, self.atoms, name, self.mesh["dp"])] if kind == "batch" else [REPLICATE]
        if kind != "param" or self.axis == "cp":
            return [REPLICATE]
        if name in self.pins:
            return [self.pins[name]]
        sizes = self.layout.inputs[name].local_atoms(self.mesh)
        ways = self.mesh[self.axis] if self.even else 1
        return [REPLICATE, *(shard(a) for a, n in enumerate(sizes) if self.may_shard(name, a) and n % ways == 0)]

    def surcharge(self, n: int, node: Node, option: Strategy) -> float:
        if not self.sequence or self.axis != "tp" or node.phase != "forward" or self.atoms.rows[n].moves:
            return 0.0
        extra = 0.0
        for name, p in zip(node.outs, option.outputs, strict=True):
            if name in self.batch and p == REPLICATE:
                marks = self.atoms.marks[name]
                between = any("stream" in m for m in marks)  # a hidden state between the matrices
                if between and any("batch" not in m and "feature" not in m for m in marks):
                    # a pin holds at any size: a latency of collectives that it costs must not outweigh it
                    extra += self.program.types[name].nbytes / self.device.link_bandwidth + 20 * self.device.latency
        return extra


def sample_placement(program: Program, atoms: Atoms, name: str, ways: int) -> Placement:
    """How ``dp`` cuts a batch input: its rows, along the dim that counts samples, whatever else has that size."""
    if name not in atoms.samples:
        return REPLICATE
    atom = atoms.samples[name]
    sizes = [a for dim in atoms.dims[name] for a in dim]
    if sizes[atom] % ways:
        path = next(i.path for i in program.inputs if i.name == name)
        raise PlanError(
            f"dp={ways} doesn't divide the samples of batch input {path!r} as the model views them, in groups of {sizes[atom]}",
            why=f"its dims are {atoms.dims[name]}", hint="another number of rows, or of data ranks",
        )  # fmt: skip
    return shard(atom)


def choose(
    program: Program,
    atoms: Atoms,
    rules: Rules,
    mesh: Mesh,
    *,
    sequence: bool = False,
    pins: Mapping[str, str] | None = None,
    held: Mapping[str, str] | None = None,
    device: Device = GENERIC,
    at: Callable[[str], None] = lambda stage: None,
    context: str | None = None,
) -> Layout:
    """Chooses the layout for the axes of a mesh.

    Args:
        sequence: ``tp`` also shards the sequence of activations between the matrices.
        pins: parameter path globs to placements such as ``dim0@tp``; of two that match the later wins.
        held: shardings of parameters by path, as text, that are to be kept exactly (a saved plan).
        at: is told before each axis.
        context: the form of attention over ``cp``: ``ring``, ``heads`` or ``gather``; None: whichever is cheapest.
    """
    layout = replicated(program, atoms)
    pin_placements(program, atoms, pins or {}, "tp", 1)  # pins are checked on every mesh
    make = problems(program, atoms, rules, mesh, sequence, device, context)
    seconds = {}
    notes: tuple[str, ...] = ()
    for axis in search_order(mesh):
        size = mesh[axis]
        if size == 1:
            continue
        if axis not in ("dp", "tp", "cp"):
            raise PlanError(f"mesh axis {axis!r} has no sharding search", hint="use dp, tp and cp")
        at(f"plan {axis}")
        pinned = {**pin_placements(program, atoms, pins or {}, axis, size), **_held_placements(program, atoms, held or {}, axis)}
        problem = make(axis, layout, pinned)
        if axis == "cp":
            notes = check_context(problem, from_batch(program))
        choice: Choice = solve(problem)
        seconds[axis] = choice.seconds
        layout = apply(layout, axis, mesh, choice.nodes, choice.inputs)
    return Layout(layout.inputs, layout.nodes, (*layout.notes, *notes), seconds)


def search_order(mesh: Mesh) -> tuple[str, ...]:
    """The axes in the order in which they are chosen: that of the mesh, but ``cp`` last, for only with the cuts of ``tp`` known does it
    see what moving heads costs."""
    return tuple(sorted(mesh.names, key=lambda axis: axis == "cp"))


def problems(
    program: Program, atoms: Atoms, rules: Rules, mesh: Mesh, sequence: bool, device: Device, context: str | None = None
) -> Callable[..., Problem]:
    """What an axis is asked, given the layout that earlier axes left and the placements pinned on it: ``make(axis, layout, pinned)``.

    With ``even=False``: as if the axis divided every size.
    """
    params, batch, kinds = from_params(program, rules), from_batch(program), {i.name: i.kind for i in program.inputs}
    grads = gradients(program, atoms)

    def make(axis: str, layout: Layout, pinned: Mapping[str, Placement], even: bool = True) -> Problem:
        roles = _Roles(program, atoms, rules, mesh, axis, layout, sequence, pinned, device, params, batch, kinds, grads, even, context)
        return Problem(
            program, atoms, rules, mesh, axis, device, layout.nodes, layout.inputs, roles.allowed, roles.input_choices, True,
            roles.surcharge, frozenset(n for n, p in pinned.items() if p.kind == "shard"), even,
        )  # fmt: skip

    return make


def _held_placements(program: Program, atoms: Atoms, held: Mapping[str, str], axis: str) -> dict[str, Placement]:
    out = {}
    for i in program.inputs_of("param"):
        if i.path not in held:
            continue
        kept = Sharding.parse(held[i.path])
        if kept.shape != program.types[i.name].shape:
            raise PlanError(f"the plan was made for parameter {i.path} of shape {kept.shape}, it has {program.types[i.name].shape}")
        placement = kept.on(axis)
        if placement.kind == "shard" and kept.dims != atoms.dims[i.name]:
            raise PlanError(f"the plan cuts parameter {i.path} as {kept}, but the program's atoms are {atoms.dims[i.name]}")
        out[i.name] = placement
    return out


def _check_ties(program: Program, pins: Mapping[str, str]) -> None:
    """Of two pins that match a name the later wins; two names of one tied parameter, pinned each by itself, must agree."""
    for i in program.inputs_of("param"):
        named = {glob: {p for p in (i.path, *i.aliases) if fnmatchcase(p, glob)} for glob in pins} if i.aliases else {}
        for first, names in named.items():
            for second, others in named.items():
                if names - others and others - names and pins[first] != pins[second]:
                    raise PlanError(
                        f"the pins {first!r}: {pins[first]!r} and {second!r}: {pins[second]!r} contradict each other",
                        why=f"{min(names)} and {min(others)} are one tied parameter", hint="pin one of them",
                    )  # fmt: skip


def pin_placements(program: Program, atoms: Atoms, pins: Mapping[str, str], axis: str, size: int) -> dict[str, Placement]:
    """Placements on one axis that a user's pins ask for, by input name. Raises PlanError for pins that match nothing or can't hold."""
    out: dict[str, Placement] = {}
    _check_ties(program, pins)
    for glob, text in pins.items():
        unknown = [a for _, a in (part.split("@", 1) for part in text.split(",") if "@" in part) if a.strip() != "tp"]
        if unknown:
            raise PlanError(
                f"pin {glob!r}: parameters can't be cut over axis {unknown[0].strip()!r}",
                why="over dp they are whole, and their optimizer state is cut by ZeRO", hint="dim0@tp",
            )  # fmt: skip
        matched = [i for i in program.inputs_of("param") if any(fnmatchcase(p, glob) for p in (i.path, *i.aliases))]
        if not matched:
            raise PlanError(f"pin {glob!r} matches no parameter", hint="pins are globs over names as in model.named_parameters()")
        wanted = {}
        for part in filter(None, (t.strip() for t in text.split(","))):
            where, at, name = part.partition("@")
            if part != "replicate" and (not at or not where.startswith("dim") or not where[3:].isdigit()):
                raise PlanError(f"pin {glob!r}: {part!r} is not well formed", hint="write dim0@tp or replicate")
            if at:
                wanted[name] = int(where[3:])
        for i in matched:
            if axis not in wanted:
                out[i.name] = REPLICATE
                continue
            dims, dim = atoms.dims[i.name], wanted[axis]
            if dim >= len(dims):
                raise PlanError(f"pin {glob!r}: parameter {i.path} has no dim {dim}")
            first = sum(len(d) for d in dims[:dim])
            able = [a for a in range(first, first + len(dims[dim])) if dims[dim][a - first] % size == 0]
            if not able:
                raise PlanError(
                    f"pin {glob!r}: dim {dim} of parameter {i.path} is {dims[dim] or 1} and axis {axis!r} has {size} ranks",
                    hint="pin a dim that the axis divides",
                )
            # of a fused dim (3 H D) the chunks stay whole where what is in them can be cut
            chunked = len(dims[dim]) > 1 and dims[dim][0] < dims[dim][1]
            out[i.name] = shard(able[1] if chunked and len(able) > 1 and able[0] == first else able[0])
    return out


def random_layout(program: Program, atoms: Atoms, rules: Rules, mesh: Mesh, rng: random.Random) -> Layout:
    """Any legal layout: a random strategy for every node and axis. For tests: the chosen plan alone hides wrong rows."""
    layout = replicated(program, atoms)
    for axis in search_order(mesh):
        size = mesh[axis]
        if size == 1:
            continue
        nodes: dict[int, Strategy] = {}
        inputs: dict[str, Placement] = {}
        given: dict[str, Placement] = {}
        for i in program.inputs:
            sizes = layout.inputs[i.name].local_atoms(mesh)
            options = [REPLICATE]
            if i.kind == "param" and axis not in ("dp", "cp"):
                options += [shard(a) for a, s in enumerate(sizes) if s % size == 0]
            if i.kind == "batch" and axis == "dp":
                options = [sample_placement(program, atoms, i.name, size)]
            given[i.name] = inputs[i.name] = rng.choice(options)
        for n, node in enumerate(program.nodes):
            operands, outputs = layout.nodes[n]
            dims, left = [s.dims for s in (*operands, *outputs)], [s.local_dims(mesh) for s in (*operands, *outputs)]
            legal = [
                s
                for s in (*strategies(atoms.rows[n], dims, size, left), *(rings(atoms.rows[n], dims, size, left) if axis == "cp" else ()))
                if all(given[r] == p or step_kind(given[r], p) is not None for r, p in zip(node.refs(), s.inputs, strict=True))
            ]
            nodes[n] = rng.choice(legal)
            given.update({o: p for o, p in zip(node.outs, nodes[n].outputs, strict=True) if o})
        layout = apply(layout, axis, mesh, nodes, inputs)
    return layout
