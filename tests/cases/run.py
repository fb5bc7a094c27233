"""What the tests of the known cases share: verify on a few meshes, and ranks whose results are looked at. No test here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step

MESHES = ("dp=2", "tp=2", "dp=2,tp=2")
DEFAULTS: dict[str, Any] = dict(
    loss=None,
    optimizer=None,
    plan="auto",
    precision=None,
    batch_dim=0,
    init="check",
    clip_grad_norm=None,
    seed=0,
    backend="eager",
    rules=(),
)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1)


def double(tree: Any) -> Any:
    """The floating-point tensors of a batch in float64."""
    return torch.utils._pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


class Net(nn.Module):
    """``forward(*args)`` calls ``f(module, *args)``; parts become submodules, parameters or buffers."""

    def __init__(self, f: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.f = f
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(self, *args, **kwargs)


def equal(model: nn.Module, batch: Any, meshes: Any = MESHES, plans: Any = (None,), **options: Any) -> None:
    """Loss, gradients, parameters, buffers and replicas equal those of the plain model."""
    for mesh in meshes:
        for plan in plans:
            report = verify(model, Mesh.parse(mesh), batch, plan=plan or "auto", **options)
            assert report.ok, f"{plan}\n{report.table()}"


def plain(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process in float64."""
    model, batch = copy.deepcopy(model).double(), double(batch)
    out = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    out.backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def ranks(mesh: str, model: nn.Module, use: Callable[[Step, int], Any], **options: Any) -> list[Any]:
    """``use(step, rank)`` of every simulated rank, in float64 unless a precision is given."""
    parsed = Mesh.parse(mesh)
    model = model if "precision" in options else copy.deepcopy(model).double()
    chosen = make_options(**{**DEFAULTS, **options})

    def rank(comm: Comm) -> Any:
        held = copy.deepcopy(model)  # as its user would: a step alone doesn't keep it
        return use(Step(held, parsed, comm, chosen), comm.rank)

    return run_simulated(parsed, rank, timeout=120.0)


def first_step(step: Step, rank: int, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return step(step.shard(batch)).clone(), step.gradients()


def values(mesh: str, model: nn.Module, batch: Any, **options: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and full gradients of the first step on every rank."""
    return ranks(mesh, model, partial(first_step, batch=double(batch)), **options)


def near(a: Tensor, b: Any, within: float = 1e-10) -> bool:
    return torch.allclose(a.double(), torch.as_tensor(b, dtype=torch.float64), rtol=within, atol=within)


def experts_loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Four experts of which each sample takes two, and a loss of their shares of the batch: ``router``, ``up``, ``down``, ``head``."""
    p = m.router(x).softmax(-1)
    best, index = p.topk(2, -1)
    gate = torch.zeros_like(p).scatter(-1, index, best / best.sum(-1, keepdim=True))
    experts = torch.einsum("tef,efd->ted", torch.einsum("td,edf->tef", x, m.up).relu(), m.down)
    share = (gate > 0).to(x.dtype).mean(0)
    return F.cross_entropy(m.head(torch.einsum("te,ted->td", gate, experts)), y) + 0.1 * 4 * (share * p.mean(0)).sum()


def train_and_evaluate(step: Step, rank: int, x: Tensor) -> None:
    """Evaluation draws no masks, repeats and leaves buffers alone; steps around it draw new ones each time."""
    rows = step.shard(x)
    step(rows)
    before = step.full_state_dict()
    twice = [step.evaluate([rows])[0] for _ in range(2)]
    after = step.full_state_dict()
    assert twice[0] == twice[1] and all(torch.equal(before[n], after[n]) for n in before)
    assert near(torch.tensor(twice[0], dtype=torch.float64), copy.deepcopy(step.module()).eval()(x).item())
    losses = [step(rows).item() for _ in range(2)]
    assert losses[0] != losses[1]


ZERO2, ZERO3 = Plan(zero=2), Plan(zero=3)
MB2, MB4, ZERO0, SEQUENCE = Plan(microbatches=2), Plan(microbatches=4), Plan(zero=0), Plan(sequence=True)
