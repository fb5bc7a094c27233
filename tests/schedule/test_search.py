"""Found schedules: against published rates, against all orders of small pipelines, and within their memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from autopar.errors import InputError, PlanError
from autopar.schedule import Action, Schedule, lower_bound, search, simulate, validate
from autopar.schedule.search import EFFORT
from tests.schedule.test_simulate import ROWS, Row


def held(schedule: Schedule, activations: Sequence[float], kept: Sequence[float]) -> list[float]:
    """The most that each rank holds, counted action by action."""
    most = []
    for actions in schedule.ranks:
        now, peak = 0.0, 0.0
        for a in actions:
            whole, part = activations[a.stage], kept[a.stage]
            now += {"F": whole, "I": part - whole, "W": -part, "B": -whole}[a.kind]
            peak = max(peak, now)
        most.append(peak)
    return most


@pytest.mark.parametrize("row", [pytest.param(r, id=f"{r.p}-{r.m}", marks=[pytest.mark.slow] * (r.p > 8 and r.m != 48)) for r in ROWS])
def test_published_rates(row: Row) -> None:
    """At or under the rates of ZB-2p in the same memory, that of 2p microbatches; and of ZB-1p in that of p."""
    p, part = row.p, row.kept
    for memory, published in ((2.0 * p, row.zb_2p), (1.0 * p, row.zb_h1)):
        schedule = search(p, row.m, **row.times, memory=memory, kept=part, effort=EFFORT // 3)
        result = simulate(schedule, **row.times)
        assert round(result.bubble, 4) <= published
        assert result.cost >= lower_bound(p, row.m, **row.times) - 1e-6
        assert max(held(schedule, [1.0] * p, [part] * p)) <= memory + 1e-9


def test_bound_is_met() -> None:
    """The published rate of the first row is the best there is: all forwards and gradients of the last rank, and the way there and back."""
    row = ROWS[0]
    bound = lower_bound(row.p, row.m, **row.times)
    assert round(1 - row.m * (row.F + row.I + row.W) / bound, 4) == row.zb_2p


def words(microbatches: int) -> Iterator[tuple[str, ...]]:
    """All orders of one rank's F, I and W."""
    for word in sorted(set(itertools.permutations("FIW" * microbatches))):
        if all(word[:k].count("F") >= word[:k].count("I") >= word[:k].count("W") for k in range(len(word))):
            yield word


def numbered(word: Sequence[str], stage: int) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, word[:k].count(kind)) for k, kind in enumerate(word))


@pytest.mark.parametrize("seed", range(4))
def test_all_orders(seed: int) -> None:
    """Small pipelines with uneven stages: no order of any is better than the one that is found."""
    rng = random.Random(seed)
    for stages, microbatches in ((1, 2), (2, 2), (3, 2)):
        f, i, w = ([rng.choice((1.0, 2.0, 3.0, 5.0)) for _ in range(stages)] for _ in range(3))
        comm, memory = rng.choice((0.0, 0.5)), rng.choice((1.0, 1.5, 2.0))
        part = [rng.choice((0.25, 0.5, 1.0)) for _ in range(stages)]
        best = float("inf")
        for each in itertools.product(words(microbatches), repeat=stages):
            ranks = tuple(numbered(word, s) for s, word in enumerate(each))
            schedule = Schedule("tried", stages, microbatches, tuple(range(stages)), ranks)
            if max(held(schedule, [1.0] * stages, part)) <= memory:
                try:
                    best = min(best, simulate(schedule, F=f, I=i, W=w, comm=comm).cost)
                except InputError:
                    continue  # can't be run
        found = search(stages, microbatches, f, i, w, comm, memory=memory, kept=part)
        assert simulate(found, F=f, I=i, W=w, comm=comm).cost == pytest.approx(best)
        assert lower_bound(stages, microbatches, f, i, w, comm) <= best + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_random_pipelines(seed: int) -> None:
    """Uneven stages and memory: valid, within each rank's memory, not above ZB-H1 and ZB-H2 where these fit, and the same again."""
    rng = random.Random(seed)
    p, m = rng.randint(1, 6), rng.randint(1, 12)
    f, i, w = ([rng.uniform(1, 3) for _ in range(p)] for _ in range(3))
    comm, part = rng.choice((0.0, 0.3)), [rng.uniform(0, 1) for _ in range(p)]
    memory = [rng.uniform(1, 2.5) * (p - s) for s in range(p)]
    schedule = search(p, m, f, i, w, comm, memory=memory, kept=part, effort=20_000)
    validate(schedule)
    assert schedule == search(p, m, f, i, w, comm, memory=memory, kept=part, effort=20_000)
    assert all(h <= limit + 1e-9 for h, limit in zip(held(schedule, [1.0] * p, part), memory))
    cost = simulate(schedule, F=f, I=i, W=w, comm=comm).cost
    assert cost >= lower_bound(p, m, f, i, w, comm) - 1e-9
    for name in ("zb-h1", "zb-h2"):
        other = simulate(name, p, m, f, i, w, comm)
        if all(h <= limit for h, limit in zip(held(other.schedule, [1.0] * p, part), memory)):
            assert cost <= other.cost + 1e-9


def test_more_memory_helps() -> None:
    costs = [simulate(search(4, 12, memory=n, effort=30_000), F=1.0).cost for n in (1, 2, 4, 7)]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[1] > costs[2] > costs[3] == 36.0


@pytest.mark.parametrize(
    "arguments, kind, word",
    [
        ({"stages": 0}, InputError, "stages is 0"),
        ({"microbatches": 1.0}, InputError, "microbatches is 1.0"),
        ({"memory": 0.5}, PlanError, "(?s)stage 0 needs 1.0 for one microbatch, and its rank has 0.5.*recompute"),
        ({"memory": [4.0, 0.5]}, PlanError, "stage 1 needs 1.0"),
        ({"memory": [4.0]}, InputError, "1 values of memory are given for 2 stages"),
        ({"kept": 2.0}, InputError, "keeps 2.0 for W"),
        ({"F": [1.0]}, InputError, "1 times F are given for 2 stages"),
        ({"W": -1.0}, InputError, "negative"),
    ],
)
def test_refused(arguments: dict[str, object], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        search(**{"stages": 2, "microbatches": 3, "memory": 4.0, **arguments})  # type: ignore[arg-type]
