"""Fusions on small local programs: what matches, and what must not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.api import make_options
from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.ir.text import show_node
from autopar.layout.mesh import Mesh
from autopar.programs import Options, compile_step
from autopar.runtime.ops import cross_entropy_backward, exp_sum, log_softmax


class Classifier(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(8, 16), nn.Linear(16, 8), twice

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x)))
        loss = F.cross_entropy(out, y)
        return loss + out.amax(1, keepdim=True).mean() if self.twice else loss


def options() -> Options:
    return make_options(None, None, "auto", None, 0, "check", None, 0, "eager", ())


def compiled(model: nn.Module, mesh: Mesh) -> Compiled:
    tree, tensors = take_batch((torch.randn(4, 8), torch.randint(0, 8, (4,))))
    return compile_step(model, mesh, options(), tree, tensors)


def ops(c: Compiled) -> list[str]:
    return [n.op for n in c.final.nodes]


def test_bias_and_log_softmax_are_fused_where_nothing_is_split() -> None:
    found = ops(compiled(Classifier(), Mesh()))
    assert found.count("aten.addmm.default") == 2
    assert "autopar.log_softmax" in found and "autopar.cross_entropy_backward" in found
    assert "autopar.unpick" not in found and "aten.exp.default" not in found
    assert "aten.amax.default" not in found


class Teacher(nn.Module):
    """log_softmax whose reader is no label."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -(F.log_softmax(self.head(x), 1) * F.one_hot(y, 8)).sum()


def test_the_gradient_of_a_log_softmax_without_labels_is_fused_too() -> None:
    found = ops(compiled(Teacher(), Mesh()))
    assert "aten._log_softmax_backward_data.default" in found and "autopar.cross_entropy_backward" not in found


def test_a_bias_after_a_collective_is_not_fused() -> None:
    c = compiled(Classifier(), Mesh(tp=2))
    reduced = [n.outs[0] for n in c.final.nodes if n.op == "comm.all_reduce" and n.phase == "forward"]
    assert reduced
    assert not [n for n in c.final.nodes if n.op == "aten.addmm.default" and n.where.module == "down"]
    assert [n for n in c.final.nodes if n.op == "aten.addmm.default" and n.where.module == "up"]


def test_a_vocabulary_that_is_split_keeps_its_collectives() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), y)

    tree, tensors = take_batch((torch.randn(4, 8), torch.randint(0, 8, (4,))))
    pinned = make_options(None, None, autopar.Plan(shard={"head.weight": "dim0@tp"}), None, 0, "check", None, 0, "eager", ())
    c = compile_step(Head(), Mesh(tp=2), pinned, tree, tensors)
    split = [n for n in c.final.nodes if n.op == "autopar.log_softmax" and c.final.types[n.outs[0]].shape[1] != 8]
    assert not split, [show_node(c.final, n) for n in split]


def test_an_inner_value_with_another_reader_is_kept() -> None:
    found = ops(compiled(Classifier(twice=True), Mesh()))
    assert "aten.amax.default" in found


def test_rows_in_pieces() -> None:
    """In place and in pieces the results keep the bits of torch's own."""
    x = torch.randn(700, 1300, dtype=torch.float64) * 30
    for dims in ((1,), (-1,), (0,), (0, 1)):
        assert torch.equal(exp_sum(x, dims, True), x.exp().sum(dims, True)) and torch.equal(exp_sum(x, dims), x.exp().sum(dims))
    for dim in (1, -1, 0):
        place = x.clone()
        assert log_softmax(place, dim, out=place) is place and torch.equal(place, torch.log_softmax(x, dim))
    empty = torch.empty(0, 5)
    assert torch.equal(log_softmax(empty, 1, out=empty), empty) and exp_sum(empty, (1,)).shape == (0,)
    label, grad = torch.randint(1300, (700,)), torch.randn(700, dtype=torch.float64)
    log_p = torch.log_softmax(x, 1)
    expected = cross_entropy_backward(grad, label, log_p, 1, 0)
    assert torch.equal(cross_entropy_backward(grad, label, log_p, 1, 0, out=log_p), expected) and torch.equal(log_p, expected)


class Twice(nn.Module):
    """Products that are added to sums, and one that is added to itself."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.first, self.second, self.itself = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8)), itself

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = x @ self.first
        total = product + product if self.itself else product * 2 + x @ self.second
        return F.cross_entropy(total, y)


def test_a_product_is_added_to_a_sum_but_not_to_itself() -> None:
    for itself in (True, False):
        torch.manual_seed(0)
        model = Twice(itself)
        assert ("aten.addmm.default" in ops(compiled(model, Mesh()))) is not itself
        report = autopar.verify(model, Mesh(dp=2), (torch.randn(4, 8), torch.randint(0, 8, (4,))))
        assert report.ok, report.table()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(8, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(torch.tanh(self.up(self.tokens(x[:, 0].long().abs() % 8))), self.tokens.weight), y)


def test_a_product_far_from_the_sum_is_made_where_its_operands_die() -> None:
    """The gradient of a tied head: added to the embedding's at the end of the backward, it would keep that of the logits till then."""
    found = ops(compiled(Tied(), Mesh()))
    assert found.index("autopar.embedding_backward") > max(n for n, op in enumerate(found) if op == "aten.mm.default")
    assert "aten.addmm.default" not in found[found.index("autopar.embedding_backward") :]


def test_fused_programs_are_equal() -> None:
    batch = (torch.randn(4, 8), torch.randint(0, 8, (4,)))
    for model in (Classifier(), Classifier(twice=True)):
        for mesh in (Mesh(), Mesh(dp=2), Mesh(tp=2)):
            report = autopar.verify(model, mesh, batch)
            assert report.ok, report.table()
