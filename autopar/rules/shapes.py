"""Rows of ops that move elements without computing: views, permutations, slices, concatenations, expansions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from autopar.ir.program import Node
from autopar.rules.rule import Local, Rule, Types, letters, normal_dim, view_row


def _view(node: Node, types: Types) -> str:
    return view_row(types[node.refs()[0]].shape, types[node.outs[0]].shape)


def _squeeze_local(node: Node, local: Local) -> Node:
    """A piece may have dims of size 1 that the whole hasn't: name the dims that go."""
    shape = local.inputs[0].shape
    dims = node.arg(1, "dim")
    named = range(len(shape)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    gone = tuple(d for d in sorted({normal_dim(d, len(shape)) for d in named}) if shape and shape[d] == 1)
    return replace(node, op="aten.squeeze.dims", args=(node.args[0], gone), kwargs=())


def _permute(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    return f"{' '.join(names)} -> {' '.join(names[normal_dim(d, rank)] for d in node.args[1])}"


def _transpose(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    a, b = (normal_dim(d, rank) for d in node.args[1:3])
    swapped = list(names)
    if rank:
        swapped[a], swapped[b] = names[b], names[a]
    return f"{' '.join(names)} -> {' '.join(swapped)}"


def _t(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    return f"{' '.join(names)} -> {' '.join(reversed(names))}"


def _expand(node: Node, types: Types) -> str:
    source, target = types[node.refs()[0]].shape, types[node.outs[0]].shape
    names = letters(len(target))
    kept = names[len(target) - len(source) :]
    left = ["1" if s == 1 and t != 1 else n for s, t, n in zip(source, target[len(target) - len(source) :], kept, strict=True)]
    return f"{' '.join(left)} -> {' '.join(f'{n}={s}' for n, s in zip(names, target, strict=True))}"


def chunk_of(size: int, start: int, length: int) -> int:
    """How many equal chunks a dim has, of which ``[start, start + length)`` is one; 0 where it is none."""
    return size // length if 0 < length < size and size % length == 0 and start % length == 0 else 0


def slice_bounds(node: Node, size: int, first: int) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of a slice node over a dim of ``size``, clamped as torch does; arguments begin at ``first``."""
    start, end = node.arg(first + 1, "start"), node.arg(first + 2, "end")
    step = node.arg(first + 3, "step", 1)
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    return node.arg(first, "dim", 0), start, max(end, start), step


def _sliced(small: tuple[int, ...], dim: int, size: int, start: int, length: int, step: int) -> tuple[list[str], list[str], str]:
    """Terms of the full and the sliced tensor, and kinds."""
    names = letters(len(small))
    full, part = list(names), list(names)
    if length == size and step == 1:
        return full, part, ""
    chunks = chunk_of(size, start, length) if step == 1 else 0
    if chunks:
        full[dim] = f"(n={chunks} {names[dim]})"
        return full, part, " ; n: whole"
    full[dim], part[dim] = "x", "y"
    return full, part, " ; x: whole, y: whole"


def _slice(node: Node, types: Types) -> str:
    source = types[node.refs()[0]].shape
    dim = normal_dim(node.arg(1, "dim", 0), len(source))
    _, start, _, step = slice_bounds(node, source[dim], 1)
    full, part, kinds = _sliced(source, dim, source[dim], start, types[node.outs[0]].shape[dim], step)
    return f"{' '.join(full)} -> {' '.join(part)}{kinds}"


def _slice_local(node: Node, local: Local) -> Node:
    source = local.inputs[0]
    dim = normal_dim(node.arg(1, "dim", 0), len(source.shape))
    _, start, end, step = slice_bounds(node, source.shape[dim], 1)
    if local.out_shape()[dim] == local.outputs[0].shape[dim]:  # type: ignore[union-attr]
        return node.with_args(node.args[0], dim, start, end, step)
    return node.with_args(node.args[0], dim, local.scale(source, dim, start), local.scale(source, dim, end), step)


def _slice_backward(node: Node, types: Types) -> str:
    small, full_shape = types[node.refs()[0]].shape, types[node.outs[0]].shape
    dim = normal_dim(node.args[2], len(small))
    _, start, _, step = slice_bounds(node, full_shape[dim], 2)
    full, part, kinds = _sliced(full_shape, dim, full_shape[dim], start, small[dim], step)
    return f"{' '.join(part)} -> {' '.join(full)}{kinds}"


def _slice_backward_local(node: Node, local: Local) -> Node:
    target = local.outputs[0]
    assert target is not None
    dim = normal_dim(node.args[2], len(target.shape))
    _, start, end, step = slice_bounds(node, target.shape[dim], 2)
    if local.inputs[0].local_shape(local.mesh)[dim] != local.inputs[0].shape[dim]:
        start, end = local.scale(target, dim, start), local.scale(target, dim, end)
    return node.with_args(node.args[0], local.out_shape(), dim, start, end, step)


def _cat(node: Node, types: Types) -> str:
    shapes = [types[n].shape for n in node.refs()]
    out = types[node.outs[0]].shape
    dim = normal_dim(node.arg(1, "dim", 0), len(out))
    names = letters(len(out))
    terms, kinds = [], []
    equal = len(set(s[dim] for s in shapes)) == 1 and len(shapes) > 1
    for k, _ in enumerate(shapes):
        own = list(names)
        if not equal:
            own[dim] = f"x{k}"
            kinds.append(f"x{k}: whole")
        terms.append(" ".join(own))
    target = list(names)
    if equal:
        target[dim] = f"(n={len(shapes)} {names[dim]})"
        kinds.append("n: whole")
    else:
        target[dim] = "y"
        kinds.append("y: whole")
    return f"{', '.join(terms)} -> {' '.join(target)} ; {', '.join(kinds)}"


def _slice_scatter(node: Node, types: Types) -> str:
    """The first operand with a slice of it replaced by the second."""
    full_shape, small = (types[n].shape for n in node.refs())
    dim = normal_dim(node.arg(2, "dim", 0), len(small))
    _, start, _, step = slice_bounds(node, full_shape[dim], 2)
    full, part, kinds = _sliced(full_shape, dim, full_shape[dim], start, small[dim], step)
    return f"{' '.join(full)}, {' '.join(part)} -> {' '.join(full)}{kinds}"


def _slice_scatter_local(node: Node, local: Local) -> Node:
    target = local.outputs[0]
    assert target is not None
    dim = normal_dim(node.arg(2, "dim", 0), len(target.shape))
    _, start, end, step = slice_bounds(node, target.shape[dim], 2)
    if local.out_shape()[dim] != target.shape[dim]:
        start, end = local.scale(target, dim, start), local.scale(target, dim, end)
    return node.with_args(*node.args[:2], dim, start, end, step)


def _select_scatter(node: Node, types: Types) -> str:
    rank = len(types[node.outs[0]].shape)
    names = letters(rank)
    dim = normal_dim(node.args[2], rank)
    full = " ".join(names)
    return f"{full}, {' '.join(n for i, n in enumerate(names) if i != dim)} -> {full} ; {names[dim]}: whole"


def _stack(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    out = list(names)
    out.insert(normal_dim(node.arg(1, "dim", 0), rank + 1), "new")
    return f"{', '.join(' '.join(names) for _ in node.refs())} -> {' '.join(out)} ; new: whole"


def _select(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    dim = normal_dim(node.args[1], rank)
    return f"{' '.join(names)} -> {' '.join(n for i, n in enumerate(names) if i != dim)} ; {names[dim]}: whole"


def _select_backward(node: Node, types: Types) -> str:
    rank = len(types[node.outs[0]].shape)
    names = letters(rank)
    dim = normal_dim(node.args[2], rank)
    return f"{' '.join(n for i, n in enumerate(names) if i != dim)} -> {' '.join(names)} ; {names[dim]}: whole"


def _repeat(node: Node, types: Types) -> str:
    """``(r s)`` in every repeated dim: the repeats are the major factor."""
    source, target = types[node.refs()[0]].shape, types[node.outs[0]].shape
    lead = len(target) - len(source)
    left = letters(len(source))
    right = []
    for i, size in enumerate(target):
        if i < lead:
            right.append(f"r{i}={size}")
        else:
            right.append(f"(r{i}={node.args[1][i]} {left[i - lead]}={source[i - lead]})")
    return f"{' '.join(left)} -> {' '.join(right)}"


def _repeat_local(node: Node, local: Local) -> Node:
    """As many repeats as make the local shape."""
    source, target = local.inputs[0].local_shape(local.mesh), local.out_shape()
    source = (1,) * (len(target) - len(source)) + source
    return node.with_args(node.args[0], tuple(t // s if s else r for t, s, r in zip(target, source, node.args[1])))


def _interleave(node: Node, types: Types) -> str:
    source, target = types[node.refs()[0]].shape, types[node.outs[0]].shape
    if node.arg(2, "dim") is None:
        names = letters(len(source))
        return f"{' '.join(names)} -> y ; y: whole, {', '.join(f'{n}: whole' for n in names)}"
    names = letters(len(source))
    dim = normal_dim(node.arg(2, "dim"), len(source))
    out = list(names)
    out[dim] = f"({names[dim]}={source[dim]} r={target[dim] // source[dim] if source[dim] else 1})"
    return f"{' '.join(names)} -> {' '.join(out)}"


def _interleave_local(node: Node, local: Local) -> Node:
    if node.arg(2, "dim") is None:
        return node
    source, target = local.inputs[0].local_shape(local.mesh), local.out_shape()
    dim = normal_dim(node.arg(2, "dim"), len(source))
    kwargs = tuple((k, v) for k, v in node.kwargs if k != "output_size")  # a hint that only the whole op fits
    return replace(node, args=(node.args[0], target[dim] // source[dim], *node.args[2:]), kwargs=kwargs)


def _flip(node: Node, types: Types) -> str:
    return _with_whole(node, types, node.args[1])


def _roll(node: Node, types: Types) -> str:
    """Without dims the tensor is rolled as if it were flat."""
    dims = node.arg(2, "dims", ())
    return _with_whole(node, types, dims or range(len(types[node.refs()[0]].shape)))


def _with_whole(node: Node, types: Types, dims: Iterable[int]) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    kinds = ", ".join(f"{names[normal_dim(d, rank)]}: whole" for d in dims)
    return f"{' '.join(names)} -> {' '.join(names)} ; {kinds}"


def _pad(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    pads = node.args[1]
    left, right = letters(rank), letters(rank)
    kinds = []
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            dim = rank - 1 - i
            left[dim], right[dim] = f"x{dim}", f"y{dim}"
            kinds += [f"x{dim}: whole", f"y{dim}: whole"]
    return f"{' '.join(left)} -> {' '.join(right)} ; {', '.join(kinds)}"


def _pad_linear(node: Node, types: Types) -> str:
    return "0" if node.arg(2, "value", 0) == 0 else ""


def _triangle(node: Node, types: Types) -> str:
    return "* r c -> * r c ; r: offset, c: offset"


def _triangle_local(node: Node, local: Local) -> Node:
    out = local.outputs[0]
    assert out is not None
    rank = len(out.shape)
    row, column = local.start(out, rank - 2), local.start(out, rank - 1)
    if not row.terms and not column.terms:
        return node
    op = "autopar." + node.op.split(".")[1]
    return replace(node, op=op, args=(node.args[0], node.arg(1, "diagonal", 0), row, column), kwargs=())


def _diagonal(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    a, b = (normal_dim(node.arg(k, f"dim{k - 1}", k - 2), rank) for k in (2, 3))
    names = letters(rank)
    kinds = f"{names[a]}: whole, {names[b]}: whole, y: whole"
    return f"{' '.join(names)} -> {' '.join(n for i, n in enumerate(names) if i not in (a, b))} y ; {kinds}"


def _diagonal_backward(node: Node, types: Types) -> str:
    rank = len(node.args[1])
    a, b = (normal_dim(d, rank) for d in node.args[3:5])
    names = letters(rank)
    kinds = f"{names[a]}: whole, {names[b]}: whole, y: whole"
    return f"{' '.join(n for i, n in enumerate(names) if i not in (a, b))} y -> {' '.join(names)} ; {kinds}"


def _halves(rank: int, dim: int) -> tuple[str, str]:
    """Terms of a tensor and of one of its two halves along a dim."""
    names = letters(rank)
    both = list(names)
    both[dim] = f"(two=2 {names[dim]})"
    return " ".join(both), " ".join(names)


def _glu(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    both, half = _halves(rank, normal_dim(node.arg(1, "dim", -1), rank))
    return f"{both} -> {half} ; two: whole"


def _glu_backward(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    both, half = _halves(rank, normal_dim(node.args[2], rank))
    return f"{half}, {both} -> {both} ; two: whole"


def _pixel_shuffle(node: Node, types: Types) -> str:
    r = node.args[1]
    return f"* (c r={r} s={r}) h w -> * c (h r={r}) (w s={r}) ; r: whole, s: whole"


def _pixel_unshuffle(node: Node, types: Types) -> str:
    r = node.args[1]
    return f"* c (h r={r}) (w s={r}) -> * (c r={r} s={r}) h w ; r: whole, s: whole"


def _edge_terms(n: int) -> tuple[str, str, str]:
    x, y = (" ".join(f"{letter}{i}" for i in range(n)) for letter in "xy")
    return x, y, ", ".join(f"{f}: whole" for f in (x + " " + y).split())


def _edge_pad(n: int) -> Callable[[Node, Types], str]:
    """Padding of the last ``n`` dims with values from the tensor itself."""
    x, y, kinds = _edge_terms(n)
    return lambda node, types: f"* {x} -> * {y} ; {kinds}"


def _edge_pad_backward(n: int) -> Callable[[Node, Types], str]:
    x, y, kinds = _edge_terms(n)
    return lambda node, types: f"* {y}, * {x} -> * {x} ; {kinds}"


def _unfold(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    dim = normal_dim(node.args[1], rank)
    out = list(names)
    out[dim] = "y"
    return f"{' '.join(names)} -> {' '.join(out)} w ; {names[dim]}: whole, y: whole, w: whole"


def _diag_embed(node: Node, types: Types) -> str:
    """The last dim becomes the diagonal of two; another diagonal than the main one lengthens them."""
    rank = len(types[node.outs[0]].shape)
    a, b = sorted(normal_dim(node.arg(k, f"dim{k - 1}", k - 4), rank) for k in (2, 3))
    names = letters(rank - 2)
    out = list(names)
    out.insert(a, "r")
    out.insert(b, "c")
    return f"{' '.join(names)} x -> {' '.join(out)} ; x: whole, r: whole, c: whole"


def _diagonal_scatter(node: Node, types: Types) -> str:
    rank = len(types[node.outs[0]].shape)
    names = letters(rank)
    a, b = (normal_dim(node.arg(k, f"dim{k - 2}", k - 3), rank) for k in (3, 4))
    full = " ".join(names)
    part = " ".join(n for i, n in enumerate(names) if i not in (a, b))
    return f"{full}, {part} y -> {full} ; {names[a]}: whole, {names[b]}: whole, y: whole"


def _blocks(node: Node, types: Types) -> str:
    """Blocks along a diagonal; a vector is a row and a number a block of one."""
    terms, kinds = [], ["r: whole", "c: whole"]
    for k, name in enumerate(node.refs()):
        own = [f"x{k}_{i}" for i in range(len(types[name].shape))]
        kinds += [f"{n}: whole" for n in own]
        terms.append(" ".join(own))
    return f"{', '.join(terms)} -> r c ; {', '.join(kinds)}"


RULES = (
    *(
        Rule(f"aten.{op}", _view, "moves", shape_arg=1, samples=("f[4, 6, 8], (24, 8)", "f[24, 8], (4, 6, 8)", "f[4, 12], (4, 3, 4)"))
        for op in ("view.default", "_unsafe_view.default", "reshape.default")
    ),
    Rule("aten.squeeze.default", _view, "moves", local=_squeeze_local, samples=("f[2, 1, 3]",)),
    Rule("aten.unsqueeze.default", _view, "moves", samples=("f[4, 6], 1",)),
    Rule("aten.squeeze.dim", _view, "moves", local=_squeeze_local, samples=("f[4, 1, 6], 1", "f[4, 2, 3], -1")),
    Rule("aten.squeeze.dims", _view, "moves", local=_squeeze_local, samples=("f[2, 1, 6], (0, 1)",)),
    Rule("aten.permute.default", _permute, "moves", samples=("f[4, 6, 8], (2, 0, 1)",)),
    Rule("aten.transpose.int", _transpose, "moves", samples=("f[4, 6, 8], 1, 2", "f[4, 6, 8], -1, 0")),
    Rule("aten.t.default", _t, "moves", samples=("f[4, 6]",)),
    Rule("aten.expand.default", _expand, "moves", shape_arg=1, samples=("f[4, 1, 8], (4, 6, 8)", "f[8], (4, 6, 8)")),
    Rule("aten.slice.Tensor", _slice, "moves", soft=True, local=_slice_local,
         samples=("f[4, 12], 1, 4, 8", "f[4, 12], 1, 0, 11", "f[4, 12], 0")),
    Rule("aten.slice_backward.default", _slice_backward, "moves", soft=True, local=_slice_backward_local,
         samples=("f[4, 4], (4, 12), 1, 4, 8, 1", "f[4, 11], (4, 12), 1, 0, 11, 1")),
    Rule("aten.slice_scatter.default", _slice_scatter, "moves", soft=True, local=_slice_scatter_local,
         samples=("f[4, 12], f[4, 4], 1, 4, 8", "f[4, 12], f[4, 11], 1, 0, 11", "f[4, 12], f[4, 6], 1, 0, 12, 2")),
    Rule("aten.select_scatter.default", _select_scatter, "moves", samples=("f[4, 6, 2], f[4, 2], 1, 2",)),
    Rule("aten.cat.default", _cat, "moves", soft=True, samples=("[f[4, 6], f[4, 6]], 1", "[f[4, 6], f[4, 2]], 1")),
    Rule("aten.stack.default", _stack, "moves", samples=("[f[4, 6], f[4, 6]], 1", "[f[4, 6], f[4, 6]], -1")),
    Rule("aten.select.int", _select, "moves", samples=("f[4, 6, 2], 1, 2", "f[4, 6], -1, 0")),
    Rule("aten.select_backward.default", _select_backward, "moves", shape_arg=1, samples=("f[4, 2], (4, 6, 2), 1, 2",)),
    Rule("aten.repeat.default", _repeat, "moves", local=_repeat_local, samples=("f[4, 6], (2, 1, 4)", "f[4, 6], (3, 2)")),
    Rule("aten.repeat_interleave.self_int", _interleave, "moves", local=_interleave_local,
         samples=("f[4, 6], 2, 1", "f[4, 6], 3, 0", "f[4, 6], 2")),
    Rule("aten.flip.default", _flip, "moves", samples=("f[4, 6], (1,)",)),
    Rule("aten.roll.default", _roll, "moves", samples=("f[4, 6], (1,), (1,)", "f[4, 6], (1,)")),
    Rule("aten.constant_pad_nd.default", _pad, _pad_linear, samples=("f[4, 6], (1, 2)", "f[4, 6], (0, 0, 1, 0), 1.5")),
    Rule("aten.tril.default", _triangle, "0", local=_triangle_local, samples=("f[4, 6]", "f[2, 6, 4], 1")),
    Rule("aten.triu.default", _triangle, "0", local=_triangle_local, samples=("f[4, 6]", "f[2, 6, 4], -1")),
    Rule("aten.diagonal.default", _diagonal, "moves", samples=("f[4, 6, 6], 0, 1, 2", "f[4, 4]")),
    Rule("aten.diagonal_backward.default", _diagonal_backward, "moves", shape_arg=1,
         samples=("f[4, 6], (4, 6, 6), 0, 1, 2", "f[4], (4, 6), 0, 0, 1")),
    Rule("aten.diag_embed.default", _diag_embed, "0", samples=("f[4, 6]", "f[4, 6], 1, 0, 2")),
    Rule("aten.diagonal_scatter.default", _diagonal_scatter, "moves", samples=("f[4, 6, 6], f[4, 6], 0, 1, 2",)),
    Rule("aten.block_diag.default", _blocks, lambda n, _: " ".join(map(str, range(len(n.refs())))), samples=("[f[4, 6], f[2, 3]]",)),
    Rule("aten.view_as_real.default", "* -> * two ; two: whole", "0", samples=("c[4, 6]",)),
    Rule("aten.view_as_complex.default", "* two -> * ; two: whole", "0", samples=("f[4, 6, 2]",)),
    Rule("aten.glu.default", _glu, samples=("f[4, 12]", "f[4, 8, 6], 1")),
    Rule("aten.glu_backward.default", _glu_backward, "0", samples=("f[4, 6], f[4, 12], -1",)),
    Rule("aten.pixel_shuffle.default", _pixel_shuffle, "moves", samples=("f[4, 12, 4, 6], 2",)),
    Rule("aten.pixel_unshuffle.default", _pixel_unshuffle, "moves", samples=("f[4, 3, 8, 12], 2",)),
    *(
        Rule(f"aten.{mode}_pad{n}d.default", _edge_pad(n), "moves", samples=(f"f[{', '.join(['4', '6', *['6', '4', '8'][:n]])}], {pads}",))
        for mode in ("reflection", "replication")
        for n, pads in ((1, (1, 2)), (2, (1, 2, 1, 1)), (3, (1, 2, 1, 1, 2, 1)))
    ),
    *(
        Rule(f"aten.{mode}_pad{n}d_backward.default", _edge_pad_backward(n), "0", samples=(sample,))
        for mode in ("reflection", "replication")
        for n, sample in (
            (1, "f[4, 6, 9], f[4, 6, 6], (1, 2)"), (2, "f[4, 6, 8, 7], f[4, 6, 6, 4], (1, 2, 1, 1)"),
            (3, "f[4, 6, 9, 6, 11], f[4, 6, 6, 4, 8], (1, 2, 1, 1, 2, 1)"),
        )
    ),
    Rule("aten.unfold.default", _unfold, "moves", samples=("f[4, 6], 1, 2, 2",)),
)  # fmt: skip
