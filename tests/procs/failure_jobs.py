"""Ranks that fail in every way, for ``test_failures``. As a script: ``failure_jobs.py KIND MESH``, under a launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.errors import InputError
from autopar.layout.mesh import Mesh
from autopar.step import Step

#: the rank that fails, and the step at which it does.
VICTIM, AT, STEPS = 1, 2, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.l(self.e(ids)), y)


def made(mesh: str, **options: Any) -> Step:
    torch.manual_seed(0)
    return parallelize(Model(), Mesh.parse(mesh), optimizer=lambda n: torch.optim.SGD([p for _, p in n], lr=0.1), **options)


def batches(kind: str, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(STEPS):
        if rank == VICTIM and number == AT:
            if kind == "loader":
                raise ValueError("planted in the loader")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(9)
            if kind == "slow":
                time.sleep(3)
            if kind == "skip":
                continue
            if kind == "exit":
                return
        yield torch.arange(8), torch.arange(8).flip(0)


def break_op(step: Step, kind: str) -> None:
    """The next collective of one phase raises on this rank, as an op before it might."""
    comm, count = step._comm, [0]
    whole = {name: getattr(comm, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive")}

    def failing(name: str, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if kind == "forward" or count[0] > 1:
            raise ValueError(f"planted in {kind}")
        return whole[name](*args, **kwargs)

    for name in whole:
        setattr(comm, name, partial(failing, name))


def train(kind: str, mesh: str, **options: Any) -> list[float]:
    step, rank = made(mesh, **options), dist.get_rank()
    losses = []
    try:
        for batch in batches(kind, rank):
            if kind in ("forward", "backward") and rank == VICTIM and len(losses) == AT:
                break_op(step, kind)
            losses.append(float(step(step.shard(batch))))
            if kind == "between" and rank == VICTIM and len(losses) == AT:
                raise ValueError("planted between steps")
        return losses
    finally:
        if kind != "loader":  # its error is told as the process ends
            step.close()


def outcome(kind: str, mesh: str, options: dict[str, Any]) -> tuple[str, str, float]:
    """Kind and text of what a rank got, and after how many seconds."""
    begun = time.monotonic()
    try:
        return "losses", str(train(kind, mesh, **options)), time.monotonic() - begun
    except Exception as error:  # noqa: BLE001 (told to the test)
        return type(error).__name__, str(error), time.monotonic() - begun


def bad_input() -> list[str]:
    """What ranks say to meshes and rows that can't be, between steps that work."""
    said, rank = [], dist.get_rank()
    step = made("dp=2")
    rows = step.shard((torch.arange(8), torch.arange(8).flip(0)))
    for mesh in ("dp=4", ("dp=2", "tp=2")[rank]):
        try:
            made(mesh)
        except InputError as error:
            said.append(str(error))
        said.append(str(float(step(rows))))
    for changed in (rows[0] + 16, rows[0][:, None]):
        try:
            step((changed if rank == VICTIM else rows[0], rows[1]))
        except InputError as error:
            said.append(str(error))
        said.append(str(float(step(rows))))
    step.close()
    return said


def worker(kind: str, mesh: str) -> list[float]:
    """For ``autopar.launch``."""
    return train(kind, mesh, timeout=4.0 if kind == "hang" else None)


if __name__ == "__main__":
    worker(*sys.argv[1:])
