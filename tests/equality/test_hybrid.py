"""Hybrid sharding: a part of ``dp`` shares out what ZeRO shares out, the rest holds copies; parts of axes on a mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh, across, coordinate, within
from autopar.plan.plan import Plan
from autopar.runtime.comm import OPS, Call, Comm
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step
from models import gpt, mlp
from tests.equality.cases import MODELS

BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize("mesh", [Mesh(dp=8), Mesh(dp=4, tp=2), Mesh(tp=2, dp=4), Mesh(pp=2, dp=4, tp=3), Mesh(dp=6)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_an_axis(mesh: Mesh, ranks: int) -> None:
    """Blocks of neighbours and the ranks with one place in them make the axis up again, each rank in one of each."""
    if mesh["dp"] % ranks:
        pytest.skip("they don't divide")
    inner, outer = within("dp", ranks), across("dp", ranks)
    assert (mesh[inner], mesh[outer]) == (ranks, mesh["dp"] // ranks) and mesh.count((inner, outer)) == mesh["dp"]
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        assert coordinate(coords, outer) * ranks + coordinate(coords, inner) == coords["dp"]
        for axes in ((inner,), (outer,), (outer, inner), ("tp", inner), (inner, "tp")):
            group = mesh.group(rank, axes)
            assert len(set(group)) == mesh.count(axes) and group[mesh.index(rank, axes)] == rank
            assert all(mesh.group(other, axes) == group for other in group)
        assert mesh.group(rank, (outer, inner)) == mesh.group(rank, ("dp",))
        assert {mesh.coords(r)["dp"] // ranks for r in mesh.group(rank, (inner,))} == {coords["dp"] // ranks}
        assert {mesh.coords(r)["dp"] % ranks for r in mesh.group(rank, (outer,))} == {coords["dp"] % ranks}
    for axes in ((inner,), (outer,)):
        assert sorted(r for g in mesh.groups(axes) for r in g) == list(range(mesh.size))


CASES = [
    ("gpt", "dp=4", Plan(zero=1, zero_ranks=2)),
    ("gpt", "dp=4", Plan(zero=3, zero_ranks=2, microbatches=2, recompute="full", buckets=4096)),
    ("gpt", "dp=4", Plan(zero=2, zero_ranks=1, microbatches=2)),
    ("gpt", "dp=4,tp=2", Plan(zero=3, zero_ranks=2, sequence=True)),
    ("mlp", "dp=4", Plan(zero=2, zero_ranks=2, microbatches=2, buckets=256)),
    pytest.param("encdec", "tp=2,dp=4", Plan(zero=2, zero_ranks=2, buckets=4096), marks=pytest.mark.slow),
    pytest.param("HF GPT-2 sdpa", "dp=4", Plan(zero=3, zero_ranks=1), marks=pytest.mark.slow),
    ("resnet", "dp=4", Plan(zero=2, zero_ranks=2)),
    pytest.param("moe sorted", "dp=4", Plan(zero=3, zero_ranks=2), marks=pytest.mark.slow),
    ("gpt", "pp=2,dp=4", Plan(zero=3, zero_ranks=2, microbatches=2, schedule="zb-h1")),
    ("mlp", "pp=2,dp=4", Plan(zero=1, zero_ranks=2, microbatches=2)),
    ("gpt", "dp=4,cp=2", Plan(zero=2, zero_ranks=2)),
    ("gpt", "dp=4", Plan(zero=2, zero_ranks=2, interleave=2)),
]


@pytest.mark.parametrize(("name", "mesh", "plan"), CASES, ids=lambda v: f"zero{v.zero} {v.zero_ranks}" if isinstance(v, Plan) else str(v))
def test_equal(name: str, mesh: str, plan: Plan) -> None:
    model = BY_NAME[name]
    torch.manual_seed(0)
    batch = model.batch(torch.Generator().manual_seed(1))
    report = verify(model.build(0.3).train(), Mesh.parse(mesh), batch, plan=plan, loss=model.loss, clip_grad_norm=0.5)
    assert report.ok, report.table()


class TiedFar(nn.Module):
    """The first and the last layer share a weight, whose gradient is a sum over stages, and all share a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.scale * layer(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("buckets", [None, 16])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_over_stages_beside_those_of_each_turn(zero: int, buckets: int | None) -> None:
    torch.manual_seed(0)
    plan = Plan(zero=zero, zero_ranks=2, microbatches=2, buckets=buckets)
    report = verify(TiedFar(), Mesh(pp=2, dp=4), torch.randn(24, 8), plan=plan)
    assert report.ok, report.table()


class Forgets(SimComm):
    """A part's gradients aren't summed over its copies."""

    def _reduce(self, parts: Any, op: str, out: Tensor) -> Tensor:
        return super()._reduce(parts, op, out) if op not in OPS or out.numel() < 50 else out.copy_(parts[self.rank // 2 % len(parts)])


def test_a_sum_over_copies_that_is_left_out_shows() -> None:
    batch = mlp.batch(8, torch.Generator().manual_seed(1))
    report = verify(mlp.build(), Mesh(dp=4), batch, plan=Plan(zero_ranks=2), loss=mlp.loss, make=Forgets)
    assert not report.ok


class Counts(SimComm):
    """Counts the collectives of buckets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def _begin(self, call: Call) -> Callable[[], Tensor]:
        if "bucket" in call.site:
            self.calls[call.kind, call.group.axes] += 1
        return super()._begin(call)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_rank_holds_and_sends(ranks: int, zero: int, microbatches: int) -> None:
    """A part is one of ``zero_ranks``; gradients go over copies once a step, as parts."""
    model = gpt.build()
    plan = Plan(zero=zero, zero_ranks=ranks, microbatches=microbatches)
    options = make_options(None, lambda n: torch.optim.SGD([p for _, p in n], lr=0.1), plan, None, 0, "check", None, 0, "eager", ())
    batch = gpt.batch(24, torch.Generator().manual_seed(1))
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> tuple[int, int, Counter[tuple[str, tuple[str, ...]]]]:
        step = Step(model, comm.mesh, comm, options, share)
        rows = step.shard(batch)
        step(rows)
        assert isinstance(comm, Counts)
        comm.calls.clear()
        step(rows)
        assert step._state is not None  # noqa: SLF001
        parts, grads = (sum(t.nbytes for t in ts) for ts in (step._state.parts, step._state.grads))  # noqa: SLF001
        return parts, grads, comm.calls

    whole = sum(math.prod(p.shape) * p.itemsize for p in model.parameters())
    for parts, grads, sent in run_simulated(Mesh(dp=4), rank, make=Counts):
        assert whole <= parts * ranks <= whole * 1.01
        assert whole <= grads * (ranks if zero > 1 else 1) <= whole * 1.01
        over = {1: ("dp",), 2: ("dp/2",), 4: ()}[ranks]
        sums = {axes for kind, axes in sent if kind == "all_reduce"}
        assert sums == ({over} if over else set())
        times = microbatches if zero > 1 and ranks > 1 else 1
        buckets = sent["all_reduce", over] or sent["reduce_scatter", ("dp",)] // times
        assert buckets
        assert sent["reduce_scatter", {1: (), 2: ("dp%2",), 4: ("dp",)}[ranks]] == (buckets * times if ranks > 1 else 0)


def test_refused() -> None:
    batch = mlp.batch(12, torch.Generator().manual_seed(1))
    with pytest.raises(PlanError, match="zero_ranks=2.*doesn't divide the mesh's dp=3"):
        verify(mlp.build(), Mesh(dp=3), batch, plan=Plan(zero_ranks=2), loss=mlp.loss)
    with pytest.raises(PlanError, match="nothing is shared out"):
        Plan(zero=0, zero_ranks=2)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(PlanError):
            Plan(zero_ranks=wrong)  # type: ignore[arg-type]
