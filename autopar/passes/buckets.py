"""Buckets: parameters become views of gathered flat tensors, gradients are packed into flat tensors, and every element gets one owner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from autopar.errors import InputError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Input, Node, Offset, Output, Ref, TensorType, Where, layer_of
from autopar.layout.bucket import Bucket, Member, padded, share_out
from autopar.layout.mesh import axis_of

P = TypeVar("P", bound=LocalProgram)

#: bytes after which a bucket is closed.
CAP = 25 * 2**20


def make_buckets(
    program: LocalProgram, groups: Mapping[str, int], cap: int = CAP, prefix: str = "", zero: int = 1, ranks: int | None = None
) -> tuple[Bucket, ...]:
    """Buckets of the parameters that have gradients, in the order in which the backward makes them.

    Args:
        groups: the optimizer's parameter group of every path.
        cap: bytes of a bucket's flat tensor after which the next is begun; a parameter of half of it is a bucket of its own.
        prefix: of the buckets' names.
        zero: from 2 on a bucket holds only gradients that are reduced in the same place; at 3, parameters of one layer.
        ranks: neighbours along ``dp`` that own parts, of which the others hold copies; None: all own parts.
    """
    mesh = program.mesh
    position = {o: n for n, node in enumerate(program.nodes) for o in node.outs if o}
    inputs = {i.path: i for i in program.inputs_of("param")}
    grads = sorted(program.outputs_of("grad"), key=lambda o: position.get(o.value, -1))
    open_: dict[tuple[Any, ...], list[Member]] = {}
    closed: list[tuple[tuple[Any, ...], list[Member]]] = []
    turns, layer = _shares(program), ""
    for grad in grads:
        param = inputs[grad.path]
        sharding, kind = program.shardings[param.name], program.types[param.name]
        axes = tuple(a for a, n in mesh.axes if n > 1 and sharding.on(a).kind == "replicate")
        partial = tuple(a for a in axes if program.shardings[grad.value].on(a).kind == "partial")
        key: tuple[Any, ...] = (kind.dtype, groups.get(grad.path, 0), axes, partial)
        if zero >= 2:
            key = (*key, grad.value in turns)
        if zero == 3:  # what lies between layers goes by the layer before it
            own = layer_of(grad.path)
            layer = own or layer
            key = (*key, own, layer)
        if 2 * kind.numel * kind.dtype.itemsize >= cap:  # waits for nobody: an embedding's gradient is the last, and needed first again
            closed.append((key, [Member(grad.path, 0, kind.shape, sharding)]))
            continue
        members = open_.setdefault(key, [])
        offset = members[-1].offset + members[-1].numel if members else 0
        members.append(Member(grad.path, offset, kind.shape, sharding))
        if (offset + members[-1].numel) * kind.dtype.itemsize >= cap:
            closed.append((key, open_.pop(key)))
    closed += list(open_.items())
    order = {o.path: n for n, o in enumerate(grads)}
    closed.sort(key=lambda item: order[item[1][-1].path])
    buckets = []
    for n, ((dtype, group, axes, partial, *_), members) in enumerate(closed):
        owning, copies = share_out(axes, mesh, ranks)
        over = tuple(a for a in (*owning, *copies) if axis_of(a) in partial)
        numel = padded(members[-1].offset + members[-1].numel, mesh.count(owning))
        buckets.append(Bucket(f"{prefix}bucket{n}", dtype, group, owning, over, tuple(members), numel, copies))
    return tuple(buckets)


def bucketize(program: P, buckets: tuple[Bucket, ...], zero: int, *, looped: bool | None = None) -> P:
    """The program over buckets.

    A program without gradients (evaluation) takes the buckets of the one that has them.

    ``zero`` 1: a rank's input is the part of each bucket that it owns, gathered before use, and its output the gradients of that part.
    ``zero`` 0: every rank holds whole buckets and gets whole gradients, each part of which its owner has summed.
    ``zero`` 2 and 3: as 1, and each microbatch's gradients are reduced, so that only parts are summed over microbatches. What 3 is more is
    the next pass (``passes/regather``).
    ``looped``: parameters are gathered before, gradients reduced after all microbatches, also where there is one.
    """
    looped = program.microbatches > 1 if looped is None else looped
    types, shardings = dict(program.types), dict(program.shardings)
    mesh = program.mesh
    inputs_by_path = {i.path: i for i in program.inputs_of("param")}
    grad_of = {o.path: o.value for o in program.outputs_of("grad")}
    first_use = _first_use(program)
    here: dict[str, list[Node]] = {}  # nodes to be placed right after the value of this name
    head: list[tuple[int, list[Node]]] = []
    held = {m.path for b in buckets for m in b.members}
    inputs = [i for i in program.inputs if not (i.kind == "param" and i.path in held)]
    outputs = [o for o in program.outputs if o.kind != "grad"]
    turns = _shares(program) if looped and zero >= 2 else {}
    taken: set[str] = set()  # sums over microbatches that are parts of buckets instead
    position = {o: n for n, node in enumerate(program.nodes) for o in node.outs if o}
    tail: list[Node] = []
    copies: dict[str, Node] = {}  # sums over copies of a part, by what is summed

    for bucket in buckets:

        def add(op: str, args: tuple[Any, ...], name: str, shape: tuple[int, ...], nodes: list[Node], phase: Any, region: Any) -> str:
            nodes.append(Node(op, args, (name,), (), phase, Where(bucket.name), region))  # noqa: B023 - called within the turn
            types[name] = TensorType(bucket.dtype, shape)  # noqa: B023
            return name

        owners = bucket.owners(mesh)
        size = bucket.numel if zero == 0 else bucket.part(mesh)
        inputs.append(Input(bucket.name, "bucket", bucket.name, trainable=True))
        types[bucket.name] = TensorType(bucket.dtype, (size,))
        nodes: list[Node] = []
        full = bucket.name
        region: Any = "pre" if looped else "body"
        if owners > 1 and zero > 0:
            full = add("comm.all_gather", (Ref(full), bucket.axes, 0), f"{bucket.name}_full", (bucket.numel,), nodes, "forward", region)
        uses = []
        for member in bucket.members:
            name = inputs_by_path[member.path].name
            add("autopar.member", (Ref(full), member.offset, member.shape), name, member.shape, nodes, "forward", region)
            uses.append(first_use.get(name, len(program.nodes)))
        if min(uses) < len(program.nodes) or grad_of:
            head.append((min(uses), nodes))

        if not grad_of:
            continue
        nodes = []
        packed, shares = [], []
        each_turn = owners > 1 and bool(turns) and all(grad_of[m.path] in turns for m in bucket.members)
        post: Any = "post" if looped and not each_turn else "body"
        for m in bucket.members:
            value = grad_of[m.path]
            if each_turn:
                taken.add(value)
                value = turns[value]
            shares.append(value)
            over = dict.fromkeys(axis_of(a) for a in bucket.partial)
            whole = [a for a in over if program.shardings[value].on(a).kind != "partial"]
            if whole:  # reduced already, unlike the rest of the bucket: its sum counts one rank's
                indices = tuple(Offset(((a, 1),)) for a in whole)
                value = add("autopar.once", (Ref(value), *indices), f"{value}_once", m.shape, nodes, "backward", post)
            packed.append(Ref(value))
        flat = add("autopar.pack", (tuple(packed), bucket.numel), f"{bucket.name}_grad", (bucket.numel,), nodes, "backward", post)
        sizes = [mesh[a] for a in bucket.axes]
        part = bucket.part(mesh)
        for axis in bucket.axes:
            if axis in bucket.partial:
                continue
            at = bucket.axes.index(axis)
            atoms = (*sizes, part)
            sizes[at] = 1
            shape = (math.prod(sizes) * part,)
            own = (Ref(flat), atoms, at, Offset(((axis, 1),)), 1, shape)
            flat = add("autopar.piece", own, f"{bucket.name}_grad_{axis_of(axis)}", shape, nodes, "backward", post)
        if bucket.scattered:
            args = (Ref(flat), bucket.scattered, 0, "sum")
            flat = add("comm.reduce_scatter", args, f"{bucket.name}_grad_own", (part,), nodes, "backward", post)
        if zero == 0 and owners > 1:
            flat = add("comm.all_gather", (Ref(flat), bucket.axes, 0), f"{bucket.name}_grad_all", (bucket.numel,), nodes, "backward", post)
        last = max(shares, key=lambda v: position.get(v, -1))
        if each_turn:
            flat = add("autopar.accumulate", (Ref(flat), "sum"), f"{bucket.name}_grad_sum", (part,), tail, "backward", "post")
        if bucket.summed:
            reduced, made = flat, list[Node]()
            when = "post" if each_turn else post  # one over microbatches is complete behind the loop
            total = (Ref(reduced), bucket.summed, "sum")
            flat = add("comm.all_reduce", total, f"{bucket.name}_grad_all", (part,), made, "backward", when)
            copies[reduced] = made[0]
        outputs.append(Output(flat, "bucket", bucket.name))
        if last in position:
            here.setdefault(last, []).extend(nodes)
        else:
            tail.extend(nodes)

    body: list[Node] = []
    for node in program.nodes:
        if node.name not in taken:
            body.append(node)
        for out in node.outs:
            body.extend(here.get(out, ()) if out else ())
    # gathers in the order in which the forward needs them: start early, wait late
    front = [n for _, ns in sorted(head, key=lambda item: item[0]) for n in ns]
    nodes_ = tuple(_summed(front + body + tail, copies))
    for name in taken:
        del types[name]
        shardings.pop(name, None)
    wholes = {k: t for k, t in program.global_types.items() if k not in taken}
    return replace(
        program, inputs=tuple(inputs), nodes=nodes_, outputs=tuple(outputs), types=types, shardings=shardings, global_types=wholes,
        buckets=buckets, zero=zero,
    )  # fmt: skip


def _summed(nodes: list[Node], copies: Mapping[str, Node]) -> list[Node]:
    """Nodes with the sums over copies, each behind the next bucket's reduction: its own needs the time of a bucket."""
    found: list[Node] = []
    late: Node | None = None
    for node in nodes:
        if late is not None and node.region != late.region:
            found.append(late)
            late = None
        found.append(node)
        if node.name in copies:
            found += [late] if late is not None else []
            late = copies[node.name]
    return found + ([late] if late is not None else [])


