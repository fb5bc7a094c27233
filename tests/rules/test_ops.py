"""The ops of runtime.ops: pieces make the whole, adjoints are adjoints, and they compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime import ops
from autopar.runtime.random import step_key


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_embedding_of_pieces_sums_to_the_whole() -> None:
    table, index = randn(8, 3), torch.tensor([[0, 7, 3], [4, 4, 1]])
    parts = [ops.embedding(table[s : s + 2], index, s) for s in range(0, 8, 2)]
    assert torch.equal(sum(parts), torch.nn.functional.embedding(index, table))
    assert torch.equal(ops.embedding(table, index, 0), torch.nn.functional.embedding(index, table))


@pytest.mark.parametrize("padding", [-1, 0, 4])
def test_embedding_backward_is_torchs(padding: int) -> None:
    grad, index = randn(2, 3, 5), torch.tensor([[0, 7, 3], [4, 4, 0]])
    want = torch.ops.aten.embedding_dense_backward.default(grad, index, 8, padding, False)
    got = torch.cat([ops.embedding_backward(grad, index, padding, 2, s) for s in range(0, 8, 2)])
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    total = (before := randn(2, 5, seed=1)).clone()
    assert ops.embedding_backward(grad, index, padding, 2, 4, total=total) is total
    torch.testing.assert_close(total, before + want[4:6], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pick_and_unpick(dim: int) -> None:
    x = randn(6, 6, 6)
    index = torch.randint(0, 6, (6, 6), generator=torch.Generator().manual_seed(1))
    index[0, 0] = -100  # a label to be ignored is in no piece
    inside = index >= 0
    want = torch.where(inside, x.gather(dim, index.clamp(min=0).unsqueeze(dim)).squeeze(dim), 0)
    assert torch.equal(sum(ops.pick(piece, index, dim, 2 * k) for k, piece in enumerate(x.split(2, dim))), want)
    grad = randn(6, 6, seed=2)
    back = torch.cat([ops.unpick(grad, index, dim, 2, s) for s in (0, 2, 4)], dim)
    # <pick(x), grad> = <x, unpick(grad)>
    torch.testing.assert_close((want * grad).sum(), (x * back).sum(), rtol=1e-13, atol=1e-13)
    assert back.dtype == grad.dtype and back.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_rounds_as_torch_does(dtype: torch.dtype) -> None:
    x, grad = randn(1000).to(dtype).requires_grad_(), randn(1000, seed=3).to(dtype)
    y = torch.nn.functional.dropout(x, 0.3)
    y.backward(grad)
    assert torch.equal(ops.dropout(x, y != 0, 1 / 0.7), y)
    assert torch.equal(ops.dropout(grad, y != 0, 1 / 0.7), x.grad)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float32])
def test_arange_of_pieces(dtype: torch.dtype) -> None:
    whole = torch.arange(3, 27, 2, dtype=dtype)
    assert torch.equal(torch.cat([ops.arange(4, s, 3, 2, dtype=dtype) for s in (0, 4, 8)]), whole)


def test_triangles_of_pieces() -> None:
    x = randn(6, 8)
    for name in ("tril", "triu"):
        for diagonal in (-1, 0, 2):
            rows = [torch.cat([getattr(ops, name)(x[r : r + 2, c : c + 4], diagonal, r, c) for c in (0, 4)], 1) for r in (0, 2, 4)]
            assert torch.equal(torch.cat(rows), getattr(x, name)(diagonal))


def test_rows_by_the_matrix_of_their_expert() -> None:
    x, weight, ids, grad = randn(7, 3), randn(4, 3, 5, seed=1), torch.tensor([3, 0, 0, 2, 3, 3, 0]), randn(7, 5, seed=2)
    want = torch.stack([row @ weight[e] for row, e in zip(x, ids)])
    torch.testing.assert_close(ops.expert_mm(x, weight, ids, 0), want, rtol=1e-13, atol=1e-14)
    parts = [ops.expert_mm(x, weight[s : s + 2], ids, s) for s in (0, 2)]
    torch.testing.assert_close(sum(parts), want, rtol=1e-13, atol=1e-14)
    x.requires_grad_(), weight.requires_grad_()
    torch.stack([row @ weight[e] for row, e in zip(x, ids)]).backward(grad)
    found = ops.expert_mm_backward(x.detach(), weight.detach(), ids, grad, 0)
    for got, expected in zip(found, (x.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-14)
    assert not found[1][1].any()  # an expert without rows
    halves = [ops.expert_outer(x.detach(), grad, ids, 2, s) for s in (0, 2)]
    torch.testing.assert_close(torch.cat(halves), weight.grad, rtol=1e-13, atol=1e-14)


def test_checked_lets_through_and_raises() -> None:
    x, good = randn(3, 2, 2), torch.zeros(3, dtype=torch.int32)
    assert ops.checked(x, good, "linalg.inv", True) is x
    with pytest.raises(InputError, match=r"linalg.inv failed on 1 of 3 matrices of this rank\n  why: the first code is 2"):
        ops.checked(x, torch.tensor([0, 2, 0], dtype=torch.int32), "linalg.inv", True)


def test_grouped_mm_is_torchs() -> None:
    ends = torch.tensor([4, 4, 16], dtype=torch.int32)  # an empty group among them
    for a, b in ((randn(16, 8), randn(3, 8, 4)), (randn(8, 16), randn(16, 4)), (randn(3, 4, 8), randn(8, 16))):
        a, b = a.float(), b.float()
        torch.testing.assert_close(ops.grouped_mm(a, b, ends), torch._grouped_mm(a, b, offs=ends))


KEY = step_key(3, 4)
INDEX = torch.tensor([0, 5, 9])
ATOMS = ((4, 6), (0, 6), (12, 1))
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "expert_mm": (ops.expert_mm, (randn(3, 2), randn(4, 2, 5), torch.tensor([0, 3, 0]), 0)),
    "expert_outer": (ops.expert_outer, (randn(3, 2), randn(3, 5), torch.tensor([0, 3, 0]), 4, 0)),
    "checked": (ops.checked, (randn(3, 2, 2), torch.zeros(3, dtype=torch.int32), "linalg.inv", True)),
    "embedding": (ops.embedding, (randn(4, 3), INDEX, 4)),
    "embedding_backward": (ops.embedding_backward, (randn(3, 4), INDEX, -1, 4, 4)),
    "grouped_mm": (ops.grouped_mm, (randn(5, 3), randn(2, 3, 4), torch.tensor([2, 5], dtype=torch.int32))),
    "pick": (ops.pick, (randn(3, 4), INDEX, 1, 4)),
    "unpick": (ops.unpick, (randn(3), INDEX, 1, 4, 4)),
    "dropout": (ops.dropout, (randn(3), INDEX > 4, 2.0)),
    "keep": (ops.keep, (KEY, 7, 0.5, (4, 6), *ATOMS)),
    "uniform": (ops.uniform, (KEY, 7, (4, 6), *ATOMS, torch.float32)),
    "normal": (ops.normal, (KEY, 7, (4, 6), *ATOMS, torch.float32)),
    "randint": (ops.randint, (KEY, 7, 2, 9, (4, 6), *ATOMS, torch.int64)),
    "bernoulli": (ops.bernoulli, (KEY, 7, randn(4, 6).sigmoid(), *ATOMS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_ops_are_traced_without_a_break(name: str) -> None:
    op, args = CALLS[name]
    torch.compiler.reset()
    assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(*args), op(*args))


def test_atoms_must_agree_in_number() -> None:
    with pytest.raises(Exception, match="2 sizes, 1 starts"):
        ops.keep(KEY, 7, 0.5, (4, 6), (4, 6), (0,), (6, 1))
