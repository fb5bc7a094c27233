"""A sample of the matrix: every model on every mesh, every variant too, every model under what asks for most. ``make matrix`` runs all."""

from __future__ import annotations

import pytest

from tests.equality.cases import SIMILAR, VARIANTS, Case, check, covering, every, pairs

SAMPLE = covering()
REST = [case for case in every() if case not in SAMPLE]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_sample(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_rest(case: Case) -> None:
    check(case)


def test_sample_holds_every_pair() -> None:
    seen = {pair for case in SAMPLE for pair in pairs(case)}
    assert {pair for case in every() if case.name not in SIMILAR for pair in pairs(case)} <= seen
    assert {case.name for case in SAMPLE} == {case.name for case in every()}
    assert {case.variant for case in SAMPLE} == set(VARIANTS) and len(SAMPLE) < len(every()) / 6
