"""How often a sum over ranks is sent: what is added to an unreduced value waits for the sum with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from autopar.api import verify
from autopar.capture import capture
from autopar.compiler import Compiled, compile_program
from autopar.layout.mesh import Mesh
from autopar.layout.reshard import plan_reshard, step_kind
from autopar.layout.sharding import PARTIAL_SUM, REPLICATE, Sharding, partial
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT


class SideBySide(nn.Module):
    """Blocks of two branches with biases, added up with the residual stream; dropout after the sums."""

    def __init__(self, width: int, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({k: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for k in "ab"})
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y = norm(x)
            x = self.dropout(block["a"](y)) + self.dropout(block["b"](y)) + x
        return x.square().mean()


def large(model: nn.Module, x: Tensor, mesh: str = "tp=4") -> Compiled:
    program = capture(model, x)
    program = dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    return compile_program(program, Mesh.parse(mesh), Plan(), DEFAULT, {i.name: 0 for i in program.inputs_of("batch")})


def reduces(c: Compiled, phase: str) -> list[int]:
    """Bytes of the all-reduces of activations."""
    nodes = [n for n in c.final.nodes if n.op.startswith("comm.") and n.phase == phase and not n.where.module.startswith("bucket")]
    assert {n.op for n in nodes} <= {"comm.all_reduce"}
    return [c.final.types[n.name].nbytes for n in nodes]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_two_branches_are_one_sum(dropout: float) -> None:
    with torch.device("meta"):
        model, x = SideBySide(2048, dropout), torch.zeros(8, 512, 2048)
    c = large(model, x)
    assert reduces(c, "forward") == [x.nbytes] * 3
    assert reduces(c, "backward") == [x.nbytes] * 2  # the batch has no gradient
    whole = {n.refs()[0] for n in c.local.nodes if n.op == "autopar.once"}
    assert {c.local.types[w].shape for w in whole} <= {(2048,)}  # the biases


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=4"])
def test_two_branches_are_right(mesh: str) -> None:
    torch.manual_seed(0)
    report = verify(SideBySide(16, 0.3), Mesh.parse(mesh), torch.randn(4, 8, 16))
    assert report.ok, report.table()


class Residual(nn.Module):
    """The usual block: the stream is whole where it is read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_nothing_waits_that_saves_nothing() -> None:
    """An unreduced stream would be as few collectives, held beside its sums."""
    with torch.device("meta"):
        model, x = Residual(2048), torch.zeros(8, 512, 2048)
    c = large(model, x)
    assert reduces(c, "forward") == [x.nbytes] * 3
    assert not [n for n in c.local.nodes if n.op == "autopar.once"]


class Frozen(nn.Module):
    """Adapters on frozen layers: the first layer's backward makes no gradient of its input, the others' do."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x.square().mean()


def test_gradients_of_a_first_layer_wait_for_their_bucket() -> None:
    with torch.device("meta"):
        model, x = Frozen(1024, 16), torch.zeros(8, 512, 1024)
    c = large(model, x, "dp=4")
    assert max(reduces(c, "backward"), default=0) <= 4  # the loss at most


def test_a_whole_value_becomes_a_sum_without_sending() -> None:
    mesh, whole = Mesh(dp=2, tp=2), Sharding(((4,), (6,)))
    for axis in mesh.names:
        (step,) = plan_reshard(whole, whole.with_placement(axis, PARTIAL_SUM, mesh), mesh)
        assert (step.kind, step.axis) == ("once", axis)
    assert step_kind(REPLICATE, partial("max")) is None
