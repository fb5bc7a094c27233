"""Schedules as they are built: text forms, degenerate sizes, refusals, peak live microbatches, golden grids."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.errors import AutoparError, InputError, PlanError
from autopar.schedule import SCHEDULES, Action, Schedule, Times, build, peak_live, validate
from tests.schedule.sizes import built, small


@pytest.mark.parametrize("name", SCHEDULES)
def test_sizes(name: str) -> None:
    """One rank, one microbatch, fewer microbatches than stages: all valid, each action there once, and the text reads back."""
    for ranks in range(1, 7):
        for microbatches in range(1, 15):
            schedule = built(name, ranks, microbatches)
            validate(schedule)
            whole = sum(2 if a.kind in "FB" else 1 for a in schedule)
            assert whole == 4 * schedule.stages * microbatches
            assert Schedule.parse(schedule.text()) == schedule


def test_action_text() -> None:
    for action in (Action(2, "F", 0), Action(13, "W", 107)):
        assert Action.parse(str(action)) == action
    assert str(Action(2, "F", 0)) == "2F0"
    for text in ("2X0", "F0", "2F", "-1F0", "2f0", ""):
        with pytest.raises(InputError, match="is not an action"):
            Action.parse(text)


@pytest.mark.parametrize(
    "text, word",
    [
        ("", "doesn't begin a schedule"),
        ("gpipe 2 stages", "doesn't begin a schedule"),
        ("gpipe: 1 stages on 0, 1 microbatches\n1: 0F0 0B0", "is not the line of rank 0"),
        ("gpipe: 1 stages on 0, 1 microbatches\n0: 0F0 0C0", "is not an action"),
    ],
)
def test_text_refused(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "name, stages, ranks, word",
    [
        ("1f1b", 8, 4, "the schedule interleaved"),
        ("1f1b", 3, 4, "3 ranks"),
        ("zb-h1", 8, 4, "the schedule zb-v"),
        ("zb-h2", 4, 2, "the schedule zb-v"),
        ("zb-v", 4, 4, "8 stages"),
        ("zb-v", 1, 1, "2 stages"),
        ("dualpipev", 12, 4, "8 stages"),
        ("interleaved", 7, 3, "6 or 9 stages"),
        ("gpipe", 1, 2, "2 stages"),
    ],
)
def test_refused(name: str, stages: int, ranks: int, word: str) -> None:
    """A size that a schedule isn't defined for is refused, and the message says what to try."""
    with pytest.raises(PlanError, match=rf"(?s)can't place {stages} stages on {ranks} ranks.*try: .*{word}"):
        build(name, stages, 4, ranks)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (True, 1, 1), (2, 1.0, 2), (-2, 1, 1)])
def test_no_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="an integer of at least 1"):
        build("gpipe", *sizes)


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="(?s)no schedule '1f2b'.*gpipe, 1f1b"):
        build("1f2b", 2, 2, 2)


def reversed_gpipe(stages: int, microbatches: int, ranks: int) -> Schedule:
    """A user's own schedule: GPipe with the backwards in the reverse order of the forwards."""
    lists = []
    for s in range(stages):
        lists.append((*(Action(s, "F", m) for m in range(microbatches)), *(Action(s, "B", m) for m in reversed(range(microbatches)))))
    return Schedule("reversed", stages, microbatches, tuple(range(stages)), tuple(lists))


def test_users_schedule() -> None:
    """One function is all that a new schedule takes; what it returns is checked."""
    schedule = build(reversed_gpipe, 3, 4, 3)
    assert schedule.name == "reversed" and build(schedule, 3, 4, 3) is schedule
    with pytest.raises(InputError, match="is for 3 stages, 4 microbatches and 3 ranks"):
        build(schedule, 3, 5, 3)
    with pytest.raises(InputError, match="returned None"):
        build(lambda s, m, r: None, 1, 1, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(AutoparError, match="0F3 is missing"):
        build(lambda s, m, r: built("1f1b", s, m - 1).__class__("short", s, m, tuple(range(s)), built("1f1b", s, m - 1).ranks), 3, 4, 3)


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (2, 5), (4, 3), (4, 8), (8, 24), (8, 64)])
def test_peak_live(ranks: int, microbatches: int) -> None:
    """The bounds of docs/schedules.md, met exactly where they are equations in the sources."""
    S, M = ranks, microbatches
    assert peak_live(built("gpipe", S, M)).stages == (M,) * S
    assert peak_live(built("1f1b", S, M)).stages == tuple(min(M, S - s) for s in range(S))
    assert peak_live(built("zb-h1", S, M)).stages == (min(M, S),) * S
    assert peak_live(built("zb-h1", S, M)).stages_until_i == tuple(min(M, S - s) for s in range(S))
    assert peak_live(built("zb-h2", S, M)).stages == (min(M, 2 * S - 1),) * S
    assert peak_live(built("zb-h2", S, M)).stages_until_i == tuple(min(M, 2 * (S - s) - 1) for s in range(S))
    # of half a rank's layers each: as much as 1F1B's first rank
    assert max(peak_live(built("zb-v", S, M)).ranks) == (min(2 * M, 2 * S) if M >= 2 * S or M == 1 else pytest.approx(2 * S, abs=S))
    assert all(n <= 2 * S for n in peak_live(built("zb-v", S, M)).ranks)
    assert all(n <= 2 * S + 1 for n in peak_live(built("dualpipev", S, M)).ranks)
    if M >= 2 * S:
        assert peak_live(built("zb-v", S, M)).ranks == (2 * S,) * S
        assert max(peak_live(built("dualpipev", S, M)).ranks) == 2 * S + (S > 1)


@pytest.mark.parametrize("ranks, chunks", [(2, 2), (4, 2), (4, 3), (8, 3)])
def test_peak_live_interleaved(ranks: int, chunks: int) -> None:
    """Activations 1 + (R-1)/(R v) times those of 1F1B: so many of the v parts of a rank's layers (Narayanan et al. 2021, section 2.2.2)."""
    peak = peak_live(build("interleaved", ranks * chunks, 4 * ranks, ranks))
    assert max(peak.ranks) == ranks * chunks + ranks - 1


def test_peak_live_counts() -> None:
    """By hand: rank 0 keeps both its stages' microbatches until their W."""
    text = "x: 2 stages on 0 0, 2 microbatches\n0: 0F0 1F0 1I0 0F1 1F1 1I1 0I0 0I1 1W0 0W0 1W1 0W1"
    peak = peak_live(Schedule.parse(text))
    assert (peak.stages, peak.ranks, peak.stages_until_i, peak.ranks_until_i) == ((2, 2), (4,), (2, 1), (3,))


@pytest.mark.parametrize("name", SCHEDULES)
def test_grid(name: str, golden: Callable[[str, str], None]) -> None:
    golden(built(name, 4, 8).grid(), f"schedule/{name}")


def test_grid_of_times() -> None:
    schedule = built("1f1b", 2, 1)
    assert schedule.grid() == "rank 0 | 0F0  .   .   .  0B0 ---\nrank 1 |  .  1F0 1B0 ---  .   ."
    from_times = schedule.grid(Times(F=2, I=4, W=2))
    assert from_times == "rank 0 | 0F0  .   .   .   .  0B0 --- ---\nrank 1 |  .  1F0 1B0 --- ---  .   .   ."
    assert schedule.grid(Times(F=2, I=4, W=2), slot=3) == "rank 0 | 0F0  .   .  0B0 ---  .\nrank 1 |  .  1B0 ---  .   .   ."
    assert schedule.csv() == "0F0,0B0\n1F0,1B0"


def test_small_are_many() -> None:
    assert len(small()) > 150
