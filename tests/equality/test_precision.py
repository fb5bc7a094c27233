"""Single precision and the compiled backend, against the error that plain single precision has to double."""

from __future__ import annotations

import copy
import shutil
from functools import partial

import pytest
import torch

import autopar
from autopar.api import make_options
from autopar.layout.mesh import Mesh
from autopar.reference import plain_steps
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from models import gpt, llama

SGD = partial(torch.optim.SGD, lr=0.1)


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return SGD([p for _, p in named])


def batch_of(name: str) -> object:
    return {"gpt": gpt, "llama": llama}[name].batch(4, torch.Generator().manual_seed(3))


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt.build(layers=1, dropout=0.1) if name == "gpt" else llama.build(layers=1)


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Root mean square over all gradients of the difference, relative to their own."""
    delta = sum(float(((found[n].double() - g) ** 2).sum()) for n, g in exact.items())
    return (delta / sum(float((g**2).sum()) for g in exact.values())) ** 0.5


def errors(name: str) -> tuple[dict[str, torch.Tensor], float]:
    """Exact gradients of the second step, and the error of the plain model in float32."""
    batch = batch_of(name)
    exact = plain_steps(build(name).double(), [batch] * 2, optimizer=sgd).gradients
    single = plain_steps(build(name), [batch] * 2, optimizer=sgd).gradients
    return exact, error(single, exact)


@pytest.mark.parametrize("plan", [autopar.Plan(), autopar.Plan(sequence=True, microbatches=2)])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_float32_is_as_good_as_the_plain_model(name: str, plan: autopar.Plan) -> None:
    exact, plain = errors(name)
    mesh, model = Mesh(dp=2, tp=2), build(name)
    options = make_options(None, sgd, plan, None, 0, "check", None, 0, "eager", ())

    def rank(comm: Comm) -> dict[str, torch.Tensor]:
        step = Step(copy.deepcopy(model), mesh, comm, options, share)
        rows = step.shard(batch_of(name))
        for _ in range(2):
            step(rows)
        return step.gradients()

    share: dict[object, object] = {}
    assert plain > 0
    assert error(run_simulated(mesh, rank)[0], exact) < 3 * plain


@pytest.mark.slow  # others of inductor are in tests/runtime/test_random.py and tests/pipeline/test_compiled.py
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor backend needs a C++ compiler on CPU")
def test_inductor_is_as_good_as_eager() -> None:
    exact, plain = errors("gpt")
    step = autopar.parallelize(build("gpt"), Mesh(), optimizer=sgd, backend="inductor")
    for _ in range(2):
        step(batch_of("gpt"))
    assert error(step.gradients(), exact) < 3 * plain
    step.close()
