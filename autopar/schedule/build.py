"""Every schedule that autopar knows, a function ``(stages, microbatches, ranks) -> Schedule`` each; the table is at the bottom.

A schedule of a user's own is one more function of that form: it is passed wherever a name is taken. See docs/schedules.md for pictures,
bounds and sources. With ``s`` the stage, ``S`` the stages, ``M`` the microbatches and ``r`` one of ``R`` ranks:

- *looping*: stage ``s`` is on rank ``s % R``.
- *V*: stages ``r`` and ``2R-1-r`` are on rank ``r``: the first and the last stage meet on rank 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from autopar.errors import InputError, PlanError
from autopar.schedule.action import Action, Schedule
from autopar.schedule.validate import validate

Builder = Callable[[int, int, int], Schedule]


def build(schedule: str | Builder | Schedule, stages: int, microbatches: int, ranks: int) -> Schedule:
    """The schedule of a name or of a user's function, validated.

    Args:
        schedule: a name of ``SCHEDULES``, a function of the same form, or a schedule, which must then be of that size.

    Raises:
        InputError: an unknown name, a size that is no positive integer, or a user's schedule that isn't valid.
        PlanError: the schedule isn't defined for these sizes.
    """
    for name, size in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"{name} is {size!r}", hint="it is an integer of at least 1")
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {schedule!r}", hint=f"schedules are {', '.join(SCHEDULES)}; or pass a function")
        schedule = SCHEDULES[schedule]
    made = schedule if isinstance(schedule, Schedule) else schedule(stages, microbatches, ranks)
    if not isinstance(made, Schedule):
        raise InputError(f"a schedule's function returned {made!r}", hint="it takes (stages, microbatches, ranks) and returns a Schedule")
    if (made.stages, made.microbatches, len(made.ranks)) != (stages, microbatches, ranks):
        raise InputError(
            f"the schedule {made.name} is for {made.stages} stages, {made.microbatches} microbatches and {len(made.ranks)} ranks",
            why=f"{stages} stages, {microbatches} microbatches and {ranks} ranks are asked for",
        )
    validate(made)
    return made


# -- placements


def looping(name: str, stages: int, ranks: int) -> tuple[int, ...]:
    """Raises: PlanError: the ranks don't hold equally many stages."""
    if stages % ranks:
        raise PlanError(
            f"{name} can't place {stages} stages on {ranks} ranks",
            why="each rank holds equally many stages",
            hint=f"{max(1, stages // ranks) * ranks} or {(stages // ranks + 1) * ranks} stages",
        )
    return tuple(s % ranks for s in range(stages))


def single(name: str, stages: int, ranks: int, instead: str) -> tuple[int, ...]:
    """Raises: PlanError: a rank would hold more or less than one stage."""
    if stages != ranks:
        more = stages > ranks
        raise PlanError(
            f"{name} can't place {stages} stages on {ranks} ranks",
            why="each rank holds one stage",
            hint=f"{ranks} stages, or the schedule {instead}" if more else f"{ranks} stages, or {stages} ranks",
        )
    return tuple(range(stages))


def vee(name: str, stages: int, ranks: int) -> tuple[int, ...]:
    """Raises: PlanError: a rank would hold more or less than two stages."""
    if stages != 2 * ranks:
        raise PlanError(
            f"{name} can't place {stages} stages on {ranks} ranks",
            why="each rank holds two stages, one on the way down the V and one on the way up",
            hint=f"{2 * ranks} stages" + ("; or the schedule zb-h1, which holds one stage a rank" if stages == ranks else ""),
        )
    return tuple(min(s, 2 * ranks - 1 - s) for s in range(stages))


# -- schedules


def gpipe(stages: int, microbatches: int, ranks: int) -> Schedule:
    """All forwards, then all backwards. Any number of stages a rank, looping: a stage takes all microbatches before the rank's next one.

    Source: Huang et al. 2019, GPipe (arXiv 1811.06965), section 2.3.
    """
    placement, all_m = looping("gpipe", stages, ranks), range(microbatches)
    lists = []
    for rank in range(ranks):
        held = range(rank, stages, ranks)
        forward = [Action(s, "F", m) for s in held for m in all_m]
        lists.append([*forward, *(Action(s, "B", m) for s in reversed(held) for m in all_m)])
    return _schedule("gpipe", stages, microbatches, placement, lists)


