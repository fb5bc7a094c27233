"""Running an emitted module on one rank: its inputs in order, its results to their places. Knows nothing of the compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.layout.bucket import Bucket, Member
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding
from autopar.runtime.comm import Comm, Handle


@dataclass(frozen=True)
class Spec:
    """What a module's text doesn't say: its mesh, and the paths of its arguments and results in order.

    ``gathers`` names the buckets that it takes as gathers under way, in the order in which it waits for them; ``packs``: it makes
    gradients.
    ``params``, ``buffers`` and ``batch`` map a path to (dtype, sharding): how the whole tensor is cut.
    """

    mesh: Mesh
    params: Mapping[str, tuple[torch.dtype, Sharding]]
    buffers: Mapping[str, tuple[torch.dtype, Sharding]]
    batch: Mapping[str, tuple[torch.dtype, Sharding]]
    buckets: tuple[Bucket, ...]
    consts: tuple[str, ...]
    new_buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    gathers: tuple[str, ...]
    packs: bool
    zero: int
    microbatches: int

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""

        def pairs(table: Mapping[str, tuple[torch.dtype, Sharding]]) -> list[list[str]]:
            return [[k, _name(d), str(s)] for k, (d, s) in table.items()]

        return json.dumps({
            "mesh": str(self.mesh), "params": pairs(self.params), "buffers": pairs(self.buffers), "batch": pairs(self.batch),
            "buckets": [[b.name, _name(b.dtype), b.group, b.axes, b.partial, b.numel, b.copies,
                         [[m.path, m.offset, m.shape, str(m.sharding)] for m in b.members]] for b in self.buckets],
            "consts": self.consts, "new_buffers": self.new_buffers, "outputs": self.outputs, "axes": self.axes, "gathers": self.gathers,
            "packs": self.packs, "zero": self.zero, "microbatches": self.microbatches,
        }, indent=1)  # fmt: skip

    @staticmethod
    def from_json(text: str) -> Spec:
        data = json.loads(text)

        def table(items: list[list[str]]) -> dict[str, tuple[torch.dtype, Sharding]]:
            return {k: (getattr(torch, d), Sharding.parse(s)) for k, d, s in items}

        buckets = tuple(
            Bucket(name, getattr(torch, dtype), group, tuple(axes), tuple(partial),
                   tuple(Member(path, offset, tuple(shape), Sharding.parse(s)) for path, offset, shape, s in members), numel, tuple(copies))
            for name, dtype, group, axes, partial, numel, copies, members in data["buckets"]
        )  # fmt: skip
        return Spec(
            Mesh.parse(data["mesh"]), table(data["params"]), table(data["buffers"]), table(data["batch"]), buckets, tuple(data["consts"]),
            tuple(data["new_buffers"]), tuple(data["outputs"]), tuple(tuple(a) for a in data["axes"]),
            tuple(data["gathers"]), data["packs"], data["zero"], data["microbatches"],
        )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cut(whole: Tensor, sharding: Sharding, mesh: Mesh, coords: Mapping[str, int]) -> Tensor:
    """A rank's piece of a whole tensor, contiguous and of its own memory."""
    x = whole.reshape(sharding.atoms)
    for atom, (start, size) in enumerate(zip(sharding.starts(mesh, dict(coords)), sharding.local_atoms(mesh), strict=True)):
        x = x.narrow(atom, start, size)
    return x.reshape(sharding.local_shape(mesh)).clone(memory_format=torch.contiguous_format)


def paste(whole: Tensor, piece: Tensor, sharding: Sharding, mesh: Mesh, coords: Mapping[str, int]) -> None:
    """Writes a rank's piece into the whole tensor (contiguous)."""
    x = whole.view(sharding.atoms)
    for atom, (start, size) in enumerate(zip(sharding.starts(mesh, dict(coords)), sharding.local_atoms(mesh), strict=True)):
        x = x.narrow(atom, start, size)
    x.copy_(piece.reshape(sharding.local_atoms(mesh)))


