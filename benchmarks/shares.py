"""A share of a core for each rank: more ranks than cores then run as they would on slower machines with a core each.

Where ranks compete freely for cores, a task takes as long as the others let it, and a schedule's bubble can't be told from their noise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: microseconds within which a rank gets its share.
PERIOD = 5000


def missing() -> str:
    """Why shares can't be given here; "" if they can."""
    try:
        with shares(1, 0.5):
            return ""
    except (OSError, LookupError) as error:
        return f"shares of cores need root and Linux control groups: {error}"


@contextmanager
def shares(ranks: int, share: float) -> Iterator[list[int]]:
    """A file descriptor for each rank: a process that writes ``0`` to it, with all its threads, gets ``share`` of a core from then on.

    Descriptors are inherited by processes that get them (``pass_fds``), so that a process on an emulated host, which doesn't see the same
    files, can still write.
    """
    root, version = _root()
    if version == 2:
        (root / "cgroup.subtree_control").write_text("+cpu")
    groups = [root / f"autopar-{os.getpid()}-{rank}" for rank in range(ranks)]
    opened: list[int] = []
    try:
        for group in groups:
            group.mkdir()
            if version == 2:
                (group / "cpu.max").write_text(f"{int(share * PERIOD)} {PERIOD}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD)))
            opened.append(os.open(group / "cgroup.procs", os.O_WRONLY))
        yield opened
    finally:
        for file in opened:
            os.close(file)
        for group in groups:
            if group.exists():
                group.rmdir()


def _root() -> tuple[Path, int]:
    """The top of the control groups that bound processor time, and their version. Raises LookupError where there are none."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place), 1
        if kind == "cgroup2" and "cpu" in Path(place, "cgroup.controllers").read_text().split():
            return Path(place), 2
    raise LookupError("none that bound processor time are mounted")
