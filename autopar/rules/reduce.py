"""Rows of reductions and of ops that need a whole dim: sums, extrema, scans, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar.ir.program import Node
from autopar.rules.rule import Rule, Types, letters, normal_dim


def reduced_dims(dims: Any, rank: int) -> set[int]:
    """The dims that a ``dim`` argument names, from the left; None and the empty list are all of them."""
    if dims is None or dims == ():
        return set(range(rank))
    return {normal_dim(d, rank) for d in (dims if isinstance(dims, tuple) else (dims,))}


def reduction(
    kind: str, dim: int | None = 1, keepdim: int | None = 2, empty_is_all: bool = True, default: int | None = None
) -> Callable[[Node, Types], str]:
    """The row of an op that reduces dims; ``dim`` and ``keepdim`` are the positions of these arguments (None: it has none)."""

    def row(node: Node, types: Types) -> str:
        rank = len(types[node.refs()[0]].shape)
        dims = None if dim is None else node.arg(dim, "dim", default)
        gone = set() if dims == () and not empty_is_all else reduced_dims(dims, rank)
        keep = keepdim is not None and bool(node.arg(keepdim, "keepdim", False))
        names = letters(rank)
        out = " ".join("1" if i in gone else n for i, n in enumerate(names) if keep or i not in gone)
        kinds = ", ".join(f"{names[i]}: {kind}" for i in sorted(gone))
        return f"{' '.join(names)} -> {', '.join(out for _ in node.outs)} ; {kinds}"

    return row


def whole_dims(dims: Callable[[Node, int], Iterable[int]]) -> Callable[[Node, Types], str]:
    """The row of an op on tensors of one shape that needs some dims whole; ``dims`` gives them from node and rank."""

    def row(node: Node, types: Types) -> str:
        rank = len(types[node.refs()[0]].shape)
        names = letters(rank)
        term = " ".join(names)
        kinds = ", ".join(f"{names[normal_dim(d, rank)]}: whole" for d in dims(node, rank) if rank)
        return f"{', '.join(term for _ in node.refs())} -> {', '.join(term for _ in node.outs)} ; {kinds}"

    return row


def dim_at(position: int, name: str = "dim", default: int = -1) -> Callable[[Node, int], Iterable[int]]:
    """The dim that an argument names."""
    return lambda node, rank: (node.arg(position, name, default),)


def _topk(node: Node, types: Types) -> str:
    rank = len(types[node.refs()[0]].shape)
    names = letters(rank)
    dim = normal_dim(node.arg(2, "dim", -1), rank)
    out = " ".join("k" if i == dim else n for i, n in enumerate(names))
    return f"{' '.join(names)} -> {out}, {out} ; {names[dim]}: whole, k: whole"


def _renorm(node: Node, types: Types) -> str:
    """Each slice along one dim is scaled by its own norm."""
    names = letters(len(types[node.refs()[0]].shape))
    kept = normal_dim(node.args[2], len(names))
    return f"{' '.join(names)} -> {' '.join(names)} ; {', '.join(f'{n}: whole' for i, n in enumerate(names) if i != kept)}"


def _histogram(node: Node, types: Types) -> str:
    """Counts add up, unless the bins depend on the values."""
    kind = "sum" if node.arg(2, "min", 0) < node.arg(3, "max", 0) else "whole"
    names = letters(len(types[node.refs()[0]].shape))
    return f"{' '.join(names)} -> y ; {', '.join(f'{n}: {kind}' for n in names)}, y: whole"


def _reduction_of(node: Node) -> int:
    """The ``reduction`` of a loss: its one whole number, 0 (none), 1 (mean, the default) or 2 (sum)."""
    return next((a for a in node.args if type(a) is int), node.arg(99, "reduction", 1))


def _loss(node: Node, types: Types) -> str:
    """None is pointwise, sum adds up; a mean divides by the number of elements of the piece, so it is whole."""
    how = _reduction_of(node)
    names = letters(len(types[node.refs()[0]].shape))
    if how == 0:
        return f"{', '.join('*' for _ in node.refs())} -> *"
    operands = ", ".join(" ".join(names) for _ in node.refs())
    return f"{operands} -> ; {', '.join(f'{n}: ' + ('sum' if how == 2 else 'whole') for n in names)}"


def _loss_backward(node: Node, types: Types) -> str:
    names = letters(len(types[node.refs()[1]].shape))
    if _reduction_of(node) == 0:
        return f"{', '.join('*' for _ in node.refs())} -> *"
    full = " ".join(names)
    kinds = ", ".join(f"{n}: whole" for n in names) if _reduction_of(node) == 1 else ""
    first = full if types[node.refs()[0]].shape else ""
    return f"{', '.join([first] + [full] * (len(node.refs()) - 1))} -> {full} ; {kinds}"


def _summing(node: Node, types: Types) -> str:
    """A sum is linear unless it casts: floats to whole numbers, bools to numbers."""
    source, target = types[node.refs()[0]].dtype, types[node.outs[0]].dtype
    return "" if source == torch.bool or (source.is_floating_point and not target.is_floating_point) else "0"


RULES = (
    Rule("aten.sum.default", reduction("sum", None, None), _summing, samples=("f[4, 6]", "b[4, 6]")),
    Rule("aten.sum.dim_IntList", reduction("sum"), _summing,
         samples=("f[4, 6], (1,)", "f[4, 6, 2], (0, -1), True", "f[4, 6], None", "b[4, 6], (0,)", "f[4, 6], (-1,), dtype=i64")),
    Rule("aten.amax.default", reduction("max"), samples=("f[4, 6], (1,)", "f[4, 6], (-1,), True", "f[4, 6]")),
    Rule("aten.amin.default", reduction("min"), samples=("f[4, 6], (1,)", "f[4, 6], (-1,), True", "f[4, 6]")),
    Rule("aten.max.default", reduction("max", None, None), samples=("f[4, 6]",)),
    Rule("aten.min.default", reduction("min", None, None), samples=("f[4, 6]",)),
    Rule("aten.max.dim", reduction("whole"), samples=("f[4, 6], 1", "f[4, 6], 0, True")),
    Rule("aten.min.dim", reduction("whole"), samples=("f[4, 6], 1", "f[4, 6], 0, True")),
    Rule("aten.argmax.default", reduction("whole"), samples=("f[4, 6], 1", "f[4, 6], 0, True", "f[4, 6]")),
    Rule("aten.argmin.default", reduction("whole"), samples=("f[4, 6], 1", "f[4, 6], 0, True", "f[4, 6]")),
    Rule("aten.aminmax.default", reduction("whole", 99, 99), samples=("f[4, 6], dim=1", "f[4, 6], dim=0, keepdim=True")),
    Rule("aten.nansum.default", reduction("sum"), timid_ok="it is linear only where all addends are finite",
         samples=("f[4, 6], (1,)", "f[4, 6]")),
    Rule("aten.trace.default", "n m -> ; n: whole, m: whole", "0", samples=("f[4, 6]",)),
    Rule("aten.prod.default", reduction("whole", None, None), samples=("f[4, 6]",)),
    Rule("aten.prod.dim_int", reduction("whole"), samples=("f[4, 6], 1",)),
    # any is a max and all a min, but collectives don't combine bools
    Rule("aten.any.default", reduction("whole", None, None), samples=("b[4, 6]",)),
    Rule("aten.any.dim", reduction("whole"), samples=("b[4, 6], 1",)),
    Rule("aten.any.dims", reduction("whole"), samples=("b[4, 6], (1,)",)),
    Rule("aten.all.default", reduction("whole", None, None), samples=("b[4, 6]",)),
    Rule("aten.all.dim", reduction("whole"), samples=("b[4, 6], 1",)),
    Rule("aten.count_nonzero.default", reduction("sum", 1, None), samples=("b[4, 6]",)),
    Rule("aten.count_nonzero.dim_IntList", reduction("sum", 1, None), samples=("b[4, 6], (1,)",)),
    Rule("aten.logsumexp.default", reduction("whole"), samples=("f[4, 6], (1,)",)),
    Rule("aten.std.correction", reduction("whole"), samples=("f[4, 6], (1,), correction=1", "f[4, 6]")),
    Rule("aten.median.default", reduction("whole", None, None), samples=("f[4, 6]",)),
    Rule("aten.median.dim", reduction("whole"), samples=("f[4, 6], 1",)),
    Rule("aten.mode.default", reduction("whole", default=-1), samples=("i3[4, 6], 1", "i3[4, 6]")),
    Rule("aten.kthvalue.default", reduction("whole", 2, 3, default=-1), samples=("f[4, 6], 2", "f[4, 6], 3, 0, True")),
    Rule("aten.nanmedian.default", reduction("whole", None, None), samples=("f[4, 6]",)),
    Rule("aten.nanmedian.dim", reduction("whole"), samples=("f[4, 6], 1",)),
    *(
        Rule(f"aten.{op}.default", _loss, samples=(f"{args}, 0", f"{args}, 1", f"{args}, 2"))
        for op, args in (
            ("mse_loss", "f[4, 6], f[4, 6]"), ("smooth_l1_loss", "f[4, 6], f[4, 6]"), ("huber_loss", "f[4, 6], f[4, 6]"),
            ("soft_margin_loss", "f[4, 6], f[4, 6]"),
        )
    ),
    *(
        Rule(f"aten.{op}.default", _loss, samples=(f"{args}, 0", f"{args}, 1", f"{args}, 2"))
        for op, args in (
            ("binary_cross_entropy", "unit[4, 6], unit[4, 6], None"),
            ("binary_cross_entropy_with_logits", "f[4, 6], unit[4, 6], None, None"),
        )
    ),
    *(
        Rule(f"aten.{op}.default", _loss_backward, "0 | 1 2" if op == "mse_loss_backward" else "0", samples=(
            f"f[4, 6], f[4, 6], f[4, 6], 0{rest}", f"f[], f[4, 6], f[4, 6], 1{rest}", f"f[], f[4, 6], f[4, 6], 2{rest}"))
        for op, rest in (("mse_loss_backward", ""), ("smooth_l1_loss_backward", ", 1.0"), ("huber_loss_backward", ", 1.0"),
                         ("soft_margin_loss_backward", ""))
    ),
    Rule("aten.binary_cross_entropy_backward.default", _loss_backward, lambda n, _: "0 | 3" if len(n.refs()) == 4 else "0",
         samples=("f[4, 6], unit[4, 6], unit[4, 6], None, 0", "f[], unit[4, 6], unit[4, 6], None, 1",
                  "f[], unit[4, 6], unit[4, 6], f[4, 6], 2")),
    Rule("aten.linalg_vector_norm.default", reduction("whole", 2, 3), samples=("f[4, 6], 2.0, (1,)", "f[4, 6], 3.0, None, True")),
    Rule("aten.cumsum.default", whole_dims(dim_at(1)), _summing,
         samples=("f[4, 6], 1", "f[4, 6], 0", "b[4, 6], 0", "wide[4, 6], 0, dtype=i64")),
    Rule("aten.cumprod.default", whole_dims(dim_at(1)), samples=("f[4, 6], 1",)),
    Rule("aten.cummax.default", whole_dims(dim_at(1)), samples=("f[4, 6], 1",)),
    Rule("aten.cummin.default", whole_dims(dim_at(1)), samples=("f[4, 6], 1",)),
    Rule("aten.renorm.default", _renorm, samples=("f[4, 6, 2], 2, 1, 1.0",)),
    Rule("aten.logcumsumexp.default", whole_dims(dim_at(1)), samples=("f[4, 6], 1",)),
    Rule("aten.topk.default", _topk, samples=("f[4, 6], 2", "f[4, 6], 2, 0")),
    Rule("aten.histc.default", _histogram, samples=("f[4, 6], 4, -1, 1", "f[12], 4")),
    Rule("aten.sort.default", whole_dims(dim_at(1)), samples=("f[4, 6], 1", "f[4, 6]")),
    Rule("aten.sort.stable", whole_dims(dim_at(2)), samples=("i3[4, 6], stable=True", "f[4, 6], stable=True, dim=0, descending=True")),
    Rule("aten._softmax.default", whole_dims(dim_at(1)), samples=("f[4, 6], -1, False", "f[4, 6], 0, False")),
    Rule("aten._log_softmax.default", whole_dims(dim_at(1)), samples=("f[4, 6], -1, False",)),
    Rule("aten._safe_softmax.default", whole_dims(dim_at(1)), samples=("f[4, 6], -1",)),
    Rule("aten._softmax_backward_data.default", whole_dims(dim_at(2)), "0", samples=("f[4, 6], f[4, 6], -1, f64",)),
    Rule("aten._log_softmax_backward_data.default", whole_dims(dim_at(2)), "0", samples=("f[4, 6], f[4, 6], -1, f64",)),
)  # fmt: skip
