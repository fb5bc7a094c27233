"""The models, meshes and variants whose every combination must equal the plain model. No test here: what they share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.api import verify
from autopar.compare import Report
from autopar.errors import PlanError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from models import encdec, gpt, llama, lstm, mlp, moe, resnet, unet, vit

#: rows of a global batch: every mesh here and two microbatches divide it.
ROWS = 8
IGNORE = -100


@dataclass(frozen=True)
class Model:
    """``build(dropout)`` → module, ``batch(generator)`` → global batch.

    ``dropout``: whether the model has any; ``divides``: whether it may be split into microbatches (its loss is a sum over samples).
    """

    name: str
    build: Callable[[float], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    dropout: bool = True
    divides: bool = True


def text(generator: torch.Generator, vocab: int, sequence: int = 8) -> dict[str, Tensor]:
    """Random ids, and labels of which another number counts in every row."""
    ids = torch.randint(vocab, (ROWS, sequence), generator=generator)
    kept = torch.randint(2, sequence + 1, (ROWS, 1), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(sequence) >= kept, IGNORE)}


def _gpt2(attention: str) -> Model:
    """Tied head, Conv1D, learned positions; an odd vocabulary, as the real one has."""

    def build(dropout: float) -> nn.Module:
        config = GPT2Config(
            vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False, attn_implementation=attention,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    return Model(f"HF GPT-2 {attention}", build, lambda g: text(g, 97))


def _hf_llama(attention: str) -> Model:
    """Two key and value heads under four query heads; norms and loss in float32."""

    def build(dropout: float) -> nn.Module:
        config = LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=32, use_cache=False, attention_dropout=dropout, attn_implementation=attention,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    return Model(f"HF Llama {attention}", build, lambda g: text(g, 96))


def _recurrent(kind: str) -> Model:
    return Model(kind, lambda p: lstm.build(dropout=p, kind=kind, sequence=4), lambda g: lstm.batch(ROWS, g, sequence=4))


def _moe(dispatch: str) -> Model:
    """The share of every expert is taken over the whole batch."""
    return Model(f"moe {dispatch}", lambda p: moe.build(dropout=p, dispatch=dispatch), lambda g: moe.batch(ROWS, g), divides=False)


MODELS = (
    Model("gpt", lambda p: gpt.build(dropout=p), lambda g: gpt.batch(ROWS, g)),
    Model("llama", lambda p: llama.build(), lambda g: llama.batch(ROWS, g), dropout=False),
    Model("mlp", lambda p: mlp.build(), lambda g: mlp.batch(ROWS, g), loss=mlp.loss, dropout=False),
    Model("vit", lambda p: vit.build(dropout=p), lambda g: vit.batch(ROWS, g)),
    Model("encdec", lambda p: encdec.build(dropout=p), lambda g: encdec.batch(ROWS, g)),
    Model("unet", lambda p: unet.build(dropout=p), lambda g: unet.batch(ROWS, g)),
    Model("unet bilinear", lambda p: unet.build(dropout=p, upsample="bilinear"), lambda g: unet.batch(ROWS, g)),
    *(_recurrent(kind) for kind in ("lstm", "lstm cells", "gru")),
    Model("resnet", lambda p: resnet.build(), lambda g: resnet.batch(ROWS, g), dropout=False, divides=False),
    *(_moe(dispatch) for dispatch in ("dense", "sorted")),
    *(_gpt2(a) for a in ("sdpa", "eager")),
    *(_hf_llama(a) for a in ("sdpa", "eager")),
)  # fmt: skip

#: models that differ little from another one here, and the mesh of their only cell in the sample. (A recurrence unrolled by hand has a
#: thousand products, and the choice over ``tp`` takes a minute.)
SIMILAR = {
    "unet bilinear": "dp=2,tp=2", "lstm cells": "dp=2", "gru": "dp=2,tp=2", "moe dense": "dp=2,tp=2", "HF GPT-2 eager": "dp=2,tp=2",
    "HF Llama sdpa": "dp=2,tp=2",
}  # fmt: skip

MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "tp=4", "dp=4")

#: name to plan and dropout.
VARIANTS: dict[str, tuple[Plan, float]] = {
    "plain": (Plan(), 0.0),
    "sequence, zero=2": (Plan(sequence=True, zero=2, recompute="selective"), 0.3),
    "microbatches=2": (Plan(microbatches=2), 0.0),
    "interleave=2": (Plan(interleave=2), 0.3),
    "zero=0": (Plan(zero=0), 0.3),
    "zero=3": (Plan(zero=3, recompute="full", microbatches=2), 0.3),
    "together": (Plan(sequence=True, microbatches=2, buckets=4096), 0.3),
}

#: further ones, of other tables: one thing at a time.
SINGLE: dict[str, tuple[Plan, float]] = {"sequence": (Plan(sequence=True), 0.0), "dropout": (Plan(), 0.3)}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    model: Model = field(compare=False)
    name: str
    mesh: str
    variant: str

    def __str__(self) -> str:
        return f"{self.name} / {self.mesh} / {self.variant}"

    @property
    def asked(self) -> tuple[Plan, float]:
        """The variant's plan and dropout."""
        return (VARIANTS | SINGLE)[self.variant]

    def material(self) -> tuple[nn.Module, Any]:
        """The model and a global batch, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model.build(self.asked[1])
        return model.train(), self.model.batch(torch.Generator().manual_seed(1))

    @property
    def refused(self) -> bool:
        """Whether the plan can't be kept exact for this model, which must be said when compiling."""
        plan = self.asked[0]
        return not self.model.divides and max(plan.microbatches or 1, plan.interleave or 1) > 1

    def refusal(self) -> str:
        """The error of a refused case. Raises AssertionError where it isn't refused."""
        try:
            self.verify()
        except PlanError as error:
            assert "can't be split into microbatches" in error.what and error.why, error
            return str(error)
        raise AssertionError(f"{self} is not refused")

    def verify(self, **options: Any) -> Report:
        """All ranks simulated, against the plain model."""
        model, batch = self.material()
        return verify(model, Mesh.parse(self.mesh), batch, plan=self.asked[0], loss=self.model.loss, **options)


def check(case: Any) -> None:
    """A cell of the matrix (here, or with stages): refused if it must be, else equal."""
    if case.refused:
        assert case.refusal()
        return
    report = case.verify()
    assert report.ok, report.table()


def every() -> list[Case]:
    """The full matrix."""
    return [Case(model, model.name, mesh, variant) for model in MODELS for variant in VARIANTS for mesh in MESHES]


#: variants of which the sample has every model: those that ask for most at once.
COMPOSED = ("zero=3", "together")


def pairs(case: Case) -> list[tuple[tuple[int, str], ...]]:
    """What a case stands for in the sample: (model, mesh), (mesh, variant), and of composed variants (model, variant)."""
    found = list(combinations(enumerate((case.name, case.mesh, case.variant)), 2))
    return [p for p in found if p[0][0] == 1 or p[1][0] == 1 or case.variant in COMPOSED]


def covering() -> list[Case]:
    """Cases that hold every one of ``pairs``: greedy, the same every time.

    Of models that are like another one, one case.
    """
    left = [case for case in every() if case.name not in SIMILAR]
    todo = {pair for case in left for pair in pairs(case)}
    random.Random(0).shuffle(left)
    chosen = [case for case in every() if case.mesh == SIMILAR.get(case.name) and case.variant == "sequence, zero=2"]
    while todo:
        best = max(left, key=lambda case: sum(pair in todo for pair in pairs(case)))
        chosen.append(best)
        todo.difference_update(pairs(best))
    return sorted(chosen, key=str)
