"""What a step gives on a mesh with stages, whatever its ranks hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.errors import InputError, PlanError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from tests.cases.run import DEFAULTS, Net, ranks


def chain(frozen: tuple[int, ...] = (), depth: int = 6) -> nn.Module:
    """Layers after each other, some frozen."""
    torch.manual_seed(0)

    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    model = Net(run, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))).double()
    for k in frozen:
        model.layers[k].requires_grad_(False)
    return model


ROWS = torch.linspace(-1, 1, 96, dtype=torch.float64).view(12, 8)


@pytest.mark.parametrize("frozen", [(0, 1, 2), (3, 4, 5), (0, 1, 2, 3), (2, 3, 4, 5)], ids=str)
def test_ranks_may_hold_different_numbers_of_buckets(frozen: tuple[int, ...]) -> None:
    """One or no bucket on a stage, several on the other."""
    plan = Plan(microbatches=2, cuts=("layers.3",), buckets=600)
    report = verify(chain(frozen), Mesh.parse("pp=2,dp=2"), ROWS, plan=plan)
    assert report.ok, report.table()


def test_a_change_by_some_ranks_of_a_stage_is_an_error() -> None:
    def changed(step: Step, rank: int) -> str:
        rows = step.shard(ROWS)
        step(rows)
        with torch.no_grad():
            if rank in (2, 3):  # all of the second stage
                step.parameters()[0].mul_(0.5)
        step(rows)
        with torch.no_grad():
            if rank == 3:
                step.parameters()[0].mul_(0.5)
        with pytest.raises(InputError) as caught:
            step(rows)
        return str(caught.value)

    plan = Plan(microbatches=2, cuts=("layers.4",), buckets=600)
    texts = ranks("pp=2,dp=2", chain(), changed, plan=plan, optimizer=partial(_sgd, lr=0.1))
    assert len(set(texts)) == 1 and "rank 3 has another changes to parameters than rank 2" in texts[0], texts


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2,dp=2"])
def test_parameters_may_be_written_to_between_steps(mesh: str) -> None:
    """Though what gathers them for the next step is under way."""

    def run(step: Step, _: int) -> dict[str, Tensor]:
        step(step.shard(ROWS))
        before = step.full_state_dict()
        with torch.no_grad():
            for part in step.parameters():
                part.mul_(0.5)
        step(step.shard(ROWS))
        return {n: t * 0.5 - 0.1 * step.gradients()[n] - step.full_state_dict()[n] for n, t in before.items()}

    for left in ranks(mesh, chain(), run, plan=Plan(microbatches=2, buckets=600), optimizer=partial(_sgd, lr=0.1)):
        assert max(t.abs().max().item() for t in left.values()) < 1e-15


def test_gradients_of_a_step_without_any() -> None:
    """A rank whose stages train nothing takes part; before the first step there are none on any."""

    def run(step: Step, _: int) -> list[str]:
        step.compile(step.shard(ROWS))
        with pytest.raises(InputError, match="call the step first"):
            step.gradients()
        step(step.shard(ROWS))
        return sorted(step.gradients())

    found = ranks("pp=2", chain((0, 1, 2)), run, plan=Plan(cuts=("layers.3",)))
    assert found == [[f"layers.{k}.{n}" for k in (3, 4, 5) for n in ("bias", "weight")]] * 2


@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev"])
def test_schedules_of_two_stages_a_rank(schedule: str, microbatches: int) -> None:
    """Among them one that runs some backwards whole and others in two parts."""
    report = verify(chain(), Mesh.parse("pp=2"), ROWS, plan=Plan(microbatches=microbatches, schedule=schedule))
    assert report.ok, report.table()


def _sgd(named: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=lr)


def test_a_rank_shows_the_stages_that_it_holds() -> None:
    def run(step: Step, rank: int) -> list[str]:
        step.compile(step.shard(ROWS))
        held, other = ((0, 3), 1) if rank == 0 else ((1, 2), 3)
        assert step.source() == step.source(held[0]) and step.graph() == step.graph(held[0])
        assert [f"stage {s} of 4" in step.source(s) for s in held] == [True, True]
        assert "backward" in step.graph(held[1]) and step.graph(held[0]) != step.graph(held[1])
        with pytest.raises(InputError, match=f"stage {other} is not on this rank, which holds {held[0]}, {held[1]}"):
            step.graph(other)
        with pytest.raises(InputError, match="there are 4 stages"):
            step.source(4)
        return [step.source(s) for s in held]

    first, second = ranks("pp=2", chain(), run, plan=Plan(microbatches=2, schedule="zb-v"))
    assert len({*first, *second}) == 4


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("cuts", [("b",), ("c",), ("d",)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_losses_of_several_stages_add_up(schedule: str, cuts: tuple[str, ...], microbatches: int) -> None:
    """Each a mean over the batch; what they give together is kept in buffers, too: of sums, and after the sums."""

    def run(m: Any, x: Tensor) -> Tensor:
        a = m.a(x).tanh()
        first = a.square().mean()
        b = m.b(a).tanh()
        second = (b - 1).square().mean()
        d = m.d(m.c(b).tanh())
        m.kept = (first + 2 * second).detach()
        m.most = torch.maximum(first, second).detach()
        return d.square().mean() + 0.1 * first + 0.2 * second

    torch.manual_seed(0)
    model = Net(run, **{n: nn.Linear(8, 8) for n in "abcd"}, kept=torch.zeros(()), most=torch.zeros(()))
    plan = Plan(microbatches=microbatches, cuts=cuts, schedule=schedule)
    report = verify(model, Mesh.parse("pp=2,dp=2"), ROWS, plan=plan)
    assert report.ok, report.table()


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_weights_of_rank_0_reach_every_stage(mesh: str) -> None:
    """Layers of one shape, so that none may be taken for another."""
    parsed = Mesh.parse(mesh)

    def rank(comm: Comm) -> dict[str, Tensor]:
        model = chain((0, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(comm.rank)
        step = Step(model, parsed, comm, make_options(**{**DEFAULTS, "init": "broadcast", "plan": Plan(cuts=("layers.3",))}))
        step.compile(step.shard(ROWS))
        return step.full_state_dict()

    wanted = chain().state_dict()
    for found in run_simulated(parsed, rank):
        assert all(torch.equal(found[n], t) for n, t in wanted.items())


@pytest.mark.parametrize("path", ["nothing", "", "places"])
def test_a_cut_where_no_stage_can_begin(path: str) -> None:
    """A path of no module, the model itself, a module whose work is the same for all samples."""
    model = Net(
        lambda m, x: m.b(m.a(x) + m.places(torch.arange(1))).square().mean(),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
        places=nn.Embedding(8, 8),
    )
    with pytest.raises(PlanError, match=f"no stage can begin at '{path}'") as caught:
        verify(model, Mesh.parse("pp=2"), ROWS, plan=Plan(microbatches=2, cuts=(path,)))
    assert ("same for all samples" in caught.value.why) == (path == "places")
