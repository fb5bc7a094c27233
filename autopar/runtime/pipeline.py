"""Running the stages of a rank: one list of instructions, lowered from a schedule, whichever that is. Knows nothing of the compiler."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm import Comm, Handle
from autopar.runtime.executor import CompileSegment, Spec, State, compiled_once, load_names, waited
from autopar.runtime.stage import Message, StageSpec
from autopar.schedule.edge import Edge
from autopar.schedule.lower import Compute, Instruction, Receive, Send

#: sends that may be under way in one channel: the tensors of older ones are waited for, and freed.
UNDER_WAY = 2


@dataclass(frozen=True)
class Span:
    """When a rank ran a task, or was sending (kind ``send``): seconds since its step began.

    ``waited``: seconds before ``begin`` in which it waited for what it needed of other ranks.
    """

    stage: int
    kind: str
    microbatch: int
    begin: float
    end: float
    waited: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.kind not in ('pre', 'post') else ''}"

    def later(self, seconds: float) -> Span:
        """The same on a clock that was started earlier."""
        return replace(self, begin=self.begin + seconds, end=self.end + seconds)


@dataclass
class _Values:
    """A stage's values: those of the step, and those of every microbatch under way."""

    once: dict[str, Any]
    turns: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def find(self, name: str, microbatch: int) -> Any:
        turn = self.turns.get(microbatch, {})
        return turn[name] if name in turn else self.once[name]


class _Stage:
    """A stage's module, loaded."""

    def __init__(
        self, source: str, spec: StageSpec, comm: Comm, consts: Mapping[str, Tensor], name: str, compile_segment: CompileSegment | None
    ) -> None:
        self.source, self.spec = source, spec
        self.names = load_names(source, name, {t.function for t in spec.tasks.values()}, compile_segment)
        self.consts = tuple(consts[path].to(comm.device) for path in spec.consts)
        self.constants: tuple[Tensor, ...] | None = None
        self.outputs = {v for v in (spec.loss,) if v} | {v for _, v in (*spec.grads, *spec.buffers, *spec.outputs)}
        #: values that something on this stage reads
        self.read = {v for t in spec.tasks.values() for v in t.reads} | self.outputs
        self.came: dict[Edge, list[Message]] = {}
        self.went: dict[Edge, list[Message]] = {}
        for m in spec.messages:
            at = self.went if m.source == spec.stage else self.came
            at.setdefault(edge_of(m), []).append(m)


def edge_of(message: Message) -> Edge:
    """The edge of a schedule that a message belongs to."""
    return Edge(message.source, message.made, message.target, message.wanted)


class Pipeline:
    """The stages of one rank.

    Args:
        modules: by stage: source, spec and the constants by path.
        placement: the coordinate along ``pp`` of every stage.
        instructions: what this rank does in a step, in order.
        spec: of all that the rank holds.
        batch_paths: the paths of a batch's tensors in order.
    """

    def __init__(
        self,
        modules: Mapping[int, tuple[str, StageSpec, Mapping[str, Tensor]]],
        placement: Sequence[int],
        instructions: Sequence[Instruction],
        spec: Spec,
        batch_paths: Sequence[str],
        comm: Comm,
        *,
        compile_segment: CompileSegment | None = None,
    ) -> None:
        compile_segment = None if compile_segment is None else compiled_once(compile_segment)
        self.comm, self.placement, self.instructions = comm, tuple(placement), tuple(instructions)
        self.stages = {
            s: _Stage(source, spec, comm, consts, f"<autopar stage {s}>", compile_segment) for s, (source, spec, consts) in modules.items()
        }
        self.spec, self.batch_paths = spec, tuple(batch_paths)
        index = {b.name: k for k, b in enumerate(spec.buckets)}
        #: the buckets that the stages take as gathers under way, in the order in which they wait for them
        self.gathers = [index[name] for name in spec.gathers]
        everyone = comm.exchange(spec.axes, site="axes")
        comm.prepare(sorted({axes for theirs in everyone for axes in theirs}), channels=True)
        #: of the last step: when it began by the system's clock, its spans, and how many microbatches were alive at most, by stage
        self.begun = 0.0
        self.spans: list[Span] = []
        self.peak: dict[int, int] = {}

    def run(
        self, state: State, batch: Sequence[Tensor], key: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...], dict[str, Tensor], tuple[Tensor, ...]]:
        """(loss, gradients by bucket, new buffers by path, outputs)."""
        loss, grads, fresh, outputs = self.start(state, batch, key)
        return loss, waited(grads), fresh, outputs

    def start(
        self, state: State, batch: Sequence[Tensor], key: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | Handle, ...], dict[str, Tensor], tuple[Tensor, ...]]:
        """(loss, gradients by bucket, new buffers by path, outputs); the last reductions of gradients stay under way."""
        with torch.no_grad():
            for index in self.gathers:
                state.begin_gather(index, self.comm)
            self.begun = time.time()
            run = _Run(self, state, dict(zip(self.batch_paths, batch, strict=True)), key)
            for instruction in self.instructions:
                run.do(instruction)
            run.settle()
        self.spans, self.peak = run.spans, run.peak
        return run.results()


