"""Microbatches: the axis ``mb`` in time. The same rows say what a microbatch splits, leaves partial or doesn't touch.

A value that no microbatch changes is computed once, before the loop, but where it is made of the batch and larger than what it is made of
(labels as one-hot rows): a turn needs its part of it only. A value split over ``mb`` is computed in every turn. A value that is
partial is summed over the turns, and what needs the sum runs after the loop. Where the loop itself needs a sum (the number of
labels of the whole batch), the nodes that make it are computed once more, before the loop, on the whole batch; that is refused where
a parameter lies above it, since it would be the whole forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.program import Node, Offset, Program, Ref, Region, TensorType, fresh_name
from autopar.layout.mesh import MICROBATCH, Mesh
from autopar.layout.sharding import REPLICATE, Placement, Sharding
from autopar.passes.canonicalize import prune
from autopar.passes.insert_collectives import RANDOM_PLACE
from autopar.rules import Local, Rules
from autopar.rules.atoms import Atoms, analyse
from autopar.rules.strategies import Strategy, strategies


@dataclass(frozen=True)
class _Held:
    """Where a value of the old program is in the new one: its name, what ``mb`` does to it, and when it exists."""

    name: str
    placement: Placement
    region: Region


def split_microbatches(program: Program, rules: Rules, batch_dims: Mapping[str, int | None], count: int) -> Program:
    """The program with a loop over ``count`` microbatches. Raises PlanError where the model can't be split without changing its result."""
    if count == 1:
        return program
    for i in program.inputs_of("batch"):
        dim = batch_dims.get(i.name)
        if dim is not None and program.types[i.name].shape[dim] % count:
            raise PlanError(
                f"{count} microbatches don't divide the {program.types[i.name].shape[dim]} rows of batch input {i.path!r}",
                hint="choose a number of microbatches that divides the global batch",
            )
    return _Splitter(program, rules, analyse(program, rules, batch_dims, count), count).run()


