"""Rows against the real nodes of captured programs: argument forms that samples may not think of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture.trace import capture
from autopar.ir.program import Node, Program, Ref
from autopar.passes.canonicalize import canonicalize
from autopar.rules import DEFAULT
from autopar.rules.check import bind_node, check_case, run
from autopar.runtime.random import step_key
from tests.models.test_models import OPTIONS, load


def values_of_inputs(program: Program) -> dict[str, Tensor]:
    """Random values for everything that exists before the first node; labels, tokens and masks are 0 and 1."""
    gen = torch.Generator().manual_seed(0)
    values = {}
    for i in program.inputs:
        t = program.types[i.name]
        if i.kind == "const":
            values[i.name] = program.consts[i.path]
        elif i.kind == "key":
            values[i.name] = step_key(1, 2)
        elif i.kind == "tangent":
            values[i.name] = torch.ones(t.shape, dtype=t.dtype)
        elif t.dtype.is_floating_point:
            values[i.name] = torch.randn(t.shape, dtype=t.dtype, generator=gen) * 0.3
        else:
            values[i.name] = torch.randint(0, 2, t.shape, generator=gen).to(t.dtype)
    return values


def in_double(tree: Any) -> Any:
    """The same tensors, or dtypes in arguments, with float64 in place of float32: rounding must not hide faults."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.dtype == torch.float32 else tree
    if isinstance(tree, tuple):
        return tuple(map(in_double, tree))
    return torch.float64 if tree is torch.float32 else tree


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_rows_hold_on_the_nodes_of_models(name: str, options: dict[str, Any]) -> None:
    module = load(name)
    torch.manual_seed(0)
    model = module.build(**options)
    program = canonicalize(capture(model, module.batch(4, torch.Generator().manual_seed(0), **options), loss=getattr(module, "loss", None)))
    values, seen, wrong = values_of_inputs(program), set(), []
    for node in program.nodes:
        outs = run(node, values)
        for out, value in zip(node.outs, outs, strict=True):
            if out:
                assert value is not None
                assert (value.dtype, tuple(value.shape)) == (program.types[out].dtype, program.types[out].shape), node
                values[out] = value
        key = (node.op, *((values[r].dtype, values[r].shape) for r in node.refs()), *(str(a) for a in node.args if not isinstance(a, Ref)))
        if key in seen:
            continue
        seen.add(key)
        lifted = Node(node.op, in_double(node.args), node.outs, tuple((k, in_double(v)) for k, v in node.kwargs))
        case = bind_node(DEFAULT[node.op], str(node), lifted, {r: in_double(values[r]) for r in node.refs()})
        wrong += check_case(case, first=True)[0]
    assert not wrong, "\n".join(map(str, wrong))
