"""docs/schedules.md says what is so: its pictures, its example, its error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.schedule import SCHEDULES
from tests.schedule.sizes import built

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures(name: str) -> None:
    section = PAGE.partition(f"### {name}\n")[2].partition("\n#")[0]
    assert f"```\n{built(name, 4, 8).grid()}\n```" in section
    assert f"| `{name}` |" in PAGE


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.count("rank ") == 4
