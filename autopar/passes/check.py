"""The verifier: what must hold of every program between passes. A failure is a fault of autopar and says so with its place."""

from __future__ import annotations

from typing import Any

import torch

from autopar._torch import infer, resolve
from autopar.errors import LayoutError, VerifyError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Program, TensorType, map_refs
from autopar.ir.text import show_node
from autopar.passes.insert_collectives import RANDOM_PLACE
from autopar.runtime import ops


def check_program(program: Program) -> None:
    """Names are defined once and before use, types exist, outputs exist, regions come in order."""
    known = {i.name for i in program.inputs}
    if len(known) != len(program.inputs):
        raise VerifyError("two inputs have one name")
    rank = {"pre": 0, "body": 1, "post": 2}
    for node in program.nodes:
        for name in node.refs():
            if name not in known:
                raise VerifyError(f"{name} is read before it is defined", where=f"{node.op} {node.where}", why=_neighbours(program, node))
        for out in node.outs:
            if not out:
                continue
            if out in known:
                raise VerifyError(f"{out} is defined twice", where=f"{node.op} {node.where}", why=_neighbours(program, node))
            if out not in program.types:
                raise VerifyError(f"{out} has no type", where=f"{node.op} {node.where}")
            known.add(out)
    for output in program.outputs:
        if output.value not in known:
            raise VerifyError(f"output {output.kind} {output.path} is {output.value}, which nobody defines")
    if program.microbatches > 1:
        region = {o: n.region for n in program.nodes for o in n.outs if o}
        for node in program.nodes:
            for name in node.refs():
                source = region.get(name, "pre")
                late = rank[source] > rank[node.region]
                leaves = source == "body" and node.region == "post" and node.op != "autopar.accumulate"
                if late or leaves:
                    raise VerifyError(f"{name} of region {source} is read in region {node.region}", where=f"{node.op} {node.where}")
            placed = {"autopar.accumulate": "post", "autopar.microbatch": "body"}.get(node.op, node.region)
            if node.region != placed:
                raise VerifyError(f"{node.op} is in region {node.region}, not {placed}", where=str(node.where))
        for output in program.outputs:
            if region.get(output.value) == "body" and output.kind != "sent":
                raise VerifyError(f"output {output.kind} {output.path} is {output.value}, which every turn of the loop makes anew")


def check_local(program: LocalProgram) -> None:
    """What ``check_program`` checks, and that every node's local result has the shape that its sharding says.

    Collectives are checked against the shardings on both sides.
    """
    check_program(program)
    for node in program.nodes:
        try:
            found = _local_types(program, node)
        except VerifyError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the op says of these shapes
            raise VerifyError(
                f"{node.op} doesn't take its local operands: {error}", where=str(node.where), why=_neighbours(program, node)
            ) from error
        for out, kind in zip(node.outs, found, strict=True):
            if out and kind is not None and program.types[out] != kind:
                raise VerifyError(
                    f"{out} should be {program.types[out]} on a rank, but {node.op} gives {kind}", where=str(node.where),
                    why=_neighbours(program, node),
                )  # fmt: skip
    for name, sharding in program.shardings.items():
        try:
            local = sharding.local_shape(program.mesh)
        except LayoutError as error:
            raise VerifyError(f"{name}: {error.what}") from error
        if program.types[name].shape != local:
            raise VerifyError(f"{name} is {program.types[name]} on a rank, its sharding {sharding} says {local}")
        if name not in program.global_types or program.global_types[name].shape != sharding.shape:
            known = program.global_types.get(name, "of no type")
            raise VerifyError(f"{name} is {known} as a whole, its sharding {sharding} says {sharding.shape}")
    for output in program.outputs:
        left = program.shardings[output.value].partial_axes() if output.value in program.shardings else ()
        if left and output.kind not in ("grad", "sent"):
            raise VerifyError(f"output {output.kind} {output.path} is still unreduced over {left}")


def _neighbours(program: Program, node: Node, around: int = 4) -> str:
    n = next(i for i, other in enumerate(program.nodes) if other is node)
    lines = [
        ("> " if i == n else "  ") + show_node(program, program.nodes[i])
        for i in range(max(0, n - around), min(len(program.nodes), n + around + 1))
    ]
    return "around it:\n" + "\n".join(lines)


def _local_types(program: LocalProgram, node: Node) -> tuple[TensorType | None, ...]:
    mesh = program.mesh
    if node.op.startswith("comm."):
        kind, value, axes = node.op[5:], program.types[node.refs()[0]], node.args[1]
        count, shape = mesh.count(axes), list(program.types[node.refs()[0]].shape)
        if kind == "all_gather":
            shape[node.args[2]] *= count
        elif kind == "reduce_scatter":
            shape[node.args[2]] //= count
        elif kind == "all_to_all":
            shape[node.args[2]] //= count
            shape[node.args[3]] *= count
        return (TensorType(value.dtype, tuple(shape)),)
    args = map_refs(node.args, program.types.__getitem__)
    kwargs = tuple((k, map_refs(v, program.types.__getitem__)) for k, v in node.kwargs)
    args, kwargs = _numbers(args), _numbers(kwargs)
    return _infer(node.op, args, kwargs)


def _numbers(tree: Any) -> Any:
    """Offsets as the number of the first rank: shapes don't depend on them."""
    if isinstance(tree, tuple):
        return tuple(_numbers(t) for t in tree)
    return 0 if isinstance(tree, Offset) else tree


def _infer(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[TensorType | None, ...]:
    space, _, name = op.partition(".")
    if op == "autopar.accumulate":
        return (args[0],)
    if op == "autopar.keep":
        return (TensorType(torch.bool, args[3]),)
    if op == "autopar.bernoulli":
        return (args[2],)
    if op in RANDOM_PLACE:
        return (TensorType(args[-1], args[RANDOM_PLACE[op] - 1]),)
    function = getattr(ops, name) if space == "autopar" else torch.reshape if op in _VIEWS else resolve(op)
    return infer(function, args, dict(kwargs))


_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
