"""A stage's program as one readable module: a function for every task, and the segments that they share.

A task takes the values that it reads and gives those that others read; who keeps them, for how long, and who gets them is the executor's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopar.codegen.emit import _MADE_IN_PLACE, Emitter, Script, _Statement
from autopar.codegen.memory import overwritten
from autopar.codegen.render import assign, bracket, call, offset
from autopar.ir.program import Node, Offset, Output, Region
from autopar.ir.stage import StageProgram, find_weight, tasks_of
from autopar.runtime.stage import Message, StageSpec, Task

T = TypeVar("T")

#: names of the functions.
FUNCTIONS = {
    "pre": "before", "F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights", "B last": "backward_last",
    "W last": "backward_weights_last", "post": "after",
}  # fmt: skip
_TOLD = {
    "pre": "What a step needs once, before its microbatches.",
    "F": "The forward of one microbatch.",
    "B": "The backward of one microbatch.",
    "I": "Of a microbatch's backward what earlier stages wait for.",
    "W": "The rest of a microbatch's backward.",
    "B last": "The backward of the last microbatch: buckets are reduced as soon as their sums are complete.",
    "W last": "The rest of the last microbatch's backward: buckets are reduced as soon as their sums are complete.",
    "post": "What a step makes once, after its microbatches.",
}


@dataclass(frozen=True)
class StageModule:
    """An emitted module of a stage: ``source`` defines ``constants(comm, consts)``, the segments and the tasks of ``spec``."""

    source: str
    spec: StageSpec
    segments: int
    calls: int
    scripts: Mapping[str, Script] = field(default_factory=dict, compare=False, repr=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The paths of the model's outputs."""
        return tuple(path for path, _ in self.spec.outputs)


def beside(kind: str, tasks: dict[str, T]) -> dict[str, T]:
    """The other tasks of a microbatch or step in which one runs: its backward is B, or I and W, each as the last or not."""
    whole, parts = ("B", "B last"), ("I", "W", "W last")
    apart = {
        "B": ("B last", *parts), "B last": ("B", *parts), "I": whole, "W": ("W last", *whole), "W last": ("W", *whole),
    }.get(kind, ())  # fmt: skip
    return {k: task for k, task in tasks.items() if k != kind and k not in apart}


@dataclass
class _Body:
    """A task as lines: what it reads of others, the constants among it, and what it makes for others, in order."""

    lines: list[str]
    reads: tuple[str, ...]
    constants: tuple[str, ...]
    makes: tuple[str, ...]
    script: Script


def emit_stage(program: StageProgram, *, kinds: Container[str] = "B", title: str = "", tensor_sites: bool = False) -> StageModule:
    """The module of a stage. ``kinds``: the tasks that its backward comes as, B as a whole, I and W apart, or all three."""
    return _StageEmitter(program, title, tensor_sites, kinds=kinds).emit()


