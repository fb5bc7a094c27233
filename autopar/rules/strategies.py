"""Strategies: what one node may do on one mesh axis. Derived from its row; nothing here knows any op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layout.sharding import PARTIAL_SUM, REPLICATE, Placement, partial, shard
from autopar.rules.atoms import factor_positions
from autopar.rules.row import Row

COMBINES = {"sum": "sum", "max": "max", "min": "min", "offset-sum": "sum"}


@dataclass(frozen=True)
class Strategy:
    """Placements that a node takes and gives on one axis. ``factor`` is what it splits ("" where nothing)."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"


def strategies(
    row: Row,
    dims: Sequence[tuple[tuple[int, ...], ...]],
    ways: int | None = None,
    local: Sequence[tuple[tuple[int, ...], ...]] | None = None,
) -> list[Strategy]:
    """All strategies of a node on an axis of ``ways`` ranks (None: whatever the size).

    Args:
        dims: atoms of the dims of every term, operands first, then outputs; global sizes, which say what atoms a factor has.
        local: the same atoms with the sizes that other axes left, where they already cut some: what ``ways`` must divide.
    """
    n = len(row.inputs)
    out = [Strategy((REPLICATE,) * n, (REPLICATE,) * len(row.outputs))]
    tables = factor_positions(row, dims)
    sizes = {}
    for table, atoms in zip(tables, dims if local is None else local, strict=True):
        flat = [a for d in atoms for a in d]
        sizes.update({key: flat[p] for key, p in table.items()})
    for key, size in sizes.items():
        kind = row.kind(key[0])
        if kind == "whole" or (ways is not None and size % ways) or (kind.startswith("offset") and key[1] > 0):
            continue
        holders = [key in t for t in tables]
        if not any(holders[n:]) and kind not in COMBINES:
            continue
        # an offset is known only where the factor is the major part of its dim
        if kind.startswith("offset") and not all(_is_major(row, k, key[0]) for k, holds in enumerate(holders) if holds):
            continue
        inputs = tuple(shard(t[key]) if key in t else REPLICATE for t in tables[:n])
        outputs = []
        for k, table in enumerate(tables[n:]):
            if key in table:
                outputs.append(shard(table[key]))
            elif (k, key[0]) in row.invariant or kind not in COMBINES:
                outputs.append(REPLICATE)
            else:
                outputs.append(partial(COMBINES[kind]))
        out.append(Strategy(inputs, tuple(outputs), key[0]))
    for group in row.linear:
        if n:
            inputs = tuple(PARTIAL_SUM if k in group else REPLICATE for k in range(n))
            out.append(Strategy(inputs, (PARTIAL_SUM,) * len(row.outputs)))
    if row.moves and n:
        for combine in ("max", "min"):
            out.append(Strategy((partial(combine),) * n, (partial(combine),) * len(row.outputs)))
    return out


def _is_major(row: Row, term: int, factor: str) -> bool:
    terms = (*row.inputs, *row.outputs)
    return all(dim[0] == factor for dim in terms[term] if factor in dim)
