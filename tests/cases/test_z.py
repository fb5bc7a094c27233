"""ZeRO, data parallelism and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.plan.plan import Plan
from autopar.step import Step
from tests.cases.run import MB2, ZERO0, ZERO2, ZERO3, Net, adamw, equal, ranks

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def _optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    return lambda named: OPTIMIZERS[name]([p for _, p in named])


def _odd(m: Any, x: Tensor) -> Tensor:
    return ((x * m.one * m.three * m.scalar).pow(2).mean() + m.two.pow(3).sum() + m.none.sum()) * m.scalar.exp()


@pytest.mark.parametrize(("name", "plan"), [*((name, None) for name in OPTIMIZERS), ("SGD momentum", ZERO2), ("Adam", ZERO3)])
def test_z02_z03_parameters_smaller_than_the_ranks(name: str, plan: Plan | None) -> None:
    torch.manual_seed(0)
    shapes = {"one": (1, 3), "two": (2,), "three": (3,), "none": (0, 3), "scalar": ()}
    model = Net(_odd, **{n: nn.Parameter(torch.randn(s)) for n, s in shapes.items()})
    equal(model, torch.randn(4, 3), ("dp=4", "dp=2,tp=2"), (plan,), optimizer=_optimizer(name), clip_grad_norm=0.5)


def test_z03_scalar_keeps_its_shape() -> None:
    model = Net(lambda m, x: (x * m.t).pow(2).mean(), t=nn.Parameter(torch.tensor(1.0)))

    def shape(step: Step, rank: int) -> tuple[int, ...]:
        step(step.shard(torch.ones(4, 2, dtype=torch.float64)))
        return tuple(step.full_state_dict()["t"].shape)

    for mesh, plan in (("dp=2", None), ("tp=2", None), ("dp=2", ZERO3)):
        assert ranks(mesh, model, shape, optimizer=adamw, plan=plan or "auto") == [(), ()]


@pytest.mark.parametrize("trainable", [True, False])
def test_z05_frozen_base_with_adapters(trainable: bool) -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        for base, a, b in zip(m.base, m.a, m.b, strict=True):
            x = torch.tanh(base(x) + F.dropout(x, 0.0) @ a.T @ b.T)
        return x.pow(2).mean()

    a, b = (nn.ParameterList(nn.Parameter(torch.randn(s)) for _ in range(4)) for s in ((2, 8), (8, 2)))
    model = Net(forward, base=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).requires_grad_(False), a=a, b=b)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named if p.requires_grad or not trainable], lr=0.01, weight_decay=0.1)

    x = torch.randn(4, 8)
    equal(model, x, ("dp=2", "tp=2"), (None,), optimizer=optimizer)
    equal(model, x, ("dp=2",), (ZERO3,), optimizer=optimizer)

    def run(step: Step, rank: int) -> dict[str, Tensor]:
        step(step.shard(x.double()))
        return step.full_state_dict()

    before = {n: t.double() for n, t in model.base.state_dict(prefix="base.").items()}
    for state in ranks("dp=2", model, run, optimizer=optimizer):
        assert all(torch.equal(state[n], t) for n, t in before.items())


def test_z06_parameters_that_the_loss_does_not_reach() -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: (m.used(x).pow(2).mean(), m.head(x))[0], used=nn.Linear(4, 4), head=nn.Linear(4, 4), loose=nn.Parameter(torch.ones(3))
    )
    x = torch.randn(4, 4)
    equal(model, x, plans=(None, ZERO0, MB2), optimizer=adamw)

    def run(step: Step, rank: int) -> tuple[set[str], dict[str, Tensor]]:
        step(step.shard(x.double()))
        return set(step.gradients()), step.full_state_dict()

    for gradients, state in ranks("dp=2", model, run, optimizer=adamw):
        assert gradients == {"used.weight", "used.bias"}
        assert torch.equal(state["head.weight"], model.head.weight.double()) and torch.equal(state["loose"], model.loose.double())


def test_z06_a_branch_on_data_is_refused() -> None:
    model = Net(lambda m, x: (m.a if x.sum() > 0 else m.b)(x).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="reads a tensor's value in Python"):
        equal(model, torch.randn(4, 4), ("dp=2",))


def test_z06_heads_chosen_by_a_mask() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: torch.where(x[:, :1] > 0, m.a(x), m.b(x)).pow(2).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    equal(model, torch.tensor([[1.0, 1, 1, 1], [1, 2, 3, 4], [-1, 1, 1, 1], [-1, 2, 3, 4]]), ("dp=2", "tp=2"), (None, MB2))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "AdamW" in n or "nesterov" in n])
def test_z13_sharded_and_replicated_parameters(name: str) -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.b(m.n(m.a(x)).relu()).pow(2).mean(), a=nn.Linear(8, 16), n=nn.LayerNorm(16), b=nn.Linear(16, 8))
    equal(model, torch.randn(4, 8), ("tp=2", "dp=2,tp=2"), (None,), optimizer=_optimizer(name))


def test_z14_a_module_used_several_times() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = (m.l(torch.tanh(m.l(torch.tanh(m.l(v))))) for v in (x, y))
        return (a - b).pow(2).mean()

    equal(Net(forward, l=nn.Linear(4, 4)), (torch.randn(4, 4), torch.randn(4, 4)), ("dp=2", "tp=2"), (None, MB2))


@pytest.mark.parametrize("hidden", [1, 2, 3, 35])
def test_z15_levels_agree_on_small_sizes(hidden: int) -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: (m.b(m.a(x)) - 1).pow(2).mean(), a=nn.Linear(hidden, hidden), b=nn.Linear(hidden, hidden))
    equal(model, torch.randn(4, hidden), ("dp=2", "dp=2,tp=2"), (None, ZERO0, ZERO2, ZERO3), optimizer=_optimizer("Adam"), steps=5)
