"""From global to local: nodes run on this rank's pieces, and where an operand lies otherwise than it is needed it is resharded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autopar.errors import LayoutError, PlanError, VerifyError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Output, Program, Ref, TensorType, Where, fresh_name
from autopar.layout.mesh import Mesh
from autopar.layout.reshard import Step, plan_reshard
from autopar.layout.sharding import REPLICATE, Sharding
from autopar.passes.contiguous import make_contiguous
from autopar.plan.layout import Layout
from autopar.rules import Local, Rules
from autopar.rules.atoms import Atoms
from autopar.rules.strategies import ring_axis

#: position of (sizes, starts, strides) among the arguments of ops that draw random numbers.
RANDOM_PLACE = {"autopar.keep": 4, "autopar.uniform": 3, "autopar.normal": 3, "autopar.randint": 5, "autopar.bernoulli": 3}


def insert_collectives(program: Program, atoms: Atoms, layout: Layout, mesh: Mesh, rules: Rules) -> LocalProgram:
    """The local program of a layout.

    Gradients end sharded as their parameter; where it is replicated they may stay partial (the bucket reduces them). Loss, buffers and
    outputs end reduced; outputs of the model keep the shards of ``dp`` on the batch.
    """
    return make_contiguous(_Inserter(program, atoms, layout, mesh, rules).run(), rules)


class _Inserter:
    def __init__(self, program: Program, atoms: Atoms, layout: Layout, mesh: Mesh, rules: Rules) -> None:
        self.program, self.atoms, self.layout, self.mesh, self.rules = program, atoms, layout, mesh, rules
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}
        self.shardings: dict[str, Sharding] = {}
        self.global_types: dict[str, TensorType] = {}
        self.have: dict[str, Sharding] = {}
        self.converted: dict[tuple[str, Sharding, str], str] = {}
        self.taken = set(program.types)
        self.producer = program.producers()
        self.param_of = {i.path: i.name for i in program.inputs_of("param")}

    def run(self) -> LocalProgram:
        for i in self.program.inputs:
            self.define(i.name, self.layout.inputs[i.name])
        for n, node in enumerate(self.program.nodes):
            operands, outputs = self.layout.nodes[n]
            # what a turn adds to a total is converted in the turn
            at = replace(node, region="body") if node.op == "autopar.accumulate" else node
            names = [self.want(r, s, at) for r, s in zip(node.refs(), operands, strict=True)]
            for out, sharding in zip(node.outs, outputs, strict=True):
                if out:
                    self.define(out, sharding)
            local = Local(self.mesh, operands, tuple(s if o else None for o, s in zip(node.outs, outputs, strict=True)))
            node = self.by_atoms(node.reading(names))
            rings = ring_axis(self.atoms.rows[n], (*operands, *local.outputs)) is not None  # becomes turns (passes/ring.py)
            self.nodes.append(node if rings else self.rules[node.op].localize(node, local))
        outputs_ = tuple(self.output(o) for o in self.program.outputs)
        return LocalProgram(
            self.program.inputs, tuple(self.nodes), outputs_, self.types, self.program.consts, self.program.unreached,
            self.program.output_tree, self.program.microbatches, self.mesh, self.shardings, self.global_types,
        )  # fmt: skip

    def define(self, name: str, sharding: Sharding) -> None:
        kind = self.program.types[name]
        self.have[name] = self.shardings[name] = sharding
        self.global_types[name] = kind
        self.types[name] = TensorType(kind.dtype, sharding.local_shape(self.mesh))

    def by_atoms(self, node: Node) -> Node:
        """Random ops number elements by atoms: sizes, starts and strides per dim become those per atom."""
        at = RANDOM_PLACE.get(node.op)
        if at is None:
            return node
        out = next(o for o in node.outs if o)
        sizes, starts, strides = [], [], []
        moved: Offset | None = None
        for dim, start, stride in zip(self.atoms.dims[out], node.args[at + 1], node.args[at + 2], strict=True):
            if not dim and start != 0:  # a microbatch of one row: its start counts along the last atom, in elements
                moved = Offset(tuple((axis, s * stride) for axis, s in start.terms))
            for i, size in enumerate(dim):
                sizes.append(size)
                strides.append(stride * math.prod(dim[i + 1 :]))
                starts.append(start if i == len(dim) - 1 else 0)
        if moved is not None:
            if not strides or strides[-1] != 1 or starts[-1] != 0:
                raise VerifyError(f"{node.op} draws single rows of a tensor without further dims", where=str(node.where))
            starts[-1] = moved
        args = (*node.args[:at], tuple(sizes), tuple(starts), tuple(strides), *node.args[at + 3 :])
        return replace(node, args=args)

    def output(self, output: Output) -> Output:
        have = self.have[output.value]
        target = Sharding(have.dims)
        like: Sharding | None = None
        if output.kind == "grad":
            like = self.layout.inputs[self.param_of[output.path]]
        if like is not None and like.dims != have.dims:
            raise VerifyError(f"the gradient of {output.path} has atoms {have.dims}, the parameter {like.dims}")
        for axis, placement in have.placements:
            if like is not None:
                wanted = like.on(axis)
                if wanted == REPLICATE and placement.kind == "partial" and placement.combine == "sum":
                    wanted = placement
            else:
                wanted = placement if output.kind == "output" and axis == "dp" and placement.kind == "shard" else REPLICATE
            target = target.with_placement(axis, wanted, self.mesh)
        if like is not None:
            for axis, placement in like.placements:
                if have.on(axis) == REPLICATE:
                    target = target.with_placement(axis, placement, self.mesh)
        at = self.producer.get(output.value) or Node("", (), (), (), "forward", Where(output.path))
        return replace(output, value=self.want(output.value, target, at))

    def want(self, name: str, target: Sharding, at: Node) -> str:
        """The local value that holds a tensor in the wanted sharding, resharded on the way if it has to be."""
        have = self.have[name]
        if have == target:
            return name
        key = (name, target, at.region)
        if key not in self.converted:
            current = name
            if have.partial_axes() and name in self.producer:  # what left it partial is the cause
                at = replace(at, where=self.producer[name].where)
            try:
                steps = plan_reshard(have, target, self.mesh, self.program.types[name].dtype.itemsize)
            except LayoutError as error:
                raise PlanError(
                    f"{name} can't be cut as it is needed", where=f"{at.op}, {at.where}", why=error.what,
                    hint="sizes that all axes which cut a dim divide together, or without sequence",
                ) from error  # fmt: skip
            for step in steps:
                current = self.step(current, name, step, at)
            self.converted[key] = current
        return self.converted[key]

    def fresh(self, stem: str) -> str:
        name = fresh_name(stem, self.taken)
        self.taken.add(name)
        return name

    def add(self, op: str, args: tuple[Any, ...], stem: str, shape: tuple[int, ...], like: str, at: Node) -> str:
        out = self.fresh(stem)
        self.nodes.append(Node(op, args, (out,), (), at.phase, at.where, at.region))
        self.types[out] = TensorType(self.types[like].dtype, shape)
        return out

    def step(self, value: str, origin: str, step: Step, at: Node) -> str:
        """One step on the local tensor: seen as its atoms, changed along one of them, and seen as its dims again."""
        axis, size = step.axis, self.mesh[step.axis]
        before, after = step.before.local_atoms(self.mesh), step.after.local_atoms(self.mesh)
        shape, source, target = step.after.local_shape(self.mesh), step.source, step.target
        if step.kind == "slice":
            piece = after[target.atom]
            args: tuple[Any, ...] = (Ref(value), before, target.atom, Offset(((axis, piece),)), piece, shape)
            out = self.add("autopar.piece", args, f"{origin}_{axis}", shape, value, at)
        elif step.kind == "once":
            out = self.add("autopar.once", (Ref(value), Offset(((axis, 1),))), f"{origin}_{axis}", shape, value, at)
        elif step.kind == "all_reduce":
            out = self.add("comm.all_reduce", (Ref(value), (axis,), source.combine), f"{origin}_{axis}", shape, value, at)
        else:
            moved = value
            if self.types[value].shape != before:
                moved = self.add("aten.view.default", (Ref(value), before), f"{origin}_atoms", before, value, at)
            if step.kind == "all_gather":
                args = (Ref(moved), (axis,), source.atom)
            elif step.kind == "reduce_scatter":
                args = (Ref(moved), (axis,), target.atom, source.combine)
            else:
                args = (Ref(moved), (axis,), target.atom, source.atom)
            out = self.add(f"comm.{step.kind}", args, f"{origin}_{axis}", after, moved, at)
            if after != shape:
                out = self.add("aten.view.default", (Ref(out), shape), f"{origin}_{axis}_dims", shape, out, at)
        assert size > 1
        self.shardings[out] = step.after
        self.global_types[out] = self.program.types[origin]
        return out