class _Run:
    """One step."""

    def __init__(self, pipeline: Pipeline, state: State, batch: Mapping[str, Tensor], key: Tensor) -> None:
        self.pipeline, self.comm, self.key, self.state = pipeline, pipeline.comm, key, state
        self.begun = time.perf_counter()
        self.spans: list[Span] = []
        self.peak: dict[int, int] = {}
        self.live: dict[int, set[int]] = {}
        self.arriving: dict[tuple[Edge, int | None], list[Handle]] = {}
        self.leaving: dict[tuple[Edge, int | None], list[Tensor]] = {}
        self.sends: dict[tuple[int, str], deque[Handle]] = {}
        self.backwards = Counter(i.stage for i in pipeline.instructions if isinstance(i, Compute) and i.kind in ("B", "W"))
        index = {b.name: k for k, b in enumerate(state.buckets)}
        state.begin_grads(any(s.spec.grads for s in pipeline.stages.values()))
        flats = state.flats()
        places: dict[str, Callable[[str], Any]] = {
            "param": state.fixed.__getitem__, "buffer": state.buffers.__getitem__, "batch": batch.__getitem__,
            "bucket": lambda path: flats[index[path]], "gather": lambda path: state.gathers[index[path]],
            "flat": lambda path: state.grads[index[path]],
        }  # fmt: skip
        self.values: dict[int, _Values] = {}
        for s, stage in pipeline.stages.items():
            if stage.constants is None:
                stage.constants = stage.names["constants"](self.comm, stage.consts)
            once = dict(zip(stage.spec.shared, stage.constants, strict=True))
            once |= {name: places[kind](path) for name, kind, path in stage.spec.inputs}
            once |= dict.fromkeys(stage.spec.totals)
            self.values[s] = _Values(once)

    def do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Receive):
            self.receive(instruction.edge, instruction.microbatch)
        elif isinstance(instruction, Send):
            self.send(instruction.edge, instruction.microbatch)
        else:
            self.compute(instruction)

    def peer(self, stage: int) -> int:
        return self.comm.mesh.rank({**self.comm.coords, "pp": self.pipeline.placement[stage]})

    def receive(self, edge: Edge, microbatch: int | None) -> None:
        peer, channel = self.peer(edge.source), edge.direction
        self.arriving[edge, microbatch] = [
            self.comm.receive(m.shape, m.dtype, peer, channel, site=f"{m.value}.{microbatch}")
            for m in self.pipeline.stages[edge.target].came[edge]
        ]

    def send(self, edge: Edge, microbatch: int | None) -> None:
        begin, peer, channel = time.perf_counter(), self.peer(edge.target), edge.direction
        under_way = self.sends.setdefault((peer, channel), deque())
        values = self.leaving.pop((edge, microbatch))
        for m, value in zip(self.pipeline.stages[edge.source].went[edge], values, strict=True):
            while len(under_way) >= UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(self.comm.send(value, peer, channel, site=f"{m.value}.{microbatch}"))
        self.spans.append(Span(edge.source, "send", microbatch or 0, begin - self.begun, time.perf_counter() - self.begun))

    def compute(self, action: Compute) -> None:
        stage, kind, mb = self.pipeline.stages[action.stage], action.kind, action.microbatch or 0
        values, asked = self.values[action.stage], time.perf_counter()
        for edge, at in [(e, at) for e, at in self.arriving if e.target == action.stage and _same(e.wanted, kind)]:
            if at in (None, action.microbatch) or action.microbatch is None:
                handles = self.arriving.pop((edge, at))
                self.put(action.stage, stage.came[edge], [h.wait() for h in handles], at or 0)
        final = self.is_last(action) and f"{kind} last" in stage.spec.tasks
        task = stage.spec.tasks.get(f"{kind} last" if final else kind)
        if task is None:
            return
        begin = time.perf_counter()
        turn = values.turns.setdefault(mb, {}) if kind != "pre" else {}
        given = []
        for v in task.reads:
            if v in turn:
                given.append(turn.pop(v) if v in task.frees else turn[v])
            else:
                given.append(values.once.pop(v) if v in task.frees and (final or kind == "post") else values.once[v])
        made = stage.names[task.function](self.comm, given, stage.constants, self.key, mb)
        for v, value in zip(task.makes, made, strict=True):
            (turn if v in stage.spec.turns else values.once)[v] = value
        del made, given
        self.hand_over(stage, kind, mb, action.microbatch)
        end = time.perf_counter()
        self.spans.append(Span(action.stage, kind, mb, begin - self.begun, end - self.begun, begin - asked))
        self.count(action.stage, kind, mb)

    def is_last(self, action: Compute) -> bool:
        """Whether no other backward of its stage follows."""
        left = self.backwards.get(action.stage, 0)
        if action.kind in ("B", "W"):
            self.backwards[action.stage] = left - 1
        return action.kind in ("B", "W") and left == 1

    def hand_over(self, stage: _Stage, kind: str, mb: int, number: int | None) -> None:
        """What other stages need of a task that has run: to be sent, or given to a stage of this rank."""
        values = self.values[stage.spec.stage]
        gone: set[str] = set()
        for edge, messages in stage.went.items():
            if not _same(edge.made, kind):
                continue
            found = [values.find(m.value, mb) for m in messages]
            if edge.target in self.pipeline.stages:
                self.put(edge.target, self.pipeline.stages[edge.target].came[edge], found, mb)
            else:
                self.leaving[edge, number] = found
            gone.update(m.value for m in messages if m.value not in stage.read)
        for v in gone:
            values.turns.get(mb, {}).pop(v, None)

    def put(self, target: int, messages: Sequence[Message], found: Sequence[Tensor], mb: int) -> None:
        spec, values = self.pipeline.stages[target].spec, self.values[target]
        for m, value in zip(messages, found, strict=True):
            (values.turns.setdefault(mb, {}) if m.value in spec.turns else values.once)[m.value] = value

    def count(self, stage: int, kind: str, mb: int) -> None:
        """Microbatches of a stage whose values are alive: counted, not predicted."""
        live = self.live.setdefault(stage, set())
        if kind == "F":
            live.add(mb)
        if kind in ("B", "W") and not any(kind_ in ("B", "I", "W") for kind_ in self.left(stage, mb)):
            live.discard(mb)
        self.peak[stage] = max(self.peak.get(stage, 0), len(live))

    def left(self, stage: int, mb: int) -> list[str]:
        """Tasks of the stage that still read values of a microbatch."""
        turn = self.values[stage].turns.get(mb, {})
        return [k for k, t in self.pipeline.stages[stage].spec.tasks.items() if any(v in turn for v in t.reads)]

    def settle(self) -> None:
        for under_way in self.sends.values():
            while under_way:
                under_way.popleft().wait()

    def results(self) -> tuple[Tensor | None, tuple[Tensor | Handle, ...], dict[str, Tensor], tuple[Tensor, ...]]:
        grads: dict[str, Tensor | Handle] = {}
        fresh: dict[str, Tensor] = {}
        loss: Tensor | None = None
        outputs: tuple[Tensor, ...] = ()
        for s, stage in self.pipeline.stages.items():
            values, spec = self.values[s], stage.spec
            grads |= {path: values.find(v, 0) for path, v in spec.grads}
            fresh |= {path: values.find(v, 0) for path, v in spec.buffers}
            outputs = tuple(values.find(v, 0) for _, v in spec.outputs)
            loss = values.find(spec.loss, 0) if spec.loss is not None else None
        return loss, tuple(grads[b.name] for b in self.state.buckets if b.name in grads), fresh, outputs