@dataclass
class _StageEmitter(Emitter):
    kinds: Container[str] = "B"
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # total -> its bucket's flat tensor, and its place there
    made: dict[str, Node] = field(default_factory=dict)  # such a total -> the op
    into: dict[str, Node] = field(default_factory=dict)  # share of a total -> the op that makes it, right into the total

    def emit(self) -> StageModule:
        p = self.program
        assert isinstance(p, StageProgram)
        self.buckets = {i.name for i in p.inputs_of("bucket")}
        packs = {n.where.module: n.name for n in p.nodes if n.op == "autopar.pack"}
        self.find_flats(packs)
        fixed = sorted(self.constant_nodes())
        main = [n for k, n in enumerate(p.nodes) if k not in set(fixed)]
        self.uses = Counter(r for n in main for r in n.refs())
        self.find_places(main)
        tasks = self.tasks(p, main)
        unchanging = [o for k in fixed for o in p.nodes[k].outs if o] + [i.name for i in p.inputs if i.kind in ("const", "tangent")]
        bodies = {kind: self.task(nodes, beside(kind, tasks), set(unchanging)) for kind, nodes in tasks.items()}
        used = {v for b in bodies.values() for v in b.constants} | {o.value for o in p.outputs}
        shared = [v for v in unchanging if v in used]
        specs = self.specs(bodies)
        lines = self.header() + self.constants([p.nodes[k] for k in fixed], shared)
        lines += [line for text in self.texts for line in [*text, "", ""]]
        for kind, body in bodies.items():
            lines += [*self.function(kind, body, shared), "", ""]
        while not lines[-1]:
            lines.pop()
        scripts = {kind: body.script for kind, body in bodies.items()}
        return StageModule("\n".join(lines) + "\n", self.spec(p, specs, main, shared), len(self.texts), self.calls, scripts)

    def tasks(self, p: StageProgram, main: list[Node]) -> dict[str, list[Node]]:
        """Nodes by task, in order; a total takes its share right after that was made."""
        running = tasks_of(p, find_weight(p))
        shares: dict[str, list[Node]] = {}
        made = {o for n in main for o in n.outs if o}
        for node in main:
            if node.op == "autopar.accumulate":
                shares.setdefault(node.refs()[0], []).append(node)
        out: dict[str, list[Node]] = {k: [] for k in ("pre", "F", "B", "I", "W", "post") if k not in "BIW" or k in self.kinds}
        last: dict[str, list[Node]] = {k: [] for k in out}
        for node in main:
            if node.op == "autopar.accumulate" and node.refs()[0] in made:
                continue
            task = running[node.name]
            for kind in {task, "B" if task in ("I", "W") else task} & out.keys():
                out[kind].append(node)
                for value in node.outs:
                    # what a collective gives is added when the task has nothing else to do
                    (last[kind] if node.op.startswith("comm.") else out[kind]).extend(shares.get(value, ()) if value else ())
        for kind, nodes in last.items():
            out[kind] += nodes
        early = self.early(p, out)
        for kind in [k for k in ("B", "W") if k in out and early]:
            out[f"{kind} last"] = self.interleaved(out[kind], early)
        gone = {n.name for n in early} if early else set()
        out["post"] = [n for n in out.pop("post") if n.name not in gone]
        return out

    def early(self, p: StageProgram, tasks: dict[str, list[Node]]) -> list[Node]:
        """What follows the microbatches and can begin in the last of their backwards: it reads no other stage's values."""
        backward = {o for kind in "BW" for n in tasks.get(kind, ()) for o in n.outs if o}
        elsewhere = {i.name for i in p.inputs_of("received")} | {o for k in "FI" for n in tasks.get(k, ()) for o in n.outs if o}
        known, found = set(backward), []
        late = elsewhere - backward
        for node in tasks["post"]:
            if any(r in late for r in node.refs()):
                late.update(o for o in node.outs if o)
            elif any(r in known for r in node.refs()):
                known.update(o for o in node.outs if o)
                found.append(node)
        return found

    @staticmethod
    def interleaved(nodes: list[Node], early: list[Node]) -> list[Node]:
        """A backward with what follows it, each node as soon as what it reads is there."""
        made = {o for n in (*nodes, *early) for o in n.outs if o}
        there: set[str] = set()
        out, left = [], list(early)
        for node in nodes:
            out.append(node)
            there.update(o for o in node.outs if o)
            while ready := [n for n in left if all(r in there or r not in made for r in n.refs())]:
                out += ready
                there.update(o for n in ready for o in n.outs if o)
                left = [n for n in left if n not in ready]
        return out + left

    def mesh(self) -> str:
        p = self.program
        assert isinstance(p, StageProgram)
        return f"{super().mesh()}, for stage {p.stage} of {p.stages}"

    def find_places(self, nodes: list[Node]) -> None:
        """The totals that are gradients: they are summed in their bucket, and shares that an op can add to one are added as they are made.

        A total in memory of its own would be as large as all gradients of the stage, and a fresh one in each turn; a share too. That of a
        table is nearly all zeros besides: a microbatch has few of its rows.
        """
        p = self.program
        producers = {o: n for n in nodes for o in n.outs if o}
        kept = {o.value for o in p.outputs}
        for pack in nodes:
            if pack.op != "autopar.pack":
                continue
            offset = 0
            for ref in pack.args[0]:
                kind, total = p.types[ref.name], producers.get(ref.name)
                place, offset = f"ops.member({pack.name}, {offset}, {kind.shape})", offset + math.prod(kind.shape)
                if total is None or total.op != "autopar.accumulate" or total.args[1] != "sum" or ref.name in self.places:
                    continue
                if kind.dtype != p.types[pack.name].dtype:
                    continue
                self.places[ref.name] = (pack.name, place)
                (share,) = total.refs()
                made = producers.get(share)
                if made is not None and made.op in _MADE_IN_PLACE and self.uses[share] == 1 and share not in kept:
                    self.into[share] = made

    def accumulate(self, node: Node) -> None:
        if node.name not in self.places:
            return super().accumulate(node)
        total, (flat, place), shares = node.name, self.places[node.name], list(node.refs())
        made = self.made.get(total)
        if made is None:
            first, more = assign(total, f"{place}.copy_", shares, 8), assign("", f"{total}.add_", shares, 8)
        elif made.op == "aten.mm.default":
            first = assign(total, "torch.mm", [*shares, f"out={place}"], 8)
            more = assign("", f"{total}.addmm_", shares, 8)
        else:
            function, args = call(made, lambda v: v, lambda v: offset(v) if isinstance(v, Offset) else str(v.value))
            first = assign(total, function, [*(args or ()), f"out={place}"], 8)
            more = assign("", function, [*(args or ()), f"total={total}"], 8)
        lines = [f"    if {total} is None:", *first, "    else:", *more]
        self.statements.append(_Statement(lines, [total], [*shares, flat], "body", "accumulate", (node,)))
        return None

    def joined(self, nodes: list[Node]) -> list[Node]:
        """The nodes of a task, a share that its op adds to a total together with the total."""
        here = {n.name for n in nodes if n.name in self.into}
        out: list[Node] = []
        for node in nodes:
            if node.op == "autopar.accumulate" and node.refs()[0] in here:
                self.made[node.name] = made = self.into[node.refs()[0]]
                node = node.with_args(*made.args, node.args[1])
            if node.name not in here:
                out.append(node)
        return out

    def is_begun(self, node: Node) -> bool:
        """A task that runs for every microbatch gathers what it needs itself."""
        return node.args[0].name in self.buckets and self.program.zero < 3

    def find_born(self, nodes: list[Node]) -> None:
        """No gradient of a microbatch is made in its bucket, which holds sums."""

    def indent(self, region: Region) -> int:
        return 4

    def task(self, nodes: list[Node], others: dict[str, list[Node]], unchanging: set[str]) -> _Body:
        """The body of the function of a task's nodes, beside the tasks that run in the same step."""
        p = self.program
        apart, nodes = nodes, self.joined(nodes)
        inside = [o for n in nodes for o in n.outs if o]
        elsewhere = {r for theirs in others.values() for n in theirs for r in n.refs()}
        leaving = elsewhere | {o.value for o in p.outputs} | {n.name for n in nodes if n.op == "autopar.accumulate"}
        makes = tuple(v for v in dict.fromkeys(inside) if v in leaving)
        self.statements, self.open, self.reducing = [], set(), []
        if not self.tensor_sites:
            self.over = overwritten(replace(p, outputs=tuple(Output(v, "sent", "") for v in makes)), apart)
        self.region("body", nodes, set(makes))
        reads: dict[str, None] = {}
        defined: set[str] = set()
        last: dict[str, int] = {}
        for n, s in enumerate(self.statements):
            # a total is made from itself
            for v in (*s.reads, *(s.defines if s.starts == "accumulate" else ())):
                if v not in defined:
                    reads[v] = None
            defined.update(s.defines)
            last.update(dict.fromkeys((*s.reads, *s.defines), n))
            last.update((self.gathered[v], n) for v in (*s.reads, *s.defines) if v in self.gathered)
        lines: list[str] = []
        for n, s in enumerate(self.statements):
            lines += s.lines
            gone = [v for v, at in last.items() if at == n and v not in makes and v not in unchanging and v != "key"]
            if n < len(self.statements) - 1:
                s.gone = gone
                lines += self.end(gone, 4)
            else:  # the function returns: only what was taken is left to be given back
                lines += self.given(gone, 4)
        read = tuple(v for v in reads if v not in unchanging and v != "key")
        return _Body(lines, read, tuple(v for v in reads if v in unchanging), makes, self.script())

    def function(self, kind: str, body: _Body, shared: list[str]) -> list[str]:
        lines = [f"def {FUNCTIONS[kind]}(comm, given, constants, key, mb):", f'    """{_TOLD[kind]}"""']
        if any("c[" in line for line in body.lines):
            lines.append("    c = comm.coords")
        if body.reads:
            lines += bracket("(", list(body.reads), 4)
            lines[-1] += " = given"
            lines.append("    given.clear()")
        lines += [f"    {v} = constants[{shared.index(v)}]" for v in body.constants]
        return [*lines, *body.lines, *(bracket("return (", list(body.makes), 4) if body.makes else ["    return ()"])]

    def specs(self, bodies: dict[str, _Body]) -> dict[str, Task]:
        kept = {o.value for o in self.program.outputs if o.kind != "sent"}
        order = list(bodies)

        def frees(kind: str, body: _Body) -> frozenset[str]:
            later = {v for k, b in beside(kind, bodies).items() if order.index(k) > order.index(kind) for v in b.reads}
            return frozenset(v for v in body.reads if v not in later and v not in kept)

        return {kind: Task(FUNCTIONS[kind], body.reads, frees(kind, body), body.makes) for kind, body in bodies.items()}

    def spec(self, p: StageProgram, tasks: dict[str, Task], main: list[Node], shared: list[str]) -> StageSpec:
        inputs = []
        for i in p.inputs:
            if i.kind == "bucket":
                gathered = self.gathers.get(i.name)
                inputs.append((gathered, "gather", i.path) if gathered else (i.name, "bucket", i.path))
            elif i.kind in ("param", "buffer", "batch"):
                inputs.append((i.name, i.kind, i.path))
        packed = {n.where.module for n in main if n.op == "autopar.pack"}
        inputs += [(name, "flat", b.name) for b, name in zip((b for b in p.buckets if b.name in packed), self.flats, strict=True)]
        per_turn = {o for kind, t in tasks.items() if kind in ("F", "B", "I", "W") for o in t.makes}
        totals = tuple(n.name for n in main if n.op == "autopar.accumulate")
        came = {c.value for c in p.crossings if c.target == p.stage and c.made in ("F", "I", "W")}
        messages = tuple(
            Message(c.value, c.source, c.made, c.target, c.wanted, p.types[c.value].dtype, p.types[c.value].shape) for c in p.crossings
        )
        return StageSpec(
            p.stage, tasks, tuple(inputs), totals, frozenset((per_turn | came) - set(totals)), messages,
            tuple(i.path for i in p.inputs_of("const")), tuple(shared), next((o.value for o in p.outputs_of("loss")), None),
            tuple((o.path, o.value) for o in p.outputs_of("bucket")), tuple((o.path, o.value) for o in p.outputs_of("buffer")),
            tuple((o.path, o.value) for o in p.outputs_of("output")),
            tuple(dict.fromkeys(n.args[1] for n in main if n.op.startswith("comm."))),
        )  # fmt: skip
