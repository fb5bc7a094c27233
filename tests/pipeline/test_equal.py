"""Stages: each model on each mesh gives what one process gives, under each schedule. ``make matrix`` runs all cells, this a sample."""

from __future__ import annotations

import pytest

from autopar.plan.plan import Plan
from tests.equality.cases import MODELS, check
from tests.pipeline.cases import MESHES, SCHEDULES, Staged, every


def sample() -> list[Staged]:
    """Every model on every mesh once, schedules in turn."""
    cells = {str(c): c for c in every()}
    places = [(m, model, k, mesh) for m, model in enumerate(MODELS) for k, mesh in enumerate(MESHES)]
    return [cells[f"{model.name} / {mesh} / {SCHEDULES[(3 * m + k) % len(SCHEDULES)]}"] for m, model, k, mesh in places]


#: shardings of cells unrolled by hand take a minute to choose.
CELLS = [
    pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if n % 5 or "cells" in cell.name else []) for n, cell in enumerate(sample())
]


@pytest.mark.parametrize("cell", CELLS)
def test_matrix(cell: Staged) -> None:
    check(cell)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_schedules(schedule: str, count: int) -> None:
    """A tied model, so that a parameter and its gradient cross, with fewer and more microbatches than stages."""
    (model,) = (m for m in MODELS if m.name == "HF GPT-2 sdpa")
    check(Staged(model, "pp=2", Plan(microbatches=count, schedule=schedule)))
