"""Stages under a compiling backend: the result of one process, and equal stages of a rank compiled once."""

from __future__ import annotations

import copy
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.plan.plan import Plan
from autopar.runtime.executor import compiled_once
from autopar.step import Step
from tests.cases.run import Net, near, plain, ranks


def chain(depth: int) -> nn.Module:
    torch.manual_seed(0)

    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = x + layer(x).tanh()
        return x.square().mean()

    return Net(run, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(depth)))


ROWS = torch.linspace(-1, 1, 64).view(8, 8)
PLAN = Plan(microbatches=4, schedule="interleaved", cuts=tuple(f"layers.{k}" for k in range(2, 16, 2)))


def test_equal_stages_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages on each rank, of which at least the middle ones are equal: as many segments are compiled as for two."""
    made: Counter[int] = Counter()

    def compiled(fn: Callable[..., Any], **_: object) -> Callable[..., Any]:
        made[threading.get_ident()] += 1
        return fn

    monkeypatch.setattr(torch, "compile", compiled)

    def use(step: Step, rank: int) -> tuple[int, int]:
        step.compile(step.shard(ROWS.double()))
        return made[threading.get_ident()], sum(m.segments for m in step._need_compiled().modules)

    for compilations, segments in ranks("pp=2", chain(16), use, plan=PLAN, backend="inductor"):
        assert 0 < compilations < 0.7 * segments


def test_only_equal_code_is_shared() -> None:
    scope: dict[str, Any] = {}
    exec("def a(x):\n    return x * 2\ndef b(x):\n    return x * 2\ndef c(x):\n    return x * 2.0\ndef d(y):\n    return y + 2\n", scope)  # noqa: S102
    once = compiled_once(lambda fn: lambda x: fn(x))
    a, b, c, d = (once(scope[n]) for n in "abcd")
    assert a is b and a is not c and a is not d and (a(3), c(3), d(3)) == (6, 6.0, 5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor backend needs a C++ compiler on CPU")
def test_inductor_is_equal() -> None:
    model, plan = chain(4).double(), Plan(microbatches=2, schedule="zb-h1", cuts=("layers.2",))
    rows = ROWS.double()
    wanted_loss, wanted = plain(copy.deepcopy(model), rows)

    def use(step: Step, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        return step(step.shard(rows)), step.gradients()

    for loss, gradients in ranks("pp=2", model, use, plan=plan, backend="inductor"):
        assert near(loss, wanted_loss) and all(near(gradients[n], g) for n, g in wanted.items())
