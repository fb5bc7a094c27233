"""Compiling takes work in proportion to the depth of a model, and choosing none for layers that repeat. Counted, not timed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch

import autopar
from autopar.api import make_options
from autopar.capture import capture
from autopar.compiler import compile_program
from autopar.inspect.model import Inspection, inspect_model
from autopar.layout.mesh import Mesh
from autopar.plan import layout
from autopar.plan.axis import Choice, solve
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT
from models import gpt, llama

PACKAGE = os.path.dirname(autopar.__file__) + os.sep


def inspect(name: str, layers: int) -> Inspection:
    module = {"gpt": gpt, "llama": llama}[name]
    with torch.device("meta"):
        model = module.build(layers=layers)
    batch = module.batch(4, torch.Generator().manual_seed(0))
    options = make_options(None, partial(torch.optim.SGD, lr=0.1), Plan(), None, 0, "check", None, 0, "eager", ())
    return inspect_model(model, Mesh(dp=2, tp=2), batch, options)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_size_of_the_choice_does_not_grow(name: str) -> None:
    sizes: dict[int, list[int]] = {3: [], 9: []}
    for layers, found in sizes.items():
        choices: list[Choice] = []
        with mock.patch.object(layout, "solve", lambda problem, choices=choices: choices.append(solve(problem)) or choices[-1]):
            inspect(name, layers)
        found += [c.columns for c in choices]
    assert len(sizes[3]) == 2 and sizes[3] == sizes[9]


def lines_run(fn: Callable[[], Any]) -> Counter[CodeType]:
    """How many lines of autopar's functions run in a call, turns of comprehensions included."""
    counts: Counter[CodeType] = Counter()

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        counts[frame.f_code] += 1
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        fn()
    finally:
        sys.settrace(before)
    return counts


def test_no_function_runs_more_often_than_depth_asks_for() -> None:
    counts = []
    for layers in (12, 3, 6, 12):  # the first for what is done once a process
        with torch.device("meta"):
            model = llama.build(layers=layers)
        program = capture(model, llama.batch(4, torch.Generator().manual_seed(0)))
        program = replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
        compile_ = partial(compile_program, program, Mesh(dp=2, tp=2), Plan(), DEFAULT, {i.name: 0 for i in program.inputs_of("batch")})
        counts.append(lines_run(compile_))
    _, few, some, many = counts
    assert sum(many.values()) > 10**6
    grown = {}
    for code in many:
        first, then = some[code] - few[code], many[code] - some[code]
        if then > 2 * first + max(0.05 * first, 100):
            grown[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"] = (
                few[code],
                some[code],
                many[code],
            )
    assert grown == {}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layers_share_their_segments(name: str) -> None:
    """The text grows by calls, not by functions, but for what packs the buckets."""
    few, many = (inspect(name, layers).compiled.module for layers in (3, 9))
    assert many.calls > 2 * few.calls
    assert many.segments - few.segments <= 2
