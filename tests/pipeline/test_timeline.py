"""Timelines: what ran is all there, in an order that can be, as a trace and as a picture; and the command line shows stages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from autopar.cli import main
from autopar.errors import InputError
from autopar.inspect.timeline import Timeline, make_timeline
from autopar.plan.plan import Plan
from autopar.runtime.pipeline import Span
from autopar.schedule.build import build
from autopar.step import Step
from tests.cases.run import Net, ranks


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_timeline(tmp_path: Path, schedule: str) -> None:
    model = Net(lambda m, x: m.layers(x).pow(2).mean(), layers=nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def use(step: Step, rank: int) -> Timeline:
        with pytest.raises(InputError, match="isn't compiled yet"):
            step.timeline(tmp_path / "none.json")
        step(step.shard(x))
        return step.timeline(tmp_path / "step.json")

    made, other = ranks("pp=2", model, use, plan=Plan(microbatches=4, schedule=schedule))
    assert made.measured == other.measured and 0.0 <= made.bubble < 1.0
    wanted = Counter(str(a) for a in made.schedule)
    assert Counter(s.label for spans in made.measured for s in spans if s.kind in "FBIW") == wanted
    for spans in made.measured:
        tasks = [s for s in spans if s.kind != "send"]
        assert all(a.end <= b.begin for a, b in zip(tasks, tasks[1:]))
    events: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for pid in (0, 1):  # measured, predicted
        assert Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid and e["cat"] in "FBIW") == wanted
    assert all(e["ts"] > -1e-3 and e["dur"] >= 0 for e in events if e["ph"] == "X")
    boxes = [e for e in ElementTree.parse(tmp_path / "step.svg").iter() if e.tag.endswith("rect")]
    assert len(boxes) > 2 * wanted.total()


def test_bubble_by_hand() -> None:
    """Two stages, one microbatch, tasks of a second: each rank works 2 of the 4 s between its first and last task, or 2 of 2."""
    first = [Span(0, "F", 0, 0.0, 1.0), Span(0, "B", 0, 3.0, 4.0)]
    second = [Span(1, "F", 0, 1.0, 2.0), Span(1, "B", 0, 2.0, 3.0)]
    made = make_timeline(build("1f1b", 2, 1, 2), [(10.0, first), (10.0, second)])
    assert made.bubble == pytest.approx(0.5) and made.predicted.bubble == pytest.approx(0.5)
    late = make_timeline(build("1f1b", 2, 1, 2), [(10.0, first), (9.0, [s.later(1.0) for s in second])])
    assert late.measured == made.measured  # clocks of ranks that began at other times


def test_inspect_shows_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "models/gpt.py", "--preset", "tiny", "--mesh", "pp=2", "--stage", "1", "--json"]
    assert main([*command, "--source"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in told["stages"]] == [0, 1] and "for stage 1 of 2" in told["source"]
    up = [row for row in told["crossings"] if row["source"] == "0 F" and row["target"] == "1 F"]
    assert up and all(row["bytes"] > 0 and row["times"] == told["plan"]["microbatches"] for row in up)


def spans_by_hand(pause: float = 0.0) -> list[tuple[float, list[Span]]]:
    """1F1B of two stages and two microbatches; messages up are on their way for 0.5 s, those down for 0.25.

    A send takes the first rank 0.25 s, the second 0.125; between its backwards the first does other things for 0.25 s before it waits.
    The second waits ``pause`` before its first backward, for nothing.
    """
    first = [
        Span(0, "F", 0, 0.0, 1.0), Span(0, "send", 0, 1.0, 1.25), Span(0, "F", 1, 1.25, 2.5), Span(0, "send", 1, 2.5, 2.75),
        Span(0, "B", 0, 6.75 + pause, 8.75 + pause, 4.0 + pause), Span(0, "B", 1, 11.875 + pause, 13.875 + pause, 2.875),
    ]  # fmt: skip
    second = [
        Span(1, "F", 0, 1.5, 3.5, 1.5), Span(1, "B", 0, 3.5 + pause, 6.5 + pause, pause), Span(1, "send", 0, 6.5 + pause, 6.625 + pause),
        Span(1, "F", 1, 6.625 + pause, 9.125 + pause), Span(1, "B", 1, 9.125 + pause, 11.625 + pause),
        Span(1, "send", 1, 11.625 + pause, 11.75 + pause),
    ]  # fmt: skip
    return [(10.0, first), (10.0, second)]


def test_prediction_has_messages() -> None:
    """By hand: every task begins in the prediction when it did, and the busiest rank works 10 of 10.125 s."""
    made = make_timeline(build("1f1b", 2, 2, 2), spans_by_hand())
    tasks = {s.label: s.begin for spans in made.measured for s in spans if s.kind in "FB"}
    assert {s.label: s.start for s in made.predicted.spans} == pytest.approx(tasks)
    assert made.bubble == pytest.approx(1 - 10 / 10.125) and made.predicted.bubble == pytest.approx(made.bubble)
    assert made.predicted.times.links == pytest.approx({(0, 1): 0.5, (1, 0): 0.25})


def test_prediction_knows_no_waits() -> None:
    """A rank that waits for what it has is not predicted: the bubbles come apart."""
    made = make_timeline(build("1f1b", 2, 2, 2), spans_by_hand(pause=2.0))
    assert made.bubble == pytest.approx(1 - 10 / 12.125) and made.predicted.bubble == pytest.approx(1 - 10 / 10.125)
