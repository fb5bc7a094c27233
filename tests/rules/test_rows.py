"""Every row of the table against brute force, and the brute force against seeded faults."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from autopar.rules import DEFAULT, FAMILIES, Rule
from autopar.rules.check import check
from autopar.rules.docs import page
from tests.rules.mutants import mutants

_SHAPE_ONLY = (
    "max_pool2d_with_indices_backward",
    *(f"{name}_pool{n}d_backward" for name in ("avg", "_adaptive_avg") for n in (2, 3)),
    *(f"{mode}_pad{n}d_backward" for mode in ("reflection", "replication") for n in (1, 2, 3)),
)  # fmt: skip

#: faults that can't be seen because they are none: what they claim is true, or true for all finite numbers.
NO_FAULTS = {
    "aten.fill.Tensor: linear in [0, 1]": "operand 0 gives only the shape",
    "aten.copy.default: linear in [0, 1]": "operand 0 gives only the shape",
    **{f"aten.{op}.default: linear in [0, 1]": "operand 1 gives only the shape" for op in _SHAPE_ONLY},
    "aten.native_layer_norm_backward.default: linear in [0, 5]": "no gradient depends on the bias",
    "aten.convolution_backward.default: local dropped": "the op only asks whether there is a bias, not how long it is",
    "aten.new_zeros.default: e0 sums into an output that doesn't depend on it": "a sum of zeros is zero",
    "aten.new_zeros.default: e1 sums into an output that doesn't depend on it": "a sum of zeros is zero",
    "aten.new_empty.default: e0 sums into an output that doesn't depend on it": "nothing is known of the output but its shape",
    "aten.new_empty.default: e1 sums into an output that doesn't depend on it": "nothing is known of the output but its shape",
    "aten.nan_to_num.default: linear in [0]": "true for finite numbers",
    "aten.nansum.default: linear in [0]": "true for finite numbers",
    "aten.fractional_max_pool3d.default: y0 and y1 swapped in the output": "both stand there only",
    "aten.grid_sampler_3d_backward.default: x0 and x2 swapped in the output": "two whole factors of one size",
    "aten.diagonal_scatter.default: d1 and d2 swapped in the output": "two whole factors of one size",
    **{
        f"aten.{op}.default: y0_0 and y0_1 swapped in the output": "both stand there only"
        for op in (
            "linalg_inv_ex",
            "linalg_cholesky_ex",
            "linalg_lu_factor_ex",
            "linalg_lu",
            "lu_unpack",
            "_linalg_svd",
            "linalg_qr",
            "geqrf",
        )
    },
    "aten.xlogy.Tensor: linear in [0]": "true for finite logarithms",
    "aten.pixel_shuffle.default: r and s swapped in the output": "two whole factors of one size",
    "aten.pixel_unshuffle.default: r and s swapped in the output": "two whole factors of one size",
}


@pytest.mark.parametrize("op", sorted(DEFAULT.table))
def test_row_holds(op: str) -> None:
    rule = DEFAULT[op]
    if op.startswith("transformers."):
        pytest.importorskip("transformers", reason="the op is registered by transformers")
    assert rule.samples, "a row without a sample isn't checked"
    report = check(rule)
    assert report.ok, str(report)


def test_every_op_has_one_rule() -> None:
    counts = Counter(rule.op for family in FAMILIES for rule in family.RULES)
    assert [op for op, n in counts.items() if n > 1] == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__.rpartition(".")[2])
def test_seeded_faults_are_caught(family: object) -> None:
    rules: tuple[Rule, ...] = family.RULES  # type: ignore[attr-defined]
    if any(rule.op.startswith("transformers.") for rule in rules):
        pytest.importorskip("transformers", reason="some ops are registered by transformers")
    seeded = [m for rule in rules for m in mutants(rule)]
    missed = [str(m) for m in seeded if check(m.rule, first=True).ok]
    assert [m for m in missed if m not in NO_FAULTS] == [], f"of {len(seeded)} seeded faults"


def test_page_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "rules.md"
    assert path.read_text() == page(), "run `python -m autopar.rules.docs > docs/rules.md`"
