"""How many bytes of tensors are alive on a rank at every point of an emitted program, from its statements alone.

The statements are followed as Python would run them: names are bound and deleted, in a segment's own order; a view keeps the memory that it
lies in; what is written over an operand, or into a bucket, makes none; a collective owns a result from its start on and keeps its operand
until waited for. Every op that differs in shapes is run once on tensors without data, which says what of its results is a view, and what
tensors it makes for itself meanwhile.

Left out: memory that a kernel takes inside a single torch op, and the buffers of messages that a transport keeps. What exists before and
after a step (parameters, gradients, optimizer state, batch, constants) isn't counted here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._torch import FakeTensorMode, ReplaceMode, fake_mode, resolve, tree_leaves
from autopar.codegen.emit import _SITES, Script, _Statement
from autopar.codegen.stages import StageModule
from autopar.ir.local import LocalProgram
from autopar.ir.program import Node, Offset, Phase, Ref, TensorType, map_refs
from autopar.ir.stage import StageProgram
from autopar.runtime import ops

#: turns of a loop that are followed: the first, one like all others, the last.
_TURNS = 3
#: elements of random numbers up to which their op is tried; of more the pieces that it makes them in are small beside the result.
_DRAWN = 2**22


class Storages(ReplaceMode):
    """While it is entered: the bytes of storages that ops make in this thread, until their last tensor dies.

    Attributes:
        bytes: alive now. What an op reads and none made here existed before, and isn't counted.
        most: the largest number since ``most`` was set last.
        quiet: nothing is looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self.quiet = False
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self._see(t, 0)
        result = func(*args, **kwargs)
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._see(t, t.untyped_storage().nbytes())
        return result

    def _see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._freed(key, size))
        self.bytes += size
        self.most = max(self.most, self.bytes)

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size


@dataclass(frozen=True)
class Point:
    """Bytes alive while a value is made. ``phase`` is that of the segment that ran last."""

    label: str
    phase: Phase
    bytes: int


@dataclass(frozen=True)
class Profile:
    """The points of a step in order, and the bytes that its results keep after it."""

    points: tuple[Point, ...]
    left: int = 0

    def peak(self, phase: Phase | None = None) -> Point:
        """The point of a phase, or of the step, with the most bytes; the first of several."""
        return max((p for p in self.points if phase in (None, p.phase)), key=lambda p: p.bytes, default=Point("", phase or "forward", 0))


class _Memory:
    """A piece of memory. ``bytes`` is 0 of what exists beside the step."""

    def __init__(self, size: int) -> None:
        self.bytes, self.uses = size, 0


@dataclass(frozen=True)
class _Value:
    """What a name stands for: a tensor's type and strides, and the memory that it lies in."""

    type: TensorType
    stride: tuple[int, ...]
    memory: _Memory


#: results of an op (which one, type, stride, position of the operand whose memory it is or -1, number of the new memory, bytes), and the
#: bytes that the op's new tensors have at most while it runs
_Made = tuple[tuple[tuple[int, TensorType, tuple[int, ...], int, int, int], ...], int]


