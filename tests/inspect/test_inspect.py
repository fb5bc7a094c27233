"""What ``inspect`` says of a program, beside what really happens when it runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import make_options, parallelize
from autopar.cost.live import kept_bytes
from autopar.errors import InputError
from autopar.inspect import tables
from autopar.inspect.model import Inspection, inspect_model, state_elements
from autopar.layout.mesh import Mesh
from autopar.plan.plan import LEVELS, Plan
from autopar.programs import Options
from autopar.runtime.comm import Comm, Record
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from models import gpt, llama
from tests.procs.pool import Pool

CASES = {
    "gpt": ("dp=2,tp=2", Plan(), {}),
    "sequence": ("dp=2,tp=2", Plan(sequence=True, zero=0), dict(dropout=0.1)),
    "microbatches": ("tp=2,dp=2", Plan(microbatches=2, buckets=20_000), {}),
    "uneven": ("dp=3", Plan(), dict(hidden=20, heads=2)),
}


def options(plan: Plan) -> Options:
    return make_options(None, partial(torch.optim.AdamW, lr=1e-3), plan, None, 0, "check", None, 0, "eager", ())


def built(case: str) -> tuple[Mesh, Plan, nn.Module, Any]:
    text, plan, config = CASES[case]
    torch.manual_seed(0)
    model = gpt.build(**config)
    mesh = Mesh.parse(text)
    return mesh, plan, model, gpt.batch(mesh["dp"] * 4, torch.Generator().manual_seed(0), **config)


def counted(records: list[Record]) -> Counter[tuple[Any, ...]]:
    return Counter((r.kind, tuple(r.axes), r.site, r.bytes) for r in records)


def predicted(inspection: Inspection, rank: int) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for r in tables.collective_rows(inspection.compiled, rank):
        found[r.kind, r.axes, r.module, r.bytes] += r.times
    return found


@pytest.mark.parametrize("case", CASES)
def test_bytes_as_predicted(case: str) -> None:
    mesh, plan, model, batch = built(case)
    inspection = inspect_model(model, mesh, batch, options(plan))
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> list[Record]:
        step = Step(model, mesh, comm, options(plan), share)
        step(step.shard(batch))
        return list(step.metrics["records"])

    for number, records in enumerate(run_simulated(mesh, rank)):
        assert counted(records) == predicted(inspection, number), f"rank {number}"
        assert sum(tables.by_axis(tables.collective_rows(inspection.compiled, number)).values()) == sum(r.bytes for r in records)


def one_step(case: str) -> list[tuple[Any, ...]]:
    mesh, plan, model, batch = built(case)
    step = parallelize(model, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-3), plan=plan)
    step(step.shard(batch))
    records = step.metrics["records"]
    step.close()
    return sorted(counted(records).items())


@pytest.mark.procs
@pytest.mark.parametrize("case", ["gpt", "microbatches"])
def test_bytes_of_real_processes(procs: Callable[[int], Pool], case: str) -> None:
    mesh, plan, model, batch = built(case)
    inspection = inspect_model(model, mesh, batch, options(plan))
    for number, found in enumerate(procs(mesh.size).run(one_step, case)):
        assert found == sorted(predicted(inspection, number).items()), f"rank {number}"


def test_rows_and_texts() -> None:
    mesh, plan, model, batch = built("gpt")
    inspection = inspect_model(model, mesh, batch, options(plan))
    rows = tables.parameter_rows(inspection.compiled)
    assert [r.path for r in rows] == [n for n, _ in model.named_parameters()]
    whole = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    halved = next(r for r in rows if r.path == "blocks.0.mlp.up.weight")
    assert halved.sharding == "[128@tp, 32]" and halved.bytes == whole[halved.path] // 2 and halved.owned_bytes == halved.bytes // 2
    caused = [r for r in tables.collective_rows(inspection.compiled) if r.module == "blocks.0.mlp.down"]
    assert [(r.kind, r.axes, r.phase) for r in caused] == [("all_reduce", ("tp",), "forward")]
    assert caused[0].line.startswith("models/gpt.py:") or caused[0].line.split(":")[0].endswith("models/gpt.py")
    assert "self.down" in caused[0].code
    text = inspection.table()
    assert "blocks.1.attention.out.weight" in text and "ZeRO 1 (this plan)" in text and caused[0].line in text
    assert "comm.all_reduce" in inspection.graph() and "def step(" in inspection.source()
    assert len(inspection.graph("forward")) < len(inspection.graph())
    data = json.loads(json.dumps(inspection.to_json()))
    assert data["mesh"] == "dp=2,tp=2" and len(data["parameters"]) == len(rows)
    assert Plan(**data["plan"]) == inspection.plan


def test_memory_by_level() -> None:
    mesh, _, model, batch = built("gpt")
    found = {z: inspect_model(model, mesh, batch, options(Plan(zero=z))) for z in LEVELS}
    memory = {r.what: r.bytes for r in tables.memory_rows(found[1].compiled, found[1].states)}
    whole, part = (4 * sum(n(b) for b in found[1].compiled.spec.buckets) for n in (lambda b: b.numel, lambda b: b.part(mesh)))
    assert found[1].states == 2.0  # AdamW
    assert memory["optimizer state"] == (2 * whole, 2 * part, 2 * part, 2 * part)
    assert memory["gradients, kept"] == (whole, whole, part, part)
    assert memory["parameters, kept"] == (whole, whole, whole, part)
    for z in LEVELS:
        share: dict[Any, Any] = {}

        def rank(comm: Comm, z: int = z, share: dict[Any, Any] = share) -> tuple[int, int]:
            step = Step(model, mesh, comm, options(Plan(zero=z)), share)
            step(step.shard(batch))
            held = step.tensors()
            return sum(t.nbytes for t in held["parameters"]), sum(t.nbytes for t in held["optimizer state"])

        kept, state = run_simulated(mesh, rank)[0]
        assert (kept, state) == (memory["parameters, kept"][z], memory["optimizer state"][z])


def saved(plan: Plan) -> int:
    inspection = inspect_model(gpt.build(), Mesh(dp=2), gpt.batch(8, torch.Generator()), options(plan))
    return kept_bytes(inspection.compiled.final)


def test_activations_of_one_microbatch() -> None:
    assert saved(Plan(microbatches=4)) < 0.35 * saved(Plan())  # the loop holds one microbatch's values at a time


def test_no_values_are_needed() -> None:
    with torch.device("meta"):
        model = llama.build("8b", layers=2)
    batch = {k: torch.empty(4, 8192, dtype=torch.long, device="meta") for k in ("ids", "labels")}
    inspection = inspect_model(model, Mesh(dp=4, tp=8), batch, options(Plan()))
    rows = tables.parameter_rows(inspection.compiled)
    assert sum(r.bytes for r in rows) < sum(p.numel() * 4 for p in model.parameters()) / 7


def test_state_elements() -> None:
    assert state_elements(lambda named: torch.optim.SGD([p for _, p in named], lr=1.0), ["a"]) == 0
    assert state_elements(lambda named: torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9), ["a"]) == 1
    with pytest.raises(InputError, match="can't take a step"):
        state_elements(lambda named: torch.optim.LBFGS([p for _, p in named]), ["a"])