@dataclass
class State:
    """What lives on a rank between steps.

    Attributes:
        whole: for each bucket the 1-D tensor of all its elements; nothing under ZeRO 3.
        parts: for each bucket the 1-D parameter of the elements that this rank owns (all of them under ZeRO 0): a view of ``whole``, if
            there is one.
        gathers: for each bucket the gather of ``whole`` from its owners, if it was begun since the parts changed last.
        grads: for each bucket the 1-D tensor of its gradients, from ZeRO 2 on of this rank's part, after the first training step.
        fixed: pieces of parameters that no bucket holds: frozen ones, and those without gradient.
        buffers: whole buffers.
        step: updates done.
    """

    buckets: tuple[Bucket, ...]
    whole: list[Tensor]
    parts: list[nn.Parameter]
    fixed: dict[str, Tensor]
    buffers: dict[str, Tensor]
    zero: int
    step: int = 0
    gathers: list[Handle | None] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def changed(self) -> None:
        """To be called when parts were written to: what was gathered is old."""
        for handle in self.gathers:
            if handle is not None:
                handle.wait()  # its messages must not land later
        self.gathers = [None] * len(self.buckets)

    def fill(self, index: int, flat: Tensor, comm: Comm) -> None:
        """Sets a bucket from all its elements, which every rank has: nothing needs to be gathered."""
        if self.zero == 3:
            self.parts[index].data.copy_(own(flat, self.buckets[index], comm, self.zero))
            return
        self.whole[index].copy_(flat)
        self.gathers[index] = Handle(partial(_same, self.whole[index]))

    def flats(self) -> list[Tensor]:
        """What a program takes for each bucket: all elements, or, under ZeRO 3, this rank's."""
        return [part.detach() for part in self.parts] if self.zero == 3 else self.whole

    def take_gather(self, index: int) -> Handle | None:
        """A gather under way, whose result is the taker's from now on."""
        handle, self.gathers[index] = self.gathers[index], None
        return handle

    def begin_grads(self, packs: bool) -> None:
        """Makes the tensors of gradients, if a program makes any."""
        if packs and not self.grads:
            self.grads = [torch.zeros_like(flat) for flat in (self.whole if self.zero < 2 else (p.detach() for p in self.parts))]

    def begin_gather(self, index: int, comm: Comm) -> None:
        """Begins to gather a bucket from its owners, if that isn't under way."""
        bucket = self.buckets[index]
        if self.gathers[index] is None:
            part = self.parts[index].detach()
            out = comm.empty(bucket.numel, bucket.dtype) if self.zero == 3 else self.whole[index]
            self.gathers[index] = comm.all_gather(part, bucket.axes, 0, site=bucket.name, out=out)


def _same(x: Tensor) -> Tensor:
    return x


def make_state(spec: Spec, values: Callable[[str], Tensor], buffers: Mapping[str, Tensor], comm: Comm) -> State:
    """The state that holds the given weights.

    Args:
        values: the whole parameter of a path, asked for one at a time.
    """
    mesh, device = spec.mesh, comm.device
    parts, whole = [], []
    for bucket in spec.buckets:
        flat = flatten(bucket, values, mesh, comm)
        part = own(flat, bucket, comm, spec.zero)
        if spec.zero == 3:
            part = part.clone()
        else:
            whole.append(flat)
        # of `data`: what a gather writes to the rest of the flat tensor is no change of the part
        parts.append(nn.Parameter(part.data))
    fixed = {
        path: cut(values(path).detach().to(device), sharding, mesh, comm.coords).to(dtype)
        for path, (dtype, sharding) in spec.params.items()
    }
    held = {path: buffers[path].detach().to(device=device, dtype=dtype, copy=True) for path, (dtype, _) in spec.buffers.items()}
    gathers: list[Handle | None] = [Handle(partial(_same, flat)) for flat in whole] or [None for _ in parts]
    return State(spec.buckets, whole, parts, fixed, held, spec.zero, gathers=gathers)


