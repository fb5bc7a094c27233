"""Edges: which results of a stage another stage needs; and what each action then waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.schedule.action import Action, Schedule

#: what a stage does: once before all, for each microbatch, once after all. Edges speak of I and W; where a schedule has B, both mean B.
TASKS = ("pre", "F", "I", "W", "post")
_RANK_OF_TASK = {"pre": 0, "F": 1, "I": 2, "W": 3, "post": 4}


@dataclass(frozen=True, order=True)
class Edge:
    """Results of task ``made`` of stage ``source`` are needed by task ``wanted`` of stage ``target``. Text form: ``0F->1F``.

    Tasks are ``pre`` and ``post``, which run once a step and stage, and ``F``, ``I`` and ``W``, which run for each microbatch. What ``pre``
    and ``post`` make is one message a step, which all microbatches of the target may use; the rest are one for each microbatch, of which a
    ``post`` waits for all.
    """

    source: int
    made: str
    target: int
    wanted: str

    def __str__(self) -> str:
        return f"{self.source}{self.made}->{self.target}{self.wanted}"

    @property
    def once(self) -> bool:
        """One message a step rather than one for each microbatch."""
        return self.made in ("pre", "post")

    @property
    def direction(self) -> str:
        """``up`` for what a forward makes, ``down`` for a backward, ``once`` for what ``pre`` makes, or ``post`` makes or wants."""
        if self.once or self.wanted == "post":
            return "once"
        return "up" if self.made == "F" else "down"


def check_edges(edges: Iterable[Edge], stages: int) -> None:
    """Raises:
    InputError: an edge names a stage or a task that isn't there, stays on its stage, or asks for what comes later in the step.
    """
    for edge in edges:
        for task in (edge.made, edge.wanted):
            if task not in TASKS:
                hint = f"tasks are {', '.join(TASKS)}" + ("; say I or W: where a schedule has B, both mean B" if task == "B" else "")
                raise InputError(f"edge {edge} speaks of a task {task!r}", hint=hint)
        for stage in (edge.source, edge.target):
            if not 0 <= stage < stages:
                raise InputError(f"edge {edge} speaks of stage {stage}, and there are {stages} stages")
        if edge.source == edge.target:
            raise InputError(f"edge {edge} stays on its stage", hint="what a stage keeps for itself needs no edge")
        if _RANK_OF_TASK[edge.made] > _RANK_OF_TASK[edge.wanted] and not (edge.made == "W" and edge.wanted == "I"):
            raise InputError(f"edge {edge} asks for what comes later in the step", hint="the order is pre, F, I and W, post")


def chain(stages: int) -> tuple[Edge, ...]:
    """The edges of stages that follow each other: each needs the forward of the one before it and the I of the one after it."""
    up = [Edge(s, "F", s + 1, "F") for s in range(stages - 1)]
    return (*up, *(Edge(s + 1, "I", s, "I") for s in range(stages - 1)))


def needs(schedule: Schedule, edges: Sequence[Edge] = ()) -> dict[Action, tuple[Action, ...]]:
    """What each action of a schedule waits for: the own forward, the own I, and what edges between tasks of microbatches say.

    Args:
        edges: left out, the stages form a chain.
    """
    if not edges:
        return dict(schedule.chain)
    incoming: dict[tuple[int, str], list[Edge]] = {}
    for edge in edges:
        incoming.setdefault((edge.target, edge.wanted), []).append(edge)
    found: dict[Action, tuple[Action, ...]] = {}
    for action in schedule:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        own = {"F": (), "B": ("F",), "I": ("F",), "W": ("I",)}[kind]
        wanted = [Action(stage, k, microbatch) for k in own]
        for task in ("I", "W") if kind == "B" else (kind,):
            wanted += [schedule.find(e.source, e.made, microbatch) for e in incoming.get((stage, task), ()) if not e.once]
        found[action] = tuple(dict.fromkeys(wanted))
    return found
