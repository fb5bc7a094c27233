"""Loss value and gradient scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.plan.plan import Plan
from tests.cases.run import MB2, MB4, Net, equal, near, ranks, values


def test_l02_tokens_counted_over_ranks_and_microbatches() -> None:
    torch.manual_seed(0)
    ids, y = torch.randint(16, (8, 6)), torch.randint(16, (8, 6))
    for row, length in enumerate((6, 1, 5, 2, 6, 1, 3, 2)):
        y[row, length:] = -100
    model = Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)).flatten(0, 1), y.flatten()), e=nn.Embedding(16, 8), l=nn.Linear(8, 16))
    equal(model, (ids, y), ("dp=2", "dp=2,tp=2"), (None, MB2, MB4))


def test_l04_evaluation_is_the_global_mean() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.l(x).pow(2).mean(), l=nn.Linear(4, 3)).double()
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (4, 4, 2)]
    whole = model(torch.cat(batches))
    for loss, weight in ranks("dp=2", model, lambda step, _: (step(step.shard(batches[0])), step.evaluate(map(step.shard, batches)))[1]):
        assert near(torch.tensor(loss), whole.item(), 1e-7) and weight in (10, 30)


@pytest.mark.parametrize("classes", [8, 7])
def test_l06_label_smoothing_over_all_classes(classes: int) -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x, y: F.cross_entropy(m.l(x), y, label_smoothing=0.1), l=nn.Linear(4, classes))
    pins = (None, Plan(shard={"l.weight": "dim0@tp"})) if classes == 8 else (None,)
    equal(model, (torch.randn(4, 4), torch.randint(classes, (4,))), ("tp=2", "dp=2,tp=2"), pins)


def test_l06_value() -> None:
    def loss(smoothing: float) -> list[float]:
        w = nn.Parameter(torch.arange(8.0).view(8, 1))
        model = Net(lambda m, x, y: F.cross_entropy(x @ m.w.T, y, label_smoothing=smoothing), w=w)
        pin = Plan(shard={"w": "dim0@tp"})
        return [loss.item() for loss, _ in values("tp=2", model, (torch.ones(2, 1), torch.tensor([2, 2])), plan=pin)]

    assert loss(0.1) == pytest.approx([5.30834, 5.30834], abs=5e-6)
    assert loss(0.0) == pytest.approx([5.45834, 5.45834], abs=5e-6)


@pytest.mark.parametrize("kind", ["kl", "z loss", "entropy", "twice"])
def test_l08_log_softmax_with_other_consumers(kind: str) -> None:
    torch.manual_seed(0)
    kinds = {
        "kl": lambda z, y, teacher: F.kl_div(F.log_softmax(z, -1), teacher, reduction="batchmean"),
        "z loss": lambda z, y, teacher: F.cross_entropy(z, y) + 0.01 * torch.logsumexp(z, -1).pow(2).mean(),
        "entropy": lambda z, y, teacher: F.nll_loss(F.log_softmax(z, -1), y) + (F.log_softmax(z, -1).exp() * F.log_softmax(z, -1)).sum(),
        "twice": lambda z, y, teacher: (lambda lp: F.nll_loss(lp, y) + lp.mean())(F.log_softmax(z, -1)),
    }
    model = Net(lambda m, x, y, teacher: kinds[kind](m.l(x), y, teacher), l=nn.Linear(4, 8))
    batch = (torch.randn(4, 4), torch.randint(8, (4,)), torch.randn(4, 8).softmax(-1))
    equal(model, batch, ("tp=2", "dp=2,tp=2"), (Plan(shard={"l.weight": "dim0@tp"}),))


def test_l09_gradients_of_every_microbatch_are_summed() -> None:
    model = Net(lambda m, g: (m.w * g).mean(), w=nn.Parameter(torch.tensor(1.0)))
    # microbatch outer, data coordinate inner: rank 0 sees 1 then 3, rank 1 sees 2 then 6
    batch = torch.tensor([1.0, 2.0, 3.0, 6.0])
    for _, gradients in values("dp=2", model, batch, plan=MB2):
        assert gradients["w"].item() == 3.0
    equal(model, batch, ("dp=2",), (MB2,), steps=5)
