"""What of a plan really applied: every request has a line, with what was done or why nothing was; strict makes the latter an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import make_options
from autopar.applied import Applied, find_applied
from autopar.capture.tree import take_batch
from autopar.errors import PlanError
from autopar.inspect.tables import explain
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.programs import compile_step
from models import gpt, mlp


def found(mesh: str, model: nn.Module | None = None, **plan: Any) -> tuple[dict[str, Applied], str]:
    if model is None:
        model, batch, loss = gpt.build(), gpt.batch(8, torch.Generator().manual_seed(0)), None
    else:
        batch, loss = mlp.batch(8, torch.Generator().manual_seed(0)), mlp.loss
    tree, tensors = take_batch(batch)
    options = make_options(loss, None, Plan(**plan), None, 0, "check", None, 0, "eager", ())
    compiled = compile_step(model, Mesh.parse(mesh), options, tree, tensors)
    return {a.request: a for a in find_applied(compiled, options.plan)}, explain(compiled, options.plan)


@pytest.mark.parametrize(
    ("mesh", "plan", "told"),
    [
        ("dp=2", dict(zero=3, recompute="full", regather=False), {
            "zero=3": "parameters of 4 of 4 buckets", "recompute='full'": "blocks.0", "regather=False": "kept"}),
        ("tp=2", dict(sequence=True, interleave=2), {"sequence": "over tp", "interleave=2": "collectives between the lanes"}),
        ("cp=2", dict(context="ring"), {"context='ring'": "4 attentions, forward and backward, over cp"}),
        ("pp=2", dict(schedule="zb-h1", microbatches=4, recompute="blocks.*"), {
            "schedule='zb-h1'": "2 stages, zb-h1", "microbatches=4": "4 microbatches", "recompute=('blocks.*',)": "blocks.0"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_done(mesh: str, plan: dict[str, Any], told: dict[str, str]) -> None:
    rows, text = found(mesh, **plan, strict=True)
    assert rows.keys() == told.keys() and all(told[name] in a.done and not a.why for name, a in rows.items())
    assert all(a.done in text for a in rows.values())


@pytest.mark.parametrize(
    ("mesh", "plan", "why"),
    [
        ("tp=1", dict(zero=2), "no parameter is held by several ranks"),
        ("dp=2", dict(sequence=True), "the mesh has no tp"),
        ("dp=2", dict(schedule="gpipe"), "the mesh has no pp"),
        ("dp=2", dict(regather=False), "only ZeRO 3"),
        ("dp=2", dict(context="heads"), "the mesh has no cp"),
        ("dp=2", dict(recompute="1GB"), "what is kept fits"),
    ],
    ids=str,
)
def test_why_not(mesh: str, plan: dict[str, Any], why: str) -> None:
    rows, text = found(mesh, **plan)
    (row,) = rows.values()
    assert not row.done and why in row.why and f"not applied: {row.why}" in text
    with pytest.raises(PlanError, match="can't be applied") as error:
        found(mesh, **plan, strict=True)
    assert why in str(error.value)


def test_nothing_to_recompute() -> None:
    """Between linear layers only what other modules read is kept; and a model without a number in any path has no layers."""
    (row,) = found("dp=2", mlp.build(), recompute="full")[0].values()
    assert not row.done and row.why == "nothing that is kept could be made again there"
    named = nn.Sequential()
    named.add_module("only", nn.Linear(32, 32))
    (row,) = found("dp=2", named, recompute="full")[0].values()
    assert not row.done and "no repeated layers" in row.why
