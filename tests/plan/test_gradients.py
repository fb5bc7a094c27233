"""Gradients lie as their parameters do, also where no op of the program links the two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.layout.mesh import Mesh


class Chunked(nn.Module):
    """The input needs no gradient, so nothing in the backward multiplies by the weight that was chunked in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (x @ self.w.T).chunk(3, -1)
        return (a * b * c).mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=4"])
def test_a_chunked_weight_of_the_first_layer(mesh: str) -> None:
    report = autopar.verify(Chunked(), Mesh.parse(mesh), torch.randn(4, 4))
    assert report.ok, report.table()
