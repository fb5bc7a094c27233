"""Batch norm over data ranks: the statistics are those of the global batch, and only numbers for each channel travel for them."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.capture import capture
from autopar.capture.interpret import run
from autopar.capture.tree import take_batch
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh
from autopar.passes.canonicalize import canonicalize
from autopar.plan.plan import Plan
from autopar.step import compile_step
from tests.capture.toys import values_of

CHANNELS = 8


class Normed(nn.Module):
    """Convolutions and a head with batch norms of every kind: with and without affine parameters, running statistics, space."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second = nn.Conv2d(3, CHANNELS, 3, bias=False, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS, CHANNELS)
        self.norm0, self.norm1 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS, affine=False)
        self.norm2, self.norm3 = nn.BatchNorm1d(CHANNELS, track_running_stats=False), nn.BatchNorm1d(CHANNELS, momentum=0.3, eps=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm0(self.conv(x)).relu()
        y = (y + self.norm1(self.second(y))).amax((2, 3))
        return self.norm3(self.norm2(self.head(y)).tanh()).pow(3).mean()


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4", "tp=2", "dp=2,tp=2"])
def test_equal_to_one_process(mesh: str) -> None:
    torch.manual_seed(0)
    report = verify(Normed(), Mesh.parse(mesh), batch())
    assert report.ok, report.table()
    assert {row.name for row in report.rows} >= {f"norm{i}.{b}" for i in (0, 1, 3) for b in ("running_mean", "running_var")}


@pytest.mark.parametrize("ways", [2, 4])
def test_only_numbers_for_each_channel_travel(ways: int) -> None:
    torch.manual_seed(0)
    tree, tensors = take_batch(batch())
    options = make_options(None, None, "auto", None, 0, "check", None, 0, "eager", ())
    local = compile_step(Normed(), Mesh(dp=ways), options, tree, tensors).local
    moved: dict[tuple[str, str], list[int]] = defaultdict(list)
    for node in local.nodes:
        if node.op.startswith("comm."):
            assert node.op == "comm.all_reduce", node
            moved[node.where.module, node.phase].append(local.types[node.refs()[0]].numel)
    norms = [f"norm{i}" for i in range(4)]
    # the mean, then the centred squares; in the backward two sums that are the gradients of bias and weight as well
    assert {key: sizes for key, sizes in moved.items() if key[0] in norms} == {
        (norm, phase): [CHANNELS, CHANNELS] for norm in norms for phase in ("forward", "backward")
    }
    assert all(sizes == [1] for (module, _), sizes in moved.items() if module not in norms), moved  # the loss


def test_given_statistics_move_nothing() -> None:
    tree, tensors = take_batch(batch())
    options = make_options(lambda y, _: y.square().mean(), None, "auto", None, 0, "check", None, 0, "eager", ())
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.Conv2d(CHANNELS, 4, 3)).train()
    model[1].eval()
    local = compile_step(model, Mesh(dp=2), options, tree, tensors).local
    assert [(n.op, n.where.module) for n in local.nodes if n.op.startswith("comm.")] == [("comm.all_reduce", "")]


def test_half_types_sum_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(4).bfloat16()
    x = (torch.randn(512, 4, generator=torch.Generator().manual_seed(0)) + 30).bfloat16()
    program = canonicalize(capture(model, x, loss=lambda y, _: (y.float() - 1).square().mean()))
    found = run(program, values_of(program, model, x))
    assert found["output"].dtype == torch.bfloat16 == found["grad weight"].dtype
    exact = copy.deepcopy(model).double()
    y = exact(x.double())
    (y - 1).square().mean().backward()
    for got, want in ((found["output"], y), (found["grad weight"], exact.weight.grad), (found["grad bias"], exact.bias.grad)):
        torch.testing.assert_close(got.double(), want.detach(), rtol=2**-7, atol=2**-7)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(found[f"buffer {name}"].double(), getattr(exact, name), rtol=2**-7, atol=0)


def test_microbatches_are_refused_where_a_parameter_lies_above() -> None:
    with pytest.raises(PlanError, match="needs the whole batch") as caught:
        verify(Normed(), Mesh(dp=2), batch(), plan=Plan(microbatches=2))
    assert "batch statistics" in str(caught.value)


def test_statistics_of_the_batch_itself_are_taken_before_the_microbatches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 4, 3))
    report = verify(copy.deepcopy(model), Mesh(dp=2), batch(), plan=Plan(microbatches=2), loss=lambda y, _: y.square().mean())
    assert report.ok, report.table()
