"""Inputs and outputs of models (what of these cases doesn't need a pipeline)."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.step import Step
from tests.cases.run import MB2, Net, equal, near, ranks


def _forward(m: Any, ids: Tensor, *, labels: Tensor | None = None, pos: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
    h = m.e(ids) * scale
    logits = m.l(h if pos is None else h + m.p(pos))
    return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("plan", [None, MB2], ids=str)
def test_p03_keywords_scalars_and_tensors_without_rows(plan: Plan | None) -> None:
    torch.manual_seed(0)
    model = Net(_forward, e=nn.Embedding(16, 8), l=nn.Linear(8, 16), p=nn.Embedding(6, 8))
    batch = {"ids": torch.randint(16, (4, 6)), "labels": torch.randint(16, (4, 6)), "pos": torch.arange(6), "scale": 0.5}
    equal(model, batch, plans=(plan,), batch_dim={"ids": 0, "labels": 0, "pos": None, "scale": None})
    with pytest.raises(InputError, match="differ in size along dim 0"):
        equal(model, batch, ("dp=2",))


Out = namedtuple("Out", "loss hidden extra")


def _layers(m: Any, state: dict[str, Any]) -> Out:
    for layer in m.layers:
        mask, (scale, shift) = state["aux"]["mask"], state["pos"]
        h = torch.where(mask, layer(state["h"]), state["h"]) + scale * shift
        state = {"h": h, "aux": {"mask": mask.logical_not(), "bias": None}, "pos": [scale, shift + 1]}
    return Out(state["h"].pow(2).mean(), state["h"], state["aux"]["bias"])


def test_p04_nested_batches_and_outputs() -> None:
    torch.manual_seed(0)
    model = Net(_layers, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    batch = (
        {"h": torch.randn(4, 8), "aux": {"mask": torch.rand(4, 8) > 0.5, "bias": None}, "pos": [torch.randn(4, 1), torch.randn(4, 8)]},
    )
    equal(model, batch, plans=(None, MB2))
    equal(model, batch, ("dp=2",), loss=lambda out, batch: (out.hidden * batch[0]["h"]).sum())


def test_p12_evaluation_between_steps_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.l(F.dropout(m.bn(x), 0.5, m.training)).pow(2).mean(), l=nn.Linear(4, 3), bn=nn.BatchNorm1d(4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)

    def run(step: Step, between: bool) -> tuple[list[float], dict[str, Tensor]]:
        losses = []
        for _ in range(3):
            losses.append(step(step.shard(x)).item())
            if between:
                assert step.evaluate([step.shard(x)]) == step.evaluate([step.shard(x)])
        return losses, step.full_state_dict()

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    with_, without = (ranks("dp=2", model, lambda s, _, b=b: run(s, b), optimizer=sgd) for b in (True, False))
    for (a, state), (b, other) in zip(with_, without, strict=True):
        assert a == b and all(torch.equal(state[n], other[n]) for n in state)


def test_p12_learning_rate_of_zero() -> None:
    model = Net(lambda m, x: m.l(x).pow(2).mean(), l=nn.Linear(4, 3)).double()
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def run(step: Step, rank: int) -> dict[str, Tensor]:
        step(step.shard(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))))
        return step.full_state_dict()

    for state in ranks("dp=2", model, run, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)):
        assert all(near(state[n], before[n], 0.0) for n in before)
