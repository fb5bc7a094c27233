"""The verifier of layouts: that every node may run on the pieces it gets, and that every conversion does what the shardings around it say.

All is derived again from rows and shardings; nothing is taken from the planner or from the pass that inserted the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import VerifyError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Program
from autopar.layout.mesh import axis_of
from autopar.layout.sharding import REPLICATE, Placement, Sharding, partial, shard
from autopar.rules.atoms import Atoms, factor_positions
from autopar.rules.row import Row

_COMBINES = {"sum": "sum", "max": "max", "min": "min", "offset-sum": "sum"}


def check_placements(local: LocalProgram, program: Program, atoms: Atoms) -> None:
    """Checks a local program against the program of whole tensors that it was made from. Raises VerifyError."""
    origin = _conversions(local, program)
    for i in program.inputs:
        if local.shardings[i.name].partial_axes():
            raise VerifyError(f"input {i.name} is unreduced: {local.shardings[i.name]}")
    nodes = {node.name: node for node in local.nodes}
    for n, node in enumerate(program.nodes):
        mine = nodes.get(node.name)
        if mine is None or mine.outs != node.outs or len(mine.refs()) != len(node.refs()):
            raise VerifyError(f"{node.op} of {node.name} is not in the local program", where=str(node.where))
        for here, wanted in zip(mine.refs(), node.refs(), strict=True):
            if origin[here] != wanted:
                raise VerifyError(f"{node.op} should read {wanted} and reads {here}, a piece of {origin[here]}", where=str(node.where))
        names = (*mine.refs(), *mine.outs)
        found = [local.shardings[name] if name else None for name in names]
        for name, sharding in zip((*node.refs(), *node.outs), found, strict=True):
            if sharding is not None and sharding.dims != atoms.dims[name]:
                raise VerifyError(f"{name} has the dims {atoms.dims[name]}, its sharding {sharding}", where=str(node.where))
        row = atoms.rows[n]
        tables = factor_positions(row, [s.dims if s is not None else () for s in found])
        for axis, size in local.mesh.axes:
            why = _fault(row, tables, [s.on(axis) if s is not None else None for s in found]) if size > 1 else ""
            if why:
                shown = ", ".join(map(str, found[: len(row.inputs)])), ", ".join(map(str, found[len(row.inputs) :]))
                raise VerifyError(
                    f"{node.op} can't run on {axis}: {why}", where=str(node.where), why=f"{shown[0]} -> {shown[1]} under the row {row}"
                )
    _outputs(local)


def _fault(row: Row, tables: Sequence[Mapping[tuple[str, int], int]], placements: Sequence[Placement | None]) -> str:
    """Why a row doesn't allow these placements on one axis, operands first, then outputs (None: nobody reads it); "" where it does."""
    n = len(row.inputs)
    operands, outputs = placements[:n], placements[n:]
    cut = set()
    for table, p in zip(tables, placements, strict=True):
        if p is not None and p.kind == "shard":
            cut.add(next((key for key, atom in table.items() if atom == p.atom), None))
    if not cut:
        unreduced = frozenset(k for k, p in enumerate(operands) if p != REPLICATE)
        combines = {p.combine for p in placements if p is not None and p.kind == "partial"}
        if not unreduced:
            return "an output of whole operands is unreduced" if combines else ""
        if any(p is not None and p.kind != "partial" for p in outputs) or len(combines) != 1:
            return "an unreduced operand doesn't leave the outputs unreduced likewise"
        if combines == {"sum"}:
            return "" if unreduced in row.linear else f"it isn't linear in operands {sorted(unreduced)}"
        return "" if row.moves and len(unreduced) == n else "only what moves elements takes an unreduced maximum"
    if row.ring is not None and cut == {(f, 0) for f in row.ring}:
        for k, (table, p) in enumerate(zip(tables, placements, strict=True)):
            wanted = next((shard(table[f, 0]) for f in row.ring if (f, 0) in table), REPLICATE)
            if p is not None and p != wanted:
                return f"around a ring, term {k} should be {wanted} and is {p}"
        return ""
    if len(cut) > 1 or None in cut:
        return "its shards don't belong to one factor"
    factor, part = next(key for key in cut if key is not None)
    kind = row.kind(factor)
    if kind == "whole":
        return f"factor {factor} must not be cut"
    terms = (*row.inputs, *row.outputs)
    if kind.startswith("offset") and (part > 0 or any(factor in d and d[0] != factor for t in terms for d in t)):
        return f"no piece of factor {factor} knows where it starts"
    if kind not in _COMBINES and not any((factor, part) in t for t in tables[n:]):
        return f"factor {factor} is in no output and nothing combines it"
    for k, (table, p) in enumerate(zip(tables, placements, strict=True)):
        if p is None:
            continue
        if (factor, part) in table:
            wanted = shard(table[factor, part])
        elif k < n or kind not in _COMBINES or (k - n, factor) in row.invariant:
            wanted = REPLICATE
        else:
            wanted = partial(_COMBINES[kind])
        if p != wanted:
            return f"with factor {factor} cut, term {k} should be {wanted} and is {p}"
    return ""


