"""Rows of products of groups of rows with a matrix each, as mixtures of experts use them.

Where a group of rows ends is data, so rows and groups are whole; what goes in and out of an expert may be cut.
"""

from __future__ import annotations

from autopar.rules.rule import Rule

RULES = (
    Rule(
        "aten._grouped_mm.default",
        "t k, e k n, e -> t n ; t: whole, e: whole, k: sum",
        "0 | 1",
        contraction=True,
        samples=("single[6, 16], single[3, 16, 16], ends6[3]",),
    ),
    Rule(
        "transformers.grouped_mm_fallback.default",
        "t k, e k n, e -> t n ; t: whole, e: whole, k: sum",
        "0 | 1",
        contraction=True,
        samples=("f[6, 4], f[3, 4, 8], ends6[3]",),
    ),
    Rule(
        "transformers.grouped_mm_fallback_backward.default",
        "t k, e k n, e, t n -> t k, e k n ; t: whole, e: whole, n: sum",
        "3 | 0 1",
        contraction=True,
        samples=("f[6, 4], f[3, 4, 8], ends6[3], f[6, 8]",),
    ),
)
