"""Compiling for a mesh with stages: where the model is cut, in which order the stages run, and the modules of one rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.codegen.stages import StageModule, emit_stage
from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Program
from autopar.ir.stage import StageProgram
from autopar.layout.bucket import Bucket
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding
from autopar.passes.buckets import CAP, bucketize, make_buckets, same_buckets
from autopar.passes.check import check_local
from autopar.passes.check_placements import check_buckets
from autopar.passes.fuse import fuse
from autopar.passes.masks import split_masks
from autopar.passes.recompute import recompute_as_asked
from autopar.passes.regather import regather
from autopar.passes.stages import cut_points, cut_stages
from autopar.plan.plan import Plan
from autopar.plan.recompute import is_asked
from autopar.plan.schedule import SEARCH, search_schedule
from autopar.plan.stages import choose_cuts
from autopar.progress import Progress
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.runtime.executor import Spec
from autopar.schedule.action import Schedule
from autopar.schedule.build import build
from autopar.schedule.edge import Edge
from autopar.schedule.lower import Instruction, lower
from autopar.schedule.validate import peak_live, validate


@dataclass(frozen=True)
class Staged:
    """The stages of a compilation.

    Attributes:
        cuts: the modules that begin all stages but the first.
        edges: what the stages need of each other.
        homes: the stages that hold a parameter or buffer, by path.
        programs, modules: those of this rank, by stage.
        instructions: what this rank does in a step.
    """

    cuts: tuple[str, ...]
    schedule: Schedule
    edges: tuple[Edge, ...]
    homes: Mapping[str, tuple[int, ...]]
    programs: Mapping[int, StageProgram]
    modules: Mapping[int, StageModule]
    instructions: tuple[Instruction, ...]


def cut_pipeline(
    local: LocalProgram,
    split: Program,
    atoms: Atoms,
    mesh: Mesh,
    plan: Plan,
    rules: Rules,
    device: Device,
    groups: Mapping[str, int],
    zero: int,
    coordinate: int,
    title: str,
    like: Staged | None,
    progress: Progress,
) -> tuple[Staged, Spec]:
    """Cuts a local program and compiles the stages of one coordinate along ``pp``; the spec is that of all that its rank holds.

    Args:
        like: an earlier compilation, whose cuts, homes and buckets are kept.
    """
    ranks, microbatches = mesh["pp"], local.microbatches
    name = plan.schedule or "1f1b"
    trained = any(n.phase == "backward" for n in split.nodes)
    if like is not None:
        cuts = like.cuts
    elif plan.cuts is not None:
        cuts = tuple(plan.cuts)
    else:
        count = stage_count(name, ranks)
        live = (ranks,) * count if name == SEARCH else peak_live(build(name, count, microbatches, ranks)).stages
        cuts = choose_cuts(split, atoms, rules, live, device)
    stages = len(cuts) + 1
    if stages % ranks:
        raise PlanError(
            f"{stages} stages on pp={ranks}: every rank holds as many", hint=f"a multiple of {ranks} stages: cuts= with one less"
        )
    programs = cut_stages(local, cut_points(local, cuts), like.homes if like is not None else None)
    if like is not None and like.schedule.microbatches == microbatches:
        schedule = like.schedule
    elif name == SEARCH and trained:
        schedule = search_schedule(programs, ranks, split, atoms, rules, device, microbatches)
    else:
        schedule = build("1f1b" if name == SEARCH else name, stages, microbatches, ranks)
    edges = tuple(dict.fromkeys(Edge(c.source, c.made, c.target, c.wanted) for p in programs for c in p.crossings if c.target == p.stage))
    validate(schedule, edges)
    instructions = lower(schedule, edges)[coordinate]
    if not trained:
        instructions = tuple(i for i in instructions if getattr(i, "kind", "") not in ("B", "I", "W"))
    kinds = {a.kind for a in schedule} - {"F"}
    finals: dict[int, StageProgram] = {}
    modules: dict[int, StageModule] = {}
    buckets: list[Bucket] = []
    for s, rank in enumerate(schedule.placement):
        if rank != coordinate:
            continue
        program = programs[s]
        if is_asked(program, plan.recompute) and trained:
            progress.at("recompute")
            # beside the message that a task has the next one is awaited, and two sends of a channel may be under way
            messages = 2 * sum(program.types[c.value].nbytes for c in program.crossings)
            others = peak_live(schedule).stages[s] - 1
            program = recompute_as_asked(program, plan.recompute, split, atoms, rules, device, held=messages, others=others)
            check_local(program)
        progress.at("buckets")
        made = _buckets(program, groups, plan, s, zero, like)
        final = bucketize(program, made, zero, looped=True)
        if "W" in kinds:
            final = split_masks(final)
        final = fuse(regather(final))
        progress.at("check")
        check_local(final)
        check_buckets(final, program)
        progress.at("emit")
        modules[s] = emit_stage(final, kinds=kinds, title=title)
        finals[s] = final
        buckets += made
    homes: dict[str, tuple[int, ...]] = {}
    for s, p in enumerate(programs):
        for i in p.inputs:
            if i.kind in ("param", "buffer"):
                homes[i.path] = (*homes.get(i.path, ()), s)
    staged = Staged(cuts, schedule, edges, like.homes if like is not None else homes, finals, modules, instructions)
    return staged, _spec(mesh, programs, finals, modules, tuple(buckets), zero, microbatches)


def stage_count(schedule: str | Callable[..., Schedule], ranks: int) -> int:
    """How many stages a schedule has where nobody says so: one a rank, or two where it needs more."""
    return ranks * (2 if schedule in ("interleaved", "zb-v", "dualpipev") else 1)


def _buckets(
    program: StageProgram, groups: Mapping[str, int], plan: Plan, stage: int, zero: int, like: Staged | None
) -> tuple[Bucket, ...]:
    if like is None:
        return make_buckets(program, groups, plan.buckets or CAP, prefix=f"stage{stage}_", zero=zero, ranks=plan.zero_ranks)
    kept = like.programs[stage].buckets
    return same_buckets(kept, program) if any(True for _ in program.outputs_of("grad")) else kept


def _spec(
    mesh: Mesh, programs: tuple[StageProgram, ...], finals: Mapping[int, StageProgram], modules: Mapping[int, StageModule],
    buckets: tuple[Bucket, ...], zero: int, microbatches: int,
) -> Spec:  # fmt: skip
    def table(kind: str) -> dict[str, tuple[torch.dtype, Sharding]]:
        return {
            i.path: (programs[s].types[i.name].dtype, programs[s].shardings[i.name]) for s, p in finals.items() for i in p.inputs_of(kind)
        }

    specs = [m.spec for m in modules.values()]

    def union(found: Any) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(item for one in found for item in one))

    return Spec(
        mesh, table("param"), table("buffer"), table("batch"), buckets, union(s.consts for s in specs),
        union([path for path, _ in s.buffers] for s in specs), union([path for path, _ in s.outputs] for s in specs),
        union(s.axes for s in specs), union([path for _, kind, path in s.inputs if kind == "gather"] for s in specs),
        any(s.grads for s in specs), zero, microbatches,
    )  # fmt: skip
