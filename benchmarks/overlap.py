"""How much communication hides behind compute: ``python benchmarks/overlap.py`` (``--help`` lists the options).

One compiled step for each plan, run in several ways that take turns, a block of steps at a time, in the same processes:

- as it is;
- *compute alone*: the same program, its collectives stubbed: each gives a result of the right shape at once;
- *communication alone*: the same collectives in the same order, with the same waits, and nothing between them;
- with one kind of collective waited for where it is started, which switches off what the passes gain by starting it early: gathers of
  parameters before their use, reductions of gradients before the end of the backward, both; for ``tp`` all collectives, with and without
  two halves of the batch side by side (``Plan(interleave=2)``).

Wanted of ``dp`` with ZeRO 1, 2 and 3 on two hosts: a step of at most 1.15 of the longer of the two alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import shares
import torch
import torch.distributed as dist
from peers import MIB, Settings, batches, build, everyone, hosts_missing, picked, run_ranks, settle, worker
from tabulate import tabulate
from torch import Tensor

#: a step by the longer of compute alone and communication alone, over links; on loopback communication takes the cores from compute.
WANTED = 1.15
AS_IS, COMPUTE, COMMUNICATION = "as it is", "compute alone", "communication alone"
GATHERS, REDUCTIONS = "gathers at once", "reductions at once"
#: the kinds of collective that are waited for where they are started.
AT_ONCE = {
    GATHERS: ("all_gather",), REDUCTIONS: ("reduce_scatter",), "both at once": ("all_gather", "reduce_scatter"),
    "all at once": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
}  # fmt: skip
WAYS = {
    "dp": (AS_IS, COMPUTE, COMMUNICATION, GATHERS, REDUCTIONS, "both at once"),
    "tp": (AS_IS, COMPUTE, COMMUNICATION, "all at once"),
}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp zero1": ("dp", dict(zero=1)), "dp zero2": ("dp", dict(zero=2)), "dp zero3": ("dp", dict(zero=3)),
    "tp": ("tp", {}), "tp x2": ("tp", dict(interleave=2)), "tp d2": ("tp", dict(decompose=2)), "tp+seq": ("tp", dict(sequence=True)),
    "tp+seq x2": ("tp", dict(sequence=True, interleave=2)), "tp+seq d2": ("tp", dict(sequence=True, decompose=2)),
}  # fmt: skip


@dataclass(frozen=True)
class Started:
    """A collective of a step: what is needed to start it again."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    options: dict[str, Any]


def switched_comm() -> type:
    """The comm whose collectives can be stubbed, waited for at once, or written down."""
    from autopar.runtime.comm import DistComm, Handle

    class Noted(Handle):
        """A handle whose wait is written down: which collective of this step, or of the one before (age 1)."""

        def __init__(self, inner: Handle, comm: Switched, number: int) -> None:
            self.inner, self.comm, self.number, self.step, self.over = inner, comm, number, comm.step, False

        def wait(self) -> Tensor:
            if not self.over and self.comm.log is not None:
                self.comm.log.append((self.comm.step - self.step, self.number))
            self.over = True
            return self.inner.wait()

    class Switched(DistComm):
        way, step, log = AS_IS, 0, None
        log: list[Started | tuple[int, int]] | None
        number = 0

        def begin_step(self) -> None:
            self.step, self.number = self.step + 1, 0

        def _run(self, kind: str, x: Tensor, axes: Sequence[str], site: str, **options: Any) -> Handle:
            if self.way == COMPUTE and self.group(axes).size > 1:
                if self._held is not None:
                    self.settle()
                return stubbed(self, kind, x, self.group(axes).size, self.group(axes).index, **options)
            if self.log is not None:
                kept = {k: v for k, v in options.items() if k not in ("out", "spent")}
                self.log.append(Started(kind, tuple(x.shape), x.dtype, tuple(axes), kept))
            handle = super()._run(kind, x, axes, site, **options)
            if kind in AT_ONCE.get(self.way, ()):
                handle.wait()
            self.number += 1
            return Noted(handle, self, self.number - 1)

    def stubbed(comm: Switched, kind: str, x: Tensor, size: int, index: int, **options: Any) -> Handle:
        """What this rank has of the result, at once; the others' share is whatever the memory held."""
        dim, out, spent = options.get("dim", 0), options.get("out"), options.get("spent", False)
        shape = list(x.shape)
        if kind == "all_reduce":
            value = x if out is None else out if out is x else out.copy_(x)
        elif kind == "reduce_scatter":
            mine = x.tensor_split(size, dim)[index]
            value = mine.contiguous() if out is None else out if out.data_ptr() == mine.data_ptr() else out.copy_(mine)
        elif kind == "all_gather":
            shape[dim] *= size
            value = x.new_zeros(shape) if out is None else out
            place = value.tensor_split(size, dim)[index]
            if place.data_ptr() != x.data_ptr():
                place.copy_(x)
        else:
            shape[dim] //= size
            shape[options.get("concat_dim", 0)] *= size
            value = x.reshape(shape)
        if spent:
            comm.give(x)
        return Handle(lambda: value)

    return Switched


