"""Rows of convolutions and pooling: samples and channels may be cut, space is whole."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Node, Ref
from autopar.rules.rule import Local, Rule, Types


def _space(letter: str, rank: int) -> str:
    return " ".join(f"{letter}{i}" for i in range(rank))


def _wholes(*terms: str) -> str:
    return ", ".join(f"{f}: whole" for f in " ".join(terms).split())


def _weight(transposed: bool, groups: int, rank: int) -> str:
    """Grouped convolutions keep their channels whole: their input, output and weight channels belong together."""
    window = _space("u", rank)
    if groups == 1:
        return f"c o {window}" if transposed else f"o c {window}"
    return f"c og {window}" if transposed else f"o cg {window}"


def _convolution(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape) - 2
    bias, transposed, groups = node.args[2], node.args[6], node.args[8]
    x, w, y = f"n c {_space('x', rank)}", _weight(transposed, groups, rank), f"n o {_space('y', rank)}"
    terms = [x, w, *(["o"] if isinstance(bias, Ref) else [])]
    kinds = [_wholes(_space("x", rank), _space("u", rank), _space("y", rank))]
    if groups > 1:
        kinds.append("c: whole, o: whole, cg: whole, og: whole")
    else:  # with a bias every piece of the sum would add it
        kinds.append("c: whole" if isinstance(bias, Ref) else "c: sum")
    return f"{', '.join(terms)} -> {y} ; {', '.join(kinds)}"


def _convolution_linear(node: Node, types: Types) -> str:
    return "0 2 | 1 2" if isinstance(node.args[2], Ref) else "0 | 1"


def _convolution_backward(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[1]].shape) - 2
    transposed, groups = node.args[7], node.args[9]
    x, w, y = f"n c {_space('x', rank)}", _weight(transposed, groups, rank), f"n o {_space('y', rank)}"
    kinds = [_wholes(_space("x", rank), _space("u", rank), _space("y", rank)), "n: sum", "o: sum"]
    if groups > 1:
        kinds[2:] = ["c: whole, o: whole, cg: whole, og: whole"]
    return f"{y}, {x}, {w} -> {x}, {w}, o ~c ; {', '.join(kinds)}"


def _convolution_backward_linear(node: Node, types: Types) -> str:
    """The gradient of the input takes the weight, that of the weight the input; that of the bias neither."""
    return "0" if node.args[10][2] else "0 | 1 2"


def _convolution_backward_local(node: Node, local: Local) -> Node:
    if node.args[3] is None:
        return node
    channels = local.inputs[0].local_shape(local.mesh)[1]
    return replace(node, args=(*node.args[:3], (channels,), *node.args[4:]))


def _pool(node: Node, types: Types) -> str:
    refs = node.refs()
    rank = len(types[refs[0]].shape)
    batch = {2: "", 3: "c", 4: "n c", 5: "n c"}[rank] if rank > 2 else "n"
    space = 2 if rank >= 3 else 1
    y = f"{batch} {_space('y', space)}"
    return f"{batch} {_space('x', space)} -> {', '.join(y for _ in node.outs)} ; {_wholes(_space('x', space), _space('y', space))}"


def _pool_backward(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    batch = "n c" if rank == 4 else "c"
    x, y = f"{batch} {_space('x', 2)}", f"{batch} {_space('y', 2)}"
    terms = [y, x, *([y] if len(node.refs()) == 3 else [])]
    return f"{', '.join(terms)} -> {x} ; {_wholes(_space('x', 2), _space('y', 2))}"


RULES = (
    Rule("aten.convolution.default", _convolution, _convolution_linear, contraction=True, samples=(
        "f[4, 6, 4, 8], f[2, 6, 2, 2], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1",
        "f[4, 6, 4, 8], f[2, 6, 2, 2], f[2], (2, 2), (0, 0), (1, 1), False, (0, 0), 1",
        "f[4, 6, 5], f[6, 2, 3], f[6], (1,), (1,), (1,), False, (0,), 3",
        "f[4, 6, 4, 8], f[6, 2, 2, 2], None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1",
    )),
    Rule("aten.convolution_backward.default", _convolution_backward, _convolution_backward_linear,
         local=_convolution_backward_local, contraction=True, samples=(
        "f[4, 2, 3, 7], f[4, 6, 4, 8], f[2, 6, 2, 2], (2,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, True)",
        "f[4, 2, 3, 7], f[4, 6, 4, 8], f[2, 6, 2, 2], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False)",
        "f[4, 6, 5], f[4, 6, 5], f[6, 2, 3], (6,), (1,), (1,), (1,), False, (0,), 3, (True, True, True)",
        "f[4, 2, 8, 16], f[4, 6, 4, 8], f[6, 2, 2, 2], None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1, (True, True, False)",
    )),
    Rule("aten.max_pool2d_with_indices.default", _pool, samples=("f[4, 6, 4, 8], (2, 2), (2, 2)",)),
    Rule("aten.max_pool2d_with_indices_backward.default", _pool_backward, "0",
         samples=("f[4, 6, 2, 4], f[4, 6, 4, 8], (2, 2), (2, 2), (0, 0), (1, 1), False, i32[4, 6, 2, 4]",)),
    Rule("aten.im2col.default", "n c h w -> n (c k) l ; h: whole, w: whole, k: whole, l: whole", "moves",
         samples=("f[4, 6, 4, 5], (2, 2), (1, 1), (0, 0), (1, 1)",)),
    Rule("aten.col2im.default", "n (c k) l -> n c h w ; h: whole, w: whole, k: whole, l: whole", "0",
         samples=("f[4, 24, 12], (4, 5), (2, 2), (1, 1), (0, 0), (1, 1)",)),
    Rule("aten.avg_pool2d.default", _pool, "0", samples=("f[4, 6, 4, 8], (2, 2), (2, 2)",)),
    Rule("aten.avg_pool2d_backward.default", _pool_backward, "0",
         samples=("f[4, 6, 2, 4], f[4, 6, 4, 8], (2, 2), (2, 2), (0, 0), False, True, None",)),
    Rule("aten._adaptive_avg_pool2d.default", _pool, "0", samples=("f[4, 6, 4, 8], (2, 4)",)),
    Rule("aten._adaptive_avg_pool2d_backward.default", _pool_backward, "0", samples=("f[4, 6, 2, 4], f[4, 6, 4, 8]",)),
    Rule("aten.adaptive_max_pool2d.default", _pool, samples=("f[4, 6, 4, 8], (2, 4)",)),
)  # fmt: skip
