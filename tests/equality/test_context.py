"""Context parallel: every model with a sequence equals the plain one with its sequence cut over ``cp``; what can't be cut is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import verify
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from models import gpt, llama, mlp, resnet, vit
from tests.equality.cases import MODELS

BY_NAME = {model.name: model for model in MODELS}
#: model, mesh, plan, dropout. Labels that count are another number in every row, and so on every rank.
CASES = [
    ("gpt", "dp=2,cp=2", Plan(microbatches=2), 0.3),
    ("llama", "cp=4", Plan(), 0.0),
    ("vit", "cp=2", Plan(zero=0), 0.3),
    ("encdec", "dp=2,cp=2", Plan(), 0.3),
    ("HF GPT-2 sdpa", "tp=2,cp=2", Plan(sequence=True), 0.3),
    ("HF GPT-2 eager", "cp=4", Plan(microbatches=2, buckets=4096), 0.3),
    ("HF Llama sdpa", "cp=2,tp=2", Plan(), 0.0),
    pytest.param("HF Llama eager", "dp=2,cp=2", Plan(interleave=2), 0.0, marks=pytest.mark.slow),
    pytest.param("moe sorted", "cp=2", Plan(), 0.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "plan", "dropout"), CASES, ids=lambda v: "" if isinstance(v, Plan) else str(v))
def test_models(name: str, mesh: str, plan: Plan, dropout: float) -> None:
    model = BY_NAME[name]
    torch.manual_seed(0)
    report = verify(model.build(dropout).train(), Mesh.parse(mesh), model.batch(torch.Generator().manual_seed(1)), plan=plan)
    assert report.ok, report.table()


def exact(build: Callable[[], nn.Module], batch: Any, mesh: str, plan: Plan | str = "auto") -> None:
    torch.manual_seed(0)
    report = verify(build().train(), Mesh.parse(mesh), batch, plan=plan)
    assert report.ok, report.table()


FORMS = [
    ("gpt", "dp=2,cp=2", Plan(context="ring", microbatches=2, zero=3, recompute="full")),
    ("llama", "cp=4", Plan(context="ring", zero=0)),
    ("HF Llama sdpa", "tp=2,cp=2", Plan(context="ring", interleave=2)),
    ("encdec", "cp=2", Plan(context="ring")),
    ("vit", "cp=4", Plan(context="gather")),
]


@pytest.mark.parametrize(("name", "mesh", "plan"), FORMS, ids=lambda v: str(v.context) if isinstance(v, Plan) else str(v))
def test_forms_of_attention(name: str, mesh: str, plan: Plan) -> None:
    """Causal, over a memory of another length, with key heads that are shared."""
    test_models(name, mesh, plan, 0.0)


@pytest.mark.parametrize("form", ["ring", "gather"])
def test_odd_pieces(form: str) -> None:
    """Queries without halves stay where they are; three ranks, of which the one in the middle is its own mirror image."""
    for mesh, length in (("cp=2", 6), ("cp=3", 12)):
        size: dict[str, Any] = dict(sequence=length, layers=1)
        exact(lambda: gpt.build(**size), gpt.batch(2, torch.Generator().manual_seed(1), **size), mesh, Plan(context=form))  # noqa: B023


def test_a_form_that_cannot_be_had() -> None:
    size: dict[str, Any] = dict(heads=3, hidden=24)
    with pytest.raises(PlanError, match=r"Plan\(context='heads'\): .*flash_attention.* can't be split so over cp=2"):
        verify(gpt.build(**size), Mesh(cp=2), gpt.batch(4, torch.Generator().manual_seed(1), **size), plan=Plan(context="heads"))
    with pytest.raises(PlanError, match="no way to split attention"):
        Plan(context="spiral")


@pytest.mark.parametrize(("mesh", "dropout"), [("cp=2", 0.3), ("cp=4", 0.0)])
def test_heads_that_do_not_divide(mesh: str, dropout: float) -> None:
    """Queries are cut, and see the keys of all ranks: fused with a causal mask, and as products and softmax where there is dropout."""
    size: dict[str, Any] = dict(heads=3, hidden=24)
    exact(lambda: gpt.build(**size, dropout=dropout), gpt.batch(4, torch.Generator().manual_seed(1), **size), mesh)


@pytest.mark.parametrize("native", [False, True])
def test_key_heads_fewer_than_ranks(native: bool) -> None:
    size: dict[str, Any] = dict(heads=8, kv_heads=2, hidden=64, native_gqa=native)
    exact(lambda: llama.build(**size), llama.batch(4, torch.Generator().manual_seed(1), **size), "cp=4")


class Mixer(nn.Module):
    """What relates positions is a running sum, in place of attention."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, width = heads, 6 * heads
        self.tokens, self.qkv, self.out = nn.Embedding(32, 20), nn.Linear(20, 3 * width), nn.Linear(width, 32)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = (q * torch.cumsum(k * v, 1)).sum(-1, keepdim=True).expand_as(q)
        return F.cross_entropy(self.out(y.flatten(2)).flatten(0, 1), ids.flatten())


def test_other_mixing_by_heads() -> None:
    exact(lambda: Mixer(4), torch.randint(32, (4, 8)), "cp=4")


def refusal(model: nn.Module, batch: Any, mesh: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        verify(model, Mesh.parse(mesh), batch)
    return caught.value


def test_refusals_name_the_cause() -> None:
    g = torch.Generator().manual_seed(1)
    error = refusal(gpt.build(sequence=7), gpt.batch(4, g, sequence=7), "cp=2")
    assert error.what == "cp=2 doesn't divide the sequence of 7" and "gpt.py" in error.where and "6 or 8" in error.hint
    error = refusal(vit.build(), vit.batch(4, g), "cp=3")
    assert error.what == "cp=3 doesn't divide the sequence of 16"
    error = refusal(Mixer(1), torch.randint(32, (4, 8)), "cp=4")
    assert error.what == "aten.cumsum.default can't be split over cp=4" and "torch.cumsum(k * v, 1)" in error.where


@pytest.mark.parametrize(("build", "batch", "loss"), [(mlp.build, mlp.batch, mlp.loss), (resnet.build, resnet.batch, None)])
def test_models_without_a_sequence_are_refused(build: Any, batch: Any, loss: Any) -> None:
    with pytest.raises(PlanError, match="cp=2 finds no sequence to cut: 100%"):
        verify(build(), Mesh(cp=2), batch(4, torch.Generator().manual_seed(1)), loss=loss)


def test_a_sequence_that_the_axes_divide_but_not_together() -> None:
    """Six positions over ``cp`` and ``tp`` of two each: one of them cuts."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()

    torch.manual_seed(0)
    report = verify(Block(), Mesh(cp=2, tp=2), torch.randn(8, 6, 8), plan=Plan(sequence=True))
    assert report.ok, report.table()
