"""What each collective must give, written plainly, and the inputs to try it on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from autopar.layout.mesh import Mesh
from autopar.runtime.comm import Comm

FOLDS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
SHAPE = (4, 8, 4)
MESHES = {
    "": [()],
    "dp=2": [("dp",), ("tp",)],
    "dp=2,tp=2": [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")],
    "tp=4": [("tp",)],
    "dp=2,cp=1,tp=2": [("cp",), ("dp", "cp")],
}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A rank's input, the same in every process. Values of very different size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        scale = torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64) * 2)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 30, shape, generator=generator).to(dtype)


def total(parts: list[Tensor], op: str) -> Tensor:
    """Reduced first to last; short floats in float32, rounded once."""
    if op == "sum" and parts[0].dtype in (torch.bfloat16, torch.float16):
        return functools.reduce(torch.add, [p.float() for p in parts]).to(parts[0].dtype)
    return functools.reduce(FOLDS[op], parts)


def expected(kind: str, inputs: list[Tensor], mesh: Mesh, rank: int, axes: tuple[str, ...], dims: tuple[int, ...], op: str) -> Tensor:
    """The result on ``rank`` from every rank's input."""
    ranks, index = mesh.group(rank, axes), mesh.index(rank, axes)
    parts, n = [inputs[r] for r in ranks], len(ranks)
    if kind == "all_reduce":
        return total(parts, op)
    if kind == "all_gather":
        return torch.cat(parts, dims[0])
    if kind == "shift":
        return parts[(index - 1) % n].clone()
    if kind == "mirror":
        return torch.cat([parts[index].chunk(2, dims[0])[0], parts[n - 1 - index].chunk(2, dims[0])[1]], dims[0])
    pieces = [p.chunk(n, dims[0])[index] for p in parts]
    return total(pieces, op) if kind == "reduce_scatter" else torch.cat(pieces, dims[1])


def call(comm: Comm, kind: str, x: Tensor, axes: tuple[str, ...], dims: tuple[int, ...], op: str) -> Tensor:
    """Runs one collective to its end."""
    if kind == "all_reduce":
        return comm.all_reduce(x, axes, op, site="s").wait()
    if kind == "all_gather":
        return comm.all_gather(x, axes, dims[0], site="s").wait()
    if kind == "reduce_scatter":
        return comm.reduce_scatter(x, axes, dims[0], op, site="s").wait()
    if kind == "shift":
        return comm.shift(x, axes, site="s").wait()
    if kind == "mirror":
        return comm.mirror(x, axes, dims[0], site="s").wait()
    return comm.all_to_all(x, axes, dims[0], dims[1], site="s").wait()


def same(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def cases(every_dtype: bool = True) -> list[tuple[str, tuple[int, ...], str, torch.dtype]]:
    """(kind, dims, op, dtype) of everything that SHAPE allows."""
    out = []
    for dtype in [*FLOATS, *INTS, torch.bool] if every_dtype else [torch.float64, torch.bfloat16, torch.int32, torch.bool]:
        for op in ("max", "min") if dtype == torch.bool else ("sum", "max", "min"):
            out.append(("all_reduce", (), op, dtype))
            out += [("reduce_scatter", (dim,), op, dtype) for dim in (0, 1, -1)]
        out += [("all_gather", (dim,), "sum", dtype) for dim in (0, 1, -1)]
        out += [("shift", (), "sum", dtype), *(("mirror", (dim,), "sum", dtype) for dim in (0, 1, -1))]
        out += [("all_to_all", (a, b), "sum", dtype) for a in range(3) for b in range(3)]
    return out
