"""ZeRO 3: parameters that are gathered where they are used, and again for the backward, instead of once before the step.

The uses of a bucket fall into runs, between which at least two others are used; a run doesn't leave its task, where a program has tasks.
Each run has a gather of its own, and its own views of the parameters; what it gathered is dead behind its last use. The gather of a run is
started where the uses of the bucket before it begin, so that it is under way while those compute.

Source: Rajbhandari et al. 2020, *ZeRO*, arXiv 1910.02054, section 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.cost.live import may_view
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Ref, fresh_name
from autopar.ir.stage import StageProgram, find_weight, tasks_of

P = TypeVar("P", bound=LocalProgram)


@dataclass
class _Run:
    """Uses of a gathered bucket that share a gather: positions of the first and last, and this run's names of the views."""

    full: str
    task: str
    first: int
    last: int
    values: dict[str, None] = field(default_factory=dict)  # that are read in it
    names: dict[str, str] = field(default_factory=dict)


def regather(program: P, again: bool = True) -> P:
    """The program whose buckets are gathered for each run of uses. Of level 3 only; others are as they were.

    Args:
        again: otherwise what was gathered for the forward is kept for the backward: a run ends only with its task.
    """
    if program.zero != 3:
        return program
    gathers = {n.name: n for n in program.nodes if n.op == "comm.all_gather" and n.refs()[0] in {b.name for b in program.buckets}}
    chain, source = _views(program, gathers)
    nodes = [n for n in program.nodes if n.name not in gathers and n.name not in chain]
    running = tasks_of(program, find_weight(program)) if isinstance(program, StageProgram) else {}
    tasks = [running.get(n.name, n.region) for n in nodes]
    uses = [(at, r, source[r]) for at, n in enumerate(nodes) for r in dict.fromkeys(n.refs()) if r in source]
    runs, by_use = _find_runs(uses, tasks, again)
    starts = _starts(runs, uses, tasks)
    begins: dict[int, list[_Run]] = {}
    for run in runs:
        begins.setdefault(run.first, []).append(run)

    types, shardings, wholes = dict(program.types), dict(program.shardings), dict(program.global_types)
    given = sorted({o.value for o in program.outputs} & chain.keys())
    used = set(given)
    made: list[Node] = []

    def name(run: _Run, value: str) -> str:
        """A run's name of a view, or of what it gathered; the first run has the plain one."""
        if value not in run.names:
            run.names[value] = value if value not in used else fresh_name(f"{value}_again", types)
            used.add(value)
            types[run.names[value]] = types[value]
            if value in shardings:
                shardings[run.names[value]], wholes[run.names[value]] = shardings[value], wholes[value]
        return run.names[value]

    def view(run: _Run, value: str, like: Node) -> str:
        """Puts a view, and those that it is made of, here, unless the run has it."""
        if value in run.names or value in gathers:
            return name(run, value)
        node = chain[value]
        names = [view(run, r, like) if r in source else r for r in node.refs()]
        made.append(replace(node.reading(names), outs=(name(run, value),), phase=like.phase, region=like.region))
        return name(run, value)

    def start(run: _Run, like: Node) -> None:
        made.append(replace(gathers[run.full], outs=(name(run, run.full),), phase=like.phase, region=like.region))

    for value in given:  # to the user, or to other stages: not a view of what is given back
        gather = gathers[source[value]]
        run = _Run(gather.name, "pre", 0, 0)
        start(run, gather)
        made.append(Node("aten.clone.default", (Ref(view(run, value, gather)),), (value,), (), "forward", gather.where, gather.region))
    for at, node in enumerate(nodes):
        for run in starts.get(at, ()):
            start(run, nodes[run.first])
        for run in begins.get(at, ()):  # all parameters at once, so that a layer stays one function
            for value in run.values:
                for param in _parameters(value, chain):
                    view(run, param, node)
        if any(r in source for r in node.refs()):
            node = node.reading([view(by_use[at, r], r, node) if r in source else r for r in node.refs()])
        made.append(node)
    gone = (chain.keys() | gathers.keys()) - used
    return replace(
        program, nodes=tuple(made), types={k: t for k, t in types.items() if k not in gone},
        shardings={k: s for k, s in shardings.items() if k not in gone}, global_types={k: t for k, t in wholes.items() if k not in gone},
    )  # fmt: skip


def _views(program: LocalProgram, gathers: dict[str, Node]) -> tuple[dict[str, Node], dict[str, str]]:
    """The nodes that only look at what was gathered, by value; and for each such value, and the gathered ones, where it lies."""
    chain: dict[str, Node] = {}
    source = {full: full for full in gathers}
    for node in program.nodes:
        refs = [r for r in node.refs() if r in source]
        if refs and len(node.outs) == 1 and len(node.refs()) == 1 and may_view(node):
            chain[node.name] = node
            source[node.name] = source[refs[0]]
    return chain, source


def _parameters(value: str, chain: dict[str, Node]) -> list[str]:
    """The parameters that a view looks at."""
    if value not in chain:
        return []
    node = chain[value]
    return [value] if node.op == "autopar.member" else [p for r in node.refs() for p in _parameters(r, chain)]


def _find_runs(uses: list[tuple[int, str, str]], tasks: list[str], again: bool) -> tuple[list[_Run], dict[tuple[int, str], _Run]]:
    """Runs of uses (place, value, what it lies in) in the order of their first ones, and the run of every use.

    A gap in which two other buckets are used ends a run, unless it isn't to be gathered ``again``.
    """
    runs: list[_Run] = []
    found: dict[tuple[int, str], _Run] = {}
    latest: dict[tuple[str, str], _Run] = {}
    seen: dict[str, list[tuple[int, str]]] = {}  # by task: uses so far
    for at, value, full in uses:
        task = tasks[at]
        run = latest.get((full, task))
        if run is None or again and _are_between(seen[task], run.last, full):
            latest[full, task] = run = _Run(full, task, at, at)
            runs.append(run)
        run.last = at
        run.values[value] = None
        found[at, value] = run
        seen.setdefault(task, []).append((at, full))
    return runs, found


def _are_between(uses: list[tuple[int, str]], last: int, full: str) -> bool:
    """Whether two other buckets are used after a place."""
    others: set[str] = set()
    for at, other in reversed(uses):
        if at <= last:
            return False
        others.add(other)
        if len(others - {full}) == 2:
            return True
    return False


def _starts(runs: list[_Run], uses: list[tuple[int, str, str]], tasks: list[str]) -> dict[int, list[_Run]]:
    """Where gathers are started: where the stretch of uses of one bucket begins that a run follows, the first of a task with the task."""
    found: dict[int, list[_Run]] = {}
    by_first: dict[tuple[str, int], list[_Run]] = {}
    for run in runs:
        by_first.setdefault((run.full, run.first), []).append(run)
    stretch: dict[str, tuple[str, int, int]] = {}  # by task: the bucket of the last use, where its stretch began, and that before it
    for at, _, full in uses:
        task = tasks[at]
        last, begun, before = stretch.get(task, ("", tasks.index(task), tasks.index(task)))
        if full != last:
            stretch[task] = last, begun, before = full, at, begun
        for run in by_first.pop((full, at), ()):
            found.setdefault(before, []).append(run)
    return found
