"""Faults planted in the sources of autopar: every small change of a function that operators over its syntax tree can make.

A fault is one change in one function. It is planted in a running process by exchanging the function's code, so that every module that
imported the function has it. Guards (a condition that does nothing but raise, an assertion) are left alone: they refuse what can't be
kept and have tests of their own.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any

#: what is mutated: module to functions, ``*`` for every function and method.
TARGETS: dict[str, tuple[str, ...]] = {
    "autopar.layout.mesh": ("Mesh.count", "Mesh.coords", "Mesh.rank", "Mesh.index", "Mesh.group"),
    "autopar.layout.sharding": (
        "Sharding.on", "_changed", "Sharding.axes_of", "Sharding.partial_axes", "_local_atoms", "_local_dims", "_local_shape",
        "Sharding.starts",
    ),
    "autopar.layout.reshard": ("step_kind", "_steps", "_search"),
    "autopar.layout.bucket": ("*",),
    "autopar.rules.atoms": ("_split", "_align", "analyse", "_join_simple", "_join_merged", "factor_positions"),
    "autopar.rules.row": ("Row.opaque", "bind"),
    "autopar.rules.rule": (
        "Local.out_shape", "Local.scale", "Local.start", "Local.atom_starts", "Rule.bind", "Rule.localize", "view_row", "refine",
    ),
    "autopar.rules.strategies": ("*",),
    "autopar.plan.layout": ("replicated", "apply", "_Roles.input_choices"),
    "autopar.plan.axis": ("solve",),
    "autopar.passes.canonicalize": (
        "canonicalize", "prune", "_addmm", "_split", "_mean", "_log_softmax", "_log_softmax_backward", "_labels", "_nll",
        "_nll_backward", "_place", "_keep", "_native_dropout", "_mse", "_mse_backward",
    ),
    "autopar.passes.insert_collectives": ("*",),
    "autopar.passes.buckets": ("make_buckets", "bucketize"),
    "autopar.passes.microbatch": ("*",),
    "autopar.codegen.emit": (
        "Emitter.run", "Emitter.constant_nodes", "Emitter.region", "Emitter.find_born", "Emitter.start", "Emitter.pack",
        "Emitter.view", "Emitter.accumulate",
        "Emitter.segment", "Emitter.constants", "Emitter.driver", "Emitter.body",
    ),
    "autopar.codegen.memory": ("overwritten",),
    "autopar.codegen.render": ("literal", "offset", "call"),
    "autopar.runtime.executor": (
        "cut", "paste", "make_state", "own", "State.changed", "State.begin_gather", "Executable.start", "gather", "gather_fixed",
    ),
    "autopar.runtime.update": ("*",),
    "autopar.runtime.ops": ("*",),
    "autopar.runtime.comm": ("Comm._cut", "Comm._reduce", "Comm._gather", "Comm.group", "Comm._run"),
    "autopar.runtime.sim": ("SimComm._begin", "SimComm._combine"),
    "autopar.runtime.optimizer": ("clip",),
    "autopar.programs": ("cut_rows",),
}  # fmt: skip

#: words that say what kind a thing is, and the kind that a fault makes of it.
WORDS = {
    "partial": "replicate", "replicate": "shard", "shard": "replicate", "sum": "max", "max": "min", "all_gather": "all_to_all",
    "all_reduce": "all_gather", "reduce_scatter": "all_reduce", "all_to_all": "all_gather", "slice": "all_gather", "pre": "body",
    "body": "post", "post": "body", "grad": "buffer", "param": "buffer", "buffer": "param", "batch": "param", "const": "buffer",
    "whole": "plain", "plain": "whole", "offset": "plain", "comm.all_gather": "comm.all_reduce", "comm.reduce_scatter": "comm.all_reduce",
    "comm.all_reduce": "comm.all_gather", "forward": "backward", "dp": "tp", "tp": "dp", "mb": "dp", "moves": "all", "output": "loss",
}  # fmt: skip

_COMPARE: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BOUNDARY: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ARITHMETIC: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list", "sorted": "list"}
_DROPPED_METHODS = ("contiguous", "clone")


@dataclass(frozen=True)
class Fault:
    """One change of one function: the place in its tree, what stands there instead, and words for it that don't change with lines."""

    module: str
    function: str
    operator: str
    what: str
    number: int
    made: ast.AST | None

    def __str__(self) -> str:
        return f"{self.module.removeprefix('autopar.')} {self.function}: {self.what}"

    def plant(self) -> None:
        """Exchanges the function's code in this process. Raises SyntaxError where the change makes no code of the same kind."""
        live = find(self.module, self.function)
        code = _compiled(self.module, self.function, self.number, self.made)
        if code.co_freevars != live.__code__.co_freevars:
            raise SyntaxError(f"{self}: other free variables")
        live.__code__ = code


