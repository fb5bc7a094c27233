"""Lowering, and the strictest transport: every schedule comes to its end; faults planted in programs are found."""

from __future__ import annotations

import random

import pytest

from autopar.errors import CommError, InputError
from autopar.schedule import (
    SCHEDULES,
    Channel,
    Compute,
    Edge,
    Instruction,
    Message,
    Programs,
    Receive,
    Schedule,
    Send,
    chain,
    channels,
    check_transport,
    lower,
)
from tests.schedule.sizes import built, small


def random_edges(rng: random.Random, stages: int) -> tuple[Edge, ...]:
    """A chain, with skips, edges into W, results kept for a later backward, and things that go once a step."""
    edges = list(chain(stages))
    pairs = [(a, b) for a in range(stages) for b in range(stages) if a < b]
    for a, b in rng.sample(pairs, min(len(pairs), 4)):
        edges += rng.sample(
            [
                Edge(a, "F", b, "F"),
                Edge(a, "F", b, "I"),
                Edge(a, "F", b, "W"),
                Edge(b, "F", a, "I"),
                Edge(b, "I", a, "I"),
                Edge(b, "I", a, "W"),
                Edge(a, "pre", b, "pre"),
                Edge(a, "pre", b, "F"),
                Edge(b, "pre", a, "W"),
                Edge(a, "F", b, "post"),
                Edge(b, "W", a, "post"),
                Edge(a, "I", b, "post"),
                Edge(b, "pre", a, "post"),
                Edge(b, "post", a, "post"),
            ],
            5,
        )
    return tuple(dict.fromkeys(edges))


@pytest.mark.parametrize("name", SCHEDULES)
def test_chains_end(name: str) -> None:
    for schedule in small():
        if schedule.name == name:
            for ahead in (0, 1, 3):
                check_transport(lower(schedule, ahead=ahead), schedule)


@pytest.mark.parametrize("seed", range(8))
def test_random_edges_end(seed: int) -> None:
    """Skips, once-a-step messages and results kept: no deadlock, each message sent and received once, in one order."""
    rng = random.Random(seed)
    for schedule in rng.sample(small(), 40):
        edges = random_edges(rng, schedule.stages)
        programs = lower(schedule, edges, ahead=rng.randint(0, 4))
        check_transport(programs, schedule, edges)
        sent = [Message(i.edge, i.microbatch) for p in programs for i in p if isinstance(i, Send)]
        received = [Message(i.edge, i.microbatch) for p in programs for i in p if isinstance(i, Receive)]
        crossing = [e for e in edges or chain(schedule.stages) if schedule.placement[e.source] != schedule.placement[e.target]]
        expected = [Message(e, m) for e in crossing for m in ([None] if e.once else range(schedule.microbatches))]
        assert len(sent) == len(set(sent)) and set(sent) == set(received) == set(expected) and len(received) == len(sent)


def test_random_orders_end() -> None:
    """Orders that no builder would make, but that can be run: built by running stages at random."""
    rng = random.Random(0)
    for _ in range(60):
        schedule = random_schedule(rng, stages=rng.randint(2, 5), microbatches=rng.randint(1, 5))
        check_transport(lower(schedule, ahead=rng.randint(0, 2)), schedule)


def random_schedule(rng: random.Random, stages: int, microbatches: int) -> Schedule:
    """Stages on random ranks; at random one of the actions that can run next."""
    ranks = rng.randint(1, stages)
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(placement)
    lines: list[list[str]] = [[] for _ in range(ranks)]
    left = {(s, k, m) for s in range(stages) for k in "FIW" for m in range(microbatches)}
    while left:
        s, k, m = rng.choice(sorted(left))
        needed = {"F": [(s - 1, "F", m)], "I": [(s, "F", m), (s + 1, "I", m)], "W": [(s, "I", m)]}[k]
        if not any(n in left for n in needed):
            left.remove((s, k, m))
            lines[placement[s]].append(f"{s}{k}{m}")
    head = f"random: {stages} stages on {' '.join(map(str, placement))}, {microbatches} microbatches"
    return Schedule.parse("\n".join([head, *(f"{r}: {' '.join(line)}" for r, line in enumerate(lines))]))


def test_text() -> None:
    """The whole program of two ranks, read by a person."""
    edges = [*chain(2), Edge(1, "pre", 0, "F"), Edge(0, "post", 1, "post")]
    programs = lower(built("1f1b", 2, 2), edges)
    assert [" · ".join(map(str, p)) for p in programs] == [
        "receive 1pre->0F · 0pre · 0F0 · send 0F->1F 0 · receive 1I->0I 0 · 0F1 · send 0F->1F 1 · receive 1I->0I 1 · 0B0 · 0B1"
        " · 0post · send 0post->1post",
        "receive 0F->1F 0 · 1pre · send 1pre->0F · receive 0F->1F 1 · 1F0 · 1B0 · send 1I->0I 0 · 1F1 · receive 0post->1post"
        " · 1B1 · send 1I->0I 1 · 1post",
    ]


def test_channels() -> None:
    """Up, down and once apart; a channel's order is the sender's."""
    schedule = built("zb-v", 2, 2)
    edges = [*chain(4), Edge(0, "pre", 3, "pre"), Edge(0, "pre", 1, "pre")]
    orders = channels(lower(schedule, edges), schedule)
    assert set(orders) == {Channel(a, b, d) for a, b in ((0, 1), (1, 0)) for d in ("up", "down")} | {Channel(0, 1, "once")}
    assert [str(m) for m in orders[Channel(0, 1, "once")]] == ["0pre->1pre"]  # stages 0 and 3 are on one rank
    assert [str(m) for m in orders[Channel(0, 1, "up")]] == ["0F->1F 0", "0F->1F 1"]


