"""One node as one Python call, and calls as lines that a formatter leaves alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.program import Node, Offset, Ref
from autopar.layout.mesh import axis_of

WIDTH = 140


@dataclass(frozen=True)
class Site:
    """The number of a random call: it differs from layer to layer, so a segment takes it as a parameter."""

    value: int


def literal(value: Any, name: Callable[[str], str], lift: Callable[[Any], str] | None = None) -> str:
    """An argument as Python. ``lift`` turns numbers that depend on the rank into expressions."""
    if isinstance(value, Ref):
        return name(value.name)
    if isinstance(value, (Offset, Site)) and lift is not None and value != Offset(()):
        return lift(value)
    if isinstance(value, Offset):
        return offset(value)
    if isinstance(value, Site):
        return str(value.value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, tuple):
        parts = [literal(v, name, lift) for v in value]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float):
        return repr(value).replace("e+", "e")  # as the formatter writes exponents
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)


def offset(value: Offset) -> str:
    """A number that depends on the rank, as an expression of its coordinates ``c`` and the microbatch ``mb``."""
    parts = []
    for axis, stride in value.terms:
        coordinate = "mb" if axis == "mb" else _coordinate(axis)
        parts.append(coordinate if stride == 1 else f"{coordinate} * {stride}")
    return " + ".join([*parts, str(value.base)] if value.base or not parts else parts)


def _coordinate(name: str) -> str:
    axis = axis_of(name)
    part = name[len(axis) :].replace("%", " % ").replace("/", " // ")
    return f'(c["{axis}"]{part})' if part else f'c["{axis}"]'


#: ops that print as methods of their first tensor: op -> (method, most arguments).
_METHODS = {
    "aten.view.default": ("reshape", 2),
    "aten._unsafe_view.default": ("reshape", 2),
    "aten.reshape.default": ("reshape", 2),
    "aten.t.default": ("t", 1),
    "aten.transpose.int": ("transpose", 3),
    "aten.permute.default": ("permute", 2),
    "aten.expand.default": ("expand", 2),
    "aten.unsqueeze.default": ("unsqueeze", 2),
    "aten.exp.default": ("exp", 1),
    "aten.log.default": ("log", 1),
}
_OPERATORS = {"aten.add.Tensor": "+", "aten.sub.Tensor": "-", "aten.mul.Tensor": "*", "aten.div.Tensor": "/"}
_OPERATOR = re.compile(r" ([-+*/]) ")
_FUNCTIONS = {"aten.mm.default": "torch.mm", "aten.bmm.default": "torch.bmm"}


def call(
    node: Node,
    name: Callable[[str], str],
    lift: Callable[[Any], str],
    extra: dict[str, str] | None = None,
    over: int | None = None,
) -> tuple[str, list[str] | None]:
    """(function, arguments) of a node's call; one that prints as an operator has the expression as function and None for arguments.

    ``over``: the position of the operand that the result is written over.
    """
    args = [literal(a, name, lift) for a in node.args]
    if over is not None and node.op.startswith("autopar."):
        args.append(f"out={args[over]}")
    elif over is not None:
        written = args.pop(over)
        return f"{written}.{node.op.split('.')[1]}_", args
    kwargs = [f"{k}={literal(v, name, lift)}" for k, v in node.kwargs] + [f"{k}={v}" for k, v in (extra or {}).items()]
    if not kwargs:
        if node.op in _METHODS and len(args) <= _METHODS[node.op][1]:
            return f"{args[0]}.{_METHODS[node.op][0]}", args[1:]
        if node.op in _OPERATORS and len(args) == 2:
            return f"{args[0]} {_OPERATORS[node.op]} {args[1]}", None
        if node.op in _FUNCTIONS:
            return _FUNCTIONS[node.op], args
    space, _, rest = node.op.partition(".")
    function = f"ops.{rest}" if space == "autopar" else f"aten.{rest}" if space == "aten" else f"torch.ops.{node.op}"
    return function, [*args, *kwargs]


def assign(target: str, function: str, args: list[str] | None, indent: int, comment: str = "") -> list[str]:
    """``target = function(args)`` in lines of at most ``WIDTH``, as the formatter would break them."""
    pad = " " * indent
    head = f"{pad}{target} = " if target else pad
    lines = [f"{head}{function}" if args is None else f"{head}{function}({', '.join(args)})"]
    tail = f"  # {comment}" if comment else ""
    if len(lines[0]) + len(tail) <= WIDTH:
        return [lines[0] + tail]
    before = [f"{pad}# {comment}"] if comment else []
    if len(lines[0]) <= WIDTH:
        return [*before, lines[0]]
    if args and len(f"{head}{function}(") <= WIDTH:
        return [*before, *_call(head, function, args, indent)]
    if len(f"{head}(") > WIDTH and ", " in target:
        first = bracket("(", target.split(", "), indent)
        if len(f"{first[-1]} = {function}(") > WIDTH:
            first = [f"{pad}(", *(f"{pad}    {name}," for name in target.split(", ")), f"{pad})"]
        return [*before, *first[:-1], *_call(f"{first[-1]} = ", function, args or [], indent)]
    inner = _call(f"{pad}    ", function, args, indent + 4) if args else [f"{pad}    {function}" + ("" if args is None else "()")]
    if args is None and len(inner[0]) > WIDTH:  # an operator begins the line of its right operand
        left, sign, right = function.partition(f" {_OPERATOR.search(function)[1]} ")  # type: ignore[index]
        inner = [f"{pad}    {left}", f"{pad}    {sign.strip()} {right}"]
    return [*before, f"{head}(", *inner, f"{pad})"]


def _call(head: str, function: str, args: list[str], indent: int) -> list[str]:
    """A call after ``head``: on one line, with its arguments on a line of their own, or with a line for each."""
    pad = " " * indent
    line = f"{head}{function}({', '.join(args)})"
    if len(line) <= WIDTH or not args:
        return [line]
    inner = f"{pad}    {', '.join(args)}"
    if len(inner) <= WIDTH:
        return [f"{head}{function}(", inner, f"{pad})"]
    return [f"{head}{function}(", *(part for a in args for part in _item(a, indent + 4)), f"{pad})"]


def _item(text: str, indent: int) -> list[str]:
    """One argument with its comma; a tuple that is too long for a line is broken."""
    pad = " " * indent
    if len(pad) + len(text) + 1 <= WIDTH or not text.startswith("("):
        return [f"{pad}{text},"]
    return [f"{pad}(", *(part for item in _items(text[1:-1]) for part in _item(item, indent + 4)), f"{pad}),"]


def _items(text: str) -> list[str]:
    """What commas outside of brackets separate."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [item.strip() for item in found if item.strip()]


def define(name: str, params: list[str]) -> list[str]:
    """The ``def`` line of a function, broken as the formatter would."""
    line = f"def {name}({', '.join(params)}):"
    if len(line) <= WIDTH:
        return [line]
    inner = f"    {', '.join(params)}"
    if len(inner) <= WIDTH:
        return [f"def {name}(", inner, "):"]
    return [f"def {name}(", *(f"    {p}," for p in params), "):"]


def bracket(head: str, items: list[str], indent: int, close: str = ")") -> list[str]:
    """``head(items)`` for returns and tuple targets: ``head`` ends with the opening bracket."""
    pad = " " * indent
    line = f"{pad}{head}{', '.join(items)}{',' if len(items) == 1 and close == ')' else ''}{close}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{pad}{head}", *(part for i in items for part in _item(i, indent + 4)), f"{pad}{close}"]
