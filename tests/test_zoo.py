"""Models of others: a sample of the table in docs/models.md, what they move, and adapters on a frozen base."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autopar.api import make_options
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from tests import zoo
from tests.equality.cases import Case

BY_NAME = {m.name: m for m in zoo.MODELS}
QUICK = ("GPT-NeoX", "CLIP")


def _one(n: int, model: zoo.Zoo) -> str:
    variants = [v for v in zoo.VARIANTS if v != "dropout" or model.dropout]
    return f"{model.name} / {zoo.MESHES[n % 4]} / {variants[(n + n // 4) % len(variants)]}"


#: one case of every model, with all meshes and variants among them.
SAMPLE = [_one(n, model) for n, model in enumerate(zoo.MODELS)]


def test_sample_holds_everything() -> None:
    for part in (*BY_NAME, *zoo.MESHES, *zoo.VARIANTS):
        assert any(part in name.split(" / ") for name in SAMPLE), part


def check(case: Case) -> None:
    if case.refused:
        case.refusal()
        return
    report = case.verify()
    assert report.ok, report.table()


@pytest.mark.parametrize("case", [c for c in zoo.every() if str(c) in SAMPLE], ids=str)
def test_sample(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in zoo.every() if str(c) not in SAMPLE], ids=str)
def test_rest(case: Case) -> None:
    check(case)


def check_bytes(model: zoo.Zoo) -> None:
    layer, _ = zoo.per_layer(model, "tp=4", Plan())
    for phase, known in zip(("forward", "backward"), zoo.known_bytes(model, 4), strict=True):
        assert known <= layer["tp", phase, False] <= known * (1 + model.more[1]), phase
    layer, _ = zoo.per_layer(model, "dp=4", Plan())
    assert layer["dp", "forward", False] == layer["dp", "backward", False] == 0
    assert layer["dp", "forward", True] == layer["dp", "backward", True] > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_layer_moves_what_is_known(name: str) -> None:
    check_bytes(BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BY_NAME if n not in QUICK])
def test_a_layer_of_the_others_moves_what_is_known(name: str) -> None:
    check_bytes(BY_NAME[name])


def test_adapters_leave_the_base_as_it_is() -> None:
    """What is frozen keeps every bit, has no gradient, and the optimizer has no state of it; the adapters move."""
    torch.manual_seed(0)
    model, mesh = BY_NAME["Llama, LoRA"].build(0.0), Mesh(dp=2, tp=2)
    batch = BY_NAME["Llama, LoRA"].batch(torch.Generator().manual_seed(1))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = lambda named: torch.optim.AdamW(named, lr=0.1)  # noqa: E731
    options = make_options(None, optimizer, "auto", None, 0, "check", None, 0, "eager", ())
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        step = Step(copy.deepcopy(model), mesh, comm, options, share)
        for _ in range(2):
            step(step.shard(batch))
        # flat pieces of the buckets of a rank: the adapters, and nothing else
        held = sum(t.numel() for s in step.optimizer.state.values() for t in s.values() if t.dim())
        return step.full_state_dict(), step.gradients(), held

    results = run_simulated(mesh, rank)
    for state, gradients, _ in results:
        assert set(gradients) == set(before) - frozen
        for name, value in before.items():
            assert torch.equal(state[name], value) == (name in frozen), name
    trained = sum(value.numel() for name, value in before.items() if name not in frozen)
    held = sum(held for _, _, held in results)
    assert 2 * trained <= held < 2 * trained + 2 * 16 * mesh.size  # two moments of every element on one rank, and padding
