"""Looking at the program that a mesh would run: no processes, no values of weights, nothing on a device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch
from torch import nn

from autopar.capture.tree import take_batch
from autopar.compiler import Compiled
from autopar.errors import InputError
from autopar.inspect import stages, tables
from autopar.ir.text import show_program
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.programs import Options, compile_step, cut_rows, filled_plan
from autopar.progress import Progress
from autopar.runtime import optimizer as opt

Optimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Inspection:
    """A compilation to look at.

    Attributes:
        plan: with everything that was chosen.
        states: elements of optimizer state for each element of a parameter; None without an optimizer.
        seconds: that capture and compilation took.
    """

    compiled: Compiled
    plan: Plan
    states: float | None
    seconds: float

    def table(self) -> str:
        """Plan, parameters, collectives and memory."""
        return tables.explain(self.compiled, self.plan, self.states)

    def graph(self, phase: str | None = None, stage: int | None = None) -> str:
        """The rewritten graph as text; ``phase`` forward or backward shows one."""
        final = self.compiled.final if stage is None else self.compiled.stage(stage)[0]
        if phase is not None:
            final = replace(final, nodes=tuple(n for n in final.nodes if n.phase == phase))
        return show_program(final)

    def source(self, stage: int | None = None) -> str:
        """The generated module."""
        return (self.compiled.module if stage is None else self.compiled.stage(stage)[1]).source

    def _stages(self) -> dict[str, Any]:
        if self.compiled.pipeline is None:
            return {}
        rows = stages.stage_rows(self.compiled.pipeline)
        return {
            "stages": [asdict(r) for r in rows], "crossings": [asdict(r) for r in stages.crossing_rows(self.compiled)],
            "schedule": self.compiled.pipeline.schedule.text(),
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        spec, rows = self.compiled.spec, tables.collective_rows(self.compiled)
        memory = tables.memory_rows(self.compiled, self.states)
        return {
            "mesh": str(spec.mesh),
            "plan": json.loads(self.plan.text()),
            "notes": list(self.compiled.layout.notes),
            "predicted_seconds": dict(self.compiled.layout.seconds),
            "parameters": [asdict(r) for r in tables.parameter_rows(self.compiled)],
            "collectives": [asdict(r) for r in rows],
            "bytes_by_axis": tables.by_axis(rows),
            "uneven": [{**asdict(r), "text": str(r)} for r in tables.uneven_rows(self.compiled, self.plan)],
            "memory": {f"zero{level}": {r.what: r.bytes[n] for r in memory} for n, level in enumerate(tables.LEVELS)},
            "segments": {
                "distinct": sum(m.segments for m in self.compiled.modules),
                "calls": sum(m.calls for m in self.compiled.modules),
            },  # fmt: skip
            **self._stages(),
            "compile_s": self.seconds,
            "compile_s_by_stage": dict(self.compiled.seconds),
        }


def inspect_model(model: nn.Module, mesh: Mesh, batch: Any, options: Options, stream: TextIO | None = None, stage: int = 0) -> Inspection:
    """Compiles a model for a mesh as a training step would.

    Args:
        model: on any device, ``meta`` too.
        batch: the global batch; only its types and shapes matter.
        stream: where to say what takes long.
        stage: of a mesh with ``pp``: what the ranks that run it compile.
    """
    begun = time.perf_counter()
    groups: dict[str, int] = {}
    states: float | None = None
    if options.optimizer is not None:
        named = [(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]
        groups = opt.prepare(options.optimizer, named, frozen=[n for n, p in model.named_parameters() if not p.requires_grad]).group_of
        states = state_elements(options.optimizer, [n for n, _ in model.named_parameters()])
    tree, tensors = take_batch(cut_rows(batch, mesh, 0, options.plan, options.batch_dim))
    progress = Progress(f"{type(model).__name__} for {str(mesh) or 'one rank'}", stream)
    compiled = compile_step(model, mesh, options, tree, tensors, groups=groups, progress=progress)
    staged = compiled.pipeline
    if staged is None or not 0 <= stage < staged.schedule.stages:
        compiled.stage(stage)
    elif stage not in staged.programs:
        at = staged.schedule.placement[stage]
        compiled = compile_step(model, mesh, options, tree, tensors, groups=groups, progress=progress, coordinate=at)
    return Inspection(compiled, filled_plan(options.plan, compiled), states, time.perf_counter() - begun)


def state_elements(optimizer: Optimizer, names: Sequence[str]) -> float:
    """Elements of state that an optimizer keeps for each element of a parameter, found by taking a step with small ones."""
    named = [(name, nn.Parameter(torch.ones(8, 8))) for name in names]
    made = optimizer(named)
    for _, p in named:
        p.grad = torch.ones_like(p)
    try:
        made.step()
    except Exception as error:  # noqa: BLE001 - whatever a user's optimizer raises
        raise InputError("the optimizer can't take a step", why=str(error)) from error
    elements = sum(p.numel() for _, p in named)
    kept = sum(v.numel() for state in made.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    return kept / elements if elements else 0.0


__all__ = ["Inspection", "inspect_model", "state_elements"]
