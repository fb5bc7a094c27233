"""Products in pieces beside their collectives: the same numbers, and the next piece computes while one is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import verify
from autopar.applied import find_applied
from autopar.errors import PlanError
from autopar.ir.program import Node
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from models import gpt
from tests.equality.cases import MODELS
from tests.passes.test_recompute import BATCH, compiled, model

BY_NAME = {model.name: model for model in MODELS}

CASES = [
    ("gpt", "tp=2", Plan(decompose=2)),
    ("gpt", "dp=2,tp=2", Plan(decompose=4, sequence=True)),
    ("gpt", "dp=2,tp=2", Plan(decompose=2, microbatches=2, recompute="full", zero=3)),
    pytest.param("llama", "tp=4", Plan(decompose=8), marks=pytest.mark.slow),
    ("HF Llama eager", "tp=2", Plan(decompose=2, sequence=True, interleave=2)),
    ("HF GPT-2 sdpa", "pp=2,tp=2", Plan(decompose=2, sequence=True, microbatches=2, schedule="zb-h1")),
    ("encdec", "tp=2", Plan(decompose=2, sequence=True)),
    ("mlp", "tp=2", Plan(decompose=3)),
    pytest.param("moe sorted", "dp=2,tp=2", Plan(decompose=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mesh", "plan"), CASES, ids=lambda v: str(v.decompose) if isinstance(v, Plan) else str(v))
def test_equal(name: str, mesh: str, plan: Plan) -> None:
    found = BY_NAME[name]
    torch.manual_seed(0)
    batch = found.batch(torch.Generator().manual_seed(1))
    report = verify(found.build(0.3).train(), Mesh.parse(mesh), batch, plan=plan, loss=found.loss)
    assert report.ok, report.table()


class Branches(nn.Module):
    """Two branches read one norm, with a view each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o, self.u, self.d = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return (x + self.o(self.q(h).relu()) + self.d(F.gelu(self.u(h)))).square().mean()


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_branches(recompute: str | None) -> None:
    plan = Plan(decompose=2, sequence=True, recompute=recompute)
    report = verify(Branches(), Mesh(tp=2), torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)), plan=plan)
    assert report.ok, report.table()


def test_nothing_is_joined_in_the_forward_for_a_backward_that_makes_it_again() -> None:
    """What only the backward reads of a gather's pieces is made there, and no more in the forward."""
    plan = dict(decompose=2, sequence=True)

    def joined(**more: Any) -> int:
        nodes = compiled(Mesh(tp=2), **plan, **more).final.nodes
        return sum(n.op == "aten.cat.default" and n.phase == "forward" and n.where.module == "blocks.1.mlp.up" for n in nodes)

    assert (joined(), joined(recompute="full")) == (2, 1)
    report = verify(model(), Mesh(tp=2), BATCH, plan=Plan(recompute="full", **plan))  # type: ignore[arg-type]
    assert report.ok, report.table()


def pieces_of(mesh: str, **plan: Any) -> list[Node]:
    return [n for n in compiled(Mesh.parse(mesh), **plan).final.nodes if "_piece" in n.name]


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("sequence", [None, True])
def test_every_product_beside_a_collective_is_cut(pieces: int, sequence: bool | None) -> None:
    """Of a block: the two that are reduced and, with ``sequence``, the two that are gathered for, forward and backward."""
    made = pieces_of("tp=2", decompose=pieces, sequence=sequence)
    for phase in ("forward", "backward"):
        for module in ("attention.out", "mlp.down", "attention.qkv", "mlp.up"):
            outer = module in ("attention.out", "mlp.down")
            here = [n for n in made if n.where.module == f"blocks.1.{module}" and n.phase == phase]
            expected = pieces if sequence or outer == (phase == "forward") else 0
            assert len([n for n in here if n.op == "aten.mm.default"]) == expected, (module, phase)
            assert len([n for n in here if n.op.startswith("comm.")]) == expected, (module, phase)


def test_pieces_take_turns() -> None:
    """The first piece's collective is started before the second piece's product, and waited for after it."""
    source = compiled(Mesh(tp=2), decompose=2).module.source
    driver = source[source.index("def step(") :]
    lines = [line.strip() for line in driver.splitlines()]
    first = next(k for k, line in enumerate(lines) if "comm.all_reduce(" in line and "mlp.down" in line)
    name = lines[first].split(" = ")[0]
    waited = lines.index(next(line for line in lines if line.startswith(f"{name} = {name}.wait()")))
    second = next(k for k, line in enumerate(lines) if k > first and "comm.all_reduce(" in line and "mlp.down" in line)
    assert any("_forward_" in line for line in lines[first:second]) and first < second < waited


def test_rows_that_dont_divide_stay_whole() -> None:
    assert not pieces_of("tp=2", decompose=3) and not pieces_of("dp=2", decompose=2)
    assert not pieces_of("tp=2", decompose=1) and not pieces_of("tp=2")


def test_what_applied() -> None:
    told = {n: find_applied(compiled(Mesh(tp=2), decompose=n), Plan(decompose=n)) for n in (2, 3)}
    assert "products beside collectives of" in told[2][0].done
    assert not told[3][0].done and "rows divide" in told[3][0].why
    with pytest.raises(PlanError, match="decompose=3"):
        verify(model(), Mesh(tp=2), BATCH, plan=Plan(decompose=3, strict=True))
    for wrong in (0, -2, 1.5, True):
        with pytest.raises(PlanError):
            Plan(decompose=wrong)  # type: ignore[arg-type]


def test_a_piece_of_another_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: pieces joined in another order."""
    from autopar.passes import decompose as module

    made = module._Decomposer.join  # noqa: SLF001
    monkeypatch.setattr(module._Decomposer, "join", lambda self, names, node: made(self, names[::-1], node))  # noqa: SLF001
    assert not verify(gpt.build(), Mesh(tp=2), gpt.batch(4, torch.Generator().manual_seed(1)), plan=Plan(decompose=2)).ok
