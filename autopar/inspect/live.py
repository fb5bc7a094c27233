"""Measuring what ``codegen/live.py`` predicts: the bytes of tensors that are alive on a rank while a step runs, by real allocations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.codegen.live import Storages
from autopar.compiler import Compiled
from autopar.layout.mesh import Mesh
from autopar.programs import Options
from autopar.runtime.comm import Call
from autopar.runtime.executor import Executable
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.sim import SimComm, SimWorld, run_simulated
from autopar.step import Step

#: how the emitter names segments.
_SEGMENT = re.compile(r"_(forward|backward)_\d+$")
#: the phases of a stage's tasks.
_TASKS = {"pre": "forward", "F": "forward"}


class Tracker(Storages):
    """Bytes alive by phase: each phase's most, beside what existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "before"
        self.peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """A phase begins; what is alive belongs to both."""
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.most)
        self.phase, self.most = phase, self.bytes

    def marked(self, function: Callable[..., Any], before: str, after: str = "") -> Callable[..., Any]:
        """The function, before (and after) which a phase begins."""

        def run(*args: Any) -> Any:
            self.enter(before)
            result = function(*args)
            if after:
                self.enter(after)
            return result

        return run


class TrackedComm(SimComm):
    """A simulated rank with a tracker, which sees what a real transport needs too: the result, from the start on."""

    def __init__(self, world: SimWorld, rank: int, device: torch.device | str | None = None) -> None:
        super().__init__(world, rank, device)
        self.tracker = Tracker()

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What only the simulation needs (copies of all inputs) isn't counted."""

        def run(*args: Any) -> Any:
            self.tracker.quiet = True
            try:
                return function(*args)
            finally:
                self.tracker.quiet = False

        return run

    def give(self, x: Tensor) -> None:
        """Nothing is kept for the next taker: what is taken is alive as long as the program holds it."""

    def _begin(self, call: Call) -> Callable[[], Tensor]:
        if call.out is None:
            call.out = call.result()
        return self._unseen(self._unseen(super()._begin)(call))

    def _begin_send(self, x: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        return self._unseen(self._unseen(super()._begin_send)(x, peer, channel, site))

    def _begin_receive(self, out: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        return self._unseen(self._unseen(super()._begin_receive)(out, peer, channel, site))


@dataclass(frozen=True)
class Measured:
    """What a rank held in a step.

    Attributes:
        kept: bytes between steps by kind: parameters, gradients, optimizer state, buffers.
        peaks: the most bytes of further tensors by phase: forward, backward, update.
        left: bytes of them that the step's results are.
    """

    kept: Mapping[str, int]
    peaks: Mapping[str, int]
    left: int


@contextmanager
def tracked(run: Executable | Pipeline, tracker: Tracker) -> Iterator[None]:
    """Inside, the tracker sees what this thread allocates and in which phase of a step; the module's text stays as it is."""
    spaces = [run.names] if isinstance(run, Executable) else [s.names for s in run.stages.values()]
    before = [dict(names) for names in spaces]
    if isinstance(run, Executable):
        for name, function in before[0].items():
            if (match := _SEGMENT.search(name)) is not None:
                run.names[name] = tracker.marked(function, match.group(1))
        run.names["step"] = tracker.marked(run.names["step"], "forward", "update")
    else:
        for stage in run.stages.values():
            for kind, task in stage.spec.tasks.items():
                stage.names[task.function] = tracker.marked(stage.names[task.function], _TASKS.get(kind, "backward"))
    try:
        with tracker:
            yield
    finally:
        tracker.enter("after")
        for names, held in zip(spaces, before, strict=True):
            names.update(held)


def measure(
    model: nn.Module, mesh: Mesh, batch: Any, options: Options, *, share: dict[Any, Compiled] | None = None,
    change: Callable[[str], str] | None = None,
) -> list[Measured]:  # fmt: skip
    """Runs two steps on simulated ranks and measures the second, by rank: in the first, buffers and optimizer state are made.

    Args:
        batch: the global batch.
        share: takes what was compiled.
        change: of the emitted text, to plant a fault.
    """
    share = {} if share is None else share

    def rank(comm: TrackedComm) -> Measured:
        step, tracker = Step(model, mesh, comm, options, share), comm.tracker
        rows = step.shard(batch)
        step(rows)
        run = step.executable()
        if change is not None and isinstance(run, Executable):
            (compiled,) = share.values()
            run.names = Executable(change(run.source), run.spec, comm, compiled.final.consts).names
        with tracked(run, tracker):
            loss = step(rows)
        left = tracker.bytes
        del loss
        kept = {kind: sum(t.untyped_storage().nbytes() for t in held) for kind, held in step.tensors().items()}
        return Measured(kept, {p: tracker.peaks.get(p, 0) for p in ("forward", "backward", "update")}, left)

    return run_simulated(mesh, rank, make=TrackedComm)


__all__ = ["Measured", "TrackedComm", "Tracker", "measure", "tracked"]
