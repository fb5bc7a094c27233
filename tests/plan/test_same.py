"""One program on every rank: a compilation depends on nothing but the model, the mesh and the plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options
from autopar.capture.tree import take_batch
from autopar.layout.mesh import Mesh
from autopar.programs import compile_step
from models import gpt
from tests.cases.run import DEFAULTS


class Tagger(nn.Module):
    """Its gradients of the head have several cheapest layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.l(self.e(ids)), y)


@pytest.mark.parametrize(("mesh", "times"), [("tp=2", 12), ("dp=2,tp=2", 3)])
def test_compiling_again_gives_the_same_program(mesh: str, times: int) -> None:
    batch = (torch.arange(8), torch.arange(8)) if times > 3 else gpt.batch(4, torch.Generator())
    tree, tensors = take_batch(batch)
    found, kept = set(), []
    for number in range(times):
        model = Tagger() if times > 3 else gpt.build()
        compiled = compile_step(model, Mesh.parse(mesh), make_options(**DEFAULTS), tree, tensors)
        found.add((compiled.module.source, compiled.spec.to_json()))
        kept.append([object() for _ in range(1000 + 37 * number)])  # the next one's objects lie elsewhere, and sets are in another order
    assert len(found) == 1
