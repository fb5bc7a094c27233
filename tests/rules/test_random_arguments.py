"""Rows that are computed from shapes and arguments, on random ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules import DEFAULT
from autopar.rules.check import check

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
SHAPES = st.lists(SIZES, min_size=1, max_size=4).map(tuple)


def tensor(shape: tuple[int, ...], kind: str = "f") -> str:
    return f"{kind}[{', '.join(map(str, shape))}]"


def dim_of(draw: st.DrawFn, shape: tuple[int, ...]) -> int:
    return draw(st.integers(-len(shape), len(shape) - 1))


@st.composite
def views(draw: st.DrawFn) -> tuple[str, str]:
    """Two ways to cut the same row of factors into dims."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=len(factors)))) + [len(factors)]
        return tuple(math.prod(factors[a:b]) for a, b in zip([0, *cuts[:-1]], cuts, strict=True) if b > a or len(factors) == 1)

    source, target = grouped(), grouped()
    if draw(st.booleans()):
        source = tuple(draw(st.permutations(source)))
    return "aten.view.default", f"{tensor(source)}, {target}"


@st.composite
def slices(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    dim = dim_of(draw, shape)
    bounds = st.one_of(st.none(), st.integers(-9, 9))
    return "aten.slice.Tensor", f"{tensor(shape)}, {dim}, {draw(bounds)}, {draw(bounds)}, {draw(st.integers(1, 3))}"


@st.composite
def concatenations(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    dim = dim_of(draw, shape)
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        own = list(shape)
        own[dim] = draw(st.sampled_from([0, shape[dim], 2]))
        parts.append(tensor(tuple(own)))
    return "aten.cat.default", f"[{', '.join(parts)}], {dim}"


@st.composite
def expansions(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    target = [draw(SIZES) if s == 1 else draw(st.sampled_from([s, -1])) for s in shape]
    lead = draw(st.lists(SIZES, max_size=2))
    return "aten.expand.default", f"{tensor(shape)}, {(*lead, *target)}"


@st.composite
def reductions(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    dims = tuple(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    op = draw(st.sampled_from(["aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default"]))
    return op, f"{tensor(shape)}, {tuple(d - draw(st.sampled_from([0, len(shape)])) for d in dims)}, {draw(st.booleans())}"


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)

    def some() -> str:
        own = [draw(st.sampled_from([1, s])) for s in shape]
        return tensor(tuple(own[draw(st.integers(0, len(own))) :]))

    op = draw(st.sampled_from(["aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.maximum.default"]))
    other = some()
    return op, f"{some()}, {other.replace('f[', 'pos[') if 'div' in op else other}"


@st.composite
def moves(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    rank = len(shape)
    choice = draw(st.integers(0, 6))
    if choice == 0:
        return "aten.permute.default", f"{tensor(shape)}, {tuple(draw(st.permutations(range(rank))))}"
    if choice == 1:
        return "aten.squeeze.dim", f"{tensor(shape)}, {dim_of(draw, shape)}"
    if choice == 2:
        return "aten.unsqueeze.default", f"{tensor(shape)}, {draw(st.integers(-rank - 1, rank))}"
    if choice == 3:
        return "aten.repeat.default", f"{tensor(shape)}, {tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank + 1)))}"
    if choice == 4:
        return "aten.squeeze.default", tensor(shape)
    if choice == 5:
        return "aten.select.int", f"{tensor(shape)}, {dim_of(draw, shape)}, {draw(st.sampled_from([0, -1]))}"
    return "aten.repeat_interleave.self_int", f"{tensor(shape)}, {draw(st.integers(1, 3))}, {dim_of(draw, shape)}"


@st.composite
def indices(draw: st.DrawFn) -> tuple[str, str]:
    shape = draw(SHAPES)
    given_dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    where = draw(SHAPES.filter(lambda s: len(s) <= 2))
    parts = []
    for d in range(max(given_dims) + 1):
        own = tuple(draw(st.sampled_from([1, s])) for s in where)
        parts.append(tensor(own, f"i{shape[d]}") if d in given_dims else "None")
    return "aten.index.Tensor", f"{tensor(shape)}, [{', '.join(parts)}]"


@st.composite
def creations(draw: st.DrawFn) -> tuple[str, str]:
    start, step = draw(st.integers(-3, 3)), draw(st.sampled_from([1, 2, -1]))
    length = draw(st.integers(1, 12))
    return "aten.arange.start_step", f"{start}, {start + step * length}, {step}"


ALL = (views, slices, concatenations, expansions, reductions, broadcasts, moves, indices, creations)


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_rows_hold_for_random_arguments(make: Callable[[], st.SearchStrategy[tuple[str, str]]]) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(make())
    def holds(case: tuple[str, str]) -> None:
        op, sample = case
        # whether a row is timid depends on luck where dims of size 1 and equal operands meet: only what is wrong counts here
        report = check(DEFAULT[op], [sample], timid=False)
        assert not report.wrong, str(report)

    holds()
