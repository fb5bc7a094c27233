"""Random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.run import MB2, Net, equal, near, values


def test_r01_one_mask_on_every_mesh() -> None:
    model = Net(lambda m, x: F.dropout(x * m.w, 0.5).sum(), w=nn.Parameter(torch.ones(1000)))
    batch, found = torch.ones(4, 1000), []
    for mesh in ("", "dp=2", "tp=2", "dp=2,tp=2"):
        for plan in ("auto", MB2):
            found += values(mesh, model, batch, plan=plan)
    for loss, gradients in found:
        assert near(loss, found[0][0]) and near(gradients["w"], found[0][1]["w"])
    assert set(found[0][1]["w"].tolist()) <= {0.0, 2.0, 4.0, 6.0, 8.0} and 0.45 < found[0][0].item() / 8000 < 0.55
    again, other = (values("dp=2", model, batch, seed=seed)[0] for seed in (0, 1))
    assert torch.equal(again[1]["w"], found[0][1]["w"]) and not torch.equal(other[1]["w"], again[1]["w"])


def test_r01_dropout_after_sharded_and_replicated_activations() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.dropout(m.b(m.d(m.a(x))), 0.3) + torch.rand_like(x) + torch.randn(8)
        return (h * torch.bernoulli(torch.full_like(h, 0.5))).pow(2).mean()

    equal(Net(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 8), d=nn.Dropout(0.5)), torch.randn(4, 8), plans=(None, MB2))