def replayed(comm: Any, events: list[Started | tuple[int, int]], before: list[Any]) -> list[Any]:
    """Runs the collectives of a step in their order; gives the handles, which the next step may wait for."""
    handles: list[Any] = []
    for event in events:
        if isinstance(event, Started):
            key = (event.kind, event.shape, event.dtype, len(handles))
            if key not in comm.buffers:
                comm.buffers[key] = torch.zeros(event.shape, dtype=event.dtype)
            handles.append(comm._run(event.kind, comm.buffers[key], event.axes, "replayed", **event.options))  # noqa: SLF001
        else:
            age, number = event
            waited = handles if age == 0 else before
            if number < len(waited):
                waited[number].wait()
    return handles


def race(settings: Settings) -> dict[str, Any]:
    """Seconds of a step by plan and way, block by block, of the slowest rank; and what autopar says was exposed."""
    import autopar
    from autopar.api import make_options
    from autopar.step import Step

    made, data = switched_comm(), batches(settings)
    world = dist.get_world_size()
    steps: dict[str, tuple[Any, Any]] = {}
    events: dict[str, list[Any]] = {}
    for name in settings.names:
        axis, plan = PLANS[name]
        mesh = autopar.Mesh([(axis, world)])
        comm = made(mesh)
        comm.buffers = {}
        optimizer = partial(torch.optim.AdamW, lr=settings.lr, foreach=True)
        options = make_options(None, optimizer, autopar.Plan(**plan), None, 0, "check", None, 0, "eager", ())
        model = build(settings)
        step = Step(model, mesh, comm, options)
        steps[name] = (step, comm)
        for n in range(3):
            comm.begin_step()
            comm.log = [] if n == 2 else None
            step(step.shard(data[n % len(data)]))
        events[name], comm.log = comm.log, None
        del model
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS[PLANS[name][0]]} for name in settings.names}
    exposed: dict[str, list[float]] = {name: [] for name in settings.names}
    work: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name, ways in seconds.items()}
    turns = [(name, way) for name in settings.names for way in seconds[name]]
    for block in range(settings.blocks + 1):
        at = block % len(turns)
        for name, way in turns[at:] + turns[:at]:
            step, comm = steps[name]
            comm.way = way if way != COMMUNICATION else AS_IS
            handles: list[Any] = []
            dist.barrier()
            worked, begun = time.process_time(), time.perf_counter()
            for n in range(settings.steps + 1):
                if n == 1:  # what a step leaves for the next is there when the clock starts
                    worked, begun = time.process_time(), time.perf_counter()
                comm.begin_step()
                if way == COMMUNICATION:
                    handles = replayed(comm, events[name], handles)
                else:
                    step(step.shard(data[n % len(data)]))
                    if way == AS_IS and block and n:
                        exposed[name].append(sum(step.metrics["exposed_comm_s"].values()))
            took, worked = time.perf_counter() - begun, time.process_time() - worked
            for handle in handles:
                handle.wait()
            dist.barrier()
            settle()
            dist.barrier()
            if block:
                seconds[name][way].append(took / settings.steps)
                work[name][way].append(worked / settings.steps)
            comm.way = AS_IS
            comm.take_records()
    ranks = everyone(seconds)
    slowest = {
        name: {way: [max(values) for values in zip(*(r[name][way] for r in ranks))] for way in seconds[name]} for name in settings.names
    }
    sent = {name: sum(e.dtype.itemsize * torch.Size(e.shape).numel() for e in events[name] if isinstance(e, Started)) for name in events}
    return {"seconds": slowest, "work": work, "exposed": {n: statistics.median(v) for n, v in exposed.items()}, "operands": sent}