def one_f_one_b(stages: int, microbatches: int, ranks: int) -> Schedule:
    """``S-1-s`` forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.1; rule ``order_1f1b`` of the zero-bubble paper.
    """
    placement, lists = single("1f1b", stages, ranks, "interleaved"), []
    for s in range(stages):
        lists.append([Action(s, k, m) for k, m in _in_turn(stages - 1 - s, microbatches, ("F", "B"))])
    return _schedule("1f1b", stages, microbatches, placement, lists)


def interleaved(stages: int, microbatches: int, ranks: int) -> Schedule:
    """1F1B over several stages a rank: microbatches go in groups of ``R``, and a group takes the rank's stages one after another.

    Where ``M`` is no multiple of ``R``, the order is that of the next multiple without the microbatches that aren't there.
    With one stage a rank it is 1F1B. Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2.
    """
    placement = looping("interleaved", stages, ranks)
    chunks = stages // ranks
    if chunks == 1:
        lists = [list(actions) for actions in one_f_one_b(stages, microbatches, ranks).ranks]
        return _schedule("interleaved", stages, microbatches, placement, lists)
    padded = -(-microbatches // ranks) * ranks
    group = [(c, m) for c in range(chunks) for m in range(ranks)]
    visits = [(c, m + first) for first in range(0, padded, ranks) for c, m in group]
    lists = []
    for rank in range(ranks):
        fill = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        actions = []
        for kind, k in _in_turn(fill, len(visits), ("F", "B")):
            chunk, m = visits[k]
            actions.append(Action(rank + ranks * (chunk if kind == "F" else chunks - 1 - chunk), kind, m))
        lists.append(actions)
    return _schedule("interleaved", stages, microbatches, placement, lists)


def zb_h1(stages: int, microbatches: int, ranks: int) -> Schedule:
    """1F1B with the backward in two: stage ``s`` keeps ``s`` of its W back, to fill the gaps at the end; memory as 1F1B.

    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1.
    """
    placement = single("zb-h1", stages, ranks, "zb-v")
    lists = [_late_weights(s, stages - 1 - s, s, microbatches) for s in range(stages)]
    return _schedule("zb-h1", stages, microbatches, placement, lists)


def zb_h2(stages: int, microbatches: int, ranks: int) -> Schedule:
    """As ZB-H1 with ``2(S-1-s)`` forwards to fill and ``2s`` W kept back: no gap where F, I and W take equally long, at twice the memory.

    Source: Qi et al. 2023 (arXiv 2401.10241), section 2.2.
    """
    placement = single("zb-h2", stages, ranks, "zb-v")
    lists = [_late_weights(s, 2 * (stages - 1 - s), 2 * s, microbatches) for s in range(stages)]
    return _schedule("zb-h2", stages, microbatches, placement, lists)


def zb_v(stages: int, microbatches: int, ranks: int) -> Schedule:
    """Two stages a rank in a V, backward in two: no gap where F, I and W take equally long, at the memory of 1F1B.

    With fewer than ``2R-1`` microbatches the order is that of ``2R-1`` without those that aren't there.
    Source: Qi et al. 2023 (arXiv 2401.10241), section 6 and appendix; sail-sg/zero-bubble-pipeline-parallelism.
    """
    placement, total, lists = vee("zb-v", stages, ranks), max(2 * ranks - 1, microbatches), []
    for r in range(ranks):
        down, up = r, stages - 1 - r
        order = _Order()
        order.run(2 * (ranks - r) - 1, (down, "F"))
        order.run(r, (up, "F"), (down, "F"))
        order.run(ranks - r, (up, "FIW"))
        while order.done(up, "F") < total:
            if order.done(down, "F") < total:
                order.run(1, (down, "F"))
            order.run(1, (down, "IW"), (up, "FIW"))
        # no forward is left: W wait until the gradients that other ranks need are on their way
        order.run(r, (down, "I"), (up, "I"))
        order.run(ranks - r, (down, "IW"))
        order.run(total - order.done(up, "W"), (up, "W"))
        order.run(total - order.done(down, "W"), (down, "W"))
        lists.append(order.actions)
    return _schedule("zb-v", stages, microbatches, placement, lists)


def dualpipev(stages: int, microbatches: int, ranks: int) -> Schedule:
    """Two stages a rank in a V; in its middle each forward has a backward beside it, of the other direction, to be run at once or in turn.

    With fewer than ``2R`` microbatches the order is that of ``2R`` without those that aren't there.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, cut in half: deepseek-ai/DualPipe, which shows the picture.
    """
    placement, total, lists = vee("dualpipev", stages, ranks), max(2 * ranks, microbatches), []
    for r in range(ranks):
        down, up, below = r, stages - 1 - r, ranks - 1 - r
        order = _Order()
        order.run(2 * below, (down, "F"))
        order.run(r + 1, (down, "F"), (up, "F"))
        order.run(below, (up, "IWF"))
        order.run(total - 2 * ranks + r + 1, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
        order.run(below, (up, "B"), (up, "F"), (down, "B"))
        # no forward is left: from the middle on, W wait until the gradients that other ranks need are on their way
        ends = [part for _ in range(r + 1) for part in (up, down)]
        for k, stage in enumerate(ends):
            order.run(1, (stage, "B" if k < len(ends) // 2 else "I"))
        for _ in range(below):
            order.late(1)
            order.run(1, (down, "I"))
        order.late(total)
        lists.append(order.actions)
    return _schedule("dualpipev", stages, microbatches, placement, lists)


#: the schedules by name.
SCHEDULES: Mapping[str, Builder] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "dualpipev": dualpipev,
    }
)


# -- what they share


class _Order:
    """A rank's actions as they are written down: each kind of a stage takes its microbatches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._done: Counter[tuple[int, str]] = Counter()

    def done(self, stage: int, kind: str) -> int:
        """How many microbatches have a stage's F, I or W behind them; B does the latter two."""
        return self._done[stage, kind]

    def _add(self, action: Action) -> None:
        self.actions.append(action)
        self._done.update((action.stage, kind) for kind in ("IW" if action.kind == "B" else action.kind))

    def run(self, times: int, *parts: tuple[int, str]) -> None:
        """Each time: the parts in order, a stage and its kinds (``(3, "FIW")``)."""
        for _ in range(times):
            for stage, kinds in parts:
                for kind in kinds:
                    self._add(Action(stage, kind, self.done(stage, "I" if kind == "B" else kind)))

    def late(self, most: int) -> None:
        """At most so many W that are still to do, in the order of their I."""
        done = {(a.stage, a.microbatch) for a in self.actions if a.kind == "W"}
        late = [Action(a.stage, "W", a.microbatch) for a in self.actions if a.kind == "I" and (a.stage, a.microbatch) not in done]
        for action in late[:most]:
            self._add(action)


def _in_turn(fill: int, count: int, kinds: tuple[str, str]) -> list[tuple[str, int]]:
    """``fill`` times the first kind, then both in turn, then the second kind: each ``count`` times, numbered."""
    first, second = kinds
    fill = min(fill, count)
    order = [(first, k) for k in range(fill)]
    for k in range(count):
        if k + fill < count:
            order.append((first, k + fill))
        order.append((second, k))
    return order


def _late_weights(stage: int, fill: int, lag: int, microbatches: int) -> list[Action]:
    """F and I as in 1F1B. After an I, the oldest W runs once more than ``lag`` wait, and after the last F in any case."""
    actions, done = [], 0
    for kind, m in _in_turn(fill, microbatches, ("F", "I")):
        actions.append(Action(stage, kind, m))
        if kind == "I" and (m + 1 - done > lag or m + fill + 1 >= microbatches):
            actions.append(Action(stage, "W", done))
            done += 1
    return [*actions, *(Action(stage, "W", m) for m in range(done, microbatches))]


def _schedule(name: str, stages: int, microbatches: int, placement: tuple[int, ...], lists: Iterable[list[Action]]) -> Schedule:
    """The schedule of these orders, without microbatches past the last: what is left keeps its order, and so its dependencies."""
    ranks = tuple(tuple(a for a in actions if a.microbatch < microbatches) for actions in lists)
    return Schedule(name, stages, microbatches, placement, ranks)