def flatten(bucket: Bucket, values: Callable[[str], Tensor], mesh: Mesh, comm: Comm) -> Tensor:
    """All elements of a bucket, as this rank and those that share it hold them, from whole parameters by path."""
    flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=comm.device)
    for m in bucket.members:
        piece = cut(values(m.path).detach().to(comm.device), m.sharding, mesh, comm.coords)
        flat[m.offset : m.offset + m.numel] = piece.reshape(-1).to(bucket.dtype)
    return flat


def own(flat: Tensor, bucket: Bucket, comm: Comm, zero: int) -> Tensor:
    """The part of a bucket that a rank updates, as a view."""
    if zero == 0:
        return flat
    part = bucket.part(comm.mesh)
    index = comm.mesh.index(comm.rank, bucket.axes)
    return flat[index * part : (index + 1) * part]


def waited(grads: Sequence[Tensor | Handle]) -> tuple[Tensor, ...]:
    """The gradients, when all reductions are over."""
    return tuple(g.wait() if isinstance(g, Handle) else g for g in grads)


#: compiles a segment: ``torch.compile`` for the inductor backend.
CompileSegment = Callable[[Callable[..., Any]], Callable[..., Any]]


def load_names(source: str, name: str, drivers: Container[str], compile_segment: CompileSegment | None) -> dict[str, Any]:
    """What an emitted module defines; all its functions but ``constants`` and the ``drivers`` are segments."""
    names: dict[str, Any] = {"__name__": "autopar_step"}
    exec(compile(source, name, "exec"), names)  # noqa: S102 - running what the compiler emitted is the point
    if compile_segment is not None:
        for key, value in list(names.items()):
            if callable(value) and getattr(value, "__module__", None) == "autopar_step" and key != "constants" and key not in drivers:
                names[key] = compile_segment(value)
    return names


def compiled_once(compile_segment: CompileSegment) -> CompileSegment:
    """Segments that are equal but for their names are compiled once, whichever modules they come from.

    So equal stages of a rank share theirs.
    """
    known: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def compiled(segment: Callable[..., Any]) -> Callable[..., Any]:
        code = segment.__code__
        key = (code.co_code, repr(code.co_consts), code.co_names, code.co_argcount, code.co_nlocals)
        if key not in known:
            known[key] = compile_segment(segment)
        return known[key]

    return compiled


class Executable:
    """An emitted module, loaded. ``run`` calls its ``step`` on a state.

    Args:
        compile_segment: applied to every segment; the driver always runs as it is.
    """

    def __init__(
        self,
        source: str,
        spec: Spec,
        comm: Comm,
        consts: Mapping[str, Tensor],
        *,
        name: str = "<autopar step>",
        compile_segment: CompileSegment | None = None,
    ) -> None:
        self.source, self.spec, self.comm = source, spec, comm
        self.names = load_names(source, name, ("step",), compile_segment)
        comm.prepare(spec.axes)
        self._consts = tuple(consts[path].to(comm.device) for path in spec.consts)
        self._shared: tuple[Tensor, ...] | None = None
        index = {b.name: k for k, b in enumerate(spec.buckets)}
        #: the buckets that the step takes as gathers under way, in the order in which it waits for them
        self.gathers = [index[name] for name in spec.gathers]

    def run(
        self, state: State, batch: Sequence[Tensor], key: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...], dict[str, Tensor], tuple[Tensor, ...]]:
        """(loss, gradients by bucket, new buffers by path, outputs).

        Gradients live in buffers that the next run writes to.
        """
        loss, grads, fresh, outputs = self.start(state, batch, key)
        return loss, waited(grads), fresh, outputs

    def start(
        self, state: State, batch: Sequence[Tensor], key: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | Handle, ...], dict[str, Tensor], tuple[Tensor, ...]]:
        """``run`` that leaves the last reductions of gradients under way."""
        with torch.no_grad():
            if self._shared is None:
                self._shared = self.names["constants"](self.comm, self._consts)
            for index in self.gathers:
                state.begin_gather(index, self.comm)
            state.begin_grads(self.spec.packs)
            buckets: list[Any] = [*state.flats()]
            if state.zero == 3:
                self.comm.settle()  # what is taken can't be put back: every rank has to be ready
                buckets += [state.take_gather(k) for k in self.gathers]
            else:
                buckets = [state.gathers[k] if k in self.gathers else flat for k, flat in enumerate(buckets)]
            fixed = [state.fixed[path] for path in self.spec.params]
            buffers = [state.buffers[path] for path in self.spec.buffers]
            try:
                loss, grads, fresh, outputs = self.names["step"](
                    self.comm, fixed, buckets, buffers, list(batch), state.grads, self._shared, key
                )
            except (IndexError, RuntimeError) as error:
                if isinstance(error, IndexError) or "out of bounds" in str(error):
                    raise InputError(
                        f"an id or label in the batch of rank {self.comm.rank} is out of range", why=str(error),
                        hint="ids lie in [0, rows of the table), labels in [0, classes) or are the ignored one",
                    ) from error  # fmt: skip
                raise
        return loss, grads, dict(zip(self.spec.new_buffers, fresh, strict=True)), outputs


