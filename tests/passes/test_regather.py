"""ZeRO 2 and 3: what lives on a rank, when it is gathered and given back, and that nothing else changes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.errors import VerifyError
from autopar.layout.mesh import Mesh
from autopar.passes.check_placements import check_buckets
from autopar.plan.plan import Plan
from autopar.programs import compile_step
from autopar.runtime.comm import IDLE, LARGE, Comm
from autopar.runtime.executor import Executable, make_state
from autopar.runtime.random import step_key
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step
from models import gpt
from tests.cases.run import Net, adamw, equal, near, ranks

BATCH = gpt.batch(8, torch.Generator().manual_seed(1))


def model(dropout: float = 0.3, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return gpt.build(dropout=dropout, **{"layers": 4, **sizes})


def compiled(mesh: str, module: nn.Module | None = None, **plan: Any) -> Compiled:
    tree, tensors = take_batch(BATCH)
    options = make_options(None, None, Plan(**plan), None, 0, "check", None, 0, "eager", ())
    return compile_step(module or model(), Mesh.parse(mesh), options, tree, tensors)


PLANS = [
    ("dp=2", dict(zero=2)),
    ("dp=4", dict(zero=3)),
    ("dp=2", dict(zero=2, microbatches=4)),
    ("dp=2,tp=2", dict(zero=3, microbatches=2, sequence=True)),
    ("dp=2", dict(zero=3, microbatches=4, interleave=2, recompute="full")),
    ("dp=2", dict(zero=2, microbatches=2, interleave=2)),
    ("pp=2,dp=2", dict(zero=2, microbatches=4)),
    ("pp=2,dp=2", dict(zero=3, microbatches=4, schedule="zb-h1", recompute="selective")),
    ("pp=2,dp=2", dict(zero=3, microbatches=4, schedule="zb-v")),
]


@pytest.mark.parametrize(("mesh", "plan"), PLANS, ids=str)
def test_equal(mesh: str, plan: dict[str, Any]) -> None:
    report = verify(model(tied=True), Mesh.parse(mesh), BATCH, plan=Plan(**plan, buckets=20_000))
    assert report.ok, report.table()


def test_what_a_rank_holds() -> None:
    """Between steps: at 0 and 1 one whole copy of gradients, at 2 its part, at 3 nothing but its part of anything."""
    for zero in (0, 1, 2, 3):

        def look(step: Step, rank: int) -> tuple[int, int, int, int]:
            step(step.shard(BATCH))
            step(step.shard(BATCH))
            state = step._need()  # noqa: SLF001
            owned = sum(b.part(step.mesh) for b in state.buckets)
            kept = sum(g.numel() for g in step._grads or ())  # noqa: SLF001
            storage = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in (*state.grads, *(step._grads or ()))}  # noqa: SLF001
            return owned, sum(p.numel() for p in state.parts), kept, sum(storage.values()) // 8 + sum(w.numel() for w in state.whole)

        for owned, parts, grads, memory in ranks("dp=4", model(), look, optimizer=adamw, plan=Plan(zero=zero, buckets=20_000)):  # type: ignore[arg-type]
            assert parts == grads == (owned if zero else 4 * owned)
            assert memory == {0: 8 * owned, 1: 8 * owned, 2: 5 * owned, 3: owned}[zero]


def test_how_often_and_how_many() -> None:
    """Of four layers each is gathered for the forward and, but for the last, once more; two buckets are there at most."""
    module = compiled("dp=2", zero=3, buckets=1 << 20).module
    source, by_caller = module.source, [(f"{b}_full", b) for b in module.gathers]
    begun = by_caller + re.findall(r"(\w+) = comm.all_gather\((\w+),", source)
    times = {bucket: sum(b == bucket for _, b in begun) for _, bucket in begun}
    assert sorted(times.values()) == [1, 1, 1, 2, 2, 2]  # head and norm, embeddings and the last layer once
    assert len(re.findall(r"comm.give\(", source)) == len(begun)
    there, most = {full for full, _ in by_caller}, 0
    for line in source.splitlines():
        if match := re.search(r"(\w+) = comm.all_gather\(bucket", line):
            there.add(match.group(1))
        if match := re.search(r"comm.give\((\w+)\)", line):
            there.remove(match.group(1))
        most = max(most, len(there))
    assert not there and most == 2


def test_kept_for_the_backward() -> None:
    """Each bucket is gathered once, and the result is the same."""
    source = compiled("dp=2", zero=3, regather=False, buckets=1 << 20).module.source
    begun = re.findall(r"all_gather\((\w+),", source)
    assert len(set(begun)) == len(begun) and "_again" not in source
    report = verify(model(), Mesh(dp=2), BATCH, plan=Plan(zero=3, regather=False, microbatches=2))
    assert report.ok, report.table()


def test_a_layer_stays_one_function() -> None:
    source = compiled("dp=2", zero=3).module.source
    assert source.count("blocks_forward_1(") == 5 and "blocks_forward_2(" not in source


def test_reductions_under_way() -> None:
    """Memory for gradients is taken when the first is made; two reductions are under way at most."""
    source = compiled("dp=2", zero=2, buckets=10_000).module.source
    taken = [line.split(" = ")[0].strip() for line in source.splitlines() if "_grad = comm.empty" in line]
    started = re.findall(r"(\w+)_own = comm.reduce_scatter", source)
    assert sorted(taken) == sorted(started) and len(started) > 3
    under_way = 0
    for line in source[source.index("def step(") :].splitlines():
        under_way += "comm.reduce_scatter(" in line
        under_way -= "_own.wait()" in line
        assert under_way <= 2


def test_a_module_used_again_and_a_parameter_given_out() -> None:
    """Albert's way: one layer called several times has one gather a run; a weight in the output is no view of what was gathered."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Any:
        for _ in range(3):
            x = torch.tanh(m.shared(m.first(x)))
        return {"loss": m.last(x).pow(2).mean(), "weight": m.shared.weight.t(), "x": x}

    net = Net(forward, first=nn.Linear(4, 4), shared=nn.Linear(4, 4), last=nn.Linear(4, 4))
    x = torch.randn(8, 4)
    equal(net, x, ("dp=2",), (Plan(zero=3), Plan(zero=3, microbatches=2)))

    def look(step: Step, rank: int) -> bool:
        step(step.shard(x.double()))
        out = step.forward(step.shard(x.double()))
        kept = out["weight"].clone()
        step.evaluate([step.shard(x.double())])
        return torch.equal(out["weight"], kept) and torch.equal(kept.t(), step.full_state_dict()["shared.weight"])

    assert all(ranks("dp=2", net, look, optimizer=adamw, plan=Plan(zero=3)))


