"""Models on meshes with stages under every schedule: the cells that must equal the plain model. No test here: what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.api import verify
from autopar.compare import Report
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh
from autopar.pipelined import stage_count
from autopar.plan.plan import Plan
from tests.equality.cases import MODELS, Case, Model

MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2")
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zb-h2", "zb-v", "dualpipev")
#: models of so few modules that they can't be cut into as many stages.
TOO_MANY = {"mlp": 8, "lstm cells": 8, "lstm": 4, "gru": 4}


@dataclass(frozen=True)
class Staged:
    """A cell of the matrix: dropout is on, and labels count unevenly, wherever the model has them."""

    model: Model
    mesh: str
    plan: Plan

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def variant(self) -> str:
        return str(self.plan.schedule)

    def __str__(self) -> str:
        return f"{self.name} / {self.mesh} / {self.variant}"

    @property
    def refused(self) -> bool:
        """Whether the model has fewer modules than there are stages, which must be said when compiling."""
        stages = stage_count(self.variant, Mesh.parse(self.mesh)["pp"])
        return stages >= TOO_MANY.get(self.name, stages + 1)

    def refusal(self) -> str:
        """The error of a refused cell. Raises AssertionError where it isn't refused."""
        try:
            self.verify()
        except PlanError as error:
            assert "more than this model can be cut into" in error.what, error
            return str(error)
        raise AssertionError(f"{self} is not refused")

    def verify(self, **options: Any) -> Report:
        """All ranks simulated, against the plain model."""
        case = Case(self.model, self.name, self.mesh, "zero=0" if self.model.dropout else "plain")
        built, batch = case.material()
        return verify(built, Mesh.parse(self.mesh), batch, plan=self.plan, loss=self.model.loss, **options)


def every() -> list[Staged]:
    """Every model on every mesh under every schedule; counts of microbatches, ZeRO levels, sequence and recompute in turn."""
    found = []
    for m, model in enumerate(MODELS):
        for s, schedule in enumerate(SCHEDULES):
            for k, mesh in enumerate(MESHES):
                turn = m + k + s
                plan = Plan(
                    microbatches=(1, 2, 4)[turn % 3] if model.divides else 1, schedule=schedule, zero=turn % 4, sequence=turn % 2 == 0,
                    recompute=(None, "full", "selective")[(turn + k) % 3],
                )  # fmt: skip
                found.append(Staged(model, mesh, plan))
    return found
