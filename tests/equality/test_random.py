"""Random models under random plans equal the plain model: loss, gradients and buffers of a step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from autopar.compare import difference, first_difference
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.reference import plain_steps
from autopar.runtime.sim import SimComm
from tests.equality.blocks import BLOCKS, CROSS_SAMPLE, LOSSES
from tests.equality.cases import MODELS, SIMILAR, Case, Model
from tests.equality.recipes import MESHES, SEED, Block, Recipe, check, compiled_for, differences, recipes, run_ranks


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(recipes())
def test_random(recipe: Recipe) -> None:
    check(recipe)


def by_turns() -> list[Recipe]:
    """Every block and every loss once, under a mesh, a number of microbatches and a layout that go round."""
    rng, found = random.Random(0), []
    losses = list(LOSSES)
    for n, name in enumerate(BLOCKS):
        count = 1 if name in CROSS_SAMPLE else rng.choice((1, 2))
        blocks = (Block(name, residual=rng.random() < 0.5),)
        found.append(
            Recipe(blocks, losses[n % len(losses)], rng.random() < 0.3, rng.choice(MESHES), count, rng.choice((0, 1)), n, n % 2 > 0)
        )
    return found


@pytest.mark.parametrize("recipe", by_turns(), ids=lambda r: r.blocks[0].name)
def test_block(recipe: Recipe) -> None:
    check(recipe)


RANDOM_PLANS = [
    pytest.param(model, mesh, n + k, marks=[pytest.mark.slow] if model.name in SIMILAR else [])
    for n, model in enumerate(MODELS)
    for k, mesh in enumerate(("dp=2,tp=2", "tp=4"))
] + [pytest.param(model, "cp=2,tp=2", n) for n, model in enumerate(MODELS) if model.name in ("gpt", "llama", "encdec")]


@pytest.mark.parametrize(("model", "mesh", "draw"), RANDOM_PLANS, ids=lambda v: v.name if isinstance(v, Model) else str(v))
def test_models_under_random_plans(model: Model, mesh: str, draw: int) -> None:
    module, batch = Case(model, model.name, mesh, "together").material()
    module = module.double()
    if model.loss is not None:
        batch = tuple(t.double() for t in batch)
    elif isinstance(batch, tuple):
        batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    where, plan = Mesh.parse(mesh), Plan(microbatches=1 + draw % 2 if model.divides else 1, buckets=5000)
    compiled = compiled_for(module, batch, where, plan, draw, precision="fp64", loss=model.loss)
    traces = run_ranks(compiled, module, batch, where)
    exact = torch.float64 if compiled.lifted is not None else None
    wrong = differences(traces, plain_steps(module, [batch], loss=model.loss, seed=SEED, exact=exact))
    assert not wrong, "\n".join([*wrong[:12], first_difference(compiled, module, batch, where, SEED, SimComm)])


def test_a_fault_is_found_and_named() -> None:
    """The comparison itself: a gradient that is off by 1e-9, one that is missing, one too many."""
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert difference(value, value, 2.0) == 0.0
    assert difference(value * (1 + 1e-9), value, 2.0) > 1e-10
    assert difference(torch.tensor([float("nan"), 2.0], dtype=torch.float64), value, 2.0) == float("inf")
    assert difference(value[:1], value, 2.0) == float("inf")
