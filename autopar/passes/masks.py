"""Fused backward ops taken apart by their output masks, where a part of what they make is waited for and another isn't.

The backward of a convolution or a norm makes the gradients of its input and of its parameters in one call. On a mesh with stages only the
first is what another stage waits for (task I); the others can come later (task W), as the products of a linear layer do. An op says by its
argument ``output_mask`` that it can leave outputs out, so that no op is named here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar._torch import argument_position, resolve
from autopar.ir.program import Node
from autopar.ir.stage import StageProgram


def split_masks(program: StageProgram) -> StageProgram:
    """The program of a stage with every fused backward op in two: what another stage waits for, and the rest."""
    awaited = _awaited(program)
    nodes: list[Node] = []
    for node in program.nodes:
        first = [o for o in node.outs if o in awaited]
        rest = [o for o in node.outs if o and o not in awaited]
        at = _mask(node)
        if at is None or not first or not rest:
            nodes.append(node)
        else:
            nodes += [_only(node, at, first), _only(node, at, rest)]
    return replace(program, nodes=tuple(nodes))


def _mask(node: Node) -> int | None:
    """The position of an op's output mask, where it has one."""
    if node.phase != "backward" or node.region != "body" or not node.op.startswith("aten."):
        return None
    at = argument_position(resolve(node.op), "output_mask")
    return at if at is not None and at < len(node.args) and len(node.args[at]) == len(node.outs) else None


def _only(node: Node, at: int, outs: Iterable[str]) -> Node:
    """The op with these outputs alone."""
    kept = tuple(o if o in outs else "" for o in node.outs)
    return replace(node, args=(*node.args[:at], tuple(bool(o) for o in kept), *node.args[at + 1 :]), outs=kept)


def _awaited(program: StageProgram) -> set[str]:
    """The values of the backward that another stage waits for, and what they are made of."""
    producers = program.producers()
    left = [c.value for c in program.crossings if c.source == program.stage and c.made == "I"]
    found: set[str] = set()
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += producers[value].refs() if value in producers else ()
    return found
