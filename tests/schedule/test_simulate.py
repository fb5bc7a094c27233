"""The simulator against closed forms and published bubble rates."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from autopar.schedule import Schedule, build, simulate

#: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 5 and 9; 8 stages.
#: microbatches, F, I, W, comm; rates of 1F1B, ZB-H1, ZB-H2; parts a rank and rate of interleaved 1F1B; rate of ZB-2p.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 3, 0.1055),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 3, 0.0818),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 3, 0.0443),
    (24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 4, 0.0808),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 4, 0.0628),
    (64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 4, 0.0320),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[1]}-{row[0]}")
def test_published_rates(row: tuple[float, ...]) -> None:
    """To all four digits. Interleaved: the paper's rates are those of R hops less of communication than its order has (see below)."""
    m, f, i, w, comm, one, h1, h2, chunks, inter = row
    rates = [round(simulate(name, 8, int(m), f, i, w, comm).bubble, 4) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert rates == [one, h1, h2]
    found = simulate("interleaved", 8, int(m), f, i, w, comm, chunks=int(chunks))
    work = m * (f + i + w)
    assert found.cost == pytest.approx(work + 7 / chunks * (f + i + w) + (16 * chunks - 2) * comm)
    published = 1 - work / (found.cost - 8 * comm)
    assert round(published, 4) == inter
    assert found.bubble == pytest.approx(inter, abs=0.004)


@pytest.mark.parametrize("p, m", [(2, 2), (4, 8), (4, 13), (8, 24), (16, 48)])
@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (3, 3, 2), (2.0, 2.5, 1.5)])
def test_closed_forms(p: int, m: int, f: float, i: float, w: float) -> None:
    """Idle time of the rank that takes longest, without communication; sources in docs/schedules.md."""

    def idle(name: str, chunks: int = 1, times: tuple[float, float, float] = (f, i, w)) -> float:
        result = simulate(name, p, m, *times, chunks=chunks)
        return result.cost - m * sum(times)

    assert idle("gpipe") == pytest.approx((p - 1) * (f + i + w))
    assert idle("1f1b") == pytest.approx((p - 1) * (f + i + w))
    assert idle("zb-h1") == pytest.approx((p - 1) * (f + i - w))
    if m >= 2 * p:
        assert idle("zb-h2", times=(1, 1, 1)) == pytest.approx((p - 1) * 0)
        assert idle("zb-v", times=(1, 1, 1)) == pytest.approx(0)
        # a stage has half of the rank's layers. The source counts a forward and the backward beside it as one block, F&B; in turn, the
        # backward needn't wait for the forward
        assert idle("dualpipev") <= (p - 1) * ((f + i + w) + (i + w) - 3 * w) / 2 + 1e-9
        assert idle("dualpipev", times=(f, f, w)) == pytest.approx((p - 1) * (f + f - w) / 2)
    if m % p == 0:
        for v in (2, 3):
            assert idle("interleaved", v) == pytest.approx((p - 1) / v * (f + i + w))


@pytest.mark.parametrize("p, m, f, i, w", [(4, 16, 3, 3, 2), (8, 24, 5, 5, 4), (8, 24, 18.5, 18.1, 9.3)])
def test_closed_form_zb_h2(p: int, m: int, f: float, i: float, w: float) -> None:
    result = simulate("zb-h2", p, m, f, i, w)
    assert result.cost - m * (f + i + w) == pytest.approx((p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("p, m", [(4, 1), (4, 3), (4, 4), (8, 5)])
def test_few_microbatches(p: int, m: int) -> None:
    """Qi et al. 2023: cost with at most as many microbatches as stages."""
    f, i, w = 3.0, 3.0, 2.0
    assert simulate("1f1b", p, m, f, i, w).makespan == pytest.approx((m + p - 1) * (f + i + w))
    for name in ("zb-h1", "zb-h2"):
        assert simulate(name, p, m, f, i, w).makespan == pytest.approx((m + p - 1) * (f + i) + w)


def test_by_hand() -> None:
    """Two stages, one microbatch, a delay: 0F 0-1, 1F 3-4, 1B 4-6, 0B 8-10."""
    result = simulate("1f1b", 2, 1, comm=2.0)
    assert [(s.rank, s.stage, s.kind, s.microbatch, s.start, s.end) for s in result.spans] == [
        (0, 0, "F", 0, 0.0, 1.0), (0, 0, "B", 0, 8.0, 10.0), (1, 1, "F", 0, 3.0, 4.0), (1, 1, "B", 0, 4.0, 6.0),
    ]  # fmt: skip
    assert (result.makespan, result.cost, result.bubble, result.peak_live) == (10.0, 10.0, 0.7, (1, 1))
    assert result.idle == (0.7, 0.7)
    assert result.grid() == "rank 0 | 0F0  .   .   .   .   .   .   .  0B0 ---\nrank 1 |  .   .   .  1F0 1B0 ---  .   .   .   ."


def test_no_delay_within_a_rank() -> None:
    assert simulate("interleaved", 1, 3, comm=100.0, chunks=2).makespan == pytest.approx(9.0)
    slow, fast = simulate("zb-v", 2, 5, comm=1.0), simulate("zb-v", 2, 5)
    assert slow.makespan > fast.makespan


def test_times_of_each_stage() -> None:
    """A slow stage sets the pace; numbers are shared by a rank's stages, sequences are not."""
    result = simulate("gpipe", 3, 10, F=[1.0, 5.0, 1.0])
    assert result.makespan == pytest.approx(1 + 10 * 5 + 1 + 2 + 2 + 10 * 2)
    assert simulate("zb-v", 2, 4, F=[0.5] * 4).makespan == simulate("zb-v", 2, 4).makespan


def test_own_schedule() -> None:
    schedule = build("1f1b", 4, 8, 4)
    assert simulate(schedule).bubble == simulate("1f1b", 4, 8).bubble
    assert simulate(Schedule.parse(schedule.text())).spans == simulate(schedule).spans


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"F": -1.0}, "negative"),
        ({"comm": -1.0}, "negative"),
        ({"W": [1.0, 2.0]}, "2 times W are given for 8 stages"),
        ({"chunks": 0}, "chunks is 0"),
        ({"schedule": "zb-v", "chunks": 3}, "holds two stages a rank"),
    ],
)
def test_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        simulate(**{"schedule": "1f1b", **arguments})  # type: ignore[arg-type]
