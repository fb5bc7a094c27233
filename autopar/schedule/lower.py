"""Lowering: from a schedule and the edges between stages to each rank's list of computations, sends and receives.

    1f1b on two stages, rank 1, microbatch 0:   receive 0F->1F 0 · compute 1F0 · compute 1B0 · send 1I->0I 0

[Note: no deadlock] A send may block until the other side has posted the receive; receives are posted and waited for later. All ranks'
computations are put in one line, each behind what it needs (the order of a clock on which each takes its time). A rank posts a receive
before the first of its computations that stands behind the one whose result is received. Then whoever waits, waits for a rank that
is not yet so far along the line: a computation for the one that makes its input, a send after ``c`` for a rank whose next computation
comes before ``c``. So there is no circle, and nobody waits for ever, whatever the speeds; batches of sends and receives are not needed.
Sends leave in the order of the line, and receives are posted in it, so both ends of a channel agree on its order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InputError, VerifyError
from autopar.schedule.action import Schedule
from autopar.schedule.edge import Edge, chain, check_edges
from autopar.schedule.validate import validate


@dataclass(frozen=True)
class Compute:
    """A stage's task runs, when the messages that it needs have come. ``microbatch`` is None for ``pre`` and ``post``."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + ("" if self.microbatch is None else f"{self.microbatch}")


@dataclass(frozen=True)
class Message:
    """The values of an edge, for one microbatch; ``microbatch`` is None for what goes once a step."""

    edge: Edge
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.edge}" + ("" if self.microbatch is None else f" {self.microbatch}")


@dataclass(frozen=True)
class Send(Message):
    """The message leaves for the rank of ``edge.target``. May block until that rank has posted its receive."""

    def __str__(self) -> str:
        return f"send {super().__str__()}"


@dataclass(frozen=True)
class Receive(Message):
    """A receive from the rank of ``edge.source`` is posted; the computation that needs it waits for it."""

    def __str__(self) -> str:
        return f"receive {super().__str__()}"


Instruction = Compute | Send | Receive
Programs = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True)
class Channel:
    """A FIFO from one rank to another: ``up`` for results of forwards, ``down`` for those of backwards, ``once`` for the rest."""

    source: int
    target: int
    direction: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.direction}"


@dataclass(frozen=True)
class Flow:
    """What the computations of a schedule need of each other, given the edges between its stages."""

    schedule: Schedule
    edges: tuple[Edge, ...]

    def tasks(self, compute: Compute) -> tuple[str, ...]:
        """The tasks of edges that a computation does: B does I and W."""
        return ("I", "W") if compute.kind == "B" else (compute.kind,)

    def crosses(self, edge: Edge) -> bool:
        """Whether the edge is between two ranks."""
        return self.schedule.placement[edge.source] != self.schedule.placement[edge.target]

    def channel(self, edge: Edge) -> Channel:
        return Channel(self.schedule.placement[edge.source], self.schedule.placement[edge.target], edge.direction)

    def maker(self, message: Message) -> Compute:
        """The computation that makes a message."""
        edge, m = message.edge, message.microbatch
        return Compute(edge.source, edge.made) if m is None else Compute(edge.source, self.schedule.find(edge.source, edge.made, m).kind, m)

    def inputs(self, compute: Compute) -> tuple[Message, ...]:
        """The messages that a computation needs, also those within its rank."""
        found: list[Message] = []
        for task in self.tasks(compute):
            for edge in self._into.get((compute.stage, task), ()):
                if not edge.once and compute.microbatch is None:
                    found += [Message(edge, m) for m in range(self.schedule.microbatches)]
                else:
                    found.append(Message(edge, None if edge.once else compute.microbatch))
        return tuple(found)

    def outputs(self, compute: Compute) -> tuple[Message, ...]:
        """The messages that a computation makes for other ranks, in the order of the edges."""
        edges = [e for task in self.tasks(compute) for e in self._out_of.get((compute.stage, task), ())]
        return tuple(Message(e, compute.microbatch) for e in edges if self.crosses(e))

    def needs(self, compute: Compute) -> tuple[Compute, ...]:
        """The computations that must have run before, on this or other ranks."""
        stage, m = compute.stage, compute.microbatch
        own: list[Compute] = []
        if compute.kind == "post":
            own = [Compute(stage, self.schedule.find(stage, k, i).kind, i) for k in "IW" for i in range(self.schedule.microbatches)]
        elif compute.kind in ("I", "B"):
            own = [Compute(stage, "F", m)]
        elif compute.kind == "W":
            own = [Compute(stage, "I", m)]
        return tuple(dict.fromkeys([*own, *(self.maker(message) for message in self.inputs(compute))]))

    @cached_property
    def _into(self) -> dict[tuple[int, str], list[Edge]]:
        return _grouped([((e.target, e.wanted), e) for e in self.edges])

    @cached_property
    def _out_of(self) -> dict[tuple[int, str], list[Edge]]:
        return _grouped([((e.source, e.made), e) for e in self.edges])


def _grouped(pairs: Sequence[tuple[tuple[int, str], Edge]]) -> dict[tuple[int, str], list[Edge]]:
    groups: dict[tuple[int, str], list[Edge]] = {}
    for key, edge in pairs:
        groups.setdefault(key, []).append(edge)
    return groups


def flow(schedule: Schedule, edges: Sequence[Edge] = ()) -> Flow:
    """Raises: InputError: the edges are no edges of this schedule, or one is given twice."""
    check_edges(edges, schedule.stages)
    if len(set(edges)) != len(edges):
        raise InputError("an edge is given twice", hint="one edge carries all values that one task makes for another")
    return Flow(schedule, tuple(edges) or chain(schedule.stages))


