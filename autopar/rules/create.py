"""Rows of ops that make tensors out of numbers: every dim may be cut, the rank makes its piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.errors import RuleError
from autopar.ir.program import Node, Offset
from autopar.rules.rule import Local, Rule, Types, letters


def _made(node: Node, types: Types) -> str:
    return "-> " + " ".join(letters(len(types[node.outs[0]].shape)))


def _made_from(node: Node, types: Types) -> str:
    """``new_*``: the operand only gives dtype and device, so however it is cut the output is the same."""
    source = [f"e{i}" for i in range(len(types[node.refs()[0]].shape))]
    target = letters(len(types[node.outs[0]].shape))
    return f"{' '.join(source)} -> {' '.join(target)} {' '.join('~' + e for e in source)}"


def _arange_local(node: Node, local: Local) -> Node:
    """A piece of a range is a range of its own; torch's op has no place for where it starts."""
    out = local.outputs[0]
    offset = local.start(out, 0)
    if not offset.terms:
        return node
    args, options = node.args, dict(node.kwargs)
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    dtype = options.get("dtype") or (torch.int64 if all(isinstance(a, int) for a in args) else torch.get_default_dtype())
    kept = {k: v for k, v in options.items() if k == "device" and v is not None}
    kwargs = tuple(sorted({**kept, "dtype": dtype}.items()))
    return replace(node, op="autopar.arange", args=(local.out_shape()[0], offset, start, step), kwargs=kwargs)


def atom_args(
    local: Local, sizes: tuple[int, ...], starts: tuple[int | Offset, ...], strides: tuple[int, ...], k: int = 0
) -> tuple[tuple[int, ...], tuple[int | Offset, ...], tuple[int, ...]]:
    """Sizes, starts and strides of a random op's atoms on a piece.

    The output may have finer atoms than the op was given; the finer ones take over. Atoms of size 1 aren't part of a sharding
    (but may have a start: a microbatch of one row), so they stay as they are.
    """
    sharding = local.outputs[k]
    assert sharding is not None
    pieces = list(zip(sharding.atoms, sharding.local_atoms(local.mesh), local.atom_starts(sharding), strict=True))
    out: list[tuple[int, int | Offset, int]] = []
    for size, start, stride in zip(sizes, starts, strides, strict=True):
        own, product = [], 1
        while product < size and pieces:
            own.append(pieces.pop(0))
            product *= own[-1][0]
        if product != size:
            raise RuleError(
                f"a random op lists atoms {sizes} and its output has {sharding.atoms}", hint="one entry for every atom, major first"
            )
        if not own:
            out.append((size, start, stride))
        for at, (whole, piece, begin) in enumerate(own):
            size //= whole
            # where the atom already starts is counted in its own stride, so the last of the finer atoms keeps it
            out.append((piece, _added(start, begin) if at == len(own) - 1 else begin if begin.terms else 0, stride * size))
    if pieces:
        raise RuleError(
            f"a random op lists atoms {sizes} and its output has {sharding.atoms}", hint="one entry for every atom, major first"
        )
    return tuple(s for s, _, _ in out), tuple(o for _, o, _ in out), tuple(t for _, _, t in out)


def _added(start: int | Offset, more: Offset) -> int | Offset:
    if not more.terms:
        return start
    if isinstance(start, Offset):
        return Offset((*start.terms, *more.terms))
    if start:
        raise RuleError(f"a random op's atom starts at {start} and is cut again", hint="a start is 0 or an Offset")
    return more


