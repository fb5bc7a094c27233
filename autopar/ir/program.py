"""Program: the captured step as a value. Nodes in execution order, every tensor named once, global shapes.

A pass takes a Program and returns a new one; nothing here is ever edited in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from autopar.layout.mesh import coordinate

Phase = Literal["forward", "backward"]
#: when a node runs relative to the loop over microbatches: once before it, in it, once after it.
Region = Literal["pre", "body", "post"]


@dataclass(frozen=True)
class Ref:
    """A use of a value by name, anywhere inside a node's arguments."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Offset:
    """A number that depends on the rank: ``base`` and the sum of ``coordinate * stride`` over axes (of ``microbatch`` for ``mb``)."""

    terms: tuple[tuple[str, int], ...]
    base: int = 0

    def at(self, coords: Mapping[str, int]) -> int:
        return self.base + sum(coordinate(coords, axis) * stride for axis, stride in self.terms)

    def __repr__(self) -> str:
        terms = [f"{axis}*{stride}" for axis, stride in self.terms]
        return " + ".join([*terms, str(self.base)] if self.base or not terms else terms)


@dataclass(frozen=True)
class TensorType:
    """dtype and global shape of a value."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Where:
    """Where a node comes from: the module path it ran in and the user's file, line and text of that line.

    ``order``: autograd's number of the forward operation that it is, or whose gradient it computes; -1 unknown. It orders the calls of
    modules, also of one that is called twice.
    ``again``: the number of the model's own recompute region (``torch.utils.checkpoint``) that it ran in; 0 none.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    order: int = field(default=-1, compare=False, repr=False)
    again: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "?"
        return f"{place} in {self.module or '(model)'}" + (f": {self.code}" if self.code else "")


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        op: ``aten.mm.default`` (a torch overload), ``autopar.pick`` (runtime.ops) or, in local programs, ``comm.all_reduce``.
        args: numbers, dtypes, strings, None, tuples of them, and Refs.
        kwargs: keyword arguments as sorted pairs.
        outs: the names of the values it defines, in order; an output that nobody reads is ``""``.
        phase: forward or backward.
        where: source.
        region: when it runs relative to the microbatch loop.
    """

    op: str
    args: tuple[Any, ...]
    outs: tuple[str, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    phase: Phase = "forward"
    where: Where = Where()
    region: Region = "body"

    @property
    def name(self) -> str:
        return next((o for o in self.outs if o), "_")

    def refs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in argument order, repeats kept: the operands of its row."""
        return self._refs

    @cached_property
    def _refs(self) -> tuple[str, ...]:
        found: list[str] = []
        _collect(self.args, found)
        for _, value in self.kwargs:
            _collect(value, found)
        return tuple(found)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def reading(self, names: Sequence[str]) -> Node:
        """The node with other operands: ``names`` in the order of ``refs``."""
        left = iter(names)

        def rename(_: str) -> Ref:
            return Ref(next(left))

        args = map_refs(self.args, rename)
        return replace(self, args=args, kwargs=tuple((k, map_refs(v, rename)) for k, v in self.kwargs))

    def with_args(self, *args: Any, **kwargs: Any) -> Node:
        return replace(self, args=tuple(args), kwargs=tuple(sorted(kwargs.items())))


def _collect(tree: Any, found: list[str]) -> None:
    if isinstance(tree, Ref):
        found.append(tree.name)
    elif isinstance(tree, (tuple, list)):
        for t in tree:
            if not isinstance(t, int):  # sizes: most of what there is
                _collect(t, found)


def signature(node: Node, types: Mapping[str, TensorType]) -> tuple[Any, ...]:
    """What a node is but for its names and its place: nodes of equal layers have equal ones.

    An operand is its type and the place of its first occurrence; 2, 2.0 and True, which are equal in Python, differ.
    """
    names: dict[str, int] = {}

    def show(tree: Any) -> Any:
        if isinstance(tree, tuple):
            return tuple([show(t) for t in tree])
        if isinstance(tree, Ref):
            return names.setdefault(tree.name, len(names)), types[tree.name]
        return type(tree), tree

    outs = tuple([types[o] if o else None for o in node.outs])
    return node.op, show(node.args), show(node.kwargs), outs, node.phase, node.region


def map_refs(tree: Any, fn: Callable[[str], Any]) -> Any:
    """The same tree of arguments with every Ref replaced by ``fn(name)`` (a Ref or anything else)."""
    if isinstance(tree, Ref):
        return fn(tree.name)
    if isinstance(tree, (tuple, list)):
        return tuple(map_refs(t, fn) for t in tree)
    return tree


def layer_of(path: str) -> str:
    """The repeated layer that a module or parameter belongs to: its path up to the first number; "" outside of layers."""
    match = re.match(r"(.*?(?:^|\.)\d+)(?:\.|$)", path)
    return match.group(1) if match else ""


def fresh_name(stem: str, taken: Container[str]) -> str:
    """``stem``, or the first of ``stem_1``, ``stem_2``, ... that isn't taken."""
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name


@dataclass(frozen=True)
class Input:
    """A value that exists before the first node.

    ``kind`` and ``path``:
        param: a parameter; path is its first name in ``named_parameters``; ``aliases`` are further names tied to it.
        buffer: a buffer by name, likewise.
        batch: a leaf of the batch; path is its place in the tree (``0``, ``input_ids``, ``aux.mask``).
        const: a tensor the model holds as a plain attribute or literal; its value is in ``Program.consts``.
        tangent: the gradient of the loss, 1.
        key: the random key of the step, int64[2].
        bucket: in local programs, this rank's part of a bucket of parameters.
        received: in programs of a stage, a value from another one; path is ``stage.task`` that makes it.
    """

    name: str
    kind: Literal["param", "buffer", "batch", "const", "tangent", "key", "bucket", "received"]
    path: str
    aliases: tuple[str, ...] = ()
    trainable: bool = False


@dataclass(frozen=True)
class Output:
    """A value that the step returns: the loss, the gradient of a parameter, the new value of a buffer, an output leaf of the model; in
    local programs also this rank's part of the gradients of a bucket, and what another stage needs (path: ``stage.task`` that reads it)."""

    value: str
    kind: Literal["loss", "grad", "buffer", "output", "bucket", "sent"]
    path: str


@dataclass(frozen=True)
class Program:
    """A step: inputs, nodes in order, outputs, and the type of every value.

    ``consts`` maps the path of const inputs to tensors; ``unreached`` names trainable parameters that the loss doesn't depend on
    (their gradient is None, as in torch); ``output_tree`` is an opaque pytree spec of the model's outputs; ``microbatches`` the
    number of turns of the loop that runs the nodes of region ``body``.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    types: Mapping[str, TensorType]
    consts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    output_tree: Any = None
    microbatches: int = 1

    def producers(self) -> dict[str, Node]:
        """Which node defines a value (inputs have none)."""
        return {out: node for node in self.nodes for out in node.outs if out}

    def users(self) -> dict[str, list[Node]]:
        """The nodes that read a value, in order."""
        users: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs()):
                users[name].append(node)
        return users

    def inputs_of(self, kind: str) -> Iterator[Input]:
        return (i for i in self.inputs if i.kind == kind)

    def outputs_of(self, kind: str) -> Iterator[Output]:
        return (o for o in self.outputs if o.kind == kind)


_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``f32``."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(name: str) -> torch.dtype:
    """The inverse of ``dtype_name``."""
    return _DTYPES[name]
