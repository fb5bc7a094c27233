"""Ops that generated code needs and torch doesn't have: lookups in a piece of a table, random numbers of a piece.

Pure functions of tensors and numbers. ``start`` and ``starts`` say where a piece begins in the whole tensor; with 0 and the whole
sizes each op is the plain single-device one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime import random
from autopar.runtime.attention import causal_attention, causal_attention_backward, ring_attention, ring_attention_backward
from autopar.runtime.comm import Comm

__all__ = [
    "arange", "bernoulli", "causal_attention", "causal_attention_backward", "checked", "cross_entropy_backward", "dropout", "embedding",
    "embedding_backward", "exp_sum", "expert_mm", "expert_mm_backward", "expert_outer", "grouped_mm", "keep", "log_softmax", "normal",
    "pick", "randint", "ring_attention", "ring_attention_backward", "tril", "triu", "uniform", "unpick",
]  # fmt: skip

#: bytes of the rows that are computed at a time where the result of all isn't kept: no temporary of their size, and it stays in the cache.
_PIECE = 2**21


def _inside(index: Tensor, start: int, size: int, whole: int | None = None) -> tuple[Tensor, Tensor]:
    """``index`` relative to a piece of ``size`` that begins at ``start``, 0 where it is outside; and whether it is inside.

    With ``whole``, the size of the whole dim, an index that is in no piece stays out of range, so that the lookup fails as torch's does.
    """
    local = index - start
    inside = (local >= 0) & (local < size)
    if whole is None:
        return torch.where(inside, local, 0), inside
    return torch.where(inside, local, torch.where((index >= 0) & (index < whole), 0, size)), inside


def embedding(weight: Tensor, index: Tensor, start: int, rows: int | None = None) -> Tensor:
    """Rows of a piece of a table of ``rows`` that begins at row ``start``; zeros where the index is in another piece.

    The sum over all pieces is the lookup in the whole table.
    """
    local, inside = _inside(index, start, weight.shape[0], rows)
    return torch.where(inside.unsqueeze(-1), torch.nn.functional.embedding(local, weight), 0)


def embedding_backward(
    grad: Tensor, index: Tensor, padding_idx: int, rows: int, start: int, *, out: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Gradient of rows ``[start, start + rows)`` of the table. ``padding_idx`` is global, negative for none.

    Written to ``out``, or added to ``total``, of which only the rows that occur are touched.
    """
    local, inside = _inside(index, start, rows)
    if padding_idx >= 0:
        inside = inside & (index != padding_idx)
    width = grad.shape[-1]
    values = torch.where(inside.unsqueeze(-1), grad, 0).reshape(-1, width)
    if total is None:
        total = grad.new_zeros((rows, width)) if out is None else out.zero_()
    return total.index_add_(0, local.reshape(-1), values)


def pick(x: Tensor, index: Tensor, dim: int, start: int, size: int | None = None) -> Tensor:
    """``x[..., index, ...]`` along ``dim``, one element for every place of the other dims; 0 where the index is in another piece.

    ``size`` is that of the whole dim; an index beyond it fails.
    """
    local, inside = _inside(index, start, x.shape[dim], size)
    return torch.where(inside, x.gather(dim, local.unsqueeze(dim)).squeeze(dim), 0)


def unpick(grad: Tensor, index: Tensor, dim: int, size: int, start: int) -> Tensor:
    """The adjoint of ``pick``: zeros of ``size`` along ``dim`` with ``grad`` at ``index``. ``dim`` counts the result's dims."""
    local, inside = _inside(index, start, size)
    dim = dim % (grad.dim() + 1)
    shape = list(grad.shape)
    shape.insert(dim, size)
    return grad.new_zeros(shape).scatter_(dim, local.unsqueeze(dim), torch.where(inside, grad, 0).unsqueeze(dim))


