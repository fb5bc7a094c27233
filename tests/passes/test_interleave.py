"""Microbatches side by side: the result of one process, the other lane's compute between a collective and its wait, the same bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.errors import PlanError
from autopar.inspect.tables import by_axis, collective_rows, head
from autopar.ir.program import Node
from autopar.layout.mesh import Mesh
from autopar.passes import interleave
from autopar.plan.plan import Plan
from autopar.programs import compile_step, filled_plan, microbatches_of
from models import gpt, llama, resnet


def compiled(model: nn.Module, batch: object, mesh: Mesh, plan: Plan) -> Compiled:
    tree, tensors = take_batch(batch)
    return compile_step(model, mesh, make_options(None, None, plan, None, 0, "check", None, 0, "eager", ()), tree, tensors)


class Peak(nn.Module):
    """A buffer that keeps the largest and the smallest activation of a batch: totals over microbatches that are no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("largest", torch.full((16,), -9.0))
        self.register_buffer("smallest", torch.full((16,), 9.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.largest.copy_(torch.maximum(self.largest, h.detach().amax(0)))
        self.smallest.copy_(torch.minimum(self.smallest, h.detach().amin(0)))
        return self.down(torch.tanh(h)).square().sum()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(interleave=2),
        Plan(microbatches=4, interleave=2, sequence=True),
        Plan(microbatches=4, interleave=4, zero=0, buckets=4096),
    ],
    ids=["two", "two at a time", "four"],
)
def test_equal(mesh: str, plan: Plan) -> None:
    torch.manual_seed(0)
    report = verify(gpt.build(dropout=0.3), Mesh.parse(mesh), gpt.batch(8, torch.Generator().manual_seed(1)), plan=plan)
    assert report.ok, report.table()


def test_totals_that_are_no_sums() -> None:
    torch.manual_seed(0)
    model, batch = Peak(), torch.randn(8, 8)
    for plan in (Plan(interleave=2), Plan(microbatches=4, interleave=2)):
        report = verify(model, Mesh(dp=2, tp=2), batch, plan=plan)
        assert report.ok, report.table()
        ops = {n.op for n in compiled(model, batch[:4], Mesh(dp=2, tp=2), plan).final.nodes}
        assert {"aten.maximum.default", "aten.minimum.default"} <= ops


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that runs another's rows, and one whose share is another's: equality must notice."""
    torch.manual_seed(0)
    model, batch = gpt.build(), gpt.batch(8, torch.Generator().manual_seed(1))
    placed, join = interleave._Interleaver.placed, interleave._Interleaver.join

    def other_rows(self: interleave._Interleaver, tree: object, lane: int) -> object:
        return placed(self, tree, 0)

    def one_share(self: interleave._Interleaver, value: str, merged: list[Node]) -> list[Node]:
        self.names[1][value] = value
        return join(self, value, merged)

    for name, fault in (("placed", other_rows), ("join", one_share)):
        with monkeypatch.context() as patch:
            patch.setattr(interleave._Interleaver, name, fault)
            assert not verify(model, Mesh(tp=2), batch, plan=Plan(interleave=2)).ok, name


def test_the_other_lane_computes_meanwhile() -> None:
    """From the second collective of a lane on, the wait for it stands behind a segment of the other lane, in forward and backward."""
    driver = compiled(gpt.build(), gpt.batch(4, torch.Generator()), Mesh(tp=2), Plan(interleave=2)).module.source.partition("def step(")[2]
    begun = {m[1]: m.end() for m in re.finditer(r'(\w+) = comm\.all_reduce\([^=]*site="blocks', driver)}
    assert len(begun) == 2 * 2 * 2 * 2  # layers, forward and backward, two each, lanes
    waited = {v: driver.index(f" {v}.wait()") for v in begun}
    hidden = [v for v in begun if re.search(r"(blocks|model)_(forward|backward)_\d+\(", driver[begun[v] : waited[v]])]
    assert hidden == list(begun)
    assert "for mb" not in driver
    assert (
        "for mb in range(2)"
        in compiled(gpt.build(), gpt.batch(4, torch.Generator()), Mesh(tp=2), Plan(microbatches=4, interleave=2)).module.source
    )


def test_bytes_are_those_of_microbatches() -> None:
    batch = gpt.batch(4, torch.Generator())
    for mesh in (Mesh(tp=2), Mesh(dp=2, tp=2)):
        plain, lanes, looped = (
            by_axis(collective_rows(compiled(gpt.build(), batch, mesh, plan)))
            for plan in (Plan(microbatches=4), Plan(microbatches=4, interleave=4), Plan(microbatches=4, interleave=2))
        )
        assert plain == lanes == looped


def test_lanes_share_their_segments() -> None:
    batch = llama.batch(4, torch.Generator())
    one, two = (compiled(llama.build(), batch, Mesh(tp=2), plan).module for plan in (Plan(microbatches=2), Plan(interleave=2)))
    assert two.calls > 1.8 * one.calls and two.segments < 1.8 * one.segments


def test_products_are_added_in_their_bucket() -> None:
    """A further lane's product is added to the first's, which was made in the flat gradient: no copy, no memory of its own."""
    model = gpt.build(hidden=512, layers=1, heads=8)  # large enough
    source = compiled(model, gpt.batch(4, torch.Generator()), Mesh(tp=2), Plan(interleave=2)).module.source
    assert len(re.findall(r"\w+_mm_1?\w* = torch\.mm\(.*out=out", source)) >= 3 and source.count(".addmm_(") >= 3


def test_refused() -> None:
    for bad in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match="interleave"):
            Plan(interleave=bad)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="doesn't divide"):
        Plan(interleave=3, microbatches=4)
    with pytest.raises(PlanError, match="with stages"):
        verify(gpt.build(), Mesh(pp=2), gpt.batch(8, torch.Generator()), plan=Plan(interleave=2))
    with pytest.raises(PlanError, match="can't be split into microbatches"):
        verify(resnet.build(), Mesh(dp=2), resnet.batch(8, torch.Generator()), plan=Plan(interleave=2))


def test_what_the_report_says(tmp_path: Path) -> None:
    """A plan that autopar filled says it, and holds when it is read back; one microbatch at a time is as good as not said."""
    batch = gpt.batch(4, torch.Generator())
    for plan, wanted in ((Plan(interleave=2), ", 2 side by side"), (Plan(microbatches=2, interleave=1), "")):
        made = compiled(gpt.build(), batch, Mesh(tp=2), plan)
        assert f"2 microbatch(es){wanted}, sequence" in head(made, plan)
        filled = filled_plan(plan, made)
        assert (filled.interleave, filled.microbatches) == (plan.interleave, 2)
        filled.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").interleave == plan.interleave
    assert microbatches_of(Plan(interleave=1), Mesh(pp=2), 8) == microbatches_of(Plan(), Mesh(pp=2), 8) == 8
