"""Rows of lookups: a dim is indexed by values, so a shard must know where it starts."""

from __future__ import annotations

import torch

from autopar.errors import RuleError
from autopar.ir.program import Node, Ref
from autopar.rules.rule import Local, Rule, Types, letters, normal_dim


def _embedding_local(node: Node, local: Local) -> Node:
    start = local.start(local.inputs[0], 0)
    return (
        node
        if not start.terms
        else Node(
            "autopar.embedding",
            (node.args[0], node.args[1], start, local.inputs[0].shape[0]),
            node.outs,
            (),
            node.phase,
            node.where,
            node.region,
        )
    )


def _embedding_backward_local(node: Node, local: Local) -> Node:
    grad, index, padding = node.args[:3]
    out = local.outputs[0]
    return node.with_args(grad, index, padding, local.out_shape()[0], local.start(out, 0))


def _pick(node: Node, types: Types) -> str:
    shape = types[node.refs()[0]].shape
    dim = normal_dim(node.args[2], len(shape))
    names = letters(len(shape))
    rest = " ".join(n for i, n in enumerate(names) if i != dim)
    return f"{' '.join(names)}, {rest} -> {rest} ; {names[dim]}: offset-sum"


def _pick_local(node: Node, local: Local) -> Node:
    dim = normal_dim(node.args[2], len(local.inputs[0].shape))
    return node.with_args(*node.args[:3], local.start(local.inputs[0], dim), *node.args[4:])


def _unpick(node: Node, types: Types) -> str:
    shape = types[node.outs[0]].shape
    dim = normal_dim(node.args[2], len(shape))
    names = letters(len(shape))
    rest = " ".join(n for i, n in enumerate(names) if i != dim)
    return f"{rest}, {rest} -> {' '.join(names)} ; {names[dim]}: offset"


def _unpick_local(node: Node, local: Local) -> Node:
    out = local.outputs[0]
    dim = normal_dim(node.args[2], len(out.shape))  # type: ignore[union-attr]
    return node.with_args(node.args[0], node.args[1], dim, local.out_shape()[dim], local.start(out, dim))


def _index(node: Node, types: Types) -> str:
    """Indexed dims are whole. The indices' own dims stand in place of them if they are neighbours, else in front."""
    source = types[node.refs()[0]].shape
    names = letters(len(source))
    given = [i for i, t in enumerate(node.args[1]) if t is not None]
    _refuse_masks(node, types, 1 + len(given))
    width = _width(node, types, 1)
    places = [f"i{k}" for k in range(width)]
    terms = [" ".join(names), *_index_terms(node, types, 1)]
    rest = [n for i, n in enumerate(names) if i not in given]
    adjacent = given == list(range(given[0], given[-1] + 1)) if given else True
    at = given[0] if adjacent and given else 0
    out = [*rest[:at], *places, *rest[at:]]
    return f"{', '.join(terms)} -> {' '.join(out)} ; {', '.join(f'{names[i]}: whole' for i in given)}"


def _refuse_masks(node: Node, types: Types, last: int) -> None:
    if any(types[name].dtype in (torch.bool, torch.uint8) for name in node.refs()[1:last]):
        raise RuleError(f"{node.op} with a mask", where=str(node.where), why="the size of its result depends on values", hint="use where()")


def _width(node: Node, types: Types, position: int) -> int:
    return max((len(types[t.name].shape) for t in node.args[position] if t is not None), default=0)


def _index_terms(node: Node, types: Types, position: int) -> list[str]:
    """Terms of the index tensors, which broadcast to each other."""
    shapes = [types[t.name].shape for t in node.args[position] if t is not None]
    width = max(map(len, shapes), default=0)
    full = torch.broadcast_shapes(*shapes) if shapes else ()
    return [
        " ".join("1" if s == 1 and full[width - len(shape) + k] != 1 else f"i{width - len(shape) + k}" for k, s in enumerate(shape))
        for shape in shapes
    ]


def _index_put(node: Node, types: Types) -> str:
    """What is put is whole: each place may be written from anywhere."""
    source = types[node.refs()[0]].shape
    names = letters(len(source))
    given = [i for i, t in enumerate(node.args[1]) if t is not None]
    _refuse_masks(node, types, 1 + len(given))
    terms = _index_terms(node, types, 1)
    places = [f"i{k}" for k in range(_width(node, types, 1))]
    rest = [n for i, n in enumerate(names) if i not in given]
    adjacent = given == list(range(given[0], given[-1] + 1)) if given else True
    at = given[0] if adjacent and given else 0
    full = [*rest[:at], *places, *rest[at:]]
    shape = types[node.args[2].name].shape
    own = full[len(full) - len(shape) :]
    sizes = {n: s for n, s in zip(names, source)}
    sizes |= {f"i{k}": s for k, s in enumerate(torch.broadcast_shapes(*(types[t.name].shape for t in node.args[1] if t is not None)))}
    values = " ".join("1" if s == 1 and sizes[n] != 1 else n for n, s in zip(own, shape))
    whole = [*(names[i] for i in given), *places]
    return f"{' '.join(names)}, {', '.join(terms)}, {values} -> {' '.join(names)} ; {', '.join(f'{n}: whole' for n in whole)}"


