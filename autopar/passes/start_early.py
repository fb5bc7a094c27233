"""Collectives started as early as can be: what one needs runs before what it doesn't need, which then hides it.

Between two collectives of a phase there is what the later one sends, and there is the rest: mostly gradients of weights, while the gradient
that goes on to the layer before is what is reduced. The program that was captured has them in autograd's order, the gradients of a
linear layer's weight and bias before the reduction of its input's. Here the reduction comes first, and they run while it is under way.
Of what it needs, whatever doesn't need the collective before runs first.

A node is moved behind one collective at most, so that at each of them as much is alive as before, but for what the rest reads.

Source: Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, for the collectives; the overlap with gradients of weights is that of its
implementation, there for linear layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from autopar.cost.live import is_view
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node

P = TypeVar("P", bound=LocalProgram)


def start_early(program: P) -> P:
    """The program with the nodes between collectives in another order."""
    nodes: list[Node] = []
    window: list[Node] = []  # since the last collective, or since phase or region changed
    before: Node | None = None  # that collective

    def flush() -> None:
        nonlocal before
        nodes.extend(window)
        window.clear()
        before = None

    for node in program.nodes:
        if window and (window[-1].phase, window[-1].region) != (node.phase, node.region):
            flush()
        window.append(node)
        if node.op.startswith("comm."):
            needed, rest = _split(window, node)
            waiting = _followers(needed, before)
            nodes += [n for n in needed if id(n) not in waiting] + [n for n in needed if id(n) in waiting] + rest
            window.clear()
            before = node
    flush()
    return replace(program, nodes=tuple(nodes))


def _split(window: list[Node], last: Node) -> tuple[list[Node], list[Node]]:
    """The last node with what it needs of those before it, and the rest, both in order."""
    wanted = set(last.outs)
    needed: list[Node] = []
    rest: list[Node] = []
    for node in reversed(window):
        if wanted.isdisjoint(node.outs):
            rest.append(node)
        else:
            needed.append(node)
            wanted.update(node.refs())
    return needed[::-1], rest[::-1]


def _followers(window: list[Node], node: Node | None) -> set[int]:
    """Those nodes, by id, that need what another one made, with the views that only they read."""
    found: set[int] = set()
    made = set(node.outs) if node is not None else set[str]()
    for n in window:
        if not made.isdisjoint(n.refs()):
            found.add(id(n))
            made.update(n.outs)
    before: set[str] = set()  # that the others read
    for n in reversed(window):
        if id(n) not in found:
            if is_view(n) and before.isdisjoint(n.outs):
                found.add(id(n))
            else:
                before.update(n.refs())
    return found
