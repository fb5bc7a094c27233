"""Is a schedule one? Every action once, where its stage is, after what it needs; and how much it keeps alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.schedule.action import KINDS, Action, Schedule
from autopar.schedule.edge import Edge, check_edges, needs
from autopar.schedule.picture import draw_rows

#: how many places are shown before and behind a fault.
_AROUND = 8


def validate(schedule: Schedule, edges: Sequence[Edge] = ()) -> None:
    """Accepts a schedule that does each stage's work for each microbatch once, in an order that can be run.

    Args:
        edges: what stages need of each other; left out, they form a chain.

    Raises:
        InputError: an action is missing, doubled, unmatched (I without W, or both B and I), unknown or on a rank that doesn't hold its
            stage; it stands before one that it needs; or ranks wait for each other for ever. The message shows the grid, the fault marked.
    """
    check_edges(edges, schedule.stages)
    _check_placement(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            _check_action(schedule, rank, position, action)
    _check_whole(schedule)
    _check_order(schedule, needs(schedule, edges))


def _fault(schedule: Schedule, what: str, cells: Sequence[tuple[int, int]], hint: str = "", missing: Action | None = None) -> InputError:
    """The error with its grid: a column for each place in the ranks' orders, around the marked ones. A missing action is shown last."""
    rows = [[str(a) for a in actions] for actions in schedule.ranks]
    if missing is not None:
        rank = schedule.placement[missing.stage]
        cells = [(rank, len(rows[rank]))]
        rows[rank].append(str(missing))
    columns = [column for _, column in cells]
    first = max(0, min(columns) - _AROUND)
    if first + 4 * _AROUND < max(columns):
        columns = columns[:1]  # the other mark is far away
    rows = [row[first : max(columns) + _AROUND] for row in rows]
    grid = "\n".join(f"    {line}" for line in draw_rows(rows, {(r, c - first) for r, c in cells}).splitlines())
    shown = f"the marked place, from place {first} of each rank's order" if first else "the marked place"
    return InputError(f"the schedule {schedule.name} is not valid: {what}", why=f"{shown}\n{grid}", hint=hint)


def _check_placement(schedule: Schedule) -> None:
    if schedule.stages < 1 or schedule.microbatches < 1 or len(schedule.placement) != schedule.stages:
        raise InputError(
            f"the schedule {schedule.name} is not valid: {schedule.stages} stages, of which {len(schedule.placement)} are placed, "
            f"and {schedule.microbatches} microbatches",
            hint="at least one of both, and a rank for each stage",
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < len(schedule.ranks):
            raise InputError(
                f"the schedule {schedule.name} is not valid: stage {stage} is placed on rank {rank} of {len(schedule.ranks)} ranks"
            )


def _check_action(schedule: Schedule, rank: int, position: int, action: Action) -> None:
    cell = [(rank, position)]
    if action.kind not in KINDS:
        raise _fault(schedule, f"{action} is of no known kind", cell, hint=f"kinds are {', '.join(KINDS)}")
    if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
        raise _fault(schedule, f"{action} names a stage or microbatch that isn't there", cell, hint="both count from 0")
    if schedule.placement[action.stage] != rank:
        raise _fault(schedule, f"{action} is on rank {rank}, and rank {schedule.placement[action.stage]} holds stage {action.stage}", cell)


def _check_whole(schedule: Schedule) -> None:
    """Each stage and microbatch has an F, and either one B or one I and one W."""
    places: dict[Action, list[tuple[int, int]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            places.setdefault(action, []).append((rank, position))
    for action, cells in places.items():
        if len(cells) > 1:
            raise _fault(schedule, f"{action} is doubled", cells)
    for m in range(schedule.microbatches):
        for s in range(schedule.stages):
            kinds = "".join(k for k in KINDS if Action(s, k, m) in places)
            if kinds in ("FB", "FIW"):
                continue
            if "F" not in kinds:
                raise _fault(schedule, f"{s}F{m} is missing", [], missing=Action(s, "F", m))
            if kinds == "F":
                hint = f"{s}B{m}, or {s}I{m} and {s}W{m}"
                raise _fault(schedule, f"the backward of stage {s} for microbatch {m} is missing", [], hint=hint, missing=Action(s, "B", m))
            if "B" in kinds:
                cells = [c for k in kinds if k != "F" for c in places[Action(s, k, m)]]
                raise _fault(schedule, f"{s}B{m} is the whole backward, and a part of it is there too", cells, hint="B, or I and W")
            there, lacks = ("I", "W") if "I" in kinds else ("W", "I")
            what = f"{s}{there}{m} is unmatched, {s}{lacks}{m} is missing"
            raise _fault(schedule, what, [], hint=f"I and W, or {s}B{m} for both", missing=Action(s, lacks, m))


def _check_order(schedule: Schedule, needed: dict[Action, tuple[Action, ...]]) -> None:
    """No action stands before one that it needs, on its rank or around others."""
    at = {a: (rank, k) for rank, actions in enumerate(schedule.ranks) for k, a in enumerate(actions)}
    for action, wanted in needed.items():
        rank, position = at[action]
        for other in wanted:
            if at[other][0] == rank and at[other][1] > position:
                raise _fault(schedule, f"{action} stands before {other}, which it needs", [at[action], at[other]])
    done: set[Action] = set()
    next_of = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while next_of[rank] < len(actions) and all(n in done for n in needed[actions[next_of[rank]]]):
                done.add(actions[next_of[rank]])
                next_of[rank] += 1
                moved = True
    stuck = [(rank, k) for rank, k in enumerate(next_of) if k < len(schedule.ranks[rank])]
    if stuck:
        waits = []
        for rank, k in stuck:
            action = schedule.ranks[rank][k]
            waits.append(f"{action} on rank {rank} waits for {', '.join(str(n) for n in needed[action] if n not in done)}")
        raise _fault(schedule, f"deadlock: {'; '.join(waits)}", stuck)


@dataclass(frozen=True)
class Peak:
    """The most microbatches alive at once: their forward has run, and their backward hasn't.

    A microbatch counts once for each stage; a rank's figure is the most over its stages together. ``*_until_i`` counts it until its I
    (or B) has run, when activations are freed that only I needs; the others until its last part, W (or B), has.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    stages_until_i: tuple[int, ...]
    ranks_until_i: tuple[int, ...]

    def __str__(self) -> str:
        return f"stages {' '.join(map(str, self.stages))}, ranks {' '.join(map(str, self.ranks))}"


def peak_live(schedule: Schedule) -> Peak:
    """How many microbatches each stage and each rank keep alive at most, running the schedule's actions in order."""
    stages = {ends: [0] * schedule.stages for ends in ("BW", "BI")}
    ranks = {ends: [0] * len(schedule.ranks) for ends in ("BW", "BI")}
    for rank, actions in enumerate(schedule.ranks):
        for ends in ("BW", "BI"):
            live: Counter[int] = Counter()
            for action in actions:
                live[action.stage] += (action.kind == "F") - (action.kind in ends)
                stages[ends][action.stage] = max(stages[ends][action.stage], live[action.stage])
                ranks[ends][rank] = max(ranks[ends][rank], live.total())
    return Peak(tuple(stages["BW"]), tuple(ranks["BW"]), tuple(stages["BI"]), tuple(ranks["BI"]))
