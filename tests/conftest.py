"""What all tests share: one thread, and texts compared with golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    # Workers and simulated ranks are many, cores are few.
    torch.set_num_threads(1)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(text, name)``: the text must equal ``tests/golden/<name>.txt``."""

    def check(text: str, name: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists():
            pytest.fail(f"there is no golden text {name}: write it with `pytest {request.node.nodeid!r} --update-golden`, and read it")
        else:
            assert text == path.read_text(), f"differs from the golden text {name}; if it should, `make golden`, and read the diff"

    return check