@cache
def source_of(module: str) -> str:
    """A module's source, read once: the files may change under a long run."""
    return inspect.getsource(importlib.import_module(module))


def find(module: str, name: str) -> FunctionType:
    """The plain function behind a name like ``Class.method``, unwrapped from what decorates it."""
    at: Any = importlib.import_module(module)
    for part in name.split("."):
        at = inspect.getattr_static(at, part)
    if isinstance(at, (staticmethod, classmethod)):
        at = at.__func__
    if isinstance(at, property):
        at = at.fget
    if isinstance(at, cached_property):
        at = at.func
    at = inspect.unwrap(at)
    assert isinstance(at, FunctionType), f"{module}.{name} is {at}"
    return at


def functions(tree: ast.Module, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The wanted functions and methods of a module, in order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ("*" in names or node.name in names):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    name = f"{node.name}.{inner.name}"
                    if name in names or ("*" in names and inner.name not in ("__init__", "__str__", "fresh")):
                        yield name, inner


def faults() -> Iterator[Fault]:
    """Every fault of every target, in the order of the sources."""
    for module, names in TARGETS.items():
        tree = ast.parse(source_of(module))
        for name, function in functions(tree, names):
            seen = Counter[str]()
            for number, (_, _, _, node) in enumerate(_places(function)):
                for operator, made in _changes(node):
                    what = f"{_short(node)} → {_short(made) if made is not None else 'dropped'}"
                    seen[what] += 1
                    if seen[what] > 1:
                        what += f" (number {seen[what]})"
                    yield Fault(module, name, operator, what, number, made)


def sample(count: int, seed: int) -> list[Fault]:
    """So many faults, the same for the same sources: functions in turn, and in each function operators in turn."""
    rng = random.Random(seed)
    table: dict[tuple[str, str], dict[str, list[Fault]]] = {}
    for fault in faults():
        table.setdefault((fault.module, fault.function), {}).setdefault(fault.operator, []).append(fault)
    queues = []
    for by_operator in table.values():
        lists = [rng.sample(found, len(found)) for found in by_operator.values()]
        rng.shuffle(lists)
        queues.append([fault for turn in itertools.zip_longest(*lists) for fault in turn if fault is not None])
    rng.shuffle(queues)
    return [fault for turn in itertools.zip_longest(*queues) for fault in turn if fault is not None][:count]


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else text[:60] + " … " + text[-8:]


def _compiled(module: str, name: str, number: int, made: ast.AST | None) -> CodeType:
    """The code of a function with the node at a place exchanged."""
    changed = ast.parse(source_of(module))
    function = dict(functions(changed, (name,)))[name]
    parent, field, index, _ = list(_places(function))[number]
    new = copy.deepcopy(made)
    if index is None:
        setattr(parent, field, new)
    elif new is None:
        getattr(parent, field)[index] = ast.Pass()
    else:
        getattr(parent, field)[index] = new
    ast.fix_missing_locations(changed)
    try:
        code = _code_of(compile(changed, f"<{module} with a fault>", "exec"), name)
    except ValueError as error:
        raise SyntaxError(str(error)) from None
    assert code is not None
    return code


def _code_of(code: CodeType, name: str) -> CodeType | None:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_qualname == name:
                return const
            if name.startswith(const.co_qualname + ".") and (found := _code_of(const, name)) is not None:
                return found
    return None


_Place = tuple[ast.AST, str, int | None, ast.AST]


def _places(function: ast.FunctionDef) -> Iterator[_Place]:
    """Every node of a function's body with its place, outermost first."""
    body = function.body
    for i, statement in enumerate(body):
        if i == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        yield from _inside(function, "body", i, statement)


def _inside(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> Iterator[_Place]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    if isinstance(node, ast.If) and all(isinstance(s, ast.Raise) for s in node.body) and not node.orelse:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # a guard as well
        return
    yield parent, field, index, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx", "args") and not isinstance(node, ast.Call):
            continue
        if isinstance(value, ast.AST):
            yield from _inside(node, name, None, value)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from _inside(node, name, i, item)


def _textual(node: ast.AST) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp))


