"""Copies in front of kernels that read raw memory.

A program has no strides, so a value may be a view whose elements lie in another order than its shape says. Most kernels don't mind;
some give wrong numbers without a word (``Rule.contiguous``, ``Rule.dense_last``). A copy is put in where a value could be such a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref, TensorType, fresh_name
from autopar.rules import Rules

#: ops whose results are new memory in the order of their shape, whatever they read.
_DENSE = ("comm.", "autopar.", "aten.mm.", "aten.bmm.", "aten.addmm.", "aten.embedding.", "aten.contiguous.", "aten.cat.", "aten.arange.",
          "aten.native_layer_norm.", "aten.constant_pad_nd.")  # fmt: skip
_KEEPS_MEMORY = ("aten.view.default", "aten._unsafe_view.default")
_TURNS = ("aten.transpose.int", "aten.permute.default", "aten.t.default")
_TAKES = ("aten.slice.Tensor", "aten.select.int", "aten.unbind.int", "aten.expand.default", "aten.squeeze.dim", "aten.squeeze.dims",
          "aten.squeeze.default", "aten.unsqueeze.default", "aten.diagonal.default", "aten.unfold.default")  # fmt: skip
_PARTS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.narrow.default")


def make_contiguous(program: LocalProgram, rules: Rules) -> LocalProgram:
    """The program with ``aten.contiguous`` in front of raw kernels."""
    loose: set[str] = set()  # perhaps not contiguous
    turned: set[str] = set()  # perhaps the last dim is not of stride 1
    types, shardings, whole = dict(program.types), dict(program.shardings), dict(program.global_types)
    copies: dict[tuple[str, str], str] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        rule = rules[node.op] if node.op in rules else None
        if rule is not None and (rule.contiguous or rule.dense_last):
            names = list(node.refs())
            for k, name in enumerate(names):
                if not (k in rule.contiguous and name in loose or k in rule.dense_last and name in turned):
                    continue
                key = (name, node.region)
                if key not in copies:
                    copies[key] = fresh = fresh_name(f"{name}_contiguous", types)
                    types[fresh] = types[name]
                    if name in shardings:
                        shardings[fresh] = shardings[name]
                    if name in whole:
                        whole[fresh] = whole[name]
                    nodes.append(Node("aten.contiguous.default", (Ref(name),), (fresh,), (), node.phase, node.where, node.region))
                names[k] = copies[key]
            node = node.reading(names)
        nodes.append(node)
        is_loose, is_turned = _memory(node, types, loose, turned)
        for out in filter(None, node.outs):
            loose.update([out] if is_loose else [])
            turned.update([out] if is_turned else [])
    return replace(program, nodes=tuple(nodes), types=types, shardings=shardings, global_types=whole)


def _memory(node: Node, types: Mapping[str, TensorType], loose: set[str], turned: set[str]) -> tuple[bool, bool]:
    """Whether the results of a node may be (not contiguous, of another stride than 1 in the last dim)."""
    if node.op.startswith(_DENSE):
        return False, False
    refs = node.refs()
    any_loose, any_turned = any(r in loose for r in refs), any(r in turned for r in refs)
    if "scaled_dot_product" in node.op:
        return True, any_turned
    if "convolution" in node.op:
        return any_loose, any_loose
    if not refs:
        return False, False
    shape = types[refs[0]].shape
    last = len(shape) - 1
    if node.op in _KEEPS_MEMORY:
        return any_loose, any_turned or any_loose and bool(shape) and shape[-1] == 1
    if node.op in _TURNS:
        order = list(range(len(shape)))
        if node.op == "aten.permute.default":
            order = [d % len(shape) for d in node.args[1]]
        else:
            a, b = (node.args[1] % len(shape), node.args[2] % len(shape)) if node.op == "aten.transpose.int" else (0, last)
            order[a], order[b] = order[b], order[a]
        return True, any_turned or bool(order) and order[-1] != last
    if node.op in _PARTS:
        return True, any_turned
    if node.op in _TAKES:
        dim = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else 0
        inner = not shape or dim % len(shape) != last
        if node.op == "aten.slice.Tensor":
            return True, any_turned or not inner and node.arg(4, "step", 1) != 1
        if node.op in ("aten.select.int", "aten.unbind.int"):
            return True, any_turned or not inner
        return True, True
    return any_loose, any_turned


__all__ = ["make_contiguous"]
