"""Cuts into stages: against every way to cut, and what of a model counts."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from torch import nn

from autopar.api import make_options
from autopar.capture.tree import take_batch
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.stages import SLACK, split
from autopar.programs import compile_step
from models import gpt


def ways(count: int, parts: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, count), parts - 1))


@pytest.mark.parametrize("seed", range(60))
def test_against_every_way(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(3, 9)
    parts = draw.randint(1, min(count, 4))
    seconds = [draw.choice((0.0, 1.0, draw.random(), 5 * draw.random())) for _ in range(count)]
    crossing = [draw.choice((1.0, draw.random())) for _ in range(count)]
    memory = [[draw.random() * (parts - p) for _ in range(count)] for p in range(parts)] if seed % 3 else None

    def measures(begins: tuple[int, ...]) -> tuple[float, float, float]:
        ends = [0, *begins, count]
        spans = list(zip(ends, ends[1:], strict=False))
        longest = max(sum(seconds[a:b]) for a, b in spans)
        most = max(sum(memory[p][a:b]) for p, (a, b) in enumerate(spans)) if memory else 0.0
        return longest, most, sum(crossing[b] for b in begins)

    found = measures(tuple(split(seconds, crossing, parts, memory)))
    every = [measures(w) for w in ways(count, parts)]
    within = min(m[0] for m in every) * SLACK
    fast = [m for m in every if m[0] <= within * (1 + 1e-7)]
    small = min(m[1] for m in fast) * SLACK
    assert found[0] <= within * (1 + 1e-6) and found[1] <= small * (1 + 1e-6) + 1e-9
    assert found[2] <= min(m[2] for m in fast if m[1] <= small * (1 - 1e-6)) + 1e-12 if small else True


def cuts_of(model: nn.Module, batch: object, plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    tree, tensors = take_batch(batch)
    compiled = compile_step(model, mesh, make_options(None, None, plan, None, 0, "check", None, 0, "eager", ()), tree, tensors)
    assert compiled.pipeline is not None
    return compiled.pipeline.cuts


def test_the_head_counts() -> None:
    """A vocabulary large beside the blocks: the last stage has fewer of them."""
    batch = gpt.batch(8, torch.Generator(), vocab=64)
    assert cuts_of(gpt.build(layers=8, vocab=64), batch, Plan(microbatches=4), Mesh(pp=2))[0].startswith(("blocks.4", "blocks.3.mlp"))
    batch = gpt.batch(8, torch.Generator(), vocab=1024)
    at = cuts_of(gpt.build(layers=8, vocab=1024), batch, Plan(microbatches=4), Mesh(pp=2))[0]
    assert at.split(".")[0] == "blocks" and int(at.split(".")[1]) >= 6


class Wide(nn.Module):
    """Layers of equal time, of which the first ones keep much for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x) if k >= 20 else layer(x).sin().cos().sin()
        return x.sum()


def test_memory_counts() -> None:
    """Stages early in the pipeline keep more microbatches alive, so they get less where the time is the same."""
    seconds, crossing = [1.0] * 40, [1.0] * 40
    even = split(seconds, crossing, 4)
    assert even == [10, 20, 30]
    memory = [[4.0 - part] * 40 for part in range(4)]
    begins = split(seconds, crossing, 4, memory)
    longest = max(b - a for a, b in zip([0, *begins], [*begins, 40], strict=True))
    assert longest == 10, "within 5 % of ten blocks is ten blocks"
    finer = split([0.1] * 400, [1.0] * 400, 4, [[4.0 - part] * 400 for part in range(4)])
    assert finer[0] < 100 and 400 - finer[-1] > 100 and 400 - finer[-1] <= 105


def test_what_is_kept_moves_a_cut() -> None:
    plan = Plan(microbatches=8, schedule="gpipe")
    (cut,) = cuts_of(Wide(), torch.randn(512, 64), plan, Mesh(pp=2))
    assert int(cut.split(".")[1]) < 20
