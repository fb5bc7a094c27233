"""Rows of convolutions and pooling: samples and channels may be cut, space is whole."""

from __future__ import annotations

from collections.abc import Callable
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


Row = Callable[[Node, Types], str]


def _over_space(space: int, operands: str, outputs: str, more: str = "") -> Row:
    """The row of an op whose operands and outputs each have their channels (``*``) and, whole, the space of before (x) or after (y).

    ``more`` are the terms of further operands.
    """
    x, y = _space("x", space), _space("y", space)

    def row(node: Node, types: Types) -> str:
        terms = [f"* {x if which == 'x' else y}" for which in operands] + ([more] if more else [])
        out = ", ".join(f"* {x if which == 'x' else y}" for which in (outputs * len(node.outs))[: len(node.outs)])
        kinds = _wholes(x, y) + (f", {_wholes(more.removeprefix('*'))}" if more else "")
        return f"{', '.join(terms)} -> {out} ; {kinds}"

    return row


def _pool(space: int) -> Row:
    return _over_space(space, "x", "y")


def _pool_backward(space: int, places: bool) -> Row:
    """From the gradient and the input, and ``places``: where every maximum was."""
    return _over_space(space, "yxy" if places else "yx", "x")


def _sampled(node: Node, types: Types) -> str:
    """Each place of the output takes its value from somewhere in the input."""
    x, y = (_space(letter, len(types[node.refs()[0]].shape) - 2) for letter in "xy")
    return f"n c {x}, n {y} at -> n c {y} ; {_wholes(x, 'at')}"


def _sampled_backward(node: Node, types: Types) -> str:
    x, y = (_space(letter, len(types[node.refs()[0]].shape) - 2) for letter in "xy")
    return f"n c {y}, n c {x}, n {y} at -> n c {x}, n {y} at ; {_wholes(x, 'at')}, c: sum, {', '.join(f'{f}: sum' for f in y.split())}"


def _affine_grid(node: Node, types: Types) -> str:
    y = _space("y", len(node.args[1]) - 2)
    return f"n at of -> n {y} at ; {_wholes(y, 'at', 'of')}"


def _affine_grid_local(node: Node, local: Local) -> Node:
    return node.with_args(node.args[0], (local.out_shape()[0], *node.args[1][1:]), *node.args[2:])


def _affine_grid_backward(node: Node, types: Types) -> str:
    y = _space("y", len(node.args[1]) - 2)
    return f"n {y} at -> n at of ; {_wholes(y, 'at', 'of')}"


