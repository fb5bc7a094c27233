"""Computing in another precision: every floating-point type of a program becomes the wanted one, casts included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.errors import InputError, UnsupportedError
from autopar.ir.program import Program, TensorType

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
            return wanted if tree in _FLOATS else tree
        if isinstance(tree, tuple):
            return tuple(change(t) for t in tree)
        return tree

    types = {name: TensorType(change(t.dtype), t.shape) for name, t in program.types.items()}
    nodes = tuple(replace(n, args=change(n.args), kwargs=tuple((k, change(v)) for k, v in n.kwargs)) for n in program.nodes)
    consts = {k: v.to(change(v.dtype)) for k, v in program.consts.items()}
    return replace(program, types=types, nodes=nodes, consts=consts)
