"""The solver's model: its optimum, and what has none."""

from __future__ import annotations

import math

import pytest

from autopar.errors import PlanError
from autopar.plan.solver import Model


def test_the_least_cost() -> None:
    model = Model()
    a, b = model.binary(2.0), model.real(1.0)
    model.row([(a, 1.0), (b, 0.5)], 1.0, math.inf)
    assert model.solve() == pytest.approx([1.0, 0.0])
    model.row([(a, 1.0)], -math.inf, 0.5)
    with pytest.raises(PlanError, match="nothing satisfies"):
        model.solve()


def test_nothing_to_choose() -> None:
    model = Model()
    assert model.solve() == []
    model.row([], 0.0, 3.0)
    assert model.solve() == []
    model.row([], 1.0, math.inf)
    with pytest.raises(PlanError, match="nothing satisfies"):
        model.solve()
