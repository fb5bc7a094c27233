"""Tied and shared parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.plan.plan import Plan
from autopar.step import Step
from tests.cases.run import MB2, MB4, ZERO0, Net, adamw, double, equal, near, ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self, blocks: int = 2, twice: bool = False) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.head.weight = self.emb.weight
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        if twice:
            self.blocks.append(self.blocks[0])

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, y = (torch.randint(17, (8, 4), generator=generator) for _ in range(2))
    return ids, y


@pytest.mark.parametrize("plan", [None, ZERO0, MB4], ids=str)
def test_t01_tied_weights_stay_one(plan: Plan | None) -> None:
    torch.manual_seed(0)
    equal(Tied(), batch(), ("dp=2", "dp=2,tp=2"), (plan,), optimizer=adamw, steps=10)


def test_t03_one_state_for_a_tied_parameter() -> None:
    torch.manual_seed(0)
    equal(
        Tied(1, twice=True), batch(), ("dp=2", "tp=2"), (None,), optimizer=lambda n: torch.optim.Adam([p for _, p in n], lr=0.01), steps=5
    )

    def state(step: Step, rank: int) -> int:
        step(step.shard(batch()))
        return sum(s["exp_avg"].numel() for s in step.optimizer.state.values())

    model = Tied(1, twice=True)
    unique = sum(p.numel() for p in model.parameters())
    assert unique <= sum(ranks("dp=2", model, state, optimizer=adamw)) <= unique + 16  # padding of a bucket


def test_t04_tie_of_a_model_on_meta() -> None:
    torch.manual_seed(0)
    whole = Tied(1).double()
    with torch.device("meta"):
        meta = Tied(1)
    found = {}
    for name, model in (("real", whole), ("meta", meta)):

        def train(step: Step, rank: int, name: str = name) -> dict[str, torch.Tensor]:
            if name == "meta":
                step.load_state_dict(whole.state_dict())
            for _ in range(3):
                step(step.shard(batch()))
            return step.full_state_dict()

        found[name] = ranks("dp=2", model, train, optimizer=adamw)
    for a, b in zip(found["real"], found["meta"], strict=True):
        assert a.keys() == b.keys() and all(near(a[n], b[n]) for n in a)


def test_t04_tie_in_the_module_of_a_model_on_meta() -> None:
    with torch.device("meta"):
        meta = Tied(1)

    def tied(step: Step, rank: int) -> bool:
        torch.manual_seed(0)
        step.load_state_dict(Tied(1).double().state_dict())
        step(step.shard(batch()))
        module = step.module()
        return module.head.weight is module.emb.weight

    assert ranks("dp=2", meta, tied) == [True, True]


def test_t05_tied_names_in_the_full_state() -> None:
    torch.manual_seed(0)

    def export(step: Step, rank: int) -> dict[str, torch.Tensor]:
        step(step.shard(batch()))
        return step.full_state_dict()

    model = Tied(1)
    for full in ranks("dp=2,tp=2", model, export, optimizer=adamw):
        assert full["head.weight"].data_ptr() == full["emb.weight"].data_ptr()
        Tied(1).double().load_state_dict(full, strict=True)


def test_t05_tie_between_linears() -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()).pow(2).sum(), a=nn.Linear(6, 6), b=nn.Linear(6, 6, bias=False), c=nn.Linear(6, 3)
    )
    model.b.weight = model.a.weight
    pins = (None, MB2, Plan(shard={"a.weight": "dim0@tp"}), Plan(shard={"b.weight": "dim1@tp"}))
    equal(model, double(torch.randn(4, 6)), ("dp=2", "tp=2"), pins)
