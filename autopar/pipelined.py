"""Compiling for a mesh with stages: where the model is cut, in which order the stages run, and the modules of one rank's stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.codegen.live import stage_profiles
from autopar.codegen.stages import StageModule, emit_stage
from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.finish import fit
from autopar.ir.local import LocalProgram
from autopar.ir.program import Phase, Program
from autopar.ir.stage import StageProgram
from autopar.layout.bucket import Bucket, kept_bytes
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
from autopar.plan.plan import FULL, Plan, limit_of
from autopar.plan.recompute import Request, is_asked
from autopar.plan.schedule import SEARCH, search_schedule
from autopar.plan.stages import choose_cuts
from autopar.progress import Progress
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.runtime.executor import Spec
from autopar.runtime.pipeline import UNDER_WAY, edge_of
from autopar.schedule.action import Schedule
from autopar.schedule.build import build
from autopar.schedule.edge import Edge
from autopar.schedule.lower import Instruction, Receive, Send, lower
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

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those of this rank's stages."""
        return tuple(b for p in self.programs.values() for b in p.buckets)

    def most(self) -> int:
        """The most bytes of parameters, gradients and what a step makes, by the emitted statements."""
        some = next(iter(self.programs.values()))
        inputs = {i.path: p.types[i.name].nbytes for p in self.programs.values() for i in p.inputs if i.kind in ("param", "buffer")}
        return sum(kept_bytes(self.buckets, some.mesh, some.zero)) + sum(inputs.values()) + max(self.peaks().values())

    def peaks(self) -> dict[Phase, int]:
        """The most bytes of tensors that this rank makes in each phase of a step beside what lives between steps.

        Its instructions in order, each task beside what other microbatches keep and the messages under way.
        """
        tasks = {s: stage_profiles(p, self.modules[s]) for s, p in self.programs.items()}
        before = {s: found["pre"].left if "pre" in found else 0 for s, found in tasks.items()}
        sizes: dict[Edge, list[int]] = {}
        for m in (m for module in self.modules.values() for m in module.spec.messages):
            sizes.setdefault(edge_of(m), []).append(math.prod(m.shape) * m.dtype.itemsize)
        kept: dict[tuple[int, int | None], int] = {}
        totals: dict[int, int] = {}  # sums over microbatches that have no place in a bucket
        arriving: dict[tuple[Edge, int | None], int] = {}
        leaving: dict[tuple[int, str], deque[int]] = {}
        peaks: dict[Phase, int] = {"forward": 0, "backward": 0}
        for i in self.instructions:
            if isinstance(i, Receive):
                arriving[i.edge, i.microbatch] = sum(sizes[i.edge])
            elif isinstance(i, Send):
                channel = (self.schedule.placement[i.edge.target], i.edge.direction)
                leaving.setdefault(channel, deque(maxlen=UNDER_WAY)).extend(sizes[i.edge])
            elif i.kind in tasks[i.stage]:
                wanted = ("B", "I", "W") if i.kind == "B" else (i.kind,)
                here = [at for at in arriving if at[0].target == i.stage and at[0].wanted in wanted and at[1] in (None, i.microbatch)]
                for at in here:
                    del arriving[at]  # the task has them
                turn, found = (i.stage, i.microbatch), tasks[i.stage][i.kind]
                beside = sum(size for at, size in kept.items() if at != turn) + sum(b for s, b in before.items() if s != i.stage)
                beside += sum(totals.values()) + sum(arriving.values()) + sum(map(sum, leaving.values()))
                phase: Phase = "forward" if i.kind in ("pre", "F") else "backward"
                peaks[phase] = max(peaks[phase], found.peak().bytes + beside)
                if i.kind in ("F", "I"):
                    kept[turn] = found.left - before[i.stage]
                else:
                    kept.pop(turn, None)
                    if i.kind in ("B", "W"):
                        totals[i.stage] = max(0, found.left - before[i.stage])
        return peaks


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
    homes: dict[str, tuple[int, ...]] = {}
    for s, p in enumerate(programs):
        for i in p.inputs:
            if i.kind in ("param", "buffer"):
                homes[i.path] = (*homes.get(i.path, ()), s)
    empty = Staged(cuts, schedule, edges, like.homes if like is not None else homes, {}, {}, instructions)
    held = {s: programs[s] for s, rank in enumerate(schedule.placement) if rank == coordinate}
    staged = _Finisher(empty, held, split, atoms, plan, rules, device, groups, zero, title, like, progress).run()
    return staged, _spec(mesh, programs, staged.programs, staged.modules, staged.buckets, zero, microbatches)


@dataclass(frozen=True)
class _Finisher:
    """Finishes the stages of a rank, ``held``: recompute, buckets, fusing, emission."""

    empty: Staged
    held: Mapping[int, StageProgram]
    split: Program
    atoms: Atoms
    plan: Plan
    rules: Rules
    device: Device
    groups: Mapping[str, int]
    zero: int
    title: str
    like: Staged | None
    progress: Progress

    def run(self) -> Staged:
        """As the plan asks. Raises PlanError: its limit on memory is below what the rank needs."""
        request = self.plan.recompute
        trained = any(True for _ in self.split.outputs_of("grad"))
        if not trained or not any(is_asked(p, request) for p in self.held.values()):
            return self.finish(self.held)
        limit, count = limit_of(request), len(self.held)
        if limit is None:
            return self.finish(self.again(request))
        share = limit - limit // count  # the other stages'
        return fit(
            limit, self.finish(self.held), lambda more: self.finish(self.again(request, share + more // count)),
            lambda: self.finish(self.again(FULL)), Staged.most,
        )  # fmt: skip

    def again(self, request: Request, extra: int = 0) -> dict[int, StageProgram]:
        """The stages whose backward makes again what is asked for."""
        self.progress.at("recompute")
        found = {}
        for s, program in self.held.items():
            # beside the message that a task has the next one is awaited, and two sends of a channel may be under way
            messages = 2 * sum(program.types[c.value].nbytes for c in program.crossings)
            others = peak_live(self.empty.schedule).stages[s] - 1
            found[s] = recompute_as_asked(
                program, request, self.split, self.atoms, self.rules, self.device, extra=messages + extra, others=others
            )  # fmt: skip
            check_local(found[s])
        return found

    def finish(self, programs: Mapping[int, StageProgram]) -> Staged:
        """The rest, without recompute."""
        kinds = {a.kind for a in self.empty.schedule} - {"F"}
        finals: dict[int, StageProgram] = {}
        modules: dict[int, StageModule] = {}
        for s, program in programs.items():
            self.progress.at("buckets")
            final = bucketize(program, _buckets(program, self.groups, self.plan, s, self.zero, self.like), self.zero, looped=True)
            if "W" in kinds:
                final = split_masks(final)
            finals[s] = fuse(regather(final))
            self.progress.at("check")
            check_local(finals[s])
            check_buckets(finals[s], program)
            self.progress.at("emit")
            modules[s] = emit_stage(finals[s], kinds=kinds, title=self.title)
        return replace(self.empty, programs=finals, modules=modules)


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
