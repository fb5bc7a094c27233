"""Tracing and the compiler."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options
from autopar.errors import CaptureError, InputError
from autopar.layout.mesh import Mesh
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step
from tests.cases.run import DEFAULTS, MB2, Net, equal, ranks, train_and_evaluate


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.drop(self.bn(self.l(x))), 0.3, self.training)
        return (h * 2 if self.training else h).pow(2).mean()


def test_x01_train_and_evaluate_in_turn() -> None:
    torch.manual_seed(0)
    model, x = Modes().double(), torch.randn(4, 8, dtype=torch.float64)

    ranks("dp=2", model, partial(train_and_evaluate, x=x))
    equal(model, x, ("dp=2", "tp=2"))


def test_x01_eval_first_and_the_models_own_flags() -> None:
    """Evaluation before the first step, ``model.eval()`` and ``model.train()`` between steps."""
    torch.manual_seed(0)
    model, x = Modes().double(), torch.randn(4, 8, dtype=torch.float64)
    still = copy.deepcopy(model).eval()(x).item()

    def run(step: Step, rank: int) -> list[float]:
        rows = step.shard(x)
        first = step.evaluate([rows])[0]
        before = step.full_state_dict()
        step._model.eval()
        quiet = [step(rows).item() for _ in range(2)]
        after = step.full_state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before)  # no optimizer, and statistics that eval leaves alone
        step._model.train()
        loud = [step(rows).item() for _ in range(2)]
        assert loud[0] != loud[1] and not torch.equal(step.full_state_dict()["bn.running_mean"], before["bn.running_mean"])
        return [first, *quiet]

    for found in ranks("dp=2", model, run):
        assert found == pytest.approx([still] * 3, rel=1e-10)


def test_x01_a_model_in_eval_mode() -> None:
    torch.manual_seed(0)
    equal(Modes().eval(), torch.randn(4, 8), ("dp=2", "tp=2"))


class Config:
    def __init__(self) -> None:
        self.scale, self.inner, self.parts = 2.0, [1.0, 2.0], {"bias": True}


class Switched(nn.Module):
    """What its forward does hangs on plain attributes, in modules and in what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.act, self.config, self.power = nn.Linear(8, 8), nn.ReLU(), Config(), 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.l(x) if self.config.parts["bias"] else x @ self.l.weight.T)
        h = h + self.config.parts.get("shift", 0.0)
        return (h * self.config.scale * sum(self.config.inner)).abs().pow(self.power).mean()


CHANGES = {
    "number": lambda m: setattr(m, "power", 3),
    "type of a number": lambda m: setattr(m, "power", 2.0),
    "config": lambda m: setattr(m.config, "scale", 3.0),
    "list": lambda m: m.config.inner.append(5.0),
    "dict": lambda m: m.config.parts.update(shift=1.0),
    "another list": lambda m: setattr(m.config, "inner", [4.0]),
    "module": lambda m: setattr(m, "act", nn.Tanh()),
    "hook": lambda m: m.l.register_forward_hook(lambda module, args, out: out * 2),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_x01_changes_of_a_model_after_its_first_step(kind: str) -> None:
    """They are followed, and back again; a rank that changes alone is told so, and loses nothing."""
    torch.manual_seed(0)
    whole, x = Switched().double(), torch.randn(4, 8, dtype=torch.float64)
    before = whole(x).item()

    def run(step: Step, rank: int) -> list[float]:
        losses = [step(step.shard(x)).item()]
        CHANGES[kind](step._model)
        losses.append(step(step.shard(x)).item())
        compiled = len(step.reports)
        losses.append(step(step.shard(x)).item())
        assert len(step.reports) == compiled
        return losses

    found = ranks("dp=2", whole, run)
    CHANGES[kind](whole)
    after = whole(x).item()
    assert (before == after) == (kind == "type of a number")
    for losses in found:
        assert losses == pytest.approx([before, after, after], rel=1e-10) and losses[1] == losses[2]


@pytest.mark.parametrize("first", [True, False])
def test_x01_a_change_by_which_a_parameter_comes_or_goes(first: bool) -> None:
    def run(step: Step, rank: int) -> list[str | float]:
        x = torch.ones(4, 8, dtype=torch.float64)
        step._model.config.parts["bias"] = first
        found: list[str | float] = [step(step.shard(x)).item()]
        step._model.config.parts["bias"] = not first
        with pytest.raises(InputError, match="reaches other parameters than when the step was compiled: l.bias"):
            step(step.shard(x))
        step._model.config.parts["bias"] = first
        return [*found, step(step.shard(x)).item()]

    for before, after in ranks("dp=2", Switched(), run):
        assert before == after


def test_x01_a_rank_whose_model_changes_alone() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)

    def run(step: Step, rank: int) -> list[str | float]:
        found: list[str | float] = [step(step.shard(x)).item()]
        if rank == 1:
            step._model.power = 3
        try:
            step(step.shard(x))
        except InputError as error:
            found.append(str(error))
        step._model.power = 2
        return [*found, step(step.shard(x)).item()]

    first, second = ranks("dp=2", Switched(), run)
    assert (
        first == second
        and "rank 1 has another state of its model than rank 0\n  why: power: 3 against 2" in str(first[1])
        and first[0] == first[2]
    )


