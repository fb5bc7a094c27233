"""Recompute: the backward makes values again; the result stays equal to the bit, and less is kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.api import make_options, verify
from autopar.applied import find_applied
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.cost.live import kept_bytes
from autopar.errors import PlanError
from autopar.inspect.tables import live_peaks
from autopar.ir.local import LocalProgram
from autopar.layout.bucket import kept_bytes as kept_of
from autopar.layout.mesh import Mesh
from autopar.passes import recompute as module
from autopar.plan.plan import Plan, limit_of, parse_bytes
from autopar.programs import compile_step
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from models import gpt, resnet

SIZES = dict(layers=3, hidden=64, vocab=128, sequence=32)
BATCH = gpt.batch(8, torch.Generator().manual_seed(1), vocab=128, sequence=32)


def model(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return gpt.build(dropout=dropout, **SIZES)


def compiled(mesh: Mesh, net: nn.Module | None = None, batch: Any = BATCH, **plan: Any) -> Compiled:
    tree, tensors = take_batch(batch)
    options = make_options(None, None, Plan(**plan), None, 0, "check", None, 0, "eager", ())
    return compile_step(net or model(), mesh, options, tree, tensors)


def test_less_is_kept() -> None:
    """Each setting keeps less; full keeps about the layers' inputs."""
    mesh = Mesh(tp=2)
    kept = [kept_bytes(compiled(mesh, recompute=r).final) for r in (None, ("blocks.1",), ("blocks.*.mlp",), "selective", "full")]
    nothing, layer, mlps, selective, full = kept
    assert nothing > 1.3 * max(layer, mlps) > 1.3 * min(layer, mlps) > 1.3 * 1.3 * selective > 1.3 * 1.3 * full
    stream = BATCH[0].numel() * 64 * 4
    loss = BATCH[0].numel() * 128 * 4
    assert full < (SIZES["layers"] + 2) * stream + 2 * loss


def test_gathered_parameters_are_not_kept() -> None:
    """What a microbatch keeps is the same whichever way its parameters come."""
    kept = {zero: kept_bytes(compiled(Mesh(dp=2), zero=zero).final) for zero in (0, 1, 3)}
    assert kept[0] == kept[1] == kept[3] > 0


