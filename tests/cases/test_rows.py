"""Rows that don't divide: the last batch of a data set, single samples, ranks that read different numbers of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import Plan
from autopar.errors import InputError
from autopar.step import Step
from tests.cases.run import ranks


class Tagger(nn.Module):
    """Dropout, statistics over the batch, a mean over valid labels: what shows who computed which rows."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.table, self.drop, self.head = nn.Embedding(11, 8), nn.Dropout(0.25), nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.norm(self.table(ids).flatten(0, 1)).unflatten(0, ids.shape)
        logits = self.head(self.drop(h))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 5, (rows, 6), generator=g)
    labels[0, 0] = 2
    return torch.randint(0, 11, (rows, 6), generator=g), labels


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def plain(model: nn.Module, sizes: list[int]) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """One rank on the same batches: losses, state at the end, losses of evaluation."""

    def run(step: Step, rank: int) -> Any:
        losses = [step(data(n, n)).item() for n in sizes]
        return losses, step.full_state_dict(), [step.evaluate([data(n, n + 50)])[0] for n in sizes]

    return ranks("dp=1", model, run, optimizer=sgd)[0]


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 1), ("dp=2", 2), ("dp=2,tp=2", 1), ("dp=4", 1)])
@pytest.mark.parametrize("norm", [False, True])
def test_later_batches_of_any_size(mesh: str, microbatches: int, norm: bool) -> None:
    if norm and microbatches > 1:
        pytest.skip("statistics over a batch can't be split into microbatches")
    torch.manual_seed(0)
    model = Tagger(norm)
    sizes = [8, 3, 1, 8, 6]
    losses, state, evaluated = plain(copy.deepcopy(model), sizes)

    def run(step: Step, rank: int) -> Any:
        found = [step(step.shard(data(n, n))).item() for n in sizes]
        full = step.full_state_dict()
        return found, full, [step.evaluate([step.shard(data(n, n + 50))])[0] for n in sizes], step.reports

    for found, full, eval_losses, reports in ranks(mesh, model, run, optimizer=sgd, plan=Plan(microbatches=microbatches)):
        assert found == pytest.approx(losses, rel=1e-10)
        assert eval_losses == pytest.approx(evaluated, rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value, rtol=1e-10, atol=1e-12, msg=name)
        assert any("don't divide by dp=" in r for r in reports), reports


def test_ranks_that_hold_other_numbers_of_rows() -> None:
    """Their rows one after the other are the batch, whatever each holds; also where the sum divides, and one has none."""
    torch.manual_seed(0)
    model = Tagger(False)
    ids, labels = data(6, 3)

    def run(step: Step, rank: int) -> Any:
        step(step.shard(data(8, 8)))
        before = step.full_state_dict()
        losses = []
        for cut in (5, 6, 4):
            step.load_state_dict(before)
            part = slice(0, cut) if rank == 0 else slice(cut, 6)
            losses.append(step((ids[part], labels[part])).item())
        out = step.forward((ids[:4], labels[:4]) if rank == 0 else (ids[4:5], labels[4:5]))
        return losses, out

    (first, _), (second, _) = ranks("dp=2", model, run, optimizer=None)
    assert first == second
    # masks differ from step to step: the plain model's loss is that without dropout
    model.drop.p = 0.0
    (first, _), (second, _) = ranks("dp=2", model, run, optimizer=None)
    wanted = copy.deepcopy(model).double()(ids, labels).item()
    assert first == second == pytest.approx([wanted] * 3, rel=1e-10)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_forward_gives_each_rank_its_rows(mesh: str) -> None:
    torch.manual_seed(0)
    model, ids = Tagger(False), data(5, 1)[0]
    wanted = copy.deepcopy(model).double().eval()(ids)

    def run(step: Step, rank: int) -> Any:
        step.compile(step.shard(data(4, 4)[0]))
        index = step._comm.coords["dp"]
        part = slice(0, 4) if index == 0 else slice(4, 5)
        return index, step.forward(ids[part]), step.forward(step.shard(ids))

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        return logits.square().mean()

    for index, uneven, dealt in ranks(mesh, model, run, loss=loss):
        torch.testing.assert_close(uneven, wanted[:4] if index == 0 else wanted[4:], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dealt, wanted[:3] if index == 0 else wanted[3:], rtol=1e-10, atol=1e-12)


def test_the_first_batch_must_divide() -> None:
    def run(step: Step, rank: int) -> str:
        with pytest.raises(InputError) as error:
            step(data(3 if rank else 4, 0))
        return str(error.value)

    first, second = ranks("dp=2", Tagger(False), run)
    assert first == second and "batch shapes" in first
