"""Stages: a local program cut along the model, one program for every stage, and what crosses between them.

A forward node belongs to the stage in which its module was called; a backward node to that of the forward node whose gradient it computes,
as autograd's numbers tell. Dataflow has the last word: forward edges never go down, backward edges never up.

- What depends on no parameter (constants, masks, counts of labels, random numbers) is computed by every stage that reads it.
- A trained parameter lives on one stage, the first that reads it; a buffer that the step writes on the stage that writes it. Others that
  read it receive it once a step, so that a tied parameter needs no rule of its own.
- A sum of a parameter's gradients from several stages is taken apart: each stage sums its own over the microbatches, and what crosses is
  one sum a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import PlanError, VerifyError
from autopar.ir.local import LocalProgram
from autopar.ir.program import Input, Node, Output, Program, Ref, fresh_name
from autopar.ir.stage import TASKS, Crossing, StageProgram, tasks_of


@dataclass(frozen=True)
class Points:
    """Where all stages but the first begin: positions among the forward nodes, and autograd's numbers there (none without gradients)."""

    positions: tuple[int, ...]
    orders: tuple[int, ...]


def cut_points(program: Program, cuts: Sequence[str]) -> Points:
    """Where the modules of these paths begin, in a program that calls them.

    Raises:
        PlanError: a path that no node runs in, or paths that aren't in the order in which the model calls them.
    """
    forward = [n for n in program.nodes if n.phase == "forward" and n.region == "body"]
    positions: list[int] = []
    for path in cuts:
        at = next((k for k, n in enumerate(forward) if path and f"{n.where.module}.".startswith(f"{path}.")), None)
        if at is None:
            lifted = any(f"{n.where.module}.".startswith(f"{path}.") for n in program.nodes)
            raise PlanError(
                f"no stage can begin at {path!r}: nothing that depends on samples is computed there",
                why="what it computes is the same for all samples" if path and lifted else "",
                hint="the path of a module that the forward calls; of one in several places the first",
            )
        if at <= (positions[-1] if positions else 0):
            before = f"stage {len(positions)}, {cuts[len(positions) - 1]!r}," if positions else "the model"
            raise PlanError(
                f"stage {len(positions) + 1} can't begin at {path!r}: {before} begins there or later",
                hint="cuts= in the order in which the model calls its modules",
            )
        positions.append(at)
    if not any(n.phase == "backward" for n in program.nodes):
        return Points(tuple(positions), ())
    # what doesn't depend on samples has left the loop, and may be what the module begins with
    orders = [forward[at].where.order for at in positions]
    for k, path in enumerate(cuts):
        inside = [n.where.order for n in program.nodes if n.phase == "forward" and f"{n.where.module}.".startswith(f"{path}.")]
        orders[k] = min(n for n in (*inside, orders[k]) if n >= 0)
    return Points(tuple(positions), tuple(orders))


