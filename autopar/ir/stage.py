"""StageProgram: what the ranks of one stage run, the tasks that its nodes belong to, and what crosses to other stages."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.local import LocalProgram
from autopar.ir.program import Program

#: tasks of a stage in the order in which they run: once a step, for every microbatch (F, I, W), once a step.
TASKS = ("pre", "F", "I", "W", "post")


@dataclass(frozen=True)
class Crossing:
    """A value that a task of one stage makes and a task of another needs; one message however many read it there."""

    value: str
    source: int
    made: str
    target: int
    wanted: str


@dataclass(frozen=True)
class StageProgram(LocalProgram):
    """What the ranks of one stage run.

    Inputs of kind ``received`` come from other stages; outputs of kind ``sent`` go there.
    """

    stage: int = 0
    stages: int = 1
    crossings: tuple[Crossing, ...] = ()


def tasks_of(program: Program, weight: frozenset[str] = frozenset()) -> dict[str, str]:
    """The task in which a node runs, by the name of its first value. ``accumulate`` runs with the node that makes its share."""
    found: dict[str, str] = {}
    for node in program.nodes:
        if node.op == "autopar.accumulate":
            found[node.name] = found.get(node.refs()[0], "F")
            continue
        task = node.region if node.region != "body" else "F" if node.phase == "forward" else "W" if node.name in weight else "I"
        found.update((o, task) for o in node.outs if o)
    return found


def find_weight(program: StageProgram) -> frozenset[str]:
    """The backward nodes (by the name of their first value) that no other stage waits for."""
    producers = program.producers()
    left = [c.value for c in program.crossings if c.source == program.stage and c.made == "I"]
    awaited: set[str] = set()
    while left:
        node = producers.get(left.pop())
        if node is None or node.name in awaited:
            continue
        awaited.add(node.name)
        left += list(node.refs())
    return frozenset(n.name for n in program.nodes if n.phase == "backward" and n.region == "body" and n.name not in awaited)
