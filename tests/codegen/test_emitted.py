"""Emitted modules: their text, their format, the same bytes every time, and running them without the compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options, parallelize
from autopar.codegen.render import assign
from autopar.compiler import Compiled
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.reference import plain_steps
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step
from tests.equality.cases import MODELS, SIMILAR, VARIANTS, Case, Model
from tests.equality.recipes import compiled_for

ROOT = Path(__file__).parents[2]
#: of the package, what generated code does without.
COMPILER = (
    "capture", "rules", "plan", "passes", "codegen", "inspect", "cost", "ir", "_torch.py", "api.py", "step.py", "compiler.py", "compare.py",
    "reference.py", "cli.py", "train.py", "modelfile.py", "__main__.py",
)  # fmt: skip


class Tiny(nn.Module):
    """Embedding, a layer with a residual and dropout, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + F.dropout(self.down(F.relu(self.up(self.norm(x)))), 0.1, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tiny() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tiny()
    ids = torch.arange(8).view(4, 2)
    return model, (ids, (ids + 1) % 8)


def compiled_tiny(mesh: str, microbatches: int = 1) -> Compiled:
    model, batch = tiny()
    return compiled_for(model, batch, Mesh.parse(mesh), Plan(microbatches=microbatches), None)


@pytest.mark.parametrize(("mesh", "microbatches", "name"), [("", 1, "one_rank"), ("dp=2,tp=2", 1, "dp2_tp2"), ("dp=2", 2, "microbatches")])
def test_text(golden: Callable[[str, str], None], mesh: str, microbatches: int, name: str) -> None:
    golden(compiled_tiny(mesh, microbatches).module.source, f"codegen/{name}.py")


def source_of(model: Model, mesh: str, variant: str) -> str:
    module, batch = Case(model, model.name, mesh, variant).material()
    return compiled_for(module, batch, Mesh.parse(mesh), VARIANTS[variant][0], None, loss=model.loss).module.source


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        pytest.param(m, v, marks=[pytest.mark.slow] if m.name in SIMILAR else [])
        for m in MODELS
        for v in ("zero=3" if m.divides else "plain", "together")
        if not Case(m, m.name, "dp=2,tp=2", v).refused
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_format(model: Model, variant: str, tmp_path: Path) -> None:
    """The formatter changes nothing, and the linter finds nothing."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed: it is a tool for development")
    path = tmp_path / "step.py"
    path.write_text(source_of(model, "dp=2,tp=2", variant))
    for command in (["check", "--select", "E,F,W", "--line-length", "140"], ["format", "--check", "--diff", "--line-length", "140"]):
        done = subprocess.run([ruff, *command, "--isolated", "--no-cache", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_same_bytes() -> None:
    """The same program and plan give the same text, in this process and in others with other salts of hashes."""
    wanted = compiled_tiny("dp=2,tp=2").module.source
    assert compiled_tiny("dp=2,tp=2").module.source == wanted
    text = "import sys; from tests.codegen.test_emitted import compiled_tiny, source_of, MODELS\n"
    text += "sys.stdout.write(compiled_tiny('dp=2,tp=2').module.source + source_of(MODELS[0], 'dp=2,tp=2', 'together'))"
    outputs = set()
    for salt in ("1", "2"):
        command, environment = [sys.executable, "-c", text], {"PYTHONHASHSEED": salt, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        outputs.add(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout)
    assert len(outputs) == 1
    assert wanted in outputs.pop()


#: runs saved modules on simulated ranks, with what ``weights.pt`` holds; prints the losses of all ranks.
RUNNER = """
import json, sys
import torch
from autopar.layout.mesh import Mesh
from autopar.runtime.executor import cut, load, make_state
from autopar.runtime.random import step_key
from autopar.runtime.sim import run_simulated

torch.set_num_threads(1)
held = torch.load("weights.pt")

def rank(comm):
    run = load("saved", comm)
    state = make_state(run.spec, held["model"].__getitem__, held["model"], comm)
    rows = [cut(t, s, comm.mesh, comm.coords) for t, (_, s) in zip(held["batch"], run.spec.batch.values())]
    loss, grads, _, _ = run.run(state, rows, step_key(held["seed"], 0))
    return [loss.item(), sum(g.double().square().sum().item() for g in grads)]

print(json.dumps(run_simulated(Mesh.parse(sys.argv[1]), rank)))
print(json.dumps(sorted({m.split(".")[1] for m in sys.modules if m.startswith("autopar.")})))
"""


@pytest.mark.parametrize(
    ("model", "mesh", "variant"),
    [(MODELS[0], "dp=2,tp=2", "together"), (MODELS[3], "tp=2", "together"), (MODELS[4], "dp=2", "zero=3")],
    ids=lambda p: getattr(p, "name", p),
)
def test_runs_without_the_compiler(model: Model, mesh: str, variant: str, tmp_path: Path) -> None:
    """A saved module, in a copy of the package from which the compiler's folders are deleted."""
    case = Case(model, model.name, mesh, variant)
    module, batch = case.material()
    where = Mesh.parse(mesh)
    plan = VARIANTS[variant][0]

    def rank(comm: SimComm) -> float:
        options = make_options(model.loss, None, plan, None, 0, "check", None, 3, "eager", ())
        step = Step(module, where, comm, options)
        loss = step(step.shard(batch))
        if comm.rank == 0:
            step.save_source(tmp_path / "saved")
        return loss.item()

    losses = run_simulated(where, rank)
    shutil.copytree(ROOT / "autopar", tmp_path / "autopar", ignore=shutil.ignore_patterns("__pycache__", *COMPILER))
    assert not any((tmp_path / "autopar" / name).exists() for name in COMPILER)
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    held = {n: t.detach() for n, t in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())}
    torch.save({"model": held, "batch": tensors, "seed": 3}, tmp_path / "weights.pt")
    command = [sys.executable, "-c", RUNNER, mesh]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    results, loaded = map(json.loads, done.stdout.splitlines())
    assert [loss for loss, _ in results] == losses
    assert all(squares > 0 for _, squares in results)
    assert set(loaded) <= {"runtime", "layout", "errors"}


def test_one_rank_is_the_plain_model() -> None:
    """One process without a group takes the same path."""
    model, batch = tiny()
    step = parallelize(model, Mesh(), example=batch, seed=4, precision="fp64")
    loss = step(batch)
    wanted = plain_steps(model.double(), [batch], seed=4)
    assert abs(loss - wanted.losses[0]) < 1e-14
    assert set(step.gradients()) == {*wanted.gradients, "head.weight"}


def test_a_long_call_without_arguments_stays_a_call() -> None:
    name = "value_" * 20
    text = "\n".join(assign(name, f"{name}.wait", [], 4))
    assert text.count("\n") == 2 and f"{name}.wait()" in text
