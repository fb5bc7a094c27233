"""Rows of contractions: sums of products."""

from __future__ import annotations

from autopar.ir.program import Node
from autopar.rules.rule import Rule, Types


def _baddbmm(node: Node, types: Types) -> str:
    """With something to add, every piece of a split sum would add it."""
    shape, full = types[node.refs()[0]].shape, types[node.outs[0]].shape
    added = ["1" if s == 1 and size != 1 else n for n, s, size in zip("bmn"[3 - len(shape) :], shape, full[3 - len(shape) :], strict=True)]
    return f"{' '.join(added)}, b m k, b k n -> b m n ; k: whole"


def _distance(node: Node, types: Types) -> str:
    """Distances add up over coordinates in the 1-norm only."""
    return f"* p d, * m d -> * p m ; d: {'sum' if node.args[2] == 1 else 'whole'}"


def _trilinear(node: Node, types: Types) -> str:
    """The product of three tensors, each spread over the dims that it lacks, summed over some."""
    absent, gone = node.args[3:6], set(node.args[6])
    rank = len(types[node.refs()[0]].shape) + len(absent[0])
    terms = [" ".join(f"d{i}" for i in range(rank) if i not in lacks) for lacks in absent]
    out = " ".join(f"d{i}" for i in range(rank) if i not in gone)
    return f"{', '.join(terms)} -> {out} ; {', '.join(f'd{i}: sum' for i in sorted(gone))}"


RULES = (
    Rule(
        "aten._trilinear.default",
        _trilinear,
        "each",
        contraction=True,
        samples=("f[4, 6], f[2, 6, 8], f[4, 8], (1, 3), (0,), (1, 2), (2, 3)",),
    ),
    *(Rule(f"aten.{op}.default", "k, k -> ; k: sum", "each", contraction=True, samples=("f[6], f[6]",)) for op in ("dot", "vdot")),
    Rule("aten.mv.default", "m k, k -> m ; k: sum", "each", contraction=True, samples=("f[4, 6], f[6]",)),
    Rule("aten.baddbmm.default", _baddbmm, "0 1 | 0 2", contraction=True, samples=("f[2, 4, 8], f[2, 4, 6], f[2, 6, 8]",)),
    Rule("aten._cdist_forward.default", _distance, samples=("f[2, 4, 6], f[2, 8, 6], 2.0, None", "f[4, 6], f[8, 6], 1.0, None")),
    # at p = 2 the gradient is the difference of the points over their distance, which is an operand of its own
    Rule(
        "aten._cdist_backward.default",
        "* p m, * p d, * m d, * p m -> * p d ; m: sum",
        lambda node, _: "0 | 1 2" if node.args[3] == 2 else "0",
        samples=("f[2, 4, 8], f[2, 4, 6], f[2, 8, 6], 2.0, pos[2, 4, 8]",),
    ),
    Rule("aten.mm.default", "m k, k n -> m n ; k: sum", "each", contraction=True, samples=("f[4, 6], f[6, 8]",)),
    Rule("aten.bmm.default", "b m k, b k n -> b m n ; k: sum", "each", contraction=True, samples=("f[2, 4, 6], f[2, 6, 8]",)),
)
