"""The commands as a user types them: results, exit codes, messages."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli import main, parse_plan
from autopar.errors import PlanError, UnsupportedError
from autopar.plan.plan import Plan
from autopar.runtime.executor import Spec
from models import gpt as gpt_model

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "models" / "gpt.py")
LLAMA = str(ROOT / "models" / "llama.py")
MLP = str(ROOT / "models" / "mlp.py")
VIT = str(ROOT / "models" / "vit.py")

BROKEN = {
    "empty": ("", "has no build() and no batch()"),
    "syntax": ("def build(:\n", ":1"),
    "import": ("import nothing_of_that_name\n", "No module named 'nothing_of_that_name'"),
    "build": ("def build():\n    return 3\ndef batch(size, generator):\n    return 1\n", "not a module"),
    "forward": (
        "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        return self.l(x[:, 1:]).sum()\n"
        "def build():\n    return M()\ndef batch(size, generator):\n    return torch.randn(size, 4, generator=generator)\n",
        "forward.py:7",
    ),
    "batch": (
        "import torch\ndef build():\n    return torch.nn.Linear(1, 1)\ndef batch(size, generator):\n    raise ValueError('no data')\n",
        "batch.py:5",
    ),
}


def run(*argv: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "autopar", *map(str, argv)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    )


def printed(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> Any:
    """A command in this process, with --json: what it printed."""
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


# -- mistakes


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "required: train | plan"),
        (["fly"], "invalid choice: 'fly'"),
        (["inspect"], "required: file"),
        (["inspect", "nowhere.py"], "no model file 'nowhere.py'"),
        (["train", GPT, "--steps", "many"], "--steps: 'many' is not a whole number"),
        (["train", GPT, "--lr", "-1"], "'-1' is not a positive number"),
        (["train", GPT, "--mesh", "dp2"], "'dp2' is not well formed"),
        (["train", GPT, "--mesh", "dp=2,ep=2"], "ep=2 is not supported yet"),
        (["train", GPT, "--data", "/nowhere"], "'/nowhere' is not a folder"),
        (["train", VIT, "--data", "text"], "ViT does not take text"),
        (["train", GPT, "--out", "/dev/null/x"], "'/dev/null/x' can't be written"),
        (["inspect", GPT, "--mesh", "tp=2,ep=2"], "ep=2 is not supported yet"),
        (["inspect", GPT, "--preset", "huge"], "no preset 'huge'"),
        (["inspect", GPT, "--set", "layerz=1"], "unexpected keyword argument 'layerz'"),
        (["inspect", GPT, "--set", "layers"], "--set layers=4"),
        (["inspect", GPT, "--html", "page.html"], "report pages are not supported yet"),
        (["inspect", GPT, "--stage", "1"], "there is no stage 1"),
        (["inspect", GPT, "--plan", "per_microbatch"], "statistics per microbatch are not supported yet"),
        (["inspect", GPT, "--plan", "zero=4"], "is no ZeRO level"),
        (["inspect", GPT, "--plan", "recompute=bloks.*"], "no module that the forward calls matches 'bloks.*'"),
        (["inspect", GPT, "--plan", "recompute=1kB"], "no choice of what to recompute fits into 1,000 bytes"),
        (["inspect", GPT, "--plan", "absent.json"], "can't be read"),
        (["inspect", GPT, "--plan", "swift"], "'swift' is no field of a plan"),
        (["inspect", GPT, "--mesh", "dp=2", "--batch", "3"], "a multiple of 2 rows"),
        (["inspect", GPT, "--precision", "bf16"], "'bf16' is not supported yet"),
        (["plan", GPT, "--cluster", "h100:8x8", "--memory", "80GB"], "the search over meshes is not supported yet"),
        (["plan", GPT], "needs a mesh"),
        (["verify", GPT, "--backend", "inductor"], "not supported yet"),
    ],
)
def test_mistakes(argv: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.startswith("autopar compile")]  # progress, on a slow machine
    assert text in err and told[0].startswith("autopar: ") and "Traceback" not in err and not out


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("command", ["inspect", "train"])
def test_broken_files(name: str, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, text = BROKEN[name]
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    assert main([command, str(path), *(["--out", str(tmp_path / "out")] if command == "train" else [])]) == 2
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err and err.count("autopar: ") == 1


@pytest.mark.procs
def test_mistake_that_workers_find(tmp_path: Path) -> None:
    path = tmp_path / "forward.py"
    path.write_text(BROKEN["forward"][0])
    done = run("train", path, "--mesh", "dp=2", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stdout == "" and "forward.py:7" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("autopar: ") == 1, done.stderr


# -- plans


def test_parse_plan(tmp_path: Path) -> None:
    assert parse_plan(None) == parse_plan("auto") == Plan()
    assert parse_plan("zero=0,microbatches=2,sequence") == Plan(zero=0, microbatches=2, sequence=True)
    assert parse_plan("sequence=false, shard:head.*=dim0@tp") == Plan(sequence=False, shard={"head.*": "dim0@tp"})
    Plan(zero=0, shard={"a": "replicate"}).save(tmp_path / "p.json")
    assert parse_plan(str(tmp_path / "p.json")) == Plan(zero=0, shard={"a": "replicate"})
    for text in ("microbatches=two", "zero=7", "recompute", "sequence=4", "shard:a", "mesh=dp"):
        with pytest.raises(PlanError):
            parse_plan(text)
    with pytest.raises(UnsupportedError):
        parse_plan("per_microbatch")
    assert parse_plan("zero=3,recompute=full") == Plan(zero=3, recompute="full")
    assert parse_plan("recompute=blocks.*,strict") == Plan(recompute=("blocks.*",), strict=True)
    assert parse_plan("recompute=2GB").recompute == "2GB" and parse_plan("recompute=4096").recompute == 4096


def test_plan_round_trip(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = printed(capsys, "plan", GPT, "--mesh", "dp=2,tp=2", "--plan", "microbatches=2", "--save", tmp_path / "p.json")
    assert first["mesh"] == "dp=2,tp=2" and first["microbatches"] == 2 and first == json.loads((tmp_path / "p.json").read_text())
    again = printed(capsys, "plan", GPT, "--mesh", "dp=2,tp=2", "--plan", tmp_path / "p.json")
    assert again == first
    seen = printed(capsys, "inspect", GPT, "--plan", tmp_path / "p.json")  # on the mesh that it was made for
    assert seen["mesh"] == "dp=2,tp=2" and seen["plan"] == first


# -- inspect, verify


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GPT, "--mesh", "dp=2,tp=2"]) == 0
    text = capsys.readouterr().out
    assert "blocks.0.attention.qkv.weight" in text and "(3 4@tp 8)" in text and "bytes that a rank sends a step: dp" in text
    assert main(["inspect", GPT, "--mesh", "dp=2,tp=2", "--source"]) == 0
    compile(capsys.readouterr().out, "source", "exec")
    assert main(["inspect", LLAMA, "--mesh", "tp=2", "--graph", "backward", "--set", "layers=1", "--set", "outputs=dict"]) == 0
    assert "comm.all_reduce" in capsys.readouterr().out
    data = printed(capsys, "inspect", MLP, "--mesh", "dp=2", "--source", "--graph")
    assert {"parameters", "collectives", "memory", "graph", "source"} <= set(data)


def test_verify(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = printed(
        capsys, "verify", GPT, "--mesh", "dp=2,tp=2", "--plan", "microbatches=2,sequence", "--steps", "2", "--set", "dropout=0.1"
    )
    assert data["ok"] and data["worst"] < 1e-10 and data["steps"] == 2
    assert main(["verify", MLP, "--mesh", "dp=2"]) == 0
    assert "mesh dp=2: equal" in capsys.readouterr().out


def test_verify_tells_a_difference(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import autopar.api

    # one rank's sums miss a part
    class Wrong(autopar.api.SimComm):
        def _reduce(self, parts: Any, op: str, out: torch.Tensor) -> torch.Tensor:
            return super()._reduce([parts[0], *(0 * p for p in parts[1:])], op, out)

    real = autopar.api.verify
    monkeypatch.setattr(autopar.api, "verify", lambda *a, **k: real(*a, **k, make=Wrong))
    assert main(["verify", MLP, "--mesh", "dp=2"]) == 1
    assert "NOT equal" in capsys.readouterr().out


# -- train


def test_train_one_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    data = printed(
        capsys, "train", GPT, "--steps", "6", "--batch", "4", "--eval-every", "3", "--eval-batches", "2", "--lr", "1e-2", "--out", out
    )
    assert [step for step, _ in data["held_out"]] == [0, 3, 6]
    assert 5.3 < data["held_out"][0][1] < 5.8 and data["held_out_loss"] < data["held_out"][0][1]
    assert data["unit"] == "tokens" and data["per_s"] > 0 and not data["interrupted"]
    assert all(Path(path).exists() for path in data["files"].values())
    rows = list(csv.reader(open(out / "losses.csv")))
    assert rows[0][:3] == ["step", "loss", "held_out_loss"] and [r[0] for r in rows[1:]] == ["0", "1", "2", "3", "4", "5", "6", "6"]
    weights = torch.load(out / "weights.pt")
    gpt_model.build().load_state_dict(weights)
    assert Plan.load(out / "plan.json").zero == 1
    assert Spec.from_json((out / "source" / "step.json").read_text()).microbatches == 1
    assert "blocks.0.mlp.up.weight" in (out / "explain.txt").read_text()
    # the same seed, the same weights
    printed(
        capsys,
        "train",
        GPT,
        "--steps",
        "6",
        "--batch",
        "4",
        "--eval-every",
        "0",
        "--eval-batches",
        "0",
        "--lr",
        "1e-2",
        "--out",
        tmp_path / "two",
    )
    again = torch.load(tmp_path / "two" / "weights.pt")
    assert all(torch.equal(weights[n], again[n]) for n in weights)


@pytest.mark.parametrize("file", [LLAMA, MLP, VIT])
def test_train_other_batches(file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = printed(
        capsys, "train", file, "--steps", "2", "--batch", "4", "--eval-batches", "1", "--optimizer", "sgd", "--clip", "1", "--out", tmp_path
    )
    assert data["steps"] == 2 and data["unit"] == ("tokens" if file == LLAMA else "rows")


@pytest.mark.procs
def test_train_on_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ("train", GPT, "--steps", "3", "--batch", "4", "--eval-batches", "1", "--precision", "fp64", "--set", "dropout=0.1")
    a = printed(capsys, *common, "--out", tmp_path / "one")
    four = run(*common, "--json", "--mesh", "dp=2,tp=2", "--plan", "sequence", "--out", tmp_path / "four")
    assert four.returncode == 0, four.stderr
    assert "held-out loss" in four.stderr and "tokens/s" in four.stderr
    b = json.loads(four.stdout)
    for (step, x), (other, y) in zip(a["held_out"], b["held_out"], strict=True):
        assert step == other and abs(x - y) < 1e-10
    first, second = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "four"))
    assert all(torch.allclose(first[n], second[n], rtol=1e-6, atol=1e-8) for n in first)


@pytest.mark.procs
def test_train_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar", "train", LLAMA, "--mesh", "tp=2"]
    command += ["--steps", "2", "--batch", "2", "--eval-batches", "1", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2  # one rank speaks


@pytest.mark.procs
def test_train_interrupted(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "autopar",
        "train",
        GPT,
        "--mesh",
        "dp=2",
        "--steps",
        "100000",
        "--eval-every",
        "0",
        "--eval-batches",
        "1",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "losses.csv"
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        end = time.monotonic() + 120
        while not (log.exists() and len(log.read_text().splitlines()) > 3) and time.monotonic() < end and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted after" in err and "Traceback" not in err
    done = json.loads((tmp_path / "result.json").read_text())
    assert done["interrupted"] and 0 < done["steps"] < 100000
    assert (tmp_path / "weights.pt").exists() and "weights:" in out


# -- bench


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    data = printed(capsys, "bench", GPT, "--steps", "2", "--blocks", "2", "--batch", "4", "--plan", "microbatches=2")
    assert data["ratio"] > 0 and data["collectives"] == [] and len(data["step_seconds"]) == 2
    phases = data["phases_s"]
    assert {"forward, body", "backward, body", "optimizer", "driver and the rest"} <= set(phases)
    assert sum(p["least"] for p in phases.values()) <= max(max(b) for b in data["step_seconds"])
    assert main(["bench", MLP, "--steps", "1", "--blocks", "1", "--optimizer", "sgd"]) == 0
    assert "plain model, one process" in capsys.readouterr().out


@pytest.mark.procs
def test_bench_on_workers() -> None:
    done = run("bench", GPT, "--mesh", "dp=2", "--steps", "2", "--blocks", "2", "--batch", "4", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    seen = {(c["kind"], tuple(c["axes"])) for c in data["collectives"]}
    assert {("all_gather", ("dp",)), ("reduce_scatter", ("dp",))} <= seen
    assert all(c["bytes"] > 0 and c["start_s"] > 0 for c in data["collectives"])
