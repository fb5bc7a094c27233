"""Nodes whose keys are on other ranks become turns: compute on what is here, while what is next comes around the ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Program, TensorType, fresh_name
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.rules.rule import Results, Ring
from autopar.rules.strategies import ring_axis


def unroll_rings(local: LocalProgram, program: Program, atoms: Atoms, rules: Rules) -> LocalProgram:
    """The local program with the nodes of every turn in place of such a node; what its last turn gives has the names of its results."""
    rows = {node.name: atoms.rows[n] for n, node in enumerate(program.nodes) if atoms.rows[n].ring is not None}
    nodes: list[Node] = []
    types, taken = dict(local.types), set(local.types)
    for node in local.nodes:
        row = rows.get(node.name)
        shardings = [local.shardings[name] if name else None for name in (*node.refs(), *node.outs)] if row is not None else []
        axis = ring_axis(row, shardings) if row is not None else None
        turns = rules[node.op].turns if axis is not None else None
        if axis is None or turns is None:
            nodes.append(node)
            continue
        made: list[Node] = []

        def add(
            op: str,
            args: tuple[Any, ...],
            results: Results,
            kwargs: tuple[tuple[str, Any], ...],
            node: Node = node,
            made: list[Node] = made,
        ) -> tuple[str, ...]:
            names = []
            for stem, kind in results:
                names.append(fresh_name(stem if stem in types else f"{node.name}_{stem}", taken))
                taken.add(names[-1])
                types[names[-1]] = TensorType(kind.dtype, kind.shape)
            made.append(Node(op, args, tuple(names), kwargs, node.phase, node.where, node.region))
            return tuple(names)

        last = turns(node, Ring(axis, local.mesh[axis], types, add))
        final = {mine: theirs for mine, theirs in zip(last, node.outs, strict=True) if theirs}
        unread = {mine for mine, theirs in zip(last, node.outs, strict=True) if not theirs}
        for one in made:
            if one.op.startswith("comm.") and one.name in unread:
                continue
            renamed = one.reading([final.get(name, name) for name in one.refs()])
            nodes.append(replace(renamed, outs=tuple("" if o in unread else final.get(o, o) for o in one.outs)))
        for name in (*final, *unread):
            del types[name]
    return replace(local, nodes=tuple(nodes), types=types)
