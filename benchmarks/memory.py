"""Memory of a rank by ZeRO level, recompute and context parallelism, beside the peers: ``python benchmarks/memory.py`` (``--help``).

Each contestant trains ``models/gpt.py`` on two local ranks of its own processes, so that what is resident is its own. *Peak RSS* is the
most that a rank's process held, modules and libraries included; *over import* is that without what the process held before the model was
built. For autopar also what it says itself: bytes of parameters, gradients and optimizer state between steps, and the predicted peak of
a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import (
    MIB,
    Contestant,
    Runner,
    Settings,
    build,
    ddp,
    deepspeed,
    forget_peak,
    fsdp2,
    peak_rss,
    picked,
    race,
    run_ranks,
    said,
    why_not,
    worker,
)
from tabulate import tabulate
from torch import nn


def autopar_rank(settings: Settings, axis: str = "dp", **plan: Any) -> Runner:
    """autopar over one axis under a plan."""
    import autopar

    mesh = autopar.Mesh([(axis, torch.distributed.get_world_size())])
    optimizer = partial(torch.optim.AdamW, lr=settings.lr, foreach=True)
    step = autopar.parallelize(build(settings), mesh, optimizer=optimizer, plan=autopar.Plan(**plan), progress=False)

    def metrics() -> dict[str, float]:
        kept = {kind: float(sum(t.nbytes for t in tensors)) for kind, tensors in step.tensors().items()}
        return kept | {"predicted": float(step.metrics["peak_bytes"])}

    return Runner(lambda batch: step(step.shard(batch)), metrics=metrics)


def checkpointed(settings: Settings) -> Runner:
    """FSDP2 of blocks under ``torch.utils.checkpoint``, as its users would write it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrapped(told: Settings) -> nn.Module:
        model: Any = build(told)
        for n, block in enumerate(model.blocks):
            model.blocks[n] = checkpoint_wrapper(block)
        return model

    return fsdp2(settings, made=wrapped)


CONTESTANTS = {
    "DDP": Contestant(ddp, "zero0"),
    "autopar zero0": Contestant(partial(autopar_rank, zero=0), "zero0", own=True),
    "DeepSpeed zero1": Contestant(deepspeed, "zero1", package="deepspeed"),
    "autopar zero1": Contestant(partial(autopar_rank, zero=1), "zero1", own=True),
    "DeepSpeed zero2": Contestant(partial(deepspeed, stage=2), "zero2", package="deepspeed"),
    "FSDP2 zero2": Contestant(partial(fsdp2, again=False), "zero2"),
    "autopar zero2": Contestant(partial(autopar_rank, zero=2), "zero2", own=True),
    "DeepSpeed zero3": Contestant(partial(deepspeed, stage=3), "zero3", package="deepspeed"),
    "FSDP2 zero3": Contestant(fsdp2, "zero3"),
    "autopar zero3": Contestant(partial(autopar_rank, zero=3), "zero3", own=True),
    "autopar zero3 selective": Contestant(partial(autopar_rank, zero=3, recompute="selective"), own=True),
    "FSDP2 zero3 checkpoint": Contestant(checkpointed, "full"),
    "autopar zero3 full": Contestant(partial(autopar_rank, zero=3, recompute="full"), "full", own=True),
    "autopar cp": Contestant(partial(autopar_rank, axis="cp"), own=True),
    "autopar cp zero3 full": Contestant(partial(autopar_rank, axis="cp", zero=3, recompute="full"), own=True),
}


def measure(settings: Settings) -> dict[str, Any]:
    """What one contestant held: its race's figures, and what the process held before."""
    forget_peak()
    before = peak_rss()
    return {name: {**found, "before": before} for name, found in race(settings, CONTESTANTS).items()}


def show(found: Mapping[str, Any]) -> str:
    """The table, in MiB of the fullest rank."""
    lines = []
    for name, result in found.items():
        told = [r for r in result["ranks"] if "predicted" in r]

        def own(key: str, told: list[dict[str, float]] = told) -> str:
            return f"{max(r[key] for r in told) / MIB:.0f}" if told else "-"

        kind = CONTESTANTS[name].kind
        rest = [r["whole"] - r["before"] for n, r in found.items() if n != name and CONTESTANTS[n].kind == kind and not CONTESTANTS[n].own]
        mine = result["whole"] - result["before"]
        lines.append({
            "": name, "peak RSS": f"{result['whole']:.0f}", "over import": f"{mine:.0f}",
            "× best peer": f"{mine / min(rest):.2f}" if kind and rest and CONTESTANTS[name].own else "-",
            "parameters": own("parameters"), "gradients": own("gradients"), "optimizer": own("optimizer state"),
            "predicted peak": own("predicted"),
        })  # fmt: skip
    return tabulate(lines, "keys", tablefmt="github", disable_numparse=True, colalign=["left", *["right"] * (len(lines[0]) - 1)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--preset", default="bench", help="of models/gpt.py")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", help=f"contestants, of {', '.join(CONTESTANTS)}; default all")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one contestant may take")
    parser.add_argument("--json", help="also write everything that was measured to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(partial(measure, Settings(**json.loads(args.worker))), Path(args.out))
        return 0
    names = picked(parser, args.only, CONTESTANTS)
    print(
        f"torch {torch.__version__}, models/gpt.py preset {args.preset}, float32, global batch {args.batch}, {args.ranks} local ranks; MiB"
    )
    found: dict[str, Any] = {}
    for name in names:
        settings = Settings([name], "gpt", args.preset, args.batch, steps=1, blocks=1, timeout=args.timeout)
        if missing := why_not([name], "gpt", CONTESTANTS):
            print(f"{name} is left out: {missing[name]}")
            continue
        try:
            found |= run_ranks(settings, "loopback", args.ranks, __file__)
        except RuntimeError as e:
            if CONTESTANTS[name].own:
                raise
            print(f"{name} is left out, it doesn't run here: {said(str(e))}", flush=True)
    print("", show(found), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