def _resized_local(node: Node, local: Local) -> Node:
    """The backward of a resizing is told the size of the whole input."""
    return node.with_args(*node.args[:2], (*local.out_shape()[:2], *node.args[2][2:]), *node.args[3:])


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
    Rule("aten.max_pool2d_with_indices.default", _pool(2), samples=("f[4, 6, 4, 8], (2, 2), (2, 2)",)),
    Rule("aten.max_pool2d_with_indices_backward.default", _pool_backward(2, True), "0",
         samples=("f[4, 6, 2, 4], f[4, 6, 4, 8], (2, 2), (2, 2), (0, 0), (1, 1), False, i32[4, 6, 2, 4]",)),
    Rule("aten.max_pool3d_with_indices.default", _pool(3), samples=("f[4, 6, 4, 2, 6], (2, 2, 2), (2, 2, 2)",)),
    Rule("aten.max_unpool2d.default", _over_space(2, "yy", "x"), "0", samples=("f[4, 6, 2, 4], u32[4, 6, 2, 4], (4, 8)",)),
    Rule("aten.max_unpool3d.default", _over_space(3, "yy", "x"), "0",
         samples=("f[4, 6, 5, 1, 5], u35[4, 6, 5, 1, 5], (5, 1, 7), (1, 1, 1), (0, 0, 0)",)),
    Rule("aten.im2col.default", "n c h w -> n (c k) l ; h: whole, w: whole, k: whole, l: whole", "moves",
         samples=("f[4, 6, 4, 5], (2, 2), (1, 1), (0, 0), (1, 1)",)),
    Rule("aten.col2im.default", "n (c k) l -> n c h w ; h: whole, w: whole, k: whole, l: whole", "0",
         samples=("f[4, 24, 12], (4, 5), (2, 2), (1, 1), (0, 0), (1, 1)",)),
    *(Rule(f"aten.avg_pool{n}d.default", _pool(n), "0", samples=(sample,))
      for n, sample in ((2, "f[4, 6, 4, 8], (2, 2), (2, 2)"), (3, "f[4, 6, 4, 2, 6], (2, 2, 2), (2, 2, 2)"))),
    Rule("aten.avg_pool2d_backward.default", _pool_backward(2, False), "0",
         samples=("f[4, 6, 2, 4], f[4, 6, 4, 8], (2, 2), (2, 2), (0, 0), False, True, None",)),
    Rule("aten.avg_pool3d_backward.default", _pool_backward(3, False), "0",
         samples=("f[4, 6, 2, 1, 3], f[4, 6, 4, 2, 6], (2, 2, 2), (2, 2, 2), (0, 0, 0), False, True, None",)),
    *(Rule(f"aten._adaptive_avg_pool{n}d.default", _pool(n), "0", samples=(sample,))
      for n, sample in ((2, "f[4, 6, 4, 8], (2, 4)"), (3, "f[4, 6, 4, 2, 6], (2, 1, 3)"))),
    *(Rule(f"aten._adaptive_avg_pool{n}d_backward.default", _pool_backward(n, False), "0", samples=(sample,))
      for n, sample in ((2, "f[4, 6, 2, 4], f[4, 6, 4, 8]"), (3, "f[4, 6, 2, 1, 3], f[4, 6, 4, 2, 6]"))),
    *(Rule(f"aten.adaptive_max_pool{n}d.default", _pool(n), samples=(sample,))
      for n, sample in ((2, "f[4, 6, 4, 8], (2, 4)"), (3, "f[4, 6, 4, 2, 6], (2, 1, 3)"))),
    *(Rule(f"aten.fractional_max_pool{n}d.default", _over_space(n, "x", "y", "* r"), samples=(sample,))
      for n, sample in ((2, "f[4, 6, 4, 8], (2, 2), (2, 3), unit[4, 6, 2]"), (3, "f[4, 6, 4, 4, 6], (2, 2, 2), (2, 2, 3), unit[4, 6, 3]"))),
    *(Rule(f"aten._upsample_{mode}2d_aa.default", _pool(2), "0", samples=("f[4, 6, 4, 8], (3, 5), False",))
      for mode in ("bilinear", "bicubic")),
    *(Rule(f"aten._upsample_{mode}2d_aa_backward.default", _over_space(2, "y", "x"), "0", local=_resized_local,
           samples=("f[4, 6, 3, 5], (3, 5), (4, 6, 4, 8), False",)) for mode in ("bilinear", "bicubic")),
    Rule("aten.grid_sampler_2d.default", _sampled, "0", samples=("f[4, 6, 4, 8], f[4, 2, 6, 2], 0, 0, False",)),
    Rule("aten.grid_sampler_3d.default", _sampled, "0", samples=("f[4, 6, 4, 2, 4], f[4, 2, 6, 2, 3], 0, 0, False",)),
    Rule("aten.grid_sampler_2d_backward.default", _sampled_backward, "0",
         samples=("f[4, 6, 2, 6], f[4, 6, 4, 8], f[4, 2, 6, 2], 0, 0, False, (True, True)",)),
    Rule("aten.grid_sampler_3d_backward.default", _sampled_backward, "0",
         samples=("f[4, 6, 2, 6, 2], f[4, 6, 4, 2, 4], f[4, 2, 6, 2, 3], 0, 0, False, (True, True)",)),
    Rule("aten.affine_grid_generator.default", _affine_grid, "0", local=_affine_grid_local,
         samples=("f[4, 2, 3], (4, 1, 4, 6), False", "f[4, 3, 4], (4, 1, 4, 6, 2), False")),
    Rule("aten.affine_grid_generator_backward.default", _affine_grid_backward, "0", local=_affine_grid_local,
         samples=("f[4, 4, 6, 2], (4, 1, 4, 6), False",)),
)  # fmt: skip
