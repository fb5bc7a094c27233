"""Timing the generated code: by phase, by collective, and beside the plain model in the same run."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

from autopar.capture import find_loss
from autopar.capture.tree import take_batch
from autopar.errors import InputError, UnsupportedError
from autopar.runtime.comm import Record
from autopar.runtime.executor import Executable
from autopar.step import Step

Phase = tuple[str, str]
Site = tuple[str, tuple[str, ...], str, int]

#: how the emitter names segments.
_SEGMENT = re.compile(r"_(forward|backward)_\d+$")


def regions_of_calls(source: str, segments: Sequence[str]) -> tuple[int, int, int]:
    """How many segments the driver of a module calls before its loop over microbatches, in all turns of it, and after it.

    A module without the loop has all its calls in the second place.
    """
    counts, place, looped = [0, 0, 0], 0, False
    (driver,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "step"]

    def calls(node: ast.AST) -> int:
        return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in segments for n in ast.walk(node))

    for statement in driver.body:
        if isinstance(statement, ast.For):
            assert isinstance(statement.iter, ast.Call)
            counts[1], place, looped = calls(statement) * ast.literal_eval(statement.iter.args[0]), 2, True
        else:
            counts[place] += calls(statement)
    return (counts[0], counts[1], counts[2]) if looped else (0, counts[0], 0)


class SegmentClock:
    """Times the segments of a loaded module by phase (forward, backward) and region (pre, body, post), its text left as it is.

    Inside ``with clock:`` every segment is wrapped; ``take`` gives the seconds since the last ``take``.
    """

    def __init__(self, run: Executable) -> None:
        self._run = run
        self._segments = {name: fn for name, fn in run.names.items() if _SEGMENT.search(name) and callable(fn)}
        pre, body, _ = regions_of_calls(run.source, list(self._segments))
        self._ends = (pre, pre + body)
        self._count = 0
        self._seconds: dict[Phase, float] = {}
        self._cuda = run.comm.device.type == "cuda"

    def __enter__(self) -> SegmentClock:
        for name, fn in self._segments.items():
            match = _SEGMENT.search(name)
            assert match is not None
            self._run.names[name] = self._wrapped(fn, match.group(1))
        return self

    def __exit__(self, *error: Any) -> None:
        self._run.names.update(self._segments)

    def take(self) -> dict[Phase, float]:
        """Seconds of a step by (phase, region)."""
        taken, self._seconds, self._count = self._seconds, {}, 0
        return taken

    def _wrapped(self, fn: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = self._now()
            result = fn(*args)
            region = "pre" if self._count < self._ends[0] else "body" if self._count < self._ends[1] else "post"
            self._count += 1
            self._seconds[phase, region] = self._seconds.get((phase, region), 0.0) + self._now() - begun
            return result

        return timed

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class StepTimes:
    """One timed step of this rank: seconds."""

    total: float
    phases: dict[Phase, float]
    optimizer: float
    comm: list[Record]

    @property
    def exposed(self) -> float:
        """Seconds in which the program started collectives or waited for them."""
        return sum(r.seconds_start + r.seconds_wait_exposed for r in self.comm)


@dataclass
class Bench:
    """What a run of blocks gave: the generated step and the plain model, in turn. Seconds are of rank 0."""

    mesh: str
    ranks: int
    threads: int
    plain_threads: int
    backend: str
    steps: list[list[StepTimes]] = field(default_factory=list)
    plain: list[list[float]] = field(default_factory=list)

    def step_s(self) -> float:
        """Median seconds of a generated step."""
        return median(s.total for block in self.steps for s in block)

    def plain_s(self) -> float:
        """Median seconds of a plain step."""
        return median(s for block in self.plain for s in block)

    def ratios(self) -> list[float]:
        """Plain over generated, one a pair of neighbouring blocks: over 1 the generated step is faster."""
        return [median(p) / median(s.total for s in g) for g, p in zip(self.steps, self.plain, strict=True)]

    def phases(self) -> dict[str, tuple[float, float]]:
        """Median and least seconds by phase; the phases of a step in order, then what is left of it."""
        steps = [s for block in self.steps for s in block]
        keys = {k for s in steps for k in s.phases}
        order = sorted(keys, key=lambda k: (("pre", "body", "post").index(k[1]), k[0] == "backward"))
        looped = any(region != "body" for _, region in keys)
        found = {
            f"{phase}{', ' + region if looped else ''}": [s.phases.get((phase, region), 0.0) for s in steps] for phase, region in order
        }
        found["collectives (start and exposed wait)"] = [s.exposed for s in steps]
        found["optimizer"] = [s.optimizer for s in steps]
        found["driver and the rest"] = [s.total - sum(s.phases.values()) - s.exposed - s.optimizer for s in steps]
        return {name: (median(values), min(values)) for name, values in found.items()}

    def collectives(self) -> list[dict[str, Any]]:
        """Each collective of a step: how often, its bytes, and median seconds a step of starting it and of waiting in the open."""
        steps = [_by_site(s.comm) for block in self.steps for s in block]
        rows = []
        for kind, axes, site, size in steps[0]:
            found = [s.get((kind, axes, site, size), []) for s in steps]
            rows.append({
                "kind": kind, "axes": list(axes), "site": site, "times": len(found[0]), "bytes": size,
                "start_s": median(sum(r.seconds_start for r in rs) for rs in found),
                "wait_s": median(sum(r.seconds_wait_exposed for r in rs) for rs in found),
            })  # fmt: skip
        return rows

    def table(self) -> str:
        """Text: the steps beside each other, phases, collectives."""
        ratios, totals = self.ratios(), [s.total for block in self.steps for s in block]
        plain = [s for block in self.plain for s in block]
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows = [
            (f"generated, {self.ranks} rank(s) of {self.threads} thread(s), {self.backend}", _ms(median(totals)), _ms(min(totals)), ""),
            (f"plain model, one process of {self.plain_threads} thread(s)", _ms(median(plain)), _ms(min(plain)), ratio),
        ]
        phases = [(name, _ms(middle), _ms(least)) for name, (middle, least) in self.phases().items()]
        parts = [
            f"mesh {str(self.mesh) or 'of one rank'}: milliseconds of {len(totals)} steps in {len(self.steps)} blocks, plain ones in turn",
            _table(rows, "a step of the global batch", "median", "least", "plain / generated"),
            _table(phases, "phase", "median", "least"),
        ]
        comm = self.collectives()
        if comm:
            table = [
                (c["kind"], "+".join(c["axes"]), c["site"] or "(model)", c["times"], f"{c['bytes']:,}", _ms(c["start_s"]), _ms(c["wait_s"]))
                for c in comm
            ]
            parts.append(_table(table, "collective", "axis", "site", "times", "bytes sent", "start ms", "exposed wait ms"))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "mesh": self.mesh, "ranks": self.ranks, "threads": self.threads, "plain_threads": self.plain_threads, "backend": self.backend,
            "step_s": self.step_s(), "plain_s": self.plain_s(), "ratio": median(self.ratios()), "ratios": self.ratios(),
            "phases_s": {name: {"median": m, "least": n} for name, (m, n) in self.phases().items()}, "collectives": self.collectives(),
            "step_seconds": [[s.total for s in block] for block in self.steps], "plain_seconds": self.plain,
        }  # fmt: skip


def _table(rows: Sequence[Sequence[object]], *headers: str) -> str:
    """Numbers (digits, points and commas) to the right, words to the left."""
    left = [any(re.search(r"[^\d.,]", str(row[n])) or not row[n] for row in rows) for n in range(len(headers))]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=["left" if w else "right" for w in left])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _by_site(records: Sequence[Record]) -> dict[Site, list[Record]]:
    found: dict[Site, list[Record]] = {}
    for r in records:
        found.setdefault((r.kind, r.axes, r.site, r.bytes), []).append(r)
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PlainStep:
    """The plain model's training step in this process, on the global batch."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], loss: Any, backend: str) -> None:
        self._model, self._loss = model, loss
        self._optimizer = optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
        self._call: Any = model if backend == "eager" else torch.compile(model)

    def __call__(self, batch: Any) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        tree, _ = take_batch(batch)
        value = find_loss(self._model, tree.call(self._call, batch), batch, self._loss)
        if value is None:
            raise InputError(f"{type(self._model).__name__} returns no loss to train on")
        value.sum().backward()
        self._optimizer.step()
        return value.detach()


