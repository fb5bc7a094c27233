"""The strictest transport: does every rank come to its end, if sends block and channels are FIFOs?

A channel carries one message after another from one rank to another, in one direction of the pipeline. The receiver posts receives; a
send returns when the receive at the head of its channel is posted, and takes it. Ranks run their instructions in order, at any speed.
What passes here passes on transports that give more, such as buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopar.errors import CommError
from autopar.schedule.action import Schedule
from autopar.schedule.edge import Edge
from autopar.schedule.lower import Channel, Compute, Flow, Instruction, Message, Programs, Receive, Send, flow


def channels(programs: Programs, schedule: Schedule) -> dict[Channel, tuple[Message, ...]]:
    """The messages of each channel, in the order in which they are sent."""
    orders: dict[Channel, list[Message]] = {}
    for program in programs:
        for instruction in program:
            if isinstance(instruction, Send):
                channel = Flow(schedule, ()).channel(instruction.edge)
                orders.setdefault(channel, []).append(Message(instruction.edge, instruction.microbatch))
    return {channel: tuple(order) for channel, order in orders.items()}


def check_transport(programs: Programs, schedule: Schedule, edges: Sequence[Edge] = ()) -> None:
    """Runs lowered programs on the strictest transport.

    Raises:
        CommError: the ranks wait for each other for ever (the message says where each stands), the two ends of a channel disagree, a rank
            sends what it hasn't made or computes without a receive, or its computations aren't those of the schedule.
    """
    facts = flow(schedule, edges)
    _check_computes(programs, schedule)
    posted: dict[Channel, deque[Message]] = {}
    arrived: set[Message] = set()
    done: set[Compute] = set()
    place = [0] * len(programs)

    def can_go(rank: int, instruction: Instruction) -> bool:
        if isinstance(instruction, Receive):
            posted.setdefault(facts.channel(instruction.edge), deque()).append(Message(instruction.edge, instruction.microbatch))
            return True
        if isinstance(instruction, Compute):
            if any(facts.crosses(m.edge) and m not in arrived for m in facts.inputs(instruction)):
                return False
            if lacks := [n for n in facts.needs(instruction) if n not in done]:
                raise _fault(f"{instruction} runs before {lacks[0]}, which it needs", programs, place, rank)
            done.add(instruction)
            return True
        message, channel = Message(instruction.edge, instruction.microbatch), facts.channel(instruction.edge)
        if facts.maker(message) not in done:
            raise _fault(f"{message} is sent before it is made", programs, place, rank)
        if not posted.get(channel):
            return False
        expected = posted[channel].popleft()
        if expected != message:
            raise _fault(f"the ends of channel {channel} disagree: {message} is sent, {expected} is to be received", programs, place, rank)
        arrived.add(message)
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while place[rank] < len(program) and can_go(rank, program[place[rank]]):
                place[rank] += 1
                moved = True
    if any(k < len(program) for k, program in zip(place, programs)):
        raise _fault("deadlock: no rank can go on", programs, place)
    for channel, left in posted.items():
        if left:
            raise _fault(f"nobody sends {left[0]} on channel {channel}", programs, place)


def _check_computes(programs: Programs, schedule: Schedule) -> None:
    """Each rank computes its actions in their order; before and between them only pre and post of its stages, once each."""
    if len(programs) != len(schedule.ranks):
        raise CommError(f"there are {len(programs)} programs for {len(schedule.ranks)} ranks")
    for rank, (program, actions) in enumerate(zip(programs, schedule.ranks)):
        computes = [i for i in program if isinstance(i, Compute)]
        middle = [c for c in computes if c.microbatch is not None]
        wanted = [Compute(a.stage, a.kind, a.microbatch) for a in actions]
        ends = [c for c in computes if c.microbatch is None]
        if middle != wanted or sorted(map(str, ends)) != sorted(f"{s}{k}" for s in schedule.held(rank) for k in ("pre", "post")):
            k = next((k for k, (a, b) in enumerate(zip(middle, wanted)) if a != b), min(len(middle), len(wanted)))
            raise CommError(
                f"rank {rank} doesn't compute what its schedule says",
                why=f"its action {k} is {middle[k] if k < len(middle) else 'missing'}, and pre and post are {', '.join(map(str, ends))}",
            )


def _fault(what: str, programs: Programs, place: Sequence[int], rank: int | None = None) -> CommError:
    """The error with every rank's position: its last three instructions and the next."""
    lines = []
    for r, (program, k) in enumerate(zip(programs, place)):
        before = " · ".join(map(str, program[max(0, k - 3) : k]))
        lines.append(f"    rank {r}: {before} · >{program[k]}<" if k < len(program) else f"    rank {r}: finished")
    return CommError(what, where="" if rank is None else f"rank {rank}", why="\n".join(["the ranks stand here", *lines]))
