"""What the backward makes again instead of keeping it: by module, everything but the layers' inputs, what takes little work, or as a limit
on memory asks.

The last two are one model. For every tensor that the forward makes: is it kept; for every node: is it run again. What the backward reads is
one or the other, and so is what a node reads that is run again. Without a limit, among nodes that take little work, the least bytes
are kept, which is a minimum cut. With a limit, the least time is added such that at no point of forward and backward more is alive.

Source: Jain et al. 2020, *Checkmate*, arXiv 1910.02653, for the model with a limit at every point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.cost.device import Device
from autopar.cost.live import Life, find_lives, find_roots, find_runs, is_forward, is_view, kept_bytes, kept_values, profile
from autopar.errors import PlanError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Program, layer_of
from autopar.plan.plan import SELECTIVE, limit_of
from autopar.plan.solver import Model
from autopar.plan.stages import node_seconds
from autopar.rules import Rules
from autopar.rules.atoms import Atoms

#: how many times the memory is passed over, at most, in the time that a node of little work takes for each byte that it makes.
LITTLE = 2.0
#: how far from the least added time a choice may be, and how often a limit's rows are drawn anew.
GAP, ROUNDS = 0.01, 40

#: None: the regions that the model itself runs under ``torch.utils.checkpoint``.
Request = str | int | Sequence[str] | None
Rewrite = Callable[[LocalProgram, frozenset[str]], LocalProgram]


def regions_of(program: Program, request: Request) -> dict[str, str]:
    """The region of every value that the forward of a microbatch makes: its layer, the module that a glob names, or the model's own."""
    forward = [n for n in program.nodes if is_forward(n)]
    if request is None:
        return {o: str(n.where.again) for n in forward if n.where.again for o in n.outs if o}
    if isinstance(request, str) or not isinstance(request, Sequence):
        return {o: layer_of(n.where.module) for n in forward for o in n.outs if o}
    found: dict[str, str] = {}
    for node in forward:
        at = next((path for path in _paths(node) if any(fnmatchcase(path, glob) for glob in request)), None)
        if at is not None:
            found.update((o, at) for o in node.outs if o)
    return found


def _paths(node: Node) -> list[str]:
    """The modules that a node runs in, the outermost first."""
    parts = node.where.module.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def is_asked(program: Program, request: Request) -> bool:
    """Whether a plan, or else the model itself, asks that something is made again."""
    return request is not None or any(n.where.again for n in program.nodes)


def check_globs(program: Program, request: Request) -> None:
    """Raises PlanError where a glob of a request names no module that the forward calls."""
    if not isinstance(request, tuple):
        return
    calls = list(dict.fromkeys(path for n in program.nodes if is_forward(n) for path in _paths(n) if path))
    for glob in request:
        if not any(fnmatchcase(path, glob) for path in calls):
            raise PlanError(
                f"Plan(recompute=...): no module that the forward calls matches {glob!r}",
                why=f"it calls {', '.join(calls[:8])}{', ...' if len(calls) > 8 else ''}",
                hint='paths or globs of modules: recompute=("layers.*",)',
            )


def inside(program: LocalProgram, regions: Mapping[str, str]) -> set[str]:
    """The values of regions that no forward node of another place reads: all of a region but what goes on to the next."""
    leaving: set[str] = set()
    for node in program.nodes:
        if node.phase == "forward":
            here = regions.get(node.name, "")
            leaving.update(r for r in node.refs() if regions.get(r, "") != here)
    return {value for value, region in regions.items() if region and value not in leaving}


@dataclass(frozen=True)
class Costs:
    """What running a node of a local program again takes, by the name of its first value.

    ``little``: nodes whose time is short for the bytes that they make, and that talk to no other rank.
    """

    seconds: Mapping[str, float]
    little: frozenset[str]


