"""The golden fixture itself, run in a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest

pytest_plugins = ["pytester"]

TEST = """
def test_text(golden):
    golden({text!r}, "folder/name")
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(conftest, "GOLDEN", pytester.path / "golden")
    return pytester


def run(inner: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    inner.makepyfile(test_inner=TEST.format(text=text))
    return inner.inline_run("-p", "tests.conftest", *options)


def test_golden(inner: pytest.Pytester) -> None:
    written = Path(conftest.GOLDEN / "folder" / "name.txt")
    run(inner, "first").assertoutcome(failed=1)
    assert not written.exists()
    run(inner, "first", "--update-golden").assertoutcome(passed=1)
    assert written.read_text() == "first\n"
    run(inner, "first").assertoutcome(passed=1)
    run(inner, "second").assertoutcome(failed=1)
    assert written.read_text() == "first\n"
