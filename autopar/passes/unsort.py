"""Sorting by expert undone: what happens to rows in sorted order happens to them in the order in which they came.

Where a step sorts (copies of) tokens by expert, works on the rows and puts them back, the sorted order mixes the rows of all samples, and
nothing that has it could be cut by samples. But an op that treats rows alike gives the same rows in any order, so the gather by a
permutation is carried past it, down to where it meets its inverse or a sum over rows, and is gone. What treats rows alike is known from the
rows of ops: a dim with a plain factor is cut anywhere, so its order doesn't matter; one with a summed factor is the same sum in any order.
Products of groups of rows with a matrix each become products of every row with the matrix of its expert. A value that is needed in sorted
order all the same is gathered there. Rows that an index adds to zeros, sorted or not, are added as in an embedding's backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from autopar.ir.builder import Builder
from autopar.ir.program import Node, Program, Ref, TensorType
from autopar.passes.canonicalize import infer_types, prune
from autopar.rules import Rules

_SORTS = ("aten.sort.default", "aten.sort.stable")
_GROUPED = ("aten._grouped_mm.default", "autopar.grouped_mm", "transformers.grouped_mm_fallback.default")
_GROUPED_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


def add_rows(b: Builder, kind: TensorType, index: Ref, rows: Ref) -> Ref:
    """A tensor of the given type, of zeros to whose rows [*index, ...] the given ones are added.

    As in an embedding's backward: what is added may be cut anywhere.
    """
    count, *rest = kind.shape
    inside = b.call("aten.remainder.Scalar", index, count)  # an index below 0 counts from the end
    flat = b.call("aten.view.default", rows, (*b.type(index).shape, math.prod(rest)))
    types = (TensorType(kind.dtype, (count, math.prod(rest))),)
    total = b.call("autopar.embedding_backward", flat, inside, -1, count, 0, types=types)
    return b.call("aten.view.default", total, kind.shape)


@dataclass(frozen=True)
class _Sorted:
    """A value of the old program that is ``base`` (of the new one) gathered along ``dim`` by the permutation ``order`` (of the old one)."""

    base: Ref
    order: str
    dim: int = 0


def unsort(program: Program, rules: Rules) -> Program:
    """The program with its permutations of rows carried to where they cancel."""
    if not any(n.op in (*_SORTS, "aten.index_put.default") for n in program.nodes):
        return program
    return _Unsorter(program, rules).run()


class _Unsorter:
    def __init__(self, program: Program, rules: Rules) -> None:
        self.program, self.rules = program, rules
        self.builder = Builder(program, infer_types)
        self.made = program.producers()
        self.sorted: dict[str, _Sorted] = {}
        self.inverse: dict[str, str] = {}  # an inverse permutation to the permutation
        self.keys: dict[str, str] = {}  # a permutation to what was sorted, where it was in ascending order
        self.ramps: dict[str, int] = {}  # a value of the new program that is 0, 1, 2, ... divided by this number

    def run(self) -> Program:
        b = self.builder
        for node in self.program.nodes:
            b.at(node)
            if not self.place(node) and not self.added(node):
                names = [self.plain(r) for r in node.refs()]
                b.emit(node.reading(names), self.program.types)
                b.env.update({o: o for o in node.outs if o})
                self.learn(node)
        outputs = tuple(replace(o, value=self.plain(o.value)) for o in self.program.outputs)
        return prune(replace(self.program, nodes=tuple(b.nodes), outputs=outputs, types=b.types))

    def plain(self, name: str) -> str:
        """A value of the old program as it is, gathered where it was left in another order."""
        found = self.sorted.get(name)
        if found is None or name in self.builder.env:
            return self.builder.env[name]
        order = Ref(self.plain(found.order))
        made = self.builder.call("aten.index_select.default", found.base, found.dim, order)
        self.builder.env[name] = made.name
        return made.name

    def learn(self, node: Node) -> None:
        """A sort of a vector gives a permutation; its values, and the permutation itself, are something gathered by it."""
        b = self.builder
        if node.op not in _SORTS or len(node.outs) != 2 or not node.outs[1] or len(self.program.types[node.refs()[0]].shape) != 1:
            return
        values, order = node.outs
        if values:
            self.sorted[values] = _Sorted(Ref(b.env[node.refs()[0]]), order)
        count = b.call("aten.arange.default", self.program.types[order].shape[0], dtype=torch.int64)
        self.ramps[count.name] = 1
        self.sorted[order] = _Sorted(count, order)
        if not node.arg(3 if node.op.endswith("stable") else 2, "descending", False):
            self.keys[order] = node.refs()[0]

    def place(self, node: Node) -> bool:
        """Whether the node's results are known from values in their own order; then they are noted, and nothing is sorted."""
        if node.op == "aten.index.Tensor" and len(node.args[1]) == 1:
            return self.gather(node)
        if node.op == "aten.index_select.default" and node.args[1] == 0:
            return self.gather(node)
        if node.op == "aten.index_put.default" and len(node.args[1]) == 1:
            return self.put(node, node.args[0], node.args[1][0], node.args[2], bool(node.arg(3, "accumulate", False)))
        if node.op == "aten.index_add.default" and node.args[1] == 0 and not node.kwargs:
            return self.put(node, node.args[0], node.args[2], node.args[3], True)
        if node.op in _GROUPED and len(node.refs()) == 3:
            return self.grouped(node)
        if node.op == _GROUPED_BACKWARD:
            return self.grouped_backward(node)
        return self.rowwise(node)

    def set(self, out: str, value: Ref, like: _Sorted | None = None) -> bool:
        """Notes an output: a value of the new program, or, like another, one to be gathered."""
        if like is None:
            self.builder.env[out] = value.name
        else:
            self.sorted[out] = _Sorted(value, like.order, like.dim)
        return True

    def spread(self, source: Ref, index: Ref) -> Ref:
        """Rows of a tensor by an index in its own order; those of 0, 0, 1, 1, ... are its rows, each some times."""
        times = self.ramps.get(index.name)
        rows = self.builder.type(source).shape[0]
        if times is None or rows * times != self.builder.type(index).shape[0]:
            return self.builder.call("aten.index.Tensor", source, (index,))
        return source if times == 1 else self.builder.call("aten.repeat_interleave.self_int", source, times, 0)

    def gather(self, node: Node) -> bool:
        source, index = node.refs()
        if index in self.inverse:  # back in order
            found = self.sorted.get(source)
            return found is not None and (found.order, found.dim) == (self.inverse[index], 0) and self.set(node.name, found.base)
        found = self.sorted.get(index)
        if found is None or found.dim or len(self.program.types[index].shape) != 1:
            return False
        return self.set(node.name, self.spread(Ref(self.plain(source)), found.base), found)

    def put(self, node: Node, into: Ref, at: Ref, values: Ref, add: bool) -> bool:
        b, types = self.builder, self.program.types
        if types[values.name].shape[:1] != types[at.name].shape or len(types[values.name].shape) != len(types[into.name].shape):
            return False
        if at.name in self.inverse:  # puts in order what was sorted: each row goes where a gather would take it from
            if values.name in self.sorted or types[into.name].shape[0] != types[at.name].shape[0] or not self.fresh(into, add):
                return False
            order = self.inverse[at.name]
            return self.set(node.name, Ref(self.plain(values.name)), _Sorted(Ref(""), order))
        index, rows = self.sorted.get(at.name), self.sorted.get(values.name)
        if index is None or index.dim:
            return False
        whole = self.ramps.get(index.base.name) == 1 and types[into.name].shape[0] == types[at.name].shape[0]
        if rows is None:
            made = self.made.get(values.name)
            if whole and not add and made is not None and made.op == "aten.arange.default" and len(made.args) == 1:
                self.inverse[node.name] = index.order
            return False
        if (rows.order, rows.dim) != (index.order, 0):
            return False
        if whole and self.fresh(into, add):
            return self.set(node.name, rows.base)
        if not add:
            return False
        times, shape = self.ramps.get(index.base.name), types[into.name].shape
        if times is not None and shape[0] * times == types[at.name].shape[0]:
            parts = b.call("aten.view.default", rows.base, (shape[0], times, *shape[1:]))
            total = b.call("aten.sum.dim_IntList", parts, (1,))
            return self.set(node.name, total if self.fresh(into, True) else b.call("aten.add.Tensor", Ref(self.plain(into.name)), total))
        if self.fresh(into, True):
            return self.set(node.name, add_rows(b, types[into.name], index.base, rows.base))
        return self.set(node.name, b.call("aten.index_add.default", Ref(self.plain(into.name)), 0, index.base, rows.base))

    def added(self, node: Node) -> bool:
        """Rows that are added to zeros by an index in any order."""
        if node.op != "aten.index_put.default" or len(node.args[1]) != 1 or not node.arg(3, "accumulate", False):
            return False
        (index,), values, kind = node.args[1], node.args[2], self.program.types[node.name]
        at = self.program.types[index.name]
        if at.dtype in (torch.bool, torch.uint8) or not at.shape or len(kind.shape) < 2 or not self.fresh(node.args[0], True):
            return False
        if self.program.types[values.name].shape != (*at.shape, *kind.shape[1:]):
            return False
        return self.set(node.name, add_rows(self.builder, kind, Ref(self.plain(index.name)), Ref(self.plain(values.name))))

    def fresh(self, into: Ref, add: bool) -> bool:
        """Whether nothing of what is written to stays: all of it is overwritten, or it is zeros that are added to."""
        made = self.made.get(into.name)
        return not add or (made is not None and made.op in ("aten.zeros.default", "aten.zeros_like.default"))

    def grouped(self, node: Node) -> bool:
        """Groups of sorted rows (or columns), which end where the counts of the experts say: every row has the matrix of its expert.

        Where both operands are sorted, the products of their rows are summed by expert.
        """
        left, right, ends = node.refs()
        ranks = [len(self.program.types[r].shape) for r in (left, right)]
        dims = (1 if ranks[1] == 2 else 0, 0 if ranks[0] == 2 else 1)
        rows = [(r, dim) for r, dim, rank in zip((left, right), dims, ranks, strict=True) if rank == 2]
        grouped = self.by_expert(rows, ends)
        if grouped is None:
            return False
        bases, ids, first = grouped
        b, kind = self.builder, self.program.types[node.name]
        turned = [self.turned(base) if dim else base for (_, dim), base in zip(rows, bases, strict=True)]
        if len(rows) == 2:
            return self.set(node.name, b.call("autopar.expert_outer", *turned, ids, kind.shape[0], 0, types=(kind,)))
        if ranks[0] == 2:
            return self.set(node.name, b.call("autopar.expert_mm", *turned, Ref(self.plain(right)), ids, 0, types=(kind,)), first)
        shape = TensorType(kind.dtype, (kind.shape[1], kind.shape[0]))
        product = b.call("autopar.expert_mm", *turned, self.turned(Ref(self.plain(left)), 3), ids, 0, types=(shape,))
        return self.set(node.name, self.turned(product), first)

    def grouped_backward(self, node: Node) -> bool:
        """The gradients of rows and matrices of a product of groups."""
        rows, matrices, ends, grad = node.refs()
        grouped = self.by_expert([(rows, 0), (grad, 0)], ends)
        if grouped is None:
            return False
        (x, g), ids, first = grouped
        types = (self.program.types[rows], self.program.types[matrices])
        found = self.builder.call("autopar.expert_mm_backward", x, Ref(self.plain(matrices)), ids, g, 0, types=types)
        for out, value, like in zip(node.outs, found, (first, None), strict=True):
            if out:
                self.set(out, value, like)
        return True

    def by_expert(self, rows: list[tuple[str, int]], ends: str) -> tuple[list[Ref], Ref, _Sorted] | None:
        """Operands in their own order and the expert of each row, where all are sorted alike, by expert, along the given dims."""
        found = [(self.sorted.get(r), dim) for r, dim in rows]
        known = [f for f, dim in found if f is not None and f.dim == dim]
        if len(known) < len(found) or len({f.order for f in known}) > 1:
            return None
        order = known[0].order
        if order not in self.keys or not self.counts(ends, order, self.program.types[ends].shape[0]):
            return None
        return [f.base for f in known], Ref(self.plain(self.keys[order])), known[0]

    def turned(self, value: Ref, rank: int = 2) -> Ref:
        return self.builder.call("aten.transpose.int", value, rank - 2, rank - 1)

    def counts(self, ends: str, order: str, experts: int) -> bool:
        """Whether ``ends`` are running sums of how often each expert occurs among what was sorted."""
        total = self.uncast(ends)
        if total is None or total.op != "aten.cumsum.default":
            return False
        histogram = self.uncast(total.refs()[0])
        if histogram is None or histogram.op != "aten.histc.default" or experts < 2 or histogram.args[1:] != (experts, 0, experts - 1):
            return False
        counted = histogram.refs()[0]
        while (made := self.made.get(counted)) is not None and made.op == "aten._to_copy.default":
            counted = made.refs()[0]
        return counted == self.keys[order] or (made is not None and made.op in _SORTS and made.outs == (counted, order))

    def uncast(self, name: str) -> Node | None:
        made = self.made.get(name)
        while made is not None and made.op == "aten._to_copy.default":
            made = self.made.get(made.refs()[0])
        return made

    def even(self, name: str, dim: int) -> bool:
        """Whether a value is the same all along a dim, so that no order of it matters."""
        made = self.made.get(name)
        if made is None:
            return False
        if made.op in ("aten.zeros.default", "aten.ones.default", "aten.full.default"):
            return True
        if made.op == "aten.expand.default":
            source = self.program.types[made.refs()[0]].shape
            at = dim - len(self.program.types[name].shape) + len(source)
            return at < 0 or source[at] == 1 or self.even(made.refs()[0], at)
        if len(made.refs()) != 1 or made.op not in self.rules:
            return False
        row = self.rules.bind(made, self.program.types)
        alike = row.inputs[0] == row.outputs[0] and [row.kind(f) for f in row.inputs[0][dim]] == ["plain"]
        return alike and self.even(made.refs()[0], dim)

    def rowwise(self, node: Node) -> bool:
        """An op on sorted rows that treats them alike."""
        refs = node.refs()
        found = [self.sorted.get(r) for r in refs]
        first = next((f for f in found if f is not None), None)
        if first is None or node.op not in self.rules or any(i.name in refs for i in self.program.inputs_of("key")):
            return False
        row = self.rules.bind(node, self.program.types)
        lead = next(k for k, f in enumerate(found) if f is not None)
        factors = row.inputs[lead][first.dim]
        if len(factors) != 1 or row.kind(factors[0]) not in ("plain", "sum"):
            return False
        factor = factors[0]
        for name, term, f in zip(refs, row.inputs, found, strict=True):
            at = [d for d, dim in enumerate(term) if factor in dim]
            if f is None and (not at or all(self.even(name, d) for d in at)):
                continue
            if f is None or at != [f.dim] or term[f.dim] != (factor,) or f.order != first.order:
                return False
        places = [[d for d, dim in enumerate(term) if factor in dim] for term in row.outputs]
        if any(len(at) > 1 or (at and term[at[0]] != (factor,)) for at, term in zip(places, row.outputs, strict=True)):
            return False
        names = [f.base.name if f is not None else self.plain(r) for r, f in zip(refs, found, strict=True)]
        b = self.builder
        outs = tuple(b.fresh(f"{o}_rows") if o else "" for o in node.outs)
        b.emit(replace(node.reading(names), outs=outs), {new: self.program.types[o] for o, new in zip(node.outs, outs, strict=True) if o})
        for old, new, at in zip(node.outs, outs, places, strict=True):
            if old:
                self.set(old, Ref(new), replace(first, dim=at[0]) if at else None)
        divided = node.op == "aten.floor_divide.default" and len(refs) == 1 and isinstance(node.args[1], int)
        if divided and names[0] in self.ramps:
            self.ramps[outs[0]] = self.ramps[names[0]] * node.args[1]
        return True
