"""Gradient norm and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.plan.plan import Plan
from tests.cases.run import MB2, SEQUENCE, Net, equal, near, plain, values


@pytest.mark.parametrize("plan", [None, MB2, SEQUENCE], ids=str)
def test_n04_every_sharded_parameter_counts(plan: Plan | None) -> None:
    torch.manual_seed(0)

    def forward(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 2).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * m.scale + m.bias.view(4, 1, 1) * torch.arange(s)
        return ((m.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, 8)) + m.loose - y) ** 2).mean()

    model = Net(
        forward, qkv=nn.Linear(8, 24), o=nn.Linear(8, 8), scale=nn.Parameter(torch.rand(4, 1, 1)), bias=nn.Parameter(torch.randn(4)),
        loose=nn.Parameter(torch.randn(1, 1, 8)),
    )  # fmt: skip
    equal(model, (torch.randn(4, 5, 8), torch.randn(4, 5, 8)), ("dp=2", "tp=2", "dp=2,tp=2"), (plan,), clip_grad_norm=0.05)


@pytest.mark.parametrize("plan", [None, MB2, SEQUENCE], ids=str)
def test_n04_separate_projections(plan: Plan | None) -> None:
    torch.manual_seed(0)

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, 4, 2).transpose(1, 2) for part in (m.q, m.k, m.v))
        scores = q @ k.transpose(-1, -2) * m.scale + m.bias.view(4, 1, 1) * torch.arange(s)
        return (m.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, 8)) + m.loose).pow(2).mean()

    parts = {name: nn.Linear(8, 8) for name in "qkvo"}
    scale, bias, loose = (nn.Parameter(torch.rand(*shape)) for shape in ((4, 1, 1), (4,), (1, 1, 8)))
    model = Net(forward, **parts, scale=scale, bias=bias, loose=loose)
    equal(model, torch.randn(4, 5, 8), ("dp=2", "tp=2", "dp=2,tp=2"), (plan,), clip_grad_norm=0.05)


def test_n06_norm_max_and_min_of_a_pending_sum() -> None:
    # the input axis is cut: partial values [3, 0] on one rank and [0, 4] on the other
    weight = nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    pin = Plan(shard={"w": "dim1@tp"})
    kinds = {"norm": (lambda z: z.norm(), 5.0), "max": (lambda z: z.abs().max(), 4.0), "min": (lambda z: z.min(), 3.0)}
    for function, right in kinds.values():
        model = Net(lambda m, x, function=function: function(x @ m.w.T), w=weight)
        batch = torch.ones(1, 2)
        want = plain(model, batch)
        for loss, gradients in values("tp=2", model, batch, plan=pin):
            assert loss.item() == right and near(gradients["w"], want[1]["w"])
