"""Tables of what a compilation decided: parameters, collectives, memory, predicted time. Rows are data; ``show_*`` makes text of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from autopar.applied import Applied, find_applied
from autopar.codegen.emit import Module
from autopar.codegen.live import profile
from autopar.compiler import Compiled
from autopar.inspect import stages
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Phase
from autopar.layout.bucket import kept_bytes
from autopar.layout.traffic import bytes_sent
from autopar.plan.plan import LEVELS, Plan
from autopar.plan.uneven import Uneven, find_uneven


@dataclass(frozen=True)
class ParameterRow:
    """A parameter: how it is cut, the bytes of a rank's piece, and the part of them that the rank owns and updates."""

    path: str
    type: str
    sharding: str
    bytes: int
    bucket: str
    owned_bytes: int


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives that are the same but for their number: ``times`` a step, each sending ``bytes`` from this rank.

    ``module`` is the site that the comm's records name; ``line`` and ``code`` are the user's line that caused it, where one did.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    times: int
    bytes: int
    module: str
    line: str
    code: str


@dataclass(frozen=True)
class MemoryRow:
    """Bytes on a rank of one kind of tensor, by ZeRO level."""

    what: str
    bytes: tuple[int, ...]


def parameter_rows(compiled: Compiled) -> list[ParameterRow]:
    """Every parameter in the model's order."""
    local, mesh = compiled.local, compiled.spec.mesh
    bucket_of = {m.path: b for b in compiled.spec.buckets for m in b.members}
    rows = []
    for i in local.inputs_of("param"):
        if compiled.pipeline is not None and i.path not in bucket_of and i.path not in compiled.spec.params:
            continue  # of another stage
        bucket = bucket_of.get(i.path)
        owners = bucket.owners(mesh) if bucket is not None and compiled.spec.zero else 1
        size = local.types[i.name].nbytes
        rows.append(ParameterRow(i.path, str(local.global_types[i.name]), str(local.shardings[i.name]), size,
                                 bucket.name if bucket else "-", math.ceil(size / owners)))  # fmt: skip
    return rows


def sent(compiled: Compiled, node: Node, rank: int = 0, program: LocalProgram | None = None) -> int:
    """Bytes that a rank hands to the transport for one run of a collective node, as predicted from the graph."""
    kind, mesh = (program or compiled.final).types[node.refs()[0]], compiled.spec.mesh
    axes = node.args[1]
    return bytes_sent(node.op.removeprefix("comm."), kind.numel, kind.dtype.itemsize, mesh.count(axes), mesh.index(rank, axes))


def collective_rows(compiled: Compiled, rank: int = 0) -> list[CollectiveRow]:
    """Every collective of a step, as ``rank`` sees it, in the order in which the program first comes to them."""
    table: dict[CollectiveRow, int] = {}
    for program, node in ((p, n) for p in compiled.finals for n in p.nodes):
        if node.op.startswith("comm."):
            where, size = node.where, sent(compiled, node, rank, program)
            line = f"{where.file}:{where.line}" if where.file else ""
            row = CollectiveRow(node.op[5:], tuple(node.args[1]), node.phase, 0, size, where.module, line, where.code)
            table[row] = table.get(row, 0) + (program.microbatches if node.region == "body" else 1)
    return [CollectiveRow(r.kind, r.axes, r.phase, times, r.bytes, r.module, r.line, r.code) for r, times in table.items()]


def memory_rows(compiled: Compiled, states: float | None = None) -> list[MemoryRow]:
    """What a rank holds, by ZeRO level; the activations are those of this plan.

    Args:
        states: elements of optimizer state for each element of a parameter (AdamW: 2); None where that isn't known.
    """
    mesh, buckets = compiled.spec.mesh, compiled.spec.buckets
    whole, owned = kept_bytes(buckets, mesh, 0)[0], kept_bytes(buckets, mesh, 3)[0]
    rest, buffers = (
        sum(size for _, size in {(i.path, p.types[i.name].nbytes) for p in compiled.finals for i in p.inputs_of(kind)})
        for kind in ("param", "buffer")
    )
    rows = [
        MemoryRow("parameters, kept", tuple(kept_bytes(buckets, mesh, level)[0] for level in LEVELS)),
        MemoryRow("gradients, kept", tuple(kept_bytes(buckets, mesh, level)[1] for level in LEVELS)),
        MemoryRow("optimizer state, each tensor of it", (whole, owned, owned, owned))
        if states is None
        else MemoryRow("optimizer state", (int(whole * states), *(int(owned * states),) * 3)),
    ]
    if rest:
        rows.append(MemoryRow("parameters without gradient", (rest,) * 4))
    if buffers:
        rows.append(MemoryRow("buffers", (buffers,) * 4))
    rows += [
        MemoryRow(f"activations and temporaries at most, {phase}", (most,) * len(LEVELS)) for phase, most in live_peaks(compiled).items()
    ]
    return rows


