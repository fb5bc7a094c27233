"""Random numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.step import Step
from tests.cases.run import MB2, Net, equal, near, ranks, values


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


def test_r03_the_users_own_recompute_region() -> None:
    """torch's checkpoint runs a region again in the backward: with the masks that it had, one region inside another too."""
    torch.manual_seed(0)

    def region(m: Any, x: Tensor, deep: bool = True) -> Tensor:
        h = m.d(torch.tanh(m.a(x)))
        return checkpoint(region, m, h, False, use_reentrant=False) if deep else F.dropout(h, 0.3)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.dropout(x, 0.2)
        for _ in range(2):
            h = h + checkpoint(region, m, m.d(h), use_reentrant=False)
        return m.d(h).pow(2).mean()

    equal(Net(forward, a=nn.Linear(8, 8), d=nn.Dropout(0.5)), torch.randn(4, 8), plans=(None, MB2))


def test_r03_zeros_of_the_gradient_are_zeros_of_the_output() -> None:
    w = nn.Parameter(torch.ones(1000))
    model = Net(lambda m, x: checkpoint(lambda t: F.dropout(t * m.w, 0.5), x, use_reentrant=False).sum(), w=w)
    ((loss, gradients), *_) = found = values("dp=2", model, torch.ones(2, 1000))
    kept = values("dp=2", Net(lambda m, x: F.dropout(x * m.w, 0.5).sum(), w=nn.Parameter(torch.ones(1000))), torch.ones(2, 1000))
    assert set(gradients["w"].tolist()) == {0.0, 2.0, 4.0} and gradients["w"].sum() == loss
    assert all(torch.equal(g["w"], k["w"]) for (_, g), (_, k) in zip(found, kept, strict=True))


def test_r04_side_effects_of_a_recompute_region_happen_once() -> None:
    torch.manual_seed(0)

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.bn(self.l(x)).relu()

    block = Counted().double()
    model, plain = (Net(f, block=copy.deepcopy(block)) for f in (
        lambda m, x: checkpoint(m.block, x, use_reentrant=False).pow(2).mean(), lambda m, x: m.block(x).pow(2).mean()))  # fmt: skip
    x = torch.randn(4, 6, dtype=torch.float64)

    def run(step: Step, rank: int) -> dict[str, Tensor]:
        for _ in range(3):
            step(step.shard(x))
        return step.full_state_dict()

    for _ in range(3):  # torch itself would count the block twice in every step
        plain(x)
    for state in ranks("dp=2", model, run):
        assert state["block.count"] == 3 and state["block.bn.num_batches_tracked"] == 3
        assert all(near(state[name], t) for name, t in plain.state_dict().items())


def test_r04_a_router_with_ties_chooses_alike_when_it_runs_again() -> None:
    """Two experts score the same: the recomputed choice is the first one."""
    torch.manual_seed(0)

    def routed(m: Any, x: Tensor) -> Tensor:
        score = m.router(x)
        gate = F.one_hot(torch.cat([score, score], -1).argmax(-1), 4).to(x.dtype)
        return torch.einsum("te,ted->td", gate, torch.einsum("td,edf->tef", x, m.experts))

    model = Net(
        lambda m, x: checkpoint(routed, m, x, use_reentrant=False).pow(2).mean(),
        router=nn.Linear(6, 2), experts=nn.Parameter(torch.randn(4, 6, 6)),
    )  # fmt: skip
    equal(model, torch.randn(8, 6), ("dp=2", "tp=2"))
    for _, gradients in values("dp=2", model, torch.randn(8, 6)):
        assert not gradients["experts"][2:].any() and gradients["experts"][:2].any()