def _index_put_linear(node: Node, types: Types) -> str:
    return f"0 {len(node.refs()) - 1}" if types[node.outs[0]].dtype != torch.bool else ""


def _along(node: Node, types: Types, index: tuple[int, ...]) -> tuple[str, str, str]:
    """Terms of the tensor and the index of gather and scatter, and kinds: dims of one size in both are one factor."""
    source = types[node.refs()[0]].shape
    dim = normal_dim(node.args[1], len(source))
    left, right, kinds = letters(len(source)), letters(len(source)), []
    for i, (a, b) in enumerate(zip(source, index)):
        if i == dim or a != b:
            left[i], right[i] = f"x{i}", f"y{i}"
            kinds.append(f"x{i}: whole")
            if i != dim:
                kinds.append(f"y{i}: whole")
    return " ".join(left), " ".join(right), ", ".join(kinds)


def _gather(node: Node, types: Types) -> str:
    left, right, kinds = _along(node, types, types[node.refs()[1]].shape)
    return f"{left}, {right} -> {right} ; {kinds}"


def _scatter(node: Node, types: Types) -> str:
    index = types[node.refs()[1]].shape
    left, right, kinds = _along(node, types, index)
    terms = [left, right]
    if len(node.refs()) == 3:
        source = types[node.refs()[2]].shape
        terms.append(" ".join(n if a == b else f"z{i}" for i, (n, a, b) in enumerate(zip(right.split(), index, source))))
        kinds += "".join(f", z{i}: whole, {n}: whole" for i, (n, a, b) in enumerate(zip(right.split(), index, source)) if a != b)
    dim = normal_dim(node.args[1], len(index))
    # A maximum with the old values may be taken on every rank; a sum would add them on every rank.
    reduce = node.args[4] if len(node.args) > 4 and node.arg(5, "include_self", True) else ""
    return f"{', '.join(terms)} -> {left} ; {kinds}, y{dim}: {({'amax': 'max', 'amin': 'min'}).get(reduce, 'whole')}"


def _scatter_reduce_linear(node: Node, types: Types) -> str:
    return "0 2" if node.args[4] in ("sum", "mean") else ""


def _isin(node: Node, types: Types) -> str:
    tests = [f"t{k}" for k in range(len(types[node.refs()[1]].shape))]
    return f"*, {' '.join(tests)} -> * ; {', '.join(f'{t}: whole' for t in tests)}"


def _index_select(node: Node, types: Types) -> str:
    names = letters(len(types[node.refs()[0]].shape))
    dim = normal_dim(node.args[1], len(names))
    out = ["i" if k == dim else n for k, n in enumerate(names)]
    return f"{' '.join(names)}, i -> {' '.join(out)} ; {names[dim]}: whole"


def _index_add(node: Node, types: Types) -> str:
    names = letters(len(types[node.refs()[0]].shape))
    dim = normal_dim(node.args[1], len(names))
    source = ["i" if k == dim else n for k, n in enumerate(names)]
    return f"{' '.join(names)}, i, {' '.join(source)} -> {' '.join(names)} ; {names[dim]}: whole, i: whole"


def _index_fill(node: Node, types: Types) -> str:
    names = letters(len(types[node.refs()[0]].shape))
    dim = normal_dim(node.args[1], len(names))
    value = "," if isinstance(node.args[3], Ref) else ""
    return f"{' '.join(names)}, i{value} -> {' '.join(names)} ; {names[dim]}: whole, i: whole"


def _flat(node: Node, types: Types) -> str:
    """Places in a tensor as if it were flat: all of it is whole."""
    source = [f"x{i}" for i in range(len(types[node.refs()[0]].shape))]
    kinds = [f"{n}: whole" for n in source]
    if node.op == "aten.take.default":
        return f"{' '.join(source)}, * -> * ; {', '.join(kinds)}"
    terms = []
    for k, name in enumerate(node.refs()[1:]):
        own = [f"y{k}_{i}" for i in range(len(types[name].shape))]
        kinds += [f"{n}: whole" for n in own]
        terms.append(" ".join(own))
    return f"{' '.join(source)}, {', '.join(terms)} -> {' '.join(source)} ; {', '.join(kinds)}"


def _masked_scatter(node: Node, types: Types) -> str:
    """What is put where depends on how many places before it are masked."""
    full = letters(len(types[node.outs[0]].shape))
    mask = " ".join(full[len(full) - len(types[node.refs()[1]].shape) :])
    source = [f"s{i}" for i in range(len(types[node.refs()[2]].shape))]
    return f"{' '.join(full)}, {mask}, {' '.join(source)} -> {' '.join(full)} ; {', '.join(f'{n}: whole' for n in [*full, *source])}"


def _masked_scatter_backward(node: Node, types: Types) -> str:
    full = letters(len(types[node.refs()[0]].shape))
    source = [f"s{i}" for i in range(len(types[node.outs[0]].shape))]
    kinds = ", ".join(f"{n}: whole" for n in [*full, *source])
    return f"{' '.join(full)}, {' '.join(full)} -> {' '.join(source)} ; {kinds}"


