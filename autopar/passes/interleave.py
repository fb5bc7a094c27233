"""Microbatches side by side: the collectives of one run behind the compute of another.

The forward of ``tp`` is one chain: each product needs the sum before it, and nothing else is there to compute meanwhile. Two microbatches
are two chains. The body of the loop is written several times, a **lane** for each microbatch, and the lanes take turns: each computes up to
its next collective and starts it, then the next lane does. A wait stands in front of the first use (``codegen.emit``), which is by then
other lanes' compute away.

Of ``n`` microbatches in ``w`` lanes, turn ``t`` of the loop runs those from ``t * w`` on; with ``n == w`` there is no loop, and gradients
are reduced as soon as the last lane has made its share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.errors import PlanError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Ref, fresh_name
from autopar.layout.mesh import MICROBATCH

#: what joins two lanes' shares of a value that is partial over microbatches.
_JOIN = {"sum": "aten.add.Tensor", "max": "aten.maximum.default", "min": "aten.minimum.default"}


def interleave(program: LocalProgram, ways: int) -> LocalProgram:
    """The program with ``ways`` microbatches side by side. Raises PlanError where ``ways`` doesn't divide their number."""
    if ways == 1:
        return program
    if program.microbatches % ways:
        raise PlanError(
            f"{ways} microbatches side by side don't divide {program.microbatches} microbatches", hint=f"a multiple of {ways} microbatches"
        )
    return _Interleaver(program, ways).run()


class _Interleaver:
    def __init__(self, program: LocalProgram, ways: int) -> None:
        self.program, self.ways = program, ways
        self.turns = program.microbatches // ways
        self.types, self.shardings, self.wholes = dict(program.types), dict(program.shardings), dict(program.global_types)
        self.taken = set(self.types)
        self.names: list[dict[str, str]] = [{} for _ in range(ways)]  # a lane's name of what the body makes
        self.totals: dict[str, Node] = {n.refs()[0]: n for n in program.nodes if n.op == "autopar.accumulate"}

    def run(self) -> LocalProgram:
        program = self.program
        before = [n for n in program.nodes if n.region == "pre"]
        body = [n for n in program.nodes if n.region == "body"]
        after = [n for n in program.nodes if n.region == "post" and n.op != "autopar.accumulate"]
        for node in body:
            for out in filter(None, node.outs):
                for lane, names in enumerate(self.names):
                    names[out] = out if lane == 0 else self.fresh(f"{out}__{lane}", out)
        merged: list[Node] = []
        looped = []
        for part in _parts(body):
            for lane in range(self.ways):
                for node in part:
                    merged.append(self.copied(node, lane))
                    if lane == self.ways - 1:
                        for out in node.outs:
                            if out in self.totals:
                                looped += self.join(out, merged)
        nodes = [*before, *merged, *looped, *after]
        if self.turns == 1:
            nodes = [replace(n, region="body") for n in nodes]
        return replace(
            program, nodes=tuple(nodes), types=self.types, shardings=self.shardings, global_types=self.wholes, microbatches=self.turns
        )

    def fresh(self, stem: str, like: str) -> str:
        name = fresh_name(stem, self.taken)
        self.taken.add(name)
        self.types[name] = self.types[like]
        if like in self.shardings:
            self.shardings[name] = self.shardings[like]
        if like in self.wholes:
            self.wholes[name] = self.wholes[like]
        return name

    def copied(self, node: Node, lane: int) -> Node:
        """A lane's copy of a node of the body."""
        names = self.names[lane]
        copy = node.reading([names.get(r, r) for r in node.refs()])
        return replace(
            copy, args=self.placed(copy.args, lane), kwargs=self.placed(copy.kwargs, lane), outs=tuple(names.get(o, o) for o in node.outs)
        )

    def placed(self, tree: Any, lane: int) -> Any:
        """Arguments with the microbatch's number as the turn's and the lane's."""
        if isinstance(tree, tuple):
            return tuple(self.placed(t, lane) for t in tree)
        if not isinstance(tree, Offset) or all(axis != MICROBATCH for axis, _ in tree.terms):
            return tree
        strides = dict(tree.terms)
        stride = strides.pop(MICROBATCH)
        if self.turns > 1:
            strides[MICROBATCH] = stride * self.ways
        return Offset(tuple(strides.items()), tree.base + stride * lane)

    def join(self, value: str, merged: list[Node]) -> list[Node]:
        """Adds the nodes that join the lanes' shares of a total; what of it stands behind the loop is returned."""
        total = self.totals[value]
        held = value
        for lane in range(1, self.ways):
            last = self.turns == 1 and lane == self.ways - 1
            out = total.name if last else self.fresh(f"{value}__{'_'.join(map(str, range(lane + 1)))}", value)
            args = (Ref(held), Ref(self.names[lane][value]))
            merged.append(Node(_JOIN[total.args[1]], args, (out,), (), total.phase, total.where, "body"))
            held = out
        return [] if self.turns == 1 else [total.reading([held])]


def _parts(nodes: list[Node]) -> list[list[Node]]:
    """The runs of nodes that end with a collective."""
    parts: list[list[Node]] = [[]]
    for node in nodes:
        parts[-1].append(node)
        if node.op.startswith("comm."):
            parts.append([])
    return [p for p in parts if p]
