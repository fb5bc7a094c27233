"""The README's code runs as it stands there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.procs.readme_job import blocks, run_blocks


@pytest.mark.procs
def test_the_blocks_of_the_readme(procs: Callable[[int], Any]) -> None:
    assert len(blocks()) >= 3
    results = procs(4).run(run_blocks, timeout=240)
    assert len({loss for loss, _, _ in results}) == 1 and math.isfinite(results[0][0])
    assert all(ok for _, ok, _ in results)
    assert "all_gather" in results[0][2] and "def step(" in results[0][2]
