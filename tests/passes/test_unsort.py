"""Sorted dispatch to experts: rows go back to the order in which they came, so that samples stay cut; what doesn't fit stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options, verify
from autopar.capture import capture
from autopar.capture.interpret import run
from autopar.capture.tree import take_batch
from autopar.compare import plain_ops
from autopar.ir.program import Program
from autopar.layout.mesh import Mesh
from autopar.passes.canonicalize import canonicalize
from autopar.passes.lift import lift
from autopar.passes.unsort import unsort
from autopar.programs import compile_step
from autopar.rules import DEFAULT
from models import moe
from tests.capture.toys import assert_close, normal, seeded, values_of

EXPERTS, CHOSEN, HIDDEN = 4, 2, 6


class Sorted(nn.Module):
    """Rows [tokens, hidden] through experts in sorted order, by a function of (sorted rows, experts in order, permutation, module)."""

    def __init__(self, work: Callable[..., Tensor], descending: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, hidden, hidden))
        self.work, self.descending = work, descending

    def forward(self, x: Tensor) -> Tensor:
        experts = self.router(x).topk(CHOSEN, -1).indices.flatten()
        experts, order = experts.sort(descending=self.descending)
        return self.work(self, x, experts, order).pow(2).mean()


def product(m: Sorted, rows: Tensor, experts: Tensor) -> Tensor:
    return torch.bmm(rows[:, None], m.matrices[experts])[:, 0].tanh()


def added(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, order // CHOSEN, product(m, x[order // CHOSEN], experts))


def inverted(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return product(m, x[order // CHOSEN], experts)[back].view(-1, CHOSEN, HIDDEN).sum(1)


def put_back(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    y = product(m, x[order // CHOSEN], experts)
    return torch.zeros_like(y).index_put((order,), y).view(-1, CHOSEN, HIDDEN).sum(1)


def added_to_something(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    return x.index_add(0, order // CHOSEN, product(m, x[order // CHOSEN], experts))


def summed(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    return product(m, x[order // CHOSEN], experts).pow(3).sum(0)


def by_place(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """The sorted order itself matters: a running sum, and weights by place."""
    y = product(m, x[order // CHOSEN], experts)
    return y.cumsum(0) * torch.linspace(0, 1, len(y), dtype=y.dtype)[:, None]


def halves(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    y = product(m, x[order // CHOSEN], experts)
    return y[: len(y) // 2]


def unsorted_index(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """Not the inverse: rows go where the values of the sort say."""
    return torch.zeros_like(x).index_add(0, experts, product(m, x[order // CHOSEN], experts))


def twice(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """A permutation of what another has permuted."""
    y = product(m, x[order // CHOSEN], experts)
    again = y[:, 0].sort().indices
    return y[again] * torch.arange(len(y), dtype=y.dtype)[:, None]


GONE = (added, inverted, put_back, added_to_something, summed)
KEPT = (by_place, halves, twice)


def programs(work: Callable[..., Tensor], descending: bool = False) -> tuple[Program, Program, dict[str, Tensor]]:
    model = seeded(Sorted(work, descending))
    before = canonicalize(capture(model, normal(8, HIDDEN)))
    return before, unsort(before, DEFAULT), values_of(before, model, normal(8, HIDDEN))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("work", [*GONE, *KEPT, unsorted_index], ids=lambda f: f.__name__)
def test_the_same_values(work: Callable[..., Tensor], descending: bool) -> None:
    before, after, values = programs(work, descending)
    want, got = run(before, values, plain_ops()), run(after, values, plain_ops())
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert_close(got[name], value, name)


@pytest.mark.parametrize("work", GONE, ids=lambda f: f.__name__)
def test_nothing_is_sorted_that_goes_back(work: Callable[..., Tensor]) -> None:
    before, after, _ = programs(work)
    assert any("sort" in n.op for n in before.nodes) and not any("sort" in n.op for n in after.nodes)


@pytest.mark.parametrize("work", KEPT, ids=lambda f: f.__name__)
def test_what_needs_the_order_is_sorted(work: Callable[..., Tensor]) -> None:
    assert any("sort" in n.op for n in programs(work)[1].nodes)


def moved(model: nn.Module, batch: Any, ways: int) -> list[tuple[str, str, int]]:
    """Module, op and elements of every collective over data ranks."""
    tree, tensors = take_batch(batch)
    options = make_options(None, None, "auto", None, 0, "check", None, 0, "eager", ())
    local = compile_step(model, Mesh(dp=ways), options, tree, tensors).local
    return [(n.where.module, n.op, local.types[n.refs()[0]].numel) for n in local.nodes if n.op.startswith("comm.")]


def test_sorted_experts_stay_cut_by_samples() -> None:
    model = moe.build(dispatch="sorted", auxiliary=0.0)
    found = moved(model, moe.batch(4, torch.Generator().manual_seed(0)), 2)
    # shares of experts and mean probabilities for the auxiliary loss; the loss and its count of labels
    assert {op for _, op, _ in found} == {"comm.all_reduce"} and max(n for *_, n in found) <= model.config.experts


def test_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    program = unsort(canonicalize(capture(model, batch)), DEFAULT)
    ops = [n.op for n in program.nodes]
    assert ops.count("autopar.expert_mm") == 4 and ops.count("autopar.expert_mm_backward") == 4
    assert not any("grouped" in op or "sort" in op for op in ops)
    assert {n for *_, n in moved(model, batch, 2)} == {1}
    for mesh in (Mesh(dp=2), Mesh(dp=2, tp=2)):  # its grouped product takes no float64 where it isn't captured
        report = verify(model, mesh, batch, precision="fp32")
        assert report.ok, report.table()


@pytest.mark.parametrize("columns", [False, True])
def test_products_of_groups_in_any_form(columns: bool) -> None:
    """Torch's own product, forward and backward: groups of rows, of columns, and along the sum."""

    def work(m: Sorted, x: Tensor, experts: Tensor, order: Tensor) -> Tensor:
        ends = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
        rows, matrices, mm = (x * m.matrices[0, 0])[order // CHOSEN].bfloat16(), m.matrices.bfloat16(), torch._grouped_mm
        y = mm(matrices.mT, rows.T.contiguous(), offs=ends).T if columns else mm(rows, matrices, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return y.float().tanh()[back].view(-1, CHOSEN, 16).sum(1)

    torch.manual_seed(0)
    model, x = Sorted(work, hidden=16), torch.randn(8, 16)
    captured = capture(model, x)
    assert sum(n.op == "aten._grouped_mm.default" for n in captured.nodes) == 3
    for program in (captured, lift(captured, "fp64")):
        assert not any("grouped" in n.op or "sort" in n.op for n in unsort(canonicalize(program), DEFAULT).nodes)
    assert max(n for *_, n in moved(model, x, 2)) == 1
    for mesh in (Mesh(dp=2), Mesh(tp=2), Mesh(dp=2, tp=2)):
        report = verify(model, mesh, x)
        assert report.ok, report.table()


def test_rows_added_by_an_index_may_be_cut() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 2, 4))

        def forward(self, ids: Tensor) -> Tensor:
            return F.silu(self.table[ids]).mean()

    ids = torch.tensor([[0, -1, 3], [-8, 7, 2], [1, 1, 1], [0, 2, 7]])
    model = Table()
    assert {n for *_, n in moved(model, ids, 2)} == {1}
    report = verify(model, Mesh(dp=2, tp=2), ids)
    assert report.ok, report.table()
