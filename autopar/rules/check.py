"""The brute-force check of a row: run the op whole and on pieces, and see whether the row tells the truth.

**Wrong**: something that the row allows gives another result. **Timid**: something that the row forbids would be right: a ``whole``
factor that can be cut, an operand that may be partial and isn't said to be. Both are faults: the first breaks programs, the second
makes them slow.

Samples are argument lists in a small language of Python expressions::

    f[4, 6]      float64, standard normal         pos[4, 6]   float64 in [0.5, 2)        unit[4, 6]  float64 in [0.05, 0.95)
    i9[4, 6]     int64 in [0, 9)                  u6[4]       distinct int64 in [0, 6)   b[4]        bool
    f[]          0-dim                            [f[4], f[4]]  a list of tensors        key         the random key of a step
    wide[4, 6]   float64, 5 times as wide         single[4]    float32                   ends6[3]    int32, ends of 3 groups of 6 rows
    c[4, 6]      complex128                       spd[4, 4]    symmetric and positive    ramp[4, 6]  int32, 1 to 6 in every row
    f64, bool    dtypes
    1, 0.5, None, (2, 3), 'text', name=value, as in Python
"""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar._torch import resolve
from autopar.errors import AutoparError, RuleError
from autopar.ir.program import Node, Offset, Ref, TensorType, parse_dtype
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import PARTIAL_SUM, REPLICATE, Sharding
from autopar.rules.row import Row
from autopar.rules.rule import Local, Rule
from autopar.rules.strategies import Strategy, strategies
from autopar.runtime import ops
from autopar.runtime.random import step_key

Dims = tuple[tuple[int, ...], ...]

#: pairs of strategies on two axes that are tried for each sample; all of them would take minutes and find the same faults.
PAIRS = 6


@dataclass(frozen=True)
class Finding:
    """One fault: the op's sample, what was claimed, and what came of it."""

    op: str
    sample: str
    claim: str
    why: str

    def __str__(self) -> str:
        return f"{self.op}({self.sample}): {self.claim}: {self.why}"


@dataclass(frozen=True)
class Report:
    """What a check found, and the number of claims it tried."""

    wrong: tuple[Finding, ...] = ()
    timid: tuple[Finding, ...] = ()
    tried: int = 0

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.timid

    def __str__(self) -> str:
        lines = [f"wrong: {f}" for f in self.wrong] + [f"timid: {f}" for f in self.timid]
        return "\n".join(lines) or f"{self.tried} claims hold"


# -- samples -------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """A sample that became a node and its operands."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


def _tensor(kind: str, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    match = re.fullmatch(r"(f|c|spd|ramp|wide|single|pos|unit|b|(i|u|ends)\d+)", kind)
    if match is None:
        raise RuleError(
            f"a sample has no tensors of kind {kind!r}", hint="f, c, wide, pos, unit, spd, b, i9 (ints below 9), u9 (distinct ints below 9)"
        )
    if kind == "f":
        return torch.randn(shape, dtype=torch.float64, generator=gen)
    if kind == "c":
        return torch.randn(shape, dtype=torch.complex128, generator=gen)
    if kind == "spd":
        half = torch.randn(shape, dtype=torch.float64, generator=gen)
        return half @ half.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)
    if kind == "ramp":
        return torch.arange(1, shape[-1] + 1, dtype=torch.int32).expand(shape).contiguous()
    if kind == "single":
        return torch.randn(shape, dtype=torch.float32, generator=gen)
    if kind.startswith("ends"):
        rows = int(kind[4:])
        inner = torch.randint(0, rows + 1, (shape[0] - 1,), generator=gen).sort().values
        return torch.cat([inner, torch.tensor([rows])]).to(torch.int32)
    if kind == "wide":
        return torch.randn(shape, dtype=torch.float64, generator=gen) * 5
    if kind == "pos":
        return torch.rand(shape, dtype=torch.float64, generator=gen) * 1.5 + 0.5
    if kind == "unit":
        return torch.rand(shape, dtype=torch.float64, generator=gen) * 0.9 + 0.05
    if kind == "b":
        return torch.rand(shape, dtype=torch.float64, generator=gen) < 0.5
    bound = int(kind[1:])
    if kind[0] == "i":
        return torch.randint(0, bound, shape, generator=gen)
    distinct = [torch.randperm(bound, generator=gen)[: shape[-1]] for _ in range(math.prod(shape[:-1]))]
    return torch.stack(distinct).reshape(shape)