class _Splitter:
    def __init__(self, program: Program, rules: Rules, atoms: Atoms, count: int) -> None:
        self.program, self.rules, self.atoms, self.count = program, rules, atoms, count
        self.mesh = Mesh([(MICROBATCH, count)])
        self.nodes: dict[Region, list[Node]] = {"pre": [], "body": [], "post": []}
        self.types: dict[str, TensorType] = {i.name: program.types[i.name] for i in program.inputs}
        self.held: dict[str, _Held] = {i.name: _Held(i.name, REPLICATE, "pre") for i in program.inputs}
        self.whole: dict[str, str] = {}  # values computed once more on the whole batch
        self.pieces: dict[tuple[str, int], str] = {}
        self.sums: dict[str, str] = {}
        self.taken = set(program.types)
        self.number = {o: n for n, node in enumerate(program.nodes) for o in node.outs if o}
        self.params = {i.name for i in program.inputs_of("param")}
        self.trained = set(self.params)  # values that depend on a parameter

    def run(self) -> Program:
        for n, node in enumerate(self.program.nodes):
            self.place(n, node)
        outputs = tuple(replace(o, value=self.final(o.value)) for o in self.program.outputs)
        nodes = tuple(self.nodes["pre"] + self.nodes["body"] + self.nodes["post"])
        # a node of the loop whose only reader took the whole batch's value has none left
        return prune(replace(self.program, nodes=nodes, outputs=outputs, types=self.types, microbatches=self.count))

    def options(self, n: int, node: Node) -> list[Strategy]:
        """Strategies that split the microbatch atom, pass a sum over microbatches, or do neither."""
        names = (*node.refs(), *node.outs)
        dims = [self.atoms.dims[name] if name else () for name in names]
        kept = []
        for option in strategies(self.atoms.rows[n], dims, self.count):
            pairs = zip(names, (*option.inputs, *option.outputs), strict=True)
            if all(p.kind != "shard" or (name and "mb" in self.atoms.marks[name][p.atom]) for name, p in pairs):
                kept.append(option)
        return kept

    def place(self, n: int, node: Node) -> None:
        refs = node.refs()
        held = [self.held[r] for r in refs]
        options = self.options(n, node)
        if any(r in self.trained for r in refs):
            self.trained.update(o for o in node.outs if o)
        # what only the batch decides (a count of labels, a mask) is made before the loop; the model's work on samples belongs into it
        inside = node.op in RANDOM_PLACE or any(r in self.trained for r in refs) or self.grows(node)
        if all(h.placement == REPLICATE for h in held) and not (inside and any(o.factor for o in options)):
            region: Region = "post" if any(h.region == "post" for h in held) else "pre"
            self.emit(node, n, options[0], [h.name for h in held], region)
            return
        best: tuple[int, Strategy] | None = None
        for option in options:
            if option.factor == "" and all(p == REPLICATE for p in option.inputs):
                continue
            missing = 0
            for h, r, p in zip(held, refs, option.inputs, strict=True):
                if h.region == "post":
                    missing = -1
                elif h.placement == p or (h.placement == REPLICATE and p.kind == "shard"):
                    continue
                elif p == REPLICATE and self.can_hoist(r):
                    missing += 1
                    continue
                else:
                    missing = -1
                break_now = missing < 0
                if break_now:
                    break
            if missing >= 0 and (best is None or missing < best[0]):
                best = (missing, option)
        if best is not None:
            option = best[1]
            names = [self.as_placed(r, h, p, node) for r, h, p in zip(refs, held, option.inputs, strict=True)]
            self.emit(node, n, option, names, "body")
        elif all(self.can_hoist(r) for r in refs):
            self.emit(node, n, options[0], [self.hoist(r) for r in refs], "pre")
        elif all(h.placement.kind in ("replicate", "partial") for h in held):
            names = [self.final(r) for r in refs]
            self.emit(node, n, options[0], names, "post")
        else:
            raise PlanError(
                f"{node.op} needs the whole batch, so the model can't be split into microbatches",
                where=str(node.where),
                why="its operands depend on parameters and on all samples at once, as batch statistics do",
                hint="use microbatches=1",
            )

    def grows(self, node: Node) -> bool:
        """Whether a node makes more than twice as many elements as the tensors that it reads have."""
        types, read = self.program.types, set(node.refs())
        return bool(read) and sum(types[o].numel for o in node.outs if o) > 2 * sum(types[r].numel for r in read)

    def as_placed(self, ref: str, held: _Held, wanted: Placement, node: Node) -> str:
        if held.placement == wanted:
            return held.name
        if wanted.kind == "shard":
            return self.piece(ref, held.name, wanted.atom, node)
        return self.hoist(ref)

    def piece(self, ref: str, name: str, atom: int, node: Node) -> str:
        """This turn's microbatch of a value computed on the whole batch."""
        if (name, atom) not in self.pieces:
            dims = self.atoms.dims[ref]
            dim, within = [(d, i) for d, sizes in enumerate(dims) for i, _ in enumerate(sizes)][atom]
            outer = math.prod(dims[dim][:within])
            shape = list(self.program.types[ref].shape)
            shape[dim] //= self.count
            out = self.fresh(f"{name}_mb")
            args = (Ref(name), dim, outer, self.count, Offset(((MICROBATCH, 1),)))
            self.nodes["body"].append(Node("autopar.microbatch", args, (out,), (), node.phase, node.where, "body"))
            self.types[out] = TensorType(self.program.types[ref].dtype, tuple(shape))
            self.pieces[name, atom] = out
        return self.pieces[name, atom]

    def can_hoist(self, ref: str) -> bool:
        """Whether a value can be computed before the loop: nothing above it is a parameter or exists only after the loop."""
        if ref in self.params:
            return False
        n = self.number.get(ref)
        if self.held[ref].placement == REPLICATE:
            return self.held[ref].region == "pre"
        assert n is not None
        return ref not in self.trained and all(self.can_hoist(r) for r in self.program.nodes[n].refs())

    def hoist(self, ref: str) -> str:
        """A value on the whole batch, computed before the loop."""
        held = self.held[ref]
        if held.placement == REPLICATE:
            return held.name
        if ref not in self.whole:
            node = self.program.nodes[self.number[ref]]
            names = [self.hoist(r) for r in node.refs()]
            outs = tuple(self.fresh(f"{o}_all") if o else "" for o in node.outs)
            self.nodes["pre"].append(replace(node.reading(names), outs=outs, region="pre"))
            for old, new in zip(node.outs, outs, strict=True):
                if old:
                    self.types[new], self.whole[old] = self.program.types[old], new
        return self.whole[ref]

    def final(self, ref: str) -> str:
        """A value after the loop: summed over the turns where it is partial."""
        held = self.held[ref]
        if held.placement == REPLICATE:
            return held.name
        if held.placement.kind == "shard":
            if self.can_hoist(ref):
                return self.hoist(ref)
            raise PlanError(f"value {ref} of every microbatch is needed after the last", hint="use microbatches=1")
        if ref not in self.sums:
            node = self.program.nodes[self.number[ref]]
            out = self.fresh(f"{held.name}_sum")
            self.nodes["post"].append(
                Node("autopar.accumulate", (Ref(held.name), held.placement.combine), (out,), (), node.phase, node.where, "post")
            )
            self.types[out] = self.types[held.name]
            self.sums[ref] = out
        return self.sums[ref]

    def emit(self, node: Node, n: int, option: Strategy, names: list[str], region: Region) -> None:
        outputs: list[Sharding | None] = []
        for out, placement in zip(node.outs, option.outputs, strict=True):
            if not out:
                outputs.append(None)
                continue
            sharding = self.atoms.replicated(out).with_placement(MICROBATCH, placement, self.mesh)
            outputs.append(sharding)
            self.types[out] = TensorType(self.program.types[out].dtype, sharding.local_shape(self.mesh))
            self.held[out] = _Held(out, placement, region)
        operands = tuple(
            self.atoms.replicated(r).with_placement(MICROBATCH, p, self.mesh) for r, p in zip(node.refs(), option.inputs, strict=True)
        )
        node = replace(node.reading(names), region=region)
        if region == "body":
            node = self.localize(node, Local(self.mesh, operands, tuple(outputs)))
        self.nodes[region].append(node)

    def localize(self, node: Node, local: Local) -> Node:
        at = RANDOM_PLACE.get(node.op)
        if at is None:
            return self.rules[node.op].localize(node, local)
        out = next(s for s in local.outputs if s is not None)
        starts, first = list(node.args[at + 1]), 0
        for dim, sizes in enumerate(out.dims):
            for a in range(first, first + len(sizes)):
                if out.axes_of(a):
                    inner = 1
                    for size in sizes[a - first + 1 :]:
                        inner *= size
                    if a != first or starts[dim] != 0:
                        raise PlanError(
                            "a random tensor whose samples aren't a major dim can't be split into microbatches", where=str(node.where)
                        )
                    starts[dim] = Offset(((MICROBATCH, inner),))
            first += len(sizes)
        shape = out.local_shape(self.mesh)
        args = list(node.args)
        args[at : at + 2] = [shape, tuple(starts)]
        if at > 3 or node.op in ("autopar.uniform", "autopar.normal"):
            args[at - 1] = shape
        return replace(node, args=tuple(args))

    def fresh(self, stem: str) -> str:
        name = fresh_name(stem, self.taken)
        self.taken.add(name)
        return name
