"""Slow tests of this folder run where they are asked for: ``-m slow``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in (config.getoption("markexpr") or ""):
        return
    here = Path(__file__).parent
    slow = [item for item in items if item.get_closest_marker("slow") and item.path.is_relative_to(here)]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
