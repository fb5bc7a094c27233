"""Failures of one rank on simulated ranks; ``tests/procs`` has the ends of real processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.step import Step
from tests.cases.run import Net, ranks

Batch = tuple[Tensor, Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)), y), e=nn.Embedding(16, 8), l=nn.Linear(8, 16))


def _run(mesh: str, third: str) -> list[list[float]]:
    """Three equal steps on every rank, but for what rank 1 does in the third."""
    batch = (torch.arange(8), torch.arange(8).flip(0))

    def run(step: Step, rank: int) -> list[float]:
        rows: Batch = step.shard(batch)
        losses = []
        for i in range(3):
            if rank == 1 and i == 2:
                if third == "loader":
                    raise ValueError("planted in the data loader")
                changed = {"id": (rows[0] + 100, rows[1]), "label": (rows[0], rows[1] + 100), "rows": (rows[0][:2], rows[1][:2]),
                           "values": (rows[0] + 1, rows[1]), "wide": (rows[0][:, None], rows[1])}  # fmt: skip
                rows = changed[third]
            losses.append(step(rows).item())
        return losses

    return ranks(mesh, _model(), run, precision=None)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_f01_error_in_the_loader(mesh: str) -> None:
    with pytest.raises(ValueError, match="planted in the data loader"):
        _run(mesh, "loader")


def test_f01_id_outside_the_vocabulary() -> None:
    with pytest.raises(InputError, match="out of range"):
        _run("dp=2", "id")


@pytest.mark.parametrize(("mesh", "what"), [("tp=2", "id"), ("dp=2", "label"), ("tp=2", "label")])
def test_f01_outside_a_sharded_vocabulary(mesh: str, what: str) -> None:
    with pytest.raises((IndexError, InputError)):
        _run(mesh, what)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_f01_other_shape_on_one_rank(mesh: str) -> None:
    with pytest.raises(InputError, match="batch shapes"):
        _run(mesh, "wide")


def test_f01_other_number_of_rows() -> None:
    """Data ranks may hold fewer (``test_rows.py``); ranks of the same data may not."""
    assert all(len(losses) == 3 for losses in _run("dp=2", "rows"))
    with pytest.raises(InputError, match="other rows"):
        _run("tp=2", "rows")


def test_f01_other_rows_on_a_rank_of_the_same_data() -> None:
    with pytest.raises(InputError):
        _run("tp=2", "values")
