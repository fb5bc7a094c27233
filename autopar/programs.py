"""The programs of a step: a model captured on the global batch and compiled, for training, evaluation or its outputs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.applied import check_applied
from autopar.capture import capture
from autopar.capture.tree import BatchTree, take_batch
from autopar.compiler import Compiled, compile_program
from autopar.cost.device import GENERIC, Device
from autopar.errors import InputError
from autopar.ir.program import Output, Program, Ref
from autopar.layout.mesh import Mesh
from autopar.passes.canonicalize import canonicalize
from autopar.plan.cache import Cache
from autopar.plan.plan import Plan
from autopar.progress import Progress
from autopar.rules import Rules
from autopar.rules.atoms import analyse

#: path of the extra output of an evaluation: what its loss was divided by.
WEIGHT = "autopar.weight"


@dataclass(frozen=True)
class Options:
    """What ``parallelize`` was given."""

    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None
    plan: Plan
    precision: str | None
    batch_dim: Any
    init: str | Callable[[nn.Module], None]
    clip_grad_norm: float | None
    seed: int
    backend: str
    rules: Rules
    device: Device = GENERIC
    progress: bool = True
    cache: Cache | None = None


def compile_step(
    model: nn.Module,
    mesh: Mesh,
    options: Options,
    tree: BatchTree,
    tensors: Sequence[Tensor],
    kind: str = "train",
    groups: Mapping[str, int] | None = None,
    like: Compiled | None = None,
    progress: Progress | None = None,
    whole: bool = False,
    coordinate: int = 0,
) -> Compiled:
    """Captures a model on the global batch and compiles the program of a rank: no processes, and no values of weights or batch, are needed.

    Args:
        tree, tensors: the rows of one rank, taken apart; only types and shapes matter.
        whole: they are the rows of all ranks: each computes them all.
        kind: what a call returns: ``train``, ``eval`` or ``forward``.
        groups: the optimizer's parameter group of every path.
        like: an earlier compilation whose layout of parameters is kept.
        progress: keeps the time of the stages and shows it; by default it is shown nowhere.
        coordinate: along ``pp``, of the rank.
    """
    dims = find_dims(options.batch_dim, tree, tensors)
    count = microbatches_of(options.plan, mesh, next((t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None), 1))
    short = like is not None and any(t.shape[d] % count for t, d in zip(tensors, dims, strict=True) if d is not None)  # a last batch
    if kind != "train" or whole or short:
        count = 1
    plan = replace(options.plan, microbatches=count, interleave=options.plan.interleave if count > 1 else None)
    shapes = []
    for path, t, dim in zip(tree.paths, tensors, dims, strict=True):
        shape = list(t.shape)
        if dim is not None:
            if not -t.dim() <= dim < t.dim():
                raise InputError(f"batch_dim {dim} of batch leaf {path!r} doesn't exist in shape {tuple(shape)}")
            if shape[dim] % count:
                raise InputError(f"batch input {path!r} has {shape[dim]} rows on this rank, which {count} microbatches don't divide")
            shape[dim] *= 1 if whole else mesh["dp"]
        shapes.append(torch.empty(shape, dtype=t.dtype, device="meta"))
    with progress or Progress() as progress:
        progress.at("capture")
        captured = capture(
            model, tree.fill(shapes), loss=options.loss, train=None if kind == "train" else False, grads=kind == "train",
            tick=progress.tick,
        )  # fmt: skip
        captured = _wanted_outputs(canonicalize(captured) if kind == "eval" else captured, kind)
        batch_dims = {} if whole else {i.name: d for i, d in zip(captured.inputs_of("batch"), dims, strict=True)}
        compiled = compile_program(
            captured, mesh, plan, options.rules, batch_dims, groups=groups or {}, like=like, precision=options.precision,
            device=options.device, title=f"{type(model).__name__}: the {kind} step of one rank.", progress=progress,
            cache=options.cache, coordinate=coordinate,
        )  # fmt: skip
    if kind == "train" and like is None:
        check_applied(compiled, options.plan)
    return replace(compiled, seconds=progress.seconds)


def microbatches_of(plan: Plan, mesh: Mesh, rows: int) -> int:
    """In how many microbatches a data rank's rows are run.

    Where the plan doesn't say so, one; as many as are to run side by side; and with stages up to four a stage.
    """
    if plan.microbatches is not None:
        return plan.microbatches
    if (plan.interleave or 1) > 1:
        return plan.interleave or 1
    return max(n for n in range(1, 4 * mesh["pp"] + 1) if rows % n == 0) if mesh["pp"] > 1 else 1


def row_dims(compiled: Compiled, rules: Rules, dims: Sequence[int | None]) -> list[int | None]:
    """Which dim of every output of a program counts samples."""
    program = compiled.split
    batch_dims = dict(zip((i.name for i in program.inputs_of("batch")), dims, strict=True))
    atoms, found = analyse(program, rules, batch_dims), []
    for output in program.outputs_of("output"):
        marks, own = iter(atoms.marks[output.value]), list[bool]()
        for dim in atoms.dims[output.value]:
            first, *_ = [next(marks) for _ in dim] or [frozenset[str]()]
            own.append("batch" in first)
        found.append(own.index(True) if True in own else None)
    return found


def cut_rows(batch: Any, mesh: Mesh, index: int, plan: Plan, batch_dim: Any = 0, strict: bool = True) -> Any:
    """The rows of data coordinate ``index`` of a global batch: microbatch outer, data coordinate inner.

    Rows that don't divide are refused; or, unless ``strict``, the first ranks get one more.
    """
    tree, tensors = take_batch(batch)
    ways, out = mesh["dp"], []
    for path, tensor, dim in zip(tree.paths, tensors, find_dims(batch_dim, tree, tensors), strict=True):
        if dim is None:
            out.append(tensor)
            continue
        rows = tensor.shape[dim]
        count = microbatches_of(plan, mesh, rows // ways)
        if rows % (ways * count) and not strict:
            out.append(tensor.tensor_split(ways, dim)[index])
            continue
        if rows % (ways * count):
            raise InputError(
                f"batch input {path!r} has {rows} rows, which {count} microbatches over {ways} data ranks don't divide",
                hint=f"a multiple of {ways * count} rows",
            )
        split = tensor.unflatten(dim, (count, ways, rows // (ways * count))).select(dim + 1, index)
        out.append(split.flatten(dim, dim + 1))
    return tree.fill(out)


def filled_plan(plan: Plan, compiled: Compiled) -> Plan:
    """The plan with everything that a compilation chose."""
    return plan.filled(
        zero=compiled.spec.zero, sequence=False, microbatches=compiled.spec.microbatches, interleave=1, mesh=str(compiled.spec.mesh),
        seconds=dict(compiled.layout.seconds),
        parameters={i.path: str(compiled.local.shardings[i.name]) for i in compiled.program.inputs_of("param")},
        cuts=compiled.pipeline.cuts if compiled.pipeline is not None else None,
        schedule=compiled.pipeline.schedule.name if compiled.pipeline is not None else None,
    )  # fmt: skip


def find_dims(given: Any, tree: BatchTree, tensors: Sequence[Tensor]) -> list[int | None]:
    """Which dim of every leaf counts samples. Raises InputError where one number for all leaves is ambiguous."""
    if given is None or isinstance(given, int):
        dims = [given if t.dim() else None for t in tensors]
        sizes = {p: t.shape[d] for p, t, d in zip(tree.paths, tensors, dims, strict=True) if d is not None and d < t.dim()}
        if len(set(sizes.values())) > 1:
            raise InputError(
                f"the leaves of the batch differ in size along dim {given}: {sizes}",
                why="a leaf that doesn't count samples there must not be split",
                hint="batch_dim= a tree like the batch, with None for leaves that are not per sample",
            )
        return dims
    # a tree like the batch: entries of leaves that are no tensors don't matter
    paths, leaves, _ = _torch.tree_paths(
        _torch.tree_map(lambda d: -1 if d is None else d, dict(given) if isinstance(given, Mapping) else given)
    )
    known = {p or "0": d for p, d in zip(paths, leaves, strict=True)}
    unknown = [p for p in tree.paths if p not in known]
    if unknown:
        raise InputError(f"batch_dim doesn't name the batch leaf {unknown[0]!r}", hint="a tree like the batch, of ints and None")
    wrong = [p for p in tree.paths if not isinstance(known[p], int)]
    if wrong:
        raise InputError(f"batch_dim of the batch leaf {wrong[0]!r} is {known[wrong[0]]!r}", hint="an int, or None")
    return [None if known[p] == -1 else known[p] for p in tree.paths]


def _wanted_outputs(program: Program, kind: str) -> Program:
    """The outputs that a kind of call returns: training: loss, gradients, buffers; evaluation: loss, divisor; forward: the model's."""
    if kind == "train":
        return replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    if kind == "forward":
        return replace(program, outputs=tuple(o for o in program.outputs if o.kind == "output"))
    outputs = [o for o in program.outputs if o.kind == "loss"]
    divisor = _divisor(program, outputs[0].value) if outputs else None
    if divisor is not None:
        outputs.append(Output(divisor, "output", WEIGHT))
    return replace(program, outputs=tuple(outputs))


