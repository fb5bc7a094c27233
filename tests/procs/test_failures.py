"""One rank fails, whichever way: all end soon, and each says whose error was the first, and what it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.layout.mesh import Mesh
from autopar.runtime.launch import launch
from tests.procs import failure_jobs as jobs
from tests.procs.pool import Pool

pytestmark = pytest.mark.procs
Pools = Callable[[int], Pool]
#: seconds in which all ranks end.
LIMIT = 30.0

FIRST = {
    "forward": "ValueError: planted in forward",
    "backward": "ValueError: planted in backward",
    "between": "ValueError: planted between steps",
    "skip": "it closed its step while others went on",
    "exit": "it closed its step while others went on",
    "kill": "its process ended without a word: it was killed, crashed, or ran out of memory",
    "hang": "no message came from it within 4 s: it hangs, or is busy elsewhere",
}


def check(procs: Pools, kind: str, mesh: str) -> None:
    size = Mesh.parse(mesh).size
    if kind == "hang":  # a time limit of seconds is for ranks that have imported everything
        procs(size).run(jobs.outcome, "none", mesh, {})
    found = procs(size).outcomes(jobs.outcome, kind, mesh, {"timeout": 4.0} if kind == "hang" else {}, timeout=60.0, patience=LIMIT)
    for rank, outcome in enumerate(found):
        if rank == jobs.VICTIM and kind != "hang":  # one that comes back late gets the same error
            if kind == "kill":
                assert outcome.error == "process ended with exit code -9"
            elif kind in ("forward", "backward", "between"):
                assert outcome.value[:2] == ("ValueError", FIRST[kind].removeprefix("ValueError: "))
            continue
        assert not outcome.error, outcome.error
        name, text, seconds = outcome.value
        assert name == "CommError" and text.startswith(f"rank {jobs.VICTIM} failed first: {FIRST[kind]}\n"), text
        assert f"rank {rank} can't go on" in text and seconds < LIMIT
        if kind in ("between", "forward", "backward", "hang"):
            assert re.search(r"where: \S*failure_jobs.py:\d+ in ", text), text


#: more than the others need to be run each time.
SELDOM = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("tp=2", "pp=2", "dp=2,pp=2")]


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2", "pp=2,dp=2", *SELDOM])
@pytest.mark.parametrize("kind", ["forward", "backward", "between", "skip"])
def test_first_error_is_everyones(procs: Pools, kind: str, mesh: str) -> None:
    check(procs, kind, mesh)


SLOW = [pytest.param(kind, mesh, marks=pytest.mark.slow) for kind in ("kill", "hang", "exit") for mesh in ("tp=2", "dp=4", "pp=2")]


@pytest.mark.parametrize(("kind", "mesh"), [("kill", "dp=2,tp=2"), ("kill", "dp=2,pp=2"), ("hang", "dp=2"), *SLOW])
def test_ranks_that_vanish(procs: Pools, kind: str, mesh: str) -> None:
    check(procs, kind, mesh)


def test_bad_input_loses_nothing(procs: Pools) -> None:
    first, second = procs(2).run(jobs.bad_input)
    assert first == second
    texts, losses = first[::2], [float(x) for x in first[1::2]]
    wanted = ("the mesh dp=4 has 4 ranks, but 2 processes were launched", "rank 1 has the mesh tp=2, rank 0 dp=2",
              "rank 1: batch input '0' holds 20, which is out of range", "rank 1 has another batch shapes than rank 0")  # fmt: skip
    assert all(text.startswith(begin) for text, begin in zip(texts, wanted, strict=True)), texts
    assert all(a > b for a, b in zip(losses, losses[1:], strict=False))


def test_slow_is_no_failure(procs: Pools) -> None:
    found = procs(2).run(jobs.outcome, "slow", "tp=2", {})
    assert [name for name, _, _ in found] == ["losses"] * 2 and found[0][1] == found[1][1]


ENDS = [pytest.param(kind, mesh, marks=pytest.mark.slow) for kind in ("loader", "exit", "backward") for mesh in ("tp=2", "dp=4")]


@pytest.mark.parametrize(("kind", "mesh"), [("loader", "dp=2,tp=2"), *ENDS])
def test_torchrun(kind: str, mesh: str, tmp_path: Path) -> None:
    """Ranks that end by themselves, under torch's launcher: every rank's own error names the first one."""
    size, begun = Mesh.parse(mesh).size, time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--log-dir", str(tmp_path), "--redirects", "3",
         "-m", "tests.procs.failure_jobs", kind, mesh],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode != 0 and time.monotonic() - begun < 90
    said = {int(path.parent.name): path.read_text() for path in tmp_path.rglob("stderr.log")}
    text = {"loader": "ValueError: planted in the loader", "exit": FIRST["exit"], "backward": FIRST["backward"]}[kind]
    for rank in range(size):
        if rank != jobs.VICTIM:
            assert f"CommError: rank {jobs.VICTIM} failed first: {text}" in said[rank], said[rank][-2000:]
    assert kind == "exit" or text in said[jobs.VICTIM]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("loader", "rank 1 of 2 failed: ValueError: planted in the loader"),
     pytest.param("kill", "SIGKILL", marks=pytest.mark.slow),
     pytest.param("hang", "rank 1 failed first: no message came from it within 4 s", marks=pytest.mark.slow),
     pytest.param("exit", "rank 1 failed first: it closed its step while others went on", marks=pytest.mark.slow)],
)  # fmt: skip
def test_own_launcher(kind: str, text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(AutoparError, match=text):
        launch(jobs.worker, 2, kind, "dp=2")
    assert time.monotonic() - begun < 60
