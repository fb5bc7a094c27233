"""A step with stages, written to a folder and loaded from there, gives the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.api import make_options
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.pipeline import Pipeline, load
from autopar.runtime.random import step_key
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from models import gpt


@pytest.mark.parametrize(("mesh", "schedule"), [("pp=2", "1f1b"), ("pp=2,dp=2", "zb-v"), ("pp=2", "dualpipev")])
def test_saved(tmp_path: Path, mesh: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = gpt.build(dropout=0.2)
    batch = gpt.batch(8, torch.Generator().manual_seed(1))
    plan = Plan(microbatches=4, schedule=schedule)
    options = make_options(None, None, plan, None, 0, "check", None, 0, "eager", ())
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> None:
        step = Step(model, Mesh.parse(mesh), comm, options, share)
        rows = step.shard(batch)
        loss = step(rows)
        step.save_source(tmp_path)
        comm.exchange(None, site="saved")
        loaded, state = load(tmp_path, comm), step._need()  # noqa: SLF001
        assert isinstance(loaded, Pipeline) and loaded.instructions == step.executable().instructions  # type: ignore[union-attr]
        state.changed()
        kept = [g.clone() for g in step._grads]  # noqa: SLF001
        again, grads, _, _ = loaded.run(state, rows, step_key(0, 0, comm.device))
        assert again is not None and torch.equal(again, loss)
        assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
        step.close()

    run_simulated(Mesh.parse(mesh), rank)
    assert {p.name for p in tmp_path.glob("*.py")} == {f"stage{s}.py" for s in range(4 if schedule != "1f1b" else 2)}