def _atoms_row(shape: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The term of a shape whose dims are merges of the given atoms."""
    left, count = list(sizes), 0
    dims: list[str] = []
    for size in shape:
        own, product = [], 1
        while product < size or (left and left[0] == 1 and len(left) > len(shape) - len(dims) - 1 and product == size):
            if not left:
                raise RuleError(f"a random op lists atoms {sizes}, which don't make the shape {shape}")
            atom = left.pop(0)
            if atom != 1:
                own.append(f"d{count}={atom}")
                count += 1
            product *= atom
        dims.append("1" if not own else own[0] if len(own) == 1 else f"({' '.join(own)})")
    return " ".join(dims)


def _random(sizes_at: int) -> tuple[Callable[[Node, Types], str], Callable[[Node, Local], Node]]:
    """Row and localisation of an op whose atoms are its arguments from ``sizes_at`` on."""

    def row(node: Node, types: Types) -> str:
        term = _atoms_row(types[node.outs[0]].shape, node.args[sizes_at])
        operands = ["key", *([term] if len(node.refs()) == 2 else [])]
        return f"{', '.join(operands)} -> {term} ; key: whole"

    def localize(node: Node, local: Local) -> Node:
        args = list(node.args)
        args[sizes_at : sizes_at + 3] = atom_args(local, *args[sizes_at : sizes_at + 3])
        return replace(node, args=tuple(args))

    return row, localize


def _random_rule(op: str, sizes_at: int, *samples: str, shape_arg: int | None = None) -> Rule:
    row, localize = _random(sizes_at)
    return Rule(f"autopar.{op}", row, shape_arg=shape_arg, local=localize, samples=samples)


_ATOMS = "(4, 2, 3), (0, 0, 0), (6, 3, 1)"
_ATOMS2 = "(4, 3, 2), (0, 0, 0), (6, 1, 3)"

RULES = (
    Rule("aten.arange.default", "-> n ; n: offset", local=_arange_local, samples=("12, dtype=i64",)),
    Rule("aten.arange.start", "-> n ; n: offset", local=_arange_local, samples=("2, 14", "0, 6, dtype=f64")),
    Rule("aten.arange.start_step", "-> n ; n: offset", local=_arange_local, samples=("0, 12, 2", "1.0, 4.0, 0.5, dtype=f64")),
    *(Rule(f"aten.{op}.default", _made, shape_arg=0, samples=(f"(4, 6){rest}", f"(){rest}"))
      for op, rest in (("full", ", 2.5"), ("zeros", ""), ("ones", ""))),
    Rule("aten.eye.default", "-> n m ; n: whole, m: whole", samples=("4",)),
    Rule("aten.eye.m", "-> n m ; n: whole, m: whole", samples=("4, 6",)),
    Rule("aten.linspace.default", "-> n ; n: whole", samples=("0.0, 1.0, 6",)),
    Rule("aten.scalar_tensor.default", "->", samples=("1.5",)),
    *(Rule(f"aten.{op}.default", _made_from, linear, shape_arg=1, samples=(f"f[4, 6], (6, 2){rest}", f"f[], (4, 6){rest}"))
      for op, linear, rest in (("new_full", "", ", 2.5"), ("new_zeros", "0", ""), ("new_ones", "", ""))),
    Rule("aten.zeros_like.default", "* -> *", "moves", samples=("f[4, 6]",)),
    Rule("aten.empty_like.default", "* -> *", "moves", samples=("f[4, 6]",)),
    Rule("aten.empty.memory_format", _made, shape_arg=0, samples=("(4, 6)",)),
    Rule("aten.new_empty.default", _made_from, "0", shape_arg=1, samples=("f[4, 6], (6, 2)",)),
    Rule("aten.ones_like.default", "* -> *", samples=("f[4, 6]",)),
    Rule("aten.full_like.default", "* -> *", samples=("f[4, 6], 2.5",)),
    _random_rule("keep", 4, f"key, 7, 0.3, (4, 6), {_ATOMS}", f"key, 7, 0.3, (4, 6), {_ATOMS2}", shape_arg=3),
    _random_rule("uniform", 3, f"key, 7, (4, 6), {_ATOMS}, f64", shape_arg=2),
    _random_rule("normal", 3, f"key, 7, (4, 6), {_ATOMS}, f64", shape_arg=2),
    _random_rule("randint", 5, f"key, 7, 2, 9, (4, 6), {_ATOMS}, i64", shape_arg=4),
    _random_rule("bernoulli", 3, f"key, 7, unit[4, 6], {_ATOMS}"),
)  # fmt: skip