def _shares(program: LocalProgram) -> dict[str, str]:
    """The gradients that are sums over the microbatches and nothing else, with what a microbatch adds."""
    wanted = {o.value for o in program.outputs_of("grad")}
    read = {r for n in program.nodes for r in n.refs()} | {o.value for o in program.outputs if o.kind != "grad"}
    inside = {o for n in program.nodes if n.region == "body" for o in n.outs}
    return {
        n.name: n.refs()[0]
        for n in program.nodes
        if n.op == "autopar.accumulate" and n.args[1] == "sum" and n.name in wanted - read and n.refs()[0] in inside
    }


def _first_use(program: LocalProgram) -> dict[str, int]:
    found: dict[str, int] = {}
    for n, node in enumerate(program.nodes):
        for name in node.refs():
            found.setdefault(name, n)
    return found


def same_buckets(buckets: tuple[Bucket, ...], local: LocalProgram) -> tuple[Bucket, ...]:
    """The buckets of an earlier compilation, for a program whose gradients may be partial over other axes."""
    made = {m.path: b for b in make_buckets(local, {}, 1) for m in b.members}
    if other := made.keys() ^ {m.path for b in buckets for m in b.members}:
        raise InputError(
            f"the loss now reaches other parameters than when the step was compiled: {', '.join(sorted(other))}",
            why="a parameter without a gradient has no place among the optimizer's parts", hint="make a new step for the changed model",
        )  # fmt: skip
    out = []
    for bucket in buckets:
        over = {a for m in bucket.members for a in made[m.path].partial}
        out.append(replace(bucket, partial=tuple(a for a in (*bucket.axes, *bucket.copies) if axis_of(a) in over)))
    return tuple(out)
