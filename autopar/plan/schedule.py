"""``Plan(schedule="search")``: the order of F, I and W that the search finds for the predicted times and bytes of a model's own stages."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.device import Device
from autopar.errors import PlanError
from autopar.ir.program import Program
from autopar.ir.stage import StageProgram, find_weight, tasks_of
from autopar.plan.stages import node_seconds
from autopar.rules import Rules
from autopar.rules.atoms import Atoms
from autopar.schedule.action import Schedule
from autopar.schedule.search import search

#: the name by which a plan asks for it.
SEARCH = "search"


def search_schedule(
    programs: Sequence[StageProgram], ranks: int, split: Program, atoms: Atoms, rules: Rules, device: Device, microbatches: int
) -> Schedule:
    """A schedule of one stage a rank. No rank holds more than the first of 1F1B does: as many microbatches as there are stages.

    Args:
        split: the program with global shapes that the stages were cut from; its nodes' predicted times are compared, so that it doesn't
            matter that a rank has a piece of each.

    Raises:
        PlanError: ranks hold several stages.
    """
    if len(programs) != ranks:
        raise PlanError(
            f"{len(programs)} stages on pp={ranks}: a schedule is searched for one stage a rank", hint=f"cuts= with {ranks - 1} paths"
        )
    seconds = {o: s for node, s in zip(split.nodes, node_seconds(split, atoms, rules, device), strict=True) for o in node.outs if o}
    times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    activations: list[float] = []
    kept: list[float] = []
    for program in programs:
        weight = find_weight(program)
        task = tasks_of(program, weight)
        for kind, row in times.items():
            row.append(sum(seconds.get(n.name, 0.0) for n in program.nodes if task.get(n.name) == kind and n.op != "autopar.accumulate"))
        held: dict[str, set[str]] = {"I": set(), "W": set()}
        for node in program.nodes:
            if (reader := task.get(node.name)) in held and node.op != "autopar.accumulate":
                held[reader] |= {r for r in node.refs() if task.get(r) in ("F", "I") and task[r] != reader}
        later = sum(program.types[v].nbytes for v in held["W"])
        whole = sum(program.types[v].nbytes for v in held["I"] | {v for v in held["W"] if task[v] == "F"})
        activations.append(float(max(whole, later, 1)))
        kept.append(float(max(later, 1)))
    unit = sum(map(sum, times.values())) / (3 * len(programs) or 1) or 1.0  # the search takes times of any unit
    f, i, w = (tuple(max(s / unit, 1e-6) for s in row) for row in times.values())
    limits = [len(programs) * a for a in activations]
    return search(len(programs), microbatches, f, i, w, memory=limits, activations=activations, kept=kept)