def _same(task: str, kind: str) -> bool:
    """Whether a task of an edge is run by an action; a whole backward runs I and W."""
    return task == kind or kind == "B" and task in ("I", "W")


def save_stages(pipeline: Pipeline, folder: Path, at: int) -> Path:
    """Writes the stages of coordinate ``at`` along ``pp``, for ``load``; gives the path of the first one's module."""
    for s, stage in pipeline.stages.items():
        (folder / f"stage{s}.py").write_text(stage.source)
        (folder / f"stage{s}.json").write_text(stage.spec.to_json())
        if stage.spec.consts:
            torch.save(dict(zip(stage.spec.consts, stage.consts, strict=True)), folder / f"stage{s}.consts.pt")
    (folder / f"step_pp{at}.json").write_text(pipeline.spec.to_json())
    rows: list[list[Any]] = []
    for i in pipeline.instructions:
        if isinstance(i, Compute):
            rows.append(["compute", i.stage, i.kind, i.microbatch])
        else:
            e = i.edge
            rows.append(["send" if isinstance(i, Send) else "receive", e.source, e.made, e.target, e.wanted, i.microbatch])
    kept = {"stages": sorted(pipeline.stages), "placement": pipeline.placement, "batch": pipeline.batch_paths, "instructions": rows}
    (folder / f"pipeline_pp{at}.json").write_text(json.dumps(kept))
    return folder / f"stage{min(pipeline.stages)}.py"


def load(folder: str | Path, comm: Comm) -> Pipeline:
    """This rank's stages from a folder written by ``step.save_source``: needs no part of the compiler."""
    folder = Path(folder)
    at = comm.coords.get("pp", 0)
    data = json.loads((folder / f"pipeline_pp{at}.json").read_text())
    instructions: list[Instruction] = []
    for kind, *rest in data["instructions"]:
        if kind == "compute":
            instructions.append(Compute(*rest))
        else:
            instructions.append((Send if kind == "send" else Receive)(Edge(*rest[:4]), rest[4]))
    modules = {}
    for s in data["stages"]:
        one = StageSpec.from_json((folder / f"stage{s}.json").read_text())
        consts = torch.load(folder / f"stage{s}.consts.pt") if one.consts else {}
        modules[s] = ((folder / f"stage{s}.py").read_text(), one, consts)
    spec = Spec.from_json((folder / f"step_pp{at}.json").read_text())
    return Pipeline(modules, data["placement"], instructions, spec, data["batch"], comm)