def _divisor(program: Program, loss: str) -> str | None:
    """The tensor by which the last division of a canonical program divides its loss: a count of labels, say; no parameter's value.

    Factors that are plain numbers don't matter.
    """
    producers = program.producers()
    node = producers.get(loss)
    passing = (
        "aten._to_copy.default",
        "aten.view.default",
        "aten.squeeze.default",
        "aten.mul.Tensor",
        "aten.div.Tensor",
        "aten.neg.default",
    )
    while node is not None and node.op in passing and len(node.refs()) == 1 and node.op != "aten.div.Tensor":
        node = producers.get(node.refs()[0])
    while node is not None and node.op == "aten.div.Tensor" and len(node.refs()) == 1 and node.refs()[0] in producers:
        inner = producers[node.refs()[0]]
        if inner.op != "aten.div.Tensor":
            break
        node = inner
    if node is None or node.op != "aten.div.Tensor" or not isinstance(node.args[1], Ref) or program.types[node.args[1].name].shape != ():
        return None
    params, seen, left = {i.name for i in program.inputs_of("param")}, set(), [node.args[1].name]
    while left:
        name = left.pop()
        if name in params:
            return None
        if name not in seen and name in producers:
            left += producers[name].refs()
        seen.add(name)
    return node.args[1].name


__all__ = ["WEIGHT", "Options", "compile_step", "cut_rows", "filled_plan", "find_dims", "row_dims"]
