"""Tables of what a compilation decided: parameters, collectives, predicted time and memory."""

from __future__ import annotations

from collections import defaultdict

from tabulate import tabulate

from autopar.compiler import Compiled
from autopar.ir.program import Node
from autopar.layout.traffic import bytes_sent
from autopar.plan.plan import Plan


def parameters(compiled: Compiled) -> str:
    """Every parameter with its sharding, its bytes on a rank and its bucket."""
    local, mesh = compiled.local, compiled.spec.mesh
    bucket_of = {m.path: b for b in compiled.spec.buckets for m in b.members}
    rows = []
    for i in local.inputs_of("param"):
        bucket = bucket_of.get(i.path)
        owners = bucket.owners(mesh) if bucket is not None and compiled.spec.zero else 1
        rows.append((i.path, str(local.global_types[i.name]), str(local.shardings[i.name]), local.types[i.name].nbytes,
                     bucket.name if bucket else "-", local.types[i.name].nbytes // owners))  # fmt: skip
    return tabulate(rows, headers=("parameter", "type", "sharding", "bytes a rank", "bucket", "owned bytes"))


def sent(compiled: Compiled, node: Node) -> int:
    """Bytes that a rank hands to the transport for one run of a collective node, as predicted from the graph."""
    kind = compiled.final.types[node.refs()[0]]
    return bytes_sent(node.op.removeprefix("comm."), kind.numel, kind.dtype.itemsize, compiled.spec.mesh.count(node.args[1]))


def collectives(compiled: Compiled) -> str:
    """Every collective of a step: axis, bytes, phase, how often, and the model line that caused it; equal ones in one row."""
    table: dict[tuple[str, str, str, str, str, int], int] = defaultdict(int)
    for node in compiled.final.nodes:
        if node.op.startswith("comm."):
            turns = compiled.spec.microbatches if node.region == "body" else 1
            where = f"{node.where.file}:{node.where.line}" if node.where.file else ""
            table[node.op[5:], "+".join(node.args[1]), node.phase, node.where.module, where, sent(compiled, node)] += turns
    rows = [(kind, axis, phase, n, size, module, where) for (kind, axis, phase, module, where, size), n in table.items()]
    return tabulate(rows, headers=("collective", "axis", "phase", "times", "bytes sent", "module", "line"))


def explain(compiled: Compiled, plan: Plan) -> str:
    """The plan and what follows from it."""
    spec = compiled.spec
    seconds = ", ".join(f"{axis} {s * 1e3:.3g} ms" for axis, s in compiled.layout.seconds.items()) or "nothing to choose"
    head = [
        f"mesh {spec.mesh or 'of one rank'}, ZeRO {spec.zero}, {spec.microbatches} microbatch(es), sequence {'on' if plan.sequence else 'off'}",
        f"predicted seconds of work and communication that the choice of shardings was made by: {seconds}",
        f"segments: {compiled.module.segments} distinct, called {compiled.module.calls} times",
    ]
    return "\n".join([*head, *compiled.layout.notes, "", parameters(compiled), "", collectives(compiled)])
