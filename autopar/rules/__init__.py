"""What every op does to shardings: one table, made of one tuple of rules per family."""

from autopar.rules import contract, lookup, shapes
from autopar.rules.row import Row
from autopar.rules.rule import Local, Rule, Rules

FAMILIES = (shapes, contract, lookup)
DEFAULT = Rules({rule.op: rule for family in FAMILIES for rule in family.RULES})

__all__ = ["DEFAULT", "FAMILIES", "Local", "Row", "Rule", "Rules"]
