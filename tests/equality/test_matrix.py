"""A sample of the matrix that holds every pair of model, mesh and variant, of models that are alike of one; ``make matrix`` runs all."""

from __future__ import annotations

import pytest

from tests.equality.cases import SIMILAR, Case, check, covering, every

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
    full = {(a.name, a.mesh, a.variant) for a in every() if a.name not in SIMILAR}
    seen = {(a.name, a.mesh, a.variant) for a in SAMPLE}
    assert {a.name for a in SAMPLE} == {a.name for a in every()}
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert {(c[i], c[j]) for c in full} <= {(c[i], c[j]) for c in seen}
    assert len(SAMPLE) < len(every()) / 5