def show(found: dict[str, Any]) -> str:
    """The table of one link: medians in ms; ratios are medians over blocks, each of one round."""

    def ratio(mine: list[float], *others: list[float]) -> float:
        return statistics.median(a / max(b) for a, b in zip(mine, zip(*others)))

    lines = []
    for name, ways in found["seconds"].items():
        line = {"": name} | {
            way: f"{statistics.median(ways[way]) * 1e3:.0f}" if way in ways else "-" for way in (AS_IS, COMPUTE, COMMUNICATION)
        }
        spent = found["work"][name]
        line["CPU of both"] = f"{statistics.median(map(sum, zip(spent[COMPUTE], spent[COMMUNICATION]))) * 1e3:.0f}"
        line["× the longer alone"] = f"{ratio(ways[AS_IS], ways[COMPUTE], ways[COMMUNICATION]):.2f}"
        line["exposed"] = f"{found['exposed'][name] * 1e3:.0f}"
        line["over compute"] = f"{statistics.median(a - b for a, b in zip(ways[AS_IS], ways[COMPUTE])) * 1e3:.0f}"
        for way in (GATHERS, REDUCTIONS, "both at once", "all at once"):
            line[way] = f"× {ratio(ways[way], ways[AS_IS]):.2f}" if way in ways else "-"
        lines.append(line)
    return tabulate(lines, "keys", tablefmt="github", disable_numparse=True, colalign=["left", *["right"] * (len(lines[0]) - 1)])


def verdicts(found: dict[str, Any], link: str) -> list[str]:
    """A line for each plan of ``dp`` over a link."""
    lines = []
    for name, ways in found["seconds"].items():
        if PLANS[name][0] == "dp" and link != "loopback":
            of = statistics.median(a / max(b, c) for a, b, c in zip(ways[AS_IS], ways[COMPUTE], ways[COMMUNICATION]))
            spent = found["work"][name]
            core = statistics.median(a / (b + c) for a, b, c in zip(ways[AS_IS], spent[COMPUTE], spent[COMMUNICATION]))
            verdict = f"wanted: at most {WANTED}, {'met' if of <= WANTED else 'missed'}"
            lines.append(f"{name}: {of:.2f} × the longer alone ({verdict}), {core:.2f} × what both alone take of a core")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--preset", default="bench", help="of models/gpt.py")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.0, help="of a core, for each rank: more ranks than cores run as if each had one")
    parser.add_argument("--steps-per-block", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4, help="measured blocks of each way; one more warms up")
    parser.add_argument("--links", default="1gbit", help="loopback, or rates of emulated hosts' links")
    parser.add_argument("--only", help=f"plans, of {', '.join(PLANS)}; default all")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one link may take")
    parser.add_argument("--json", help="also write everything that was measured to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        told = Settings(**json.loads(args.worker))
        worker(partial(race, told), Path(args.out), told.files)
        return 0
    names = picked(parser, args.only, PLANS)
    if args.share and (why := shares.missing()):
        parser.error(why)
    settings = Settings(
        names, "gpt", args.preset, args.batch, steps=args.steps_per_block, blocks=args.blocks, timeout=args.timeout, share=args.share
    )
    what = f"models/gpt.py preset {args.preset}, float32, global batch {args.batch}"
    print(f"torch {torch.__version__}, {what}, {args.ranks} ranks of 1 thread{f', each with {args.share:g} of a core' * bool(args.share)};")
    print(f"{args.blocks} blocks of {args.steps_per_block} steps each, taking turns; ms a step, of the slowest rank;")
    print("CPU of both: seconds of a core that compute alone and communication alone take of rank 0; exposed: by step.metrics;")
    print("last columns: the step with collectives of a kind waited for where they are started, by the step as it is.")
    missing = hosts_missing() if any(link != "loopback" for link in args.links.split(",")) else ""
    measured = {}
    for link in args.links.split(","):
        if link != "loopback" and missing:
            print(f"\n{link}: left out, {missing}")
            continue
        measured[link] = found = run_ranks(settings, link, args.ranks, __file__)
        told = ", ".join(f"{name} {n / MIB:.0f}" for name, n in found["operands"].items())
        print(f"\n{link}; operands of a step's collectives, MiB: {told}\n")
        print(show(found), "", *verdicts(found, link), sep="\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(measured, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
