"""Seeded faults: every small way in which a rule could be wrong or timid, made from the rule itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from autopar.ir.program import Node
from autopar.rules.check import bind_sample
from autopar.rules.rule import Rule, Types

Text = Callable[[Node, Types], str]


@dataclass(frozen=True)
class Mutant:
    """A rule with one fault, and what the fault is."""

    rule: Rule
    fault: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule.op}: {self.what}"


def _text(rule: Rule) -> Text:
    row = rule.row
    return row if callable(row) else lambda node, types: row


def _linear(rule: Rule) -> Text:
    linear = rule.linear
    return linear if callable(linear) else lambda node, types: linear


def with_kind(rule: Rule, factor: str, kind: str) -> Rule:
    """The rule with another kind of one factor."""
    text = _text(rule)

    def changed(node: Node, types: Types) -> str:
        body, _, tail = text(node, types).partition(";")
        kinds = dict(tuple(p.strip() for p in item.split(":")) for item in tail.split(",") if item.strip())
        kinds[factor] = kind
        return f"{body} ; {', '.join(f'{f}: {k}' for f, k in kinds.items())}"

    return replace(rule, row=changed)


def without_invariant(rule: Rule, factor: str) -> Rule:
    """The rule whose outputs don't say that they are the same whatever happens to a factor; the factor sums instead."""
    text = _text(rule)

    def changed(node: Node, types: Types) -> str:
        return re.sub(rf"~{re.escape(factor)}(?![\w.])", "", text(node, types))

    return with_kind(replace(rule, row=changed), factor, "sum")


def with_linear(rule: Rule, change: Callable[[list[frozenset[int]], int], list[frozenset[int]]]) -> Rule:
    """The rule with other linear sets; ``change`` takes the sets and the number of operands."""
    text = _linear(rule)

    def changed(node: Node, types: Types) -> str:
        n = len(node.refs())
        now = text(node, types)
        if now in ("all", "moves"):
            sets = [frozenset(range(n))]
        elif now == "each":
            sets = [frozenset({i}) for i in range(n)]
        else:
            sets = [frozenset(map(int, part.split())) for part in now.split("|")] if now else []
        return " | ".join(" ".join(map(str, sorted(s))) for s in change(sets, n))

    return replace(rule, linear=changed)


def swapped(rule: Rule, a: str, b: str) -> Rule:
    """The rule whose first output has two factors in each other's place."""
    text = _text(rule)

    def changed(node: Node, types: Types) -> str:
        body, semicolon, tail = text(node, types).partition(";")
        left, arrow, right = body.partition("->")
        first, comma, rest = right.partition(",")

        def swap(match: re.Match[str]) -> str:
            return {a: b, b: a}.get(match[0], match[0])

        return left + arrow + re.sub(r"(?<![=~\w])[a-z]\w*", swap, first) + comma + rest + semicolon + tail

    return replace(rule, row=changed)


def mutants(rule: Rule) -> Iterator[Mutant]:
    """Every seeded fault of a rule. Faults that make no difference on any sample aren't made."""
    cases = [bind_sample(rule, sample) for sample in rule.samples]
    rows = [c.row for c in cases]
    kinds = {(f, row.kind(f)) for row in rows for f in row.factors()}
    for factor, kind in sorted(kinds):
        if not any(
            f == factor and row.sizes[f] and (row.sizes[f] % 2 == 0 or row.sizes[f] % 3 == 0) for row in rows for f in row.factors()
        ):
            continue
        if kind == "whole":
            yield Mutant(with_kind(rule, factor, "plain"), "whole becomes plain", f"{factor} plain, not whole")
            continue
        yield Mutant(with_kind(rule, factor, "whole"), f"{kind} becomes whole", f"{factor} whole, not {kind}")
        if kind == "plain":
            continue
        yield Mutant(with_kind(rule, factor, "plain"), f"{kind} dropped", f"{factor} plain, not {kind}")
        for other in {"sum": ("max",), "max": ("sum", "min"), "min": ("max",), "offset-sum": ("offset", "sum")}.get(kind, ()):
            yield Mutant(with_kind(rule, factor, other), f"{kind} becomes {other}", f"{factor} {other}, not {kind}")
    for factor in sorted({f for row in rows for _, f in row.invariant}):
        yield Mutant(without_invariant(rule, factor), "invariance dropped", f"{factor} sums into an output that doesn't depend on it")
    for group in sorted({s for row in rows for s in row.linear}, key=sorted):
        yield Mutant(
            with_linear(rule, lambda sets, n, group=group: [s for s in sets if s != group]),
            "linear set dropped",
            f"not linear in {sorted(group)}",
        )
    if rule.local is not None:
        yield Mutant(replace(rule, local=None), "arguments not localised", "local dropped")
    if rule.shape_arg is not None:
        yield Mutant(replace(rule, shape_arg=None), "arguments not localised", "shape_arg dropped")
    bools = {k for c in cases for k, name in enumerate(c.node.refs()) if c.types[name].dtype == torch.bool}  # never partial
    most = max((len(row.inputs) for row in rows), default=0)
    for size in (1, 2):
        for group in map(frozenset, itertools.combinations(range(most), size)):
            if group & bools or any(group in row.linear for row in rows):
                continue
            yield Mutant(
                with_linear(rule, lambda sets, n, group=group: [*sets, *([group] if max(group) < n else [])]),
                "linear set added", f"linear in {sorted(group)}",
            )  # fmt: skip
    outputs_only = {f for row in rows for f in row.factors() if len(row.outputs) == 1 and not any(f in d for t in row.inputs for d in t)}
    named = {f for row in rows for f in row.factors() if any(f in d for d in row.outputs[0]) and "*" not in f} - outputs_only
    for a, b in itertools.combinations(sorted(named), 2):
        other = swapped(rule, a, b)
        if any(_text(other)(*_node(other, s)) != _text(rule)(*_node(rule, s)) for s in rule.samples):
            yield Mutant(other, "factors swapped", f"{a} and {b} swapped in the output")


def _node(rule: Rule, sample: str) -> tuple[Node, Types]:
    case = bind_sample(replace(rule, row=all_whole, linear=""), sample)
    return case.node, case.types


def all_whole(node: Node, types: Types) -> str:
    """A row that fits any node and allows nothing."""
    count = itertools.count()

    def term(name: str) -> str:
        return " ".join(f"a{next(count)}" for _ in types[name].shape) if name else ""

    row = f"{', '.join(map(term, node.refs()))} -> {', '.join(map(term, node.outs))}"
    return f"{row} ; {', '.join(f'a{i}: whole' for i in range(next(count)))}"
