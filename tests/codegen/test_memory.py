"""Writing over operands: where it is done, where it must not be, and that results keep their bits."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.api import make_options
from autopar.capture.tree import take_batch
from autopar.codegen import memory
from autopar.codegen.memory import overwritten
from autopar.compiler import Compiled
from autopar.cost.live import may_view
from autopar.layout.mesh import Mesh
from autopar.programs import compile_step
from autopar.rules import DEFAULT
from autopar.rules.check import parse_sample, run
from models import gpt


class Chain(nn.Module):
    """A chain of pointwise ops on a product, of which a variant reads an earlier value again."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.weight, self.variant = nn.Parameter(torch.randn(16, 16)), variant

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        y = product - product.detach().amax(1, keepdim=True)
        if self.variant == "view":  # other sight of the same memory, read afterwards
            turned = product.t()
            return (torch.exp(y) * 0.1).sum() + (turned * turned).sum()
        if self.variant == "again":
            return (y * product).sum()
        return (y * 0.1).sum()


def compiled(model: nn.Module, batch: object, mesh: Mesh, large: int, monkeypatch: object) -> Compiled:
    monkeypatch.setattr(memory, "LARGE", large)  # type: ignore[attr-defined]
    tree, tensors = take_batch(batch)
    options = make_options(None, None, "auto", None, 0, "check", None, 0, "eager", ())
    return compile_step(model, mesh, options, tree, tensors)


def over(c: Compiled) -> dict[str, int]:
    return overwritten(c.final, c.final.nodes)


def test_what_dies_is_overwritten(monkeypatch: object) -> None:
    found = compiled(Chain(), torch.randn(8, 16), Mesh(), 1, monkeypatch)
    (name,) = [n.name for n in found.final.nodes if n.op == "aten.sub.Tensor"]
    assert over(found)[name] == 0 and ".sub_(" in found.module.source


def test_small_tensors_are_left_alone(monkeypatch: object) -> None:
    assert not over(compiled(Chain(), torch.randn(8, 16), Mesh(), 2**20, monkeypatch))


def test_what_is_read_again_is_kept(monkeypatch: object) -> None:
    for variant in ("view", "again"):
        found = compiled(Chain(variant), torch.randn(8, 16), Mesh(), 1, monkeypatch)
        (name,) = [n.name for n in found.final.nodes if n.op == "aten.sub.Tensor" and n.phase == "forward"]
        assert name not in over(found), variant


def test_segments_let_go_of_what_is_large(monkeypatch: object) -> None:
    """All names of one memory go after the last use of any of them; what a segment returns, or was given, stays."""
    model, batch = gpt.build(), gpt.batch(4, torch.Generator())
    for large in (1, 2**20):
        found = compiled(model, batch, Mesh(), large, monkeypatch)
        segments = found.module.source.split("\ndef step(")[0].split("\ndef ")[2:]
        deleted = [re.findall(r"(?m)^ +del (.*)$", text) for text in segments]
        assert any(deleted) == (large == 1)
        for text, lines in zip(segments, deleted, strict=True):
            names = [name for line in lines for name in line.split(", ")]
            header, body = text.split("):\n", 1)
            assert len(set(names)) == len(names) and not set(names) & set(re.findall(r"\w+", header))
            assert not set(names) & set(re.findall(r"\w+", body[body.rindex("    return") :]))


class Mixed(nn.Module):
    """Residual adds, a loss over classes, a bias: the places where it happens in real models."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x)) * 0.5)
        return F.cross_entropy(self.head(x), y) + x.square().mean()


def test_results_keep_their_bits(monkeypatch: object) -> None:
    torch.manual_seed(0)
    model, batch = Mixed().double(), (torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 8, (8,)))
    monkeypatch.setattr(memory, "LARGE", 1)  # type: ignore[attr-defined]
    for mesh in ("", "dp=2", "tp=2", "dp=2,tp=2"):
        for microbatches in (1, 2):
            report = autopar.verify(model, Mesh.parse(mesh) if mesh else Mesh(), batch, plan=autopar.Plan(microbatches=microbatches))
            assert report.ok, f"{mesh}, {microbatches}: {report}"


def test_logits_are_kept_once() -> None:
    """Their log-softmax is written over them, and their gradient over that; of classes that are cut no exponentials are kept."""
    model, batch = gpt.build("bench", layers=1), gpt.batch(8, torch.Generator(), "bench")
    tree, tensors = take_batch(batch)
    options = make_options(None, None, "auto", None, 0, "check", None, 0, "eager", ())
    for mesh, rows in ((Mesh(dp=2), 8), (Mesh(tp=2), 8)):
        source = compile_step(model, mesh, options, tree, [t[:rows] for t in tensors]).module.source
        assert ("ops.log_softmax" in source) == (mesh["tp"] == 1) and ("ops.exp_sum(" in source) == (mesh["tp"] > 1)
        assert re.search(r"ops\.cross_entropy_backward\([^)]*out=", source)
        assert mesh["tp"] > 1 or re.search(r"ops\.log_softmax\([^)]*out=", source)


def test_every_op_whose_result_is_an_operand_is_known_as_a_view() -> None:
    """Of all rows' samples: a result in an operand's memory, unknown as such, would be written over, or given back, too early."""
    seen, wrong = 0, []
    for rule in DEFAULT.table.values():
        for sample in rule.samples:
            node, values = parse_sample(rule.op, sample)
            held = {t.untyped_storage().data_ptr() for t in values.values() if t.numel()}
            for result in run(node, values):
                if result is not None and result.numel() and result.untyped_storage().data_ptr() in held:
                    seen += 1
                    if not may_view(node):
                        wrong.append(f"{rule.op}({sample})")
    assert seen > 30 and not wrong, wrong
