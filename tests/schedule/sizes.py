"""Schedules and sizes that several tests go through."""

from __future__ import annotations

from autopar.schedule import SCHEDULES, Schedule, build

#: stages a rank.
CHUNKS = {"zb-v": 2, "dualpipev": 2, "interleaved": 2}


def built(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, CHUNKS.get(name, 1) * ranks, microbatches, ranks)


def small() -> list[Schedule]:
    """Every schedule on few ranks, with fewer, as many and more microbatches."""
    sizes = [(r, m) for r in (1, 2, 3, 4) for m in (1, 2, 3, 5, 8, 9)]
    more = [build("interleaved", 6, m, 2) for m in (1, 3, 4)] + [build("gpipe", 6, m, 2) for m in (1, 4)]
    return [built(name, r, m) for name in SCHEDULES for r, m in sizes] + more
