"""Which tensors are alive when, from the graph: what a turn of the loop over microbatches holds beside parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar._torch import resolve, returns_own_memory
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, layer_of

#: ops whose result is an operand's memory though torch doesn't say so, and those whose result may be.
_VIEWS = frozenset(("aten._unsafe_view.default", *(f"autopar.{n}" for n in ("accumulate", "checked", "member", "once", "pack"))))
_MAY_VIEW = _VIEWS | {"autopar.microbatch", "autopar.piece"}


@dataclass(frozen=True)
class Life:
    """A tensor: its bytes, and the first and last node at which it is alive (positions in the program's nodes)."""

    nbytes: int
    begin: int
    end: int


def is_forward(node: Node) -> bool:
    """Whether a node belongs to the forward of a microbatch, which its backward may run again."""
    return node.phase == "forward" and node.region == "body" and node.op != "autopar.accumulate"


def is_view(node: Node) -> bool:
    """Whether a node's result lies in the memory of its first operand."""
    if node.op.startswith("comm.") or not node.refs():
        return False
    return node.op in _VIEWS or not node.op.startswith("autopar.") and not returns_own_memory(resolve(node.op))


def may_view(node: Node) -> bool:
    """Whether a node's result lies, or may lie, in the memory of its first operand."""
    return is_view(node) or node.op in _MAY_VIEW


def find_roots(program: LocalProgram) -> dict[str, str]:
    """The value in whose memory another one lies: for all that lie in one's."""
    roots: dict[str, str] = {}
    for node in program.nodes:
        if is_view(node):
            source = node.refs()[0]
            roots |= {o: roots.get(source, source) for o in node.outs if o}
    return roots


def find_runs(nodes: Sequence[Node]) -> list[int]:
    """The number of the emitted function that a node is in: what a function is given lives until it returns."""
    found: list[int] = []
    last: tuple[str, str] | None = None
    for node in nodes:
        here = None if node.op.startswith("comm.") else (layer_of(node.where.module), node.phase)
        found.append((found[-1] if found else 0) + (here is None or here != last))
        last = here
    return found


def find_lives(program: LocalProgram) -> dict[str, Life]:
    """When the tensors that the nodes make are alive; views are the tensor that they look at. Totals and outputs live to the end."""
    nodes = program.nodes
    roots, runs = find_roots(program), find_runs(nodes)
    ends = {run: n for n, run in enumerate(runs)}
    begin = {o: n for n, node in enumerate(nodes) for o in node.outs if o and o not in roots}
    end = dict(begin)
    for n, node in enumerate(nodes):
        for r in node.refs():
            base = roots.get(r, r)
            if base in begin:
                end[base] = max(end[base], n if runs[begin[base]] == runs[n] else ends[runs[n]])
    for value in (*(o.value for o in program.outputs), *(n.name for n in nodes if n.op == "autopar.accumulate")):
        base = roots.get(value, value)
        if base in begin:
            end[base] = len(nodes) - 1
    return {value: Life(program.types[value].nbytes, at, end[value]) for value, at in begin.items()}


def profile(lives: Sequence[Life], count: int) -> list[int]:
    """Bytes alive at each of ``count`` nodes."""
    change = [0] * (count + 1)
    for life in lives:
        change[life.begin] += life.nbytes
        change[life.end + 1] -= life.nbytes
    total, found = 0, []
    for step in change[:count]:
        total += step
        found.append(total)
    return found


def kept_values(program: LocalProgram) -> dict[str, int]:
    """What a microbatch keeps from its forward to its backward, with its bytes: tensors made there, or received from other stages.

    A view counts as what it looks at; gathered parameters are none of it.
    """
    roots, buckets = find_roots(program), {i.name for i in program.inputs_of("bucket")}
    made = (n for n in program.nodes if is_forward(n) and not buckets.intersection(n.refs()))
    there = {o for n in made for o in n.outs if o and o not in roots}
    there |= {i.name for i in program.inputs_of("received")}
    reads = (r for n in program.nodes if n.phase == "backward" and n.region == "body" for r in n.refs())
    return {r: program.types[r].nbytes for r in dict.fromkeys(roots.get(r, r) for r in reads) if r in there}


def kept_bytes(program: LocalProgram) -> int:
    """The bytes of ``kept_values``."""
    return sum(kept_values(program).values())
