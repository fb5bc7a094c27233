"""Products in pieces, so that the collective beside one is under way while it computes (decomposed collective matmul).

Rows of a product don't need each other. Where its result is reduced, the reduction of the first piece runs beside the product of the
second; where an operand is gathered, the product of the first piece beside the gather of the second. Pieces are cut along the first dim,
which no collective here cuts, so that each is one block of memory, and every element is computed from the same numbers as before.

Source: Wang et al. 2023, *Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models*, ASPLOS,
doi 10.1145/3567955.3567959, which cuts along the gathered dim and passes pieces around a ring instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref, TensorType, fresh_name

P = TypeVar("P", bound=LocalProgram)

#: what a piece's names get.
SUFFIX = "_piece"
#: ops that only give a shape to memory as it lies.
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_PRODUCT = "aten.mm.default"


def decompose(program: P, pieces: int) -> P:
    """The program with products beside collectives in so many pieces, where the first dim can be cut into them."""
    return _Decomposer(program, pieces).run() if pieces > 1 else program


@dataclass
class _Gathered:
    """A gather whose products run in pieces.

    ``views``: from what was gathered to the products' operand. ``whole``: others read it too. ``names``: of the pieces gathered.
    """

    gather: Node
    views: list[Node]
    products: list[Node]
    whole: bool
    names: list[str] = field(default_factory=list)


class _Decomposer:
    def __init__(self, program: Any, pieces: int) -> None:
        self.program, self.pieces = program, pieces
        self.types: dict[str, TensorType] = dict(program.types)
        self.makers: dict[str, Node] = program.producers()
        self.reads = Counter(r for n in program.nodes for r in n.refs())
        self.reads.update(o.value for o in program.outputs)
        self.place = {id(n): k for k, n in enumerate(program.nodes)}
        self.readers: dict[str, list[Node]] = {}
        for node in program.nodes:
            for r in dict.fromkeys(node.refs()):
                self.readers.setdefault(r, []).append(node)
        self.nodes: list[Node] = []
        self.gone: set[int] = set()  # nodes that pieces have replaced

    def run(self) -> Any:
        reduced: dict[int, list[Node]] = {}  # collective -> its operand's views and product, the product first
        gathered: dict[int, _Gathered] = {}
        taken: set[int] = set()
        for node in self.program.nodes:
            if node.op in ("comm.all_reduce", "comm.reduce_scatter") and (chain := self.reduction(node)):
                if not taken.intersection(map(id, chain)):
                    reduced[id(node)] = chain
                    taken.update(map(id, chain))
            elif node.op == "comm.all_gather" and (found := self.gather(node, taken)):
                gathered[id(node)] = found
                taken.update(map(id, found.products))
        for chain in reduced.values():
            self.gone.update(map(id, chain))
        for found in gathered.values():
            self.gone.update(map(id, (*found.views, *found.products)))
        by_product = {id(found.products[0]): found for found in gathered.values()}
        for node in self.program.nodes:
            if id(node) in reduced:
                self.reduce_in_pieces(node, reduced[id(node)])
            elif id(node) in gathered:
                self.gather_in_pieces(gathered[id(node)])
            elif id(node) in by_product:
                self.multiply_in_pieces(by_product[id(node)])
            elif id(node) not in self.gone:
                self.nodes.append(node)
        known = {i.name for i in self.program.inputs} | {o for n in self.nodes for o in n.outs if o}
        return replace(
            self.program, nodes=tuple(self.nodes), types={k: t for k, t in self.types.items() if k in known},
            shardings={k: s for k, s in self.program.shardings.items() if k in known},
            global_types={k: t for k, t in self.program.global_types.items() if k in known},
        )  # fmt: skip

    # -- what can be cut

    def cuts(self, *values: str) -> bool:
        """Whether the first dim of all these can be cut into the pieces."""
        shapes = [self.types[v].shape for v in values]
        return all(shape and shape[0] and shape[0] % self.pieces == 0 for shape in shapes)

    def reduction(self, node: Node) -> list[Node]:
        """The product and the views of it that a reduction is of, if nothing else reads them and they can be cut."""
        kind, dim = node.op, node.args[2]
        if kind == "comm.all_reduce" and dim != "sum" or kind == "comm.reduce_scatter" and (dim == 0 or node.args[3] != "sum"):
            return []
        chain: list[Node] = []
        value = node.refs()[0]
        while (maker := self.makers.get(value)) is not None and self.reads[value] == 1 and self.together(maker, node):
            if maker.op not in (*_VIEWS, _PRODUCT) or not self.cuts(value):
                return []
            chain.insert(0, maker)
            if maker.op == _PRODUCT:
                return chain if self.cuts(maker.refs()[0]) else []
            value = maker.refs()[0]
        return []

    def gather(self, node: Node, taken: set[int]) -> _Gathered | None:
        """The products whose left operand is what a gather makes, if they can be cut."""
        value, views = node.name, list[Node]()
        if node.args[2] == 0 or not self.cuts(value, node.refs()[0]):
            return None
        while True:
            readers = self.readers.get(value, [])
            products = [n for n in readers if n.op == _PRODUCT and n.refs()[0] == value and n.refs()[1] != value]
            products = [n for n in products if self.together(n, node) and self.cuts(n.name) and id(n) not in taken]
            if products:
                break
            view = next((n for n in readers if n.op in _VIEWS and self.together(n, node) and self.cuts(n.name)), None)
            if view is None:
                return None
            views.append(view)
            value = view.name
        begin = self.place[id(products[0])]
        products = [n for n in products if self.is_there(n.refs()[1], begin)]
        if not products or self.place[id(products[0])] != begin:
            return None
        chain = (node.name, *(v.name for v in views))
        inside = {id(n) for n in (*views, *products)}
        others = [n for v in chain for n in self.readers.get(v, []) if id(n) not in inside]
        outputs = {o.value for o in self.program.outputs}
        if any(self.place[id(n)] < begin for n in others):
            return None
        return _Gathered(node, views, products, bool(others) or not outputs.isdisjoint(chain))

    def is_there(self, value: str, place: int) -> bool:
        """Whether a value is made before a place, or is a view of an input, which can be."""
        maker = self.makers.get(value)
        if maker is None or self.place[id(maker)] < place:
            return True
        return maker.op in ("aten.t.default", *_VIEWS) and maker.refs()[0] not in self.makers

    @staticmethod
    def together(one: Node, other: Node) -> bool:
        return (one.phase, one.region) == (other.phase, other.region)

    def is_read(self, view: Node, found: _Gathered) -> bool:
        """Whether something else than the products, or the views to them, reads a view, or a view of it."""
        if view.name in {o.value for o in self.program.outputs}:
            return True
        inside = {id(n): n for n in (*found.views, *found.products)}
        return any(id(n) not in inside or n in found.views and self.is_read(n, found) for n in self.readers.get(view.name, []))

    # -- pieces

    def add(self, like: Node, op: str, args: tuple[Any, ...], stem: str, shape: tuple[int, ...]) -> str:
        name = fresh_name(f"{stem}{SUFFIX}", self.types)
        self.types[name] = TensorType(self.types[stem].dtype, shape)
        self.nodes.append(replace(like, op=op, args=args, outs=(name,), kwargs=()))
        return name

    def cut(self, value: str, piece: int, like: Node) -> str:
        shape = self.types[value].shape
        size = shape[0] // self.pieces
        args = (Ref(value), 0, piece * size, (piece + 1) * size)
        return self.add(like, "aten.slice.Tensor", args, value, (size, *shape[1:]))

    def again(self, node: Node, operand: str) -> str:
        """A node's piece: the same on a piece of its first operand."""
        shape = self.types[node.name].shape
        shape = (shape[0] // self.pieces, *shape[1:])
        args = (Ref(operand), *node.args[1:]) if node.op not in _VIEWS else (Ref(operand), shape)
        return self.add(node, node.op, args, node.name, shape)

    def join(self, names: list[str], node: Node) -> None:
        """The whole of pieces, under its own name."""
        self.nodes.append(replace(node, op="aten.cat.default", args=(tuple(map(Ref, names)), 0), kwargs=()))

    def reduce_in_pieces(self, node: Node, chain: list[Node]) -> None:
        names = []
        for piece in range(self.pieces):
            value = self.cut(chain[0].refs()[0], piece, chain[0])
            for one in (*chain, node):
                value = self.again(one, value)
            names.append(value)
        self.join(names, node)

    def gather_in_pieces(self, found: _Gathered) -> None:
        node = found.gather
        found.names = [self.again(node, self.cut(node.refs()[0], piece, node)) for piece in range(self.pieces)]

    def multiply_in_pieces(self, found: _Gathered) -> None:
        begin = self.place[id(found.products[0])]
        for product in found.products:
            maker = self.makers.get(product.refs()[1])
            if maker is not None and self.place[id(maker)] > begin and id(maker) not in self.gone:
                self.nodes.append(maker)  # a view of a parameter
                self.gone.add(id(maker))
        made: dict[str, list[str]] = {product.name: [] for product in found.products}
        for gathered in found.names:
            value = gathered
            for view in found.views:
                value = self.again(view, value)
            for product in found.products:
                made[product.name].append(self.again(product, value))
        for product in found.products:
            self.join(made[product.name], product)
        if found.whole:
            self.join(found.names, found.gather)
            self.nodes += [view for view in found.views if self.is_read(view, found)]
