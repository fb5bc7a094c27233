"""A pool of real gloo processes, started once per test session and number of ranks."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class PoolError(AssertionError):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: a value, or in ``error`` its traceback or the way it died."""

    value: Any = None
    error: str = ""


def _serve(rank: int, size: int, folder: str, conn: Connection) -> None:
    """A worker: joins the process group, then runs what it is sent until told to stop."""
    import torch
    import torch.distributed as dist

    stacks = open(Path(folder) / f"stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    conn.send(Outcome("ready"))
    while (job := conn.recv()) is not None:
        module, name, args = job
        try:
            conn.send(Outcome(getattr(importlib.import_module(module), name)(*args)))
        except Exception:  # noqa: BLE001 (told to the test)
            conn.send(Outcome(error=traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """``size`` processes with a gloo process group. Started at first use, and again after any failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._conns: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """``fn(*args)`` on every rank; the results by rank.

        ``fn`` is a function of a module's top level, args and results are picklable; the process group is up.

        Raises:
            PoolError: with every failed rank's traceback, or after ``timeout`` seconds every rank's stack.
        """
        outcomes = self.outcomes(fn, *args, timeout=timeout)
        if any(o.error for o in outcomes):
            raise PoolError("\n".join(f"rank {rank} of {self.size}: {o.error}" for rank, o in enumerate(outcomes) if o.error))
        return [o.value for o in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, patience: float = 10.0) -> list[Outcome]:
        """As ``run``, but failures are returned. After the first one the other ranks get ``patience`` seconds."""
        self._start()
        for conn in self._conns:
            conn.send((fn.__module__, fn.__name__, args))
        outcomes, late = self._collect(timeout, patience)
        if late or any(o.error for o in outcomes.values()):
            self.stop()  # the process group can't be trusted any more
        return [outcomes[rank] for rank in range(self.size)]

    def _collect(self, timeout: float, patience: float) -> tuple[dict[int, Outcome], bool]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = [rank for rank in range(self.size) if rank not in outcomes]
            ready = wait([self._conns[rank] for rank in waiting], max(0.0, end - time.monotonic()))
            answered = [rank for rank in waiting if self._conns[rank] in ready]
            if not answered:
                stacks = self._stacks()
                for rank in waiting:
                    outcomes[rank] = Outcome(error=f"no answer in time\n{stacks[rank]}")
                if not any("Traceback" in o.error for o in outcomes.values()):
                    print("\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(stacks)), file=sys.stderr)
                return outcomes, True
            for rank in answered:
                try:
                    outcomes[rank] = self._conns[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    outcomes[rank] = Outcome(error=f"process ended with exit code {self._processes[rank].exitcode}")
                if outcomes[rank].error:
                    end = min(end, time.monotonic() + patience)
        return outcomes, False

    def _stacks(self) -> list[str]:
        """Every rank's Python stacks, all threads."""
        assert self._folder is not None
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return [(Path(self._folder.name) / f"stack{rank}").read_text() for rank in range(self.size)]

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._conns.append(ours)
        outcomes, late = self._collect(120.0, 10.0)
        if late or any(o.error for o in outcomes.values()):
            self.stop()
            raise PoolError(f"the pool of {self.size} did not start: {outcomes}")

    def stop(self) -> None:
        """Ends the processes: those that listen by a message, the others by a kill."""
        for conn in self._conns:
            try:
                conn.send(None)
            except OSError:
                pass
        end = time.monotonic() + 3.0
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for conn in self._conns:
            conn.close()
        self._processes, self._conns = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
