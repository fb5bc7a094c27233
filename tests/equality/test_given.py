"""Gradients that don't depend on the batch: a step gives them away, and whoever has them may write to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step


class Constant(nn.Module):
    """The gradient of ``offset`` is one, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.offset = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean() + self.offset.sum()


BATCH = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,cp=2", "pp=2", "pp=2,dp=2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_leaves_the_next_step_alone(mesh: str, zero: int) -> None:
    torch.manual_seed(0)
    plan = Plan(zero=zero, microbatches=2 if "pp" in mesh or zero == 2 else 1)
    report = verify(Constant(), Mesh.parse(mesh), BATCH, plan=plan, clip_grad_norm=0.2)
    assert report.ok, report.table()


def test_a_user_may_write_to_gradients() -> None:
    options = make_options(None, None, Plan(), None, 0, "check", None, 0, "eager", ())
    share: dict[Any, Any] = {}
    model = Constant()

    def rank(comm: Comm) -> list[Tensor]:
        step, found = Step(copy.deepcopy(model), comm.mesh, comm, options, share), []
        for _ in range(3):
            step(step.shard(BATCH))
            found.append(step.gradients()["offset"].clone())
            for grad in step._grads or ():  # noqa: SLF001 - what a hook of an optimizer gets
                grad.mul_(0.5)
        return found

    for found in run_simulated(Mesh(dp=2), rank):
        assert all(torch.equal(g, torch.ones(3)) for g in found)
