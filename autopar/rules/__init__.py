"""What every op does to shardings: one table, made of one tuple of rules per family."""

from autopar.rules import attention, batch, contract, conv, create, lookup, mixing, moe, norms, pointwise, reduce, shapes
from autopar.rules.row import Row
from autopar.rules.rule import Local, Rule, Rules, rule

FAMILIES = (pointwise, shapes, contract, reduce, norms, attention, conv, lookup, mixing, moe, create, batch)
DEFAULT = Rules({rule.op: rule for family in FAMILIES for rule in family.RULES})

__all__ = ["DEFAULT", "FAMILIES", "Local", "Row", "Rule", "Rules", "rule"]
