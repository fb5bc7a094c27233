"""``Plan(schedule="search")``: a schedule for the model's own stages, no slower by prediction than the named ones of as much memory."""

from __future__ import annotations

import pytest
import torch

from autopar.api import make_options, verify
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.stages import node_seconds
from autopar.programs import compile_step
from autopar.schedule.simulate import simulate
from autopar.schedule.validate import peak_live
from models import gpt, unet

BATCH = gpt.batch(16, torch.Generator().manual_seed(1))


def compiled(mesh: Mesh, plan: Plan) -> Compiled:
    torch.manual_seed(0)
    tree, tensors = take_batch(BATCH)
    return compile_step(gpt.build(layers=6), mesh, make_options(None, None, plan, None, 0, "check", None, 0, "eager", ()), tree, tensors)


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2"])
def test_equal(mesh: str) -> None:
    for model, batch in ((gpt.build(dropout=0.2), BATCH), (unet.build(), unet.batch(16, torch.Generator().manual_seed(1)))):
        report = verify(model, Mesh.parse(mesh), batch, plan=Plan(schedule="search", microbatches=4))
        assert report.ok, report.table()


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_is_the_best_of_its_memory(ranks: int) -> None:
    made = compiled(Mesh(pp=ranks), Plan(schedule="search", microbatches=8))
    assert made.pipeline is not None
    schedule = made.pipeline.schedule
    assert schedule.name == "searched" and {a.kind for a in schedule} == {"F", "I", "W"}
    assert max(peak_live(schedule).stages) <= ranks * 2  # a microbatch whose W alone is left holds less than a whole one
    total = sum(node_seconds(made.split, made.atoms, made.rules, made.device))
    assert total > 0
    even = simulate(schedule, ranks, 8, 1.0, 1.0, 1.0).cost
    assert even <= simulate("zb-h1", ranks, 8, 1.0, 1.0, 1.0).cost * 1.05


def test_every_rank_finds_the_same() -> None:
    first, second = (compiled(Mesh(pp=2), Plan(schedule="search", microbatches=4)).pipeline for _ in range(2))
    assert first is not None and second is not None and first.schedule == second.schedule


def test_stages_of_which_a_rank_holds_several() -> None:
    with pytest.raises(PlanError, match="one stage a rank"):
        compiled(Mesh(pp=2), Plan(schedule="search", microbatches=4, cuts=("blocks.1", "blocks.2", "blocks.3")))
