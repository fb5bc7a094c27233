"""Canonical form: fused ops whose inside must be cut become the ops they are made of; what does nothing is dropped.

Every rewrite is a row of ``REWRITES``: an op, and a function of builder and node that gives the values of its outputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import argument_position, infer, is_random, resolve
from autopar.errors import UnsupportedError
from autopar.ir.builder import Builder
from autopar.ir.program import Input, Node, Program, Ref, TensorType
from autopar.rules.rule import normal_dim
from autopar.runtime.random import REPLACEMENTS, site

KEY = "key"
Rewrite = Callable[[Builder, Node], Any]


def infer_types(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TensorType | None, ...]:
    """Output types of a torch op by name."""
    return infer(resolve(op), args, kwargs)


def canonicalize(program: Program) -> Program:
    """The program in canonical form; an extra input ``key`` where it draws random numbers."""
    builder = Builder(program, infer_types)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for node in program.nodes:
        node = replace(node, args=builder.resolve(node.args), kwargs=tuple((k, builder.resolve(v)) for k, v in node.kwargs))
        if node.op in CREATION and "dtype" not in dict(node.kwargs):  # not whatever the default is where it runs
            node = replace(node, kwargs=tuple(sorted((*node.kwargs, ("dtype", program.types[node.name].dtype)))))
        builder.at(node)
        if node.op in RANDOM:
            stem, rewrite = RANDOM[node.op]
            number = calls[node.where.module, stem]
            calls[node.where.module, stem] += 1
            results = rewrite(builder, node, site(node.where.module, stem, number))
        elif node.op in REWRITES:
            results = REWRITES[node.op](builder, node)
        else:
            if node.op in REPLACEMENTS or _draws(node):
                raise UnsupportedError(
                    f"the random op {node.op} can't be split over ranks", where=str(node.where),
                    why="autopar has no form of it that depends on the global element index alone",
                    hint="build it from rand, randn, randint, bernoulli or dropout",
                )  # fmt: skip
            results = None
        if results is None:
            builder.emit(node, program.types)
            builder.env.update({o: o for o in node.outs if o})
            continue
        for old, new in zip(node.outs, results if isinstance(results, tuple) else (results,), strict=True):
            if old and new is not None:
                builder.env[old] = new.name
    inputs = program.inputs
    if any(KEY in n.refs() for n in builder.nodes) and not any(i.kind == "key" for i in inputs):
        inputs = (*inputs, Input(KEY, "key", KEY))
        builder.types[KEY] = TensorType(torch.int64, (2,))
    outputs = tuple(replace(o, value=builder.env.get(o.value, o.value)) for o in program.outputs)
    return prune(replace(program, inputs=inputs, nodes=tuple(builder.nodes), outputs=outputs, types=builder.types))


def _draws(node: Node) -> bool:
    """Whether an op of torch draws random numbers: fused attention does so where it has dropout."""
    if not node.op.startswith("aten.") or not is_random(resolve(node.op)):
        return False
    position = argument_position(resolve(node.op), "dropout_p")
    return position is None or bool(node.arg(position, "dropout_p", 0.0))


def prune(program: Program) -> Program:
    """Drops nodes that no output depends on and marks outputs that nobody reads."""
    needed = {o.value for o in program.outputs}
    kept = []
    for node in reversed(program.nodes):
        if not any(o in needed for o in node.outs):
            continue
        needed.update(node.refs())
        kept.append(replace(node, outs=tuple(o if o in needed else "" for o in node.outs)))
    nodes = tuple(reversed(kept))
    alive = {i.name for i in program.inputs} | {o for n in nodes for o in n.outs if o}
    return replace(program, nodes=nodes, types={k: t for k, t in program.types.items() if k in alive})


def _same(b: Builder, n: Node) -> Any:
    return n.args[0]


def _same_if_equal(b: Builder, n: Node) -> Any:
    (ref,) = [r for r in n.args if isinstance(r, Ref)][:1]
    source = b.type(ref)
    made = infer_types(n.op, tuple(b.type(a) if isinstance(a, Ref) else a for a in n.args), dict(n.kwargs))[0]
    return ref if made == source else None


def _undone(b: Builder, n: Node) -> Any:
    """What a transposition undoes that was made by the same one."""
    inner = b.producers.get(n.args[0].name)
    return inner.args[0] if inner is not None and inner.op == n.op and inner.args[1:] == n.args[1:] else None


def _addmm(b: Builder, n: Node) -> Any:
    return _scaled_sum(b, n, b.call("aten.mm.default" if n.op == "aten.addmm.default" else "aten.bmm.default", *n.args[1:3]))


def _scaled_sum(b: Builder, n: Node, product: Ref) -> Ref:
    """``alpha * product + beta * (what it is added to)``, as ops of the kind of addmm have it."""
    added, alpha, beta = n.args[0], n.arg(4, "alpha", 1), n.arg(3, "beta", 1)
    product = product if alpha == 1 else b.call("aten.mul.Tensor", product, alpha)
    return b.call("aten.add.Tensor", product, added if beta == 1 else b.call("aten.mul.Tensor", added, beta))


def _addmv(b: Builder, n: Node) -> Any:
    return _scaled_sum(b, n, b.call("aten.mv.default", *n.args[1:3]))


def _addbmm(b: Builder, n: Node) -> Any:
    return _scaled_sum(b, n, b.call("aten.sum.dim_IntList", b.call("aten.bmm.default", *n.args[1:3]), (0,)))


def _addr(b: Builder, n: Node) -> Any:
    return _scaled_sum(b, n, b.call("aten.mul.Tensor", b.call("aten.unsqueeze.default", n.args[1], 1), n.args[2]))


def _norm(b: Builder, n: Node) -> Any:
    """The older names of a vector's norm."""
    order, dim, keep = n.arg(1, "p", 2), n.arg(2, "dim", None), bool(n.arg(3, "keepdim", False))
    return b.call("aten.linalg_vector_norm.default", n.args[0], 2 if order is None else order, dim if dim else None, keep)


