"""What of a plan really applied: every request, what was done about it and where, or why nothing could be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.compiler import Compiled
from autopar.cost.live import kept_bytes
from autopar.errors import PlanError
from autopar.ir.program import layer_of
from autopar.passes.decompose import SUFFIX as PIECE
from autopar.passes.recompute import SUFFIX
from autopar.plan.plan import Plan, limit_of
from autopar.plan.recompute import is_asked


@dataclass(frozen=True)
class Applied:
    """A request of a plan. ``done``: what was done about it; "" where nothing was, and ``why`` says the reason."""

    request: str
    done: str
    why: str = ""


def find_applied(compiled: Compiled, plan: Plan) -> list[Applied]:
    """What became of each field of a plan that asks for something, in a training step."""
    return [Applied(request, done, "" if done else why) for request, done, why in _requests(compiled, plan)]


def check_applied(compiled: Compiled, plan: Plan) -> None:
    """Raises PlanError where a strict plan asks for what doesn't apply."""
    missing = [a for a in find_applied(compiled, plan) if not a.done] if plan.strict else []
    if missing:
        raise PlanError(
            f"Plan(strict=True): {', '.join(a.request for a in missing)} can't be applied",
            why="; ".join(f"{a.request}: {a.why}" for a in missing), hint="leave it out, or strict",
        )  # fmt: skip


def _requests(compiled: Compiled, plan: Plan) -> Iterator[tuple[str, str, str]]:
    spec, finals, mesh = compiled.spec, compiled.finals, compiled.spec.mesh
    if plan.zero:
        shared = [b for b in spec.buckets if b.owners(mesh) > 1]
        axes = ", ".join(sorted({"+".join(b.axes) for b in shared}))
        whole = sum(b.numel * b.dtype.itemsize for b in shared)
        part = sum(b.part(mesh) * b.dtype.itemsize for b in shared)
        what = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}[plan.zero]
        done = f"{what} of {len(shared)} of {len(spec.buckets)} buckets shared out over {axes}: {part:,} of {whole:,} bytes a rank"
        yield f"zero={plan.zero}", done if shared else "", "no parameter is held by several ranks"
    if plan.zero_ranks is not None:
        copied = [b for b in spec.buckets if b.copies]
        copies = max((mesh.count(b.copies) for b in copied), default=0)
        done = f"each part of {len(copied)} of {len(spec.buckets)} buckets is held by {copies} ranks" if copied else ""
        yield f"zero_ranks={plan.zero_ranks}", done, f"dp={mesh['dp']} has no more ranks"
    if plan.regather is False:
        done = "what the forward gathers is kept for the backward" if plan.zero == 3 and compiled.pipeline is None else ""
        yield "regather=False", done, "stages gather for each task" if plan.zero == 3 else "only ZeRO 3 gathers parameters in a step"
    if plan.sequence:
        moved = [n for p in finals for n in p.nodes if n.op.startswith("comm.") and n.args[1] == ("tp",) and "all_reduce" not in n.op]
        why = "the mesh has no tp" if mesh["tp"] == 1 else "nothing between the matrices can be split over tp"
        yield "sequence", f"{len(moved)} gathers, reduce-scatters and exchanges over tp" if moved else "", why
    if plan.context is not None:
        split = [n for n, row in compiled.atoms.rows.items() if row.ring is not None] if mesh["cp"] > 1 else []
        why = "the mesh has no cp" if mesh["cp"] == 1 else "no attention is fused and without dropout and a mask of its own"
        yield f"context={plan.context!r}", f"{len(split)} attentions, forward and backward, over cp" if split else "", why
    if plan.recompute or plan.recompute is None and is_asked(compiled.split, None):
        again = {n.where.module or "(model)" for p in finals for n in p.nodes if any(o.endswith(SUFFIX) for o in n.outs)}
        count = sum(any(o.endswith(SUFFIX) for o in n.outs) for p in finals for n in p.nodes)
        before, after = kept_bytes(compiled.local), sum(kept_bytes(p) for p in finals)
        kept = "" if compiled.pipeline is not None else f": {after:,} instead of {before:,} bytes of a microbatch are kept"
        where = ", ".join(sorted(again)[:4]) + (", ..." if len(again) > 4 else "")
        asked = f"recompute={plan.recompute!r}" if plan.recompute else "torch.utils.checkpoint"
        yield asked, f"{count} nodes run again in {where}{kept}" if count else "", _nothing_again(compiled, plan)
    if (plan.decompose or 1) > 1:
        beside = {n.where.module for p in finals for n in p.nodes if n.op.startswith("comm.") and PIECE in n.name}
        why = "no collective beside a product whose rows divide so"
        yield f"decompose={plan.decompose}", f"products beside collectives of {len(beside)} modules" if beside else "", why
    if (plan.interleave or 1) > 1:
        hidden = sum(n.op.startswith("comm.") and not n.where.module.startswith("bucket") for p in finals for n in p.nodes)
        yield f"interleave={plan.interleave}", f"{hidden} collectives between the lanes" if hidden else "", "no layer talks to other ranks"
    if (plan.microbatches or 1) > 1:
        yield f"microbatches={plan.microbatches}", f"{spec.microbatches} microbatches a step" if spec.microbatches > 1 else "", "one row"
    staged = compiled.pipeline
    for name in ("schedule", "cuts"):
        if getattr(plan, name) is not None:
            done = "" if staged is None else f"{len(staged.cuts) + 1} stages, {staged.schedule.name}"
            yield f"{name}={getattr(plan, name)!r}", done, "the mesh has no pp"


def _nothing_again(compiled: Compiled, plan: Plan) -> str:
    """Why no node runs again."""
    if plan.recompute == "full" and not any(layer_of(n.where.module) for p in compiled.finals for n in p.nodes):
        return "the model has no repeated layers, which are modules with a number in their path; name some"
    if limit_of(plan.recompute) is not None:
        return "what is kept fits without"
    return "nothing that is kept could be made again there"