def _conversions(local: LocalProgram, program: Program) -> dict[str, str]:
    """Checks the nodes that no captured node stands for; which value of the program every value is a piece of."""
    origin = {name: name for name in program.types if name in local.types}
    seen_as = {name: s for name, s in local.shardings.items()}  # also of views of atoms, before and after a collective
    inserted = [node for node in local.nodes if node.name not in program.types]
    for node in inserted:
        (source,) = node.refs()
        if node.op == "aten.view.default" and node.name in local.shardings:
            seen_as.setdefault(source, local.shardings[node.name])
        elif node.op == "aten.view.default":
            seen_as[node.name] = seen_as[source]
    for node in inserted:
        (source,) = node.refs()
        origin[node.name] = origin[source]
        if node.op == "aten.view.default":
            continue
        before, after = seen_as.get(source), seen_as.get(node.name)
        why = _conversion_fault(local, node, before, after) if before is not None and after is not None else "a side has no sharding"
        if why:
            raise VerifyError(f"{node.op} of {origin[source]} from {before} to {after}: {why}", where=str(node.where))
    return origin


def _conversion_fault(local: LocalProgram, node: Node, before: Sharding, after: Sharding) -> str:
    """Why a collective or slice doesn't turn one sharding into the other; "" where it does."""
    mesh, kind, args = local.mesh, node.op.partition(".")[2], node.args
    if kind == "contiguous.default":
        return "" if before == after else "the same elements lie elsewhere"
    if kind == "piece":
        if not isinstance(args[3], Offset) or len(args[3].terms) != 1 or args[1] != before.local_atoms(mesh):
            return f"the piece {args[1:]} is not one of atoms along an axis"
        ((axis, stride),) = args[3].terms
        if stride != args[4] or args[4] * mesh[axis] != before.local_atoms(mesh)[args[2]]:
            return f"{mesh[axis]} pieces of {args[4]} at steps of {stride} are not the whole"
        wanted = REPLICATE, shard(args[2])
    elif kind == "once":
        if not isinstance(args[1], Offset) or len(args) != 2 or len(args[1].terms) != 1 or args[1].terms[0][1] != 1:
            return f"{args[1:]} is not a coordinate"
        axis = args[1].terms[0][0]
        wanted = REPLICATE, partial("sum")
    else:
        if len(args[1]) != 1:
            return f"it is over {args[1]}"
        (axis,) = args[1]
        if kind == "all_reduce":
            wanted = partial(args[2]), REPLICATE
        elif kind == "all_gather":
            wanted = shard(args[2]), REPLICATE
        elif kind == "reduce_scatter":
            wanted = partial(args[3]), shard(args[2])
        elif kind == "all_to_all":
            wanted = shard(args[3]), shard(args[2])
        else:
            return "no such conversion"
        if kind != "all_reduce" and local.types[node.refs()[0]].shape != before.local_atoms(mesh):
            return f"its operand isn't seen as its atoms {before.local_atoms(mesh)}"
    if (before.on(axis), after.on(axis)) != wanted:
        return f"on {axis} it makes {wanted[1]} of {wanted[0]}"
    if before.dims != after.dims or [p for p in before.placements if p[0] != axis] != [p for p in after.placements if p[0] != axis]:
        return f"something else than {axis} changes"
    for sharding in (before, after):
        p = sharding.on(axis)
        if p.kind == "shard" and sharding.axes_of(p.atom)[-1] != axis:
            return f"{axis} is not the innermost axis of its atom"
    return ""


def _outputs(local: LocalProgram) -> None:
    """Loss and buffers are whole, gradients lie as their parameters or are sums where those are whole."""
    params = {i.path: local.shardings[i.name] for i in local.inputs_of("param")}
    for output in local.outputs:
        have = local.shardings[output.value]
        if output.kind in ("loss", "buffer") and have.placements:
            raise VerifyError(f"output {output.kind} {output.path} isn't whole: {have}")
        if output.kind == "grad":
            for axis in local.mesh.names:
                want, got = params[output.path].on(axis), have.on(axis)
                if got != want and not (want == REPLICATE and got == partial("sum")):
                    raise VerifyError(f"the gradient of {output.path} is {have} and its parameter {params[output.path]}")