def _with(node: ast.AST, **fields: Any) -> Any:
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _sliced(iterable: ast.expr, text: str) -> ast.expr:
    made = ast.parse(f"list(x)[{text}]", mode="eval").body
    assert isinstance(made, ast.Subscript) and isinstance(made.value, ast.Call)
    made.value.args = [copy.deepcopy(iterable)]
    return made


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """(operator, node in its place) of all changes of one node; None drops a statement."""
    for change in _OPERATORS:
        yield from ((change.__name__.strip("_").replace("_", " "), made) for made in change(node))


def _negate_comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _with(node, ops=[_COMPARE[type(node.ops[0])]()])


def _move_boundary(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BOUNDARY:
        yield _with(node, ops=[_BOUNDARY[type(node.ops[0])]()])


def _swap_arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
        if not any(_textual(s) for s in sides):
            yield _with(node, op=_ARITHMETIC[type(node.op)]())


def _swap_and_or(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _drop_condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        for skipped in range(len(node.values)):
            left = [v for i, v in enumerate(node.values) if i != skipped]
            yield copy.deepcopy(left[0]) if len(left) == 1 else _with(node, values=left)
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _with(node, ifs=node.ifs[1:])


def _negate_condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Compare):
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if negated else ast.UnaryOp(ast.Not(), node.test)
        yield _with(node, test=copy.deepcopy(test))


def _change_constant(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield ast.Constant(node.value + 1)
            if node.value > 0:
                yield ast.Constant(node.value - 1)


def _change_kind(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
        yield ast.Constant(WORDS[node.value])
    if isinstance(node, ast.Name) and node.id in ("REPLICATE", "PARTIAL_SUM"):
        yield ast.Name("PARTIAL_SUM" if node.id == "REPLICATE" else "REPLICATE", ast.Load())


def _swap_arguments(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "isinstance", "getattr"):
            return
        for i in range(len(node.args) - 1):
            a, b = node.args[i], node.args[i + 1]
            if type(a) is type(b) and ast.dump(a) != ast.dump(b):  # of other types it would only be a crash
                yield _with(node, args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def _replace_call(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield _with(node, func=ast.Name(_CALLS[node.func.id], ast.Load()), keywords=[] if node.func.id == "sorted" else node.keywords)


def _drop_method(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED_METHODS:
        yield copy.deepcopy(node.func.value)


def _skip_an_element(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.For, ast.comprehension)):
        yield _with(node, iter=_sliced(node.iter, "1:"))
        if isinstance(node, ast.For):
            yield _with(node, iter=_sliced(node.iter, ":-1"))


def _swap_branches(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)


def _open_a_slice(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        if node.upper is not None:
            yield _with(node, upper=None)
        if node.lower is not None:
            yield _with(node, lower=None)


def _drop_statement(node: ast.AST) -> Iterator[None]:
    stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Subscript, ast.Attribute))
    plain_if = isinstance(node, ast.If) and not node.orelse
    if stored or plain_if or isinstance(node, (ast.Expr, ast.AugAssign, ast.For, ast.Continue, ast.Break)):
        yield None


_OPERATORS: tuple[Callable[[ast.AST], Iterator[ast.AST | None]], ...] = (
    _negate_comparison, _move_boundary, _swap_arithmetic, _swap_and_or, _drop_condition, _negate_condition, _change_constant, _change_kind,
    _swap_arguments, _replace_call, _drop_method, _skip_an_element, _swap_branches, _open_a_slice, _drop_statement,
)  # fmt: skip