def parse_sample(op: str, text: str, seed: int = 0) -> tuple[Node, dict[str, Tensor]]:
    """The node (without outputs) and the operands that a sample describes; values depend on op, text and seed only."""
    gen = torch.Generator().manual_seed(zlib.crc32(f"{op} {text} {seed}".encode()))
    call = _Call()
    source = re.sub(r"([a-z]\d*)\[\]", r"\1[()]", text)  # 0-dim: Python has no empty subscript
    try:
        tree = ast.parse(f"call({source})", mode="eval").body
    except SyntaxError:
        raise RuleError(f"sample {text!r} of {op} can't be read", hint="write it like 'f[4, 6], i6[4], dim=1'") from None
    assert isinstance(tree, ast.Call)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            shape = ast.literal_eval(node.slice)
            return named(_tensor(node.value.id, shape if isinstance(shape, tuple) else (shape,), gen))
        if isinstance(node, (ast.List, ast.Tuple)):
            return tuple(value(e) for e in node.elts)
        if isinstance(node, ast.Name):
            if node.id == "key":
                return named(step_key(1, 2))
            try:
                return parse_dtype(node.id)
            except KeyError:
                raise RuleError(f"sample {text!r} of {op}: {node.id!r} is neither a tensor nor a dtype") from None
        return ast.literal_eval(node)

    def named(tensor: Tensor) -> Ref:
        name = f"x{len(call.values)}"
        call.values[name] = tensor
        return Ref(name)

    call.args = [value(a) for a in tree.args]
    call.kwargs = {str(k.arg): value(k.value) for k in tree.keywords}
    return Node(op, tuple(call.args), (), tuple(sorted(call.kwargs.items()))), call.values


# -- running -------------------------------------------------------------------------------------------------------------


#: modules that register the ops of a namespace.
PROVIDERS = MappingProxyType({"transformers": "transformers.integrations.moe"})


def function(op: str) -> Callable[..., Any]:
    """The function that an op's name stands for."""
    namespace, _, name = op.partition(".")
    if op == "autopar.accumulate":  # its running total is the emitter's business, not an operand
        return lambda x, combine: ops.accumulate(None, x, combine)
    if op in ("aten.view.default", "aten._unsafe_view.default"):  # as generated code does: pieces lie in memory in their own way
        op = "aten.reshape.default"
    if namespace in PROVIDERS:
        importlib.import_module(PROVIDERS[namespace])
    return getattr(ops, name) if namespace == "autopar" else resolve(op)