def check_buckets(final: LocalProgram, local: LocalProgram) -> None:
    """Checks the buckets of a program against its parameters and gradients: every one once, at its place, all from the same ranks."""
    params = {i.path: i.name for i in local.inputs_of("param")}
    grads = {o.path: o.value for o in local.outputs_of("grad")}
    held = [m.path for b in final.buckets for m in b.members]
    if len(set(held)) != len(held) or not set(grads) <= set(held):
        raise VerifyError("a parameter with a gradient is in no bucket or in two", why=f"{sorted(set(grads) ^ set(held))}")
    mesh = final.mesh
    totals = {n.name: n for n in local.nodes if n.op == "autopar.accumulate" and n.args[1] == "sum"}
    made, sums = final.producers(), {o.path: o.value for o in final.outputs_of("bucket")}
    places = {b.name: {(m.offset, m.shape) for m in b.members} for b in final.buckets}
    views: dict[str, Node] = {}
    packs: dict[str, Node] = {}
    # values that a bucket counts on one rank only: the gradient, and the axes over which it is whole
    once: dict[str, tuple[str, set[str]]] = {}
    for node in final.nodes:
        if node.op == "autopar.once" and node.name not in local.types:
            once[node.name] = node.refs()[0], {axis for index in node.args[1:] for axis, _ in index.terms}
        if node.op == "autopar.member":
            views[node.name] = node
            if node.args[1:] not in places[node.where.module]:
                raise VerifyError(f"{node.name} is read at {node.args[1:]} of {node.where.module}, where no parameter lies")
        elif node.op == "autopar.pack":
            packs[node.where.module] = node
    for bucket in final.buckets:
        end, owners, copies = 0, bucket.owners(mesh), mesh.count(bucket.copies)
        for m in bucket.members:
            sharding = local.shardings[params[m.path]] if m.path in params else m.sharding
            if m.offset < end or m.sharding != sharding or m.shape != sharding.local_shape(mesh):
                raise VerifyError(f"{m.path} in {bucket.name} overlaps or isn't the piece of {sharding}: {m}")
            end = m.offset + m.numel
            shared = tuple(a for a, n in mesh.axes if n > 1 and sharding.on(a) == REPLICATE)
            if set(shared) != {axis_of(a) for a in (*bucket.axes, *bucket.copies)} or mesh.count(shared) != owners * copies:
                over = f"{bucket.axes}, with copies over {bucket.copies}"
                raise VerifyError(f"{m.path} is shared over {shared}, its bucket {bucket.name} over {over}")
            view = views.get(params.get(m.path, ""))
            if view is not None and view.args[1:] != (m.offset, m.shape):
                raise VerifyError(f"{m.path} is read at {view.args[1:]} of {bucket.name} and lies at {(m.offset, m.shape)}")
        if not end <= bucket.numel < end + owners or bucket.numel % owners:
            raise VerifyError(f"{bucket.name} of {bucket.numel} elements isn't {owners} equal parts that just hold {end}")
        if not grads:
            continue
        pack, at = packs[bucket.name], 0
        names = tuple(once.get(r, (r, set()))[0] for r in pack.refs())
        wanted = tuple(grads[m.path] for m in bucket.members)
        if final.zero >= 2 and pack.region == "body" and final.microbatches > 1:  # each microbatch's, whose parts are summed
            wanted = tuple(totals[g].refs()[0] if g in totals else "" for g in wanted)
            total = made.get(sums[bucket.name], pack)
            if total.op == "comm.all_reduce":  # over copies, when the parts are complete
                total = made.get(total.refs()[0], pack)
            if total.op != "autopar.accumulate":
                raise VerifyError(f"the parts of {bucket.name} that microbatches make aren't summed")
        if names != wanted:
            raise VerifyError(f"the gradients packed into {bucket.name} aren't those of its members in order")
        for m, name, packed in zip(bucket.members, names, pack.refs(), strict=True):
            if at != m.offset or final.types[name].shape != m.shape:
                raise VerifyError(f"the gradient of {m.path} is packed at {at} as {final.types[name]}, its parameter lies at {m.offset}")
            at += m.numel
            left = {a for a, _ in local.shardings[name].partial_axes()}
            counted = once[packed][1] if packed in once else set()
            if left & counted or left | counted != {axis_of(a) for a in bucket.partial}:
                raise VerifyError(f"the gradient of {m.path} is unreduced over {left}, {bucket.name} reduces over {bucket.partial}")


__all__ = ["check_buckets", "check_placements"]