def lower(schedule: Schedule, edges: Sequence[Edge] = (), *, ahead: int = 1) -> Programs:
    """Each rank's instructions: ``pre`` of its stages, its actions in their order, ``post`` of a stage after its last backward part.

    ``post`` waits for no message while the rank has other work: then it comes as soon as its messages are there.

    Args:
        edges: which results other stages need; left out, stages form a chain. Those between stages of one rank are no messages.
        ahead: a receive is posted at least so many computations before the one that needs it; earlier where a send could block for ever
            (see the note above).

    Raises:
        InputError: the schedule isn't valid with these edges, or ``pre`` or ``post`` of stages wait for each other in a circle.
    """
    if ahead < 0:
        raise InputError(f"ahead is {ahead}", hint="a number of computations, at least 0")
    validate(schedule, edges)
    facts = flow(schedule, edges)
    line = _line(facts)
    place = {compute: k for k, compute in enumerate(line)}
    mine: list[list[Compute]] = [[] for _ in schedule.ranks]
    for compute in line:
        mine[schedule.placement[compute.stage]].append(compute)
    # messages in the order in which they leave: the order of every channel
    leaving = [message for compute in line for message in facts.outputs(compute)]
    programs = []
    for rank, computes in enumerate(mine):
        posted = _posted(facts, computes, [m for m in leaving if schedule.placement[m.edge.target] == rank], place, ahead)
        program: list[Instruction] = []
        for k, compute in enumerate(computes):
            program += [Receive(m.edge, m.microbatch) for m in posted.get(k, ())]
            program.append(compute)
            program += [Send(m.edge, m.microbatch) for m in facts.outputs(compute)]
        programs.append(tuple(program))
    return tuple(programs)


def _line(facts: Flow) -> list[Compute]:
    """All computations of all ranks in one order: by their start on a clock where F, I and W take 1, B 2, and the rest nothing."""
    schedule = facts.schedule
    end: dict[Compute, float] = {}
    line: list[Compute] = []
    # pre tasks first
    waiting = [Compute(s, "pre") for s in range(schedule.stages)]
    while waiting:
        ready = next((c for c in waiting if all(n in end for n in facts.needs(c))), None)
        if ready is None:
            raise InputError(
                f"pre tasks wait for each other: {', '.join(map(str, waiting))}", hint="edges between pre tasks form no circle"
            )
        waiting.remove(ready)
        end[ready] = 0.0
        line.append(ready)
    queues = [[Compute(a.stage, a.kind, a.microbatch) for a in actions] for actions in schedule.ranks]
    posts = [[Compute(s, "post") for s in schedule.held(rank)] for rank in range(len(queues))]
    needs = {c: facts.needs(c) for queue in (*queues, *posts) for c in queue}
    # the ranks to look at again when a computation is done: its own, and those that need it
    readers: dict[Compute, set[int]] = {c: {schedule.placement[c.stage]} for c in needs}
    for compute, needed in needs.items():
        for other in needed:
            if other in readers:
                readers[other].add(schedule.placement[compute.stage])
    nexts, free = [0] * len(queues), [0.0] * len(queues)

    def next_of(rank: int) -> tuple[float, int, int, Compute] | None:
        """When a rank can begin its next computation; a post before an action of the same time."""
        best: tuple[float, int, int, Compute] | None = None
        for late, compute in [*((0, c) for c in posts[rank]), *((1, c) for c in queues[rank][nexts[rank] : nexts[rank] + 1])]:
            if all(n in end for n in needs[compute]):
                start = max([free[rank], *(end[n] for n in needs[compute])])
                if best is None or (start, rank, late) < best[:3]:
                    best = (start, rank, late, compute)
        return best

    ready_of = {rank: next_of(rank) for rank in range(len(queues))}
    while found := [r for r in ready_of.values() if r is not None]:
        start, rank, late, compute = min(found, key=lambda r: r[:3])
        end[compute] = free[rank] = start + {"B": 2.0, "post": 0.0}.get(compute.kind, 1.0)
        line.append(compute)
        if late:
            nexts[rank] += 1
        else:
            posts[rank].remove(compute)
        for reader in readers[compute]:
            ready_of[reader] = next_of(reader)
    if stuck := [c for rank in posts for c in rank]:
        raise InputError(f"post tasks wait for each other: {', '.join(map(str, stuck))}", hint="edges between post tasks form no circle")
    if len(line) != len(end) or any(k < len(q) for k, q in zip(nexts, queues)):
        raise VerifyError("a valid schedule could not be put in one line")
    return line


def _posted(
    facts: Flow, computes: Sequence[Compute], arriving: Sequence[Message], place: dict[Compute, int], ahead: int
) -> dict[int, list[Message]]:
    """Before which of a rank's computations each of its receives is posted; those of one place in the order in which they leave."""
    first: dict[Message, int] = {}
    for k, compute in enumerate(computes):
        for message in facts.inputs(compute):
            first.setdefault(message, k)
    places = [place[c] for c in computes]
    posted: dict[int, list[Message]] = {}
    # from the last to the first: none is posted later than one that leaves after it on its channel
    latest: dict[Channel, int] = {}
    for message in reversed(arriving):
        made, channel = place[facts.maker(message)], facts.channel(message.edge)
        behind = bisect_left(places, made)  # see the note: no deadlock
        k = min(behind, max(0, first[message] - ahead), latest.get(channel, len(computes)))
        latest[channel] = k
        posted.setdefault(k, []).insert(0, message)
    return posted
