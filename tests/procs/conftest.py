"""The fixture ``procs``: ``procs(n)`` is the session's pool of ``n`` real gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.procs.pool import Pool


@pytest.fixture(scope="session")
def procs() -> Iterator[Callable[[int], Pool]]:
    pools: dict[int, Pool] = {}

    def get(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield get
    for pool in pools.values():
        pool.stop()
