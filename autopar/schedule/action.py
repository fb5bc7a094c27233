"""Actions and schedules: which rank computes what, in which order. Pure values with text forms; nothing here says how data moves.

The grid of 1F1B with two stages and two microbatches:

    rank 0 | 0F0 0F1  .  0B0 ---  .  0B1 ---
    rank 1 |  .  1F0 1B0 --- 1F1 1B1 ---
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InputError
from autopar.schedule.clock import Span, Times, run
from autopar.schedule.picture import draw_spans

#: forward, whole backward, gradient of the stage's inputs, the rest of the backward.
KINDS = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_HEAD = re.compile(r"(\S+): (\d+) stages on ([\d ]+), (\d+) microbatches")


@dataclass(frozen=True, order=True)
class Action:
    """One computation of one stage for one microbatch. Text form: ``2F0`` is the forward of stage 2 for microbatch 0."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Reads ``2F0``.

        Raises:
            InputError: the text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if not match:
            raise InputError(
                f"{text.strip()!r} is not an action", hint="write stage, kind and microbatch like 2F0; kinds are F, B, I and W"
            )
        return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The order of every rank's computations in one step.

    Args:
        name: one word.
        placement: the rank that holds each stage.
        ranks: each rank's actions, in the order in which it runs them.

    Text form (``Schedule.parse`` reads it back): a line ``1f1b: 2 stages on 0 1, 2 microbatches``, then a line of actions for each rank.
    Nothing is checked here: ``validate`` does.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def text(self) -> str:
        """The schedule as lines that ``parse`` reads."""
        head = f"{self.name}: {self.stages} stages on {' '.join(map(str, self.placement))}, {self.microbatches} microbatches"
        return "\n".join([head, *(f"{rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks))])

    def __str__(self) -> str:
        return self.text()

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads what ``text`` wrote.

        Raises:
            InputError: the text is not well formed; the message quotes the line.
        """
        head, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
        match = _HEAD.fullmatch(head)
        if not match:
            raise InputError(f"{head!r} doesn't begin a schedule", hint="the first line is like: 1f1b: 2 stages on 0 1, 4 microbatches")
        ranks = []
        for rank, line in enumerate(lines):
            number, colon, actions = line.partition(":")
            if not colon or number.strip() != str(rank):
                raise InputError(f"{line!r} is not the line of rank {rank}", hint=f"it begins with '{rank}:', ranks in order")
            ranks.append(tuple(map(Action.parse, actions.split())))
        return Schedule(match[1], int(match[2]), int(match[4]), tuple(map(int, match[3].split())), tuple(ranks))

    def csv(self) -> str:
        """One line for each rank, its actions separated by commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)

    def __iter__(self) -> Iterator[Action]:
        for actions in self.ranks:
            yield from actions

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(self)

    def find(self, stage: int, kind: str, microbatch: int) -> Action:
        """The action that does a stage's ``kind`` for a microbatch: I and W are both done by B where the schedule has it."""
        if kind in ("I", "W"):
            whole = Action(stage, "B", microbatch)
            if whole in self.actions:
                return whole
        return Action(stage, kind, microbatch)

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def spans(self, times: Times | None = None) -> tuple[Span, ...]:
        """When each action runs if stages form a chain and each rank begins an action as soon as it can.

        Raises:
            InputError: the ranks wait for each other for ever, or for an action that nobody runs.
        """
        return run(self.ranks, self.chain, times or Times(), self.placement)

    @cached_property
    def chain(self) -> dict[Action, tuple[Action, ...]]:
        """What each action needs where each stage needs only the one before it, and its backward the one after it."""
        needs: dict[Action, tuple[Action, ...]] = {}
        for action in self:
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            if kind == "F":
                needs[action] = (Action(stage - 1, "F", microbatch),) if stage else ()
            elif kind == "W":
                needs[action] = (Action(stage, "I", microbatch),)
            else:
                later = (self.find(stage + 1, "I", microbatch),) if stage + 1 < self.stages else ()
                needs[action] = (Action(stage, "F", microbatch), *later)
        return needs

    def grid(self, times: Times | None = None, slot: float | None = None) -> str:
        """The picture of the schedule: a row for each rank, a column for each slot of time.

        Args:
            times: how long actions take; left out, F, I and W take one slot and B two.
            slot: width of a column; left out, the shortest duration. A cell shows the action that runs at the middle of its slot.
        """
        times = times or Times()
        return draw_spans(self.spans(times), len(self.ranks), slot or times.shortest(range(self.stages)))