def costs_of(program: LocalProgram, split: Program, atoms: Atoms, rules: Rules, device: Device) -> Costs:
    """Costs from the rows of the whole program: a rank does its share of a node."""
    whole = dict(zip((n.name for n in split.nodes), node_seconds(split, atoms, rules, device), strict=True))
    seconds: dict[str, float] = {}
    little = set()
    for node in program.nodes:
        nbytes = sum(program.types[o].nbytes for o in node.outs if o)
        read = sum(program.types[r].nbytes for r in node.refs())
        if node.op.startswith("comm."):
            seconds[node.name] = device.comm_seconds(read)
            continue
        share = max(nbytes, 1) / max(sum(split.types[o].nbytes for o in node.outs if o in split.types), 1) if node.name in whole else 1.0
        seconds[node.name] = 0.0 if is_view(node) else whole.get(node.name, device.seconds(0.0, nbytes + read)) * share
        work = seconds[node.name] - device.seconds(0.0, nbytes + read)
        if work <= LITTLE * nbytes / device.memory_bandwidth:
            little.add(node.name)
    return Costs(seconds, frozenset(little))


def held_bytes(program: LocalProgram) -> int:
    """Bytes that a program's parameters and buffers take on a rank all the time."""
    return sum(program.types[i.name].nbytes for i in program.inputs if i.kind in ("param", "buffer"))


def choose_recompute(
    program: LocalProgram, request: Request, costs: Costs, rewrite: Rewrite, *, held: int = 0, extra: int = 0, others: int = 0
) -> frozenset[str]:
    """The values that the backward makes again.

    Args:
        rewrite: gives the program whose backward makes some values again.
        held: bytes of a limit that are taken all the time, by parameters.
        extra: further ones, or, below 0, those that the program's values are counted too much.
        others: how many further microbatches are alive, each with what it keeps.

    Raises:
        PlanError: the limit is below what the program needs.
    """
    limit = limit_of(request)
    if limit is None and request != SELECTIVE:
        return frozenset(inside(program, regions_of(program, request)))
    chooser = _Chooser(program, costs, rewrite, others)
    return chooser.least_bytes() if limit is None else chooser.under(limit, held, extra)


