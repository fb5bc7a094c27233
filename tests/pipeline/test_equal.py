"""Stages: every model on every mesh with stages gives what one process gives, under every schedule."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.api import verify
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from tests.equality.cases import MODELS, Case, Model

MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2")
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zb-h2", "zb-v", "dualpipev")
#: of so few modules that two stages for each of four ranks are too many, or even four stages.
SHORT = ("mlp", "lstm cells")
SHORTER = ("lstm", "gru")


@dataclass(frozen=True)
class Staged:
    """A cell of the matrix: dropout is on, and labels count unevenly, wherever the model has them."""

    model: Model
    mesh: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.model.name} / {self.mesh} / {self.plan.schedule} / microbatches={self.plan.microbatches}"

    def run(self) -> None:
        case = Case(self.model, self.model.name, self.mesh, "dropout" if self.model.dropout else "plain")
        built, batch = case.material()
        report = verify(built, Mesh.parse(self.mesh), batch, plan=self.plan, loss=self.model.loss)
        assert report.ok, report.table()


def cells() -> list[Staged]:
    """Every model on every mesh, schedules and counts of microbatches in turn."""
    found = []
    for m, model in enumerate(MODELS):
        for k, mesh in enumerate(MESHES):
            if mesh == "pp=4" and model.name in SHORTER:
                continue
            schedules = SCHEDULES[:3] if mesh == "pp=4" and model.name in SHORT else SCHEDULES
            schedule = schedules[(3 * m + k) % len(schedules)]
            count = (1, 2, 4)[(m + k) % 3] if model.divides else 1
            plan = Plan(microbatches=count, schedule=schedule, zero=(m + k) % 4 and 1, sequence=(m + k) % 2 == 0)
            found.append(Staged(model, mesh, plan))
    return found


#: shardings of cells unrolled by hand take a minute to choose.
CELLS = [
    pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if n % 5 or "cells" in cell.model.name else [])
    for n, cell in enumerate(cells())
]


@pytest.mark.parametrize("cell", CELLS)
def test_matrix(cell: Staged) -> None:
    cell.run()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_schedules(schedule: str, count: int) -> None:
    """A tied model, so that a parameter and its gradient cross, with fewer and more microbatches than stages."""
    (model,) = (m for m in MODELS if m.name == "HF GPT-2 sdpa")
    Staged(model, "pp=2", Plan(microbatches=count, schedule=schedule)).run()
