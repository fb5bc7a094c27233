"""Rows of the ops that the loop over microbatches adds."""

from __future__ import annotations

from autopar.ir.program import Node
from autopar.rules.rule import Local, Rule, Types, letters


def _microbatch(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    dim, outer, count = node.args[1:4]
    size = types[node.refs()[0]].shape[dim]
    full, part = letters(rank), letters(rank)
    rest = size // (outer * count)
    full[dim] = f"(o={outer} n={count} r={rest})"
    part[dim] = f"(o={outer} r={rest})"
    return f"{' '.join(full)} -> {' '.join(part)} ; n: whole"


def _microbatch_local(node: Node, local: Local) -> Node:
    x, dim, outer, count, index = node.args
    sizes = local.inputs[0].dims[dim]
    pieces = local.inputs[0].local_dims(local.mesh)[dim]
    before, scaled, at = 1, 1, 0
    while before < outer:
        before, scaled, at = before * sizes[at], scaled * pieces[at], at + 1
    return node.with_args(x, dim, scaled, count, index)


RULES = (
    Rule("autopar.microbatch", _microbatch, "moves", local=_microbatch_local, samples=("f[8, 6], 0, 1, 2, 1", "f[4, 24], 1, 4, 2, 0")),
    Rule("autopar.accumulate", "* -> *", "moves", samples=("f[4, 6], 'sum'",)),
)