@dataclass
class Follower:
    """Follows statements of one program; ``live`` are the bytes alive now.

    Args:
        coords: of the rank, whose offsets may decide a shape.
    """

    program: LocalProgram
    coords: Mapping[str, int]
    live: int = 0
    phase: Phase = "forward"
    points: list[Point] = field(default_factory=list)
    names: dict[str, _Value] = field(default_factory=dict)
    under_way: dict[str, list[_Memory]] = field(default_factory=dict)  # collective -> what it keeps until waited for
    known: dict[Any, _Made] = field(default_factory=dict)

    # -- names and memory

    def hold(self, memory: _Memory) -> None:
        if not memory.uses:
            self.live += memory.bytes
        memory.uses += 1

    def let_go(self, memory: _Memory) -> None:
        memory.uses -= 1
        if not memory.uses:
            self.live -= memory.bytes

    def bind(self, name: str, value: _Value) -> None:
        """As Python assigns: the old value goes after the new one is there."""
        before = self.names.get(name)
        self.hold(value.memory)
        self.names[name] = value
        if before is not None:
            self.let_go(before.memory)

    def unbind(self, names: Iterable[str]) -> None:
        for name in names:
            value = self.names.pop(name, None)
            if value is not None:
                self.let_go(value.memory)

    def exists(self, name: str) -> None:
        """A value that is there before, and not counted."""
        if (kind := self.program.types.get(name)) is not None:  # memory of the caller's is no value of the program
            self.bind(name, _Value(kind, _packed(kind.shape), _Memory(0)))

    def note(self, label: str, more: int = 0) -> None:
        self.points.append(Point(label, self.phase, self.live + more))

    # -- statements

    def run(self, statements: Sequence[_Statement], script: Script, mb: int = 0) -> None:
        for s in statements:
            self.statement(s, script, mb)
            self.unbind(s.gone)

    def statement(self, s: _Statement, script: Script, mb: int) -> None:
        if not s.nodes and not s.reads:  # memory that the driver takes
            kind = self.program.types[s.defines[0]]
            self.bind(s.defines[0], _Value(kind, _packed(kind.shape), _Memory(kind.nbytes)))
            self.note(s.defines[0])
        elif not s.nodes:  # a wait
            for memory in self.under_way.pop(s.defines[0], ()):
                self.let_go(memory)
        elif s.starts == "accumulate":
            self.accumulate(s.nodes[0], s)
        elif s.starts:
            self.start(s.nodes[0], s)
        elif s.nodes[0].op == "autopar.pack":
            self.note(s.defines[0])
        elif s.dies:
            self.segment(s, script, mb)
        else:
            self.node(s.nodes[0], script, mb)

    def segment(self, s: _Statement, script: Script, mb: int) -> None:
        self.phase = s.nodes[0].phase
        inside = dict.fromkeys(o for n in s.nodes for o in n.outs if o)
        for node, gone in zip(s.nodes, s.dies, strict=True):
            self.node(node, script, mb)
            self.unbind(gone)
        self.unbind([v for v in inside if v not in s.defines] + ["_"])

    def node(self, node: Node, script: Script, mb: int) -> None:
        """One assignment of an op's results."""
        operands = [self.names[r] for r in node.refs()]
        results, most = self.made(node, operands, script, mb)
        new: dict[int, _Memory] = {}
        self.note(node.name, most)
        values: dict[int, _Value] = {}
        for which, kind, stride, at, number, size in results:
            memory = operands[at].memory if at >= 0 else new.setdefault(number, _Memory(0 if node.name in script.born else size))
            values[which] = _Value(kind, stride, memory)
        for v in values.values():  # all results are there before the first name is bound
            self.hold(v.memory)
        for which, v in values.items():
            self.bind(node.outs[which] or "_", v)
        for v in values.values():
            self.let_go(v.memory)

    def start(self, node: Node, s: _Statement) -> None:
        operand, out = self.names[node.refs()[0]], node.outs[0]
        kept = [operand.memory]
        if operand.stride != _packed(operand.type.shape) and not _dense(operand):
            kept.append(_Memory(operand.type.nbytes))  # messages are sent from contiguous memory
        for memory in kept:
            self.hold(memory)
        self.under_way[out] = kept
        kind = self.program.types[out]
        mine = any("out=ops.own(" in line or "out=ops.member(" in line for line in s.lines)  # a part of a bucket
        given = _Memory(0 if len(s.reads) > 1 else kind.nbytes)  # the caller's memory counts with the gradients
        self.bind(out, _Value(kind, _packed(kind.shape), operand.memory if mine else given))
        self.note(out)

    def accumulate(self, node: Node, s: _Statement) -> None:
        """The first share is the total; later ones are added to it, in new memory unless the total has a place in its bucket."""
        total, kind = node.outs[0], self.program.types[node.outs[0]]
        stride = _packed(kind.shape)
        if len(s.reads) > len(node.refs()):  # in the caller's memory, which counts with the gradients
            self.bind(total, _Value(kind, stride, _Memory(0)))
        elif total not in self.names:
            self.bind(total, self.names[node.refs()[0]])
        else:
            self.bind(total, _Value(kind, stride, _Memory(kind.nbytes)))
            self.note(total, 0)
            return
        self.note(total)

    # -- ops

    def made(self, node: Node, operands: Sequence[_Value], script: Script, mb: int) -> _Made:
        """The results of an op, remembered by all that they depend on."""
        place = {**self.coords, "mb": mb}
        over, born = script.over.get(node.name), node.name in script.born
        args = _numbers(map_refs(node.args, lambda _: "%"), place, node.op)
        kwargs = tuple((k, _numbers(map_refs(v, lambda _: "%"), place, node.op)) for k, v in node.kwargs)
        ids: dict[int, int] = {}
        same = tuple(ids.setdefault(id(v.memory), len(ids)) for v in operands)
        kinds = tuple((v.type, v.stride) for v in operands)
        key = (node.op, repr((args, kwargs)), kinds, same, over, born, tuple(self.program.types[o] if o else None for o in node.outs))
        if key not in self.known:
            self.known[key] = self.tried(node, operands, over, born, place)
        return self.known[key]

    def tried(self, node: Node, operands: Sequence[_Value], over: int | None, born: bool, place: Mapping[str, int]) -> _Made:
        types = self.program.types
        made_of = [(k, types[o], _packed(types[o].shape), -1, k, types[o].nbytes) for k, o in enumerate(node.outs) if o]
        plain: _Made = (tuple(made_of), 0 if born else sum(m[5] for m in made_of))
        if over is not None and not node.op.startswith("autopar."):
            assert isinstance(node.args[over], Ref)
            at = node.refs().index(node.args[over].name)
            return ((0, operands[at].type, operands[at].stride, at, -1, 0),), 0
        drawn = node.op in _SITES
        if not operands or drawn and types[node.name].numel > _DRAWN:
            return plain
        counter = Storages()
        # random numbers are made in pieces, whose size depends on the device; other ops do on the meta device what they do on a real one
        mode: FakeTensorMode | nullcontext[None] = fake_mode() if drawn else nullcontext()
        with mode:
            device = "cpu" if drawn else "meta"
            tensors = [torch.empty_strided(v.type.shape, v.stride, dtype=v.type.dtype, device=device) for v in operands]
        for n, v in enumerate(operands):  # two operands in one memory are one tensor's
            first = next(k for k, w in enumerate(operands) if w.memory is v.memory)
            if first < n and operands[first].type == v.type and operands[first].stride == v.stride:
                tensors[n] = tensors[first]
        waiting = iter(tensors)
        args = _numbers(map_refs(node.args, lambda _: next(waiting)), place, node.op)
        kwargs = {k: _numbers(map_refs(v, lambda _: next(waiting)), place, node.op) for k, v in node.kwargs}
        if over is not None:
            kwargs["out"] = args[over]
        elif born:
            kind = types[node.name]
            kwargs["out"] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        try:
            with torch.no_grad(), mode, counter:
                result = _function(node.op, born)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - ops that look at values: by their types
            return plain
        results = result if isinstance(result, (tuple, list)) else (result,)
        places = [t.untyped_storage() for t in tensors]
        fresh: list[Any] = []
        found = []
        for which, (t, _) in enumerate(zip(results, node.outs)):
            if not isinstance(t, Tensor):  # a gradient that isn't asked for
                continue
            storage = t.untyped_storage()
            at = next((k for k, p in enumerate(places) if p is storage), -1)
            if at < 0 and not any(storage is f for f in fresh):
                fresh.append(storage)
            number = -1 if at >= 0 else next(k for k, f in enumerate(fresh) if f is storage)
            found.append((which, TensorType(t.dtype, tuple(t.shape)), tuple(t.stride()), at, number, storage.nbytes()))
        return tuple(found), counter.most


