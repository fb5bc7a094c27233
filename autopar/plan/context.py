"""What a layout over ``cp`` must hold: a sequence that every rank has alike is refused, not silently computed by all.

What small work needs whole (a pooled row, labels that are shifted) is gathered there; the bulk of the products, and whatever relates the
positions of hidden states, must be cut.
"""

from __future__ import annotations

from collections.abc import Container

from autopar.errors import PlanError
from autopar.ir.program import Node, Program
from autopar.plan.axis import Problem, options, wildcard
from autopar.rules.atoms import Atoms

#: share of what the products of the forward give (elements of their results) that must be cut, and beyond which the rest isn't told.
_LEAST, _MOST = 0.5, 0.95


def check_context(problem: Problem, batch: set[str]) -> tuple[str, ...]:
    """Refuses a program of which every rank would do alike what the axis was given for. Raises PlanError with the line that is the cause.

    It asks what may be cut, before anything is chosen: what is asked about here must be cut where it can be. Returns notes on the rest.

    Args:
        batch: the values that depend on the batch.
    """
    program, axis, ways = problem.program, problem.axis, problem.mesh[problem.axis]
    params = {i.name for i in program.inputs_of("param")}
    total, cut = 0, 0
    alike: dict[str, None] = {}  # modules with products that nothing cuts
    whole: tuple[int, Node, int] | None = None  # the largest product whose sequence the axis doesn't divide
    mixing: tuple[Node, int] | None = None  # the first op that relates positions and that nothing cuts
    for n, node in enumerate(program.nodes):
        if node.phase != "forward" or not any(o in batch for o in node.outs):
            continue
        work = sum(program.types[o].numel for o in node.outs[:1] if o) if problem.rules[node.op].contraction else 0
        total += work
        mixes = relates(program, problem.atoms, n, params)
        if not work and not mixes:
            continue
        if any(option.factor for option in options(problem, n)):
            cut += work
            continue
        if work:
            alike[wildcard(node.where.module)] = None
        lengths = _lengths(program, problem.atoms, n)
        uneven = next((size for size, _ in lengths if size % ways), None)
        if work and uneven is not None and (whole is None or work > whole[0]):
            whole = work, node, uneven
        if mixing is None and mixes:
            mixing = node, next(size for size, kind in lengths if kind == "whole")
    if cut < _LEAST * total or not total:
        if whole is not None:
            size = whole[2]
            raise PlanError(
                f"{axis}={ways} doesn't divide the sequence of {size}", where=str(whole[1].where),
                why="every rank would compute all of it; autopar never pads",
                hint=f"a length of {size // ways * ways or ways} or {-(-size // ways) * ways}, or another {axis}",
            )  # fmt: skip
        first = mixing[0] if mixing is not None else next((n for n in program.nodes if n.phase == "forward" and set(n.outs) & batch), None)
        raise PlanError(
            f"{axis}={ways} finds no sequence to cut: {1 - cut / total if total else 1:.0%} of what products give would be every rank's",
            where=str(first.where) if first is not None else "",
            why="a sequence is a dim, neither sample nor feature, that runs through most products; this model has none that can be cut, "
            "or goes through it position by position",
            hint="dp or tp",
        )  # fmt: skip
    if mixing is not None:
        node, size = mixing
        raise PlanError(
            f"{node.op} can't be split over {axis}={ways}", where=str(node.where),
            why=f"it needs the sequence of {size} whole, and {ways} ranks don't divide its heads or features",
            hint=f"heads that {axis} divides; attention as scaled_dot_product_attention or products and softmax; a row that "
            "says how the op may be cut (autopar.rule)",
        )  # fmt: skip
    if cut > _MOST * total:
        return ()
    return (f"{axis}={ways}: {1 - cut / total:.0%} of what products give is every rank's, in {', '.join(m or '(model)' for m in alike)}",)


def relates(program: Program, atoms: Atoms, n: int, params: Container[str]) -> bool:
    """Whether a node computes on positions of hidden states together, and on nothing else: one that also has a parameter, such as a
    convolution, is a product of its own."""
    node = program.nodes[n]
    if atoms.rows[n].moves or any(r in params for r in node.refs()):
        return False
    floating = all(program.types[o].dtype.is_floating_point for o in node.outs if o)
    hidden = any("feature" in m for r in node.refs() for m in atoms.marks[r])
    return floating and hidden and any(kind == "whole" for _, kind in _lengths(program, atoms, n))


def _lengths(program: Program, atoms: Atoms, n: int) -> list[tuple[int, str]]:
    """Sizes of the sequences of a node's operands, and the kind of their factor."""
    node, row = program.nodes[n], atoms.rows[n]
    found = []
    for name, term in zip(node.refs(), row.inputs, strict=True):
        marks = iter(atoms.marks[name])
        for factors, dim in zip(term, atoms.dims[name], strict=True):
            for size in dim:
                mark = next(marks)
                if "batch" not in mark and "feature" not in mark:
                    found.append((size, row.kind(factors[0]) if len(factors) == 1 else "plain"))
    return found
