"""Stages: every model on every mesh with stages gives what one process gives, under every schedule."""

from __future__ import annotations

import pytest

from autopar.api import verify
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from tests.equality.cases import MODELS, Case, Model

MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def run(model: Model, mesh: str, plan: Plan, dropout: float = 0.0) -> str:
    case = Case(model, model.name, mesh, "dropout" if dropout else "plain")
    built, batch = case.material()
    report = verify(built, Mesh.parse(mesh), batch, plan=plan, loss=model.loss)
    return "" if report.ok else report.table()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", [m for m in MODELS if m.divides], ids=lambda m: m.name)
def test_models(model: Model, mesh: str) -> None:
    found = run(model, mesh, Plan(microbatches=2), 0.3)
    assert not found, found
