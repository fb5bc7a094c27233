"""Building programs: append operations, get typed values back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.program import Node, Program, Ref, TensorType, fresh_name, map_refs

Infer = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[TensorType | None, ...]]


class Builder:
    """Makes the nodes of a new program from those of an old one.

    ``infer`` gives the output types of an op from arguments in which TensorTypes stand for tensors.
    """

    def __init__(self, program: Program, infer: Infer) -> None:
        self.types: dict[str, TensorType] = {i.name: program.types[i.name] for i in program.inputs}
        self.nodes: list[Node] = []
        self.env: dict[str, str] = {i.name: i.name for i in program.inputs}
        self.producers: dict[str, Node] = {}
        self._taken = set(program.types)
        self._infer = infer
        self._at: Node | None = None

    def at(self, node: Node) -> None:
        """Further calls take phase, source and region from this node, and names from its outputs."""
        self._at = node

    def fresh(self, stem: str) -> str:
        """A name that no value has."""
        name = fresh_name(stem, self._taken)
        self._taken.add(name)
        return name

    def emit(self, node: Node, types: Mapping[str, TensorType]) -> None:
        """Appends a node as it is, with the given types of its outputs."""
        self.nodes.append(node)
        self.producers.update({o: node for o in node.outs if o})
        self.types.update({o: types[o] for o in node.outs if o})

    def call(self, op: str, *args: Any, out: str | None = None, types: tuple[TensorType, ...] | None = None, **kwargs: Any) -> Any:
        """Appends a call of an op with a single output (or the given types); the Ref of its output, or a tuple of Refs."""
        assert self._at is not None
        if types is None:
            found = self._infer(
                op, map_refs(args, self.types.__getitem__), {k: map_refs(v, self.types.__getitem__) for k, v in kwargs.items()}
            )
            assert all(t is not None for t in found)
            types = tuple(t for t in found if t is not None)
        stem = f"{self._at.name}_{op.split('.')[1].strip('_')}"
        outs = tuple(out if out is not None and k == 0 else self.fresh(stem) for k in range(len(types)))
        node = Node(op, args, outs, tuple(sorted(kwargs.items())), self._at.phase, self._at.where, self._at.region)
        self.emit(node, dict(zip(outs, types, strict=True)))
        refs = tuple(Ref(o) for o in outs)
        return refs[0] if len(refs) == 1 else refs

    def type(self, ref: Ref) -> TensorType:
        return self.types[ref.name]

    def resolve(self, tree: Any) -> Any:
        """Arguments of the old program with the names of the new one."""
        return map_refs(tree, lambda name: Ref(self.env.get(name, name)))


def is_float(dtype: torch.dtype) -> bool:
    """Whether a dtype can carry gradients."""
    return dtype.is_floating_point or dtype.is_complex