def load(folder: str | Path, comm: Comm, stem: str = "step") -> Executable:
    """An executable from a folder written by ``step.save_source``: needs no part of the compiler."""
    folder = Path(folder)
    spec = Spec.from_json((folder / f"{stem}.json").read_text())
    consts = torch.load(folder / f"{stem}.consts.pt") if spec.consts else {}
    path = folder / f"{stem}.py"
    return Executable(path.read_text(), spec, comm, consts, name=str(path))


def gather(state: State, flats: Sequence[Tensor], mesh: Mesh, comm: Comm) -> dict[str, Tensor]:
    """Whole tensors by path from flat parts of the buckets (parameters, gradients, state), on every rank's CPU. Collective.

    Ranks may hold other buckets, as those of other stages do.
    """
    flats = [f.detach().cpu().clone() for f in flats]  # a view would travel with all that it is a view of
    ranks = comm.exchange({b.name: (b, flat) for b, flat in zip(state.buckets, flats, strict=True)}, site="gather")
    whole: dict[str, Tensor] = {}
    done: set[tuple[str, tuple[int, ...]]] = set()
    for rank, held in enumerate(ranks):
        coords = mesh.coords(rank)
        for bucket, own in held.values():
            group = mesh.group(rank, bucket.axes) if state.zero else (rank,)
            flat: Tensor | None = None
            for m in bucket.members:
                starts = m.sharding.starts(mesh, coords)
                if (m.path, starts) in done:
                    continue
                done.add((m.path, starts))
                if flat is None:
                    flat = torch.cat([ranks[r][bucket.name][1] for r in group])
                full = whole.setdefault(m.path, torch.zeros(m.sharding.shape, dtype=own.dtype))
                paste(full, flat[m.offset : m.offset + m.numel].reshape(m.shape), m.sharding, mesh, coords)
    return whole


def gather_fixed(fixed: Mapping[str, Tensor], shardings: Mapping[str, Sharding], mesh: Mesh, comm: Comm) -> dict[str, Tensor]:
    """Whole tensors of the parameters that no bucket holds, on every rank's CPU. Collective."""
    ranks = comm.exchange({path: (t.cpu(), shardings[path]) for path, t in fixed.items()}, site="gather")
    whole: dict[str, Tensor] = {}
    for rank, held in enumerate(ranks):
        for path, (piece, sharding) in held.items():
            full = whole.setdefault(path, torch.zeros(sharding.shape, dtype=piece.dtype))
            paste(full, piece, sharding, mesh, mesh.coords(rank))
    return whole
