"""Mixture of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from tests.cases.run import MB2, Net, equal, values


def _moe(m: Any, x: Tensor, y: Tensor) -> Tensor:
    p = m.router(x).softmax(-1)
    best, index = p.topk(2, -1)
    gate = torch.zeros_like(p).scatter(-1, index, best / best.sum(-1, keepdim=True))
    experts = torch.einsum("tef,efd->ted", torch.einsum("td,edf->tef", x, m.up).relu(), m.down)
    share = (gate > 0).to(x.dtype).mean(0)
    return F.cross_entropy(m.head(torch.einsum("te,ted->td", gate, experts)), y) + 0.1 * 4 * (share * p.mean(0)).sum()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    up, down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))
    return Net(_moe, router=nn.Linear(8, 4, bias=False), up=up, down=down, head=nn.Linear(8, 5))


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
