"""Fused backward ops in two: the input's gradient in task I, those of the parameters in task W; results stay those of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.api import make_options
from autopar.capture.tree import take_batch
from autopar.ir.program import Node
from autopar.layout.mesh import Mesh
from autopar.passes.masks import _mask
from autopar.plan.plan import Plan
from autopar.programs import compile_step
from tests.cases.run import near, plain, values


class Norms(nn.Module):
    """Every fused backward op with an output mask, in the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2), nn.LayerNorm(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().sum()


OPS = ("convolution_backward", "native_group_norm_backward", "native_layer_norm_backward")


def nodes_of(schedule: str) -> list[Node]:
    plan = Plan(schedule=schedule, cuts=("second",), microbatches=4)
    tree, tensors = take_batch(torch.randn(8, 2, 4, 4))
    options = make_options(None, None, plan, None, 0, "check", None, 0, "eager", ())
    compiled = compile_step(Norms(), Mesh(pp=2), options, tree, tensors, coordinate=1)
    return [n for n in compiled.stage(1)[0].nodes if any(op in n.op for op in OPS)]


def test_each_is_two() -> None:
    for node in nodes_of("1f1b"):
        assert node.args[_mask(node) or -1] == (True, True, True), "without W there is nothing to gain"
    found = nodes_of("zb-h1")
    assert len(found) == 2 * 4
    for node in found:
        mask = node.args[_mask(node) or -1]
        assert mask == tuple(bool(o) for o in node.outs) and mask in ((True, False, False), (False, True, True))


def test_tasks() -> None:
    """The gradients of parameters are made in W, and only they."""
    plan = Plan(schedule="zb-h1", cuts=("second",), microbatches=4)
    tree, tensors = take_batch(torch.randn(8, 2, 4, 4))
    options = make_options(None, None, plan, None, 0, "check", None, 0, "eager", ())
    _, module = compile_step(Norms(), Mesh(pp=2), options, tree, tensors, coordinate=1).stage(1)
    source = module.source
    functions = {name: source.partition(f"def {name}(")[2].partition("\n\n\n")[0] for name in ("backward_inputs", "backward_weights")}
    segments = {name: source.partition(f"def {name}(")[2].partition("\n\n\n")[0] for name in _called(source)}
    text = {task: "".join(s for name, s in segments.items() if f"{name}(" in body) for task, body in functions.items()}
    for op in OPS:
        calls = 2 if op == "convolution_backward" else 1
        assert text["backward_inputs"].count(f"aten.{op}.") == text["backward_weights"].count(f"aten.{op}.") == calls
    assert "(True, True, True)" not in source


def _called(source: str) -> list[str]:
    return [line.split("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def second_")]


def test_equal() -> None:
    torch.manual_seed(0)
    model, batch = Norms().double(), torch.randn(8, 2, 4, 4, dtype=torch.float64)
    wanted_loss, wanted = plain(model, batch)
    for mesh in ("pp=2", "pp=2,dp=2"):
        for loss, gradients in values(mesh, model, batch, plan=Plan(schedule="zb-h1", cuts=("second",), microbatches=4)):
            assert near(loss, wanted_loss) and all(near(gradients[n], g) for n, g in wanted.items())
