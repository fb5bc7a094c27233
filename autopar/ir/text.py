"""The text of a program: one node a line, types and sources beside it."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.program import Node, Program, Ref, dtype_name


def show_arg(value: Any) -> str:
    """An argument as it prints: refs as %name, dtypes short, the rest as Python."""
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(show_arg, value)) + "]"
    return repr(value)


def show_node(program: Program, node: Node) -> str:
    """``%y: f32[4, 8] = aten.mm(%x, %w)``."""
    outs = ", ".join(f"%{o}: {program.types[o]}" if o else "_" for o in node.outs)
    args = [show_arg(a) for a in node.args] + [f"{k}={show_arg(v)}" for k, v in node.kwargs]
    return f"{outs} = {node.op.removesuffix('.default')}({', '.join(args)})"


def show_program(program: Program, sources: bool = True) -> str:
    """The whole program as text; ``sources`` adds a line wherever module or source line change."""
    lines = [f"input %{i.name}: {program.types[i.name]}  # {i.kind} {i.path}" for i in program.inputs]
    last = None
    for node in program.nodes:
        here = (node.phase, node.region, node.where)
        if sources and here != last:
            region = "" if node.region == "body" else f" ({node.region})"
            lines.append(f"# {node.phase}{region} {node.where}")
            last = here
        lines.append("  " + show_node(program, node))
    lines += [f"output %{o.value}  # {o.kind} {o.path}" for o in program.outputs]
    return "\n".join(lines)