@pytest.mark.parametrize("request_", ["full", "selective", ("blocks.0", "blocks.*.mlp"), "limit"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2"], ids=str)
def test_equal(mesh: str, request_: Any) -> None:
    """Gradients, with dropout and microbatches, beside the plain model, and on stages."""
    request_ = {"dp=2,tp=2": "4MB", "pp=2": "8MB"}[mesh] if request_ == "limit" else request_
    plan = Plan(recompute=request_, microbatches=2, schedule="zb-h1" if "pp" in mesh else None)
    report = verify(model(), Mesh.parse(mesh), BATCH, plan=plan)
    assert report.ok, report.table()


def bits(mesh: Mesh, plan: Plan) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step in float32."""
    options = make_options(None, None, plan, None, 0, "check", None, 0, "eager", ())
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        step = Step(model(0.5), comm.mesh, comm, options, share)
        return step(step.shard(BATCH)), step.gradients()

    return run_simulated(mesh, rank)[0]


@pytest.mark.parametrize("request_", ["full", "selective"])
def test_to_the_bit(request_: str) -> None:
    """R03: masks and all else repeat, so that nothing changes in any bit, also in float32."""
    loss, grads = bits(Mesh(tp=2), Plan())
    again, found = bits(Mesh(tp=2), Plan(recompute=request_))
    assert torch.equal(loss, again) and grads.keys() == found.keys()
    assert all(torch.equal(grads[name], found[name]) for name in grads)


def test_another_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: the copy of a random node draws other numbers."""
    made = module.recompute

    def faulty(program: LocalProgram, values: Any) -> LocalProgram:
        found = made(program, values)
        nodes = [
            n.with_args(n.args[0], n.args[1] + 1, *n.args[2:]) if n.op == "autopar.keep" and n.phase == "backward" else n
            for n in found.nodes
        ]  # fmt: skip
        assert tuple(nodes) != found.nodes
        return replace(found, nodes=tuple(nodes))

    monkeypatch.setattr(module, "recompute", faulty)
    assert not verify(model(), Mesh(dp=2), BATCH, plan=Plan(recompute="full")).ok


class Counting(nn.Module):
    """R04: a counter and running statistics, and a router whose ties are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2))
        self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8))
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            x = x + layer(x)
        score, which = self.router(x).softmax(-1).topk(1)
        return (x * self.experts[which[:, 0]] * score).square().mean()


@pytest.mark.parametrize("request_", ["full", ("layers.*", "router"), "selective"], ids=str)
def test_side_effects_happen_once(request_: Any) -> None:
    torch.manual_seed(0)
    report = verify(Counting(), Mesh(dp=2), torch.randn(8, 8), plan=Plan(recompute=request_))
    assert report.ok, report.table()
    assert any("num_batches_tracked" in str(row) for row in report.rows) and any("count" in str(row) for row in report.rows)


def test_statistics_of_a_batch() -> None:
    report = verify(resnet.build(), Mesh(dp=2), resnet.batch(8, torch.Generator().manual_seed(0)), plan=Plan(recompute="full"))
    assert report.ok, report.table()


@pytest.mark.parametrize("mesh", [pytest.param("tp=2", marks=pytest.mark.slow), "pp=2"])
def test_a_limit_is_kept(mesh: str) -> None:
    """The peak falls with the limit, is under it, and no more time is added than the limit asks for.

    Tensors are of 1 MiB and more, of which emitted functions let go as soon as they can.
    """
    sizes = dict(layers=3, hidden=256, vocab=1024, sequence=128)
    batch = tuple(torch.empty(64, 128, dtype=torch.long, device="meta") for _ in range(2))
    with torch.device("meta"):
        net = gpt.build(dropout=0.2, **sizes)

    def look(request_: Any) -> tuple[int, int, int]:
        """Most bytes of activations and gradients, bytes of parameters, and nodes that run again."""
        found = compiled(Mesh.parse(mesh), net, batch, recompute=request_, microbatches=4 if "pp" in mesh else 1)
        again = sum(n.outs[0].endswith("_again") for n in found.final.nodes)
        flats = sum(b.numel * b.dtype.itemsize for b in found.spec.buckets)
        return max(live_peaks(found).values()) + flats, flats, again

    whole, held, _ = look(None)
    least, _, most = look("full")
    seen = []
    for share in (0.6, 0.2):
        limit = held + least + int((whole - least) * share)
        live, _, again = look(limit)
        seen.append((live, again))
        assert 0.85 * limit < live + held <= limit
    assert whole > seen[0][0] > seen[1][0]
    assert 0 < seen[0][1] < seen[1][1] <= most + 40


@pytest.mark.parametrize("zero", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_limit_knows_what_zero_shares_out(zero: int) -> None:
    """A limit under which whole parameters and gradients wouldn't fit is kept, and made use of: counted by statements."""
    sizes = dict(layers=4, hidden=512, vocab=4096, sequence=64)
    batch = tuple(torch.empty(8, 64, dtype=torch.long, device="meta") for _ in range(2))
    with torch.device("meta"):
        net = gpt.build(dropout=0.2, **sizes)
    mesh, seen = Mesh(dp=4), []

    def look(**plan: Any) -> tuple[int, int]:
        found = compiled(mesh, net, batch, zero=zero, **plan)
        return sum(kept_of(found.spec.buckets, mesh, zero)) + max(live_peaks(found).values()), len(found.final.nodes)

    (whole, few), (least, many) = look(), look(recompute="full")
    for share in (1.01, 0.1):
        limit = least + int((whole - least) * share)
        nbytes, nodes = look(recompute=limit)
        assert 0.85 * limit < nbytes <= limit and few <= nodes <= many + 40
        seen.append(nodes)
    assert seen[0] == few < seen[1]
    assert zero < 3 or limit < 2 * sum(p.numel() * p.itemsize for p in net.parameters())


class Raw(nn.Module):
    """A norm on the batch itself, whose input has no gradient: one of three results that nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.up(self.norm(x)))).square().mean()


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_results_that_nobody_asks_for_are_not_counted(mesh: str, zero: int) -> None:
    plan = Plan(recompute="1MB", zero=zero, microbatches=2)
    report = verify(Raw(), Mesh.parse(mesh), torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)), plan=plan)
    assert report.ok, report.table()


def test_a_region_with_batch_norm() -> None:
    """Running statistics advance once, in the reference too."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.norm(self.up(x)).relu(), x, use_reentrant=False).square().mean()

    report = verify(Normed().train(), Mesh(dp=2), torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    assert report.ok, report.table()


def test_a_limit_that_nothing_meets_on_stages() -> None:
    """Where other microbatches hold more than all tensors of one, it is told how low a limit may be."""
    with pytest.raises(PlanError, match="no choice of what to recompute fits into 20,000 bytes on a rank") as error:
        compiled(Mesh(pp=2), recompute="20KB", microbatches=8, schedule="gpipe")
    assert "the least is about" in str(error.value)


def test_a_limit_that_nothing_meets() -> None:
    with pytest.raises(PlanError, match="no choice of what to recompute fits into 100,000 bytes") as error:
        compiled(Mesh(tp=2), recompute="100KB")
    assert "models/gpt.py" in str(error.value) and "of the rest most are" in str(error.value)


def test_bad_requests() -> None:
    for bad in (0, -5, True, 1.5, [3]):
        with pytest.raises(PlanError, match="is no request"):
            Plan(recompute=bad)
    with pytest.raises(PlanError, match="no module that the forward calls matches 'bloks.*'"):
        compiled(Mesh(tp=2), recompute="bloks.*")
    assert Plan(recompute=["a", "b"]).recompute == ("a", "b") and Plan(recompute="a.*").recompute == ("a.*",)


def test_bytes() -> None:
    assert [parse_bytes(t) for t in ("80GB", "1.5 GiB", "4096", "2kb", "3 m", "2TB", "x", "1TBx", "full")] == [
        80 * 10**9, 3 * 2**29, 4096, 2000, 3_000_000, 2 * 10**12, None, None, None,
    ]  # fmt: skip
    assert limit_of(7) == 7 and limit_of("7") == 7 and limit_of("full") is None and limit_of(("a",)) is None


def test_nothing_is_made_for_nobody() -> None:
    """Copies that no gradient needs aren't there: values that are kept end the chains."""
    final = compiled(Mesh(dp=2), recompute="full").final
    read = {r for n in final.nodes for r in n.refs()} | {o.value for o in final.outputs}
    copies = [n for n in final.nodes if any(o.endswith(module.SUFFIX) for o in n.outs)]
    assert copies and all(any(o in read for o in n.outs if o) for n in copies)
    assert all(n.phase == "backward" for n in copies) and copy.copy(copies)


class Own(nn.Module):
    """``models/gpt.py`` whose blocks the model itself runs under ``torch.utils.checkpoint``, as many as ``count``; ``deep``: twice."""

    def __init__(self, count: int, dropout: float = 0.2, deep: bool = False) -> None:
        super().__init__()
        self.inner, self.count, self.deep = model(dropout), count, deep

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        inner: Any = self.inner
        x = inner.tokens(ids) + inner.positions(torch.arange(ids.shape[1]))
        for n, block in enumerate(inner.blocks):
            if n >= self.count:
                x = block(x)
            elif self.deep:
                x = checkpoint(lambda x, b: checkpoint(b, x, use_reentrant=False) * 1.5, x, block, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(inner.head(inner.norm(x)).flatten(0, 1), labels.flatten())


def test_the_models_own_regions() -> None:
    """A model's ``torch.utils.checkpoint`` is a request: as if the plan named these modules. A plan that names others replaces it."""
    mesh = Mesh(tp=2)
    kept = {(n, plan): kept_bytes(compiled(mesh, Own(n), recompute=plan).final) for n in (0, 2, 3) for plan in (None, (), "full")}
    assert kept[0, None] == kept[0, ()] == kept[2, ()] == kept[3, ()] and kept[0, "full"] == kept[2, "full"] == kept[3, "full"]
    assert kept[2, None] == kept_bytes(compiled(mesh, Own(0), recompute=("inner.blocks.0", "inner.blocks.1")).final)
    assert kept[0, None] > 1.3 * kept[2, None] > 1.3 * kept[3, None]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
@pytest.mark.parametrize("deep", [False, True])
def test_the_models_own_regions_are_equal(mesh: str, deep: bool) -> None:
    report = verify(Own(3, deep=deep).train(), Mesh.parse(mesh), BATCH, plan=Plan(microbatches=2, zero=3))
    assert report.ok, report.table()


def test_the_models_own_regions_are_told() -> None:
    for count, found in ((2, True), (0, False)):
        told = [a for a in find_applied(compiled(Mesh(tp=2), Own(count)), Plan()) if a.request == "torch.utils.checkpoint"]
        assert bool(told) == found and all("nodes run again in inner.blocks.0" in a.done for a in told)
