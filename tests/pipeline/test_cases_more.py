"""Known faults of other kinds, on meshes with stages: odd parameters, masks, tables, flags, experts, and what few microbatches use."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.step import Step
from tests.cases.run import Net, adamw, equal, experts_loss, near, plain, ranks, train_and_evaluate, values

MESHES = ("pp=2", "pp=2,dp=2", "pp=2,tp=2")
TWO = Plan(microbatches=2, cuts=("b",))


def test_z03_scalar_parameter() -> None:
    """A temperature on either stage: trains, keeps its shape, and goes on from a saved state."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.b(torch.tanh(m.a(x) * m.first)) * m.second).pow(2).mean()

    model = Net(
        forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), first=nn.Parameter(torch.tensor(1.0)), second=nn.Parameter(torch.tensor(0.5))
    )
    x = torch.randn(4, 8)
    equal(model, x, MESHES, (TWO, Plan(microbatches=2, cuts=("b",), zero=0)), optimizer=adamw)

    def use(step: Step, rank: int) -> tuple[Any, Any, Any]:
        rows = step.shard(x.double())
        step(rows)
        kept = step.full_state_dict()
        loss = step(rows).item()
        step.load_state_dict(kept)
        assert step.full_state_dict()["second"].shape == kept["first"].shape == ()
        return kept, loss, step.evaluate([rows])[0]

    for kept, loss, again in ranks("pp=2,dp=2", model, use, optimizer=adamw, plan=TWO):
        still = copy.deepcopy(model).double()
        still.load_state_dict(kept)
        assert near(still(x.double()).detach(), loss) and near(still(x.double()).detach(), again)


@pytest.mark.parametrize("trainable", [True, False])
def test_z05_frozen_base_with_adapters(trainable: bool) -> None:
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + F.dropout(x, 0.0) @ self.a.T @ self.b.T)

    model = Net(lambda m, x: m.layers(x).pow(2).mean(), layers=nn.Sequential(*(Layer() for _ in range(4))))
    x, plan = torch.randn(4, 8), Plan(microbatches=2, cuts=("layers.2",))
    wanted = plain(model, x)[1]
    assert len(wanted) == 8

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named if p.requires_grad or not trainable], lr=0.01, weight_decay=0.1)

    equal(model, x, MESHES, (plan,), optimizer=optimizer)

    def use(step: Step, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        step(step.shard(x.double()))
        held = step.optimizer.state
        return step.gradients(), step.full_state_dict(), sum(t.numel() for s in held.values() for k, t in s.items() if k == "exp_avg")

    sizes = 0
    for gradients, state, size in ranks("pp=2", model, use, optimizer=optimizer, plan=plan):
        assert gradients.keys() == wanted.keys() and all(near(gradients[n], g) for n, g in wanted.items())
        assert all(torch.equal(state[n], t.double()) for n, t in model.state_dict().items() if "base" in n)
        sizes += size
    assert sizes == 4 * 32, "no state of the optimizer for the base"


def test_r01_masks_are_those_of_one_process() -> None:
    model = Net(lambda m, x: F.dropout(m.b(F.dropout(x * m.w, 0.5)), 0.5).sum(), w=nn.Parameter(torch.ones(64)), b=nn.Linear(64, 64))
    batch = torch.ones(8, 64)
    found = values("", model, batch)
    for mesh in MESHES:
        for count in (1, 2, 4):
            found += values(mesh, model, batch, plan=Plan(microbatches=count, cuts=("b",)))
    for loss, gradients in found:
        assert near(loss, found[0][0]) and all(near(gradients[n], g) for n, g in found[0][1].items())
    assert set(found[0][1]["b.bias"].unique().tolist()) <= {2.0 * k for k in range(9)}


def test_b04_tables_that_no_checkpoint_holds() -> None:
    """A table of positions, complex on the second stage, read by both."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * m.table
        h = m.a(x) * torch.cat([angle.cos(), angle.sin()], -1)
        turned = torch.view_as_real(torch.view_as_complex(m.b(h).unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle))
        return turned.pow(2).mean()

    model = Net(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.register_buffer("table", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
    equal(model, torch.randn(4, 6, 8), MESHES, (TWO,))


def test_x01_train_and_evaluate_in_turn() -> None:
    """Statistics can't be taken of microbatches, so there is one."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.dropout(m.drop(m.bn(m.a(x))), 0.3, m.training)
        return m.b(h * 2 if m.training else h).pow(2).mean()

    model = Net(forward, a=nn.Linear(8, 8), bn=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), b=nn.Linear(8, 8)).double()
    x, plan = torch.randn(4, 8, dtype=torch.float64), Plan(microbatches=1, cuts=("b",))

    for mesh in ("pp=2", "pp=2,dp=2"):
        ranks(mesh, model, partial(train_and_evaluate, x=x), plan=plan)
    equal(model, x, MESHES, (plan,))
    with pytest.raises(PlanError, match="can't be split into microbatches"):
        equal(model, x, ("pp=2",), (TWO,))


def test_m01_auxiliary_loss_of_experts() -> None:
    torch.manual_seed(0)

    up, down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))
    model = Net(experts_loss, router=nn.Linear(8, 4, bias=False), up=up, down=down, head=nn.Linear(8, 5))
    batch = (torch.randn(8, 8), torch.randint(5, (8,)))
    equal(model, batch, MESHES, (Plan(microbatches=1, cuts=("head",)),))
    with pytest.raises(PlanError, match="can't be split into microbatches"):
        equal(model, batch, ("pp=2",), (Plan(microbatches=2, cuts=("head",)),))


def test_z09_a_head_that_only_the_last_microbatch_uses() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, use: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        return torch.where(use[:, None], m.b(h), m.c(h)).pow(2).sum(-1).mean()

    model = Net(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 4), c=nn.Linear(8, 4))
    batch = (torch.randn(8, 8), torch.arange(8) >= 6)
    wanted_loss, wanted = plain(model, batch)
    assert all(wanted[n].any() for n in ("b.weight", "c.weight"))
    for mesh in ("dp=2", *MESHES):
        cuts = ("b",) if "pp" in mesh else None
        for loss, gradients in values(mesh, model, batch, plan=Plan(microbatches=4, cuts=cuts)):
            assert near(loss, wanted_loss) and all(near(gradients[n], g) for n, g in wanted.items())
        equal(model, batch, (mesh,), (Plan(microbatches=4, cuts=cuts), Plan(microbatches=2, cuts=cuts)), optimizer=adamw)