def bench_step(
    step: Step,
    plain: PlainStep | None,
    batch: Any,
    *,
    steps: int,
    blocks: int,
    plain_threads: int,
    backend: str = "eager",
) -> Bench:
    """Times a step on this rank, block by block in turn with the plain model (where it is given: on one rank). Collective.

    Args:
        batch: the global batch, the same in every step.
        steps: in a block.
        plain_threads: of torch's CPU ops while the plain model runs.
    """
    rows = step.shard(batch)
    seconds: list[float] = []
    float(step(rows))  # compiles
    found = Bench(str(step.mesh), step.mesh.size, torch.get_num_threads(), plain_threads, backend)
    run = step.executable()
    if not isinstance(run, Executable):
        raise UnsupportedError("the segments of stages can't be timed one by one yet", hint="step.metrics, or a mesh without pp")
    clock = SegmentClock(run)
    hooks = [
        step.optimizer.register_step_pre_hook(lambda *_: seconds.append(-time.perf_counter())),
        step.optimizer.register_step_post_hook(lambda *_: seconds.append(time.perf_counter())),
    ]

    def meet() -> None:
        if dist.is_initialized() and step.mesh.size > 1:
            dist.barrier()

    def one() -> StepTimes:
        seconds.clear()
        begun = time.perf_counter()
        float(step(rows))
        total = time.perf_counter() - begun
        return StepTimes(total, clock.take(), sum(seconds), step.metrics["records"])

    for warm in (True, *(False,) * blocks):
        count = 1 if warm else steps
        meet()
        with clock:
            times = [one() for _ in range(count)]
        meet()
        plain_times = []
        if plain is not None:
            with _threads(plain_threads):
                for _ in range(count):
                    begun = time.perf_counter()
                    float(plain(batch))
                    plain_times.append(time.perf_counter() - begun)
        if not warm:
            found.steps.append(times)
            found.plain.append(plain_times)
    meet()
    for hook in hooks:
        hook.remove()
    return found


__all__ = ["Bench", "PlainStep", "SegmentClock", "StepTimes", "bench_step", "regions_of_calls"]