class _Chooser:
    """The model of one program. Chains of nodes that are run again don't leave their layer, so that they are short and their time is known.

    A **candidate** is a tensor (no view) that the forward makes and the backward needs.
    """

    def __init__(self, program: LocalProgram, costs: Costs, rewrite: Rewrite, others: int) -> None:
        self.program, self.costs, self.rewrite, self.others = program, costs, rewrite, others
        nodes = program.nodes
        self.roots, self.runs, self.lives = find_roots(program), find_runs(nodes), find_lives(program)
        self.ends = {run: n for n, run in enumerate(self.runs)}
        self.makers = {o: n for n in nodes if is_forward(n) for o in n.outs if o}
        self.number = {o: n for n, node in enumerate(nodes) for o in node.outs if o}
        regions = self.find_regions()
        crossing = {r for n in nodes if n.phase == "forward" for r in n.refs() if regions.get(r) != regions.get(n.name)}
        self.fixed = {self.root(v) for v in crossing}
        self.forward_end, self.first, self.last = self.find_reads()
        self.candidates = [v for v in self.first if v in self.lives]
        self.base = self.find_base()

    def root(self, value: str) -> str:
        return self.roots.get(value, value)

    def find_regions(self) -> dict[str, int]:
        """Runs of forward nodes of one layer."""
        found: dict[str, int] = {}
        count, last = 0, None
        for node in self.program.nodes:
            if is_forward(node):
                layer = layer_of(node.where.module)
                count, last = count + (layer != last), layer
                found.update((o, count) for o in node.outs if o)
        return found

    def find_reads(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """By tensor of the forward: where the forward is done with it, and the first and last place in the backward that may need it.

        A place needs a tensor if it reads it, or something that is made of it in its region.
        """
        done: dict[str, int] = {}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for n, node in enumerate(self.program.nodes):
            for r in map(self.root, node.refs()):
                if r not in self.makers:
                    continue
                if node.phase == "backward" and node.region == "body":
                    first.setdefault(r, n)
                    last[r] = self.ends[self.runs[n]]
                elif node.region == "body":
                    done[r] = n if self.runs[n] == self.runs[self.number[r]] else self.ends[self.runs[n]]
        for node in reversed(self.program.nodes):
            if not is_forward(node):
                continue
            at = min((first[self.root(o)] for o in node.outs if o and self.root(o) in first), default=None)
            if at is None or all(self.root(o) in self.fixed for o in node.outs if o):
                continue
            for r in map(self.root, node.refs()):
                if r in self.makers:
                    first[r] = min(first.get(r, at), at)
                    last[r] = max(last.get(r, at), at)
        return done, first, last

    def find_base(self) -> list[int]:
        """Bytes alive at every node whatever is chosen: the candidates only as long as the forward needs them."""
        chosen = set(self.candidates)
        rest = self.others * sum(n for v, n in kept_values(self.program).items() if v not in chosen)
        lives = [
            Life(life.nbytes, life.begin, self.forward_end.get(v, life.begin)) if v in chosen else life for v, life in self.lives.items()
        ]
        return [n + rest for n in profile(lives, len(self.program.nodes))]

    # -- the model

    def solve(self, allowed: Callable[[Node], bool], rows: Mapping[int, float] | None, lowest: bool = False) -> list[str]:
        """The tensors that are made again.

        Args:
            rows: most bytes at some places; None: the least bytes are kept.
            lowest: the rows share the limit that is as low as can be, instead of theirs.
        """
        model, lives = Model(), self.lives
        all_bytes = max(1, sum(lives[v].nbytes for v in self.candidates))
        all_seconds = sum(self.costs.seconds.values()) or 1.0
        by_time = rows is not None and not lowest
        again: dict[str, int] = {}  # node that may run again -> its column
        for v in self.candidates:
            node = self.makers[v]
            if v not in self.fixed and node.name not in again and allowed(node):
                seconds = self.costs.seconds[node.name] / all_seconds
                again[node.name] = (model.real if rows is None else model.binary)(seconds if by_time else 1e-6 * seconds)
        keep = {v: model.real(lives[v].nbytes / all_bytes * (1e-6 if rows is not None else 1.0)) for v in self.candidates}

        def there(value: str) -> list[tuple[int, float]]:
            """What has to be at least 1 for a tensor to be there in the backward."""
            own = self.makers[value].name
            return [(keep[value], 1.0), *([(again[own], 1.0)] if value not in self.fixed and own in again else [])]

        for v in self.direct():
            model.row(there(v), 1.0, math.inf)
        for name, column in again.items():
            for r in dict.fromkeys(map(self.root, self.makers[name].refs())):
                if r in keep:
                    model.row([*there(r), (column, -1.0)], 0.0, math.inf)
        top = model.real(1.0) if lowest else None
        whole = (self.others + 1) * sum(life.nbytes for life in lives.values()) or 1  # no place holds more
        for at, most in (rows or {}).items():
            terms = [
                (c, lives[v].nbytes * count / whole)
                for v, c in keep.items()
                if (count := self.others + (self.forward_end.get(v, lives[v].begin) < at <= self.last[v]))
            ]
            terms += [
                (again[self.makers[v].name], lives[v].nbytes / whole)
                for v in self.candidates
                if v not in self.fixed and self.makers[v].name in again and self.first[v] <= at <= self.last[v]
            ]
            here = self.base[at] / whole
            model.row([*terms, *([(top, -1.0)] if top is not None else [])], -math.inf, -here if top is not None else most / whole - here)
        values = model.solve(gap=GAP, what="choosing what to recompute")
        return [
            v for v, c in keep.items()
            if v not in self.fixed and self.makers[v].name in again and values[again[self.makers[v].name]] > 0.5 > values[c]
        ]  # fmt: skip

    def direct(self) -> list[str]:
        """The tensors that the backward reads itself."""
        reads = (r for n in self.program.nodes if n.phase == "backward" and n.region == "body" for r in n.refs())
        return [r for r in dict.fromkeys(map(self.root, reads)) if r in self.makers]

    def values_of(self, chosen: Iterable[str]) -> frozenset[str]:
        """With the tensors that are made again go all views of them."""
        found = set(chosen)
        return frozenset(found | {v for v, root in self.roots.items() if root in found and v in self.makers})

    def places(self, chosen: Iterable[str]) -> dict[int, int]:
        """The most bytes of every emitted function when these are made again, by the node of this program at, or before, which that is."""
        program = self.rewrite(self.program, self.values_of(chosen))
        rest = self.others * kept_bytes(program)
        live = [n + rest for n in profile(list(find_lives(program).values()), len(program.nodes))]
        most: dict[int, tuple[int, int]] = {}
        at = len(self.program.nodes) - 1
        for n, run in reversed(list(enumerate(find_runs(program.nodes)))):
            at = self.number.get(program.nodes[n].name, at)
            most[run] = max(most.get(run, (0, 0)), (live[n], at))
        found: dict[int, int] = {}
        for nbytes, at in most.values():
            found[at] = max(found.get(at, 0), nbytes)
        return found

    # -- the choices

    def least_bytes(self) -> frozenset[str]:
        """Keeps the least, among what takes little work to make."""
        return self.values_of(self.solve(lambda node: node.name in self.costs.little, None))

    def under(self, whole: int, held: int, extra: int) -> frozenset[str]:
        """Adds the least time so that no place holds more than the limit."""
        limit = whole - held - extra
        rows: dict[int, float] = {}
        for _ in range(ROUNDS):
            try:
                chosen = self.solve(lambda _: True, rows)
            except PlanError:
                break
            over = {at: nbytes for at, nbytes in self.places(chosen).items() if nbytes > limit}
            if not over:
                return self.values_of(chosen)
            for at, nbytes in over.items():
                # where the model counts less than there is, its row is drawn tighter by as much
                rows[at] = rows[at] - (nbytes - limit) if at in rows else float(limit)
        # the model may also count more than there is
        nbytes, at, chosen = self.lowest()
        if nbytes <= limit:
            return self.values_of(chosen)
        raise self.hopeless(whole, held, nbytes + held + extra, at, chosen)

    def lowest(self) -> tuple[int, int, list[str]]:
        """A choice whose fullest place holds as little as can be: its bytes, where that is, and what is made again."""
        rows: dict[int, float] = {}
        best: tuple[int, int, list[str]] | None = None
        for _ in range(ROUNDS):
            chosen = self.solve(lambda _: True, rows, lowest=bool(rows))
            places = self.places(chosen)
            at = max(places, key=lambda n: places[n])
            if best is None or places[at] < best[0]:
                best = (places[at], at, chosen)
            if at in rows:
                break
            rows.update(dict.fromkeys(places, 0.0))
        assert best is not None
        return best

    def hopeless(self, limit: int, held: int, nbytes: int, at: int, chosen: list[str]) -> PlanError:
        """The error that says how low a limit may be, and what holds most where it is tightest."""
        program = self.rewrite(self.program, self.values_of(chosen))
        place = next(n for n, node in enumerate(program.nodes) if node.name == self.program.nodes[at].name)
        there = sorted(((life.nbytes, v) for v, life in find_lives(program).items() if life.begin <= place <= life.end), reverse=True)
        most = ", ".join(f"{v} {n:,}" for n, v in there[:4])
        node = self.program.nodes[at]
        return PlanError(
            f"no choice of what to recompute fits into {limit:,} bytes on a rank",
            where=f"{node.op} of the {node.phase}, {node.where}",
            why=f"the least is about {nbytes:,}: there parameters take {held:,}, and of the rest most are {most}",
            hint="a higher limit, more microbatches, or more ranks",
        )
