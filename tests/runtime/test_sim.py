"""Simulated ranks: every collective against its formula, and every way in which ranks can go wrong together."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from autopar.errors import CommError
from autopar.layout.mesh import Mesh
from autopar.layout.traffic import bytes_sent
from autopar.runtime.sim import SimComm, run_simulated
from tests.runtime.formulas import MESHES, SHAPE, call, cases, expected, same, tensor


@pytest.mark.parametrize("text", MESHES)
def test_formula(text: str) -> None:
    mesh = Mesh.parse(text)
    for axes in MESHES[text]:
        for kind, dims, op, dtype in cases():
            inputs = [tensor(rank, SHAPE, dtype) for rank in range(mesh.size)]
            got = run_simulated(mesh, lambda comm: (call(comm, kind, inputs[comm.rank], axes, dims, op), comm.take_records()))  # noqa: B023
            for rank, (value, records) in enumerate(got):
                assert same(value, expected(kind, inputs, mesh, rank, axes, dims, op)), (axes, kind, dims, op, dtype, rank)
                assert value.is_contiguous() and value.data_ptr() != inputs[rank].data_ptr()
                n = mesh.count(axes)
                assert len(records) == (n > 1)
                for record in records:
                    assert (record.site, record.kind, record.axes) == ("s", kind, axes)
                    assert record.bytes == bytes_sent(kind, inputs[rank].numel(), inputs[rank].itemsize, n, mesh.index(rank, axes))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    mesh = Mesh(tp=2)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "mirror"):
        inputs = [tensor(rank, shape, torch.float32) for rank in range(2)]
        for rank, value in enumerate(run_simulated(mesh, lambda c: call(c, kind, inputs[c.rank], ("tp",), (0, 0), "sum"))):  # noqa: B023
            assert same(value, expected(kind, inputs, mesh, rank, ("tp",), (0, 0), "sum"))


def test_one_element_of_stride_zero() -> None:
    def rank(comm: SimComm) -> float:
        x = torch.ones((), dtype=torch.float64).expand(1)
        assert x.is_contiguous() and x.stride() == (0,)
        return comm.all_reduce(x, ("tp",)).wait().item()

    assert run_simulated(Mesh(tp=2), rank) == [2.0, 2.0]


def test_out_is_used_and_may_alias() -> None:
    def rank(comm: SimComm) -> None:
        whole = torch.zeros(4, 3)
        mine = whole[2 * comm.rank : 2 * comm.rank + 2]
        mine.fill_(comm.rank + 1.0)
        assert comm.all_gather(mine, ("tp",), out=whole).wait() is whole
        assert whole[:, 0].tolist() == [1, 1, 2, 2]
        assert comm.reduce_scatter(whole, ("tp",), out=mine).wait() is mine
        assert mine.tolist() == [[2.0 * (comm.rank + 1)] * 3] * 2
        assert comm.all_reduce(mine, ("tp",), out=mine).wait() is mine
        assert mine.tolist() == [[6.0] * 3] * 2
        fresh = torch.empty(4, 3)
        handle = comm.all_gather(mine, ("tp",), out=fresh)
        assert fresh.isnan().all()  # a program that reads too early can't miss it
        assert handle.wait() is fresh and handle.wait() is fresh

    run_simulated(Mesh(tp=2), rank)


def test_non_contiguous_input() -> None:
    inputs = [tensor(rank, (6, 4), torch.float64).t() for rank in range(2)]
    got = run_simulated(Mesh(tp=2), lambda c: c.reduce_scatter(inputs[c.rank], ("tp",), 1).wait())
    assert same(got[1], (inputs[0] + inputs[1])[:, 3:].contiguous()) and got[1].is_contiguous()


def test_one_at_a_time_and_always_in_the_same_order() -> None:
    def trace() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        running = threading.Lock()

        def rank(comm: SimComm) -> None:
            for step in range(3):
                assert running.acquire(blocking=False)  # nobody else is between two waits
                time.sleep(0.001)
                seen.append((comm.rank, step))
                running.release()
                comm.all_reduce(torch.ones(1), ("dp",) if step == 1 else ("tp",)).wait()

        run_simulated(Mesh(dp=2, tp=2), rank)
        return seen

    assert trace() == trace()


def test_64_ranks() -> None:
    def rank(comm: SimComm) -> float:
        total = comm.all_reduce(torch.tensor([1.0]), ("pp", "dp", "tp")).wait()
        part = comm.all_gather(total + comm.coords["tp"], ("tp",)).wait()
        comm.barrier()
        return float(part.sum())

    assert run_simulated(Mesh(pp=4, dp=4, tp=4), rank) == [4 * 64 + 6.0] * 64


def test_exchange_gives_copies_by_rank() -> None:
    def rank(comm: SimComm) -> list[dict[str, int]]:
        got = comm.exchange({"rank": comm.rank})
        got[0]["rank"] += 100 * comm.rank
        comm.barrier()
        return got

    for me, got in enumerate(run_simulated(Mesh(dp=3), rank)):
        assert [g["rank"] for g in got] == [100 * me, 1, 2]


def test_gradient_history_is_left_behind() -> None:
    def rank(comm: SimComm) -> bool:
        x = torch.ones(2, 2, requires_grad=True)
        return any(h.wait().requires_grad for h in (comm.all_reduce(x, ("tp",)), comm.all_gather(x * 2, ("tp",))))

    assert run_simulated(Mesh(tp=2), rank) == [False, False]
    assert run_simulated(Mesh(), rank) == [False]


# -- what goes wrong


def test_mismatch_names_both() -> None:
    def rank(comm: SimComm) -> None:
        if comm.rank == 1:
            comm.all_gather(torch.ones(3), ("tp",), site="second").wait()
        else:
            comm.all_reduce(torch.ones(2), ("tp",), site="first").wait()

    with pytest.raises(CommError, match="disagree") as raised:
        run_simulated(Mesh(tp=2), rank)
    assert "rank 0 started all_reduce over (tp) at first, float32[2], op sum" in str(raised.value)
    assert "rank 1 started all_gather over (tp) at second, float32[3], dim 0" in str(raised.value)


@pytest.mark.parametrize("what", ["dtype", "shape", "site", "op", "dim", "axes"])
def test_mismatch_of_any_part(what: str) -> None:
    def rank(comm: SimComm) -> None:
        other = comm.rank == 3
        x = torch.ones((2, 4) if other and what == "shape" else (4, 4), dtype=torch.int64 if other and what == "dtype" else torch.float32)
        axes = ("tp", "dp") if other and what == "axes" else ("dp", "tp")
        site, op = ("b" if other and what == "site" else "a"), ("max" if other and what == "op" else "sum")
        comm.reduce_scatter(x, axes, 1 if other and what == "dim" else 0, op, site=site).wait()

    with pytest.raises(CommError, match="(?s)rank 0 started .*rank 3 started"):
        run_simulated(
            Mesh(dp=2, tp=2), rank if what != "shape" else lambda c: c.all_reduce(torch.ones(2 + (c.rank == 3)), ("dp", "tp")).wait()
        )


def test_deadlock_lists_every_rank() -> None:
    def rank(comm: SimComm) -> None:
        first, second = (("dp",), ("tp",)) if comm.rank in (0, 3) else (("tp",), ("dp",))
        comm.all_reduce(torch.ones(2), first, site="one").wait()
        comm.all_reduce(torch.ones(2), second, site="two").wait()

    with pytest.raises(CommError, match="deadlock") as raised:
        run_simulated(Mesh(dp=2, tp=2), rank)
    for me in range(4):
        assert f"rank {me}: waits in all_reduce over ({'dp' if me in (0, 3) else 'tp'}) at one" in str(raised.value)


def test_deadlock_with_a_rank_that_finished() -> None:
    with pytest.raises(CommError, match="(?s)deadlock.*rank 0: finished.*rank 1: waits in exchange at end"):
        run_simulated(Mesh(dp=2), lambda comm: comm.exchange(1, site="end") if comm.rank else None)


def test_raising_rank_stops_all() -> None:
    unwound = []

    def rank(comm: SimComm) -> None:
        try:
            comm.barrier()
            if comm.rank == 2:
                raise KeyError("mine")
            comm.barrier()
        finally:
            unwound.append(comm.rank)

    with pytest.raises(KeyError, match="mine") as raised:
        run_simulated(Mesh(dp=4), rank)
    assert "simulated rank 2 {'dp': 2}" in raised.value.__notes__[0]
    assert sorted(unwound) == [0, 1, 2, 3]


def test_timeout_tells_positions() -> None:
    release = threading.Event()
    with pytest.raises(CommError, match="(?s)longer than 0.2 s.*rank 0: running.*rank 1: not begun"):
        run_simulated(Mesh(dp=2), lambda comm: release.wait(10), timeout=0.2)
    release.set()


def test_modified_input_is_an_error() -> None:
    def rank(comm: SimComm) -> None:
        x = torch.ones(3)
        handle = comm.all_reduce(x, ("dp",), site="grad")
        x.add_(1)
        handle.wait()

    with pytest.raises(CommError, match="modified between start and wait"):
        run_simulated(Mesh(dp=2), rank)


def test_planted_fault() -> None:
    class Wrong(SimComm):
        def _reduce(self, parts, op, out):  # type: ignore[no-untyped-def]
            return super()._reduce(list(parts[:-1]) + [parts[-1] * 2] if self.rank == 1 else parts, op, out)

    got = run_simulated(Mesh(dp=2), lambda comm: comm.all_reduce(torch.ones(1), ("dp",)).wait().item(), make=Wrong)
    assert got == [2.0, 3.0]


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (lambda c: c.all_reduce(torch.ones(2), ("dp",), "mean"), "unknown op 'mean'"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.bool), ("dp",)), "bools have no sum"),
        (lambda c: c.reduce_scatter(torch.ones(3), ("dp",)), "does not divide"),
        (lambda c: c.all_gather(torch.ones(3), ("dp",), 1), "dim 1 does not exist"),
        (lambda c: c.all_gather(torch.ones(3), ("dp",), out=torch.ones(3)), "out must be"),
        (lambda c: c.all_gather(torch.ones(3), ("dp", "dp")), "named twice"),
    ],
)
def test_wrong_arguments(start, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CommError, match=text):
        run_simulated(Mesh(dp=2), start)
