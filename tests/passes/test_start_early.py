"""Collectives run as early as they can: what they don't need comes behind them, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.compiler import Compiled
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node
from autopar.layout.mesh import Mesh
from autopar.passes import start_early as module
from tests.equality.cases import MODELS
from tests.passes.test_recompute import compiled

BY_NAME = {model.name: model for model in MODELS}


def program_of(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> tuple[LocalProgram, Compiled]:
    """A model's local program in the captured order, and what was compiled."""
    seen: list[LocalProgram] = []
    made = module.start_early

    def noted(program: LocalProgram) -> LocalProgram:
        seen.append(program)
        return made(program)

    monkeypatch.setattr("autopar.compiler.start_early", noted)
    model = BY_NAME[name]
    torch.manual_seed(0)
    found = compiled(Mesh.parse(mesh), model.build(0.2), model.batch(torch.Generator().manual_seed(1)), **plan)
    return seen[-1], found


def collectives(program: LocalProgram) -> list[Node]:
    return [n for n in program.nodes if n.op.startswith("comm.")]


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,cp=2"])
@pytest.mark.parametrize("name", ["gpt", "encdec", "HF Llama eager"])
@pytest.mark.parametrize("sequence", [False, True])
def test_nothing_is_done_that_can_wait(name: str, mesh: str, sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the collective before, or the first node after it that needs it, only what a collective needs has run."""
    if sequence and "tp" not in mesh:
        pytest.skip("nothing to split")
    before, found = program_of(name, mesh, monkeypatch, sequence=sequence or None)
    local = found.local
    assert sorted(before.nodes, key=lambda n: n.outs) == sorted(local.nodes, key=lambda n: n.outs)
    assert [n.outs for n in collectives(before)] == [n.outs for n in collectives(local)] != []
    window: list[Node] = []
    made: set[str] = set()  # by the collective before, and of it
    for node in local.nodes:
        if window and (window[-1].phase, window[-1].region) != (node.phase, node.region):
            window.clear()
            made.clear()
        if not node.op.startswith("comm."):
            if not made.isdisjoint(node.refs()):
                made.update(node.outs)
                window.append(node)
            elif window:
                window.append(node)
            continue
        wanted = set(node.refs())
        for n in reversed(window):
            assert not wanted.isdisjoint(n.outs), (node, n)
            wanted.update(n.refs())
        window.clear()
        made = set(node.outs)


def test_gradients_of_weights_hide_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction of a linear layer's input gradient has the product of its weight's behind it, and before who needs it."""
    before, found = program_of("gpt", "tp=2", monkeypatch)

    def hidden(program: LocalProgram) -> int:
        count = 0
        for at, node in enumerate(program.nodes):
            if node.op == "comm.all_reduce" and node.phase == "backward":
                reader = next(k for k, n in enumerate(program.nodes) if node.name in n.refs())
                count += any(n.op == "aten.mm.default" for n in program.nodes[at:reader])
        return count

    reductions = sum(n.phase == "backward" and n.op == "comm.all_reduce" for n in before.nodes)
    assert hidden(before) == 0 and hidden(found.local) == reductions >= 4


def test_masks_are_drawn_while_sums_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = program_of("gpt", "tp=2", monkeypatch)
    source = found.module.source
    start = source.index("blocks_0_attention_out_addmm_mm_tp = comm.all_reduce")
    wait = source.index("blocks_0_attention_out_addmm_mm_tp = blocks_0_attention_out_addmm_mm_tp.wait()")
    assert "blocks_0_dropout_dropout_keep = " in source[start:wait]


def test_a_plan_without_collectives_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = program_of("gpt", "dp=1", monkeypatch)
    assert before.nodes == found.local.nodes
