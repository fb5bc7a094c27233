"""An op of the user's own, with a row given from outside the package; without it, an error that shows where the row belongs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuleError
from autopar.layout.mesh import Mesh
from autopar.rules.check import check


@torch.library.custom_op("autopar_tests::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y)


@gate.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopar_tests::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(y)
    return grad * s, grad * x * s * (1 - s)


@gate_backward.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


gate.register_autograd(
    lambda ctx, grad: gate_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

ROWS = [
    autopar.rule("autopar_tests::gate", "*, * -> *", linear="0", samples=("f[4, 6], f[4, 6]",)),
    autopar.rule("autopar_tests::gate_backward", "*, *, * -> *, *", linear="0", samples=("f[4, 6], f[4, 6], f[4, 6]",)),
]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gate(self.a(x), self.b(x))).pow(2).mean()


def test_without_a_row() -> None:
    with pytest.raises(RuleError) as caught:
        autopar.verify(Gated(), Mesh(dp=2), torch.randn(4, 8))
    text = str(caught.value)
    assert "no rule for autopar_tests.gate" in text and "test_own_op.py" in text
    assert 'autopar.rule("autopar_tests.gate.default", "*, * -> *")' in text


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)])
def test_with_rows(mesh: Mesh) -> None:
    report = autopar.verify(Gated(), mesh, torch.randn(4, 8), rules=ROWS)
    assert report.ok, report.table()


def test_a_wrong_row_is_caught() -> None:
    wrong = [ROWS[0], autopar.rule("autopar_tests::gate_backward", "m n, m n, m n -> m n, m n", linear="1", samples=ROWS[1].samples)]

    assert check(ROWS[1]).ok
    assert not check(wrong[1]).ok
