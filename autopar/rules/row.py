"""Rows: what an op does to its tensors, as factors. ``mm: m k, k n -> m n ; k: sum``.

Grammar (one term per tensor operand in argument order, then one per output)::

    row     = terms "->" terms [";" kinds]
    terms   = term ("," term)*
    term    = dim*                      dims from the left; "~k" in an output says that it doesn't depend on factor k
    dim     = factor | "(" factor+ ")" | "1" | "*"
    factor  = name ["=" size]
    kinds   = name ":" kind ("," name ":" kind)*

``1`` is a dim of size 1. ``*`` stands for the dims that the term has beyond the others, aligned from the right over all terms
and broadcast: where one term has size 1 and another has more, the former doesn't have the factor. A dim in brackets is a merge of
factors, major first. A factor of size 1 is dropped.

Kinds: ``plain`` (may be split; the default), ``sum``/``max``/``min`` (in inputs only: splitting leaves the output unreduced),
``whole`` (must not be split), ``offset`` (may be split if the shard is told where it starts), ``offset-sum`` (both).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import RuleError

Dims = tuple[tuple[str, ...], ...]
KINDS = ("plain", "sum", "max", "min", "whole", "offset", "offset-sum")


@dataclass(frozen=True)
class Row:
    """A row bound to the shapes of one node: every dim a tuple of factors.

    ``linear`` holds sets of operands: those of one set may be partial (sum) together while the others are replicated, and the outputs
    are then partial. ``moves``: the op only moves elements, so any combine passes. ``soft``: bracketed dims are a wish, dropped
    (made ``whole``) where the dim isn't a root dim of a parameter. ``ring``: two factors that may be cut together, the second of which
    then goes from rank to rank.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[str, int]
    kinds: dict[str, str]
    invariant: frozenset[tuple[int, str]] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    moves: bool = False
    soft: bool = False
    text: str = field(default="", compare=False)
    ring: tuple[str, str] | None = None

    def kind(self, factor: str) -> str:
        return self.kinds.get(factor, "plain")

    def factors(self) -> tuple[str, ...]:
        """All factors, in order of appearance."""
        return tuple(dict.fromkeys(f for term in (*self.inputs, *self.outputs) for dim in term for f in dim))

    def opaque(self, bad: Iterable[str]) -> Row:
        """The same row where dims that merge any of ``bad``, and dims of the factors merged with them, become whole dims of their own."""
        bad = set(bad)
        dims = [set(dim) for term in (*self.inputs, *self.outputs) for dim in term]
        while more := set().union(*(d for d in dims if d & bad)) - bad:
            bad |= more
        sizes, kinds = dict(self.sizes), dict(self.kinds)

        def term(name: str, dims: Dims) -> Dims:
            out = []
            for i, dim in enumerate(dims):
                if bad & set(dim):
                    factor = f"{name}{i}"
                    sizes[factor] = math.prod(self.sizes[f] for f in dim)
                    kinds[factor] = "whole"
                    dim = (factor,)
                out.append(dim)
            return tuple(out)

        inputs = tuple(term(f"in{k}.", t) for k, t in enumerate(self.inputs))
        outputs = tuple(term(f"out{k}.", t) for k, t in enumerate(self.outputs))
        return replace(self, inputs=inputs, outputs=outputs, sizes=sizes, kinds=kinds, soft=False)

    def __str__(self) -> str:
        return self._shown

    @cached_property
    def _shown(self) -> str:
        def show(dims: Dims) -> str:
            return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)

        kinds = ", ".join(f"{f}: {k}" for f, k in self.kinds.items() if k != "plain" and f in self.factors())
        return f"{', '.join(map(show, self.inputs))} -> {', '.join(map(show, self.outputs))}" + (f" ; {kinds}" if kinds else "")


def _tokens(term: str) -> tuple[list[list[tuple[str, int | None]] | str], set[str]]:
    """The dims of a term, each ``"*"`` or a list of (factor, size), and the factors it is invariant to."""
    dims: list[list[tuple[str, int | None]] | str] = []
    invariant: set[str] = set()
    for token in re.findall(r"\([^()]*\)|~[\w.]+|\*|[\w.=]+", term):
        if token == "*":
            dims.append("*")
        elif token.startswith("~"):
            invariant.add(token[1:])
        elif token == "1":
            dims.append([])
        else:
            factors = []
            for part in token.strip("()").split():
                name, _, size = part.partition("=")
                factors.append((name, int(size) if size else None))
            dims.append(factors)
    return dims, invariant


