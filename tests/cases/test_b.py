"""Buffers and normalisation statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.step import Step
from tests.cases.run import Net, equal, near, ranks


def test_b02_statistics_written_twice_in_a_step() -> None:
    torch.manual_seed(0)

    def forward(m: Any, real: Tensor, fake: Tensor) -> Tensor:
        a, b = (m.l(m.bn(m.conv(x)).relu().mean((2, 3))) for x in (real, fake))
        return F.softplus(-a).mean() + F.softplus(b).mean()

    model = Net(forward, conv=nn.Conv2d(2, 4, 3, padding=1), bn=nn.BatchNorm2d(4), l=nn.Linear(4, 1))
    equal(model, (torch.randn(4, 2, 4, 4), torch.randn(4, 2, 4, 4)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("f", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * self.f
        return (self.l(x) * torch.cat([angle.cos(), angle.sin()], -1)).pow(2).mean()


def test_b04_buffers_that_no_checkpoint_holds() -> None:
    torch.manual_seed(0)
    equal(Table(), torch.randn(4, 6, 8), ("dp=2", "tp=2"))
    whole = Table().double()
    with torch.device("meta"):
        meta = Table()

    def loaded(step: Step, rank: int) -> float:
        step.load_state_dict(whole.state_dict())
        return step(step.shard(torch.ones(4, 6, 8, dtype=torch.float64))).item()

    with pytest.raises(AutoparError, match="^f is on meta"):
        ranks("dp=2", meta, loaded)


def test_b04_init_that_leaves_a_buffer_out() -> None:
    with torch.device("meta"):
        meta = Table()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)

    def used(step: Step, rank: int) -> Tensor:
        step(step.shard(torch.ones(4, 6, 8, dtype=torch.float64)))
        return step.module().f.clone()

    try:
        found = ranks("dp=2", meta, used, init=fill)
    except AutoparError as error:
        assert "f" in str(error).split()
    else:
        assert all(near(f, Table().f, 1e-6) for f in found)


def test_b04_a_state_for_a_model_on_meta_and_init_for_what_no_state_holds() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(4.0, dtype=torch.float64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a(x) * self.table).sum()

    torch.manual_seed(0)
    real = Table().double()
    with torch.device("meta"):
        meta = Table().double()

    def fill(module: nn.Module) -> None:
        with torch.no_grad():
            module.table.copy_(torch.arange(4.0))

    x = torch.randn(4, 4, dtype=torch.float64)
    step = autopar.parallelize(meta, autopar.Mesh(), init=fill)
    step.load_state_dict(real.state_dict())
    assert torch.allclose(step(x), real(x).detach(), rtol=1e-12)


def test_b04_complex_tables() -> None:
    """A table of rotations in complex64, which no checkpoint holds."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)
            angles = torch.outer(torch.arange(6.0), 1 / 100 ** (torch.arange(4) / 4))
            self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(self.l(x).unflatten(-1, (4, 2)))
            return torch.view_as_real(pairs * self.table).flatten(-2).pow(3).mean()

    torch.manual_seed(0)
    table, x = Rotated().table, torch.randn(4, 6, 8)

    def used(step: Step, rank: int) -> Tensor:
        step(step.shard(x))
        return step.module().table

    for found in ranks("dp=2", Rotated(), used, precision="fp32"):
        assert found.dtype == torch.complex64 and torch.equal(found, table)
    torch.manual_seed(0)
    equal(Rotated(), x, ("dp=2", "tp=2"), precision="fp32")
    equal(Rotated(), x, ("dp=2", "tp=2"))
