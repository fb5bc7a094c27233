"""The validator: random orders against a brute-force judge, and each kind of fault planted once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.schedule import Action, Edge, Schedule, chain, needs, validate
from tests.schedule.sizes import built, small

Orders = list[list[Action]]


def orders(schedule: Schedule) -> Orders:
    return [list(actions) for actions in schedule.ranks]


def of(schedule: Schedule, lists: Orders) -> Schedule:
    return replace(schedule, ranks=tuple(map(tuple, lists)))


def runs(lists: Orders, stages: int, edges: tuple[Edge, ...]) -> bool:
    """Whether the orders can be run, tried plainly: take any first action whose needs are done, as long as there is one."""
    lists, done = [list(x) for x in lists], set[tuple[int, str, int]]()
    while any(lists):
        for actions in lists:
            if not actions:
                continue
            a = actions[0]
            kinds = "IW" if a.kind == "B" else a.kind
            own = {"F": [], "I": ["F"], "W": ["I"], "B": ["F"]}[a.kind]
            wanted = [(a.stage, k, a.microbatch) for k in own]
            wanted += [(e.source, e.made, a.microbatch) for e in edges if e.target == a.stage and e.wanted in kinds]
            if all(w in done for w in wanted):
                actions.pop(0)
                done |= {(a.stage, k, a.microbatch) for k in kinds}
                break
        else:
            return False
    return True


def accepted(schedule: Schedule, edges: tuple[Edge, ...] = ()) -> bool:
    try:
        validate(schedule, edges)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("seed", range(6))
def test_random_orders(seed: int) -> None:
    """Orders shuffled a little or a lot: accepted if and only if they can be run; chains, and stages with skips."""
    rng, verdicts = random.Random(seed), [0, 0]
    skips = (Edge(0, "F", 2, "F"), Edge(2, "I", 0, "W"), Edge(0, "F", 1, "I"), Edge(1, "I", 0, "I"))
    for _ in range(150):
        ranks, microbatches = rng.randint(1, 4), rng.randint(1, 3)
        schedule = built(rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "dualpipev"]), ranks, microbatches)
        lists = orders(schedule)
        for _ in range(rng.choice([1, 1, 2, 3, 30])):
            actions = rng.choice(lists)
            k = rng.randrange(len(actions))
            actions.insert(min(len(actions), max(0, k + rng.randint(-3, 3))), actions.pop(k))
        edges = skips if schedule.stages > 2 and rng.random() < 0.4 else ()
        verdict = runs(lists, schedule.stages, edges or chain(schedule.stages))
        assert accepted(of(schedule, lists), edges) == verdict, of(schedule, lists).text()
        verdicts[verdict] += 1
    assert min(verdicts) > 20, f"one-sided: {verdicts}"


def fault(schedule: Schedule, rank: int, change: str) -> str:
    """What the validator says after ``change`` to a rank of a schedule."""
    lists = orders(schedule)
    actions = lists[rank]
    exec(change, {"a": actions, "lists": lists, "Action": Action})
    with pytest.raises(InputError) as caught:
        validate(of(schedule, lists))
    return str(caught.value)


@pytest.mark.parametrize(
    "name, rank, change, what, mark",
    [
        ("1f1b", 1, "a.pop(0)", "1F0 is missing", ">1F0<"),
        ("1f1b", 1, "a.pop(2)", "the backward of stage 1 for microbatch 0 is missing", ">1B0<"),
        ("zb-h1", 1, "a.remove(Action(1, 'W', 2))", "1I2 is unmatched, 1W2 is missing", ">1W2<"),
        ("zb-h1", 1, "a.remove(Action(1, 'I', 2))", "1W2 is unmatched, 1I2 is missing", ">1I2<"),
        ("zb-h1", 1, "a.append(a[0])", "1F0 is doubled", ">1F0<"),
        ("1f1b", 2, "a.append(Action(2, 'I', 0))", "2B0 is the whole backward, and a part of it is there too", ">2B0<"),
        ("1f1b", 2, "lists[0].append(a.pop(0))", "2F0 is on rank 0, and rank 2 holds stage 2", ">2F0<"),
        ("1f1b", 0, "a.append(Action(7, 'F', 0))", "7F0 names a stage or microbatch that isn't there", ">7F0<"),
        ("1f1b", 0, "a.append(Action(0, 'F', 4))", "0F4 names a stage or microbatch that isn't there", ">0F4<"),
        ("1f1b", 0, "a.append(Action(0, 'X', 0))", "0X0 is of no known kind", ">0X0<"),
        ("1f1b", 2, "a[0], a[1] = a[1], a[0]", "2B0 stands before 2F0, which it needs", ">2B0<"),
        ("zb-h1", 0, "a[3], a[4] = a[4], a[3]", "0W0 stands before 0I0, which it needs", ">0W0<"),
        ("1f1b", 0, "a.insert(1, a.pop(3))", "deadlock: 0B0 on rank 0 waits for 1B0", ">0B0<"),
    ],
)
def test_seeded_faults(name: str, rank: int, change: str, what: str, mark: str) -> None:
    """Each fault is found, named, and marked in the grid."""
    text = fault(built(name, 3, 4), rank, change)
    assert f"is not valid: {what}" in text
    assert mark in text and text.count("rank ") >= 3


def test_deadlock_names_all() -> None:
    text = fault(built("1f1b", 3, 4), 1, "a.insert(0, a.pop(1)); lists[2].insert(0, lists[2].pop(2)); lists[0].insert(1, lists[0].pop(3))")
    assert "0B0 on rank 0 waits for 1B0; 1F1 on rank 1 waits for 0F1; 2F1 on rank 2 waits for 1F1" in text


def test_message_in_the_docs() -> None:
    """docs/schedules.md shows it to the letter."""
    text = fault(built("1f1b", 3, 4), 0, "a.insert(1, a.pop(3))")
    assert f"```\n{text}\n```" in (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def test_wide_grid_is_cut() -> None:
    text = fault(built("gpipe", 2, 200), 1, "a.pop(300)")
    assert ">1B100<" in text and "from place" in text and max(map(len, text.splitlines())) < 200


def test_wrong_frame() -> None:
    schedule = built("gpipe", 2, 2)
    with pytest.raises(InputError, match="2 stages, of which 1 are placed"):
        validate(replace(schedule, placement=(0,)))
    with pytest.raises(InputError, match="stage 1 is placed on rank 2 of 2 ranks"):
        validate(replace(schedule, placement=(0, 2)))


@pytest.mark.parametrize(
    "edge, word",
    [
        (Edge(0, "B", 1, "F"), "say I or W"),
        (Edge(0, "F", 1, "G"), "a task 'G'"),
        (Edge(0, "F", 9, "F"), "speaks of stage 9"),
        (Edge(1, "F", 1, "I"), "stays on its stage"),
        (Edge(1, "I", 0, "F"), "what comes later in the step"),
        (Edge(1, "post", 0, "W"), "what comes later in the step"),
    ],
)
def test_wrong_edges(edge: Edge, word: str) -> None:
    with pytest.raises(InputError, match=word):
        validate(built("gpipe", 3, 2), [edge])


def test_edges_decide() -> None:
    """Stages that don't need each other may run in any order; B does what edges say of I and of W."""
    lists = orders(built("gpipe", 2, 2))
    schedule = of(built("gpipe", 2, 2), [[lists[0][k] for k in (0, 2, 1, 3)], lists[1]])
    with pytest.raises(InputError, match="0B0 on rank 0 waits for 1B0"):
        validate(schedule)
    validate(schedule, [Edge(0, "F", 1, "F")])
    with pytest.raises(InputError, match="0B0 on rank 0 waits for 1B0"):
        validate(schedule, [Edge(0, "F", 1, "F"), Edge(1, "W", 0, "W")])
    assert needs(schedule, [Edge(1, "W", 0, "I")])[Action(0, "B", 0)] == (Action(0, "F", 0), Action(1, "B", 0))


def test_chain_is_the_default() -> None:
    for schedule in small():
        assert needs(schedule) == needs(schedule, chain(schedule.stages)) or schedule.stages == 1