def parse(text: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Splits a row's text into input terms, output terms and kinds. Raises RuleError."""
    body, _, tail = text.partition(";")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise RuleError(f"row {text!r} has no '->'", hint="write it like 'm k, k n -> m n ; k: sum'")
    kinds = {}
    for item in filter(None, (t.strip() for t in tail.split(","))):
        name, colon, kind = (t.strip() for t in item.partition(":"))
        if not colon or kind not in KINDS:
            raise RuleError(f"row {text!r}: {item!r} is not 'factor: kind'", hint=f"kinds are {', '.join(KINDS)}")
        kinds[name] = kind
    inputs = [] if not left.strip() else left.split(",")
    return inputs, right.split(","), kinds


def bind(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...] | None], *, linear: str = "", soft: bool = False) -> Row:
    """Binds a row's text to shapes. An output that nobody reads has shape None.

    ``linear``: sets of operands separated by ``|``, such as ``0 | 1`` (either), ``0 1`` (both together), ``all`` or ``moves``.
    """
    in_terms, out_terms, kinds = parse(text)
    if not in_terms and len(inputs) == 1:
        in_terms = [""]  # one operand without dims
    if len(in_terms) != len(inputs) or len(out_terms) != len(outputs):
        raise RuleError(
            f"row {text!r} has {len(in_terms)} operands and {len(out_terms)} outputs, the node {len(inputs)} and {len(outputs)}",
            why=f"operand shapes {inputs}, output shapes {outputs}",
        )
    parsed = [_tokens(t) for t in (*in_terms, *out_terms)]
    shapes: list[tuple[int, ...] | None] = [*inputs, *outputs]
    star_sizes: dict[int, int] = {}
    terms: list[list[list[tuple[str, int | None]]]] = []
    for (dims, _), shape in zip(parsed, shapes, strict=True):
        if shape is None:
            terms.append([])
            continue
        spread = len(shape) - (len(dims) - dims.count("*"))
        if spread < 0 or (spread > 0 and "*" not in dims):
            raise RuleError(f"row {text!r} doesn't fit a tensor of shape {shape}", why=f"operands {inputs}, outputs {outputs}")
        flat: list[list[tuple[str, int | None]]] = []
        for dim in dims:
            if dim == "*":
                flat += [[(f"*{spread - i}", None)] for i in range(spread)]
            else:
                assert not isinstance(dim, str)
                flat.append(dim)
        for dim, size in zip(flat, shape, strict=True):
            if len(dim) == 1 and dim[0][0].startswith("*"):
                star = int(dim[0][0][1:])
                known = star_sizes.get(star, 1)
                star_sizes[star] = 0 if 0 in (known, size) else max(known, size)
        terms.append(flat)

    sizes: dict[str, int] = {}
    for flat, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(flat, shape or (), strict=True):
            for name, given in dim:
                if name.startswith("*"):
                    sizes[name] = star_sizes[int(name[1:])]
                elif given is not None:
                    sizes[name] = given
                elif len(dim) == 1:
                    sizes.setdefault(name, size)
    # a merged dim may have one factor of unknown size: it is what the others leave
    for flat, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(flat, shape or (), strict=True):
            unknown = [n for n, _ in dim if n not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // (math.prod(sizes[n] for n, _ in dim if n != unknown[0]) or 1)

    def resolve(flat: list[list[tuple[str, int | None]]], shape: tuple[int, ...] | None) -> Dims:
        out: list[tuple[str, ...]] = []
        for dim, size in zip(flat, shape or (), strict=True):
            if len(dim) == 1 and dim[0][0].startswith("*") and size == 1 and sizes[dim[0][0]] != 1:
                out.append(())
                continue
            if math.prod(sizes[n] for n, _ in dim) != size:
                raise RuleError(
                    f"row {text!r} doesn't fit shape {shape}: a dim of {size} is not {dim}", why=f"operands {inputs}, outputs {outputs}"
                )
            out.append(tuple(n for n, _ in dim if sizes[n] != 1))
        return tuple(out)

    bound = [resolve(f, s) for f, s in zip(terms, shapes, strict=True)]
    n = len(inputs)
    invariant = frozenset((k, f) for k, (_, inv) in enumerate(parsed[n:]) for f in inv)
    sets: tuple[frozenset[int], ...] = ()
    if linear in ("all", "moves"):
        sets = (frozenset(range(n)),) if n else ()
    elif linear == "each":
        sets = tuple(frozenset({i}) for i in range(n))
    elif linear:
        sets = tuple(frozenset(map(int, part.split())) for part in linear.split("|"))
    used = {f for t in bound for d in t for f in d}
    held = {f for t in bound[n:] for d in t for f in d}
    for f in sorted(used - held):
        # with an output that nobody reads, the factor may stand there only
        if (
            kinds.get(f, "plain") in ("plain", "offset")
            and None not in outputs
            and any((k, f) not in invariant for k in range(len(outputs)))
        ):
            raise RuleError(
                f"row {text!r}: factor {f} is in no output and is {kinds.get(f, 'plain')}",
                why="splitting it leaves something to combine",
                hint=f"say '{f}: sum' (or max, min), '{f}: whole', or '~{f}' in outputs without it",
            )  # fmt: skip
    kinds = {f: k for f, k in kinds.items() if f in used}
    return Row(tuple(bound[:n]), tuple(bound[n:]), {f: sizes[f] for f in used}, kinds, invariant, sets, linear == "moves", soft, text)
