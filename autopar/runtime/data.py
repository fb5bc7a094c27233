"""Real text without a download: the Python standard library's own source, read as bytes.

Files are either for training or held out, decided by a hash of their relative path, so that no window of one split
has a neighbour in the other. Generated tables and tests are left out: they repeat themselves and flatter the loss.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import InputError

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
HELD_OUT_SHARE = 0.1
SPLITS = ("train", "held_out")


class ByteText:
    """Windows of ``sequence`` bytes and the bytes that follow them.

    Args:
        sequence: the length of a window.
        split: what :meth:`batch` draws from, ``"train"`` or ``"held_out"``.
        root: a folder of ``*.py`` files; None: the standard library of the running Python.
    """

    def __init__(self, sequence: int, split: str = "train", root: str | Path | None = None) -> None:
        if split not in SPLITS:
            raise InputError(f"there is no split {split!r}", hint=f"one of {', '.join(SPLITS)}")
        if sequence < 1:
            raise InputError(f"a window of {sequence} bytes is empty")
        self.sequence, self.split = sequence, split
        self.root = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split, in the order of their relative paths."""
        files: dict[str, list[Path]] = {split: [] for split in SPLITS}
        relative = (path.relative_to(self.root) for path in self.root.rglob("*.py"))
        for path in sorted(path.as_posix() for path in relative if SKIPPED.isdisjoint(path.parts)):
            files["held_out" if _share(path) < HELD_OUT_SHARE else "train"].append(self.root / path)
        return files

    @cached_property
    def _train(self) -> Tensor:
        return self._read("train")

    @cached_property
    def _held_out(self) -> Tensor:
        return self._read("held_out")

    def _read(self, split: str) -> Tensor:
        # A zero byte ends each file: the text itself has none.
        text = bytearray(b"".join(path.read_bytes() + b"\0" for path in self.files[split]))
        if len(text) <= self.sequence:
            raise InputError(
                f"the {split} text has {len(text)} bytes, a window takes {self.sequence + 1}",
                where=str(self.root),
                hint="a shorter sequence, or a folder with more *.py files",
            )
        return torch.frombuffer(text, dtype=torch.uint8)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = text[starts[:, None] + torch.arange(self.sequence + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, step: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The ``(ids, labels)`` of a step: the same on every rank, for every mesh; a smaller batch is the start of a larger one."""
        text = self._train if self.split == "train" else self._held_out
        generator = torch.Generator().manual_seed(_hash(f"{seed}/{step}"))
        return self._windows(text, torch.randint(len(text) - self.sequence, (size,), generator=generator))

    def held_out(self, batch_size: int, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole batches of fixed windows that never overlap; with a ``limit``, at most as many windows, spread over all the files."""
        text = self._held_out
        count = (len(text) - 1) // self.sequence
        wanted = count if limit is None else min(limit, count)
        wanted -= wanted % batch_size
        if not wanted:
            raise InputError(f"no batch of {batch_size} fits into {min(count, limit or count)} held-out windows")
        starts = torch.arange(wanted) * count // wanted * self.sequence
        for first in range(0, wanted, batch_size):
            yield self._windows(text, starts[first : first + batch_size])


def _hash(text: str) -> int:
    """63 bits, the same in every process: Python's own hash is salted."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _share(text: str) -> float:
    return _hash(text) / 2**63
