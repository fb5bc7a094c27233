"""Fusing what canonical form took apart, where no collective came between: local programs run torch's fused ops again.

Every fusion is a row of ``FUSIONS``: a pattern over nodes, a guard, and the fused node. A pattern is an op with patterns of its
arguments; a string names an argument, and the same name must be the same argument wherever it occurs. Inner values that something
outside of the pattern reads keep it from matching.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref, TensorType

P = TypeVar("P", bound=LocalProgram)
Types = Mapping[str, TensorType]
Bound = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """A pattern: a node of one op whose arguments match. ``name`` binds its value."""

    op: str
    args: tuple[Any, ...]
    name: str = ""


@dataclass(frozen=True)
class Fusion:
    """One rewrite: what it matches, when it may, and the op and arguments that replace it; ``why`` it is worth it.

    ``near``: only where its nodes stand side by side. The fused node stands where the last of them stood, and what the first read must
    live until then.
    """

    pattern: Op
    guard: Callable[[Bound, Types], bool]
    fused: Callable[[Bound, Types], tuple[str, tuple[Any, ...]]]
    why: str
    near: bool = False


def _bias(b: Bound, types: Types) -> bool:
    """A bias of the last dim and the product's dtype."""
    bias, left, right = (types[b[k].name] for k in ("bias", "left", "right"))
    return bias.shape == right.shape[-1:] and bias.dtype == left.dtype == right.dtype


def _same_type(b: Bound, types: Types) -> bool:
    """A sum of the product's type."""
    total, left, right = (types[b[k].name] for k in ("total", "left", "right"))
    return total.shape == (*left.shape[:-1], right.shape[-1]) and total.dtype == left.dtype == right.dtype


def _last_dim(b: Bound, types: Types) -> bool:
    return len(b["dims"]) == 1


_CENTRED = Op("aten.sub.Tensor", ("x", Op("aten.amax.default", ("x", "dims", True))), "centred")
_EXP_SUM = Op("aten.sum.dim_IntList", (Op("aten.exp.default", ("centred",)), "dims", True))

FUSIONS = (
    Fusion(
        Op("aten.add.Tensor", (Op("aten.mm.default", ("left", "right")), "bias")),
        _bias,
        lambda b, _: ("aten.addmm.default", (b["bias"], b["left"], b["right"])),
        "the product is written once",
    ),
    Fusion(
        Op("aten.add.Tensor", ("total", Op("aten.mm.default", ("left", "right")))),
        _same_type,
        lambda b, _: ("aten.addmm.default", (b["total"], b["left"], b["right"])),
        "the product is added to what is there: a further microbatch's gradient",
        near=True,
    ),
    Fusion(
        Op("aten.sub.Tensor", (_CENTRED, Op("aten.log.default", (_EXP_SUM,)))),
        _last_dim,
        lambda b, _: ("autopar.log_softmax", (b["x"], b["dims"][0])),
        "one pass over the logits instead of five",
    ),
    Fusion(
        Op("aten.sum.dim_IntList", (Op("aten.exp.default", ("x",)), "dims", True)),
        lambda b, types: True,
        lambda b, _: ("autopar.exp_sum", (b["x"], b["dims"], True)),
        "the exponentials of logits that are cut by classes aren't kept",
    ),
    Fusion(
        Op(
            "aten.sub.Tensor",
            ("grad", Op("aten.mul.Tensor", (Op("aten.exp.default", ("out",)), Op("aten.sum.dim_IntList", ("grad", "dims", True))))),
        ),
        lambda b, types: _last_dim(b, types) and types[b["grad"].name] == types[b["out"].name],
        lambda b, types: ("aten._log_softmax_backward_data.default", (b["grad"], b["out"], b["dims"][0], types[b["out"].name].dtype)),
        "one pass over the gradient of the logits instead of four",
    ),
    Fusion(
        Op(
            "aten.sub.Tensor",
            (
                Op("autopar.unpick", ("grad", "label", "dim", "size", "start")),
                Op("aten.mul.Tensor", (Op("aten.exp.default", ("out",)), Op("aten.unsqueeze.default", ("grad", "dim")))),
            ),
        ),
        lambda b, types: types[b["grad"].name].dtype == types[b["out"].name].dtype,
        lambda b, _: ("autopar.cross_entropy_backward", (b["grad"], b["label"], b["out"], b["dim"], b["start"])),
        "the gradient of the logits is written once, not three times",
    ),
)  # fmt: skip


def fuse(program: P, fusions: tuple[Fusion, ...] = FUSIONS) -> P:
    """The program with every match fused, first fusion first; the fused node stands where the last of its nodes stood."""
    for fusion in fusions:
        program = _fuse(program, fusion)
    return program


def _fuse(program: P, fusion: Fusion) -> P:
    roots = [n for n in program.nodes if n.op == fusion.pattern.op and len(n.outs) == 1]
    if not roots:
        return program
    producers = program.producers()
    uses = Counter(r for n in program.nodes for r in n.refs())
    uses.update(o.value for o in program.outputs)
    at = {o: n for n, node in enumerate(program.nodes) for o in node.outs}
    fused: dict[str, Node] = {}
    gone: set[str] = set()
    for node in roots:
        bound: Bound = {}
        inner: list[Node] = []
        if not _match(fusion.pattern, node, producers, bound, inner, root=node):
            continue
        names = {n.outs[0] for n in inner}
        if fusion.near and at[node.outs[0]] - min(at[n] for n in names) > len(inner):
            continue
        inside = Counter(r for n in (node, *inner) for r in n.refs())
        if any(uses[n] != inside[n] or n in gone for n in names) or not fusion.guard(bound, program.types):
            continue
        op, args = fusion.fused(bound, program.types)
        made = replace(node, op=op, args=args, kwargs=())
        if names.isdisjoint(made.refs()):  # of y + y with y = a @ b nothing can go
            fused[node.outs[0]] = made
            gone |= names
    if not fused:
        return program
    nodes = tuple(fused.get(n.outs[0], n) for n in program.nodes if not (len(n.outs) == 1 and n.outs[0] in gone))
    kept = {i.name for i in program.inputs} | {o for n in nodes for o in n.outs}
    return replace(
        program, nodes=nodes, types={k: t for k, t in program.types.items() if k in kept},
        shardings={k: s for k, s in program.shardings.items() if k in kept},
    )  # fmt: skip


def _match(pattern: Any, value: Any, producers: Mapping[str, Node], bound: Bound, inner: list[Node], root: Node) -> bool:
    """Matches a pattern against an argument (or the root node), filling ``bound`` and the inner nodes met."""
    if isinstance(pattern, str):
        return bound.setdefault(pattern, value) == value
    if not isinstance(pattern, Op):
        return bool(pattern == value)
    node = value if isinstance(value, Node) else producers.get(value.name) if isinstance(value, Ref) else None
    if node is None or node.op != pattern.op or node.kwargs or len(node.args) != len(pattern.args):
        return False
    if node.region != root.region or node.phase != root.phase or len(node.outs) != 1:
        return False
    if not all(_match(p, a, producers, bound, inner, root) for p, a in zip(pattern.args, node.args, strict=True)):
        return False
    if node is not root and node not in inner:
        inner.append(node)
    return not pattern.name or bound.setdefault(pattern.name, Ref(node.outs[0])) == Ref(node.outs[0])