@pytest.mark.parametrize("zero", [2, 3])
def test_the_rest_of_a_step(zero: int) -> None:
    """Evaluation, weights set and read, a short last batch, clipping: as the plain model."""
    net = model(0.0).double()
    whole = tuple(t[:6] for t in BATCH)

    def run(step: Step, rank: int) -> tuple[dict[str, Tensor], float, float]:
        weights = {n: t + 0.01 for n, t in step_weights.items()}
        step(step.shard(BATCH))
        step.load_state_dict(weights)
        step(step.shard(BATCH))
        step(tuple(t[:4] if rank == 0 else t[4:] for t in whole))
        loss, _ = step.evaluate([step.shard(BATCH)])
        return step.full_state_dict(), loss, float(step.metrics["grad_norm"])

    step_weights = {n: t.clone() for n, t in net.state_dict().items()}
    found = ranks("dp=2", net, run, optimizer=adamw, plan=Plan(zero=zero), clip_grad_norm=0.1)
    expected = ranks("dp=1", net, lambda step, rank: _plain(step, step_weights, whole), optimizer=adamw, clip_grad_norm=0.1)[0]
    for state, loss, norm in found:
        assert all(near(state[n], t) for n, t in expected[0].items())
        assert near(torch.tensor([loss, norm], dtype=torch.float64), expected[1:])


def _plain(step: Step, weights: dict[str, Tensor], last: Any) -> tuple[dict[str, Tensor], float, float]:
    step(BATCH)
    step.load_state_dict({n: t + 0.01 for n, t in weights.items()})
    step(BATCH)
    step(last)
    loss, _ = step.evaluate([BATCH])
    return step.full_state_dict(), loss, float(step.metrics["grad_norm"])


def test_memory_given_back_too_early_is_caught() -> None:
    """A seeded fault: what was gathered is given back before its last use. The simulator writes nan over what it takes back."""
    made = compiled("dp=2", model(0.0), zero=3)
    source = made.module.source
    give = next(line for line in source.splitlines() if "comm.give(" in line)
    name = give.split("(")[1].rstrip(")")
    wait = next(line for line in source.splitlines() if f"{name} = {name}.wait()" in line)
    faulty = source.replace(give + "\n", "", 1).replace(wait, f"{wait}\n{give}", 1)
    assert faulty != source
    net = model(0.0)
    named = dict(net.named_parameters())

    def rank(comm: Comm) -> list[float]:
        rows = list(BATCH)
        losses = []
        for text in (source, faulty):
            run = Executable(text, made.spec, comm, made.final.consts)
            losses.append(float(run.run(make_state(made.spec, named.__getitem__, {}, comm), rows, step_key(0, 0))[0]))  # type: ignore[arg-type]
        return losses

    for right, wrong in run_simulated(Mesh(dp=2), rank):
        assert right == right and wrong != wrong
    assert SimComm.give is not Comm.give


def test_memory_at_hand() -> None:
    """Blocks come back whole, however much of one was asked for; none that is twice too large is taken, and idle ones are few."""
    unit = LARGE // 4

    def rank(comm: Comm) -> None:
        first = comm.empty(4 * unit, torch.float32)
        place = first.data_ptr()
        comm.give(first)
        half = comm.empty(3 * unit, torch.float32)
        assert half.data_ptr() == place and half.numel() == 3 * unit
        other = comm.empty(3 * unit, torch.float32)
        assert other.data_ptr() != place
        comm.give(half)
        assert comm.empty(4 * unit, torch.float32).data_ptr() == place
        comm.give(other)
        assert comm.empty(unit, torch.float32).data_ptr() != other.data_ptr()  # a third of it
        assert comm.empty(2 * unit, torch.float64).dtype == torch.float64
        comm.give(comm.empty(0, torch.float32))

    def many(comm: Comm) -> None:
        held = [comm.empty(n * unit, torch.float32) for n in (4, 4)]
        for x in held:
            comm.give(x)
        for n in (9, 20, 45):
            comm.give(comm.empty(n * unit, torch.float32))
            kept = sum(b.nbytes for b in comm._blocks)  # noqa: SLF001
            assert kept <= IDLE * n * LARGE

    run_simulated(Mesh(), rank)
    run_simulated(Mesh(), many)


def test_a_view_at_a_wrong_place_is_caught() -> None:
    """The verifier sees a second view of a parameter that looks elsewhere."""
    made = compiled("dp=2", zero=3)
    nodes = list(made.final.nodes)
    at = max(n for n, node in enumerate(nodes) if node.op == "autopar.member" and node.args[1])
    nodes[at] = nodes[at].with_args(nodes[at].args[0], nodes[at].args[1] + 1, nodes[at].args[2])
    with pytest.raises(VerifyError, match="where no parameter lies"):
        check_buckets(replace(made.final, nodes=tuple(nodes)), made.local)
