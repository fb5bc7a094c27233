"""Strategies: what one node may do on one mesh axis. Derived from its row; nothing here knows any op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.layout.sharding import PARTIAL_SUM, REPLICATE, Placement, Sharding, partial, shard
from autopar.rules.atoms import factor_positions
from autopar.rules.row import Row

COMBINES = {"sum": "sum", "max": "max", "min": "min", "offset-sum": "sum"}


@dataclass(frozen=True)
class Strategy:
    """Placements that a node takes and gives on one axis. ``factor`` is what it splits ("" where nothing).

    ``travels``: the other factor that it splits, whose pieces go from rank to rank.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""
    travels: str = ""

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


def rings(
    row: Row, dims: Sequence[tuple[tuple[int, ...], ...]], ways: int | None, local: Sequence[tuple[tuple[int, ...], ...]]
) -> list[Strategy]:
    """The strategies of a node in which pieces go from rank to rank; arguments as of ``strategies``. Only dims that nothing else cuts."""
    if row.ring is None or any((k, f) in row.invariant for k in range(len(row.outputs)) for f in row.ring):
        return []
    tables, n = factor_positions(row, dims), len(row.inputs)
    stays, travels = ((f, 0) for f in row.ring)
    for table, whole, left in zip(tables, dims, local, strict=True):
        atoms, pieces = [a for d in whole for a in d], [a for d in left for a in d]
        for key in (stays, travels):
            if (key[0], 1) in table or (key in table and (pieces[table[key]] != atoms[table[key]] or atoms[table[key]] % (ways or 1))):
                return []
    if not all(_is_major(row, k, f) for k in range(len(tables)) for f in row.ring):
        return []
    placements = tuple(shard(t[stays]) if stays in t else shard(t[travels]) if travels in t else REPLICATE for t in tables)
    return [Strategy(placements[:n], placements[n:], *row.ring)]


def ring_axis(row: Row, shardings: Sequence[Sharding | None]) -> str | None:
    """The axis over which a node's pieces go from rank to rank, by the shardings of its operands, then outputs (None: nobody reads it)."""
    if row.ring is None:
        return None
    cut: dict[str, set[str]] = {}
    tables = factor_positions(row, [s.dims if s is not None else () for s in shardings])
    for table, sharding in zip(tables, shardings, strict=True):
        for (factor, _), atom in table.items():
            for axis in sharding.axes_of(atom) if sharding is not None else ():
                cut.setdefault(axis, set()).add(factor)
    return next((axis for axis, factors in cut.items() if set(row.ring) <= factors), None)


def _is_major(row: Row, term: int, factor: str) -> bool:
    terms = (*row.inputs, *row.outputs)
    return all(dim[0] == factor for dim in terms[term] if factor in dim)
