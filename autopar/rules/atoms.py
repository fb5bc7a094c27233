"""Atoms: the finest factors that a program's views and equal chunks cut its dims into.

Every dim of every value is a node in a union-find; dims that carry the same factor of a row are one. Where a row merges factors into a
dim, that dim is refined into them, and so is every dim joined to it: a fused qkv weight becomes ``(3 H D)`` because somewhere its
output is chunked in three and viewed as heads. A view whose boundaries don't nest with what is known becomes opaque: its
dims are whole there, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.errors import VerifyError
from autopar.ir.program import Node, Program, signature
from autopar.layout.sharding import Sharding, uncut
from autopar.rules.row import Row
from autopar.rules.rule import Rules, refine


class _Dim:
    """A class of dims: a size, the classes it is refined into, and marks."""

    __slots__ = ("size", "parent", "parts", "child", "marks")

    def __init__(self, size: int, child: bool = False) -> None:
        self.size, self.child = size, child
        self.parent: _Dim | None = None
        self.parts: list[_Dim] | None = None
        self.marks: set[str] = set()

    def root(self) -> _Dim:
        at = self
        while at.parent is not None:
            at = at.parent
        while self.parent is not None and self.parent is not at:
            self.parent, self = at, self.parent  # noqa: PLW0642 - path compression
        return at

    def leaves(self) -> list[_Dim]:
        root = self.root()
        return [root] if root.parts is None else [leaf for part in root.parts for leaf in part.leaves()]


def _split(leaf: _Dim, sizes: list[int]) -> list[_Dim]:
    parts = [_Dim(s, child=True) for s in sizes]
    for part in parts:
        part.marks |= leaf.marks
    leaf.parts = parts
    return parts


def _align(left: list[_Dim], right: list[_Dim]) -> bool:
    """Makes two sequences of leaves the same sequence, refining where needed. False where boundaries don't nest."""
    if len(left) != len(right) or any(a.size != b.size for a, b in zip(left, right, strict=True)):
        sizes = refine([d.size for d in left], [d.size for d in right])
        if sizes is None:
            return False
        flat: list[list[_Dim]] = []
        for side in (left, right):
            pieces, at = [], 0
            for leaf in side:
                own, product = [], 1
                while product < leaf.size:
                    own.append(sizes[at])
                    product *= sizes[at]
                    at += 1
                leaf = leaf.root()
                now = [leaf] if len(own) <= 1 else _split(leaf, own) if leaf.parts is None else leaf.leaves()
                pieces += now
            flat.append(pieces)
        left, right = ([leaf for piece in side for leaf in piece.leaves()] for side in flat)
        if [d.size for d in left] != [d.size for d in right]:  # a leaf occurs twice and is cut for both
            return _align(left, right)
    for a, b in zip(left, right, strict=True):
        a, b = a.root(), b.root()
        if a is not b:
            a.parent = b
            b.child |= a.child
            b.marks |= a.marks
    return True


@dataclass(frozen=True)
class Atoms:
    """Atoms of every value, the marks of every atom (``batch``, ``feature``) and the row of every node as it holds with them.

    ``samples`` is the atom of a batch input that counts the samples of a microbatch: the one that data ranks cut.
    """

    dims: Mapping[str, tuple[tuple[int, ...], ...]]
    marks: Mapping[str, tuple[frozenset[str], ...]]
    rows: Mapping[int, Row] = field(repr=False)
    samples: Mapping[str, int] = field(default_factory=dict)

    def replicated(self, value: str) -> Sharding:
        """The sharding of a value that every rank holds whole."""
        return uncut(self.dims[value])


