"""autopar's stages beside torch's, in one run: ``python benchmarks/pipelines.py`` (``--help`` lists the options).

Every contestant trains ``models/gpt.py``, cut into stages before the same modules, from the same weights on the same batches with the same
optimizer and as many microbatches. As in ``peers.py``, all live in the same processes of one thread each and take turns, a block of steps
at a time; their losses are compared step by step, and the run fails where one computes something else. Of autopar's it also shows the
measured bubble beside the one that the simulator predicts from the measured durations of tasks, sends and messages, the microbatches that
were alive at the same time beside what the schedule allows, and where the time of each rank goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import shares
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import (
    MIB,
    Batch,
    Contestant,
    Runner,
    Settings,
    build,
    check_losses,
    everyone,
    hosts_missing,
    picked,
    plain,
    race,
    ratios,
    run_ranks,
    said,
    worker,
)
from tabulate import tabulate
from torch import Tensor, nn

#: the contestant that losses and times are compared with.
BASE = "torch 1f1b"
#: what is wanted of autopar: its median step by that of the base, and how far the measured bubble may be from the predicted one.
WANTED_STEP, WANTED_BUBBLE = 0.9, 0.1
#: how many blocks of the model the final norm, head and loss count for where stages are to be equally long.
HEAD = 2


@dataclass
class Stages(Settings):
    """What a worker is told. ``ranks``: of ``pp``."""

    ranks: int = 2
    microbatches: int = 8


def choose_cuts(layers: int, stages: int) -> tuple[str, ...]:
    """The modules that begin all stages but the first, so that stages are about equally long.

    Raises ValueError: the model has too few blocks.
    """
    places = [f"blocks.{n}" for n in range(layers)] + ["norm"]
    if stages == layers + 2:
        return tuple(places)  # the embeddings alone are a stage
    at = [round(n * (layers + HEAD) / stages) for n in range(1, stages)]
    if len(set(at)) < len(at) or at[-1] > layers:
        raise ValueError(f"{layers} blocks are too few for {stages} stages of about the same length")
    return tuple(places[n] for n in at)


# -- contestants


def autopar_stages(settings: Stages, schedule: str) -> Runner:
    """autopar over ``pp``. Its figures are of every timed step."""
    import autopar
    from autopar.inspect.timeline import make_timeline
    from autopar.pipelined import stage_count
    from autopar.runtime.pipeline import Pipeline
    from autopar.schedule import peak_live

    model: Any = build(settings)
    mesh = autopar.Mesh(pp=settings.ranks)
    cuts = choose_cuts(len(model.blocks), stage_count(schedule, settings.ranks))
    plan = autopar.Plan(microbatches=settings.microbatches, schedule=schedule, cuts=cuts)
    step = autopar.parallelize(model, mesh, optimizer=partial(torch.optim.AdamW, lr=settings.lr, foreach=True), plan=plan)
    kept: list[tuple[float, list[Any]]] = []
    folder = tempfile.TemporaryDirectory()

    def pipeline() -> Pipeline:
        run = step.executable()
        assert isinstance(run, Pipeline)
        return run

    def metrics() -> dict[str, float]:
        run, found = pipeline(), step.metrics
        kept.append((run.begun, run.spans))
        ends = max(s.end for s in run.spans)
        seconds = {key: 0.0 for key in ("compute", "waited", "send", "pre", "post")}
        for s in run.spans:
            key = s.kind if s.kind in seconds else "compute"
            seconds[key] += s.end - s.begin
            seconds["waited"] += s.waited
        seconds["between"] = ends - sum(seconds.values())
        return seconds | {"outside": found["step_s"] - ends, "sent": float(sum(found["comm_bytes"].values()))}

    def after() -> dict[str, float]:
        last = step.timeline(Path(folder.name, "trace.json"))
        steps = [make_timeline(last.schedule, ranks, last.edges) for ranks in zip(*everyone(kept), strict=True)]
        kept.clear()
        rank = dist.get_rank()
        live = {f"live {s}": float(n) for s, n in pipeline().peak.items()}
        bound = {f"bound {s}": float(n) for s, n in enumerate(peak_live(last.schedule).stages)}
        return live | bound | {
            "bubble": statistics.median(t.bubble for t in steps),
            "predicted": statistics.median(t.predicted.bubble for t in steps),
            "idle": statistics.median(t.predicted.idle[rank] * t.predicted.makespan for t in steps),
            "way": statistics.median(way for t in steps for way in t.predicted.times.links.values()),
        }  # fmt: skip

    return Runner(lambda batch: step(step.shard(batch)), metrics=metrics, after=after)


class Part(nn.Module):
    """A stage of ``models/gpt.py``: its blocks from ``begin`` to ``end``; the first stage embeds, the last has norm and head."""

    def __init__(self, model: Any, begin: int, end: int, first: bool, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[begin:end])
        self.embedding: Any = nn.ModuleList([model.tokens, model.positions] if first else [])
        self.ending: Any = nn.Sequential(*([model.norm, model.head] if last else []))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding:
            tokens, positions = self.embedding
            x = tokens(x) + positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.ending(x)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_stages(settings: Stages, schedule: str) -> Runner:
    """``torch.distributed.pipelining``, each stage a module of its own. Only the rank of the last stage has the loss."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    model: Any = build(settings)
    ranks, rank = settings.ranks, dist.get_rank()
    vee, several = schedule == "ScheduleZBVZeroBubble", schedule in ("ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B")
    total = ranks * (2 if several else 1)
    held = [rank, total - 1 - rank] if vee else list(range(rank, total, ranks))
    layers = len(model.blocks)
    begins = [0, *(layers if path == "norm" else int(path.split(".")[1]) for path in choose_cuts(layers, total)), layers]
    stages = [
        pipelining.PipelineStage(
            Part(model, begins[s], begins[s + 1], s == 0, s == total - 1), s, total, torch.device("cpu"), group=dist.group.WORLD
        )
        for s in held
    ]
    made: Any = getattr(schedules, schedule)
    single = issubclass(made, schedules.PipelineScheduleSingle)
    pipe = made(stages[0] if single else stages, settings.microbatches, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=settings.lr, foreach=True)

    def step(batch: Batch) -> Tensor:
        ids, labels = batch
        losses: list[Tensor] | None = [] if total - 1 in held else None
        pipe.step(*([ids] if 0 in held else []), target=labels if total - 1 in held else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else torch.tensor(float("nan"))

    return Runner(step, loss_at=0 if vee else ranks - 1)


CONTESTANTS = {
    "plain": Contestant(plain),
    "torch 1f1b": Contestant(partial(torch_stages, schedule="Schedule1F1B"), "pp"),
    "torch gpipe": Contestant(partial(torch_stages, schedule="ScheduleGPipe"), "pp"),
    "torch zb": Contestant(partial(torch_stages, schedule="ScheduleInterleavedZeroBubble"), "pp"),
    "torch zb-v": Contestant(partial(torch_stages, schedule="ScheduleZBVZeroBubble"), "pp"),
    "autopar 1f1b": Contestant(partial(autopar_stages, schedule="1f1b"), "pp", own=True),
    "autopar gpipe": Contestant(partial(autopar_stages, schedule="gpipe"), "pp", own=True),
    "autopar zb-h1": Contestant(partial(autopar_stages, schedule="zb-h1"), "pp", own=True),
    "autopar zb-v": Contestant(partial(autopar_stages, schedule="zb-v"), "pp", own=True),
    "autopar interleaved": Contestant(partial(autopar_stages, schedule="interleaved"), "pp", own=True),
}
#: those that hold two stages a rank.
TWO = ("torch zb-v", "autopar zb-v", "autopar interleaved")


def why_not(names: list[str], settings: Stages) -> dict[str, str]:
    """The reasons of those that can't run with these sizes, by name."""
    model, found = build(settings), {}
    for name in names:
        try:
            if CONTESTANTS[name].kind:
                choose_cuts(len(model.blocks), settings.ranks * (2 if name in TWO else 1))  # type: ignore[arg-type]
        except ValueError as error:
            found[name] = str(error)
    return found


# -- tables


def by_rank(result: Mapping[str, Any], key: str) -> list[float]:
    """A figure of every rank that has it."""
    return [r[key] for r in result["ranks"] if r.get(key) is not None]


def lives(result: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The most microbatches alive, and what the schedule allows, by stage."""
    counted = {int(key.split()[1]): int(n) for r in result["ranks"] for key, n in r.items() if key.startswith("live ")}
    return [(counted[s], int(result["ranks"][0][f"bound {s}"])) for s in sorted(counted)]


def show(found: dict[str, Any], alone: dict[str, Any], base: str) -> str:
    """The table of one link. Bytes and CPU are of all ranks together, memory is rank by rank."""
    lines = []
    for name, result in found.items():
        times, by_base = result["seconds"], ratios(found, name, base)
        first, live = result["ranks"][0], lives(result)
        sent, wire, memory = by_rank(result, "sent"), by_rank(result, "wire"), by_rank(alone.get(name, {"ranks": []}), "whole")
        lines.append({
            "": name,
            "median ms": f"{statistics.median(times) * 1e3:.0f}",
            "best ms": f"{min(times) * 1e3:.0f}",
            f"× {base}": f"{statistics.median(by_base):.2f}",
            "range": f"{min(by_base):.2f}-{max(by_base):.2f}",
            "CPU ms": f"{sum(by_rank(result, 'work')) * 1e3:.0f}",
            "bubble": f"{first['bubble']:.3f}" if "bubble" in first else "-",
            "predicted": f"{first['predicted']:.3f}" if "predicted" in first else "-",
            "message ms": f"{first['way'] * 1e3:.1f}" if "way" in first else "-",
            "live": " ".join(str(n) for n, _ in live) or "-",
            "allowed": " ".join(str(n) for _, n in live) or "-",
            "peak RSS": " ".join(f"{n:.0f}" for n in memory[: 1 if name == "plain" else None]) or "-",
            "sent": f"{sum(sent) / MIB:.1f}" if sent else "-",
            "interface": f"{sum(wire) / MIB:.1f}" if wire else "-",
        })  # fmt: skip
    align = ["left", *["right"] * (len(lines[0]) - 1)]
    return tabulate(lines, "keys", tablefmt="github", disable_numparse=True, colalign=align)


def show_time(found: dict[str, Any]) -> str:
    """Where autopar's steps go, rank by rank, in ms."""
    keys = ("compute", "waited", "send", "pre", "post", "between", "outside")
    lines = []
    for name, result in found.items():
        for rank, figures in enumerate(result["ranks"]):
            if "compute" in figures:
                row = {"": name, "rank": str(rank)} | {key: f"{figures[key] * 1e3:.1f}" for key in keys}
                lines.append(row | {"idle by the schedule": f"{figures['idle'] * 1e3:.1f}"})
    return tabulate(lines, "keys", tablefmt="github", disable_numparse=True, colalign=["left", *["right"] * 9]) if lines else ""


def verdicts(found: dict[str, Any], base: str) -> list[str]:
    """A line for each figure that is wanted of each of autopar's contestants."""

    def told(met: bool) -> str:
        return "met" if met else "missed"

    lines = []
    for name, result in found.items():
        if not CONTESTANTS[name].own:
            continue
        first, live = result["ranks"][0], lives(result)
        ratio = statistics.median(ratios(found, name, base))
        far = abs(first["bubble"] / first["predicted"] - 1) if first["predicted"] else float("inf")
        lines += [
            f"{name}: step {ratio:.2f} × {base}'s (wanted: at most {WANTED_STEP:.2f}, {told(ratio <= WANTED_STEP)})",
            f"{name}: measured bubble {far:.0%} from the predicted (wanted: at most {WANTED_BUBBLE:.0%}, {told(far <= WANTED_BUBBLE)})",
            f"{name}: live microbatches of every stage within its bound (wanted, {told(all(n <= most for n, most in live))})",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--preset", default="bench", help="of models/gpt.py")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ranks", default="2,4", help="stages' ranks, one run for each")
    parser.add_argument("--steps-per-block", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each contestant; one more warms up")
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or rates of emulated hosts' links")
    parser.add_argument("--share", type=float, default=0.0, help="of a core, for each rank: more ranks than cores run as if each had one")
    parser.add_argument("--only", help=f"contestants, of {', '.join(CONTESTANTS)}; default all")
    parser.add_argument("--no-alone", action="store_true", help="skip the runs that measure memory")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one run may take")
    parser.add_argument("--json", help="also write everything that was measured to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        told = Stages(**json.loads(args.worker))
        worker(partial(race, told, CONTESTANTS), Path(args.out), told.files)
        return 0
    names = picked(parser, args.only, CONTESTANTS)
    if args.batch % args.microbatches:
        parser.error(f"{args.batch} rows don't divide by {args.microbatches} microbatches")
    if args.share and (why := shares.missing()):
        parser.error(why)
    missing = hosts_missing() if any(link != "loopback" for link in args.links.split(",")) else ""
    cores = len(os.sched_getaffinity(0))
    what = f"models/gpt.py preset {args.preset}, float32, global batch {args.batch}, {args.microbatches} microbatches, AdamW"
    print(f"torch {torch.__version__}, {what}, 1 thread a rank; {cores} cores, load {os.getloadavg()[0]:.1f};")
    print(f"{args.blocks} blocks of {args.steps_per_block} steps each, taking turns; CPU, sent, interface: ms and MiB a step, all ranks;")
    print("bubble: the share of the busiest rank's time in which it computes nothing, measured, and predicted from the measured durations")
    print("of tasks, sends and messages; message: from the end of a task until another rank has what it made, the median link; live: the")
    print("most microbatches alive at once, by stage, and how many the schedule allows; peak RSS: MiB by rank, alone in fresh processes.")
    measured: dict[str, Any] = {}
    for ranks in map(int, args.ranks.split(",")):
        settings = Stages(
            [], "gpt", args.preset, args.batch, steps=args.steps_per_block, blocks=args.blocks, timeout=args.timeout, ranks=ranks,
            microbatches=args.microbatches, share=args.share,
        )  # fmt: skip
        left_out = why_not(names, settings)
        settings.names = [name for name in names if name not in left_out]
        competing = f": {ranks} ranks compete for {cores} cores, only ratios say something" if ranks > cores else ""
        print(f"\npp={ranks}" + (f": each rank has {args.share:g} of a core" if args.share else competing))
        for name, reason in left_out.items():
            print(f"{name} is left out: {reason}")
        alone: dict[str, Any] = {}
        for name in [] if args.no_alone else list(settings.names):
            try:
                alone |= run(Stages(**{**settings.__dict__, "names": [name], "steps": 1, "blocks": 0}), "loopback")
            except RuntimeError as e:
                if CONTESTANTS[name].own or not CONTESTANTS[name].kind:
                    raise
                settings.names.remove(name)
                print(f"{name} is left out, it doesn't run here: {said(str(e))}", flush=True)
        if not settings.names:
            print("no contestant is left")
            continue
        base = BASE if BASE in settings.names else settings.names[0]
        for link in args.links.split(","):
            if link != "loopback" and missing:
                print(f"\n{link}: left out, {missing}")
                continue
            found = measured[f"pp={ranks} {link}"] = run(settings, link)
            worst = check_losses(found, base)
            print(f"\npp={ranks}, {link}: losses agree within {worst:.0e} over {len(found[base]['losses'])} steps\n")
            print(show(found, alone, base))
            print("\nwhere the time goes, ms per step:\n", show_time(found), "", *verdicts(found, base), sep="\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(measured, indent=1))
    return 0


def run(settings: Stages, link: str) -> Any:
    """What the ranks of a run found."""
    return run_ranks(settings, link, settings.ranks, __file__)


if __name__ == "__main__":
    sys.exit(main())
