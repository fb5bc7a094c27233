"""Comparing the simulated ranks of a mesh with the plain model, and finding the first value that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from autopar._torch import resolve
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Output, Program, map_refs
from autopar.layout.mesh import MICROBATCH, Mesh
from autopar.reference import Trace
from autopar.runtime import ops
from autopar.runtime.comm import Comm
from autopar.runtime.executor import cut, paste
from autopar.runtime.random import step_key
from autopar.runtime.sim import bits, run_simulated

#: relative difference that is allowed, by dtype of what is compared: rounding of sums in another order.
TOLERANCE = {
    torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.complex128: 1e-10, torch.complex64: 2e-4
}  # fmt: skip
#: a tensor whose values are all under this share of the largest of its kind is compared against that share: gradients that are truly
#: zero (of a key's bias, say) are rounding, which has no relative error.
FLOOR = 1e-3
#: what may lie between a model that casts to a type inside and its exact run, by that type: rounding, and no more.
ROUNDING = {torch.float32: TOLERANCE[torch.float32], torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass
class Run:
    """What one simulated rank gave."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, Tensor] = field(default_factory=dict)
    compiled: Compiled | None = None


@dataclass(frozen=True)
class Row:
    """One compared tensor: its relative difference and what was allowed."""

    kind: str
    name: str
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Report:
    """The result of ``verify``.

    ``first`` names the first value of the program that differs from the one-process run, with its place; empty where all is well.
    ``gaps`` compares the plain model with its exact run, which is the reference where the model casts to a lower precision inside.
    """

    mesh: Mesh
    rows: tuple[Row, ...]
    replicas: tuple[str, ...]
    first: str = ""
    notes: tuple[str, ...] = ()
    gaps: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        return all(r.ok for r in (*self.rows, *self.gaps)) and not self.replicas

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max((r.difference for r in self.rows), default=0.0)

    def table(self, most: int = 20) -> str:
        """The largest differences first, then replicas that differ and the first differing value."""
        shown = (*self.rows, *(r for r in self.gaps if not r.ok))
        rows = sorted(shown, key=lambda r: (r.ok, -r.difference if not math.isnan(r.difference) else -math.inf))[:most]
        text = tabulate([(r.kind, r.name, f"{r.difference:.1e}", f"{r.allowed:.0e}", "ok" if r.ok else "DIFFERS") for r in rows],
                        headers=("kind", "name", "relative difference", "allowed", ""))  # fmt: skip
        parts = [f"mesh {str(self.mesh) or 'of one rank'}: {'equal' if self.ok else 'NOT equal'} ({len(self.rows)} tensors compared)", text]
        parts += [f"replicas differ: {r}" for r in self.replicas]
        if self.first:
            parts.append(f"first difference: {self.first}")
        return "\n".join([*parts, *self.notes])


def difference(a: Tensor, b: Tensor, scale: float) -> float:
    """The largest difference of two tensors, relative to the larger of ``b``'s own largest value and the floor of its kind.

    ``scale`` is the largest value among all tensors of the kind.
    """
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    if not b.is_floating_point() and not b.is_complex():
        return 0.0 if torch.equal(a, b) else math.inf
    if b.is_complex():
        a, b = torch.view_as_real(a.to(torch.complex128)), torch.view_as_real(b.to(torch.complex128))
    a, b = a.double(), b.double()
    both = torch.isnan(a) & torch.isnan(b) | (a == b)
    delta = torch.where(both, 0.0, (a - b).abs()).max().item()
    if math.isnan(delta):
        return math.inf
    return delta / max(b.abs().nan_to_num(posinf=0.0).max().item(), scale * FLOOR, 1e-30) if delta else 0.0


def compare(
    runs: list[Run],
    reference: Trace,
    start: nn.Module,
    batch: Any,
    mesh: Mesh,
    seed: int,
    make: Callable[..., Comm],
    exact: Trace | None = None,
) -> Report:
    """Compares what the ranks gave with the reference; looks for the first difference where there is one.

    Args:
        exact: the plain model without the casts that it makes by itself, where it makes any.
    """
    compiled = runs[0].compiled
    assert compiled is not None
    notes: tuple[str, ...] = ()
    gaps: list[Row] = []
    if exact is not None:
        allowed = ROUNDING.get(compiled.lifted or torch.float32)
        for kind in ("losses", "gradients", "state"):
            gaps += _rows(f"plain model's {kind}", _named(reference, kind), _named(exact, kind), allowed)
        gap = max((r.difference for r in gaps if r.kind.endswith("losses")), default=0.0)
        text = f"the model casts to {compiled.lifted} inside: compared with its exact run, from which its own losses differ by {gap:.1e}"
        notes = (text,)
        reference = exact
    rows: list[Row] = []
    for rank in sorted({0, len(runs) - 1}):
        rows += _rows(f"loss (rank {rank})", _named(runs[rank], "losses"), _named(reference, "losses"))
    tied = {alias for i in compiled.program.inputs_of("param") for alias in i.aliases}
    gradients = {n: g for n, g in runs[0].gradients.items() if n in reference.gradients or n not in tied}
    rows += _rows("gradient", gradients, reference.gradients)
    rows += _rows("state", {n: t for n, t in runs[0].state.items() if n in reference.state}, reference.state)
    report = Report(mesh, tuple(rows), _replicas(runs, mesh, compiled), "", notes, tuple(gaps))
    if all(r.ok for r in rows) and not report.replicas:
        return report
    return replace(report, first=first_difference(compiled, start, batch, mesh, seed, make))


