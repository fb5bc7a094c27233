"""Rows of lookups: a dim is indexed by values, so a shard must know where it starts."""

from __future__ import annotations

from autopar.ir.program import Node
from autopar.rules.rule import Local, Rule, Types, letters, normal_dim


def _embedding_local(node: Node, local: Local) -> Node:
    start = local.start(local.inputs[0], 0)
    return node if not start.terms else Node("autopar.embedding", (node.args[0], node.args[1], start), node.outs, (), node.phase, node.where, node.region)


def _embedding_backward_local(node: Node, local: Local) -> Node:
    grad, index, _, padding = node.args[:4]
    out = local.outputs[0]
    return node.with_args(grad, index, padding, local.out_shape()[0], local.start(out, 0))


def _pick(node: Node, types: Types) -> str:
    shape = types[node.refs()[0]].shape
    dim = normal_dim(node.args[2], len(shape))
    names = letters(len(shape))
    rest = " ".join(n for i, n in enumerate(names) if i != dim)
    return f"{' '.join(names)}, {rest} -> {rest} ; {names[dim]}: offset-sum"


def _pick_local(node: Node, local: Local) -> Node:
    dim = normal_dim(node.args[2], len(local.inputs[0].shape))
    return node.with_args(*node.args[:3], local.start(local.inputs[0], dim))


def _unpick(node: Node, types: Types) -> str:
    shape = types[node.outs[0]].shape
    dim = normal_dim(node.args[2], len(shape))
    names = letters(len(shape))
    rest = " ".join(n for i, n in enumerate(names) if i != dim)
    return f"{rest}, {rest} -> {' '.join(names)} ; {names[dim]}: offset"


def _unpick_local(node: Node, local: Local) -> Node:
    out = local.outputs[0]
    dim = normal_dim(node.args[2], len(out.shape))  # type: ignore[union-attr]
    return node.with_args(node.args[0], node.args[1], dim, local.out_shape()[dim], local.start(out, dim))


RULES = (
    Rule("aten.embedding.default", "v h, * -> * h ; v: offset-sum", "0", local=_embedding_local, samples=("f[6, 4], i6[2, 3]",)),
    Rule("autopar.embedding_backward", "* h, * -> v h ; *1: sum, *2: sum, *3: sum, v: offset", "0", local=_embedding_backward_local,
         samples=("f[2, 3, 4], i6[2, 3], -1, 6, 0", "f[2, 3, 4], i6[2, 3], 1, 6, 0")),
    Rule("autopar.pick", _pick, "0", local=_pick_local, samples=("f[4, 6], i6[4], 1, 0", "f[4, 6, 2], i6[4, 2], 1, 0")),
    Rule("autopar.unpick", _unpick, "0", local=_unpick_local, samples=("f[4], i6[4], 1, 6, 0",)),
)  # fmt: skip
