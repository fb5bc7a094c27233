"""Gradients of stages are summed over microbatches where they belong: in the flat tensors of their buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.api import verify
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime import ops
from models import gpt


class Watched:
    """``ops.pack_into``, which counts the pieces that were made elsewhere."""

    def __init__(self) -> None:
        self.made_here, self.copied = 0, 0

    def __call__(self, pieces: Sequence[Tensor], flat: Tensor) -> Tensor:
        offset, real = 0, _REAL
        for piece in pieces:
            here = piece.data_ptr() == flat[offset:].data_ptr()
            self.made_here, self.copied = self.made_here + here, self.copied + (not here)
            offset += piece.numel()
        return real(pieces, flat)


_REAL = ops.pack_into


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_summed_in_place(schedule: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(ops, "pack_into", watched)
    torch.manual_seed(0)
    batch = gpt.batch(8, torch.Generator().manual_seed(1))
    report = verify(gpt.build(), Mesh.parse(mesh), batch, plan=Plan(microbatches=4, schedule=schedule, cuts=("blocks.1",)))
    assert report.ok, report.table()
    assert watched.made_here > 0 and not watched.copied


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2", "pp=2,dp=2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tables_are_not_made_anew(schedule: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table's gradient a microbatch touches its own rows: each of the two tables is written once and then added to."""
    written: list[str] = []
    real = ops.embedding_backward

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        written.append(next(iter(kwargs), "anew"))
        return real(*args, **kwargs)

    monkeypatch.setattr(ops, "embedding_backward", watched)
    torch.manual_seed(0)
    batch = gpt.batch(8, torch.Generator().manual_seed(1))
    report = verify(gpt.build(), Mesh.parse(mesh), batch, plan=Plan(microbatches=4, schedule=schedule, cuts=("blocks.1",)))
    assert report.ok, report.table()
    counts = Counter(written)
    assert counts["out"] > 0 and counts["total"] == 3 * counts["out"]
    assert counts["anew"] == 2  # the plain model's, which has no microbatches


def test_copies_are_seen() -> None:
    watched, flat = Watched(), torch.zeros(5)
    watched((flat[:2], torch.ones(3)), flat)
    assert (watched.made_here, watched.copied) == (1, 1) and flat.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
