"""Tables of stages: where they begin and what they hold, what crosses between them, and the schedule by which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from autopar.compiler import Compiled
from autopar.ir.stage import Crossing
from autopar.pipelined import Staged
from autopar.schedule.action import Schedule
from autopar.schedule.validate import peak_live


@dataclass(frozen=True)
class StageRow:
    """A stage: the coordinate along ``pp`` that runs it, its first module, how many parameters and buffers it holds, and the most
    microbatches that are alive on it at once."""

    stage: int
    rank: int
    begins: str
    tensors: int
    live: int


@dataclass(frozen=True)
class CrossingRow:
    """A value that stages of this rank send or receive: ``times`` a step, ``bytes`` each on a rank."""

    value: str
    source: str
    target: str
    type: str
    times: int
    bytes: int


def stage_rows(staged: Staged) -> list[StageRow]:
    """Every stage of the mesh."""
    schedule = staged.schedule
    held = [sum(s in home for home in staged.homes.values()) for s in range(schedule.stages)]
    live = peak_live(schedule).stages
    begins = ("", *staged.cuts)
    return [StageRow(s, schedule.placement[s], begins[s], held[s], live[s]) for s in range(schedule.stages)]


def crossing_rows(compiled: Compiled) -> list[CrossingRow]:
    """What the stages of this rank send and receive."""
    staged = compiled.pipeline
    assert staged is not None
    rows = []
    for stage, program in staged.programs.items():
        for c in program.crossings:
            if stage == c.source or c.source not in staged.programs:
                times = 1 if c.made in ("pre", "post") else compiled.spec.microbatches
                kind = program.types[c.value]
                rows.append(CrossingRow(c.value, _place(c, True), _place(c, False), str(kind), times, kind.nbytes))
    return rows


def _place(c: Crossing, source: bool) -> str:
    return f"{c.source} {c.made}" if source else f"{c.target} {c.wanted}"


def show_stages(rows: Sequence[StageRow]) -> str:
    headers = ("stage", "pp", "begins with", "parameters and buffers", "microbatches alive, at most")
    return tabulate([(r.stage, r.rank, r.begins or "the model", r.tensors, r.live) for r in rows], headers=headers)


def show_crossings(rows: Sequence[CrossingRow]) -> str:
    """What crosses, with its bytes on a rank."""
    if not rows:
        return "nothing crosses between stages"
    table = [(r.value, r.source, r.target, r.type, r.times, r.bytes) for r in rows]
    headers = ("value", "from stage", "to stage", "type", "times", "bytes")
    return tabulate(table, headers=headers, intfmt=",", disable_numparse=[0, 1, 2, 3])


def show_schedule(schedule: Schedule) -> str:
    """The schedule as a grid of equal slots."""
    return f"schedule {schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches\n{schedule.grid()}"


def explain_stages(compiled: Compiled) -> str:
    """All of it."""
    staged = compiled.pipeline
    assert staged is not None
    return "\n\n".join([show_stages(stage_rows(staged)), show_crossings(crossing_rows(compiled)), show_schedule(staged.schedule)])
