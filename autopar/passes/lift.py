"""Computing in another precision: every floating-point type of a program becomes the wanted one, casts included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar._torch import resolve, takes_dtype
from autopar.errors import InputError, UnsupportedError
from autopar.ir.program import Node, Program, Ref, TensorType, fresh_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = {"fp32": torch.float32, "fp64": torch.float64}


def lift(program: Program, precision: str | None) -> Program:
    """The program with all floating-point computation in ``fp32`` or ``fp64``; None leaves the model's own types.

    A check in float64 needs it where a model computes its loss or its norms in float32 by itself.
    """
    if precision is None:
        return program
    if precision in ("bf16", "fp16"):
        raise UnsupportedError(f"precision={precision!r} is not supported yet", hint="precision=None computes in the model's own types")
    if precision not in _NAMES:
        raise InputError(f"precision={precision!r} is not known", hint='"fp32", "fp64" or None')
    wanted = _NAMES[precision]

    def change(tree: Any) -> Any:
        if isinstance(tree, torch.dtype):
            return wanted if tree in _FLOATS else wanted.to_complex() if tree.is_complex else tree
        if isinstance(tree, tuple):
            return tuple(change(t) for t in tree)
        return tree

    definitions = {"aten._grouped_mm.default": "autopar.grouped_mm"} if wanted == torch.float64 else {}
    types = {name: TensorType(change(t.dtype), t.shape) for name, t in program.types.items()}
    nodes: list[Node] = []
    floated: dict[str, str] = {}
    for old in program.nodes:
        node = replace(old, op=definitions.get(old.op, old.op), args=change(old.args), kwargs=tuple((k, change(v)) for k, v in old.kwargs))
        if not old.refs() and _untold(old, program) and takes_dtype(resolve(old.op)):
            node = replace(node, kwargs=tuple(sorted((*((k, v) for k, v in node.kwargs if k != "dtype"), ("dtype", wanted)))))
        elif old.refs() and _untold(old, program):  # a quotient of integers, say: torch's own choice is float32
            for name in dict.fromkeys(node.refs()):
                if name not in floated:
                    floated[name] = fresh_name(f"{name}_float", types)
                    types[floated[name]] = TensorType(wanted, types[name].shape)
                    cast = Node("aten._to_copy.default", (Ref(name),), (floated[name],), (("dtype", wanted),), node.phase, node.where)
                    nodes.append(cast)
            node = node.reading([floated[name] for name in node.refs()])
        nodes.append(node)
    consts = {k: v.to(change(v.dtype)) for k, v in program.consts.items()}
    return replace(program, types=types, nodes=tuple(nodes), consts=consts)


def _untold(node: Node, program: Program) -> bool:
    """Whether a node makes floating-point numbers of none, and isn't told of which type: torch then takes its default."""
    operands = [program.types[name].dtype for name in node.refs()]
    results = [program.types[out].dtype for out in node.outs if out]
    told = any(isinstance(v, torch.dtype) for v in (*node.args, *(v for _, v in node.kwargs)))
    if told or not node.op.startswith("aten.") or "where" in node.op or any(t.is_floating_point or t.is_complex for t in operands):
        return False
    return any(t in _FLOATS for t in results)