def cut_stages(program: LocalProgram, points: Points, homes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[StageProgram, ...]:
    """One program for every stage.

    Args:
        homes: the stages that hold a parameter or buffer, by path, where that is decided already.
    """
    return _Cutter(program, points, homes or {}).run()


class _Cutter:
    def __init__(self, program: LocalProgram, points: Points, given: Mapping[str, tuple[int, ...]]) -> None:
        self.points, self.stages, self.given = points, len(points.positions) + 1, given
        self.free = _free(program)
        self.program = self.peel(program)
        self.free = _free(self.program)
        self.producer = self.program.producers()
        self.stage = self.place(self.program)
        self.users = self.program.users()
        self.home = self.homes()
        self.named: dict[tuple[str, str], str] = {(i.kind, i.path): i.name for i in self.program.inputs}
        self.running = tasks_of(self.program)

    # -- which stage

    def place(self, program: LocalProgram) -> dict[str, int]:
        """The stage of every value that some node which isn't free makes."""
        found: dict[str, int] = {}
        backward: set[str] = set()
        position = 0
        for node in program.nodes:
            inside = node.phase == "forward" and node.region == "body"
            here, position = position, position + inside
            if node.name in self.free:
                continue
            above = [found[r] for r in node.refs() if r in found and (node.phase == "forward" or r in backward)]
            if self.points.orders and node.where.order >= 0:
                at = bisect_right(self.points.orders, node.where.order)
            elif inside:
                at = bisect_right(self.points.positions, here)
            else:
                at = max((found[r] for r in node.refs() if r in found), default=0)
            at = max([at, *above]) if node.phase == "forward" else min([at, *above])
            for out in node.outs:
                if out:
                    found[out] = at
                    if node.phase == "backward":
                        backward.add(out)
        self.join(program, found)
        return found

    def join(self, program: LocalProgram, found: dict[str, int]) -> None:
        """Puts sums of the forward over microbatches that meet behind the loop on one stage, the latest of theirs; so that no stage's end
        waits for that of another one which waits for the loss."""
        group: dict[str, set[str]] = {}
        for node in program.nodes:
            late = node.region == "post" or node.op == "autopar.accumulate"
            if node.phase != "forward" or not late or node.name in self.free:
                continue
            joined = {o for o in node.outs if o}.union(*(group[r] for r in node.refs() if r in group))
            group.update(dict.fromkeys(joined, joined))
        for joined in group.values():
            found.update(dict.fromkeys(joined, max(found[v] for v in joined)))

    def peel(self, program: LocalProgram) -> LocalProgram:
        """Sums over microbatches of gradients that come from several stages, each stage's own summed first."""
        if program.microbatches == 1:
            return program
        while True:
            stage = self.place(program)
            producers, uses = program.producers(), {}  # type: ignore[var-annotated]
            for node in program.nodes:
                for r in node.refs():
                    uses[r] = uses.get(r, 0) + 1
            types, shardings, globals_ = dict(program.types), dict(program.shardings), dict(program.global_types)
            nodes: list[Node] = []
            gone: set[str] = set()
            for node in program.nodes:
                value = node.refs()[0] if node.op == "autopar.accumulate" else ""
                add = producers.get(value)
                parts = [] if add is None or add.op != "aten.add.Tensor" or add.kwargs else list(add.refs())
                apart = (
                    len(parts) == 2 and node.args[1] == "sum" and node.phase == "backward" and uses[value] == 1
                    and all(p in stage and producers[p].region == "body" for p in parts) and stage[parts[0]] != stage[parts[1]]
                    and all(types[p] == types[value] for p in parts)
                )  # fmt: skip
                if not apart:
                    nodes.append(node)
                    continue
                assert add is not None
                gone.add(value)
                sums = []
                for part in parts:
                    name = fresh_name(f"{part}_sum", types)
                    types[name] = types[part]
                    if part in shardings:
                        shardings[name], globals_[name] = shardings[part], globals_[part]
                    where = producers[part].where
                    nodes.append(replace(node, args=(Ref(part), *node.args[1:]), outs=(name,), where=where))
                    sums.append(Ref(name))
                nodes.append(Node("aten.add.Tensor", tuple(sums), node.outs, (), "backward", add.where, "post"))
            if not gone:
                return program
            kept = [n for n in nodes if n.name not in gone]
            for name in gone:
                del types[name]
                shardings.pop(name, None)
                globals_.pop(name, None)
            # a sum over microbatches stands behind the loop, where all of its turns have been
            program = replace(program, nodes=tuple(kept), types=types, shardings=shardings, global_types=globals_)

    def homes(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold an input which not every stage may hold for itself: trained parameters, buffers that are written."""
        program = self.program
        trained = {o.path for o in program.outputs_of("grad")}
        written = {o.path: o.value for o in program.outputs_of("buffer")}
        found: dict[str, tuple[int, ...]] = {}
        for i in program.inputs:
            if i.kind in ("param", "buffer") and i.path in self.given:
                found[i.name] = self.given[i.path]
            elif i.kind == "param" and i.path in trained:
                found[i.name] = (min(self.readers(i.name), default=self.stages - 1),)
            elif i.kind == "buffer" and i.path in written:
                value = written[i.path]
                found[i.name] = (self.stage[value] if value in self.stage else min(self.readers(i.name), default=0),)
        return found

    def maker(self, value: str, stage: int) -> int | None:
        """The stage from which another one has a value that it can't make for itself; None where every stage makes it."""
        if value in self.home:
            return stage if stage in self.home[value] else self.home[value][0]
        return self.stage.get(value)

    def readers(self, name: str) -> set[int]:
        """The stages that read a value, if only through what every stage computes for itself."""
        out: set[int] = set()
        for node in self.users[name]:
            if node.name in self.free:
                for o in node.outs:
                    out |= self.readers(o) if o else set()
            else:
                out.add(self.stage[node.name])
        return out

    # -- one stage

    def run(self) -> tuple[StageProgram, ...]:
        wanted = [self.gather(s) for s in range(self.stages)]
        crossings = [c for found in wanted for c in found[1]]
        return tuple(self.make(s, nodes, outputs, crossings) for s, (nodes, _, outputs) in enumerate(wanted))

    def task(self, name: str) -> str:
        """The task that makes a value: of an input ``pre``; a sum over microbatches is there after the last."""
        node = self.producer.get(name)
        if node is None:
            return "pre"
        if node.op == "autopar.accumulate":
            return "post"
        return self.running[node.name]

    def gather(self, stage: int) -> tuple[list[Node], list[Crossing], list[Output]]:
        """A stage's nodes in order, what it receives, and its outputs."""
        program = self.program
        outputs = [o for o in program.outputs if self.is_output_of(o, stage)]
        first: dict[str, str] = {}  # value that comes from elsewhere -> the first task that reads it
        own: set[str] = set()
        left: list[tuple[str, str]] = [(o.value, "post") for o in outputs]
        left += [
            (r, self.running[n.name]) for n in program.nodes if n.name not in self.free and self.stage[n.name] == stage for r in n.refs()
        ]
        seen: set[tuple[str, str]] = set()
        while left:
            value, task = left.pop()
            if (value, task) in seen:
                continue
            seen.add((value, task))
            at = self.maker(value, stage)
            if at is not None and at != stage:
                if value not in first or TASKS.index(task) < TASKS.index(first[value]):
                    first[value] = task
            elif value in self.free and value in self.producer:
                own.add(self.producer[value].name)
                left += [(r, self.running[self.producer[value].name]) for r in self.producer[value].refs()]
        nodes = [n for n in program.nodes if n.name in own or (n.name not in self.free and self.stage[n.name] == stage)]
        received = [Crossing(v, self.maker(v, stage) or 0, self.task(v), stage, task) for v, task in first.items()]
        order = {o: n for n, node in enumerate(program.nodes) for o in node.outs if o}
        received.sort(key=lambda c: (order.get(c.value, -1), c.value))
        for c in received:
            up = TASKS.index(c.made) <= TASKS.index(c.wanted)
            if not up or (c.made == c.wanted == "F" and c.source > stage) or (c.made == c.wanted == "I" and c.source < stage):
                raise VerifyError(f"{c.value} would cross from {c.made} of stage {c.source} to {c.wanted} of stage {stage}")
        return nodes, received, outputs

    def is_output_of(self, output: Output, stage: int) -> bool:
        """Gradients go where their parameter lives, buffers where they are written, the loss and the model's outputs to all."""
        kind = {"grad": "param", "buffer": "buffer"}.get(output.kind)
        return kind is None or stage in self.home[self.named[kind, output.path]]

    def make(self, stage: int, nodes: list[Node], outputs: list[Output], crossings: list[Crossing]) -> StageProgram:
        program = self.program
        came = [c for c in crossings if c.target == stage]
        went = [c for c in crossings if c.source == stage]
        received = {c.value: c for c in came}
        read = {r for n in nodes for r in n.refs()} | {o.value for o in outputs} | {c.value for c in went}
        inputs = [i for i in program.inputs if i.name in read and i.name not in received]
        held = {i.name for i in inputs}
        idle = [i for i in program.inputs if i.kind in ("param", "buffer") and i.name not in held and i.name not in received]
        inputs += [i for i in idle if stage in self.home.get(i.name, () if self.users[i.name] else (0,))]
        inputs += [Input(c.value, "received", f"{c.source}.{c.made}") for c in came]
        sent = [Output(c.value, "sent", f"{c.target}.{c.wanted}") for c in went]
        kept = {i.name for i in inputs} | {o for n in nodes for o in n.outs if o}
        consts = {i.path for i in inputs if i.kind == "const"}
        return StageProgram(
            tuple(inputs), tuple(nodes), (*outputs, *sent), {k: t for k, t in program.types.items() if k in kept},
            {p: t for p, t in program.consts.items() if p in consts}, program.unreached, program.output_tree, program.microbatches,
            program.mesh, {k: s for k, s in program.shardings.items() if k in kept},
            {k: t for k, t in program.global_types.items() if k in kept}, (), program.zero, stage, self.stages, (*came, *went),
        )  # fmt: skip


def _free(program: LocalProgram) -> set[str]:
    """Values that every stage may compute for itself: they depend on no parameter and on no buffer that the step writes."""
    written = {o.path for o in program.outputs_of("buffer")}
    found = {i.name for i in program.inputs if i.kind != "param" and not (i.kind == "buffer" and i.path in written)}
    inputs = set(found)
    for node in program.nodes:
        if all(r in found for r in node.refs()):
            found.update(o for o in node.outs if o)
    return found - inputs
