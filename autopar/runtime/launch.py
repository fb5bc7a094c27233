"""Starting ranks and reading who this process is. The only place that reads environment variables: those of torch's own launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, InputError
from autopar.layout.mesh import Mesh
from autopar.runtime.watch import report_end

T = TypeVar("T")

#: seconds that workers get to end by themselves once one has failed, before they are killed.
_GRACE = 5


@dataclass(frozen=True)
class Launch:
    """Who this process is and what ``init`` has set. ``backend`` is empty without a process group; ``threads`` are of torch's CPU ops."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: str
    backend: str
    threads: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} on {self.device}, backend {self.backend or 'none'}, {self.threads} threads"


def init(mesh: Mesh | None = None, backend: str | None = None, *, timeout: float = 600.0) -> Launch:
    """Joins the process group that torch's launcher describes (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    A world of one needs no launcher and gets no process group. An existing process group is kept. The CPU threads of torch are set to the
    cores divided by the ranks of this host, unless OMP_NUM_THREADS says otherwise.

    Args:
        mesh: checked against the number of processes; its ``device`` ("cpu", "cuda") chooses where tensors live, "cpu" if it has none.
        backend: default gloo for cpu, nccl for cuda.
        timeout: seconds after which a message that doesn't come is an error.

    Raises:
        InputError: the mesh has another number of ranks than were launched.
    """
    ready = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if ready else int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if mesh is not None and mesh.size != world:
        raise InputError(
            f"the mesh {mesh} has {mesh.size} ranks, but {world} {'process was' if world == 1 else 'processes were'} launched",
            hint=f"torchrun --nproc-per-node {mesh.size} …, or autopar.launch(fn, {mesh.size})",
        )
    kind = torch.device((mesh.device if mesh is not None else None) or ("cuda" if backend == "nccl" else "cpu")).type
    device = kind
    if kind == "cuda":
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(local_rank)
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, _cores() // local_world))
    if world > 1 and not ready:
        dist.init_process_group(backend or ("nccl" if kind == "cuda" else "gloo"), timeout=timedelta(seconds=timeout))
    return Launch(rank, world, local_rank, local_world, device, dist.get_backend() if world > 1 else "", torch.get_num_threads())


def launch(fn: Callable[..., T], nproc: int, *args: Any) -> list[T]:
    """Runs ``fn(*args)`` in ``nproc`` processes of this host, through torch's elastic launcher, and returns the results by rank.

    ``fn``, ``args`` and results must be picklable (``fn`` defined in a module, not in a function). In a process that a launcher has started
    already (``torchrun``), ``fn`` runs in place and the list has its one result.

    Raises:
        AutoparError: a worker failed: its rank and original error text. The others are ended, within seconds.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return [fn(*args)]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="autopar",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: any free one
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_GRACE,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        results = elastic_launch(config, _call)(fn, *args)
    except ChildFailedError as failed:
        rank, text, trace = _first_failure(failed)
        # an error of autopar says itself where and why; of another one the last calls are enough to find it
        kinds: list[type[AutoparError]] = [AutoparError, *AutoparError.__subclasses__()]
        known = text.split(":", 1)[0].rpartition(".")[2] in {k.__name__ for k in kinds}
        raise AutoparError(f"rank {rank} of {nproc} failed: {text}", why="" if known else "\n".join(trace.splitlines()[-9:])) from None
    return [results[rank] for rank in range(nproc)]


def _call(fn: Callable[..., T], *args: Any) -> T:
    """What the launcher runs: it wants a function with a name, which a ``functools.partial`` hasn't."""
    try:
        return fn(*args)
    except BaseException as error:
        report_end(error)  # the launcher catches it: the interpreter won't see an error that nobody caught
        raise


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_failure(failed: Any) -> tuple[int, str, str]:
    """Rank, error text and traceback of the worker that failed first.

    Peers of a failed rank lose their connection and fail too, in the same second, which is all that time stamps tell: so an error that is
    not about communication or a signal from the launcher comes first.
    """

    def told(failure: Any) -> tuple[str, str]:
        message = failure.message
        if isinstance(message, dict):
            return str(message.get("message", "")), str(message.get("extraInfo", {}).get("py_callstack", ""))
        return str(message), ""

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode == -15, told(failure)[0].startswith("CommError"), failure.timestamp, rank

    rank, failure = min(failed.failures.items(), key=order)
    text, trace = told(failure)
    return rank, text, trace
