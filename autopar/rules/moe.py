"""Rows of products of groups of rows with a matrix each, as mixtures of experts use them.

Where a group of rows ends is data, so rows and groups are whole; what goes in and out of an expert may be cut. Where every row says which
expert is its own, rows may be cut as well, and experts too.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Node
from autopar.rules.rule import Local, Rule, Types


def _first_expert(node: Node, local: Local) -> Node:
    return replace(node, args=(*node.args[:-1], local.start(local.inputs[1], 0)))


def _experts_of_piece(node: Node, local: Local) -> Node:
    return node.with_args(*node.args[:3], local.out_shape()[0], local.start(local.outputs[0], 0))


def _grouped(node: Node, types: Types) -> str:
    """Groups along the rows of the left operand, along the columns of the right one, or, where neither has a dim of them, along the sum."""
    left, right = (len(types[name].shape) for name in node.refs()[:2])
    if left == right == 2:
        return "m t, t n, e -> e m n ; t: whole, e: whole"
    return ("t k, e k n, e -> t n" if left == 2 else "e m k, k t, e -> m t") + " ; t: whole, e: whole, k: sum"


RULES = (
    Rule(
        "autopar.expert_mm",
        "t k, e k n, t -> t n ; e: offset-sum, k: sum",
        "0 | 1",
        local=_first_expert,
        contraction=True,
        samples=("f[6, 4], f[4, 4, 8], i4[6], 0",),
    ),
    Rule(
        "autopar.expert_mm_backward",
        "t k, e k n, t, t n -> t k, e k n ; t: sum, e: offset-sum, n: sum",
        "3 | 0 1",
        local=_first_expert,
        contraction=True,
        samples=("f[6, 4], f[4, 4, 8], i4[6], f[6, 8], 0",),
    ),
    Rule(
        "autopar.expert_outer",
        "t m, t n, t -> e m n ; t: sum, e: offset",
        "0 | 1",
        local=_experts_of_piece,
        contraction=True,
        samples=("f[6, 4], f[6, 8], i4[6], 4, 0",),
    ),
    Rule(
        "aten._grouped_mm.default",
        _grouped,
        "0 | 1",
        contraction=True,
        samples=(
            "single[6, 16], single[3, 16, 16], ends6[3]",
            "single[16, 16], single[16, 32], ends16[3]",
            "single[3, 32, 16], single[16, 16], ends16[3]",
        ),
    ),
    Rule(
        "autopar.grouped_mm",
        _grouped,
        "0 | 1",
        contraction=True,
        samples=("f[6, 4], f[3, 4, 8], ends6[3]", "f[4, 6], f[6, 8], ends6[3]", "f[3, 4, 8], f[8, 6], ends6[3]"),
    ),
    Rule(
        "transformers.grouped_mm_fallback.default",
        "t k, e k n, e -> t n ; t: whole, e: whole, k: sum",
        "0 | 1",
        contraction=True,
        samples=("f[6, 4], f[3, 4, 8], ends6[3]",),
    ),
    Rule(
        "transformers.grouped_mm_fallback_backward.default",
        "t k, e k n, e, t n -> t k, e k n ; t: whole, e: whole, n: sum",
        "3 | 0 1",
        contraction=True,
        samples=("f[6, 4], f[3, 4, 8], ends6[3], f[6, 8]",),
    ),
)
