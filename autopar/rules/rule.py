"""Rule: what autopar knows of one op. Rules: the table of them that a compilation uses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.ir.program import Node, Offset, Ref, TensorType
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding
from autopar.rules.row import Row, bind, parse

Types = Mapping[str, TensorType]
#: stems of names and types of a node's results.
Results = Sequence[tuple[str, TensorType]]


@dataclass(frozen=True)
class Local:
    """What a rule may ask when its node becomes the local one: the shardings it really got."""

    mesh: Mesh
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding | None, ...]

    def out_shape(self, k: int = 0) -> tuple[int, ...]:
        """Local shape of output ``k``."""
        sharding = self.outputs[k]
        assert sharding is not None
        return sharding.local_shape(self.mesh)

    def scale(self, sharding: Sharding | None, dim: int, index: int) -> int:
        """A position along a global dim as the position along the local dim. Exact: what cuts the dim divides the position."""
        assert sharding is not None
        whole, piece = sharding.shape[dim], sharding.local_shape(self.mesh)[dim]
        if index * piece % whole:
            raise RuleError(f"position {index} of a dim of {whole} is not a position of its pieces of {piece}")
        return index * piece // whole

    def start(self, sharding: Sharding | None, dim: int) -> Offset:
        """Where this rank's piece starts along a dim that is cut on its major atom only."""
        assert sharding is not None
        first = sum(len(d) for d in sharding.dims[:dim])
        axes = sharding.axes_of(first) if sharding.dims[dim] else ()
        stride, terms = sharding.local_shape(self.mesh)[dim], []
        for axis in reversed(axes):
            terms.append((axis, stride))
            stride *= self.mesh[axis]
        return Offset(tuple(reversed(terms)))

    def atom_starts(self, sharding: Sharding) -> tuple[Offset, ...]:
        """Where this rank's piece starts in every atom."""
        starts = []
        for atom, stride in enumerate(sharding.local_atoms(self.mesh)):
            terms = []
            for axis in reversed(sharding.axes_of(atom)):
                terms.append((axis, stride))
                stride *= self.mesh[axis]
            starts.append(Offset(tuple(reversed(terms))))
        return tuple(starts)


@dataclass(frozen=True)
class Ring:
    """What a rule may ask when its node becomes turns around a ring.

    Attributes:
        axis, ranks: of the ring.
        types: local types of its operands.
        add: makes a node, from op, arguments, stems of its results' names with the types that they have, and keywords; gives those names.
    """

    axis: str
    ranks: int
    types: Types
    add: Callable[[str, tuple[Any, ...], Results, tuple[tuple[str, Any], ...]], tuple[str, ...]]

    def shift(self, name: str, kind: TensorType) -> str:
        """The value that the rank before this one has under a name."""
        return self.add("comm.shift", (Ref(name), (self.axis,)), ((name, kind),), ())[0]

    def mirror(self, name: str, kind: TensorType) -> str:
        """A value [b, h, q, ...] whose second half along ``q`` is that of the rank as far from the last as this one from the first."""
        return self.add("comm.mirror", (Ref(name), (self.axis,), 2), ((name, kind),), ())[0]


