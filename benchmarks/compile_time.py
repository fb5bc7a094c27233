"""Seconds and memory that compiling takes, by depth and mesh, without processes and without values: the model is on meta.

    python benchmarks/compile_time.py                          # Llama-3.1-8B's layer in 2, 8, 32 and 126 layers
    python benchmarks/compile_time.py --shapes 8b,405b         # the models themselves
    python benchmarks/compile_time.py --depths 2 --meshes dp=2

Each case runs in a process of its own and captures one row a data rank. ``wall`` and ``CPU`` are of compiling alone, from the module to
the emitted text; imports and building the model on meta are beside it. ``peak`` is the largest resident size of the process, torch
included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tabulate import tabulate

#: sizes over the preset ``8b`` of ``models/llama.py``.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8b": {},
    "405b": dict(layers=126, hidden=16384, heads=128, kv_heads=8, mlp_hidden=53248),
}
STAGES = ("capture", "canonicalize", "analyse", "plan dp", "plan tp", "insert", "stages", "buckets", "emit", "check")


def measure(shape: str, layers: int | None, mesh: str, sequence: int) -> dict[str, Any]:
    """Compiles one case in this process."""
    begun = time.process_time()
    import torch

    from autopar.api import make_options
    from autopar.inspect.model import inspect_model
    from autopar.layout.mesh import Mesh
    from autopar.plan.plan import Plan
    from models import llama

    imported = time.process_time() - begun
    sizes = {**SHAPES[shape], **({} if layers is None else {"layers": layers})}
    on = Mesh.parse(mesh)
    with torch.device("meta"):
        model = llama.build("8b", **sizes).to(torch.bfloat16)
        ids = torch.zeros(on["dp"], sequence, dtype=torch.long)
    factory = partial(torch.optim.AdamW, lr=1e-4)
    options = make_options(None, factory, Plan(), None, 0, "check", None, 0, "eager", ())
    wall, cpu = time.perf_counter(), time.process_time()
    compiled = inspect_model(model, on, {"ids": ids, "labels": ids}, options).compiled
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "shape": shape, "layers": model.config.layers, "mesh": mesh, "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": len(compiled.program.nodes), "wall": wall, "cpu": cpu, "imports": imported, "stages": dict(compiled.seconds),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def row(case: Mapping[str, Any]) -> list[str]:
    stages = case["stages"]
    left = case["wall"] - sum(stages.values())
    return [
        f"{case['shape']}, {case['layers']} layers", case["mesh"], str(case["nodes"]), f"{case['wall']:.1f}", f"{case['cpu']:.1f}",
        *(f"{stages[s]:.2f}" if s in stages else "-" for s in STAGES), f"{left:.2f}", f"{case['peak_bytes'] / 2**30:.2f}",
    ]  # fmt: skip


def table(cases: list[dict[str, Any]]) -> str:
    head = ["model", "mesh", "nodes", "wall s", "CPU s", *STAGES, "rest", "peak GiB"]
    align = ("left", "left", *["right"] * (len(head) - 2))
    return tabulate([row(c) for c in cases], head, tablefmt="github", disable_numparse=True, colalign=align)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="8b", help="8b, 405b")
    parser.add_argument("--depths", default=None, help="numbers of layers; by default 2,8,32,126 for 8b alone, else those of the models")
    parser.add_argument("--meshes", default="dp=2;dp=2,tp=2;dp=8,tp=8;dp=16,tp=8", help="separated by ;")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--json", action="store_true", help="one line a case")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    shapes = a.shapes.split(",")
    depths = [int(d) for d in a.depths.split(",")] if a.depths else [2, 8, 32, 126] if shapes == ["8b"] else [None]
    if a.one:
        print(json.dumps(measure(shapes[0], depths[0], a.meshes, a.sequence)))
        return
    cases = []
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for shape in shapes:
        for depth in depths:
            for mesh in a.meshes.split(";"):
                command = [sys.executable, __file__, "--one", "--shapes", shape, "--meshes", mesh, "--sequence", str(a.sequence)]
                command += [] if depth is None else ["--depths", str(depth)]
                env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                if done.returncode:
                    sys.exit(done.stderr)
                cases.append(json.loads(done.stdout.splitlines()[-1]))
                if a.json:
                    print(json.dumps(cases[-1]), flush=True)
                else:
                    print(f"{shape} {cases[-1]['layers']} layers {mesh}: {cases[-1]['wall']:.1f} s", file=sys.stderr)
    if not a.json:
        print(table(cases))


if __name__ == "__main__":
    main()
