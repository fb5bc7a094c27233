"""Steps between real processes equal the plain model; all that a step can do, on two and four ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.reference import ReplaceRandom
from tests.procs import step_jobs as jobs
from tests.procs.pool import Pool

pytestmark = pytest.mark.procs
Pools = Callable[[int], Pool]
ALLOWED = 1e-10
#: seconds for one job: ranks are many, cores are few.
LIMIT = 200.0


def plain(name: str, optimizer: str | None, *, clip: bool = True, seed: int = 3) -> dict[str, Any]:
    """The training of ``jobs.train`` by the model itself; where it casts to float32, without that."""
    model = jobs.model_of(name)
    named = list(model.named_parameters())
    made = jobs.OPTIMIZERS[optimizer](named) if optimizer else torch.optim.SGD([p for _, p in named], lr=0.3)
    scheduler = jobs.halved(made)
    losses, norms, gradients = [], [], {}
    for number, batch in enumerate(jobs.batches_of(name)):
        model.zero_grad()
        with ReplaceRandom(model, seed, number, torch.float64):
            loss = model(**batch).loss if isinstance(batch, dict) else model(*batch)
        loss.backward()
        losses.append(loss.detach())
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_([p for _, p in named], 0.5)))
        made.step()
        if optimizer:
            scheduler.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "state": model.state_dict(), "model": model}


def apart(mine: Tensor, theirs: Tensor, scale: float = 0.0) -> float:
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return float((mine - theirs).abs().max() / max(theirs.abs().max().item(), scale * 1e-3, 1e-30))


def same(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    scale = max(t.abs().max().item() for t in theirs.values())
    wrong = {n: apart(mine[n], t, scale) for n, t in theirs.items() if not apart(mine[n], t, scale) <= ALLOWED}
    assert not wrong
    assert set(theirs) <= set(mine)


MB = {n: Plan(microbatches=n) for n in (1, 2)}
CASES = [
    ("gpt", "dp=2", "SGD", MB[1]), ("gpt", "tp=2", "AdamW", MB[2]), ("gpt", "dp=2,tp=2", "AdamW", Plan(interleave=2)),
    ("gpt", "dp=2,tp=2", "SGD", Plan(zero=2, recompute="full")), ("gpt2", "tp=2", "SGD", Plan(interleave=2, sequence=True)),
    ("gpt2", "dp=2", "AdamW", Plan(zero=3, microbatches=2, recompute="selective")), ("gpt2", "dp=2,tp=2", "AdamW", MB[1]),
    ("gpt without dropout", "dp=2,cp=2", "AdamW", Plan(context="ring")), ("gpt", "dp=4", "AdamW", Plan(zero=3, zero_ranks=2)),
]  # fmt: skip


def staged(microbatches: int, schedule: str | None = None) -> Plan:
    return Plan(microbatches=microbatches, schedule=schedule)


STAGED = [
    ("gpt2", "pp=2", "AdamW", staged(4, "zb-v")), ("gpt", "pp=2,dp=2", "AdamW", Plan(microbatches=4, schedule="zb-h1", zero=3)),
    ("gpt2", "pp=2,tp=2", "SGD", staged(2, "1f1b")), ("gpt", "pp=4", "AdamW", staged(4, "search")),
]  # fmt: skip
SELDOM = [
    ("gpt", "pp=2", "SGD", staged(2, "1f1b")), ("gpt", "pp=4", "SGD", staged(8, "zb-h2")), ("gpt", "pp=4", "AdamW", staged(4, "gpipe")),
    ("gpt2", "pp=2,dp=2", "AdamW", staged(2, "interleaved")), ("gpt", "pp=2,tp=2", "AdamW", staged(4, "dualpipev")),
    ("gpt2", "dp=2,pp=2", "AdamW", staged(2)), ("gpt2", "pp=2,tp=2", "SGD", staged(1)), ("gpt2", "tp=2", "SGD", MB[1]),
    ("gpt", "dp=2,tp=2", "AdamW", MB[2]),
]  # fmt: skip


def told(value: object) -> str:
    if not isinstance(value, Plan):
        return str(value)
    shown = ("microbatches", "interleave", "schedule", "sequence", "context", "zero", "zero_ranks", "recompute")
    return " ".join(f"{k}={getattr(value, k)}" for k in shown if getattr(value, k))


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer", "plan"), [*CASES, *STAGED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)], ids=told
)
def test_training(procs: Pools, name: str, mesh: str, optimizer: str, plan: Plan) -> None:
    """Losses, gradient norms before clipping, gradients and weights after three steps."""
    size = Mesh.parse(mesh).size
    ranks = procs(size).run(jobs.train, name, mesh, optimizer, plan, timeout=LIMIT)
    wanted = plain(name, optimizer)
    for rank in ranks:
        for mine, theirs in zip(rank["losses"], wanted["losses"], strict=True):
            assert mine.shape == () and not mine.requires_grad and apart(mine, theirs.to(mine.dtype)) <= ALLOWED
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=ALLOWED)
        same(rank["gradients"], wanted["gradients"])
        same({n: t for n, t in rank["state"].items()}, {n: t for n, t in wanted["state"].items() if t.is_floating_point()})
        jobs.model_of(name).load_state_dict(rank["state"], strict=True)
    replicas(ranks, Mesh.parse(mesh))


def replicas(ranks: list[dict[str, Any]], mesh: Mesh) -> None:
    """What several ranks hold is the same to the last bit: whole tensors everywhere, pieces over ``dp``."""
    for rank, found in enumerate(ranks):
        for kind in ("state", "gradients"):
            assert all(torch.equal(found[kind][n], t) for n, t in ranks[0][kind].items())
        assert [float(x) for x in found["losses"]] == [float(x) for x in ranks[0]["losses"]]
        twin = mesh.rank({**mesh.coords(rank), "dp": 0}) if "dp" in mesh.names else rank
        assert all(torch.equal(found["pieces"][n], t) for n, t in ranks[twin]["pieces"].items())


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_rest(procs: Pools, mesh: str) -> None:
    where = Mesh.parse(mesh)
    first, second = jobs.batches_of("gpt", 2)
    for number, found in enumerate(procs(where.size).run(jobs.rest, mesh, timeout=LIMIT)):
        model = jobs.model_of("gpt")
        model.load_state_dict(found["state"], strict=True)
        model.eval()
        data = number // where["tp"]
        assert found["compiled again"] == 0
        assert found["evaluate compiled again"] == 0
        short = tuple(t[: 2 * where["dp"]] for t in second)
        with torch.no_grad():
            labels = [(b[1] != -100).sum().item() for b in (first, second, short)]
            losses = [model(*b).item() for b in (first, second, short)]
            logits = model(first[0].chunk(where["dp"])[data])
        mean, weight = found["evaluate"]
        assert weight == sum(labels)
        assert mean == pytest.approx(sum(n * x for n, x in zip(labels, losses, strict=True)) / sum(labels), rel=ALLOWED)
        assert apart(found["logits"], logits) <= ALLOWED
        assert all(torch.equal(found["module"][n], t) for n, t in found["state"].items())
        assert all(torch.equal(found["loaded"][n], t) for n, t in found["state"].items())
        assert found["short"][0].shape == () and found["short"][1] != found["short"][0]
        (report,) = found["short reports"]
        assert "compiled train for batch shapes" in report and "12" in report
        assert found["other"] == found["again"] == found["after the other"]
        assert found["again"][0] == pytest.approx(losses[0], rel=ALLOWED)
        assert "closed" in found["closed"]


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "pp=2"])
def test_ways_to_begin(procs: Pools, mesh: str) -> None:
    batch = jobs.batches_of("gpt", 1)[0]
    for found in procs(Mesh.parse(mesh).size).run(jobs.ways_to_begin, mesh, timeout=LIMIT):
        for kind, model in (("broadcast", jobs.model_of("gpt", seed=0)), ("meta", jobs.model_of("gpt"))):
            if kind == "meta":
                jobs.filled(model)
            with ReplaceRandom(model, 0, 0):
                assert apart(found[kind], model(*batch).detach()) <= ALLOWED
        assert "rank 1 has other values of tokens.weight than rank 0" in found["differ"]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
def test_own_optimizer(procs: Pools, mesh: str) -> None:
    wanted = plain("gpt", None, clip=False)
    for found in procs(4).run(jobs.own_optimizer, mesh, timeout=LIMIT):
        for mine, theirs in zip(found["losses"], wanted["losses"], strict=True):
            assert apart(mine, theirs) <= ALLOWED
        same(found["state"], wanted["state"])


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_other_rows_are_refused_on_every_rank(procs: Pools, mesh: str) -> None:
    for text in procs(2).run(jobs.other_rows, mesh, timeout=LIMIT):
        assert text == "ranks 0 and 1 have the same data coordinate (dp=0) but other rows"
