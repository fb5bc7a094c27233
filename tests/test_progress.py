"""What a compilation says of itself: nothing where it is short, on one stream of rank 0 where it is long."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.api import make_options
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.progress import Progress
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step
from models import mlp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(progress: Progress) -> None:
    with progress:
        progress.at("capture")
        progress.tick()
        progress.at("emit")


def test_short_compilations_are_silent() -> None:
    stream = io.StringIO()
    run(progress := Progress("GPT", stream, patience=1000.0))
    assert stream.getvalue() == ""
    assert list(progress.seconds) == ["capture", "emit"] and all(s >= 0 for s in progress.seconds.values())


def test_long_ones_say_once_what_they_do_and_then_what_they_did() -> None:
    stream = io.StringIO()
    run(Progress("GPT for dp=2", stream, patience=0.0))
    first, last = stream.getvalue().splitlines()
    assert first == "autopar compiles GPT for dp=2: capture ..."
    assert last.startswith("autopar compiled GPT for dp=2 in 0.0 s: ")


def test_a_terminal_has_one_line_that_grows() -> None:
    stream = Terminal()
    run(Progress("GPT", stream, patience=0.0))
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")
    assert stream.getvalue().startswith("\r\x1b[Kautopar compiles GPT: capture ...")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_an_error_begins_on_a_line_of_its_own(stream: io.StringIO) -> None:
    with pytest.raises(ValueError), Progress("GPT", stream, patience=0.0) as progress:
        progress.at("capture")
        raise ValueError
    assert stream.getvalue().endswith("capture ...\n") or stream.getvalue().endswith("\r\x1b[K\n")
    assert "compiled" not in stream.getvalue()


def test_time_adds_up_where_a_stage_comes_again() -> None:
    with mock.patch("autopar.progress.time.perf_counter", iter(range(100)).__next__):
        with Progress() as progress:  # 0, then one second a question
            for stage in ("check", "plan", "check"):
                progress.at(stage)
    assert progress.seconds == {"check": 2.0, "plan": 1.0}


def make(comm: SimComm, progress: bool = True) -> Step:
    torch.manual_seed(0)
    options = make_options(mlp.loss, partial(torch.optim.SGD, lr=0.1), Plan(), None, 0, "check", None, 0, "eager", ())
    step = Step(mlp.build(), Mesh(dp=2), comm, replace(options, progress=progress))
    step.compile(step.shard(mlp.batch(4, torch.Generator().manual_seed(0))))
    return step


@pytest.mark.parametrize("shown", [True, False])
def test_rank_0_speaks_unless_told_not_to(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("autopar.step.Progress", partial(Progress, patience=0.0)):
        steps = run_simulated(Mesh(dp=2), lambda comm: make(comm, shown))
    said = capsys.readouterr().err
    assert said.count("autopar compiled") == shown and ("MLP for dp=2" in said) == shown
    stages = list(steps[1]._need_compiled().seconds)
    assert stages == ["capture", "canonicalize", "check", "analyse", "plan", "plan dp", "insert", "buckets", "emit"]


def test_two_steps_in_a_process_share_nothing() -> None:
    """Two models, two optimizers, in turns: each does what it does alone; one that is closed leaves the other running."""

    def data(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)

    def made(seed: int, lr: float) -> Step:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        return autopar.parallelize(Model(model), Mesh(), optimizer=partial(torch.optim.SGD, lr=lr), loss=None, seed=seed, progress=False)

    alone = []
    for seed, lr in ((1, 0.1), (2, 0.3)):
        step = made(seed, lr)
        alone.append([float(step(data(k))) for k in range(3)])
        step.close()
    one, two = made(1, 0.1), made(2, 0.3)
    turns = [(float(one(data(k))), float(two(data(k)))) for k in range(2)]
    one.close()
    turns.append((alone[0][2], float(two(data(2)))))
    assert [list(t) for t in zip(*turns, strict=True)] == alone
    with pytest.raises(autopar.errors.InputError, match="closed"):
        one(data(0))
    two.close()


class Model(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) - y).square().mean()
