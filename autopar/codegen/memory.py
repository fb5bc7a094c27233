"""Which ops of an emitted program write over an operand that nobody reads any more: large tensors cost most where their memory is new."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.cost.live import may_view
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref

#: ops with a form that writes over an operand: which operands it may be; the result lies in memory as the first of them does.
OVER = {
    "aten.add.Tensor": (0, 1),
    "aten.mul.Tensor": (0, 1),
    "aten.sub.Tensor": (0,),
    "aten.div.Tensor": (0,),
    "aten.exp.default": (0,),
    "aten.neg.default": (0,),
    "aten.addmm.default": (0,),
    "autopar.cross_entropy_backward": (2,),
    "autopar.log_softmax": (0,),
}
#: other sight of the first operand's memory, in the same order.
_VIEWS = frozenset(f"aten.{name}" for name in ("view.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims"))
#: results that are contiguous whatever the operands are.
_CONTIGUOUS = frozenset(("aten.mm.default", "aten.bmm.default", "aten.addmm.default"))
#: bytes from which on it is worth it; smaller tensors come from memory at hand, and their text is easier to read without.
LARGE = 2**20


def overwritten(program: LocalProgram, nodes: Sequence[Node]) -> dict[str, int]:
    """For each op that may write over an operand, by the name of its result: the position of that operand.

    The operand's memory was made in the program for it alone, by an op in the same region; no value that lies in it is read later, is an
    output, or goes into a collective, whose input must keep.

    Args:
        nodes: in the order in which they run.
    """
    types = program.types
    root: dict[str, str] = {}  # value -> the value whose memory it lies in, where that was made here
    home: dict[str, Node] = {}
    last: dict[str, int] = defaultdict(int)
    lost = {o.value for o in program.outputs}
    for n, node in enumerate(nodes):
        for name in node.refs():
            last[root.get(name, name)] = n
        if node.op in _VIEWS and node.refs()[0] in root:
            root[node.name] = root[node.refs()[0]]
            continue
        if node.op.startswith("comm."):
            lost.update(node.refs())
        elif may_view(node):
            lost.update(node.refs())
            continue
        for out in node.outs:
            if out:
                root[out], home[out] = out, node
    gone = {root[v] for v in lost if v in root}
    contiguous = {out for out, node in home.items() if node.op in _CONTIGUOUS or node.op.startswith("comm.")}
    found: dict[str, int] = {}
    for n, node in enumerate(nodes):
        if node.op not in OVER or node.kwargs or types[node.name].nbytes < LARGE:
            continue
        for at in OVER[node.op]:
            operand = node.args[at] if at < len(node.args) else None
            if not isinstance(operand, Ref) or operand.name not in root or types[operand.name] != types[node.name]:
                continue
            base = root[operand.name]
            made = home[base]
            free = base not in gone and last[base] == n and made.region == node.region
            others = {root.get(a.name) for k, a in enumerate(node.args) if k != at and isinstance(a, Ref)}
            if free and base not in others and (at == OVER[node.op][0] or base in contiguous):
                found[node.name] = at
                if base in contiguous:
                    contiguous.add(node.name)
                break
    return found
