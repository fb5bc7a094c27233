"""Data ranks cut the dim that the user named, also where another dim has the same size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.layout.mesh import Mesh


class TimeFirst(nn.Module):
    """x is [time, batch, features], y [batch, time]."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.a(x.transpose(0, 1)).flatten(0, 1), y.flatten())


class PerTime(nn.Module):
    """v has one number a time step: no samples, but as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        return (self.a(x) * v[None, :, None]).pow(2).mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("dims", [0, {"x": 1, "y": 0}])
def test_batch_and_time_of_one_size(mesh: str, dims: object) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 6, 8), "y": torch.randint(0, 5, (6, 6))}
    report = autopar.verify(TimeFirst(), Mesh.parse(mesh), batch, batch_dim=dims)
    assert report.ok, report.table()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dims", [0, {"x": 0, "v": None}])
def test_a_leaf_as_long_as_the_batch(dims: object, microbatches: int) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8, 4), "v": torch.randn(8)}
    plan = autopar.Plan(microbatches=microbatches)
    for mesh in (Mesh(dp=2), Mesh(dp=2, tp=2)):
        report = autopar.verify(PerTime(), mesh, batch, batch_dim=dims, plan=plan)
        assert report.ok, report.table()
