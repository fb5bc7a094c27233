"""The bytes that are alive in a step: predicted from the emitted statements, and counted on simulated ranks as they run them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from autopar.api import make_options, parallelize
from autopar.codegen.emit import Module, Script, _Statement
from autopar.codegen.live import Follower, Profile, Storages, profile
from autopar.codegen.memory import LARGE
from autopar.compiler import Compiled
from autopar.inspect.live import Measured, measure
from autopar.inspect.tables import live_peaks, memory_rows
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan, limit_of
from autopar.programs import Options
from models import gpt

#: a layer's activations are of 2 MiB a rank and more.
SIZES: dict[str, Any] = dict(vocab=1024, sequence=128, hidden=256, heads=4, layers=2)
ROWS = 16
CASES = {
    "dp": ("dp=2", Plan(), {}),
    "dp, ZeRO 0": ("dp=2", Plan(zero=0), {}),
    "dp, ZeRO 2": ("dp=2", Plan(zero=2, buckets=2**21), {}),
    "dp, ZeRO 3": ("dp=2", Plan(zero=3, buckets=2**21), {}),
    "tp": ("tp=2", Plan(), {}),
    "tp, ZeRO 0": ("tp=2", Plan(zero=0), {}),
    "sequence": ("tp=2", Plan(sequence=True), {}),
    "microbatches": ("dp=2", Plan(microbatches=2), {}),
    "side by side": ("tp=2", Plan(interleave=2), {}),
    "loop of lanes": ("tp=2", Plan(interleave=2, microbatches=4), {}),
    "recompute": ("dp=2", Plan(recompute="full"), {}),
    "dropout": ("dp=2", Plan(), dict(dropout=0.1, layers=1)),
}


def options(plan: Plan) -> Options:
    return make_options(None, partial(torch.optim.AdamW, lr=1e-3), plan, None, 0, "check", None, 0, "eager", ())


def run(mesh: str, plan: Plan, config: dict[str, Any], change: Callable[[str], str] | None = None) -> tuple[Measured, Compiled]:
    """What rank 0 held, and what was compiled for it."""
    config = {**SIZES, **config}
    torch.manual_seed(0)
    model, batch = gpt.build(**config), gpt.batch(ROWS, torch.Generator().manual_seed(0), **config)
    share: dict[Any, Compiled] = {}
    found = measure(model, Mesh.parse(mesh), batch, options(plan), share=share, change=change)
    return found[0], next(iter(share.values()))


def predicted(compiled: Compiled) -> Profile:
    assert isinstance(compiled.module, Module)
    return profile(compiled.final, compiled.module.script)


def apart(found: Profile, measured: Measured) -> float:
    """The largest relative difference of the peaks."""
    return max(abs(found.peak(phase).bytes / measured.peaks[phase] - 1) for phase in ("forward", "backward"))


@pytest.mark.parametrize("case", CASES)
def test_peaks(case: str) -> None:
    mesh, plan, config = CASES[case]
    measured, compiled = run(mesh, plan, config)
    found = predicted(compiled)
    assert apart(found, measured) < 0.02, (found.peak("forward"), found.peak("backward"), measured)
    assert (
        found.left == measured.left or compiled.spec.zero > 1
    )  # the last reductions, under way when the program ends, hold what they reduce
    assert measured.peaks["backward"] > 10 * LARGE  # large enough for the deletions to matter
    spec = compiled.spec
    whole, part = (sum(b.dtype.itemsize * n for b, n in sizes) for sizes in (
        [(b, b.numel) for b in spec.buckets], [(b, b.part(spec.mesh)) for b in spec.buckets]))  # fmt: skip
    assert measured.kept == {
        "parameters": part if spec.zero == 3 else whole, "gradients": whole if spec.zero < 2 else part,
        "optimizer state": 2 * (part if spec.zero else whole), "buffers": 0,
    }  # fmt: skip
    rows = {r.what: r.bytes[spec.zero] for r in memory_rows(compiled, 2.0)}
    assert rows["optimizer state"] == measured.kept["optimizer state"]
    assert rows["activations and temporaries at most, backward"] == found.peak("backward").bytes


STAGES = {
    "1f1b": ("pp=2", Plan(microbatches=4)),
    "zb-h1": ("pp=2", Plan(microbatches=4, schedule="zb-h1")),
    "zb-v": ("pp=2", Plan(microbatches=4, schedule="zb-v")),
    "ZeRO 3": ("pp=2,dp=2", Plan(microbatches=4, zero=3)),
}


@pytest.mark.parametrize("case", STAGES)
def test_peaks_of_stages(case: str) -> None:
    """Within 3 %: a message that is under way may lie in memory that is counted already."""
    mesh, plan = Mesh.parse(STAGES[case][0]), STAGES[case][1]
    config = {**SIZES, "layers": 4 if case == "zb-v" else 2}
    torch.manual_seed(0)
    model, batch = gpt.build(**config), gpt.batch(ROWS, torch.Generator().manual_seed(0), **config)
    share: dict[Any, Compiled] = {}
    measured = measure(model, mesh, batch, options(plan), share=share)
    for compiled in share.values():
        assert compiled.pipeline is not None
        rank = mesh.rank({"pp": compiled.pipeline.schedule.placement[next(iter(compiled.pipeline.programs))]})
        for phase, most in live_peaks(compiled).items():
            assert abs(most / measured[rank].peaks[phase] - 1) < 0.03, (rank, phase, most, measured[rank])


@pytest.mark.parametrize("limit", ["60MB", "50MB", "40MB"])
def test_a_limit_on_memory_is_kept(limit: str) -> None:
    """What a rank really allocates for parameters, gradients and activations is within the limit, and near it."""
    measured, compiled = run("tp=2", Plan(recompute=limit), {})
    kept = measured.kept["parameters"] + measured.kept["gradients"]
    real = kept + max(measured.peaks["forward"], measured.peaks["backward"])
    wanted = limit_of(limit)
    assert wanted is not None and 0.75 * wanted < real <= wanted, (real, wanted)


@pytest.mark.parametrize("where", ["driver", "segments"])
def test_deletions_that_are_missing_are_noticed(where: str) -> None:
    def undeleted(text: str) -> str:
        segments, driver = text.split("\ndef step(")
        cut = partial(re.sub, r"(?m)^ +del .*\n", "")
        return f"{segments}\ndef step({cut(driver)}" if where == "driver" else f"{cut(segments)}\ndef step({driver}"

    measured, compiled = run("dp=2", Plan(), dict(layers=1), undeleted)
    assert apart(predicted(compiled), measured) > 0.02


class Forgetful(Follower):
    """Takes what a forward segment keeps for the backward for nothing."""

    def segment(self, s: _Statement, script: Script, mb: int) -> None:
        super().segment(s, script, mb)
        for v in s.defines if self.phase == "forward" else ():
            memory = self.names[v].memory
            self.live -= memory.bytes
            memory.bytes = 0


def test_a_prediction_that_forgets_is_noticed() -> None:
    measured, compiled = run("dp=2", Plan(), dict(layers=1))
    assert isinstance(compiled.module, Module)
    assert apart(predicted(compiled), measured) < 0.02
    assert apart(profile(compiled.final, compiled.module.script, kind=Forgetful), measured) > 0.02
    script = compiled.module.script
    kept = replace(script, statements=tuple(replace(s, gone=[]) for s in script.statements))
    assert apart(profile(compiled.final, kept), measured) > 0.02


def test_storages() -> None:
    """Once a storage, views too, until the last of them dies; what existed before isn't counted."""
    before = torch.ones(1000)
    with Storages() as found:
        a = before.view(10, 100)
        assert found.bytes == 0
        b = a * 2
        c = b.t()
        assert found.bytes == 4000
        del b
        assert found.bytes == 4000
        c.add_(1)
        d = torch.mm(c, a, out=torch.empty(100, 100))
        assert found.bytes == 44000
        del c, d
        assert found.bytes == 0 and found.most == 44000


def test_metrics() -> None:
    """The largest prediction beside what lives between steps."""
    torch.manual_seed(0)
    model, batch = gpt.build(), gpt.batch(4, torch.Generator().manual_seed(0))
    step = parallelize(model, Mesh(), optimizer=partial(torch.optim.AdamW, lr=1e-3))
    assert step.metrics == {}
    step(batch)
    elements = sum(p.numel() for p in model.parameters())
    compiled = step._need_compiled()
    assert step.metrics["peak_bytes"] == 4 * elements * 4 + max(live_peaks(compiled).values())
    assert "activations and temporaries at most, backward" in step.explain()
    step.close()