def _searchsorted(node: Node, types: Types) -> str:
    """One sorted row for all, or a row of its own for each."""
    return "s, * -> * ; s: whole" if len(types[node.refs()[0]].shape) == 1 else "* s, * v -> * v ; s: whole"


_INDEX = ("f[6, 4], [i6[2, 4]]", "f[4, 6, 2], [None, i6[4]]", "f[6, 4, 2], [i6[4], None, i2[4]]", "f[6, 4], [i6[2, 1], i4[4]]")
_INDEX_PUT = (
    "f[6, 4], [i6[2]], f[2, 4], True",
    "f[6, 4], [i6[2, 4]], f[4], True",
    "f[4, 6], [None, u6[4]], f[4, 4]",
    "f[4, 6], [None, i6[4]], f[4, 1], True",
)

RULES = (
    Rule("aten.embedding.default", "v h, * -> * h ; v: offset-sum", "0", local=_embedding_local, samples=("f[6, 4], i6[2, 3]",)),
    Rule("autopar.embedding_backward", "* h, * -> v h ; *1: sum, *2: sum, *3: sum, v: offset", "0", local=_embedding_backward_local,
         samples=("f[2, 3, 4], i6[2, 3], -1, 6, 0", "f[2, 3, 4], i6[2, 3], 1, 6, 0")),
    Rule("autopar.pick", _pick, "0", local=_pick_local, samples=("f[4, 6], i6[4], 1, 0", "f[4, 6, 2], i6[4, 2], 1, 0")),
    Rule("autopar.unpick", _unpick, "0", local=_unpick_local, samples=("f[4], i6[4], 1, 6, 0",)),
    *(Rule(f"aten.{op}.Tensor", _index, "0", samples=_INDEX) for op in ("index", "_unsafe_index")),
    *(Rule(f"aten.{op}.default", _index_put, _index_put_linear, samples=_INDEX_PUT) for op in ("index_put", "_unsafe_index_put")),
    Rule("aten.gather.default", _gather, "0", samples=("f[4, 6], 1, i6[4, 2]", "f[4, 6], 0, i4[2, 4]")),
    Rule("aten.scatter.src", _scatter, "0 2", samples=("f[4, 6], 1, u6[4, 4], f[4, 4]", "f[4, 6], 1, u6[4, 4], f[4, 6]")),
    Rule("aten.scatter.value", _scatter, samples=("f[4, 6], 1, i6[4, 2], 1.5",)),
    Rule("aten.scatter_reduce.two", _scatter, _scatter_reduce_linear,
         samples=("f[4, 6], 1, i6[4, 4], f[4, 4], 'sum'", "f[4, 6], 1, i6[4, 4], f[4, 4], 'amax'",
                  "f[4, 6], 0, i4[4, 6], f[4, 6], 'amin'", "f[4, 6], 1, i6[4, 4], f[4, 4], 'amax', include_self=False",
                  "f[4, 6], 1, i6[4, 4], f[4, 4], 'mean'")),
    Rule("aten.bucketize.Tensor", "*, edges -> * ; edges: whole", samples=("f[4, 6], f[4]",)),
    Rule("aten.searchsorted.Tensor", _searchsorted, samples=("f[6], f[4, 6]", "f[4, 6], f[4, 3]")),
    Rule("aten.take.default", _flat, "0", samples=("f[4, 6], i9[2, 3]",)),
    Rule("aten.put.default", _flat, "0 2", samples=("f[4, 6], u9[4], f[4]", "f[4, 6], i9[4], f[4], True")),
    Rule("aten.index_fill.int_Scalar", _index_fill, lambda n, _: "0" if n.args[3] == 0 else "",
         samples=("f[4, 6], 1, i6[4], 1.5", "f[4, 6], 1, i6[4], 0")),
    Rule("aten.index_fill.int_Tensor", _index_fill, "0 2", samples=("f[4, 6], 1, i6[4], f[]",)),
    Rule("aten.index_copy.default", _index_add, "0 2", samples=("f[4, 6], 1, u6[4], f[4, 4]",)),
    Rule("aten.masked_scatter.default", _masked_scatter, "0 2", samples=("f[4, 6], b[4, 6], f[4, 6]",)),
    Rule("aten.masked_scatter_backward.default", _masked_scatter_backward, "0", samples=("f[4, 6], b[4, 6], (4, 6)",)),
    Rule("aten.isin.Tensor_Tensor", _isin, samples=("i9[4, 6], i9[2, 2]",)),
    Rule("aten.scatter_add.default", _scatter, "0 2", samples=("f[4, 6], 1, i6[4, 4], f[4, 4]", "f[4, 6], 0, i4[4, 4], f[4, 6]")),
    Rule("aten.index_select.default", _index_select, "0", samples=("f[4, 6], 1, i6[4]",)),
    Rule("aten.index_add.default", _index_add, "0 2", samples=("f[4, 6], 1, i6[4], f[4, 4]",)),
)  # fmt: skip