def live_peaks(compiled: Compiled) -> dict[Phase, int]:
    """The most bytes of tensors that a rank makes in each phase of a step beside what lives between steps, by its programs' statements."""
    if compiled.pipeline is not None:
        return compiled.pipeline.peaks()
    assert isinstance(compiled.module, Module)
    found = profile(compiled.final, compiled.module.script)
    return {"forward": found.peak("forward").bytes, "backward": found.peak("backward").bytes}


def uneven_rows(compiled: Compiled, plan: Plan) -> list[Uneven]:
    """What an axis would cut but for its size, and what that costs."""
    return find_uneven(
        compiled.split, compiled.atoms, compiled.rules, compiled.local.mesh, compiled.layout, sequence=bool(plan.sequence),
        pins=plan.shard or {}, device=compiled.device,
    )  # fmt: skip


# -- text


def show_parameters(rows: Sequence[ParameterRow]) -> str:
    """The table of parameters, with its sums."""
    table: list[tuple[object, ...]] = [(r.path, r.type, r.sharding, r.bytes, r.bucket, r.owned_bytes) for r in rows]
    table.append(("all", "", "", sum(r.bytes for r in rows), "", sum(r.owned_bytes for r in rows)))
    headers = ("parameter", "type", "sharding", "bytes a rank", "bucket", "owned bytes")
    return tabulate(table, headers=headers, intfmt=",", disable_numparse=[0, 1, 2, 4])


def show_collectives(rows: Sequence[CollectiveRow]) -> str:
    """The table of collectives, then the bytes of a step by axis."""
    if not rows:
        return "no collectives"
    table = [(r.kind, "+".join(r.axes), r.phase, r.times, r.bytes, r.module or "(model)", r.line, _short(r.code)) for r in rows]
    headers = ("collective", "axis", "phase", "times", "bytes sent", "module", "line", "code")
    text = tabulate(table, headers=headers, intfmt=",", disable_numparse=[0, 1, 2, 5, 6, 7])
    totals = ", ".join(f"{axis} {size:,}" for axis, size in by_axis(rows).items())
    return f"{text}\nbytes that a rank sends a step: {totals}"


def by_axis(rows: Iterable[CollectiveRow]) -> dict[str, int]:
    """Bytes that a rank sends in a step over each axis (or axes together)."""
    sums: dict[str, int] = {}
    for r in rows:
        axis = "+".join(r.axes)
        sums[axis] = sums.get(axis, 0) + r.times * r.bytes
    return sums


def show_memory(rows: Sequence[MemoryRow], zero: int) -> str:
    """The table of memory; the level in force is marked."""
    headers = ("bytes a rank", *(f"ZeRO {n}{' (this plan)' if n == zero else ''}" for n in LEVELS))
    return tabulate([(r.what, *r.bytes) for r in rows], headers=headers, intfmt=",", disable_numparse=[0])


def show_uneven(rows: Sequence[Uneven]) -> str:
    """A line for each, under a heading; a line that says so where there is none."""
    if not rows:
        return "sizes: every dim that an axis would cut is divided by it"
    return "\n".join(["sizes that an axis doesn't divide:", *(f"  {r}" for r in rows)])


def _short(code: str, most: int = 48) -> str:
    return code if len(code) <= most else code[: most - 1] + "…"


def head(compiled: Compiled, plan: Plan) -> str:
    """The plan in a few lines, and notes on what could not be had."""
    spec = compiled.spec
    seconds = ", ".join(f"{axis} {s * 1e3:.3g} ms" for axis, s in compiled.layout.seconds.items()) or "nothing to choose"
    side = f", {plan.interleave} side by side" if spec.microbatches > 1 < (plan.interleave or 1) else ""
    lines = [
        f"mesh {str(spec.mesh) or 'of one rank'}, ZeRO {spec.zero}, {spec.microbatches} microbatch(es){side}, "
        f"sequence {'on' if plan.sequence else 'off'}",
        f"predicted seconds of work and communication that the choice of shardings was made by: {seconds}",
        f"segments: {sum(m.segments for m in compiled.modules)} distinct, called {sum(m.calls for m in compiled.modules)} times",
    ]
    return "\n".join([*lines, *compiled.layout.notes])


def show_applied(rows: Sequence[Applied]) -> str:
    """The table of what was asked for, and what became of it."""
    table = [(a.request, a.done or f"not applied: {a.why}") for a in rows]
    return tabulate(table, headers=("asked for", "what was done"), disable_numparse=True) if rows else "the plan asks for nothing"


def explain(compiled: Compiled, plan: Plan, states: float | None = None) -> str:
    """The plan and what follows from it."""
    parts = [
        head(compiled, plan),
        show_applied(find_applied(compiled, plan)),
        *([stages.explain_stages(compiled)] if compiled.pipeline is not None else []),
        show_parameters(parameter_rows(compiled)),
        show_collectives(collective_rows(compiled)),
        show_memory(memory_rows(compiled, states), compiled.spec.zero),
        show_uneven(uneven_rows(compiled, plan)),
    ]
    return "\n\n".join(parts)
