"""A schedule found for given times and memory, one stage a rank: what ZB-2p is in Qi et al. 2023 (arXiv 2401.10241), section 3.

Three steps, each keeping the best order so far, and all of them ending where ``lower_bound`` is met:

1. List scheduling: whoever is free first takes the gradient of inputs if it is there, else a forward if memory allows, else W; W only
   where it doesn't hold up, by more than a share of it, what is known to come. Tried for several such shares, and several bounds on how
   far forwards run ahead.
2. The bounds of single ranks are moved up and down.
3. Neighbours on the critical path are swapped (as in job-shop scheduling, van Laarhoven et al. 1992).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.errors import InputError, PlanError, VerifyError
from autopar.schedule.action import Action, Schedule
from autopar.schedule.build import zb_h1, zb_h2
from autopar.schedule.clock import PerStage, Times
from autopar.schedule.validate import validate

#: how many actions are put in order, over all tries: seconds.
EFFORT = 500_000


def search(
    stages: int,
    microbatches: int,
    F: PerStage = 1.0,
    I: PerStage = 1.0,
    W: PerStage = 1.0,
    comm: float = 0.0,
    *,
    memory: PerStage,
    activations: PerStage = 1.0,
    kept: PerStage = 1.0,
    effort: int = EFFORT,
) -> Schedule:
    """The best order found of F, I and W on ranks that hold one stage each; deterministic.

    Args:
        F, I, W, comm: times as in ``simulate``.
        memory: what each rank may hold, in any unit.
        activations: what a microbatch holds from its F to its I (``M_B`` in the source).
        kept: what it holds from its I to its W (``M_W``), at most ``activations``.
        effort: the most actions to put in order, over all tries.

    Raises:
        InputError: numbers that don't fit.
        PlanError: a rank can't hold one microbatch.
    """
    for name, size in (("stages", stages), ("microbatches", microbatches)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"{name} is {size!r}", hint="it is an integer of at least 1")
    times = Times(F, I, W, comm)
    times.check(stages)
    f, i, w = (tuple(times.of(s, k) for s in range(stages)) for k in "FIW")
    holds = _each("memory", memory, stages), _each("activations", activations, stages), _each("kept", kept, stages)
    task = _Task(microbatches, f, i, w, comm, *holds)
    task.check()
    schedule = _schedule(task, _search(task, effort))
    validate(schedule)
    return schedule


def lower_bound(stages: int, microbatches: int, F: PerStage = 1.0, I: PerStage = 1.0, W: PerStage = 1.0, comm: float = 0.0) -> float:
    """No order of one stage a rank has less ``cost`` (the longest time from a rank's first start to its last end).

    A rank does all its work; and from its first forward on, the first microbatch goes up to any later rank, which does all its F and I,
    and the last of these comes down again, with a W to follow.
    """
    times = Times(F, I, W, comm)
    times.check(stages)
    bound = 0.0
    for r in range(stages):
        f, i, w = (times.of(r, k) for k in "FIW")
        bound, way = max(bound, microbatches * (f + i + w)), 0.0
        for q in range(r, stages):
            bound = max(bound, way + microbatches * (times.of(q, "F") + times.of(q, "I")) + w)
            way += times.of(q, "F") + times.of(q, "I") + 2 * comm
    return bound


@dataclass(frozen=True)
class _Task:
    """What is asked for; one number a stage."""

    microbatches: int
    F: tuple[float, ...]
    I: tuple[float, ...]
    W: tuple[float, ...]
    comm: float
    memory: tuple[float, ...]
    activations: tuple[float, ...]
    kept: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.F)

    def check(self) -> None:
        for s, (memory, activations, kept) in enumerate(zip(self.memory, self.activations, self.kept)):
            if not 0 <= kept <= activations:
                raise InputError(
                    f"stage {s} keeps {kept} for W, and {activations} for I", hint="W needs a part of what the forward has left, 0 or more"
                )
            if activations > memory + _EPS:
                raise PlanError(
                    f"no schedule fits: stage {s} needs {activations} for one microbatch, and its rank has {memory}",
                    hint="more memory, smaller microbatches, or recompute",
                )

    def bound(self) -> float:
        return lower_bound(self.stages, self.microbatches, self.F, self.I, self.W, self.comm)


#: of memory and times: sums of floats.
_EPS = 1e-9

#: each rank's kinds in order; microbatches of a kind are in order.
_Orders = list[list[str]]


@dataclass(frozen=True)
class _Policy:
    """How a rank chooses: at most ``ahead[rank]`` forwards without their I; W where what comes isn't late by more than so much of W."""

    ahead: tuple[int, ...]
    late: float


@dataclass(frozen=True)
class _Found:
    """Orders with their cost, and the sum of all ranks' spans, which decides between equal costs."""

    cost: float
    total: float
    orders: _Orders

    def better(self, other: _Found | None) -> bool:
        return other is None or (self.cost, self.total) < (other.cost - _EPS, other.total) or (
            self.cost <= other.cost + _EPS and self.total < other.total - _EPS
        )  # fmt: skip


def _search(task: _Task, effort: int) -> _Orders:
    p, goal = task.stages, task.bound() * (1 + _EPS)
    tries = min(_TRIES, max(8, effort // (3 * p * task.microbatches)))
    policies = [_Policy(_ahead(task, scale, rounded), late) for scale in _SCALES for late in _LATE for rounded in _ROUNDED]
    policies = policies[: max(6, tries // 3)]
    chosen, *others = policies
    listed = _listed(task, chosen)
    best = listed
    # never worse than the known ones that fit
    for known in (zb_h1, zb_h2):
        orders = [[a.kind for a in actions] for actions in known(p, task.microbatches, p).ranks]
        clock = _timed(task, orders)
        if clock is not None and all(_fits(task, r, order) for r, order in enumerate(orders)) and clock.found(orders).better(best):
            best = clock.found(orders)
    rng = random.Random(0)
    for _ in range(1, tries // 2):
        if best.cost <= goal:
            return best.orders
        policy = others.pop(0) if others else _nearby(chosen, rng)
        found = _listed(task, policy)
        if found.better(listed):
            listed, chosen = found, policy
        if found.better(best):
            best = found
    return _swapped(task, best, tries - tries // 2, goal).orders


#: enough for small pipelines.
_TRIES = 1000
#: the grid of policies, the more promising first: how far forwards run ahead, and how late W may make what comes.
_SCALES, _LATE, _ROUNDED = (1.0, 1.05, 0.95, 1.1, 1.2, 0.9, 0.8, 0.65, 0.5), (1.0, 0.75, 0.5, 0.25, 0.0), (math.floor, round, math.ceil)


def _nearby(policy: _Policy, rng: random.Random) -> _Policy:
    """One or two ranks' bounds moved, and perhaps another lateness."""
    ahead = list(policy.ahead)
    for _ in range(rng.choice((1, 1, 2))):
        r = rng.randrange(len(ahead))
        ahead[r] = max(1, ahead[r] + rng.choice((-2, -1, 1, 2)))
    return _Policy(tuple(ahead), rng.choice((policy.late, policy.late, *_LATE)))


def _ahead(task: _Task, scale: float, rounded: Callable[[float], int]) -> tuple[int, ...]:
    """So many forwards fill the time from a rank's first to its first I: the way up and down again (Qi et al. 2023, formula 2)."""
    ahead, way = [], 0.0
    for s in reversed(range(task.stages)):
        ahead.append(max(1, rounded(1 + scale * way / task.F[s])) if task.F[s] else task.microbatches)
        way += task.F[s] + task.I[s] + 2 * task.comm
    return tuple(reversed(ahead))


def _listed(task: _Task, policy: _Policy) -> _Found:
    """List scheduling: always the rank that can begin first. What it chooses from is then known: nobody else begins earlier."""
    p, m, comm = task.stages, task.microbatches, task.comm
    done = {k: [0] * p for k in "FIW"}
    ends: dict[str, list[list[float]]] = {k: [[] for _ in range(p)] for k in "FI"}
    free, first = [0.0] * p, [-1.0] * p
    orders: _Orders = [[] for _ in range(p)]
    nF, nI, nW, eF, eI = done["F"], done["I"], done["W"], ends["F"], ends["I"]

    def next_of(r: int) -> tuple[float, str]:
        now, forward, backward = free[r], math.inf, math.inf
        waiting = nF[r] - nI[r]
        holds = (waiting + 1) * task.activations[r] + (nI[r] - nW[r]) * task.kept[r]
        if nF[r] < m and waiting < policy.ahead[r] and holds <= task.memory[r] + _EPS:
            if r == 0:
                forward = 0.0
            elif nF[r] < nF[r - 1]:
                forward = eF[r - 1][nF[r]] + comm
        if waiting:
            if r == p - 1:
                backward = 0.0
            elif nI[r] < nI[r + 1]:
                backward = eI[r + 1][nI[r]] + comm
        if backward <= now + _EPS:
            return now, "I"
        if forward <= now + _EPS:
            return now, "F"
        coming = min(backward, forward)
        if nW[r] < nI[r] and coming - now >= task.W[r] * (1 - policy.late) - _EPS:
            return now, "W"
        return coming, "I" if backward <= forward else "F"

    nexts = [next_of(r) for r in range(p)]
    for _ in range(3 * p * m):
        r = min(range(p), key=nexts.__getitem__)
        start, kind = nexts[r]
        if start == math.inf:
            raise VerifyError("list scheduling stopped before all was done")
        if first[r] < 0:
            first[r] = start
        orders[r].append(kind)
        free[r] = start + (task.F[r] if kind == "F" else task.I[r] if kind == "I" else task.W[r])
        done[kind][r] += 1
        if kind != "W":
            ends[kind][r].append(free[r])
        for other in (r - 1, r, r + 1):
            if 0 <= other < p:
                nexts[other] = next_of(other)
    spans = [end - begin for begin, end in zip(first, free)]
    return _Found(max(spans), sum(spans), orders)


@dataclass(frozen=True)
class _Clock:
    """When each place of each rank's order begins and ends."""

    begins: list[list[float]]
    ends: list[list[float]]

    def found(self, orders: _Orders) -> _Found:
        spans = [ends[-1] - begins[0] for begins, ends in zip(self.begins, self.ends)]
        return _Found(max(spans), sum(spans), orders)


def _timed(task: _Task, orders: _Orders) -> _Clock | None:
    """The clock of orders; None if they can't be run."""
    p, comm = task.stages, task.comm
    eF: list[list[float]] = [[] for _ in range(p)]
    eI: list[list[float]] = [[] for _ in range(p)]
    begins: list[list[float]] = [[] for _ in range(p)]
    ends: list[list[float]] = [[] for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for r, order in enumerate(orders):
            mine, begun, up, down = ends[r], begins[r], eF[r], eI[r]
            now = mine[-1] if mine else 0.0
            for kind in order[len(mine) :]:
                if kind == "F":
                    if r:
                        if len(up) >= len(eF[r - 1]):
                            break
                        now = max(now, eF[r - 1][len(up)] + comm)
                elif kind == "I" and r < p - 1:
                    if len(down) >= len(eI[r + 1]):
                        break
                    now = max(now, eI[r + 1][len(down)] + comm)
                begun.append(now)
                if kind == "F":
                    now += task.F[r]
                    up.append(now)
                elif kind == "I":
                    now += task.I[r]
                    down.append(now)
                else:
                    now += task.W[r]
                mine.append(now)
                moved = True
    return _Clock(begins, ends) if all(len(e) == len(o) for e, o in zip(ends, orders)) else None


def _fits(task: _Task, rank: int, order: Sequence[str]) -> bool:
    """Each microbatch goes F, I, W, within the rank's memory."""
    forward = backward = weights = 0
    for kind in order:
        if kind == "F":
            forward += 1
            if (forward - backward) * task.activations[rank] + (backward - weights) * task.kept[rank] > task.memory[rank] + _EPS:
                return False
        elif kind == "I":
            backward += 1
        else:
            weights += 1
        if not weights <= backward <= forward:
            return False
    return True


def _critical(task: _Task, orders: _Orders, clock: _Clock, data_first: bool) -> list[tuple[int, int]]:
    """The places (rank, place in its order) that follow each other without a gap up to the end of the rank that takes longest."""
    spans = [ends[-1] - begins[0] for begins, ends in zip(clock.begins, clock.ends)]
    r = max(range(len(spans)), key=spans.__getitem__)
    start, k, path = clock.begins[r][0], len(orders[r]) - 1, []
    where = [{kind: [k for k, a in enumerate(order) if a == kind] for kind in "FI"} for order in orders]
    while True:
        path.append((r, k))
        begin, kind = clock.begins[r][k], orders[r][k]
        if begin <= start + _EPS:
            return path[::-1]
        tight = k > 0 and clock.ends[r][k - 1] >= begin - _EPS
        source = r - 1 if kind == "F" else r + 1
        if kind != "W" and 0 <= source < len(orders):
            sent = where[source][kind][orders[r][:k].count(kind)]
            if clock.ends[source][sent] + task.comm >= begin - _EPS and (data_first or not tight):
                r, k = source, sent
                continue
        k -= 1


def _swapped(task: _Task, best: _Found, tries: int, goal: float) -> _Found:
    """Local search: on the critical path, an action goes behind the one or the few that follow it on its rank.

    A change is taken if it is no worse than what was there some steps ago (late acceptance, Burke and Bykov 2017).
    """
    rng, now, history = random.Random(0), best, [best.cost] * _HISTORY
    moves: list[tuple[int, int, int]] = []
    for step in range(tries):
        if best.cost <= goal:
            break
        if not moves:
            clock = _timed(task, now.orders)
            assert clock is not None
            path = _critical(task, now.orders, clock, data_first=rng.random() < 0.5)
            for (r, k), (r2, k2) in zip(path, path[1:]):
                if r == r2 and now.orders[r][k] != now.orders[r][k2]:
                    moves += [(r, k, k2 + far) for far in ((0, 1, 2, 4, 7) if now.orders[r][k] == "W" else (0,))]
            rng.shuffle(moves)
            if not moves:
                break
        r, k, to = moves.pop()
        order = list(now.orders[r])
        order.insert(min(to, len(order)), order.pop(k))
        if not _fits(task, r, order):
            continue
        orders = [*now.orders[:r], order, *now.orders[r + 1 :]]
        clock = _timed(task, orders)
        if clock is None:
            continue
        found = clock.found(orders)
        if found.cost <= max(now.cost, history[step % _HISTORY]) + _EPS:
            now, moves = found, []
            if now.better(best):
                best = now
        history[step % _HISTORY] = now.cost
    return best


#: how many steps back a change is compared with.
_HISTORY = 30


def _schedule(task: _Task, orders: _Orders) -> Schedule:
    ranks = []
    for s, order in enumerate(orders):
        counts = dict.fromkeys("FIW", -1)
        actions = []
        for kind in order:
            counts[kind] += 1
            actions.append(Action(s, kind, counts[kind]))
        ranks.append(tuple(actions))
    return Schedule("searched", task.stages, task.microbatches, tuple(range(task.stages)), tuple(ranks))


def _each(name: str, value: PerStage, stages: int) -> tuple[float, ...]:
    """Raises: InputError: there is not one for each stage."""
    if isinstance(value, Sequence):
        if len(value) != stages:
            raise InputError(f"{len(value)} values of {name} are given for {stages} stages", hint="give one number, or one for each stage")
        return tuple(map(float, value))
    return (float(value),) * stages
