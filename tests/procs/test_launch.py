"""Launching local workers through torch's own launcher."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.layout.mesh import Mesh
from autopar.runtime.comm import DistComm
from autopar.runtime.launch import init, launch

pytestmark = pytest.mark.procs


def add_up(scale: int) -> tuple[str, float, list[int]]:
    mesh = Mesh(dp=2)
    setup = init(mesh)
    comm = DistComm(mesh)
    total = comm.all_reduce(torch.full((2,), float(scale * (setup.rank + 1))), ("dp",)).wait()
    inner = launch(int, 5, "7")  # under a launcher it runs in place
    comm.close()
    dist.destroy_process_group()
    return str(setup), total[0].item(), inner


def test_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(add_up, 2, 10) == [(f"rank {rank} of 2 on cpu, backend gloo, 1 threads", 30.0, [7]) for rank in range(2)]


def fails(how: str) -> None:
    mesh = Mesh(dp=2)
    rank = init(mesh).rank
    comm = DistComm(mesh)
    comm.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("planted on one rank")
    if how == "asleep":
        time.sleep(100)
    comm.all_reduce(torch.ones(4), ("dp",), site="somewhere").wait()


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "ValueError: planted on one rank"), ("asleep", "ValueError: planted"), ("kill", "SIGKILL")]
)
def test_failure_of_one_ends_all(how: str, text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(AutoparError, match=f"rank 1 of 2 failed: .*{text}"):
        launch(fails, 2, how)
    assert time.monotonic() - begun < 30


def test_wrong_mesh() -> None:
    with pytest.raises(AutoparError, match="the mesh dp=2 has 2 ranks, but 1 process was launched"):
        launch(fails, 1, "raise")