def _function(op: str, out: bool) -> Callable[..., Any]:
    """What the emitted text calls."""
    if op.startswith("autopar."):
        function: Callable[..., Any] = getattr(ops, op.removeprefix("autopar."))
        return function
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        return torch.reshape
    return resolve(op.replace(".default", ".out")) if out else resolve(op)


def _numbers(tree: Any, place: Mapping[str, int], op: str) -> Any:
    if isinstance(tree, Offset):
        return tree.at(place)
    return tuple(_numbers(t, place, op) for t in tree) if isinstance(tree, tuple) else tree


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, size = [], 1
    for s in reversed(shape):
        strides.append(size)
        size *= max(s, 1)
    return tuple(reversed(strides))


def _dense(value: _Value) -> bool:
    """Whether a tensor counts as contiguous; dims of one element have any stride."""
    return all(s == 1 or a == b for s, a, b in zip(value.type.shape, value.stride, _packed(value.type.shape), strict=True))


def profile(program: LocalProgram, script: Script, coords: Mapping[str, int] | None = None, kind: type[Follower] = Follower) -> Profile:
    """The bytes alive on a rank through a step, of which a loop's turns beyond the third are like the second.

    Args:
        coords: of the rank; the first one's by default.
        kind: what follows the statements: a test that plants a fault gives another.
    """
    follower = kind(program, coords or dict.fromkeys((name for name, _ in program.mesh.axes), 0))
    prepare(follower, script)
    regions: dict[str, list[_Statement]] = {"pre": [], "body": [], "post": []}
    for s in script.statements:
        regions[s.region if program.microbatches > 1 else "body"].append(s)
    follower.run(regions["pre"], script)
    for turn in range(min(program.microbatches, _TURNS)):
        follower.run(regions["body"], script, turn)
    follower.unbind(script.after)
    follower.run(regions["post"], script)
    return Profile(tuple(follower.points), follower.live)