def run(node: Node, values: Mapping[str, Tensor], coords: Mapping[str, int] | None = None) -> tuple[Tensor | None, ...]:
    """Runs a node on tensors; offsets are taken at the rank's coordinates. An output that is no tensor is None."""

    def build(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return values[tree.name]
        if isinstance(tree, Offset):
            return tree.at(coords or {})
        return tuple(map(build, tree)) if isinstance(tree, tuple) else tree

    result = function(node.op)(*map(build, node.args), **{k: build(v) for k, v in node.kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(r if isinstance(r, Tensor) else None for r in results)


def piece(x: Tensor, sharding: Sharding, mesh: Mesh, coords: Mapping[str, int]) -> Tensor:
    """A rank's piece of a tensor, contiguous."""
    part = x.reshape(sharding.atoms)
    for atom, (start, size) in enumerate(zip(sharding.starts(mesh, dict(coords)), sharding.local_atoms(mesh), strict=True)):
        part = part.narrow(atom, start, size)
    return part.reshape(sharding.local_shape(mesh)).clone(memory_format=torch.contiguous_format)


def addends(x: Tensor, ways: int, combine: str, gen: torch.Generator) -> list[Tensor]:
    """Random tensors that combine to ``x``; none of them is zero or ``x``, which would hide what isn't linear."""
    if x.dtype == torch.bool:
        raise _Refuted("a bool can't be partial")
    if combine == "sum":
        if x.dtype.is_floating_point or x.dtype.is_complex:
            parts = [torch.randn(x.shape, dtype=x.dtype, generator=gen) for _ in range(ways - 1)]
        else:
            parts = [torch.randint(1, 4, x.shape, dtype=x.dtype, generator=gen) for _ in range(ways - 1)]
        return [*parts, x - sum(parts)]
    winner = torch.randint(0, ways, x.shape, generator=gen)
    sign = -1 if combine == "max" else 1
    noise = [torch.randint(1, 4, x.shape, generator=gen).to(x.dtype) * sign for _ in range(ways)]
    return [torch.where(winner == r, x, x + noise[r]) for r in range(ways)]


class _Refuted(Exception):
    """A claim doesn't hold."""


def _same(got: Tensor, want: Tensor, what: str) -> None:
    if got.shape != want.shape:
        raise _Refuted(f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    if got.dtype != want.dtype:
        raise _Refuted(f"{what} has dtype {got.dtype}, not {want.dtype}")
    if what.startswith("undefined"):
        return
    if want.dtype.is_complex:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if not want.dtype.is_floating_point:
        if not torch.equal(got, want):
            raise _Refuted(f"{what} differs in {int((got != want).sum())} of {want.numel()} elements")
        return
    # about 4,500 units in the last place: sums in another order need some tens
    bound = 4500 * torch.finfo(want.dtype).eps
    finite = want.isfinite()
    scale = max(1.0, float(want[finite].abs().max())) if bool(finite.any()) else 1.0
    same = (got - want).abs() <= bound * scale
    same |= (got == want) | (got.isnan() & want.isnan())
    if not bool(same.all()):
        raise _Refuted(f"{what} differs by {float((got - want).abs().max()):.3g} at a scale of {scale:.3g}")


@dataclass(frozen=True)
class Case:
    """A bound sample: everything that doesn't depend on the claim."""

    rule: Rule
    sample: str
    node: Node
    values: Mapping[str, Tensor]
    whole: tuple[Tensor | None, ...]
    types: Mapping[str, TensorType]
    row: Row

    @property
    def dims(self) -> tuple[Dims, ...]:
        """One atom for every factor."""
        return tuple(tuple(tuple(self.row.sizes[f] for f in dim) for dim in term) for term in (*self.row.inputs, *self.row.outputs))

    def refined(self, factor: str, parts: tuple[int, ...]) -> tuple[Dims, ...]:
        """Atoms where one factor is cut into several."""
        return tuple(
            tuple(tuple(a for f in dim for a in (parts if f == factor else (self.row.sizes[f],))) for dim in term)
            for term in (*self.row.inputs, *self.row.outputs)
        )


def bind_sample(rule: Rule, sample: str, seed: int = 0) -> Case:
    """Runs an op on a sample and binds its row. Raises RuleError where the row doesn't fit."""
    node, values = parse_sample(rule.op, sample, seed)
    return bind_node(rule, sample, node, values)


def bind_node(rule: Rule, sample: str, node: Node, values: Mapping[str, Tensor]) -> Case:
    """The same for a node with values of its operands, as one of a captured program; ``sample`` is what findings call it."""
    whole = run(node, values)
    outs = tuple(f"y{k}" if t is not None else "" for k, t in enumerate(whole))
    node = replace(node, outs=outs)
    types = {n: TensorType(t.dtype, tuple(t.shape)) for n, t in values.items()}
    types |= {n: TensorType(t.dtype, tuple(t.shape)) for n, t in zip(outs, whole, strict=True) if t is not None}
    return Case(rule, sample, node, values, whole, types, rule.bind(node, types))


def _try(case: Case, dims: Sequence[Dims], mesh: Mesh, chosen: Sequence[Strategy], seed: int) -> None:
    """Runs a case with one strategy an axis on every rank. Raises _Refuted where it doesn't give what the whole op gives."""
    n = len(case.row.inputs)
    shardings = []
    for k, atoms in enumerate(dims):
        sharding = Sharding(atoms)
        for axis, strategy in zip(mesh.names, chosen, strict=True):
            sharding = sharding.with_placement(axis, (*strategy.inputs, *strategy.outputs)[k], mesh)
        shardings.append(sharding)
    in_sh, out_sh = shardings[:n], shardings[n:]
    outputs = tuple(s if name else None for s, name in zip(out_sh, case.node.outs, strict=True))
    gen = torch.Generator().manual_seed(seed)
    # A value read twice may be cut in two ways, so every use is an operand of its own.
    names = iter(range(n))
    node, operands = case.node, [case.values[r] for r in case.node.refs()]

    def renamed(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return Ref(f"u{next(names)}")
        return tuple(map(renamed, tree)) if isinstance(tree, tuple) else tree

    node = replace(node, args=renamed(node.args), kwargs=tuple((k, renamed(v)) for k, v in node.kwargs))
    local = case.rule.localize(node, Local(mesh, tuple(in_sh), outputs))

    shares: list[dict[tuple[int, ...], Tensor]] = []  # of each operand, by coordinates along its partial axes
    for x, sharding in zip(operands, in_sh, strict=True):
        parts: dict[tuple[int, ...], Tensor] = {(): x}
        for axis, combine in sharding.partial_axes():
            parts = {(*at, i): part for at, value in parts.items() for i, part in enumerate(addends(value, mesh[axis], combine, gen))}
        shares.append(parts)

    results: list[tuple[Tensor | None, ...]] = []
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        pieces = {}
        for k, (parts, sharding) in enumerate(zip(shares, in_sh, strict=True)):
            own = parts[tuple(coords[a] for a, _ in sharding.partial_axes())]
            pieces[f"u{k}"] = piece(own, sharding, mesh, coords)
        try:
            results.append(run(local, pieces, coords))
        except (AutoparError, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise _Refuted(f"the op fails on rank {rank}: {str(error).splitlines()[0]}") from None

    # what is in fresh memory is anybody's guess
    kind = "undefined output" if re.match(r"aten\.(new_)?empty", case.node.op) else "output"
    for k, (want, sharding_) in enumerate(zip(case.whole, outputs, strict=True)):
        if want is None or sharding_ is None:
            continue
        for rank in range(mesh.size):
            coords = mesh.coords(rank)
            got = _combined([r[k] for r in results], sharding_, mesh, rank)
            _same(got, piece(want, sharding_, mesh, coords), f"{kind} {k} on rank {rank}")


def _combined(results: Sequence[Tensor | None], sharding: Sharding, mesh: Mesh, rank: int) -> Tensor:
    """A rank's output, combined over the axes on which it is partial, the last axis first."""
    partial = sharding.partial_axes()
    if not partial:
        found = results[rank]
        assert found is not None
        return found
    (axis, combine), rest = partial[0], replace(sharding, placements=tuple(p for p in sharding.placements if p[0] != partial[0][0]))
    parts = [_combined(results, rest, mesh, r) for r in mesh.group(rank, (axis,))]
    if parts[0].dtype == torch.bool:
        raise _Refuted("a bool output can't be partial")
    if combine == "sum":
        return torch.stack(parts).sum(0, dtype=parts[0].dtype)
    return torch.stack(parts).amax(0) if combine == "max" else torch.stack(parts).amin(0)


# -- claims --------------------------------------------------------------------------------------------------------------


def _ways(size: int) -> Iterator[int]:
    return (w for w in (2, 3) if size % w == 0)


def _refinements(size: int) -> Iterator[tuple[int, int]]:
    return ((size // w, w) for w in _ways(size) if size > w)


def _claims(case: Case) -> Iterator[tuple[str, tuple[Dims, ...], Mesh, tuple[Strategy, ...]]]:
    """Everything that the row allows: on one axis, on the minor atom of every factor, and pairs on two axes."""
    row = case.row
    for ways in (2, 3):
        for s in strategies(row, case.dims, ways):
            yield f"{s.factor or 'linear'} cut in {ways}", case.dims, Mesh(tp=ways), (s,)
    for factor in row.factors():
        for parts in _refinements(row.sizes[factor]):
            dims = case.refined(factor, parts)
            for s in strategies(row, dims, None):
                if s.factor == factor and s not in strategies(row, case.dims, None):
                    yield f"{factor} cut in {parts[1]} on its minor atom", dims, Mesh(tp=parts[1]), (s,)
    yield from _pairs(case)


def _pairs(case: Case) -> Iterator[tuple[str, tuple[Dims, ...], Mesh, tuple[Strategy, ...]]]:
    mesh = Mesh(dp=2, tp=2)
    single = strategies(case.row, case.dims, 2)
    pairs = [p for p in itertools.product(single, single) if REPLICATED not in (_shape_of(p[0]), _shape_of(p[1]))]
    random.Random(case.sample).shuffle(pairs)
    found = 0
    for a, b in pairs:
        nested = a.factor and a.factor == b.factor
        if nested and case.row.sizes[a.factor] % 4:
            continue
        # one value isn't partial in two ways on two axes
        if any(p.kind == q.kind == "partial" and p != q for p, q in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)):
            continue
        yield f"{a.factor or 'linear'} and {b.factor or 'linear'} on two axes", case.dims, mesh, (a, b)
        found += 1
        if found == PAIRS:
            return


REPLICATED = "replicated"


def _shape_of(strategy: Strategy) -> str:
    return REPLICATED if all(p == REPLICATE for p in (*strategy.inputs, *strategy.outputs)) else ""


def _untried(case: Case) -> Iterator[tuple[str, tuple[Strategy, ...], int]]:
    """Everything near the row that it doesn't allow: (claim, strategies any of which would show timidity, ways)."""
    row = case.row
    n = len(row.inputs)
    for factor in row.factors():
        if row.kind(factor) != "whole":
            continue
        seen: list[Strategy] = []
        for kind in ("plain", "sum", "max", "min", "offset", "offset-sum"):
            bold = replace(row, kinds={**row.kinds, factor: kind}, linear=(), moves=False)
            for ways in itertools.islice(_ways(row.sizes[factor]), 1):
                found = tuple(s for s in strategies(bold, case.dims, ways) if s.factor == factor and s not in seen)
                seen += found
                if found:
                    yield f"{factor} is whole and could be {kind}", found, ways
    operands = [case.values[r] for r in case.node.refs()]
    numbers = [k for k, x in enumerate(operands) if x.dtype != torch.bool]
    floats = [k for k, x in enumerate(operands) if x.dtype.is_floating_point or x.dtype.is_complex]
    if case.rule.timid_ok:
        return
    sets = [*(frozenset(c) for size in (1, 2) for c in itertools.combinations(numbers, size)), frozenset(floats)]
    for group in dict.fromkeys(sets):
        # more than a set that is linear by itself adds only operands that don't matter
        if group and not any(known <= group for known in row.linear):
            inputs = tuple(PARTIAL_SUM if k in group else REPLICATE for k in range(n))
            yield f"linear in {sorted(group)}", (Strategy(inputs, (PARTIAL_SUM,) * len(row.outputs)),), 2


def _unoffered(case: Case) -> Iterator[tuple[str, int]]:
    """Factors that the row lets be cut, on an axis that divides them, and for which no strategy is made: (factor, ways)."""
    row, terms = case.row, (*case.row.inputs, *case.row.outputs)
    for ways in (2, 3):
        offered = {s.factor for s in strategies(row, case.dims, ways)}
        for factor in row.factors():
            kind = row.kind(factor)
            gone = kind in ("plain", "offset") and not any(factor in dim for term in row.outputs for dim in term)
            minor = kind.startswith("offset") and any(factor in dim and dim[0] != factor for term in terms for dim in term)
            if kind != "whole" and not gone and not minor and row.sizes[factor] and row.sizes[factor] % ways == 0 and factor not in offered:
                yield factor, ways


def check(rule: Rule, samples: Iterable[str] | None = None, *, timid: bool = True, first: bool = False) -> Report:
    """Checks a rule on its samples.

    Args:
        rule: the rule, of the table or a user's own.
        samples: others than the rule's.
        timid: also look for what the row forbids without need.
        first: stop at the first fault.
    """
    wrong: list[Finding] = []
    shy: list[Finding] = []
    tried = 0
    for sample in rule.samples if samples is None else samples:
        try:
            case = bind_sample(rule, sample, 0)
        except (AutoparError, RuntimeError, AssertionError, LookupError, TypeError, ValueError) as error:
            wrong.append(Finding(rule.op, sample, "the row fits", str(error).splitlines()[0] if str(error) else type(error).__name__))
            if first:
                break
            continue
        found, count = check_case(case, first=first)
        wrong += found
        tried += count
        if first and wrong:
            return Report(tuple(wrong), tuple(shy), tried)
        if not timid:
            continue
        for factor, ways in _unoffered(case):
            shy.append(Finding(rule.op, sample, f"{factor} cut in {ways}", "the row allows it and no strategy does it"))
            if first:
                return Report(tuple(wrong), tuple(shy), tried)
        again = None
        for claim, candidates, ways in _untried(case):
            tried += 1
            for candidate in candidates:
                if _why_not(case, case.dims, Mesh(tp=ways), (candidate,)):
                    continue
                # once may be chance (a mask that happens to be all true): other values must agree
                again = again or [bind_sample(rule, sample, seed) for seed in (1, 2)]
                if not any(_why_not(c, c.dims, Mesh(tp=ways), (candidate,)) for c in again):
                    shy.append(Finding(rule.op, sample, claim, "it holds on all values tried"))
                    if first:
                        return Report(tuple(wrong), tuple(shy), tried)
                    break
    return Report(tuple(wrong), tuple(shy), tried)


def check_case(case: Case, *, first: bool = False) -> tuple[list[Finding], int]:
    """What is wrong with the row of one bound node, and the number of claims tried."""
    wrong: list[Finding] = []
    try:
        claims = [c for c in _claims(case) if all(_possible(case, s) for s in c[3])]
    except AutoparError as error:
        return [Finding(case.rule.op, case.sample, "the row has strategies", error.what)], 0
    for tried, (claim, dims, mesh, chosen) in enumerate(claims, 1):
        why = _why_not(case, dims, mesh, chosen)
        if why:
            wrong.append(Finding(case.rule.op, case.sample, claim, why))
            if first:
                return wrong, tried
    return wrong, len(claims)


def _possible(case: Case, strategy: Strategy) -> bool:
    """Bools are never partial, so what a row says of partial bools is idle."""
    tensors = [case.values[r] for r in case.node.refs()]
    return not any(t.dtype == torch.bool and p.kind == "partial" for t, p in zip(tensors, strategy.inputs, strict=True))


def _why_not(case: Case, dims: tuple[Dims, ...], mesh: Mesh, chosen: tuple[Strategy, ...]) -> str:
    """Why a claim doesn't hold; "" if it does."""
    try:
        _try(case, dims, mesh, chosen, seed=zlib.crc32(case.sample.encode()))
    except _Refuted as error:
        return str(error)
    except (AutoparError, RuntimeError, AssertionError) as error:
        return f"localising fails: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""
