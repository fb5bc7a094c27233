"""Rows of normalisations over whole dims of one sample."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Node
from autopar.rules.rule import Local, Rule, Types, letters, normal_dim


def _layer_norm(node: Node, types: Types) -> str:
    rank, inner = len(types[node.refs()[0]].shape), len(node.args[1])
    names = letters(rank)
    outer, normed = names[: rank - inner], names[rank - inner :]
    stats = " ".join([*outer, *["1"] * inner])
    terms = [" ".join(names)] + [" ".join(normed)] * (len(node.refs()) - 1)
    return f"{', '.join(terms)} -> {' '.join(names)}, {stats}, {stats} ; " + ", ".join(f"{n}: whole" for n in normed)


def _layer_norm_backward(node: Node, types: Types) -> str:
    rank, inner = len(types[node.refs()[0]].shape), len(node.args[2])
    names = letters(rank)
    outer, normed = names[: rank - inner], names[rank - inner :]
    full, stats, affine = " ".join(names), " ".join([*outer, *["1"] * inner]), " ".join(normed)
    terms = [full, full, stats, stats] + [affine] * (len(node.refs()) - 4)
    kinds = [f"{n}: sum" for n in outer] + [f"{n}: whole" for n in normed]
    return f"{', '.join(terms)} -> {full}, {affine}, {affine} ; {', '.join(kinds)}"


def _group_norm(node: Node, types: Types) -> str:
    shape = types[node.refs()[0]].shape
    groups = node.args[6]
    space = " ".join(f"x{i}" for i in range(len(shape) - 2))
    channels = f"(g={groups} c)"
    terms = [f"n {channels} {space}"] + [channels] * (len(node.refs()) - 1)
    kinds = ", ".join(f"{x}: whole" for x in ["c", *space.split()])
    return f"{', '.join(terms)} -> n {channels} {space}, n g, n g ; {kinds}"


def _group_norm_local(node: Node, local: Local) -> Node:
    """N, C, HxW and the number of groups follow the piece."""
    n, c, *_ = shape = local.inputs[0].local_shape(local.mesh)
    groups = node.args[6] * c // local.inputs[0].shape[1]
    space = 1
    for s in shape[2:]:
        space *= s
    return replace(node, args=(*node.args[:3], n, c, space, groups, *node.args[7:]))


def _group_norm_backward(node: Node, types: Types) -> str:
    shape = types[node.refs()[0]].shape
    groups = node.args[8]
    space = " ".join(f"x{i}" for i in range(len(shape) - 2))
    channels = f"(g={groups} c)"
    full = f"n {channels} {space}"
    terms = [full, full, "n g", "n g"] + [channels] * (len(node.refs()) - 4)
    kinds = ", ".join(["n: sum"] + [f"{x}: whole" for x in ["c", *space.split()]])
    return f"{', '.join(terms)} -> {full}, {channels}, {channels} ; {kinds}"


def _group_norm_backward_local(node: Node, local: Local) -> Node:
    n, c, *_ = shape = local.inputs[0].local_shape(local.mesh)
    groups = node.args[8] * c // local.inputs[0].shape[1]
    space = 1
    for s in shape[2:]:
        space *= s
    return replace(node, args=(*node.args[:5], n, c, space, groups, *node.args[9:]))


def _batch_norm(node: Node, types: Types) -> str:
    """Channels are plain. Samples are whole where their statistics are taken, plain where given ones are used."""
    shape = types[node.refs()[0]].shape
    space = [f"x{i}" for i in range(len(shape) - 2)]
    full = " ".join(["n", "c", *space])
    if node.op.endswith("no_training.default"):
        return f"{', '.join([full, *['c'] * (len(node.refs()) - 1)])} -> {full}, e, e ; e: whole"
    kinds = ", ".join(f"{f}: whole" for f in ["n", *space])
    return f"{', '.join([full, *['c'] * (len(node.refs()) - 1)])} -> {', '.join([full, *['c'] * (len(node.outs) - 1)])} ; {kinds}"


def _batch_norm_linear(node: Node, types: Types) -> str:
    """With given statistics the output is linear in weight and bias, and nothing else is computed."""
    return "1 2" if node.op.endswith("no_training.default") and len(node.refs()) == 5 else ""


def _batch_norm_backward(node: Node, types: Types) -> str:
    shape = types[node.refs()[0]].shape
    space = [f"x{i}" for i in range(len(shape) - 2)]
    full, train = " ".join(["n", "c", *space]), node.args[7]
    stats = [t for t in node.refs()[2:] if types[t].shape != (0,)]
    terms = ["c" if t in stats else "e" for t in node.refs()[2:]]
    kinds = ", ".join(f"{f}: {'whole' if train else 'sum'}" for f in ["n", *space])
    return f"{', '.join([full, full, *terms])} -> {full}, c, c ; {kinds}, e: whole"


def _weight_norm(node: Node, types: Types) -> str:
    """The norm is over all dims but one, which is the first or the last."""
    full_rank = len(types[node.refs()[0]].shape)
    names = letters(full_rank)
    dim = normal_dim(node.arg(2 if len(node.refs()) == 2 else 4, "dim", 0), full_rank)
    full = " ".join(names)
    size = " ".join(n if i == dim else "1" for i, n in enumerate(names))
    kinds = ", ".join(f"{n}: whole" for i, n in enumerate(names) if i != dim)
    operands = [full, size] if len(node.refs()) == 2 else [full, full, size, size]
    return f"{', '.join(operands)} -> {full}, {size} ; {kinds}"


RULES = (
    Rule("aten._weight_norm_interface.default", _weight_norm, contiguous=(0, 1),
         samples=("f[4, 6], f[4, 1], 0", "f[4, 6, 2], f[1, 1, 2], 2")),
    Rule("aten._weight_norm_interface_backward.default", _weight_norm, "0", contiguous=(0, 1, 2, 3),
         samples=("f[4, 6], f[4, 6], f[4, 1], pos[4, 1], 0", "f[4, 6, 2], f[4, 6, 2], f[1, 1, 2], pos[1, 1, 2], 2")),
    Rule("aten.native_layer_norm.default", _layer_norm,
         samples=("f[4, 2, 6], (6,), f[6], f[6], 1e-5", "f[4, 2, 6], (2, 6), None, None, 1e-5", "f[4, 6], (6,), f[6], None, 1e-5")),
    Rule("aten.native_layer_norm_backward.default", _layer_norm_backward, "0", contiguous=(2, 3), samples=(
        "f[4, 2, 6], f[4, 2, 6], (6,), f[4, 2, 1], pos[4, 2, 1], f[6], f[6], (True, True, True)",
        "f[4, 6], f[4, 6], (6,), f[4, 1], pos[4, 1], f[6], None, (True, True, False)",
        "f[4, 2, 6], f[4, 2, 6], (2, 6), f[4, 1, 1], pos[4, 1, 1], None, None, (True, False, False)",
    )),
    Rule("aten.native_group_norm.default", _group_norm, local=_group_norm_local, contiguous=(0, 1, 2),
         samples=("f[4, 6, 2, 4], f[6], f[6], 4, 6, 8, 2, 1e-5", "f[4, 6, 2, 4], None, None, 4, 6, 8, 3, 1e-5")),
    Rule("aten.native_group_norm_backward.default", _group_norm_backward, "0", local=_group_norm_backward_local,
         contiguous=(0, 1, 2, 3, 4), samples=(
        "f[4, 6, 2, 4], f[4, 6, 2, 4], f[4, 2], pos[4, 2], f[6], 4, 6, 8, 2, (True, True, True)",
        "f[4, 6, 2, 4], f[4, 6, 2, 4], f[4, 2], pos[4, 2], None, 4, 6, 8, 2, (True, False, False)",
    )),
    Rule("aten._native_batch_norm_legit_functional.default", _batch_norm, samples=(
        "f[4, 6, 3, 2], f[6], f[6], f[6], pos[6], True, 0.1, 1e-5", "f[4, 6], None, None, f[6], pos[6], True, 0.1, 1e-5")),
    Rule("aten._native_batch_norm_legit.no_stats", _batch_norm, samples=("f[4, 6, 3, 2], f[6], f[6], True, 0.1, 1e-5",)),
    Rule("aten._native_batch_norm_legit_no_training.default", _batch_norm, _batch_norm_linear,
         samples=("f[4, 6, 3, 2], f[6], f[6], f[6], pos[6], 0.1, 1e-5",)),
    Rule("aten.native_batch_norm_backward.default", _batch_norm_backward, "0", samples=(
        "f[4, 6, 3, 2], f[4, 6, 3, 2], f[6], f[6], pos[6], f[6], pos[6], True, 1e-5, (True, True, True)",
        "f[4, 6, 3, 2], f[4, 6, 3, 2], None, None, None, f[6], pos[6], True, 1e-5, (True, False, False)",
        "f[4, 6, 3, 2], f[4, 6, 3, 2], f[6], f[6], pos[6], f[0], f[0], False, 1e-5, (True, True, True)",
    )),
)  # fmt: skip
