"""The end of compiling without stages: recompute, lanes, buckets, fusing, emission. A limit on memory is held by what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autopar.codegen.emit import Module, emit
from autopar.codegen.live import profile
from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Program
from autopar.layout.bucket import Bucket, kept_bytes
from autopar.passes.buckets import CAP, bucketize, make_buckets, same_buckets
from autopar.passes.check import check_local
from autopar.passes.check_placements import check_buckets
from autopar.passes.fuse import fuse
from autopar.passes.interleave import interleave
from autopar.passes.recompute import recompute_as_asked
from autopar.passes.regather import regather
from autopar.plan.plan import FULL, Plan, limit_of
from autopar.plan.recompute import Request, is_asked
from autopar.progress import Progress
from autopar.rules import Rules
from autopar.rules.atoms import Atoms

T = TypeVar("T")

#: how often a choice under a limit is made anew, the share of the limit from which on it is near enough, and by how many per cent of the
#: limit it is tightened at least: a choice is of whole tensors, and a smaller step may change nothing.
TRIES, NEAR, STEP = 6, 0.9, 1


@dataclass(frozen=True)
class Finished:
    """A program over buckets and its module."""

    final: LocalProgram
    module: Module
    buckets: tuple[Bucket, ...]

    def kept(self) -> tuple[int, int]:
        """Bytes of parameters (with buffers) and gradients that a rank keeps between steps."""
        params, grads = kept_bytes(self.buckets, self.final.mesh, self.final.zero)
        return params + sum(self.final.types[i.name].nbytes for i in self.final.inputs if i.kind in ("param", "buffer")), grads

    def most(self) -> int:
        """The most bytes of parameters, gradients and what a step makes, by the emitted statements."""
        return sum(self.kept()) + profile(self.final, self.module.script).peak().bytes


@dataclass(frozen=True)
class Finisher:
    """Finishes the local programs of a compilation.

    Attributes:
        split, atoms: of the whole program.
        buckets: of an earlier compilation, to be kept.
    """

    plan: Plan
    split: Program
    atoms: Atoms
    rules: Rules
    device: Device
    groups: Mapping[str, int]
    buckets: tuple[Bucket, ...] | None
    title: str
    progress: Progress

    @property
    def zero(self) -> int:
        """The level of ZeRO."""
        return 1 if self.plan.zero is None else self.plan.zero

    @property
    def trained(self) -> bool:
        """Whether the program makes gradients."""
        return any(True for _ in self.split.outputs_of("grad"))

    def run(self, local: LocalProgram) -> Finished:
        """As the plan asks. Raises PlanError: its limit on memory is below what the program needs."""
        if not self.trained or not is_asked(self.split, self.plan.recompute):
            return self.finish(local)
        limit = limit_of(self.plan.recompute)
        return self.finish(self.again(local)) if limit is None else self.fit(local, limit)

    def again(self, local: LocalProgram, held: int | None = None, extra: int = 0, request: Request = None) -> LocalProgram:
        """The program whose backward makes again what ``request``, or else the plan, asks for."""
        self.progress.at("recompute")
        kept = recompute_as_asked(
            local, request or self.plan.recompute, self.split, self.atoms, self.rules, self.device, held=held, extra=extra
        )  # fmt: skip
        check_local(kept)
        return kept

    def finish(self, local: LocalProgram) -> Finished:
        """The rest, without recompute."""
        self.progress.at("buckets")
        lanes = interleave(local, self.plan.interleave or 1)
        if self.buckets is None:
            buckets = make_buckets(lanes, self.groups, self.plan.buckets or CAP, zero=self.zero, ranks=self.plan.zero_ranks)
        else:
            buckets = same_buckets(self.buckets, lanes) if self.trained else self.buckets
        final = fuse(regather(bucketize(lanes, buckets, self.zero), self.plan.regather is not False))
        self.progress.at("check")
        check_local(final)
        check_buckets(final, lanes)
        self.progress.at("emit")
        return Finished(final, emit(final, self.title), buckets)

    def fit(self, local: LocalProgram, limit: int) -> Finished:
        """What adds little time and keeps within a limit on bytes."""
        whole = self.finish(local)
        held, grads = whole.kept()
        extra = grads - kept_bytes(whole.buckets, local.mesh, 0)[1]
        return fit(
            limit, whole, lambda more: self.finish(self.again(local, held, extra + more)),
            lambda: self.finish(self.again(local, request=FULL)), Finished.most,
        )  # fmt: skip


def fit(limit: int, whole: T, choose: Callable[[int], T], full: Callable[[], T], most: Callable[[T], int]) -> T:
    """A choice of what to recompute that keeps within a limit as the emitted statements are counted.

    A choice counts the graph: gradients whatever ZeRO shares out, and no fused nodes. What it was wrong by is told to the next choice.

    Args:
        whole: nothing is recomputed.
        choose: a choice that counts so many bytes more than it otherwise would. Raises PlanError: there is none.
        full: the most is recomputed.
        most: bytes.

    Raises:
        PlanError: nothing that was found keeps within the limit.
    """
    if most(whole) <= limit:
        return whole
    best: tuple[int, T] | None = None
    failure: PlanError | None = None
    more = 0
    for _ in range(TRIES):
        try:
            made = choose(more)
        except PlanError as error:
            failure = error
            break
        nbytes = most(made)
        if nbytes <= limit and (best is None or nbytes > best[0]):
            best = (nbytes, made)
        if NEAR * limit <= nbytes <= limit:
            break
        more += max(nbytes - limit, STEP * limit // 100) if nbytes > limit else nbytes - limit
    if best is not None:
        return best[1]
    made = full()  # a choice may count too much: of small tensors, it doesn't know how early they die
    if (least := most(made)) <= limit:
        return made
    raise failure or PlanError(
        f"no choice of what to recompute fits into {limit:,} bytes on a rank", why=f"all that was tried takes at least {least:,}",
        hint="a higher limit, more microbatches, or more ranks",
    )  # fmt: skip