def analyse(program: Program, rules: Rules, batch_dims: Mapping[str, int | None], microbatches: int = 1) -> Atoms:
    """Finds the atoms of a program.

    Args:
        batch_dims: which dim of a batch input counts samples; None or absent where none does.
        microbatches: the batch dim is refined into (microbatches, rest), so that a microbatch is an index of an atom, marked ``mb``.

    The mark ``batch`` says that an atom comes from the batch dim of an input, ``feature`` that it is a dim of a matrix or a table,
    ``stream`` that it is the feature dim that runs from layer to layer (the residual stream).
    """
    dims: dict[str, list[_Dim | None]] = {name: [None if s == 1 else _Dim(s) for s in t.shape] for name, t in program.types.items()}
    params = {i.name for i in program.inputs_of("param")}
    for i in program.inputs_of("batch"):
        dim = batch_dims.get(i.name)
        if dim is not None and (found := dims[i.name][dim]) is not None:
            found.marks.add("batch")

    # a gradient lies as its parameter does; no op need tell
    by_path = {i.path: i.name for i in program.inputs_of("param")}
    for output in program.outputs_of("grad"):
        for a, b in zip(dims[by_path[output.path]], dims[output.value], strict=True):
            if a is not None and b is not None:
                _align(a.leaves(), b.leaves())

    rows: dict[int, Row] = {}
    bound: dict[tuple[object, ...], Row] = {}
    merges: list[tuple[int, Node]] = []
    matrices = {p: p for p in params}  # parameters, and what only moves their elements, to the parameter
    used: set[str] = set()
    for n, node in enumerate(program.nodes):
        key = signature(node, program.types)
        if key not in bound:
            bound[key] = rules.bind(node, program.types)
        row = rows[n] = bound[key]
        refs = node.refs()
        if row.moves and len(refs) == 1 and refs[0] in matrices:
            matrices.update({o: matrices[refs[0]] for o in node.outs if o})
        if rules[node.op].contraction or any("offset-sum" in k for k in row.kinds.values()):
            for name in refs:
                if name in matrices:
                    used.add(matrices[name])
                    for d in dims[name]:
                        if d is not None:
                            d.root().marks.add("feature")
        if _join_simple(row, _terms(node, row), dims):
            merges.append((n, node))
    for name in params:
        for d in dims[name]:
            if d is not None:
                d.root().marks.add("param")
    if microbatches > 1:
        for i in program.inputs_of("batch"):
            dim = batch_dims.get(i.name)
            if dim is not None and (found := dims[i.name][dim]) is not None and (root := found.root()).parts is None:
                if root.size == microbatches:
                    root.marks.add("mb")
                else:
                    _split(root, [microbatches, root.size // microbatches])[0].marks.add("mb")
    # hard merges first: whether a chunked dim is a root dim of a parameter shows only then
    for soft in (False, True):
        for n, node in merges:
            if rows[n].soft == soft:
                rows[n] = _join_merged(rows[n], _terms(node, rows[n]), dims)
    _mark_stream([dims[name] for name in used])
    out_dims = {name: tuple(tuple(x.size for x in d.leaves()) if d is not None else () for d in ds) for name, ds in dims.items()}
    marked: dict[_Dim, frozenset[str]] = {}  # equal values share what they say
    marks = {
        name: tuple(
            marked[root] if (root := x.root()) in marked else marked.setdefault(root, frozenset(root.marks))
            for d in ds if d is not None for x in d.leaves()
        )
        for name, ds in dims.items()
    }  # fmt: skip
    samples = {}
    for i in program.inputs_of("batch"):
        dim = batch_dims.get(i.name)
        if dim is not None:
            first = sum(len(d) for d in out_dims[i.name][: dim % len(out_dims[i.name])])
            own = range(first, first + len(out_dims[i.name][dim]))
            rows_of = next((a for a in own if "mb" not in marks[i.name][a]), None)
            if rows_of is not None:  # else every microbatch is one sample
                samples[i.name] = rows_of
    return Atoms(out_dims, marks, rows, samples)


def _mark_stream(matrices: list[list[_Dim | None]]) -> None:
    """Marks the dims that run from layer to layer: such a one is shared by more matrices than any other dim of theirs, by far.

    The dims inside a layer belong to that layer's few; without repetition there is no stream. A model of two towers has two.
    """
    counts: dict[int, int] = {}
    leaves: dict[int, _Dim] = {}
    beside: dict[int, set[int]] = {}
    for dims in matrices:
        found = {id(leaf.root()): leaf.root() for d in dims if d is not None for leaf in d.leaves()}
        for key, leaf in found.items():
            counts[key] = counts.get(key, 0) + 1
            leaves[key] = leaf
            beside.setdefault(key, set()).update(found.keys() - {key})
    for key, count in counts.items():
        if count >= 4 and all(count > 1.5 * counts[other] for other in beside[key]):
            leaves[key].marks.add("stream")


def _terms(node: Node, row: Row) -> Iterable[tuple[str, tuple[tuple[str, ...], ...]]]:
    yield from zip(node.refs(), row.inputs, strict=True)
    yield from ((o, t) for o, t in zip(node.outs, row.outputs, strict=True) if o)


def _join_simple(row: Row, terms: Iterable[tuple[str, tuple[tuple[str, ...], ...]]], dims: dict[str, list[_Dim | None]]) -> bool:
    """Joins dims that are the same single factor; says whether the row also merges factors."""
    first: dict[str, _Dim] = {}
    merged = False
    for name, term in terms:
        for i, factors in enumerate(term):
            found = dims[name][i]
            if len(factors) > 1:
                merged = True
            elif factors and found is not None:
                known = first.setdefault(factors[0], found)
                if known is not found and not _align(known.leaves(), found.leaves()):
                    raise VerifyError(f"factor {factors[0]} of row {row} has dims that can't be one")
    return merged


def _join_merged(row: Row, terms: Iterable[tuple[str, tuple[tuple[str, ...], ...]]], dims: dict[str, list[_Dim | None]]) -> Row:
    """Refines the dims that a row merges; the row, opaque where that can't be."""
    terms = tuple(terms)
    factor_dims: dict[str, _Dim] = {}
    for name, term in terms:
        for i, factors in enumerate(term):
            found = dims[name][i]
            if len(factors) == 1 and found is not None:
                factor_dims.setdefault(factors[0], found)
    bad: set[str] = set()
    for name, term in terms:
        for i, factors in enumerate(term):
            if len(factors) < 2:
                continue
            found = dims[name][i]
            assert found is not None
            if row.soft:
                root, known = found.root(), len(found.leaves()) > 1
                wanted = "param" in root.marks and not root.child
                if not wanted and not (known and _nests(found, [row.sizes[f] for f in factors])):
                    bad.update(factors)
                    continue
            for f in factors:
                factor_dims.setdefault(f, _Dim(row.sizes[f], child=True))
            parts = [leaf for f in factors for leaf in factor_dims[f].leaves()]
            if found.root().parts is None and all(p.root() is not found.root() for p in parts):
                root = found.root()
                root.parts = [factor_dims[f] for f in factors]
                for leaf in parts:
                    leaf.root().child = True
                    leaf.root().marks |= root.marks - {"mb"}
            elif not _align(found.leaves(), parts):
                bad.update(factors)
    return row.opaque(bad) if bad else row


def _nests(dim: _Dim, sizes: list[int]) -> bool:
    """Whether a dim is already cut at the boundaries that these sizes ask for."""
    leaves = [leaf.size for leaf in dim.leaves()]
    return refine(leaves, sizes) == leaves


def factor_positions(row: Row, dims: Iterable[tuple[tuple[int, ...], ...]]) -> list[dict[tuple[str, int], int]]:
    """For every term of a row (operands, then outputs), the position of each (factor, number of its atom) among the term's atoms.

    Args:
        dims: the atoms of every term's dims; an output that nobody reads has none.
    """
    out = []
    for term, atoms in zip((*row.inputs, *row.outputs), dims, strict=True):
        table: dict[tuple[str, int], int] = {}
        position = 0
        for factors, sizes in zip(term, atoms, strict=True):
            at = 0
            for f in factors:
                if row.sizes[f] == 0:  # nothing to cut, but an atom all the same
                    at += 1
                    continue
                product, i = 1, 0
                while product < row.sizes[f]:
                    product *= sizes[at]
                    table[f, i] = position + at
                    at, i = at + 1, i + 1
                if product != row.sizes[f]:
                    raise VerifyError(f"atoms {sizes} of a dim don't respect factor {f}={row.sizes[f]} of row {row}")
            position += len(sizes)
        out.append(table)
    return out
