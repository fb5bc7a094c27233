"""Which numbers of the batch index into something, and how far they may go: so that a wrong id is found before a step, not in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar._torch import resolve
from autopar.errors import InputError
from autopar.ir.program import Node, Program, Ref, map_refs

#: what an index op asks of an operand: its name, the least and the first too large number, one that is ignored, and words.
Ask = tuple[str, int, int, int | None, str]


def _table(node: Node, shape: Callable[[str], tuple[int, ...]]) -> Iterator[Ask]:
    table, index = node.refs()[:2]
    rows = shape(table)[0]
    yield index, 0, rows, None, f"the table has {rows} rows"


def _label(node: Node, shape: Callable[[str], tuple[int, ...]]) -> Iterator[Ask]:
    scores, label = node.refs()[:2]
    classes, ignored = shape(scores)[-1 if len(shape(scores)) == 1 else 1], int(node.arg(4, "ignore_index", -100))
    yield label, 0, classes, ignored, f"there are {classes} classes, and the label {ignored} is ignored"


def _along(node: Node, shape: Callable[[str], tuple[int, ...]]) -> Iterator[Ask]:
    source, index = node.refs()[:2]
    dim = int(node.arg(1, "dim", 0))
    size = (shape(source) or (1,))[dim]
    yield index, 0, size, None, f"the indexed dim has size {size}"


def _subscript(node: Node, shape: Callable[[str], tuple[int, ...]]) -> Iterator[Ask]:
    source, indices = node.args[0], node.arg(1, "indices", ())
    for dim, index in enumerate(indices):
        if isinstance(index, Ref):
            size = shape(source.name)[dim]
            yield index.name, -size, size, None, f"the indexed dim has size {size}"


INDEXING: dict[str, Callable[[Node, Callable[[str], tuple[int, ...]]], Iterator[Ask]]] = {
    "aten.embedding.default": _table,
    "aten.nll_loss_forward.default": _label,
    "aten.nll_loss2d_forward.default": _label,
    "aten.gather.default": _along,
    "aten.index_select.default": _along,
    "aten.scatter.src": _along,
    "aten.scatter.value": _along,
    "aten.scatter_add.default": _along,
    "aten.index_add.default": _along,
    "aten.index.Tensor": _subscript,
    "aten.index_put.default": _subscript,
}

#: ops whose result holds numbers of their one operand, all of them,
ALL = frozenset(
    f"aten.{op}"
    for op in (
        "view.default", "_unsafe_view.default", "reshape.default", "clone.default", "contiguous.default", "unsqueeze.default", "t.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "transpose.int", "expand.default", "repeat.default",
        "flip.default", "roll.default", "detach.default", "alias.default",
    )
)  # fmt: skip
#: or some of them, and maybe a constant.
SOME = frozenset(("aten.slice.Tensor", "aten.select.int", "aten.narrow.default", "aten._to_copy.default", "aten.constant_pad_nd.default"))


@dataclass(frozen=True)
class Bound:
    """Numbers of one leaf of the batch lie in ``low <= n < high``, or are ``ignored``.

    Attributes:
        leaf: which leaf, in order; ``path`` its name.
        ways: the ops between the leaf and the index, where they leave numbers out or put one in; else empty.
        size: of the leaf in the captured program.
        words: what is indexed; ``where`` the user's line.
    """

    leaf: int
    path: str
    low: int
    high: int
    ignored: int | None
    words: str
    where: str
    ways: tuple[Node, ...]
    size: tuple[int, ...]

    def check(self, rows: Tensor, dim: int | None) -> None:
        """Raises InputError where one of this rank's rows is out of range. A look at values: for tensors on the CPU."""
        if not rows.numel() or self._fits(rows):
            return
        wrong = rows
        if self.ways:
            found = self._arriving(rows, dim)
            if found is None or self._fits(found):
                return
            wrong = found
        wrong = wrong[(wrong < self.low) | (wrong >= self.high)]
        if self.ignored is not None:
            wrong = wrong[wrong != self.ignored]
        raise InputError(
            f"batch input {self.path!r} holds {wrong[0].item()}, which is out of range", where=self.where,
            why=f"{self.words}: {self.low} to {self.high - 1}", hint="ids and labels count from 0",
        )  # fmt: skip

    def _fits(self, t: Tensor) -> bool:
        low, high = torch.aminmax(t)
        if low >= self.low and high < self.high:
            return True
        return self.ignored is not None and bool((((t >= self.low) & (t < self.high)) | (t == self.ignored)).all())

    def _arriving(self, rows: Tensor, dim: int | None) -> Tensor | None:
        """The numbers that arrive at the index, from a batch made of these rows alone; None where they depend on whose rows come first."""
        times = [1] * rows.dim()
        if dim is not None and rows.shape[dim] != self.size[dim]:
            if self.size[dim] % rows.shape[dim]:
                return None
            times[dim] = self.size[dim] // rows.shape[dim]
        x = rows.repeat(times)
        for node in self.ways:
            if node.op in ("aten.slice.Tensor", "aten.select.int", "aten.narrow.default") and dim is not None:
                cut = int(node.arg(1, "dim", 0))
                if x.shape[cut] == self.size[dim]:
                    return None
            x = resolve(node.op)(*map_refs(node.args, {node.refs()[0]: x}.__getitem__), **dict(node.kwargs))
        return x


def find_bounds(program: Program) -> tuple[Bound, ...]:
    """The bounds of a captured program's batch: of leaves that reach an index by ops that only pick and arrange their numbers."""
    leaves = {i.name: (at, i.path) for at, i in enumerate(program.inputs_of("batch"))}
    producers = program.producers()
    found: dict[tuple[object, ...], Bound] = {}
    for node in program.nodes:
        if node.phase != "forward" or node.op not in INDEXING:
            continue
        for name, low, high, ignored, words in INDEXING[node.op](node, lambda n: program.types[n].shape):
            way = _way(name, leaves, producers)
            if way is None or program.types[name].dtype == torch.bool:
                continue
            leaf, ops = way
            at, path = leaves[leaf]
            kind = program.types[leaf]
            ways = ops if kind.dtype.is_floating_point or any(n.op in SOME and n.op != "aten._to_copy.default" for n in ops) else ()
            key = (at, low, high, ignored, tuple(n.name for n in ways))
            found.setdefault(key, Bound(at, path, low, high, ignored, words, str(node.where), ways, kind.shape))
    return tuple(found.values())


def _way(name: str, leaves: Mapping[str, object], producers: Mapping[str, Node]) -> tuple[str, tuple[Node, ...]] | None:
    ops: list[Node] = []
    while name not in leaves:
        node = producers.get(name)
        if node is None or node.op not in ALL | SOME or len(node.refs()) != 1:
            return None
        ops.append(node)
        name = node.refs()[0]
    return name, tuple(reversed(ops))


def check_bounds(bounds: Sequence[Bound], tensors: Sequence[Tensor], dims: Sequence[int | None]) -> None:
    """Raises InputError for the first number out of range. Tensors that aren't on the CPU are left to their ops: a look would stall."""
    for bound in bounds:
        rows = tensors[bound.leaf]
        if rows.device.type == "cpu" and rows.dtype != torch.bool:
            bound.check(rows, dims[bound.leaf])


__all__ = ["Bound", "check_bounds", "find_bounds"]
