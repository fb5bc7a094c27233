"""Rows of contractions: sums of products."""

from __future__ import annotations

from autopar.rules.rule import Rule

RULES = (
    Rule("aten.mm.default", "m k, k n -> m n ; k: sum", "each", contraction=True, samples=("f[4, 6], f[6, 8]",)),
    Rule("aten.bmm.default", "b m k, b k n -> b m n ; k: sum", "each", contraction=True, samples=("f[2, 4, 6], f[2, 6, 8]",)),
)
