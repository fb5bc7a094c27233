"""What a fault has to get past: the check of some rows, the verifier, and ``verify`` on small models, chosen and random layouts."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autopar.compare
import autopar.compiler
import autopar.programs
from autopar import _torch
from autopar.api import verify
from autopar.errors import VerifyError
from autopar.layout import reshard, sharding
from autopar.layout.mesh import Mesh
from autopar.passes import check as verifier
from autopar.passes import check_placements as placements
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT
from autopar.rules.check import check
from autopar.runtime.sim import SimComm
from models import gpt, llama, mlp

#: rows whose check is part of the battery.
ROWS = (
    "aten.mm.default", "aten.add.Tensor", "aten.sum.dim_IntList", "aten.amax.default", "aten.view.default", "aten.permute.default",
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.cat.default", "aten.slice.Tensor",
    "aten.expand.default", "aten.index_select.default", "aten.full.default", "aten.arange.start_step", "aten.tril.default",
    "aten.triu.default",
    *(op for op in DEFAULT.table if op.startswith("autopar.")),
)  # fmt: skip
#: and some on arguments that its own samples lack.
SAMPLES = {"aten.view.default": ("f[0, 4], (0,)", "f[4, 0], (2, 0, 2)", "f[4, 6], (6, 4)")}
#: rooms that the check of a row goes through.
OF_ROWS = ("autopar.layout", "autopar.rules", "autopar.runtime.ops")
#: rooms that the choice of a layout doesn't go through: what it chooses is remembered.
AFTER_PLAN = (
    "autopar.passes.insert", "autopar.passes.buckets", "autopar.codegen", "autopar.runtime", "autopar.step", "autopar.programs",
    "autopar.layout.bucket",
)  # fmt: skip

_VERIFIER = (verifier.__file__, placements.__file__)


class Toy(nn.Module):
    """What the models lack: frozen and unreached parameters, a scalar one, a reused one, a padding index, buffers written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unreached = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)
        self.kinds = nn.Embedding(6, 8, padding_idx=2)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        self.steps += 1
        y = torch.tanh(self.first(x) + self.kinds(kinds)) * self.scale
        y = self.frozen(self.norm(self.frozen(y)))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.last(y).logsumexp(-1).mean() + y.square().mean() + (y.amax(-1) - y.amin(-1)).mean() + self.first.bias.amax()


class Weighted(nn.Module):
    """A mean with random weights, whose sum every microbatch needs while it draws only its own; extremes over the batch; a scalar input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("most", torch.tensor(0.0))
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("drawn", torch.zeros(8))
        self.register_buffer("share", torch.tensor([1.0, 2.0, 0.5, 1.5]))

    def forward(self, x: Tensor, kinds: Tensor, scale: Tensor) -> Tensor:
        weight = torch.rand(x.shape[0], dtype=x.dtype)
        self.drawn.copy_(weight)
        z = torch.tanh(self.first(x)) * scale
        z, _ = torch.native_dropout(z, 0.5, False)
        y = self.last(z).square().sum(-1)
        self.most.copy_(torch.maximum(self.most, z.detach().max(-1).values.amax()))
        self.least.copy_(torch.minimum(self.least, z.detach().amin()))
        labelled = nn.functional.cross_entropy(self.last(z), kinds, weight=self.share)
        return labelled + (y * weight / weight.sum()).sum() + self.last.bias.square().sum()


def _toy_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)


def _scaled_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return *_toy_batch(generator), torch.tensor(1.25)


@dataclass(frozen=True)
class Case:
    """A model and batch on a mesh under a plan. ``draw``: the seed of a random layout."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    mesh: str
    plan: Plan = field(default_factory=Plan)
    draw: int | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    clip: float | None = None

    def material(self) -> tuple[nn.Module, Any]:
        """The model with all parameters random, and the batch."""
        generator = torch.Generator().manual_seed(3)
        model = self.build()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() < 2))
        return model, self.batch(generator)


def _gpt(name: str, mesh: str, plan: Plan, draw: int | None = None, **sizes: Any) -> Case:
    sizes = dict(hidden=16, heads=2, layers=1, vocab=16, sequence=4, mlp_ratio=2) | sizes
    return Case(name, lambda: gpt.build(**sizes), lambda g: gpt.batch(8, g, **sizes), mesh, plan, draw)


def _llama(name: str, mesh: str, plan: Plan, draw: int | None = None, **sizes: Any) -> Case:
    sizes = dict(hidden=16, heads=4, kv_heads=2, layers=1, vocab=12, sequence=4, mlp_hidden=12) | sizes
    return Case(name, lambda: llama.build(**sizes), lambda g: llama.batch(8, g, **sizes), mesh, plan, draw)


def _mlp(name: str, mesh: str, plan: Plan, draw: int | None = None, clip: float | None = None, **sizes: Any) -> Case:
    sizes = dict(features=6, hidden=10, code=3) | sizes
    return Case(name, lambda: mlp.build(**sizes), lambda g: mlp.batch(8, g, **sizes), mesh, plan, draw, mlp.loss, clip)


