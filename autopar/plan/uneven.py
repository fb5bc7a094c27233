"""What an axis would cut but for its size: the axis is asked again as if it divided every size, and the answers are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.device import Device
from autopar.ir.program import Program
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import REPLICATE, Placement, Sharding
from autopar.plan.axis import Choice, Problem, products, runs_of, solve, wildcard
from autopar.plan.layout import Layout, from_batch, pin_placements, problems, search_order
from autopar.rules import Rules
from autopar.rules.atoms import Atoms


@dataclass(frozen=True)
class Uneven:
    """Something that an axis would cut along a dim if it divided it; of layers that repeat, all of them.

    Attributes:
        kind: ``parameter``, ``products`` (matrix products of modules) or ``activations`` (of modules).
        names: paths of the parameters or of the modules.
        size: that the axis doesn't divide.
        dim: of a parameter, which.
        atoms: of a parameter's dim, the sizes that it is made of; ``size`` is one of them.
        instead: of a parameter, the dim that is cut instead and the size in it; None where it is whole.
        bytes: on a rank, of all of them, beyond what there would be if they were cut.
        share: of the floating-point operations of a rank's products, those that every rank does alike.
    """

    kind: str
    names: tuple[str, ...]
    axis: str
    ways: int
    size: int
    dim: int | None = None
    atoms: tuple[int, ...] = ()
    instead: tuple[int, int] | None = None
    bytes: int = 0
    share: float = 0.0

    @property
    def fits(self) -> int:
        """The next larger size that the axis divides."""
        return _piece(self.size, self.ways) * self.ways

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(map(wildcard, self.names)))
        shown = ", ".join([*(k or "(model)" for k in kinds[:4]), *(["…"] if len(kinds) > 4 else [])])
        why = f"{self.axis}={self.ways} doesn't divide {self.size}, {self.fits} would do"
        if self.kind == "products":
            return f"products in {shown}: done whole by every rank, {why}; {self.share:.1%} of a rank's products"
        if self.kind == "activations":
            return f"activations in {shown}: kept whole, {why}; {self.bytes:,} bytes more a rank"
        of = f" of {'·'.join(map(str, self.atoms))}" if len(self.atoms) > 1 else ""
        if self.instead is not None:
            where = f"dim {self.instead[0]}" if self.instead[0] != self.dim else "the same dim"
            return f"{shown} dim {self.dim} ({self.size}{of}): {why}; {self.instead[1]} of {where} is cut instead"
        return f"{shown} dim {self.dim} ({self.size}{of}): kept whole, {why}; {self.bytes:,} bytes more a rank"


def find_uneven(
    program: Program, atoms: Atoms, rules: Rules, mesh: Mesh, layout: Layout, *, sequence: bool, pins: Mapping[str, str], device: Device
) -> list[Uneven]:
    """What the axes of a mesh would cut but for its size. ``dp`` isn't asked: samples that it doesn't divide are refused.

    Args:
        layout: that was chosen for the program.
        pins: the user's, which hold whatever the sizes.
    """
    make = problems(program, atoms, rules, mesh, sequence, device)
    found: list[Uneven] = []
    order = search_order(mesh)
    for k, axis in enumerate(order):
        ways = mesh[axis]
        if ways == 1 or axis == "dp":
            continue
        before = _without(layout, mesh, list(order[k:]))
        problem = make(axis, before, pin_placements(program, atoms, pins, axis, ways), even=False)
        if any(n % ways for dims in atoms.dims.values() for dim in dims for n in dim):
            wished = solve(problem)
            found += [*_parameters(problem, layout, wished), *_products(problem, layout, wished), *_activations(problem, layout, wished)]
    return found


def _without(layout: Layout, mesh: Mesh, axes: list[str]) -> Layout:
    """The layout as it was before some axes were chosen."""

    def whole(sharding: Sharding) -> Sharding:
        for axis in axes:
            sharding = sharding.with_placement(axis, REPLICATE, mesh)
        return sharding

    nodes = {n: (tuple(map(whole, inputs)), tuple(map(whole, outputs))) for n, (inputs, outputs) in layout.nodes.items()}
    return Layout({name: whole(s) for name, s in layout.inputs.items()}, nodes, layout.notes, layout.seconds)


def _piece(size: int, ways: int) -> int:
    return -(-size // ways)


def _uneven_size(sharding: Sharding, placement: Placement, mesh: Mesh, ways: int) -> int | None:
    """The size of the atom that a placement cuts, where that isn't divided."""
    size = sharding.local_atoms(mesh)[placement.atom] if placement.kind == "shard" else 0
    return size if size % ways else None