def _named(trace: Run | Trace, kind: str) -> Mapping[str, Tensor]:
    found = getattr(trace, kind)
    return found if isinstance(found, Mapping) else dict(zip(map(str, range(len(found))), found, strict=True))


def _rows(kind: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], allowed: float | None = None) -> list[Row]:
    """One row for every tensor of either side; ``allowed`` None: by dtype."""
    scale = max((t.abs().max().item() for t in theirs.values() if t.is_floating_point() and t.numel()), default=0.0)
    rows = []
    for name, value in theirs.items():
        apart = difference(mine[name], value, scale) if name in mine else math.inf
        rows.append(Row(kind, name, apart, TOLERANCE.get(value.dtype, 0.0) if allowed is None else allowed))
    return rows + [Row(kind, f"{name} (the plain model has none)", math.inf, 0.0) for name in mine if name not in theirs]


def _replicas(runs: list[Run], mesh: Mesh, compiled: Compiled) -> tuple[str, ...]:
    """Pieces that several ranks hold and that are not the same to the last bit."""
    found = []
    shardings = {i.path: compiled.local.shardings[i.name] for i in compiled.local.inputs if i.kind in ("param", "buffer")}
    for path, sharding in shardings.items():
        seen: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        for rank, run in enumerate(runs):
            if path not in run.pieces:
                continue
            starts = sharding.starts(mesh, mesh.coords(rank))
            other, piece = seen.setdefault(starts, (rank, run.pieces[path]))
            if not torch.equal(bits(piece), bits(run.pieces[path])):
                found.append(f"{path} on ranks {other} and {rank}")
    for rank, run in enumerate(runs):
        if any(not torch.equal(bits(a), bits(b)) for a, b in zip(run.losses, runs[0].losses, strict=True)):
            found.append(f"loss on ranks 0 and {rank}")
    return tuple(found)


def input_values(program: Program, model: nn.Module, batch: Any, seed: int, step: int) -> dict[str, Tensor]:
    """Whole input tensors of a program by name, from a model and a global batch."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    leaves = iter(take_batch(batch)[1])
    values: dict[str, Tensor] = {}
    for i in program.inputs:
        if i.kind in ("param", "buffer"):
            values[i.name] = named[i.path].detach()
        elif i.kind == "batch":
            values[i.name] = next(leaves)
        elif i.kind == "key":
            values[i.name] = step_key(seed, step)
        elif i.kind == "const":
            values[i.name] = program.consts[i.path]
        elif i.kind == "tangent":
            values[i.name] = torch.ones(program.types[i.name].shape, dtype=program.types[i.name].dtype)
    return values


def plain_ops() -> dict[str, Callable[..., Any]]:
    """Functions of the ops that torch doesn't have, by op name."""
    return {f"autopar.{name}": getattr(ops, name) for name in dir(ops) if callable(getattr(ops, name)) and not name.startswith("_")}


def first_difference(compiled: Compiled, model: nn.Module, batch: Any, mesh: Mesh, seed: int, make: Callable[..., Comm]) -> str:
    """Runs one step node by node, whole and on simulated ranks, and names the first value that differs."""
    split, local = compiled.split, compiled.local
    values = input_values(split, model, batch, seed, 0)
    whole: dict[str, list[Tensor]] = _whole_values(split, values)

    def rank(comm: Comm) -> dict[str, list[Tensor]]:
        pieces = {i.name: cut(values[i.name], local.shardings[i.name], mesh, comm.coords) for i in local.inputs}
        return _local_values(local, pieces, comm)

    ranks = run_simulated(mesh, rank, timeout=600.0, make=make)
    scale = max((t[-1].abs().max().item() for t in whole.values() if t[-1].is_floating_point() and t[-1].numel()), default=1.0)
    for node in local.nodes:
        for out in node.outs:
            if out not in local.shardings or out not in whole:
                continue
            for turn, expected in enumerate(whole[out]):
                found = _assemble([r[out][turn] for r in ranks], local, out, mesh)
                if difference(found, expected, scale * 1e-6) > 1e-8 if expected.is_floating_point() else not torch.equal(found, expected):
                    operands = ", ".join(f"{r}: {local.shardings.get(r, '')}" for r in node.refs())
                    at = f" in microbatch {turn}" if len(whole[out]) > 1 else ""
                    return f"{out}{at} = {node.op}({operands}) -> {local.shardings[out]}\n  where: {node.phase} {node.where}"
    return "no value of the program's first step: the difference arises in buckets, optimizer or collectives of parameters"