def _dist(b: Builder, n: Node) -> Any:
    return b.call("aten.linalg_vector_norm.default", b.call("aten.sub.Tensor", *n.args[:2]), n.arg(2, "p", 2))


def _channel_shuffle(b: Builder, n: Node) -> Any:
    x, groups = n.args[:2]
    first, channels, *rest = b.type(x).shape
    parts = b.call("aten.view.default", x, (first, groups, channels // groups, *rest))
    return b.call("aten.view.default", b.call("aten.transpose.int", parts, 1, 2), b.type(x).shape)


def _places_backward(space: int) -> Rewrite:
    """The backward of a maximum over ``space`` dims: gradients are added up at their places. Torch's own ops write wherever those say."""

    def rewrite(b: Builder, n: Node) -> Any:
        grad, x, places = n.args[0], n.args[1], n.args[-1]
        shape = b.type(x).shape
        lead, size = shape[:-space], math.prod(shape[-space:])
        count = math.prod(b.type(grad).shape[-space:])
        grad, places = (b.call("aten.view.default", v, (*lead, count)) for v in (grad, places))
        start = b.call("aten.zeros.default", (*lead, size), dtype=b.type(grad).dtype)
        return b.call("aten.view.default", b.call("aten.scatter_add.default", start, -1, places, grad), shape)

    return rewrite


def _unfold_backward(b: Builder, n: Node) -> Any:
    """Windows may overlap: what each holds is added up where it came from."""
    grad, shape, dim, size, step = n.args
    dim = normal_dim(dim, len(shape))
    last = len(shape)
    grad = b.call("aten.permute.default", grad, (*range(dim + 1), last, *range(dim + 1, last)))
    windows = b.type(grad).shape[dim]
    starts = b.call("aten.mul.Tensor", b.call("aten.arange.default", windows, dtype=torch.int64), step)
    within = b.call("aten.arange.default", size, dtype=torch.int64)
    places = b.call("aten.view.default", b.call("aten.add.Tensor", b.call("aten.unsqueeze.default", starts, 1), within), (windows * size,))
    grad = b.call("aten.view.default", grad, (*shape[:dim], windows * size, *shape[dim + 1 :]))
    return b.call("aten.index_add.default", b.call("aten.zeros.default", shape, dtype=b.type(grad).dtype), dim, places, grad)


def _conj(b: Builder, n: Node) -> Any:
    """Torch conjugates when a value is read; a program does when it is made."""
    return b.call("aten._conj_physical.default", n.args[0])


def _rot90(b: Builder, n: Node) -> Any:
    x, turns, (first, second) = n.args[0], n.arg(1, "k", 1) % 4, n.arg(2, "dims", (0, 1))
    flipped = ((), (second,), (first, second), (first,))[turns]
    x = b.call("aten.flip.default", x, flipped) if flipped else x
    return b.call("aten.transpose.int", x, first, second) if turns % 2 else x


def _as_strided(b: Builder, n: Node) -> Any:
    raise UnsupportedError(
        f"{n.op} can't be split over ranks", where=str(n.where), why="it reads memory by strides, and every rank lays out its own piece",
        hint="unfold, view, transpose or a slice",
    )  # fmt: skip


def _split(b: Builder, n: Node) -> Any:
    x, sizes, dim = n.args[0], n.args[1], n.arg(2, "dim", 0)
    total = b.type(x).shape[normal_dim(dim, len(b.type(x).shape))]
    if isinstance(sizes, int):
        sizes = tuple(min(sizes, total - i) for i in range(0, total, sizes)) or (0,)
    out, at = [], 0
    for k, size in enumerate(sizes):
        wanted = k < len(n.outs) and n.outs[k]
        out.append((x if size == total else b.call("aten.slice.Tensor", x, dim, at, at + size)) if wanted else None)
        at += size
    return tuple(out)


def _chunk(b: Builder, n: Node) -> Any:
    x, count, dim = n.args[0], n.args[1], n.arg(2, "dim", 0)
    total = b.type(x).shape[normal_dim(dim, len(b.type(x).shape))]
    return _split(b, n.with_args(x, -(-total // count), dim))


def _unbind(b: Builder, n: Node) -> Any:
    dim = n.arg(1, "dim", 0)
    return tuple(b.call("aten.select.int", n.args[0], dim, i) if o else None for i, o in enumerate(n.outs))


def _stack(b: Builder, n: Node) -> Any:
    dim = normal_dim(n.arg(1, "dim", 0), len(b.type(n.args[0][0]).shape) + 1)
    return b.call("aten.cat.default", tuple(b.call("aten.unsqueeze.default", x, dim) for x in n.args[0]), dim)


def _mean(b: Builder, n: Node) -> Any:
    x, dims = n.args[0], n.arg(1, "dim", None) if n.op == "aten.mean.dim" else None
    shape = b.type(x).shape
    dims = tuple(range(len(shape))) if not dims else tuple(normal_dim(d, len(shape)) for d in dims)
    dtype = dict(n.kwargs).get("dtype")
    extra = {"dtype": dtype} if dtype is not None else {}
    total = b.call("aten.sum.dim_IntList", x, dims, bool(n.arg(2, "keepdim", False)), **extra)
    return b.call("aten.div.Tensor", total, math.prod(shape[d] for d in dims))


def _var(b: Builder, n: Node) -> Any:
    x, shape = n.args[0], b.type(n.args[0]).shape
    dims = n.arg(1, "dim", None)
    dims = tuple(range(len(shape))) if not dims else tuple(normal_dim(d, len(shape)) for d in dims)
    count = math.prod(shape[d] for d in dims)
    correction = dict(n.kwargs).get("correction")
    mean = b.call("aten.div.Tensor", b.call("aten.sum.dim_IntList", x, dims, True), count)
    centred = b.call("aten.sub.Tensor", x, mean)
    keep = bool(n.arg(3, "keepdim", False))
    total = b.call("aten.sum.dim_IntList", b.call("aten.mul.Tensor", centred, centred), dims, keep)
    var = b.call("aten.div.Tensor", total, max(count - (1 if correction is None else correction), 0))
    if n.op == "aten.var.correction":
        return var
    return var, mean if keep else b.call("aten.squeeze.dims", mean, dims)


def _wide(b: Builder, x: Ref) -> Ref:
    """A tensor in the type in which torch sums it: float32 for the half types."""
    narrow = b.type(x).dtype in (torch.float16, torch.bfloat16)
    return b.call("aten._to_copy.default", x, dtype=torch.float32) if narrow else x


def _cast(b: Builder, x: Ref, dtype: torch.dtype) -> Ref:
    return x if b.type(x).dtype == dtype else b.call("aten._to_copy.default", x, dtype=dtype)


def _per_channel(b: Builder, x: Ref) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """(the dims that batch norm reduces, their elements, the shape in which a vector over channels broadcasts)."""
    shape = b.type(x).shape
    dims = tuple(d for d in range(len(shape)) if d != 1)
    return dims, math.prod(shape[d] for d in dims), tuple(s if d == 1 else 1 for d, s in enumerate(shape))


def _batch_norm(b: Builder, n: Node) -> Any:
    """With the batch's own statistics: two sums over the samples (the second of centred squares), so that pieces of a batch add up."""
    x, weight, bias = n.args[:3]
    train, momentum, eps = n.args[-3:]
    dims, count, vector = _per_channel(b, x)
    if not train or not count:
        return None
    wide = _wide(b, x)
    mean = b.call("aten.div.Tensor", b.call("aten.sum.dim_IntList", wide, dims), count)
    centred = b.call("aten.sub.Tensor", wide, b.call("aten.view.default", mean, vector))
    squares = b.call("aten.sum.dim_IntList", b.call("aten.mul.Tensor", centred, centred), dims)
    var = b.call("aten.div.Tensor", squares, count)
    none = TensorType(b.type(mean).dtype, (0,))
    given = "aten._native_batch_norm_legit_no_training.default"
    affine = (None if v is None else _wide(b, v) for v in (weight, bias))
    y = b.call(given, wide, *affine, mean, var, momentum, eps, types=(b.type(wide), none, none))[0]
    out = [_cast(b, y, b.type(x).dtype), mean, b.call("aten.rsqrt.default", b.call("aten.add.Tensor", var, eps))]
    if len(n.outs) == 5:  # the running statistics, the variance of which is unbiased
        unbiased = b.call("aten.div.Tensor", squares, max(count - 1, 1))
        for old, new in zip(n.args[3:5], (mean, unbiased), strict=True):
            step = _cast(b, b.call("aten.mul.Tensor", new, momentum), b.type(old).dtype)
            out.append(b.call("aten.add.Tensor", b.call("aten.mul.Tensor", old, 1 - momentum), step))
    return tuple(out)


def _batch_norm_backward(b: Builder, n: Node) -> Any:
    """With the batch's own statistics; those of the forward are at hand, so two sums are left."""
    grad, x, weight, _, _, mean, rstd, train, _, _ = n.args
    dims, count, vector = _per_channel(b, x)
    if not train or not count:
        return None

    def over(v: Ref) -> Ref:
        return b.call("aten.view.default", v, vector)

    total = b.call("aten.sum.dim_IntList", _wide(b, grad), dims)
    centred = b.call("aten.sub.Tensor", _wide(b, x), over(mean))
    product = b.call("aten.mul.Tensor", b.call("aten.sum.dim_IntList", b.call("aten.mul.Tensor", _wide(b, grad), centred), dims), rstd)
    grad_x = None
    if n.outs[0]:
        scale = b.call("aten.mul.Tensor", rstd, weight) if weight is not None else rstd
        slope = b.call("aten.div.Tensor", b.call("aten.mul.Tensor", product, rstd), count)
        rest = b.call("aten.sub.Tensor", _wide(b, grad), over(b.call("aten.div.Tensor", total, count)))
        rest = b.call("aten.sub.Tensor", rest, b.call("aten.mul.Tensor", centred, over(slope)))
        grad_x = _cast(b, b.call("aten.mul.Tensor", rest, over(scale)), b.type(x).dtype)
    kind = b.type(weight if weight is not None else mean).dtype
    return grad_x, _cast(b, product, kind), _cast(b, total, kind)


def _log_softmax(b: Builder, n: Node) -> Any:
    x, dim = n.args[0], n.args[1]
    if n.args[2]:
        x = b.call("aten._to_copy.default", x, dtype=torch.float32)
    if not b.type(x).shape:
        return b.call("aten.sub.Tensor", x, x)
    centred = b.call("aten.sub.Tensor", x, b.call("aten.amax.default", x, (dim,), True))
    total = b.call("aten.sum.dim_IntList", b.call("aten.exp.default", centred), (dim,), True)
    return b.call("aten.sub.Tensor", centred, b.call("aten.log.default", total))


def _log_softmax_backward(b: Builder, n: Node) -> Any:
    grad, out, dim, dtype = n.args
    if not b.type(grad).shape:
        result = b.call("aten.sub.Tensor", grad, grad)
    else:
        made = b.producers.get(grad.name)
        if made is not None and made.op == "autopar.unpick" and normal_dim(made.args[2] - dim, len(b.type(grad).shape)) == 0:
            total = b.call("aten.unsqueeze.default", made.args[0], dim)  # one element a row: it is the sum
        else:
            total = b.call("aten.sum.dim_IntList", grad, (dim,), True)
        result = b.call("aten.sub.Tensor", grad, b.call("aten.mul.Tensor", b.call("aten.exp.default", out), total))
    return result if b.type(result).dtype == dtype else b.call("aten._to_copy.default", result, dtype=dtype)


def _labels(b: Builder, target: Ref, ignore: int) -> tuple[Ref, Ref]:
    """(where labels are ignored, labels with those replaced by 0)."""
    ignored = b.call("aten.eq.Scalar", target, ignore)
    return ignored, b.call("aten.masked_fill.Scalar", target, ignored, 0)


def _class_weight(b: Builder, weight: Ref, label: Ref) -> Ref:
    picked = b.call("aten.embedding.default", b.call("aten.unsqueeze.default", weight, 1), label)
    return b.call("aten.squeeze.dim", picked, -1)


def _nll(b: Builder, n: Node) -> Any:
    log_p, target, weight, reduction, ignore = n.args
    like = b.type(log_p)
    dim = 1 if len(like.shape) > 1 else 0
    ignored, label = _labels(b, target, ignore)
    picked = b.call("autopar.pick", log_p, label, dim, 0, like.shape[dim], types=(TensorType(like.dtype, b.type(target).shape),))
    loss = b.call("aten.neg.default", picked)
    valid = b.call("aten._to_copy.default", b.call("aten.logical_not.default", ignored), dtype=like.dtype)
    if weight is not None:
        scale = _class_weight(b, weight, label)
        valid = b.call("aten.mul.Tensor", valid, scale)
        loss = b.call("aten.mul.Tensor", loss, scale)
    loss = b.call("aten.masked_fill.Scalar", loss, ignored, 0)
    total = b.call("aten.sum.default", valid)
    if reduction == 0:
        return loss, total
    loss = b.call("aten.sum.default", loss)
    return (b.call("aten.div.Tensor", loss, total) if reduction == 1 else loss), total


def _nll_backward(b: Builder, n: Node) -> Any:
    grad, log_p, target, weight, reduction, ignore, total = n.args
    like = b.type(log_p)
    dim = 1 if len(like.shape) > 1 else 0
    ignored, label = _labels(b, target, ignore)
    if reduction == 1:
        grad = b.call("aten.div.Tensor", grad, total)
    grad = b.call("aten.neg.default", grad)
    if reduction != 0 and b.type(target).shape:
        grad = b.call("aten.expand.default", grad, b.type(target).shape)
    if weight is not None:
        grad = b.call("aten.mul.Tensor", grad, _class_weight(b, weight, label))
    grad = b.call("aten.masked_fill.Scalar", grad, ignored, 0)
    return b.call("autopar.unpick", grad, label, dim, like.shape[dim], 0, types=(TensorType(b.type(grad).dtype, like.shape),))


def _embedding_backward(b: Builder, n: Node) -> Any:
    grad, index, rows, padding, by_frequency = n.args
    if by_frequency:
        raise UnsupportedError("embedding(scale_grad_by_freq=True) is not supported", where=str(n.where), hint="leave it out")
    kind = TensorType(b.type(grad).dtype, (rows, b.type(grad).shape[-1]))
    return b.call("autopar.embedding_backward", grad, index, padding, rows, 0, types=(kind,))


def _dropout_backward(b: Builder, n: Node) -> Any:
    return b.call("autopar.dropout", *n.args, types=(b.type(n.args[0]),))


def _reduced(b: Builder, loss: Ref, reduction: int) -> Ref:
    """A loss per element, its mean (1) or its sum (2)."""
    if reduction == 0:
        return loss
    total = b.call("aten.sum.default", loss)
    return b.call("aten.div.Tensor", total, max(b.type(loss).numel, 1)) if reduction == 1 else total


def _mse(b: Builder, n: Node) -> Any:
    delta = b.call("aten.sub.Tensor", n.args[0], n.args[1])
    return _reduced(b, b.call("aten.mul.Tensor", delta, delta), n.arg(2, "reduction", 1))


def _mse_backward(b: Builder, n: Node) -> Any:
    grad, x, target, reduction = n.args
    delta = b.call("aten.mul.Tensor", b.call("aten.sub.Tensor", x, target), 2.0 / max(b.type(x).numel, 1) if reduction == 1 else 2.0)
    return b.call("aten.mul.Tensor", delta, grad)


def _loss_of(position: int) -> Rewrite:
    """A loss that can reduce by itself, as the loss of every element and a reduction; ``position`` of the argument that says which."""

    def rewrite(b: Builder, n: Node) -> Any:
        reduction = n.arg(position, "reduction", 1)
        if reduction == 0:
            return None
        given = (*n.args[:position], *(None for _ in range(position - len(n.args))))  # optional tensors before it
        args = (*given, 0, *n.args[position + 1 :])
        return _reduced(b, b.call(n.op, *args), reduction)

    return rewrite


def _loss_backward_of(position: int) -> Rewrite:
    """The backward of such a loss, from the gradient of every element."""

    def rewrite(b: Builder, n: Node) -> Any:
        grad, x = n.args[:2]
        reduction = n.arg(position, "reduction", 1)
        if reduction == 0:
            return None
        shape = b.type(x).shape
        if reduction == 1:
            grad = b.call("aten.div.Tensor", grad, max(math.prod(shape), 1))
        if b.type(grad).shape != shape:
            grad = b.call("aten.expand.default", grad, shape)
        given = (*n.args[1:position], *(None for _ in range(position - len(n.args))))
        return b.call(n.op, grad, *given, 0, *n.args[position + 1 :])

    return rewrite


def _new(name: str) -> Rewrite:
    """``new_*``: the tensor that it is asked of gives the type alone, so that nothing else of it is needed."""

    def rewrite(b: Builder, n: Node) -> Any:
        dtype = dict(n.kwargs).get("dtype") or b.type(n.args[0]).dtype
        return b.call(name, *n.args[1:], dtype=dtype)

    return rewrite


#: ops that make a tensor of numbers alone, in the default dtype unless told otherwise.
CREATION = frozenset(
    f"aten.{name}"
    for name in (
        "arange.default", "arange.start", "arange.start_step", "empty.memory_format", "eye.default", "eye.m", "full.default",
        "linspace.default", "ones.default", "scalar_tensor.default", "zeros.default",
    )
)  # fmt: skip

REWRITES: dict[str, Rewrite] = {
    "aten.detach.default": _same,
    "aten.alias.default": _same,
    "aten.clone.default": _same,
    "aten.lift_fresh_copy.default": _same,
    "aten.expand.default": _same_if_equal,
    "aten.view.default": _same_if_equal,
    "aten._unsafe_view.default": _same_if_equal,
    "aten.slice.Tensor": _same_if_equal,
    "aten._to_copy.default": _same_if_equal,
    "aten.t.default": _undone,
    "aten.transpose.int": _undone,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "aten.addmv.default": _addmv,
    "aten.addbmm.default": _addbmm,
    "aten.addr.default": _addr,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.dist.default": _dist,
    "aten.channel_shuffle.default": _channel_shuffle,
    "aten.native_channel_shuffle.default": _channel_shuffle,
    "aten.unfold_backward.default": _unfold_backward,
    "aten.adaptive_max_pool2d_backward.default": _places_backward(2),
    "aten.fractional_max_pool2d_backward.default": _places_backward(2),
    "aten.adaptive_max_pool3d_backward.default": _places_backward(3),
    "aten.fractional_max_pool3d_backward.default": _places_backward(3),
    "aten.max_pool3d_with_indices_backward.default": _places_backward(3),
    "aten._conj.default": _conj,
    "aten.resolve_conj.default": _same,
    "aten.resolve_neg.default": _same,
    "aten.rot90.default": _rot90,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    "aten.unsafe_chunk.default": _chunk,
    "aten.chunk.default": _chunk,
    "aten.unbind.int": _unbind,
    "aten.stack.default": _stack,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.var.correction": _var,
    "aten.var_mean.correction": _var,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.nll_loss_forward.default": _nll,
    "aten.nll_loss2d_forward.default": _nll,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
    "aten.smooth_l1_loss.default": _loss_of(2),
    "aten.smooth_l1_loss_backward.default": _loss_backward_of(3),
    "aten.huber_loss.default": _loss_of(2),
    "aten.huber_loss_backward.default": _loss_backward_of(3),
    "aten.soft_margin_loss.default": _loss_of(2),
    "aten.soft_margin_loss_backward.default": _loss_backward_of(3),
    "aten.binary_cross_entropy.default": _loss_of(3),
    "aten.binary_cross_entropy_with_logits.default": _loss_of(4),
    "aten.binary_cross_entropy_backward.default": _loss_backward_of(4),
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.native_dropout_backward.default": _dropout_backward,
    "aten.new_zeros.default": _new("aten.zeros.default"),
    "aten.new_ones.default": _new("aten.ones.default"),
    "aten.new_full.default": _new("aten.full.default"),
    "aten.new_empty.default": _new("aten.empty.memory_format"),
}


def _place(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes, starts and strides of a whole tensor's elements in its row-major global index."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return shape, (0,) * len(shape), strides


def _keep(b: Builder, shape: tuple[int, ...], number: int, p: float, out: str | None = None) -> Ref:
    return b.call("autopar.keep", Ref(KEY), number, float(p), shape, *_place(shape), out=out, types=(TensorType(torch.bool, shape),))


def _native_dropout(b: Builder, n: Node, number: int) -> Any:
    x, p, train = n.args
    if train is False:
        return x, b.call("aten.ones_like.default", x, dtype=torch.bool)
    kind = b.type(x)
    mask = _keep(b, kind.shape, number, p)
    return b.call("autopar.dropout", x, mask, 0.0 if p == 1 else 1.0 / (1.0 - p), types=(kind,)), mask


def _bernoulli_p(b: Builder, n: Node, number: int) -> Any:
    kind = b.type(n.args[0])
    mask = _keep(b, kind.shape, number, 1.0 - n.arg(1, "p", 0.5))
    return b.call("aten._to_copy.default", mask, dtype=kind.dtype)


def _bernoulli(b: Builder, n: Node, number: int) -> Any:
    kind = b.type(n.args[0])
    return b.call("autopar.bernoulli", Ref(KEY), number, n.args[0], *_place(kind.shape), types=(kind,))


def _bernoulli_tensor(b: Builder, n: Node, number: int) -> Any:
    kind = b.type(n.args[0])
    probs = b.call("aten.expand.default", n.args[1], kind.shape) if b.type(n.args[1]).shape != kind.shape else n.args[1]
    drawn = b.call("autopar.bernoulli", Ref(KEY), number, probs, *_place(kind.shape), types=(b.type(probs),))
    return drawn if b.type(drawn).dtype == kind.dtype else b.call("aten._to_copy.default", drawn, dtype=kind.dtype)


def _scaled(name: str, defaults: tuple[float, float]) -> Callable[[Builder, Node, int], Any]:
    """``uniform(low, high)`` and ``normal(mean, std)`` from the standard draw."""

    def rewrite(b: Builder, n: Node, number: int) -> Any:
        kind = b.type(n.args[0])
        first, second = (*n.args[1:], *defaults[len(n.args) - 1 :])[:2]
        shift, scale = (first, second - first) if name == "uniform" else (first, second)
        drawn = b.call(f"autopar.{name}", Ref(KEY), number, kind.shape, *_place(kind.shape), kind.dtype, types=(kind,))
        return b.call("aten.add.Tensor", b.call("aten.mul.Tensor", drawn, scale), shift)

    return rewrite


def _draw(name: str) -> Callable[[Builder, Node, int], Any]:
    def rewrite(b: Builder, n: Node, number: int) -> Any:
        (kind,) = infer_types(n.op, tuple(b.type(a) if isinstance(a, Ref) else a for a in n.args), dict(n.kwargs))
        assert kind is not None
        return b.call(f"autopar.{name}", Ref(KEY), number, kind.shape, *_place(kind.shape), kind.dtype, types=(kind,))

    return rewrite


def _randint(b: Builder, n: Node, number: int) -> Any:
    (kind,) = infer_types(n.op, tuple(b.type(a) if isinstance(a, Ref) else a for a in n.args), dict(n.kwargs))
    assert kind is not None
    bounds = {"aten.randint.default": (0, n.args[0]), "aten.randint.low": n.args[:2], "aten.randint_like.default": (0, *n.args[1:2]),
              "aten.randint_like.low_dtype": n.args[1:3]}[n.op]  # fmt: skip
    return b.call("autopar.randint", Ref(KEY), number, *bounds, kind.shape, *_place(kind.shape), kind.dtype, types=(kind,))


#: random ops: the name under which their calls are counted within a module, and their rewrite.
RANDOM: dict[str, tuple[str, Callable[[Builder, Node, int], Any]]] = {
    "aten.native_dropout.default": ("keep", _native_dropout),
    "aten.bernoulli.p": ("keep", _bernoulli_p),
    "aten.bernoulli.default": ("bernoulli", _bernoulli),
    "aten.bernoulli.Tensor": ("bernoulli", _bernoulli_tensor),
    "aten.uniform.default": ("uniform", _scaled("uniform", (0.0, 1.0))),
    "aten.normal_functional.default": ("normal", _scaled("normal", (0.0, 1.0))),
    "aten.rand.default": ("uniform", _draw("uniform")),
    "aten.rand_like.default": ("uniform", _draw("uniform")),
    "aten.randn.default": ("normal", _draw("normal")),
    "aten.randn_like.default": ("normal", _draw("normal")),
    "aten.randint.default": ("randint", _randint),
    "aten.randint.low": ("randint", _randint),
    "aten.randint_like.default": ("randint", _randint),
    "aten.randint_like.low_dtype": ("randint", _randint),
}


def stem_of(op: str) -> str:
    """The name under which calls of a random op are counted; the in-place form counts with the functional one."""
    found = {"aten.bernoulli_.float": "aten.bernoulli.p", "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor", "aten.uniform_.default":
             "aten.uniform.default", "aten.normal_.default": "aten.normal_functional.default"}.get(op, op)  # fmt: skip
    return RANDOM[found][0] if found in RANDOM else op