@dataclass(frozen=True)
class Rule:
    """One op: its row, and how its arguments change when it runs on pieces.

    Attributes:
        op: full name, ``aten.mm.default``.
        row: the row's text, or a function of node and types that gives it (for ops whose factors depend on arguments or shapes).
        linear: which operands may be partial, as in ``row.bind``; or a function of node and types.
        soft: as in ``Row``; or a function.
        shape_arg: position of the argument that is the shape of output 0; it becomes the local shape.
        local: changes the node further when it runs on pieces.
        contraction: the op is a sum of products (2 flops for every point of the space of its factors).
        samples: argument lists as text, for the row's own test: ``f[4, 6], f[6, 8]`` (see ``rules.check``).
        timid_ok: why operands aren't said to be linear though the samples look so.
        contiguous: operands whose kernel reads raw memory: a view in another order gives wrong numbers (tried on CPU).
        dense_last: operands of which it asks only that the last dim has stride 1.
        apart: of a contraction that is several products, the factor that each of them has and the others don't.
        ring, turns: two factors that may be cut together over an axis, if the node is run in turns between which pieces move on; and
            the nodes of those turns.
    """

    op: str
    row: str | Callable[[Node, Types], str]
    linear: str | Callable[[Node, Types], str] = ""
    soft: bool | Callable[[Node, Types], bool] = False
    shape_arg: int | None = None
    local: Callable[[Node, Local], Node] | None = None
    contraction: bool = False
    samples: tuple[str, ...] = ()
    timid_ok: str = ""
    contiguous: tuple[int, ...] = ()
    dense_last: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()
    ring: Callable[[Node, Types], tuple[str, str] | None] | None = None
    turns: Callable[[Node, Ring], tuple[str, ...]] | None = None

    def bind(self, node: Node, types: Types) -> Row:
        """The row of one node. Raises RuleError where the text doesn't fit the shapes."""
        text = self.row if isinstance(self.row, str) else self.row(node, types)
        linear = self.linear if isinstance(self.linear, str) else self.linear(node, types)
        soft = self.soft if isinstance(self.soft, bool) else self.soft(node, types)
        inputs = [types[name].shape for name in node.refs()]
        outputs = [types[name].shape if name else None for name in node.outs]
        try:
            row = bind(text, inputs, outputs, linear=linear, soft=soft)
        except RuleError as error:
            raise RuleError(f"the row of {node.op} doesn't fit: {error.what}", where=str(node.where), why=error.why) from None
        # a bool is never partial
        bools = {k for k, name in enumerate(node.refs()) if types[name].dtype == torch.bool}
        if self.ring is not None:
            row = replace(row, ring=self.ring(node, types))
        return replace(row, linear=tuple(s for s in row.linear if not s & bools)) if bools else row

    def localize(self, node: Node, local: Local) -> Node:
        """The node as it runs on this rank's pieces."""
        if self.shape_arg is not None:
            args = list(node.args)
            if self.shape_arg < len(args):
                args[self.shape_arg] = local.out_shape()
            node = replace(node, args=tuple(args))
        return self.local(node, local) if self.local is not None else node


def full_name(op: object) -> str:
    """``ns::op``, ``ns::op.overload``, ``ns.op``, ``ns.op.overload`` or an overload of torch.ops as ``ns.op.overload``."""
    parts = str(op).replace("::", ".").split(".")
    if len(parts) not in (2, 3) or not all(p.isidentifier() for p in parts):
        raise RuleError(f"{str(op)!r} is not the name of an op", hint="write it like 'mylib::rope' or 'aten.mm.default'")
    return ".".join(parts if len(parts) == 3 else [*parts, "default"])


def rule(
    op: object,
    row: str | Callable[[Node, Types], str],
    linear: str | Callable[[Node, Types], str] = "",
    *,
    samples: Iterable[str] = (),
    local: Callable[[Node, Local], Node] | None = None,
    shape_arg: int | None = None,
    contraction: bool = False,
    timid_ok: str = "",
) -> Rule:
    """A rule of your own, for ``parallelize(..., rules=[...])``.

    Args:
        op: ``mylib::rope``, ``aten.mm.default``, or ``torch.ops.mylib.rope.default`` itself.
        row: what the op does to its dims, as in ``m k, k n -> m n ; k: sum`` (grammar in ``autopar.rules.row``).
        linear: operands that may be unreduced sums: ``0``, ``0 | 1`` (either), ``0 1`` (together), ``each``, ``all``, ``moves``.
        samples: arguments to try the row on with ``autopar.rules.check.check``: ``f[4, 6], i6[4], 0.5``.
        local, shape_arg, contraction, timid_ok: as in ``Rule``.

    Raises:
        RuleError: a name or row that isn't well formed.
    """
    if isinstance(row, str):
        parse(row)
    if isinstance(linear, str) and not re.fullmatch(r"|all|each|moves|[0-9 ]+(\|[0-9 ]+)*", linear):
        raise RuleError(f"{linear!r} doesn't say which operands of {op} are linear", hint="'0', '0 | 1', '0 1', 'each', 'all' or 'moves'")
    return Rule(
        full_name(op), row, linear, shape_arg=shape_arg, local=local, contraction=contraction, samples=tuple(samples), timid_ok=timid_ok
    )


@dataclass(frozen=True)
class Rules:
    """A table of rules by op. ``with_rules`` adds a user's own; nothing is registered globally."""

    table: Mapping[str, Rule]

    def __contains__(self, op: str) -> bool:
        return op in self.table

    def __getitem__(self, op: str) -> Rule:
        return self.table[op]

    def with_rules(self, rules: Iterable[Rule]) -> Rules:
        """The table with further rules, which win over those of the same op."""
        return Rules({**self.table, **{r.op: r for r in rules}})

    def bind(self, node: Node, types: Types) -> Row:
        """The row of a node, or an error that says where a row belongs and a first guess of it."""
        rule = self.table.get(node.op)
        if rule is None:
            raise missing(node, types)
        return rule.bind(node, types)