def _whole_values(program: Program, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    env: dict[str, list[Tensor]] = {k: [v] for k, v in values.items()}

    def call(node: Node, get: Callable[[str], Tensor], mb: int) -> tuple[Any, ...]:
        # the program of one process has no copies in front of kernels that read raw memory
        return _call(node, lambda name: get(name).contiguous(), {MICROBATCH: mb}, None)

    _execute(program, env, call)
    return env


def _local_values(program: LocalProgram, pieces: Mapping[str, Tensor], comm: Comm) -> dict[str, list[Tensor]]:
    env: dict[str, list[Tensor]] = {k: [v] for k, v in pieces.items()}

    def call(node: Node, get: Callable[[str], Tensor], mb: int) -> tuple[Any, ...]:
        return _call(node, get, {**comm.coords, MICROBATCH: mb}, comm)

    _execute(program, env, call)
    return env


def _execute(program: Program, env: dict[str, list[Tensor]], call: Callable[..., tuple[Any, ...]]) -> None:
    """Runs a program's nodes, those of the loop once a turn; every value keeps one tensor a turn."""
    with torch.no_grad():
        for region in ("pre", "body", "post"):
            nodes = [n for n in program.nodes if n.region == region]
            turns = range(program.microbatches) if region == "body" else range(1)
            for turn in turns:
                for node in nodes:
                    if node.op == "autopar.accumulate":
                        parts = env[node.refs()[0]]
                        total = None
                        for part in parts:
                            total = ops.accumulate(total, part, node.args[1])
                        env[node.outs[0]] = [total]  # type: ignore[list-item]
                        continue

                    def get(name: str, turn: int = turn) -> Tensor:
                        held = env[name]
                        return held[turn] if len(held) > 1 else held[0]

                    for out, value in zip(node.outs, call(node, get, turn), strict=True):
                        if out:
                            env.setdefault(out, []).append(value)


def _call(node: Node, get: Callable[[str], Tensor], coords: Mapping[str, int], comm: Comm | None) -> tuple[Any, ...]:
    def numbers(tree: Any) -> Any:
        if isinstance(tree, Offset):
            return tree.at(coords)
        return tuple(numbers(t) for t in tree) if isinstance(tree, tuple) else tree

    args = numbers(map_refs(node.args, get))
    kwargs = {k: numbers(map_refs(v, get)) for k, v in node.kwargs}
    space, _, name = node.op.partition(".")
    if space == "comm":
        assert comm is not None
        return (getattr(comm, name)(*args, site=node.where.module).wait(),)
    function: Callable[..., Any] = getattr(ops, name) if space == "autopar" else resolve(node.op)
    if node.op in ("aten.view.default", "aten._unsafe_view.default"):
        function = torch.reshape
    result = function(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _assemble(pieces: list[Tensor], program: LocalProgram, name: str, mesh: Mesh) -> Tensor:
    """A whole tensor from the ranks' pieces, partial ones combined."""
    sharding, kind = program.shardings[name], program.global_types[name]
    partial = sharding.partial_axes()
    groups: dict[tuple[int, ...], dict[tuple[int, ...], Tensor]] = {}
    for rank, piece in enumerate(pieces):
        coords = mesh.coords(rank)
        starts = sharding.starts(mesh, coords)
        groups.setdefault(starts, {}).setdefault(tuple(coords[a] for a, _ in partial), piece)
    whole = torch.empty(kind.shape, dtype=kind.dtype)
    for rank, _ in enumerate(pieces):
        coords = mesh.coords(rank)
        parts = list(groups[sharding.starts(mesh, coords)].values())
        total = parts[0]
        for part in parts[1:]:
            combine = partial[0][1]
            total = total + part if combine == "sum" else torch.maximum(total, part) if combine == "max" else torch.minimum(total, part)
        paste(whole, total, sharding, mesh, coords)
    return whole


__all__ = ["FLOOR", "TOLERANCE", "Output", "Report", "Row", "Run", "compare", "first_difference"]