@pytest.mark.parametrize("kind", ["item", "add"])
def test_x04_writes_to_the_batch_are_refused(kind: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if kind == "item":
            x[:, 0] = 0
        else:
            x.add_(1)
        return m.l(x).mean()

    x = torch.ones(4, 4)
    with pytest.raises(CaptureError, match="writes to its input"):
        equal(Net(forward, l=nn.Linear(4, 2)), x, ("dp=2",))
    assert torch.equal(x, torch.ones(4, 4))


def _cross(m: Any, seqs: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    q, k, v = (part(t).unflatten(-1, (2, 4)).transpose(1, 2) for part, t in ((m.q, seqs), (m.k, keys), (m.v, values)))
    mask = None if padding_mask is None else padding_mask[:, None, None]
    return m.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)).pow(2).mean()


@pytest.mark.parametrize("masked", [True, False])
def test_x05_cross_attention_by_keyword(masked: bool) -> None:
    torch.manual_seed(0)
    model = Net(_cross, q=nn.Linear(8, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), o=nn.Linear(8, 8))
    mask = torch.arange(11) < torch.tensor([11, 3, 7, 5])[:, None] if masked else None
    batch = {"seqs": torch.randn(4, 5, 8), "keys": torch.randn(4, 11, 6), "values": torch.randn(4, 11, 6), "padding_mask": mask}
    equal(model, batch, plans=(None, MB2))
    three = {name: t if t is None else t[:3] for name, t in batch.items()}
    equal(model, three, ("tp=2", "dp=3"))


@pytest.mark.parametrize("weights", [True, False])
def test_x05_multihead_attention(weights: bool) -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        y, w = m.a(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=weights)
        return y.pow(2).mean() + (w.pow(2).sum() if weights else 0)

    model = Net(forward, a=nn.MultiheadAttention(8, 4, batch_first=True))
    equal(model, (torch.randn(4, 5, 8), torch.arange(5) >= torch.tensor([5, 3, 4, 2])[:, None]), ("dp=2", "tp=2"))


def test_a_step_does_not_keep_the_model() -> None:
    """The weights live in the step's buckets: a model that nobody else holds is freed, and the step goes on without it."""

    def run(step: Step, rank: int) -> tuple[bool, list[float]]:
        batch = step.shard(x)
        first = step(batch).item()
        gc.collect()
        alone = all(t.is_meta for t in step._model.parameters())
        step._user = lambda: None  # as if the caller had dropped it
        values = [first, step(batch).item(), step.evaluate([batch])[0], step.module()(x).item()]
        step.load_state_dict(state)
        return alone, [*values, step(batch).item()]

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.01)

    torch.manual_seed(0)
    model, x = Switched().double(), torch.randn(4, 8, dtype=torch.float64)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for alone, (first, second, evaluated, whole, again) in ranks("dp=2", model, run, optimizer=sgd):
        assert not alone and first == again != second
        assert evaluated == pytest.approx(whole, rel=1e-12)

    held: list[weakref.ref[nn.Module]] = []

    def dropped(comm: SimComm) -> float:
        made = copy.deepcopy(model)
        held.append(weakref.ref(made))
        step = Step(made, Mesh(dp=2), comm, make_options(**DEFAULTS))
        del made
        return step(step.shard(x)).item()

    run_simulated(Mesh(dp=2), dropped)
    gc.collect()
    assert all(ref() is None for ref in held)
