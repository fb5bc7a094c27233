"""Which ops of an emitted program write over an operand that nobody reads any more, and where a segment lets go of what it made.

Large tensors cost most where their memory is new, and where they outlive their last use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autopar.cost.live import is_view, may_view
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref, TensorType

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


def dying(nodes: Sequence[Node], types: Mapping[str, TensorType], over: Mapping[str, int], results: Collection[str]) -> list[list[str]]:
    """For each node of a segment the names to delete after it: the last of those by which a large tensor made in it is held.

    A view holds its base, so all names of one memory go together; where a result lies in it none does. What the caller holds outlives the
    segment anyway, and after the last node all names go by themselves.

    Args:
        over: results that are written over an operand: the operand's position.
        results: names that the segment returns.
    """
    root: dict[str, str] = {}  # name -> that of the memory made here that it lies in
    last: dict[str, int] = {}
    for n, node in enumerate(nodes):
        last.update(dict.fromkeys((*node.refs(), *(o for o in node.outs if o)), n))
        if node.name in over or is_view(node):
            base = node.args[over[node.name]].name if node.name in over else next(iter(node.refs()), "")
            root.update((o, root[base]) for o in node.outs if o and base in root)
        else:
            root.update((o, o) for o in node.outs if o)
    held: dict[str, list[str]] = {}
    for name, base in root.items():
        held.setdefault(base, []).append(name)
    gone: list[list[str]] = [[] for _ in nodes]
    for base, names in held.items():
        at = max(last[name] for name in names)
        if types[base].nbytes >= LARGE and at < len(nodes) - 1 and not any(name in results for name in names):
            gone[at] += names
    return gone
