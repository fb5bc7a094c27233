"""Layouts that are kept: an entry is used where nothing that matters has changed, and never where it doesn't fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import autopar
from autopar import compiler
from autopar.api import make_options
from autopar.errors import InputError
from autopar.inspect.model import Inspection, inspect_model
from autopar.layout.mesh import Mesh
from autopar.plan import cache as caches
from autopar.plan.cache import Cache, Key, as_cache
from autopar.plan.plan import Plan
from models import gpt

MESH = "dp=2,tp=2"
AUTO = Plan()
MANY = Plan(sequence=True, microbatches=2, zero=0)
ROOT = Path(__file__).parent.parent.parent


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def groups(named: Any) -> torch.optim.Optimizer:
    flat = [p for n, p in named if n.endswith("bias")]
    return torch.optim.SGD([{"params": [p for n, p in named if not n.endswith("bias")]}, {"params": flat, "momentum": 0.5}], lr=0.1)


def run(
    cache: Cache | None, mesh: str = MESH, plan: Plan = AUTO, rows: int = 4, dtype: torch.dtype = torch.float32, optimizer: Any = sgd,
    rules: Any = (), precision: str | None = None, **sizes: Any,
) -> Inspection:  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt.build(**{"layers": 1, **sizes}).to(dtype)
    options = make_options(None, optimizer, plan, precision, 0, "check", None, 0, "eager", rules)
    batch = gpt.batch(rows, torch.Generator().manual_seed(0))
    return inspect_model(model, Mesh.parse(mesh), batch, replace(options, cache=cache))


@cache
def base() -> tuple[Mapping[str, str], Inspection]:
    """The entries and the result of a run without any change."""
    entries: dict[str, str] = {}
    return entries, run(as_cache(entries))


def kept(folder: Path | None = None) -> Cache:
    """A cache that holds the entry of ``base``."""
    entries = dict(base()[0])
    held = as_cache(entries if folder is None else folder)
    assert held is not None
    for key, text in entries.items():
        held.write(key, text)
    return held


def without_choosing() -> AbstractContextManager[Any]:
    return mock.patch.object(compiler, "choose", side_effect=AssertionError("chosen again"))


@pytest.mark.parametrize("plan", [Plan(), MANY])
@pytest.mark.parametrize("kind", ["folder", "mapping"])
def test_an_entry_gives_the_same_text(kind: str, plan: Plan, tmp_path: Path) -> None:
    held = as_cache(tmp_path / "cache" if kind == "folder" else {})
    assert held is not None
    first = run(held, plan=plan)
    assert held.take_reports() == []
    with without_choosing():
        again = run(held, plan=plan)
    (report,) = held.take_reports()
    assert "the layout is that of the entry" in report
    assert again.source() == first.source() == run(None, plan=plan).source()
    assert again.table() == first.table() and again.plan == first.plan


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_process_finds_the_same(seed: str) -> None:
    """Keys and texts depend on no order of a set and on no address: ranks choose alike, and find what others kept."""
    code = "from tests.plan.test_cache import *; e = {}; print(run(as_cache(e), plan=MANY).source(), *e, sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    entries: dict[str, str] = {}
    assert done.stdout.splitlines() == [*run(as_cache(entries), plan=MANY).source().splitlines(), "", *entries]


#: what may change, and the argument or the patch that changes it.
CHANGES: Mapping[str, Mapping[str, Any] | Callable[[], AbstractContextManager[Any]]] = {
    "model": {"layers": 2},
    "size": {"hidden": 96},
    "attribute": {"dropout": 0.5},
    "shape": {"rows": 8},
    "dtype": {"dtype": torch.float64},
    "precision": {"precision": "fp64"},
    "mesh": {"mesh": "tp=2,dp=2"},
    "mesh size": {"mesh": "dp=4,tp=2"},
    "sequence": {"plan": Plan(sequence=True)},
    "zero": {"plan": Plan(zero=0)},
    "buckets": {"plan": Plan(buckets=1000)},
    "microbatches": {"plan": Plan(microbatches=2)},
    "pins": {"plan": Plan(shard={"head.weight": "replicate"})},
    "groups": {"optimizer": groups},
    "rules": {"rules": [autopar.rule("aten.gelu.default", "* -> *")]},
    "torch": lambda: mock.patch.object(torch, "__version__", "2.99"),
    "solver": lambda: mock.patch.object(caches, "version", lambda name: "9"),
    "autopar": lambda: mock.patch.object(caches, "code_digest", lambda: "other sources"),
    "default dtype": lambda: mock.patch.object(torch, "get_default_dtype", lambda: torch.float64),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_another_key(what: str) -> None:
    entries, change = dict(base()[0]), CHANGES[what]
    held = as_cache(entries)
    assert held is not None
    with nullcontext() if isinstance(change, Mapping) else change():
        run(held, **(change if isinstance(change, Mapping) else {}))
    assert len(entries) == 2 and held.take_reports() == []


def damaged(text: str, **change: Any) -> str:
    """An entry with a changed body that is digested anew: nothing but its meaning is wrong."""
    entry = json.loads(text)
    body = {**json.loads(entry["body"]), **change}
    entry["body"] = json.dumps(body)
    entry["digest"] = caches.digest_of(entry["body"])
    return json.dumps(entry)


def swapped(text: str) -> str:
    """Every strategy replaced by another one of as many operands and results."""
    axes = json.loads(json.loads(text)["body"])["axes"]
    for found in axes.values():
        kinds = [tuple(len(side.split()) for side in s.split("->")) for s in found["strategies"]]
        found["nodes"] = [next((o for o in range(len(kinds)) if o != k and kinds[o] == kinds[k]), k) for k in found["nodes"]]
    return damaged(text, axes=axes)


def whole(text: str) -> str:
    """Everything on ``tp`` whole: a legal layout, and not the chosen one."""
    axes = json.loads(json.loads(text)["body"])["axes"]
    tp = axes["tp"]
    tp["strategies"] = [" -> ".join(" ".join("R" for _ in side.split()) for side in s.split("->")) for s in tp["strategies"]]
    tp["inputs"] = dict.fromkeys(tp["inputs"], "R")
    return damaged(text, axes=axes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: "", "not well formed"),
        (lambda t: t[: len(t) // 2], "not well formed"),
        (lambda t: "[1, 2]", "no entry"),
        (lambda t: '{"key": 1}', "no entry"),
        (lambda t: json.dumps({**json.loads(t), "parts": {}}), "another batch dims, buckets,"),
        (lambda t: json.dumps({**json.loads(t), "parts": 3}), "not well formed"),
        (lambda t: t.replace("S0", "S1"), "damaged"),
        (lambda t: json.dumps({**json.loads(t), "key": "0" * 64}), "another key"),
        (lambda t: damaged(t, axes={"dp": {}}), "for the axes"),
        (lambda t: damaged(t, seconds=None), "not well formed"),
        (lambda t: damaged(t, source="0" * 64), "another text"),
        (swapped, "doesn't fit"),
        (whole, "another text"),
    ],
)
def test_what_does_not_fit_is_reported_and_made_anew(change: Callable[[str], str], why: str, tmp_path: Path) -> None:
    held, first = kept(tmp_path), base()[1]
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    file.write_text(change(text))
    assert file.read_text() != text
    again = run(held)
    (report,) = held.take_reports()
    assert why in report and "made anew" in report
    assert again.source() == first.source()
    assert json.loads(json.loads(file.read_text())["body"])["axes"] == json.loads(json.loads(text)["body"])["axes"]
    with without_choosing():
        run(held)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    held, first = kept(tmp_path), base()[1]
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"\xff\xfe\x00")
    assert run(held).source() == first.source() and len(held.take_reports()) == 1


@pytest.mark.parametrize("other", ["mesh", "sequence", "pins", "shape", "model", "attribute", "zero", "groups"])
def test_a_wrong_key_is_caught(other: str) -> None:
    """The entry of something else is found: its parts name what is different."""
    change: Any = CHANGES[other]
    with mock.patch.object(Key, "of", lambda parts: Key("one key for all", parts)):
        held = as_cache({})
        assert held is not None
        run(held)
        found = run(held, **change)
    (report,) = held.take_reports()
    assert "made anew: it was kept for another" in report
    assert found.source() == run(None, **change).source()


@pytest.mark.parametrize("other", ["mesh", "shape", "model", "attribute", "zero", "groups"])
def test_a_key_that_says_nothing_is_caught(other: str) -> None:
    """Even then what the entry makes betrays it. (A layout that another plan asks for would be legal, and is not noticed.)"""
    change: Any = CHANGES[other]
    with mock.patch.object(compiler, "key_of", lambda *a: Key("key", {})):
        held = as_cache({})
        assert held is not None
        run(held)
        found = run(held, **change)
    (report,) = held.take_reports()
    assert "made anew" in report
    assert found.source() == run(None, **change).source()


def test_rules_that_are_functions_are_not_kept() -> None:
    entries: dict[str, str] = {}
    held = as_cache(entries)
    assert held is not None
    run(held, rules=[autopar.rule("aten.gelu.default", lambda node, types: "* -> *")])
    assert entries == {} and "aten.gelu.default is a function" in held.take_reports()[0]


def test_lines_and_comments_play_no_part() -> None:
    held = kept()
    with mock.patch("autopar.capture.source.short_file", lambda file: "moved.py"), without_choosing():
        run(held)
    assert "the layout is that of the entry" in held.take_reports()[0]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    held = as_cache(tmp_path / "file")
    assert held is not None
    assert run(held).source() == base()[1].source()
    assert any("can't be written" in r for r in held.take_reports())


def test_many_write_one_entry(tmp_path: Path) -> None:
    """Readers see nothing or the whole text, and no file is left over."""
    held = as_cache(tmp_path)
    assert held is not None
    text, seen = "x" * 200_000, []

    def write() -> None:
        for _ in range(10):
            held.write("key", text)
            seen.append(held.read("key"))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 80 and set(seen) == {text}
    assert [p.name for p in tmp_path.iterdir()] == ["key.json"]


def test_other_things_are_no_cache() -> None:
    with pytest.raises(InputError, match="neither a folder nor a mapping"):
        as_cache(3)


def test_steps_share_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    entries: dict[str, str] = {}
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        step = autopar.parallelize(gpt.build(layers=1), Mesh(), optimizer=partial(torch.optim.SGD, lr=0.1), cache=entries)
        batch = gpt.batch(4, torch.Generator().manual_seed(0))
        losses.append([float(step(batch)) for _ in range(2)] + [step.evaluate([batch])[0]])
        reports = step.reports
        step.close()
    assert losses[0] == losses[1] and len(entries) == 2  # the training step and the evaluation
    assert sum("the layout is that of the entry" in r for r in reports) == 2
