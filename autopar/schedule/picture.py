"""Grids as text: a row for each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.schedule.clock import Span


def draw_spans(spans: Sequence[Span], ranks: int, slot: float) -> str:
    """A column for each slot of time; ``.`` is idle, ``---`` goes on with the action before it."""
    columns = round(max((s.end for s in spans), default=0.0) / slot + 0.499)
    rows = [["."] * columns for _ in range(ranks)]
    width = max((len(s.label) for s in spans), default=1)
    for span in spans:
        first = True
        for column in range(max(0, int(span.start / slot) - 1), columns):
            middle = (column + 0.5) * slot
            if middle >= span.end:
                break
            if middle >= span.start:
                rows[span.rank][column] = span.label if first else "-" * width
                first = False
    return draw_rows(rows)


def draw_rows(rows: Sequence[Sequence[str]], marked: Collection[tuple[int, int]] = (), titles: Sequence[str] = ()) -> str:
    """Rows of cells as aligned text, a title before each (``rank 0``). The cells at ``marked``, (row, column), stand in ``>…<``."""
    cells = [[f">{c}<" if (r, k) in marked else f" {c} " if marked else c for k, c in enumerate(row)] for r, row in enumerate(rows)]
    names = titles or [f"rank {r}" for r in range(len(rows))]
    width = max((len(c) for row in cells for c in row), default=0)
    left = max((len(n) for n in names), default=0)
    return "\n".join(f"{n:>{left}} | {' '.join(c.center(width) for c in row)}".rstrip() for n, row in zip(names, cells))