def _pieces(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    """``x`` in pieces of rows, where a function reduces over ``dims`` only; whole where it is small, or code is being made for it."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() < 2 or any(d % x.dim() == 0 for d in dims) or not x.numel():
        return (x,)
    return x.split(max(1, _PIECE * x.shape[0] // (x.numel() * x.itemsize)))


def exp_sum(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """``x.exp().sum(dims, keepdim)`` without a temporary of the size of ``x``."""
    parts = [piece.exp().sum(tuple(dims), keepdim) for piece in _pieces(x, dims)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def log_softmax(x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """``torch.log_softmax(x, dim)``; ``out`` may be ``x``."""
    if out is None:
        return torch.log_softmax(x, dim)
    for piece, place in zip(_pieces(x, (dim,)), _pieces(out, (dim,)), strict=True):
        place.copy_(torch.log_softmax(piece, dim))
    return out


def cross_entropy_backward(grad: Tensor, index: Tensor, log_p: Tensor, dim: int, start: int, out: Tensor | None = None) -> Tensor:
    """``unpick(grad, index, dim, ...) - log_p.exp() * grad.unsqueeze(dim)``: the gradient of the logits from that of the labels' log_p.

    ``out`` may be ``log_p``.
    """
    local, inside = _inside(index, start, log_p.shape[dim])
    picked = torch.where(inside, grad, 0).unsqueeze(dim)
    return torch.exp(log_p, out=out).mul_(-grad.unsqueeze(dim)).scatter_add_(dim, local.unsqueeze(dim), picked)


def dropout(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """``x`` where ``keep``, scaled; forward and backward of dropout alike.

    The mask is scaled before the product, as torch does it: in bfloat16 the order shows.
    """
    return x * keep.to(x.dtype).mul(scale)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``aten._grouped_mm`` by its definition, in any type: a product for every group.

    Groups are runs along the dim that a 2-dim operand has beside its dim in the product, or along the summed dim where both have 2
    dims; ``ends`` says where each ends. What is in no group is zero. Only shapes, no values, decide what is computed: a group is a mask.
    """
    size = a.shape[-1] if a.dim() == b.dim() == 2 else a.shape[0] if a.dim() == 2 else b.shape[1]
    place = torch.arange(size, device=ends.device)
    inside = (place < ends.unsqueeze(1)) & (place >= torch.cat([ends.new_zeros(1), ends[:-1]]).unsqueeze(1))
    parts = []
    for group in range(ends.shape[0]):
        mask = inside[group]
        if a.dim() == b.dim() == 2:
            parts.append(torch.where(mask, a, 0) @ b)
        elif a.dim() == 2:
            parts.append(torch.where(mask.unsqueeze(1), a, 0) @ b[group])
        else:
            parts.append(a[group] @ torch.where(mask, b, 0))
    stacked = torch.stack(parts)
    return stacked if a.dim() == b.dim() == 2 else stacked.sum(0)


def arange(length: int, offset: int, start: float, step: float, *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Elements ``[offset, offset + length)`` of ``start, start + step, start + 2 * step, ...``"""
    index = torch.arange(offset, offset + length, device=device)
    if dtype.is_floating_point:
        return (index.to(torch.float64) * step + start).to(dtype)
    return (index * int(step) + int(start)).to(dtype)


def tril(x: Tensor, diagonal: int, row: int, column: int) -> Tensor:
    """The lower triangle of a matrix of which ``x`` is the piece that begins at ``row`` and ``column``."""
    return x.tril(diagonal + row - column)


def triu(x: Tensor, diagonal: int, row: int, column: int) -> Tensor:
    """The upper triangle of a matrix of which ``x`` is the piece that begins at ``row`` and ``column``."""
    return x.triu(diagonal + row - column)


def _piece(sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int]) -> random.Piece:
    if not len(sizes) == len(starts) == len(strides):
        raise InputError(f"{len(sizes)} sizes, {len(starts)} starts and {len(strides)} strides of the atoms of one random tensor")
    return random.Piece(tuple(sizes), tuple(starts), tuple(strides))


def keep(
    key: Tensor, site: int, p: float, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Mask of dropout: False with probability ``p``. Atoms as in ``random.Piece``."""
    return random.keep(key, site, _piece(sizes, starts, strides), tuple(shape), p)


def uniform(
    key: Tensor, site: int, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Numbers in [0, 1)."""
    return random.uniform(key, site, _piece(sizes, starts, strides), tuple(shape), dtype)


def normal(
    key: Tensor, site: int, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Standard normal numbers."""
    return random.normal(key, site, _piece(sizes, starts, strides), tuple(shape), dtype)


def randint(
    key: Tensor, site: int, low: int, high: int, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Integers in [low, high)."""
    return random.randint(key, site, _piece(sizes, starts, strides), tuple(shape), low, high, dtype)


def bernoulli(key: Tensor, site: int, probs: Tensor, sizes: Sequence[int], starts: Sequence[int], strides: Sequence[int]) -> Tensor:
    """0 or 1 in the dtype of ``probs``, 1 with that probability."""
    return random.bernoulli(key, site, _piece(sizes, starts, strides), probs)


def piece(x: Tensor, atoms: Sequence[int], atom: int, start: int, length: int, shape: Sequence[int]) -> Tensor:
    """``[start, start + length)`` along one atom of ``x`` seen as ``atoms``, in ``shape``. Contiguous: some kernels read raw memory."""
    return x.reshape(tuple(atoms)).narrow(atom, start, length).reshape(tuple(shape)).contiguous()


def member(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """A parameter as a view of its bucket."""
    count = 1
    for size in shape:
        count *= size
    return flat[offset : offset + count].view(tuple(shape))


def own(flat: Tensor, comm: Comm, axes: Sequence[str], part: int) -> Tensor:
    """The piece of a flat tensor that this rank has among those over ``axes``, as a view."""
    return flat.narrow(0, comm.group(axes).index * part, part)


def once(x: Tensor, *indices: int) -> Tensor:
    """``x`` on the first of the ranks that hold it, zeros on the others: a value that a sum over them counts once."""
    return x if not any(indices) else torch.zeros_like(x)


def pack(pieces: Sequence[Tensor], numel: int) -> Tensor:
    """Pieces one after the other in a flat tensor of ``numel`` elements, zeros at the end."""
    flat = torch.cat([p.reshape(-1) for p in pieces])
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def pack_into(pieces: Sequence[Tensor], flat: Tensor) -> Tensor:
    """``pack`` into a tensor that is there. A piece that was made in its place stays there."""
    offset = 0
    for piece in pieces:
        place = flat[offset : offset + piece.numel()]
        if piece.data_ptr() != place.data_ptr():
            place.view(piece.shape).copy_(piece)
        offset += piece.numel()
    flat[offset:].zero_()
    return flat


def checked(x: Tensor, info: Tensor, name: str, matrices: bool) -> Tensor:
    """``x`` as it is, where ``info``, the codes of an op on matrices (those of a batch are the first dims of ``x``), has no failure.

    Raises InputError on a failure. Compiled code, and tensors without data, have no values to look at; there what failed becomes nan.
    """
    if torch.compiler.is_compiling() or type(info) is not Tensor:
        return torch.where(info.reshape(*info.shape, *(1 for _ in x.shape[info.dim() :])) == 0, x, torch.nan)
    if bool(info.any()):
        code = info[info != 0].flatten()[0].item()
        raise InputError(
            f"{name} failed on {int((info != 0).sum())} of {info.numel()} matrices of this rank",
            why=f"the first code is {code}: a zero on the diagonal (not invertible), a leading part that isn't positive, or no convergence",
        )
    return x


def _rows_of(ids: Tensor, start: int, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert of a piece that begins at ``start``, and which rows are its own, in order."""
    found, order = (ids - start).sort(stable=True)
    bounds = torch.searchsorted(found, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)).tolist()
    for e in range(experts):
        if bounds[e] < bounds[e + 1]:
            yield e, order[bounds[e] : bounds[e + 1]]


def expert_mm(x: Tensor, weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Each row [t, k] by the matrix [e, k, n] of its expert [t]; zeros where the expert isn't in this piece, which begins at ``start``.

    Compiled code, and tensors without data, can't have sizes that depend on values; there every expert sees every row.
    """
    if torch.compiler.is_compiling() or type(ids) is not Tensor:
        return sum((torch.where((ids == start + e)[:, None], x @ weight[e], 0) for e in range(weight.shape[0])), start=_no_rows(x, weight))
    out = _no_rows(x, weight)
    for e, rows in _rows_of(ids, start, weight.shape[0]):
        out[rows] = x[rows] @ weight[e]
    return out


def _no_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros((x.shape[0], weight.shape[2]))


def expert_mm_backward(x: Tensor, weight: Tensor, ids: Tensor, grad: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The gradients of rows and matrices."""
    return expert_mm(grad, weight.mT, ids, start), expert_outer(x, grad, ids, weight.shape[0], start)


def expert_outer(a: Tensor, b: Tensor, ids: Tensor, experts: int, start: int) -> Tensor:
    """Sums of the products of each row [t, m] with its other row [t, n] by expert: [experts, m, n], of a piece that begins at ``start``."""
    if torch.compiler.is_compiling() or type(ids) is not Tensor:
        return torch.stack([a.mT @ torch.where((ids == start + e)[:, None], b, 0) for e in range(experts)])
    out = a.new_zeros((experts, a.shape[1], b.shape[1]))
    for e, rows in _rows_of(ids, start, experts):
        out[e] = a[rows].mT @ b[rows]
    return out


def microbatch(x: Tensor, dim: int, outer: int, count: int, index: int) -> Tensor:
    """Microbatch ``index`` of ``count``: ``dim`` is (outer, count, rest), of which one index of ``count`` is kept."""
    shape = tuple(x.shape)
    rest = shape[dim] // (outer * count)
    split = x.reshape(*shape[:dim], outer, count, rest, *shape[dim + 1 :]).select(dim + 1, index)
    return split.reshape(*shape[:dim], outer * rest, *shape[dim + 1 :]).contiguous()


def accumulate(total: Tensor | None, x: Tensor, combine: str) -> Tensor:
    """One more microbatch's share of a sum (or maximum, minimum) over microbatches."""
    if total is None:
        return x
    return total + x if combine == "sum" else torch.maximum(total, x) if combine == "max" else torch.minimum(total, x)


def sum_into(out: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
    """One more microbatch's share of a sum that lies in ``out``; the first where there is no total yet."""
    return out.copy_(x) if total is None else out.add_(x)