CASES = (
    _mlp("mlp, ZeRO 0", "dp=4", Plan(zero=0, buckets=300), clip=0.05),
    _gpt("tied gpt with dropout, everything on", "dp=2,tp=2", Plan(sequence=True, microbatches=2, buckets=2000), dropout=0.3, tied=True),
    _llama("llama", "tp=2", Plan(), fused_gate_up=True),
    Case("toy", Toy, _toy_batch, "dp=2,tp=2", clip=0.05),
    Case("toy, random layout", Toy, _toy_batch, "tp=4,dp=2", draw=3),
    Case("toy, tp only", Toy, _toy_batch, "tp=2"),
    Case("random weights, microbatches", Weighted, _scaled_batch, "dp=2,tp=2", Plan(microbatches=2)),
    _gpt("gpt, odd vocabulary, microbatches", "dp=2", Plan(microbatches=4), vocab=15, layers=2),
    _gpt("gpt with dropout, random layout", "tp=2,dp=2", Plan(microbatches=2, buckets=1000), 1, dropout=0.3),
    _llama("llama, random layout", "dp=2,tp=2", Plan(), 2),
    _gpt("tied gpt, random layout", "dp=2,tp=4", Plan(zero=0), 3, heads=4, tied=True),
    _mlp("mlp, random layout", "tp=2,dp=2", Plan(microbatches=2), 4, features=8, hidden=12, code=4),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Who noticed a fault (``""``: nobody), and what was said."""

    by: str
    text: str = ""


class Battery:
    """All checks with what no fault touches remembered: captures, and for faults behind the plan the chosen layouts."""

    def __init__(self, cases: tuple[Case, ...] = CASES) -> None:
        self.cases = cases
        self._material: dict[Any, Any] = {}
        self._captured: dict[Any, Any] = {}
        self._chosen: dict[Any, Any] = {}

    def warm(self) -> None:
        """Runs everything once without a fault. Raises AssertionError where something is noticed."""
        assert not (verdict := self.rows(ROWS)).by, verdict.text
        for case in self.cases:
            verdict = self.run(case)
            assert not verdict.by, f"{case.name}: {verdict.text}"

    def judge(self, module: str) -> Verdict:
        """Who notices a fault that was planted in a module. For a process of its own."""
        for made in (sharding, reshard):
            for function in vars(made).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()
        if module.startswith(("autopar.runtime.ops", "autopar.runtime.random")):
            _torch._inferred.cache_clear()  # noqa: SLF001
        of_rows = module.startswith(OF_ROWS)
        if of_rows and (verdict := self.rows(ROWS)).by:
            return verdict
        for case in self.cases:
            verdict = self.run(case, remember=module.startswith(AFTER_PLAN))
            if verdict.by:
                return verdict
        # the rest of the table takes longer than all cases
        return self.rows(tuple(op for op in DEFAULT.table if op not in ROWS and not op.startswith("transformers."))) if of_rows else verdict

    def rows(self, ops: tuple[str, ...]) -> Verdict:
        """The check of the rows of some ops."""
        for op in ops:
            try:
                report = check(DEFAULT[op], first=True)
                if report.ok and op in SAMPLES:
                    report = check(DEFAULT[op], SAMPLES[op], timid=False, first=True)
            except Exception as error:  # noqa: BLE001 - whatever a fault makes of it
                return Verdict("row check", f"{op}: {_told(error)}")
            if not report.ok:
                return Verdict("row check", f"{op}: {report}")
        return Verdict("")

    def run(self, case: Case, make: type[SimComm] = SimComm, remember: bool = True) -> Verdict:
        """``verify`` on one case."""
        model, batch = _kept(self._material, case.name, case.material)
        with ExitStack() as stack:

            def change(target: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(target, name, value))

            capture, choose, compile_ = autopar.programs.capture, autopar.compiler.choose, autopar.programs.compile_program
            change(autopar.programs, "capture", lambda *a, **k: _kept(self._captured, case.name, lambda: capture(*a, **k)))
            if remember:
                change(autopar.compiler, "choose", lambda *a, **k: _kept(self._chosen, case.name, lambda: choose(*a, **k)))
            if case.draw is not None:
                change(autopar.programs, "compile_program", partial(compile_, draw=random.Random(case.draw)))
            change(autopar.compare, "first_difference", lambda *a: "")
            try:
                report = verify(
                    model, Mesh.parse(case.mesh), batch, plan=case.plan, loss=case.loss, clip_grad_norm=case.clip, steps=3, make=make
                )
            except Exception as error:  # noqa: BLE001 - whatever a fault makes of it
                places = traceback.extract_tb(error.__traceback__)
                in_verifier = isinstance(error, VerifyError) and any(p.filename in _VERIFIER for p in places)
                compiling = any(p.filename == autopar.compiler.__file__ for p in places)
                by = "verifier" if in_verifier else "an error while compiling" if compiling else "verify: an error"
                return Verdict(by, f"{case.name}: {_told(error)}")
        if report.ok:
            return Verdict("")
        differs = [r for r in report.rows if not r.ok]
        text = f"{differs[0].kind} {differs[0].name} {differs[0].difference:.1e}" if differs else report.replicas[0]
        return Verdict("verify: a difference" if differs else "verify: replicas differ", f"{case.name}: {text}")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _kept(table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in table:
        table[key] = make()
    return table[key]
