"""Recompute: values of the forward that the backward makes again instead of keeping them.

A rewrite of the local program. Every value that the backward reads and that isn't to be kept is made once more, by a copy of its forward
node that stands right before the first backward node that reads it; what the copies read is copied likewise, up to what is kept. So
nothing is held that nobody reads, a collective that has to be run again is one like any other, and nothing is left to chance: random
numbers depend on their place (``runtime/random``), and what a buffer becomes is an output of the forward alone.

Source: Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from autopar.cost.device import Device
from autopar.cost.live import is_forward
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Program, fresh_name
from autopar.plan.recompute import Request, choose_recompute, costs_of, held_bytes
from autopar.rules import Rules
from autopar.rules.atoms import Atoms

P = TypeVar("P", bound=LocalProgram)

#: what a value's name gets where it is made again.
SUFFIX = "_again"


def recompute(program: P, values: Collection[str]) -> P:
    """The program whose backward makes ``values`` again. Those that it doesn't read, and needs for none that it reads, are no matter."""
    again = set(values)
    makers = {o: n for n in program.nodes if is_forward(n) for o in n.outs if o in again}
    types, shardings, wholes = dict(program.types), dict(program.shardings), dict(program.global_types)
    wanted = _wanted(program, makers)
    names: dict[str, str] = {}
    nodes: list[Node] = []

    def make(value: str) -> None:
        """Puts the copies that make a value before what follows."""
        left = [value]
        while left:
            maker = makers[left[-1]]
            missing = [r for r in maker.refs() if r in makers and r not in names]
            if missing:
                left += reversed(missing)
                continue
            left.pop()
            if value_of(maker) in names:
                continue
            outs = []
            for out in maker.outs:
                if out not in wanted:
                    outs.append("")
                    continue
                names[out] = fresh_name(f"{out}{SUFFIX}", types)
                types[names[out]] = types[out]
                if out in shardings:
                    shardings[names[out]], wholes[names[out]] = shardings[out], wholes[out]
                outs.append(names[out])
            copy = maker.reading([names.get(r, r) for r in maker.refs()])
            nodes.append(replace(copy, outs=tuple(outs), phase="backward"))

    def value_of(maker: Node) -> str:
        return next(o for o in maker.outs if o in wanted)

    for node in program.nodes:
        if node.phase == "backward" and node.region == "body":
            for r in node.refs():
                if r in makers and r not in names:
                    make(r)
            node = node.reading([names.get(r, r) for r in node.refs()])
        nodes.append(node)
    return _without_unread(replace(program, nodes=tuple(nodes), types=types, shardings=shardings, global_types=wholes))


def recompute_as_asked(
    program: P, request: Request, split: Program, atoms: Atoms, rules: Rules, device: Device, *, held: int | None = None,
    extra: int = 0, others: int = 0,
) -> P:  # fmt: skip
    """The program whose backward makes again what a plan's ``recompute`` asks for.

    Args:
        split: the whole program that this one is of; ``atoms`` are its.
        held, extra, others: as in ``choose_recompute``; by default all parameters and buffers of the program are held.
    """
    costs = costs_of(program, split, atoms, rules, device)
    held = held_bytes(program) if held is None else held
    return recompute(program, choose_recompute(program, request, costs, recompute, held=held, extra=extra, others=others))


def _without_unread(program: P) -> P:
    """The program without nodes of the forward that only the backward read, which has copies of them."""
    wanted = {o.value for o in program.outputs}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if is_forward(node) and wanted.isdisjoint(node.outs):
            continue
        wanted.update(node.refs())
        kept.append(node)
    gone = {o for n in program.nodes for o in n.outs if o} - {o for n in kept for o in n.outs}
    return replace(
        program, nodes=tuple(reversed(kept)), types={k: t for k, t in program.types.items() if k not in gone},
        shardings={k: s for k, s in program.shardings.items() if k not in gone},
        global_types={k: t for k, t in program.global_types.items() if k not in gone},
    )  # fmt: skip


def _wanted(program: LocalProgram, makers: dict[str, Node]) -> set[str]:
    """The values that are made again: those that the backward reads, and what they are made of."""
    left = [r for n in program.nodes if n.phase == "backward" and n.region == "body" for r in n.refs() if r in makers]
    found: set[str] = set()
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += [r for r in makers[value].refs() if r in makers]
    return found
