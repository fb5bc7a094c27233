"""What ``verify`` takes as the reference where a model casts to another type inside, and that it tells what is no rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import verify
from autopar.compare import ROUNDING, Report
from autopar.errors import CaptureError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan


class Inside(nn.Module):
    """``function(x, weight)`` between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().mean()


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), torch.eye(16, device=x.device)).to(x.dtype)  # leaves float64 as it is


def masked(x: Tensor) -> Tensor:
    return x.float().masked_fill(x > 0.3, torch.finfo(torch.float32).min).softmax(-1).to(x.dtype)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype | None]] = {
    "float32": (lambda x: (x.float().softmax(-1) * 2).to(x.dtype), torch.float32),
    "bfloat16": (lambda x: x.to(torch.bfloat16).tanh().to(x.dtype), torch.bfloat16),
    "half in float": (lambda x: (x.float() + x.half().float()).to(x.dtype), torch.float16),
    "autocast": (autocast, torch.bfloat16),
    "made in the default type": (lambda x: x * torch.full((16,), 0.1) + torch.ones(16) / 3, torch.float32),
    "made of integers": (lambda x: x * (torch.arange(16) / 7), torch.float32),
    "made in a given type": (lambda x: x * torch.linspace(0, 1, 16, dtype=torch.float32), torch.float32),
    "its own type": (lambda x: x * torch.linspace(0, 1, 16, dtype=x.dtype), None),
    "dropout in float32": (lambda x: F.dropout(x.float(), 0.3).to(x.dtype), torch.float32),
    "drawn in the default type": (lambda x: x * torch.rand(16) + torch.randn(8, 16), torch.float32),
    "mask of a finite least": (masked, torch.float32),
}


def run(function: Callable[[Tensor], Tensor], mesh: str, plan: Plan | None = None) -> Report:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Inside(function)
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    return verify(model, Mesh.parse(mesh), batch, plan=plan or Plan())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_casts(name: str) -> None:
    function, least = FUNCTIONS[name]
    report = run(function, "dp=2,tp=2", Plan(microbatches=2))
    assert report.ok, report.table()
    if least is None:
        assert not report.gaps
    else:
        assert f"{least}" in report.notes[0]
        assert 0 < max(row.difference for row in report.gaps) < ROUNDING[least]


def test_more_than_rounding_is_told() -> None:
    """In float32 the values are never those of float64, in the exact run always: that gap is no rounding."""
    report = run(lambda x: torch.where(x.float() == x, x, 2 * x), "dp=2")
    assert not report.ok
    assert all(row.ok for row in report.rows)
    assert "plain model's" in report.table() and "DIFFERS" in report.table()


def test_float32() -> None:
    """In the model's own type the ranks are compared with the plain model as it is, with the tolerance of that type."""
    model = Inside(torch.tanh)
    report = verify(model, Mesh(dp=2, tp=2), torch.randn(8, 8), precision="fp32")
    assert report.ok, report.table()
    assert not report.gaps and {row.allowed for row in report.rows} == {2e-4}
    assert report.worst > 0


def test_buffers_that_no_state_dict_holds() -> None:
    class Counting(nn.Module):
        count: Tensor
        unread: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()), persistent=False)
            self.register_buffer("unread", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x).square().mean() * self.count

    report = verify(Counting(), Mesh(dp=2), torch.randn(4, 4))
    assert report.ok, report.table()
    assert {"count", "unread"} <= {row.name for row in report.rows}


def test_hooks_of_parameters_are_refused() -> None:
    """A copy of a model has lost them, so they are looked for before."""
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match="weight has gradient hooks"):
        verify(model, Mesh(dp=2), torch.ones(4, 4), loss=lambda out, batch: out.mean())
