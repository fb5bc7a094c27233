"""The way of the data, from a captured program to an emitted module: up to a checked local program; ``finish`` and ``pipelined`` end it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.codegen.emit import Module
from autopar.codegen.stages import StageModule
from autopar.cost.device import GENERIC, Device
from autopar.errors import InputError, PlanError
from autopar.finish import Finisher
from autopar.ir.local import LocalProgram
from autopar.ir.program import Program
from autopar.layout.bucket import Bucket
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding
from autopar.passes.bounds import Bound, find_bounds
from autopar.passes.canonicalize import canonicalize
from autopar.passes.check import check_local, check_program
from autopar.passes.check_placements import check_placements
from autopar.passes.decompose import decompose
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.lift import lift
from autopar.passes.microbatch import split_microbatches
from autopar.passes.ring import unroll_rings
from autopar.passes.start_early import start_early
from autopar.passes.unsort import unsort
from autopar.pipelined import Staged, cut_pipeline
from autopar.plan.cache import Cache, Key, key_of
from autopar.plan.layout import Layout, choose, random_layout
from autopar.plan.plan import Plan
from autopar.plan.recompute import check_globs
from autopar.progress import Progress
from autopar.rules import DEFAULT, Rules
from autopar.rules.atoms import Atoms, analyse
from autopar.runtime.executor import Spec


@dataclass(frozen=True)
class Compiled:
    """Every stage of one compilation, for running and for looking at.

    Attributes:
        program: canonical, whole batch.
        split: the same with the loop over microbatches.
        local: with collectives, over parameters; gradients by parameter.
        final: over buckets: what is emitted.
        lifted: the least precise type by which the model casts inside, where the wanted precision overruled it; else None.
        seconds: that every stage took.
        bounds: how far ids and labels of the batch may go.
        rules, device: by which shardings were chosen.
        pipeline: on a mesh with stages, how they are run and the programs of this rank's; ``final`` and ``module`` are those of its first.
    """

    program: Program
    split: Program
    atoms: Atoms
    layout: Layout
    local: LocalProgram
    final: LocalProgram
    module: Module | StageModule
    spec: Spec
    lifted: torch.dtype | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    bounds: tuple[Bound, ...] = ()
    rules: Rules = DEFAULT
    device: Device = GENERIC
    pipeline: Staged | None = None

    @property
    def finals(self) -> tuple[LocalProgram, ...]:
        """What this rank runs: one program, or those of its stages."""
        return (self.final,) if self.pipeline is None else tuple(self.pipeline.programs.values())

    @property
    def modules(self) -> tuple[Module | StageModule, ...]:
        """Their modules."""
        return (self.module,) if self.pipeline is None else tuple(self.pipeline.modules.values())

    def stage(self, number: int | None = None) -> tuple[LocalProgram, Module | StageModule]:
        """The program of a stage of this rank (None: its first) and its module. Raises InputError where this rank doesn't run it."""
        if self.pipeline is None:
            if number:
                raise InputError(f"there is no stage {number}", why="without a pipeline there is one stage, 0")
            return self.final, self.module
        staged, placement = self.pipeline, self.pipeline.schedule.placement
        number = next(iter(staged.programs)) if number is None else number
        if not 0 <= number < len(placement):
            raise InputError(f"there is no stage {number}", why=f"there are {len(placement)} stages, from 0 on")
        if number not in staged.programs:
            held = ", ".join(map(str, staged.programs))
            raise InputError(f"stage {number} is not on this rank, which holds {held}", hint=f"ranks with pp={placement[number]} hold it")
        return staged.programs[number], staged.modules[number]


