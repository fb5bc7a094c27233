"""Buckets whose gradients are not all reduced over the same axes, as when another batch shape is compiled under the same buckets."""

from __future__ import annotations

import copy

import torch

from autopar.api import make_options
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.reference import plain_steps
from autopar.runtime.comm import Comm
from autopar.runtime.ops import once
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from models import gpt


def test_once() -> None:
    x = torch.ones(3)
    assert torch.equal(once(x, 0, 0), x)
    assert torch.equal(once(x, 0, 1), torch.zeros(3))


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def test_other_shapes_keep_the_buckets() -> None:
    """Shorter sequences and fewer rows: the choice may reduce a small gradient early, which the first shape left partial."""
    torch.manual_seed(0)
    model = gpt.build(dropout=0.3).double()
    long, wide = (gpt.batch(n, torch.Generator().manual_seed(n)) for n in (4, 8))
    short = tuple(t[:, :8] for t in long)
    batches = [wide, long, short, wide]
    expected = plain_steps(copy.deepcopy(model), batches, optimizer=sgd)
    for mesh in (Mesh(dp=2), Mesh(dp=2, tp=2)):
        share: dict[object, object] = {}
        options = make_options(None, sgd, Plan(), None, 0, "check", None, 0, "eager", ())

        def rank(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor]]:
            step = Step(copy.deepcopy(model), comm.mesh, comm, options, share)  # noqa: B023
            return [float(step(step.shard(b))) for b in batches], step.full_state_dict()

        for losses, state in run_simulated(mesh, rank):
            assert torch.allclose(torch.tensor(losses, dtype=torch.float64), torch.stack(expected.losses), rtol=1e-12)
            assert all(torch.allclose(state[n], t, rtol=1e-10, atol=1e-13) for n, t in expected.state.items())
        assert mesh["tp"] > 1 or any(n.op == "autopar.once" for c in share.values() for n in c.final.nodes)  # type: ignore[attr-defined]