def _parameters(problem: Problem, layout: Layout, wished: Choice) -> Iterator[Uneven]:
    mesh, axis, ways = problem.mesh, problem.axis, problem.mesh[problem.axis]
    alike: dict[tuple[str, int, tuple[int, ...], int, tuple[int, int] | None], dict[str, int]] = defaultdict(dict)
    for i in problem.program.inputs_of("param"):
        before, placement, now = problem.inputs[i.name], wished.inputs[i.name], layout.inputs[i.name].on(axis)
        size = _uneven_size(before, placement, mesh, ways)
        if size is None:
            continue
        dim_of = [d for d, dim in enumerate(before.dims) for _ in dim]
        dim = dim_of[placement.atom]
        instead = (dim_of[now.atom], before.atoms[now.atom]) if now.kind == "shard" else None
        kept = problem.program.types[i.name].nbytes if instead is None else 0
        alike[wildcard(i.path), dim, before.dims[dim], size, instead][i.path] = kept - kept * _piece(size, ways) // size
    for (_, dim, sizes, size, instead), kept_bytes in alike.items():
        yield Uneven("parameter", tuple(kept_bytes), axis, ways, size, dim, sizes, instead, sum(kept_bytes.values()))


def _split(layout: Layout, n: int, axis: str) -> bool:
    """Whether an axis splits what a node does."""
    return any(s.on(axis).kind == "shard" for side in layout.nodes[n] for s in side)


def _products(problem: Problem, layout: Layout, wished: Choice) -> Iterator[Uneven]:
    program, mesh, axis, ways = problem.program, problem.mesh, problem.axis, problem.mesh[problem.axis]
    alike: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total = 0.0
    for n, node in enumerate(program.nodes):
        work = products(problem, n) * runs_of(program, node)
        split = _split(layout, n, axis)
        total += work / ways if split else work
        if not work or split:
            continue
        shardings, option = (s for side in problem.layout[n] for s in side), wished.nodes[n]
        sizes = [_uneven_size(s, p, mesh, ways) for s, p in zip(shardings, (*option.inputs, *option.outputs), strict=True)]
        size = next((s for s in sizes if s is not None), None)
        if size is not None:
            alike[wildcard(node.where.module), size][node.where.module] += work
    for (_, size), works in alike.items():
        yield Uneven("products", tuple(works), axis, ways, size, share=sum(works.values()) / total)


def _activations(problem: Problem, layout: Layout, wished: Choice) -> Iterator[Uneven]:
    """Values of the forward that would be cut along what is no feature: a sequence."""
    program, mesh, axis, ways = problem.program, problem.mesh, problem.axis, problem.mesh[problem.axis]
    batch, alike = from_batch(program), defaultdict[int, dict[str, int]](dict)
    for n, node in enumerate(program.nodes):
        if node.phase != "forward" or problem.atoms.rows[n].moves:
            continue
        for name, before, p, now in zip(node.outs, problem.layout[n][1], wished.nodes[n].outputs, layout.nodes[n][1], strict=True):
            size = _uneven_size(before, p, mesh, ways) if name in batch else None
            if name is None or size is None or now.on(axis).kind == "shard" or "feature" in problem.atoms.marks[name][p.atom]:
                continue
            kept = program.types[name].nbytes * runs_of(program, node)
            module = node.where.module
            alike[size][module] = alike[size].get(module, 0) + kept - kept * _piece(size, ways) // size
    for size, kept_bytes in alike.items():
        yield Uneven("activations", tuple(kept_bytes), axis, ways, size, bytes=sum(kept_bytes.values()))