def compile_program(
    captured: Program,
    mesh: Mesh,
    plan: Plan,
    rules: Rules,
    batch_dims: Mapping[str, int | None],
    *,
    groups: Mapping[str, int] | None = None,
    like: Compiled | None = None,
    precision: str | None = None,
    device: Device = GENERIC,
    draw: random.Random | None = None,
    title: str = "",
    progress: Progress | None = None,
    cache: Cache | None = None,
    coordinate: int = 0,
) -> Compiled:
    """Compiles a captured program for a mesh.

    Args:
        batch_dims: which dim of a batch input counts samples, by input name.
        groups: the optimizer's parameter group of every path.
        like: an earlier compilation whose parameters stay where they are and whose buckets are kept (another shape, or evaluation).
        draw: draw a random legal layout instead of choosing one: for tests.
        progress: is told of every stage.
        cache: layouts chosen before.
        coordinate: along ``pp``, of the rank to compile for: only its stages are.
    """
    if mesh["pp"] > 1 and (plan.interleave or 1) > 1:
        raise PlanError(
            f"Plan(interleave={plan.interleave}) on a mesh with stages", why="a schedule of stages says itself which microbatch runs when",
            hint="leave interleave or pp out",
        )  # fmt: skip
    if mesh["dp"] % (plan.zero_ranks or 1):
        raise PlanError(f"Plan(zero_ranks={plan.zero_ranks}) doesn't divide the mesh's dp={mesh['dp']}", hint="a divisor of dp")
    whole, mesh = mesh, mesh.without("pp")
    progress = progress or Progress()
    progress.at("canonicalize")
    lifted = lift(captured, precision)
    overruled = _overruled(captured) if precision is not None else None
    program = unsort(canonicalize(lifted), rules)
    progress.at("check")
    check_program(program)
    progress.at("analyse")
    count = plan.microbatches or 1
    split = split_microbatches(program, rules, batch_dims, count)
    check_program(split)
    check_globs(split, plan.recompute)
    atoms = analyse(split, rules, batch_dims, count)
    bounds = find_bounds(captured)

    def realize(layout: Layout) -> Compiled:
        progress.at("insert")
        local = insert_collectives(split, atoms, layout, mesh, rules)
        progress.at("check")
        check_placements(local, split, atoms)
        local = start_early(decompose(unroll_rings(local, split, atoms, rules), plan.decompose or 1))
        check_local(local)
        zero = 1 if plan.zero is None else plan.zero
        if whole["pp"] > 1:
            progress.at("stages")
            staged, spec = cut_pipeline(
                local, split, atoms, whole, plan, rules, device, groups or {}, zero, coordinate, title,
                like.pipeline if like is not None else None, progress,
            )  # fmt: skip
            first = next(iter(staged.programs))
            return Compiled(
                program, split, atoms, layout, local, staged.programs[first], staged.modules[first], spec, overruled, bounds=bounds,
                rules=rules, device=device, pipeline=staged,
            )  # fmt: skip
        buckets = like.spec.buckets if like is not None else None
        made = Finisher(plan, split, atoms, rules, device, groups or {}, buckets, title, progress).run(local)
        final, module = made.final, made.module
        spec = _spec(final, local, module, made.buckets, zero, count)
        return Compiled(program, split, atoms, layout, local, final, module, spec, overruled, bounds=bounds, rules=rules, device=device)

    progress.at("plan")
    if draw is not None:
        return realize(random_layout(split, atoms, rules, mesh, draw))
    held = (plan.parameters if like is None else {p: str(s) for p, s in _shardings(like).items()}) or {}
    key: Key | None = None
    if cache is not None:
        further = {
            "groups": sorted((groups or {}).items()), "title": title, "buckets": like.spec.buckets if like is not None else None,
            "stages": (whole.axes, coordinate),
        }  # fmt: skip
        key = cache.key(lambda: key_of(split, rules, mesh, plan, batch_dims, device, held, further))
        kept = cache.find(key, split, atoms, mesh)
        if kept is not None and (made := cache.tried(key, kept, realize, lambda made: made.module.source)) is not None:
            return made
        progress.at("plan")
    layout = choose(
        split, atoms, rules, mesh, sequence=bool(plan.sequence), pins=plan.shard or {}, held=held, device=device, at=progress.at,
        context=plan.context,
    )  # fmt: skip
    made = realize(layout)
    if cache is not None:
        cache.keep(key, layout, split, mesh, made.module.source)
    return made


def _overruled(captured: Program) -> torch.dtype | None:
    """The least precise floating-point type of a program's nodes, where it is another one than that of the parameters."""
    made = {captured.types[o].dtype for n in captured.nodes for o in n.outs if o}
    least = max((t for t in made if t.is_floating_point), key=lambda t: torch.finfo(t).eps, default=None)
    return None if least in {captured.types[i.name].dtype for i in captured.inputs_of("param")} else least


def _shardings(compiled: Compiled) -> dict[str, Sharding]:
    return {i.path: compiled.local.shardings[i.name] for i in compiled.local.inputs_of("param")}


def _spec(final: LocalProgram, local: LocalProgram, module: Module, buckets: tuple[Bucket, ...], zero: int, microbatches: int) -> Spec:
    def table(kind: str) -> dict[str, tuple[torch.dtype, Sharding]]:
        return {i.path: (local.types[i.name].dtype, local.shardings[i.name]) for i in final.inputs_of(kind)}

    return Spec(
        final.mesh, table("param"), table("buffer"), table("batch"), buckets, module.consts, module.new_buffers, module.outputs,
        module.axes, module.gathers, any(True for _ in final.outputs_of("bucket")), zero, microbatches,
    )  # fmt: skip
