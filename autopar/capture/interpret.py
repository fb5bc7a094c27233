"""A Program run as it is, one node after the other, on real tensors of one process: the reference for everything done to it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import resolve
from autopar.ir.program import Node, Program, map_refs

Ops = Mapping[str, Callable[..., Any]]


def run(
    program: Program, values: Mapping[str, Tensor], ops: Ops | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """The values of a program's outputs.

    Args:
        values: tensors by input name; consts are filled in, and a tangent that isn't given is 1.
        ops: functions by op name that are used instead of torch's.
        device: where ops that make tensors put them; by default where the first value is.

    Returns a dict by ``kind path`` of the outputs: ``loss``, ``grad blocks.0.weight``, ``buffer count``, ``output logits``.
    """
    where = torch.device(device) if device is not None else next(iter(values.values())).device
    env: dict[str, Tensor] = dict(values)
    for made in program.inputs:
        if made.name in env:
            continue
        if made.kind == "const":
            env[made.name] = program.consts[made.path].to(where)
        elif made.kind == "tangent":
            env[made.name] = torch.ones(program.types[made.name].shape, dtype=program.types[made.name].dtype, device=where)
    last = {name: i for i, node in enumerate(program.nodes) for name in node.refs()}
    kept = {o.value for o in program.outputs}
    table = {**_OPS, **(ops or {})}
    with torch.no_grad(), where:
        for i, node in enumerate(program.nodes):
            results = _call(node, env, table)
            env.update((name, result) for name, result in zip(node.outs, results, strict=True) if name)
            for name in set(node.refs()):
                if last[name] == i and name not in kept:
                    env.pop(name, None)
    return {key(o.kind, o.path): env[o.value] for o in program.outputs}


def key(kind: str, path: str) -> str:
    """The name of an output in the result of ``run``."""
    return kind if kind == "loss" else f"{kind} {path}".strip()


def _call(node: Node, env: Mapping[str, Tensor], table: Ops) -> tuple[Any, ...]:
    function = table.get(node.op) or resolve(node.op)
    args = map_refs(node.args, env.__getitem__)
    kwargs = {k: map_refs(v, env.__getitem__) for k, v in node.kwargs}
    result = function(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


# A program has no strides, so a reinterpretation of memory is a reshape and a copy is contiguous.
_OPS: Ops = {
    "aten.view.default": torch.reshape,
    "aten._unsafe_view.default": torch.reshape,
    "aten.clone.default": lambda x: x.clone(memory_format=torch.contiguous_format),
}