def guess(node: Node, types: Types) -> str:
    """A first guess at the row of an unknown op: pointwise where shapes broadcast to the output's, else everything whole."""
    shapes = [types[name].shape for name in node.refs()]
    out = next((types[o].shape for o in node.outs if o), ())
    padded = [(1,) * (len(out) - len(s)) + s for s in shapes]
    if shapes and all(len(p) == len(out) and all(a in (1, b) for a, b in zip(p, out, strict=True)) for p in padded):
        return f"{', '.join('*' for _ in shapes)} -> {', '.join('*' for _ in node.outs)}"
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    seen: dict[int, str] = {}

    def term(shape: tuple[int, ...]) -> str:
        used: list[str] = []
        for size in shape:
            name = seen.get(size)
            if name is None or name in used:
                name = next(letters)
                seen.setdefault(size, name)
            used.append(name)
        return " ".join(used)

    text = f"{', '.join(map(term, shapes))} -> {', '.join(term(types[o].shape) if o else '' for o in node.outs)}"
    names = sorted({n for t in text.replace("->", ",").split(",") for n in t.split()})
    return text + (f" ; {', '.join(f'{n}: whole' for n in names)}" if names else "")


def missing(node: Node, types: Types) -> RuleError:
    """The error for an op without a row."""
    shown = ", ".join(str(types[name]) for name in node.refs())
    return RuleError(
        f"no rule for {node.op}({shown})",
        where=str(node.where),
        why="autopar must know what the op does to shardings before it may cut its tensors",
        hint=f'add a row: autopar.rule("{node.op}", "{guess(node, types)}") in parallelize(..., rules=[...]), '
        "or in the family's file in autopar/rules/; the row is a guess: make plain only what may be cut",
    )


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the left, also where it was given from the right."""
    return dim % rank if rank else 0


def letters(rank: int) -> list[str]:
    """Names for the dims of a tensor: d0, d1, ..."""
    return [f"d{i}" for i in range(rank)]


def view_row(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    """The row of a reshape: dims are grouped where their products meet; a group of one is the same factor, of one to many a merge.

    Many to many is cut into the common refinement where the boundaries nest, else it is whole on both sides.
    """
    left = [(i, s) for i, s in enumerate(source) if s != 1]
    right = [(i, s) for i, s in enumerate(target) if s != 1]
    names: dict[tuple[str, int], str] = {}
    kinds: list[str] = []
    count = 0
    while left or right:
        group_l, group_r = [left.pop(0)] if left else [], [right.pop(0)] if right else []
        size_l, size_r = math.prod(s for _, s in group_l), math.prod(s for _, s in group_r)
        while size_l != size_r:
            if size_l < size_r and left:
                group_l.append(left.pop(0))
                size_l *= group_l[-1][1]
            elif right:
                group_r.append(right.pop(0))
                size_r *= group_r[-1][1]
            else:  # a zero-element tensor: nothing to cut
                break
        pieces = refine([s for _, s in group_l], [s for _, s in group_r]) if size_l == size_r and size_l else None
        if pieces is None:
            for side, group in (("l", group_l), ("r", group_r)):
                for i, size in group:
                    names[side, i] = f"w{count}={size}"
                    kinds.append(f"w{count}: whole")
                    count += 1
            continue
        base, count = count, count + len(pieces)
        for side, group in (("l", group_l), ("r", group_r)):
            at = 0
            for i, size in group:
                own: list[int] = []
                while math.prod(pieces[p] for p in own) < size:
                    own.append(at)
                    at += 1
                texts = [f"f{base + p}={pieces[p]}" for p in own]
                names[side, i] = texts[0] if len(texts) == 1 else f"({' '.join(texts)})"

    def term(side: str, shape: tuple[int, ...]) -> str:
        return " ".join(names.get((side, i), "1") for i in range(len(shape)))

    return f"{term('l', source)} -> {term('r', target)}" + (f" ; {', '.join(kinds)}" if kinds else "")


def refine(a: list[int], b: list[int]) -> list[int] | None:
    """The coarsest sequence of sizes from which both sequences come by merging neighbours; None where boundaries don't nest."""
    a, b, out = list(a), list(b), []
    a.reverse()
    b.reverse()
    while a and b:  # from the right: minor factors first
        x, y = a.pop(0), b.pop(0)
        if x == y:
            out.append(x)
        elif x > y and x % y == 0:
            out.append(y)
            a.insert(0, x // y)
        elif y > x and y % x == 0:
            out.append(x)
            b.insert(0, y // x)
        else:
            return None
    return out[::-1] if not a and not b else None


def refs_in(tree: Any) -> int:
    """How many tensors an argument tree holds."""
    return 1 if isinstance(tree, Ref) else sum(map(refs_in, tree)) if isinstance(tree, tuple) else 0
