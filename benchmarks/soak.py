"""Many steps of the demo on four local ranks: does memory grow, do replicas stay equal to the bit? ``python benchmarks/soak.py``

The model, data and plan of ``make demo``. Resident memory of every rank is noted each ``--every`` steps; after the first tenth, in which
caches fill, it may grow by 2 % in all. At the end every tensor that several ranks hold is compared bit by bit. Exit status 1 where either
doesn't hold.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import autopar  # noqa: E402
from autopar.modelfile import load  # noqa: E402
from autopar.runtime.launch import launch  # noqa: E402
from autopar.train import Job, find_data  # noqa: E402

#: share by which resident memory may grow once caches are full.
GROWTH = 0.02


def resident() -> float:
    """Resident memory of this process now, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def soak(steps: int, every: int, mesh_text: str) -> tuple[list[float], dict[str, str], list[float]]:
    """One rank: resident memory over time, a digest of each tensor that it holds, and losses."""
    torch.set_num_threads(1)
    mesh = autopar.Mesh.parse(mesh_text)
    path = str(ROOT / "models" / "gpt.py")
    file = load(path, "demo")
    job = Job(path, mesh, autopar.Plan(), steps, 16, "demo")
    model = file.build(0)
    data = find_data(job, file, model)
    step = autopar.parallelize(model, mesh, loss=file.loss, optimizer=partial(torch.optim.AdamW, lr=1.5e-3), progress=False)
    del model
    memory, losses = [], []
    for n in tqdm(range(steps), disable=not (torch.distributed.get_rank() == 0 and sys.stderr.isatty())):
        loss = step(step.shard(data.train(n)))
        if (n + 1) % every == 0:
            memory.append(resident())
            losses.append(loss.item())
    # what ranks hold under one name, by the place that it has in the whole: equal places are replicas
    cut = step.plan.parameters or {}
    places = {name: place(cut.get(name, ""), mesh.coords(torch.distributed.get_rank())) for name in step.state_dict()}
    held = {f"{n} {places[n]}": hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for n, t in step.state_dict().items()}
    step.close()
    return memory, held, losses


def place(sharding: str, coords: dict[str, int]) -> str:
    """Which piece of a parameter a rank holds: its coordinates along the axes that cut it."""
    return ",".join(f"{axis}={at}" for axis, at in coords.items() if f"@{axis}" in sharding)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    args = parser.parse_args()
    begun = time.perf_counter()
    size = autopar.Mesh.parse(args.mesh).size
    ranks = launch(soak, size, args.steps, args.every, args.mesh)
    count = len(ranks[0][0])
    lines = [[(k + 1) * args.every, f"{ranks[0][2][k]:.4f}", *(f"{memory[k]:.0f}" for memory, _, _ in ranks)] for k in range(count)]
    print(tabulate(lines, ["step", "loss", *(f"rank {r} MiB" for r in range(size))], tablefmt="github", disable_numparse=True))
    settled = count // 10
    growth = max(memory[-1] / memory[settled] - 1 for memory, _, _ in ranks)
    first: dict[str, str] = {}
    differ = sorted({name for _, held, _ in ranks for name, told in held.items() if first.setdefault(name, told) != told})
    shared = sum(len(held) for _, held, _ in ranks) - len(first)
    print(f"{args.steps} steps in {time.perf_counter() - begun:.0f} s")
    print(f"resident memory grew by {growth * 100:+.2f} % after step {(settled + 1) * args.every}")
    print(f"{shared} tensors compared with another rank's: {len(differ)} differ {differ[:5] if differ else ''}")
    return int(growth > GROWTH or bool(differ) or not shared)


if __name__ == "__main__":
    sys.exit(main())
