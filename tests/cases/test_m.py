"""Mixture of experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from tests.cases.run import MB2, Net, equal, experts_loss, values


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    up, down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))
    return Net(experts_loss, router=nn.Linear(8, 4, bias=False), up=up, down=down, head=nn.Linear(8, 5))


def test_m01_auxiliary_loss_of_the_global_batch(model: nn.Module) -> None:
    batch = (torch.randn(8, 8), torch.randint(5, (8,)))
    pins = (None, Plan(shard={"up": "dim0@tp", "down": "dim0@tp"}), Plan(shard={"up": "dim2@tp", "down": "dim1@tp"}))
    equal(model, batch, ("dp=2,tp=2",), pins)
    with pytest.raises(PlanError, match="can't be split into microbatches"):
        equal(model, batch, ("dp=2",), (MB2,))


def test_m01_expert_without_tokens(model: nn.Module) -> None:
    with torch.no_grad():
        model.router.weight[3] = -100.0
    batch = (torch.rand(8, 8), torch.randint(5, (8,)))
    for _, gradients in values("dp=2", model, batch):
        assert not gradients["up"][3].any() and gradients["up"][0].isfinite().all() and gradients["router.weight"].isfinite().all()
    equal(model, batch, ("dp=2",))