def test_within_a_rank() -> None:
    programs = lower(built("interleaved", 1, 3))
    assert all(isinstance(i, Compute) for p in programs for i in p)


def test_ahead() -> None:
    """A receive is posted at least so many computations before the one that needs it."""
    schedule = built("gpipe", 2, 6)
    for ahead in (0, 1, 2, 5):
        for program in lower(schedule, ahead=ahead):
            computes = [i for i in program if isinstance(i, Compute)]
            seen = 0
            for i in program:
                seen += isinstance(i, Compute)
                if isinstance(i, Receive):
                    kind = "F" if i.edge.wanted == "F" else "B"
                    needed = computes.index(Compute(i.edge.target, kind, i.microbatch))
                    assert needed - seen >= min(ahead, needed)
    with pytest.raises(InputError, match="ahead is -1"):
        lower(schedule, ahead=-1)


def test_posts_wait_for_no_one_needlessly() -> None:
    """The post of stage 3 needs that of stage 0, which ends last: it doesn't hold up the rank's other stage."""
    schedule = built("zb-v", 2, 3)
    edges = [*chain(4), Edge(1, "post", 3, "post"), Edge(0, "post", 2, "post")]
    programs = lower(schedule, edges)
    check_transport(programs, schedule, edges)
    plain = [str(i) for i in lower(schedule)[0] if isinstance(i, Compute)]
    assert plain[plain.index("3W2") + 1] == "3post"


@pytest.mark.parametrize("task", ["pre", "post"])
def test_circles_are_refused(task: str) -> None:
    edges = [*chain(3), Edge(0, task, 1, task), Edge(1, task, 2, task), Edge(2, task, 0, task)]
    with pytest.raises(InputError, match=f"{task} tasks wait for each other: 0{task}, 1{task}, 2{task}"):
        lower(built("1f1b", 3, 2), edges)


def test_doubled_edge() -> None:
    with pytest.raises(InputError, match="given twice"):
        lower(built("1f1b", 2, 2), [Edge(0, "F", 1, "F"), Edge(0, "F", 1, "F")])


def changed(programs: Programs, rank: int, change: str) -> Programs:
    lists = [list(p) for p in programs]
    find = {str(i): k for k, i in enumerate(lists[rank])}
    exec(change, {"p": lists[rank], "lists": lists, "at": find, "Compute": Compute})
    return tuple(map(tuple, lists))


@pytest.mark.parametrize(
    "rank, change, word",
    [
        # the receive only after the send that its sender waits for: neither side can go on
        (0, "p.insert(at['send 0F->1F 3'], p.pop(at['receive 1I->0I 0'])); lists[1].insert(9, lists[1].pop(6))", "deadlock|disagree"),
        (1, "p.remove(p[at['receive 0F->1F 0']])", "ends of channel 0->1 up disagree: 0F->1F 0 is sent, 0F->1F 1"),
        (1, "a, b = at['receive 0F->1F 1'], at['receive 0F->1F 2']; p[a], p[b] = p[b], p[a]", "disagree"),
        (0, "p.remove(p[at['send 0F->1F 3']])", "deadlock"),
        (1, "p.append(p[at['receive 0F->1F 0']])", "nobody sends 0F->1F 0 on channel 0->1 up"),
        (0, "p.append(p[at['send 0F->1F 0']])", "deadlock"),
        (0, "p.remove(p[at['send 0F->1F 3']]); lists[1].remove(next(i for i in lists[1] if str(i) == 'receive 0F->1F 3'))", "deadlock"),
        (0, "p.insert(0, p.pop(at['send 0F->1F 0']))", "0F->1F 0 is sent before it is made"),
        (0, "p.remove(p[at['0F1']])", "rank 0 doesn't compute what its schedule says"),
        (0, "p[at['0F1']], p[at['0F2']] = p[at['0F2']], p[at['0F1']]", "rank 0 doesn't compute what its schedule says"),
        (0, "p.append(Compute(0, 'post'))", "rank 0 doesn't compute what its schedule says"),
        (0, "p.remove(p[at['0pre']])", "rank 0 doesn't compute what its schedule says"),
        (0, "p.insert(0, p.pop(at['0post']))", "0post runs before 0B0, which it needs"),
    ],
)
def test_seeded_faults(rank: int, change: str, word: str) -> None:
    schedule = built("1f1b", 3, 4)
    programs = lower(schedule)
    check_transport(programs, schedule)
    with pytest.raises(CommError, match=word):
        check_transport(changed(programs, rank, change), schedule)


def test_deadlock_of_sends_first() -> None:
    """Both ranks send before they post the receive: found, with both positions. So the rule about receives is needed."""
    schedule = built("1f1b", 2, 3)
    programs = lower(schedule, ahead=0)
    late: list[list[Instruction]] = []
    for program in programs:
        receives = [i for i in program if isinstance(i, Receive)]
        order: list[Instruction] = []
        for i in program:
            if isinstance(i, Compute):
                # each receive right before the computation that needs it
                mine = [r for r in receives if r.microbatch == i.microbatch and i.kind in ("F" if r.edge.made == "F" else "B")]
                order += [*mine, i]
            elif isinstance(i, Send):
                order.append(i)
        late.append(order)
    with pytest.raises(CommError, match=r"(?s)deadlock.*rank 0: .*>send 0F->1F 1<.*rank 1: .*>send 1I->0I 0<"):
        check_transport(tuple(map(tuple, late)), schedule)