def prepare(follower: Follower, script: Script) -> None:
    """Binds all that exists before the first statement: whatever is read and not made by one, nor known already."""
    made = {v for s in script.statements if not s.reads or s.nodes and s.nodes[0].op != "autopar.pack" for v in s.defines}
    for v in dict.fromkeys(r for s in script.statements for r in (*s.reads, *s.defines)):
        if v not in made and v not in follower.names:
            follower.exists(v)


def stage_profiles(program: StageProgram, module: StageModule, coords: Mapping[str, int] | None = None) -> dict[str, Profile]:
    """The bytes alive through the tasks of a stage, of one microbatch; ``left`` is what the microbatch keeps after the task.

    Of messages those are counted that a task has read or made, while it runs.
    """
    tasks, found, known = module.spec.tasks, dict[str, Profile](), dict[Any, _Made]()
    received = {i.name for i in program.inputs_of("received")}
    for order in (("pre", "F", "B", "post"), ("pre", "F", "I", "W")):
        if "I" in order and "I" not in tasks:
            continue
        follower = Follower(program, coords or dict.fromkeys((name for name, _ in program.mesh.axes), 0), known=known)
        turn: dict[str, _Value] = {}  # what is there between tasks
        for at, kind in enumerate(order):
            if kind not in tasks:
                continue
            task, script = tasks[kind], module.scripts[kind]
            follower.phase, follower.points = "forward" if kind in ("pre", "F") else "backward", []
            for v in task.reads:
                if v in received and v not in turn:
                    turn[v] = _Value(program.types[v], _packed(program.types[v].shape), _Memory(program.types[v].nbytes))
                    follower.hold(turn[v].memory)
                if v in turn:
                    follower.bind(v, turn[v])
                if v in turn and v in task.frees:
                    follower.let_go(turn.pop(v).memory)
            prepare(follower, script)
            follower.run(script.statements, script)
            read = {v for k in tasks if k not in order[: at + 1] for v in tasks[k].reads}
            for v in task.makes:
                if v in read and v not in turn:
                    turn[v] = follower.names[v]
                    follower.hold(turn[v].memory)
            follower.unbind(list(follower.names))
            found[kind] = Profile(tuple(follower.points), follower.live)
    return found


__all__ = ["Follower", "Point", "Profile", "Storages", "prepare", "profile", "stage_profiles"]
