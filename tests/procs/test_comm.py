"""The collectives between real processes: results, order of sums, bytes, overlap, and ranks that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from autopar.errors import CommError
from autopar.layout.mesh import Mesh
from autopar.layout.traffic import SMALL_ALL_REDUCE, bytes_sent
from autopar.runtime.comm import DistComm, Record
from tests.procs.pool import Pool, PoolError
from tests.runtime.formulas import MESHES, SHAPE, call, cases, expected, same, tensor

pytestmark = pytest.mark.procs
Pools = Callable[[int], Pool]

#: sizes of 1-D float64 inputs: one round, the border, two rounds, odd, empty pieces at the end.
SIZES = [0, 1, 3, SMALL_ALL_REDUCE // 8, SMALL_ALL_REDUCE // 8 + 1, 1001, 4096]


def all_cases(text: str, direct: bool | None, every_dtype: bool) -> list[str]:
    """Every case against its formula; the failures."""
    mesh, wrong = Mesh.parse(text), []
    comm = DistComm(mesh, direct=direct)
    comm.prepare(MESHES[text])
    for axes in MESHES[text]:
        for kind, dims, op, dtype in cases(every_dtype):
            if direct is False and (dtype == torch.bool or (dtype in (torch.bfloat16, torch.float16) and op == "sum")):
                continue  # the backend's own rounding, and no bools there
            inputs = [tensor(rank, SHAPE, dtype) for rank in range(mesh.size)]
            got = call(comm, kind, inputs[comm.rank], axes, dims, op)
            want = expected(kind, inputs, mesh, comm.rank, axes, dims, op)
            if not (same(got, want) if direct is not False else got.is_contiguous() and torch.allclose(got, want, rtol=1e-5)):
                wrong.append(f"{axes} {kind} {dims} {op} {dtype}")
    comm.close()
    return wrong


@pytest.mark.parametrize("text", ["dp=2", "dp=2,tp=2", "tp=4"])
def test_formula(procs: Pools, text: str) -> None:
    size = Mesh.parse(text).size
    assert procs(size).run(all_cases, text, None, text == "dp=2") == [[]] * size


def test_backends_own_collectives(procs: Pools) -> None:
    assert procs(4).run(all_cases, "dp=2,tp=2", False, False) == [[]] * 4


def odd_sizes(ranks: int) -> tuple[list[Record], list[list[float]], list[str]]:
    """Collectives of many sizes, all started before the first wait; records, all-reduce results and what is wrong."""
    mesh = Mesh(tp=ranks)
    comm = DistComm(mesh)
    handles, wants, wrong = [], [], []
    for size in SIZES:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            numel = size if kind in ("all_reduce", "all_gather") else size * ranks
            inputs = [tensor(rank, (numel,), torch.float64, size) for rank in range(ranks)]
            start = getattr(comm, kind)
            handles.append(start(inputs[comm.rank], ("tp",), *((0, 0) if kind == "all_to_all" else ()), site=f"{kind} {numel}"))
            wants.append(expected(kind, inputs, mesh, comm.rank, ("tp",), (0, 0), "sum"))
    for at in reversed(range(len(handles))):
        if not same(handles[at].wait(), wants[at]):
            wrong.append(f"collective {at}")
    sums = [h.wait().tolist() for h in handles[::4]]
    records = comm.take_records()
    comm.close()
    return records, sums, wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_order_and_bits(procs: Pools, ranks: int) -> None:
    results = procs(ranks).run(odd_sizes, ranks)
    for rank, (records, sums, wrong) in enumerate(results):
        assert wrong == []
        assert sums == results[0][1]
        assert len(records) == 4 * len(SIZES)
        for record in records:
            kind, numel = record.site.split()
            assert record.bytes == bytes_sent(kind, int(numel), 8, ranks, rank), record
            assert record.seconds_start > 0 and record.seconds_wait_exposed > 0


def aliasing_and_laziness() -> None:
    """In-place gathers and scatters, and groups that were not prepared."""
    comm = DistComm(Mesh(dp=2, tp=2))
    me = comm.coords["tp"]
    whole = torch.zeros(4, 3)
    mine = whole[2 * me : 2 * me + 2]
    mine.fill_(me + 1.0)
    assert comm.all_gather(mine, ("tp",), out=whole).wait() is whole
    assert whole[:, 0].tolist() == [1, 1, 2, 2]
    assert comm.reduce_scatter(whole, ("tp",), out=mine).wait() is mine
    assert mine.tolist() == [[2.0 * (me + 1)] * 3] * 2
    # the own piece of x is overwritten by the sum of four parts, at every place of the group
    x = torch.arange(4.0) + comm.rank
    own = x[comm.rank : comm.rank + 1]
    comm.reduce_scatter(x, ("dp", "tp"), out=own).wait()
    assert own.item() == 4 * comm.rank + 6
    for size in (4, 5000):
        x = torch.full((size,), comm.rank + 1.0)
        assert comm.all_reduce(x, ("dp", "tp"), out=x).wait() is x and x.unique().tolist() == [10.0]
    with torch.inference_mode():  # the helper thread writes results made in this mode
        assert comm.all_reduce(torch.ones(5000), ("dp",)).wait().sum() == 10000
    assert comm.exchange(comm.rank) == [0, 1, 2, 3]
    try:
        comm.prepare([("dp",)] if comm.rank else [("tp",)])
    except CommError as error:
        assert "prepare different groups" in str(error)
    else:
        raise AssertionError("not noticed")
    comm.close()


def test_aliasing_and_laziness(procs: Pools) -> None:
    procs(4).run(aliasing_and_laziness)


def second_round_while_computing() -> float:
    """Rank 0 waits for a two-round all-reduce while rank 1 is busy: seconds that rank 0 waited."""
    comm = DistComm(Mesh(dp=2))
    comm.all_reduce(torch.ones(5000), ("dp",)).wait()
    comm.barrier()
    handle = comm.all_reduce(torch.ones(5000), ("dp",))
    if comm.rank == 1:
        time.sleep(1.5)
    begun = time.perf_counter()
    handle.wait()
    took = time.perf_counter() - begun
    comm.barrier()
    comm.close()
    return took


def test_second_round_needs_no_wait(procs: Pools) -> None:
    assert procs(2).run(second_round_while_computing)[0] < 1.0


def two_comms_on_a_subgroup() -> list[float]:
    """Two comms with two-round collectives under way at once, on half of the processes."""
    half = torch.distributed.new_group([1, 3])
    if torch.distributed.get_rank() not in (1, 3):
        return []
    mesh = Mesh(tp=2)
    one, two = DistComm(mesh, half), DistComm(mesh, half)
    handles = [comm.all_reduce(torch.full((5000,), value), ("tp",)) for value in (1.0, 2.0, 3.0) for comm in (one, two)]
    assert one.exchange("a") == ["a", "a"]
    sums = [float(handle.wait().unique()) for handle in handles]
    one.close()
    two.close()
    return sums


def test_two_comms_on_a_subgroup(procs: Pools) -> None:
    sums = [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    assert procs(4).run(two_comms_on_a_subgroup) == [[], sums, [], sums]


# -- ranks that die


def killed_rank(kind: str, victim: int) -> tuple[str, float]:
    """One rank is killed; what the others get, and after how long."""
    comm = DistComm(Mesh(dp=2, tp=2))
    comm.prepare([("dp",), ("tp",), ("dp", "tp")])
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    try:
        for _ in range(3):
            if kind == "exchange":
                comm.barrier(site="here")
            else:
                call(comm, kind, torch.ones(1024, 2), ("dp", "tp"), (0, 0), "sum")
    except CommError as error:
        took = time.perf_counter() - begun
        try:
            comm.all_reduce(torch.ones(1), ("tp",))
        except CommError as again:
            assert "failed before" in str(again)
            return str(error), took
    return "no error", 0.0


@pytest.mark.parametrize("kind", ["all_reduce", "exchange"])
def test_killed_rank(procs: Pools, kind: str) -> None:
    outcomes = procs(4).outcomes(killed_rank, kind, 2, patience=30.0)
    assert outcomes[2].error == "process ended with exit code -9"
    for rank in (0, 1, 3):
        assert not outcomes[rank].error, outcomes[rank].error
        text, took = outcomes[rank].value
        assert took < 30
        assert text.startswith("rank 2 failed first: its process ended without a word")
        assert f"rank {rank} can't go on" in text and "its ranks are [0, 1, 2, 3]" in text and "RuntimeError" in text


# -- the pool itself


def hangs() -> None:
    time.sleep(60)


def raises(rank: int) -> int:
    if torch.distributed.get_rank() == rank:
        raise ValueError("planted")
    return rank


def test_pool_reports_hangs_and_errors() -> None:
    pool = Pool(2)
    with pytest.raises(PoolError, match="(?s)rank 0 of 2: no answer.*in hangs.*rank 1 of 2: no answer.*in hangs"):
        pool.run(hangs, timeout=10.0)  # importing pytest comes first
    with pytest.raises(PoolError, match="(?s)rank 1 of 2: Traceback.*ValueError: planted"):
        pool.run(raises, 1)
    assert pool.run(raises, 7) == [7, 7]
    pool.stop()
