"""The clock: when each action of each rank runs, if ranks keep their order and begin as soon as what they need is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.schedule.action import Action

#: a duration of every stage, or one for each.
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Span:
    """A rank runs an action from ``start`` to ``end``."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float

    @property
    def label(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Times:
    """How long a stage's actions take, in any unit: a number for all stages or one for each. B takes as long as I and W together.

    ``comm`` is the delay from the end of an action to its use on another rank; it occupies neither rank. Within a rank there is none.
    What was measured says more:

    Attributes:
        single: durations of single actions; the others take what their stage's take.
        after: how long a rank is busy with other things, such as sends, when an action has ended.
        links: delays from one rank to another; ``comm`` between the others.
    """

    F: PerStage = 1.0
    I: PerStage = 1.0
    W: PerStage = 1.0
    comm: float = 0.0
    single: Mapping[Action, float] = field(default_factory=dict)
    after: Mapping[Action, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, stage: int, kind: str) -> float:
        """The duration of a stage's action."""
        if kind == "B":
            return self.of(stage, "I") + self.of(stage, "W")
        time: PerStage = {"F": self.F, "I": self.I, "W": self.W}[kind]
        return float(time[stage]) if isinstance(time, Sequence) else float(time)

    def delay(self, source: int, target: int) -> float:
        """The delay from one rank to another."""
        return 0.0 if source == target else self.links.get((source, target), self.comm)

    def check(self, stages: int) -> None:
        """Raises:
        InputError: a time is negative, or there is not one for each stage.
        """
        for name, time in (("F", self.F), ("I", self.I), ("W", self.W)):
            if isinstance(time, Sequence) and len(time) != stages:
                raise InputError(f"{len(time)} times {name} are given for {stages} stages", hint="give one number, or one for each stage")
            if min(time, default=0) < 0 if isinstance(time, Sequence) else time < 0:
                raise InputError(f"a time {name} is negative: {time}")
        if self.comm < 0:
            raise InputError(f"comm is negative: {self.comm}")

    def shortest(self, stages: Iterable[int]) -> float:
        """The shortest duration that isn't zero; 1 if all are."""
        return min((t for s in stages for k in "FIW" if (t := self.of(s, k)) > 0), default=1.0)


def run(
    ranks: Sequence[Sequence[Action]], needs: Mapping[Action, Sequence[Action]], times: Times, placement: Sequence[int]
) -> tuple[Span, ...]:
    """The spans of all actions, rank by rank in their order.

    Raises:
        InputError: no rank can go on; the message says what each waits for.
    """
    end: dict[Action, float] = {}
    free = [0.0 for _ in ranks]
    spans: list[list[Span]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            mine = spans[rank]
            for action in actions[len(mine) :]:
                needed = needs[action]
                if any(n not in end for n in needed):
                    break
                start = max([free[rank], *(end[n] + times.delay(placement[n.stage], rank) for n in needed)])
                taken = times.single.get(action)
                end[action] = start + (times.of(action.stage, action.kind) if taken is None else taken)
                free[rank], moved = end[action] + times.after.get(action, 0.0), True
                mine.append(Span(rank, action.stage, action.kind, action.microbatch, start, end[action]))
    stuck = [(rank, actions[len(spans[rank])]) for rank, actions in enumerate(ranks) if len(spans[rank]) < len(actions)]
    if stuck:
        lines = [f"    rank {rank}: {a} waits for {', '.join(str(n) for n in needs[a] if n not in end)}" for rank, a in stuck]
        raise InputError("the schedule never ends: no rank can go on", why="\n".join(["each waits for another", *lines]))
    return tuple(span for mine in spans for span in mine)
