"""The simulator: a schedule under given times; its bubble as in the zero-bubble paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InputError
from autopar.schedule.action import Schedule
from autopar.schedule.build import Builder, build
from autopar.schedule.clock import PerStage, Span, Times
from autopar.schedule.validate import Peak, peak_live

#: these hold two stages a rank, in a V.
V_SHAPED = ("zb-v", "dualpipev")


def bubble_of(ranks: Iterable[tuple[float, float]]) -> float:
    """The idle share of the rank that computes most, from each rank's time and what it computes of it; of several, the longest one's.

    Where all compute equally long it is that of the longest rank (Qi et al. 2023, section 4). Where one computes less than the others,
    it says nothing that this one takes long because it begins first.
    """
    ranks = list(ranks)
    most = max((work for _, work in ranks), default=0.0)
    return 1.0 - most / max(span for span, work in ranks if work >= most * (1 - 1e-9)) if most else 0.0


@dataclass(frozen=True)
class Result:
    """A schedule with the time of each action; times in the unit of what was given."""

    schedule: Schedule
    times: Times
    spans: tuple[Span, ...]

    @cached_property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return max((s.end for s in self.spans), default=0.0)

    @cached_property
    def cost(self) -> float:
        """The longest time from a rank's first start to its last end (Qi et al. 2023, section 4)."""
        return max(span for span, _ in self._spans_and_work)

    @cached_property
    def bubble(self) -> float:
        """The share of the busiest rank's time in which it computes nothing."""
        return bubble_of(self._spans_and_work)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Each rank's share of the makespan in which it computes nothing."""
        return tuple(1.0 - work / self.makespan if self.makespan else 0.0 for _, work in self._spans_and_work)

    @cached_property
    def peak(self) -> Peak:
        """The most live microbatches of each stage and rank, until I and until the backward's last part."""
        return peak_live(self.schedule)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The most live microbatches of each stage: their forward has run, and the last part of their backward hasn't."""
        return self.peak.stages

    def grid(self, slot: float | None = None) -> str:
        """The picture: a row for each rank, a column for each ``slot`` of time (left out, the shortest duration)."""
        return self.schedule.grid(self.times, slot)

    def __str__(self) -> str:
        return f"{self.schedule.name}: makespan {self.makespan:g}, bubble {self.bubble:.4f}, live microbatches {self.peak}"

    @cached_property
    def _spans_and_work(self) -> tuple[tuple[float, float], ...]:
        """Of each rank: the time from its first start to its last end, and the time in which it computes."""
        ranks: list[list[Span]] = [[] for _ in self.schedule.ranks]
        for span in self.spans:
            ranks[span.rank].append(span)
        # a user's schedule may leave a rank without stages
        return tuple((r[-1].end - r[0].start, sum(s.end - s.start for s in r)) if r else (0.0, 0.0) for r in ranks)


def simulate(
    schedule: str | Builder | Schedule,
    stages: int = 8,
    microbatches: int = 24,
    F: PerStage = 1.0,
    I: PerStage = 1.0,
    W: PerStage = 1.0,
    comm: float = 0.0,
    chunks: int = 1,
) -> Result:
    """Runs a schedule on a clock: each rank begins an action as soon as it is free and what the action needs is there.

    Args:
        schedule: a name, a function ``(stages, microbatches, ranks) -> Schedule``, or a schedule (which brings its own sizes).
        stages: pipeline ranks; each holds ``chunks`` stages of the schedule, and two in the V of zb-v and dualpipev.
        F, I, W: time of a forward, of the gradient of inputs, and of the rest of the backward, for one microbatch: a number is the time
            of all that a rank holds, shared equally by its stages; a sequence has one for each stage of the schedule.
        comm: delay between ranks; occupies neither.

    Raises:
        InputError, PlanError: as ``build``; or times that don't fit.
    """
    if isinstance(schedule, Schedule):
        stages, microbatches = len(schedule.ranks), schedule.microbatches
        total = schedule.stages
    else:
        if not isinstance(chunks, int) or chunks < 1:
            raise InputError(f"chunks is {chunks!r}", hint="stages a rank, an integer of at least 1")
        if schedule in V_SHAPED:
            if chunks not in (1, 2):
                raise InputError(f"chunks is {chunks}, and {schedule} holds two stages a rank", hint="leave it out")
            chunks = 2
        total = stages * chunks
    made = build(schedule, total, microbatches, stages)
    held = [made.placement.count(rank) for rank in made.placement]
    F, I, W = (tuple(t) if isinstance(t, Sequence) else tuple(t / n for n in held) for t in (F, I, W))
    times = Times(F, I, W, comm)
    times.check(made.stages)
    return Result(made, times, made.spans(times))
