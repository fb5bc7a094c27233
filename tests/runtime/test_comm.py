"""A world of one, and what needs no processes."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import CommError
from autopar.layout.mesh import Mesh
from autopar.runtime.comm import DistComm
from autopar.runtime.launch import init
from autopar.runtime.sim import run_simulated
from tests.runtime.formulas import SHAPE, call, cases, same, tensor


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=1)])
def test_world_of_one_needs_no_process_group(mesh: Mesh) -> None:
    comm = DistComm(mesh)
    comm.prepare([("tp",), ("dp", "tp")])
    for kind, dims, op, dtype in cases():
        x = tensor(0, SHAPE, dtype)
        value = call(comm, kind, x, ("tp",), dims, op)
        assert same(value, x) and value.data_ptr() != x.data_ptr()
        assert same(value, run_simulated(mesh, lambda c: call(c, kind, x, ("tp",), dims, op))[0])  # noqa: B023
    out = torch.empty(3)
    assert comm.all_gather(torch.ones(3), ("tp",), out=out).wait() is out
    assert comm.exchange("me") == ["me"]
    comm.barrier()
    assert comm.take_records() == []
    comm.close()


def test_more_ranks_need_a_process_group() -> None:
    with pytest.raises(CommError, match="no process group"):
        DistComm(Mesh(tp=2))


def test_init_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    got = init(Mesh(dp=1))
    assert (got.rank, got.world, got.device, got.backend) == (0, 1, "cpu", "") and got.threads == torch.get_num_threads()
    assert str(got).startswith("rank 0 of 1 on cpu")
