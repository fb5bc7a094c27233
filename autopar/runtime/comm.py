"""Collectives over the axes of a mesh: the interface that generated programs call, and its implementation over torch.distributed.

Every collective starts at once and returns a ``Handle``; ``Handle.wait()`` gives the result. Starting early and waiting late is how
communication hides behind compute. ``SimComm`` in ``autopar.runtime.sim`` is the same interface without processes.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import CommError, InputError
from autopar.layout.mesh import Mesh, axis_of
from autopar.layout.traffic import SMALL_ALL_REDUCE, bytes_sent, chunk
from autopar.runtime.watch import Failure, Watch

#: what a reduction does to two parts; there are no others.
OPS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

#: what a message between two stages belongs to: the forward, the backward, or what happens once a step.
CHANNELS = ("up", "down", "once")

#: formats too short to add many of without losing digits: their sums are kept in float32 and rounded once.
_SHORT = (torch.bfloat16, torch.float16)

#: seconds after its start in which a collective is left to the program's own wait.
_HEAD_START = 0.001

#: A message's tag is made of its group's number (a bit for each of the five axes; one more for exchanges, and for each channel between
#: stages; others where a group is over a part of an axis), the round, and a count that starts again long after the messages that used it
#: are gone. torch takes 31 bits.
_EXCHANGE = 32
_CHANNEL = 33
_WITHIN, _ACROSS = 64, 96
_TAGS_PER_COUNT = 256
#: bytes of an exchange's first message, which most objects fit into; the first eight tell the length.
_FRAME = 1024
_COUNTS = 2**22

#: bytes from which on memory is kept for the next taker, and by how much what was taken and what is kept may exceed the most ever taken.
LARGE, IDLE = 2**20, 1.25


@dataclass
class Record:
    """What one collective cost this rank. The times and, for two rounds, the bytes grow until the handle was waited for.

    Attributes:
        site: the caller's name for the place in the program.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``shift``, ``mirror``, ``send`` or ``receive``.
        axes: the mesh axes, first axis major.
        bytes: bytes handed to the transport by this rank (backends with their own collectives: by the formula of ``layout.traffic``).
        seconds_start: host time spent in the starting call.
        seconds_wait_exposed: host time spent in ``wait``; what compute did not hide. On CUDA ``wait`` only orders streams.
    """

    site: str
    kind: str
    axes: tuple[str, ...]
    bytes: int = 0
    seconds_start: float = 0.0
    seconds_wait_exposed: float = 0.0


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective: ``ranks[index]`` is this rank; results follow the order of ``ranks``."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def key(self) -> tuple[int, ...]:
        """The set of ranks, whatever the order of axes."""
        return tuple(sorted(self.ranks))


@dataclass
class Call:
    """One collective as asked for: checked, dims counted from 0, ``x`` contiguous and without autograd history.

    ``shape`` is the shape of the result; ``dim`` is the dim to gather, scatter or split, ``concat_dim`` only of an all-to-all.
    """

    kind: str
    x: Tensor
    group: Group
    record: Record
    shape: tuple[int, ...]
    dim: int = 0
    concat_dim: int = 0
    op: str = "sum"
    out: Tensor | None = None

    @property
    def site(self) -> str:
        return self.record.site

    def result(self) -> Tensor:
        """The buffer for the result: the caller's or a fresh one."""
        return self.x.new_empty(self.shape) if self.out is None else self.out

    def position(self) -> str:
        """The call in words, for errors."""
        name = f" at {self.site}" if self.site else ""
        return f"{self.kind} over ({', '.join(self.group.axes)}){name}, {str(self.x.dtype).removeprefix('torch.')}{list(self.x.shape)}"


class Handle:
    """A collective under way. The input must stay unmodified, and ``out`` unread, until ``wait`` returns."""

    def __init__(self, finish: Callable[[], Tensor], record: Record | None = None) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._record = record
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """The result: contiguous, owned by the caller. Further calls return the same tensor.

        Raises:
            CommError: a peer died, timed out or disagrees.
        """
        if self._finish is not None:
            begun = time.perf_counter()
            try:
                self._value = self._finish()
            finally:
                if self._record is not None:
                    self._record.seconds_wait_exposed += time.perf_counter() - begun
            self._finish = None  # frees the buffers that were in flight
        assert self._value is not None
        return self._value


class Comm(ABC):
    """Collectives over mesh axes for one rank.

    ``axes`` are names, the first one major; a group's order is ``mesh.index`` over them. Axes that the mesh lacks have size 1, and a group
    of one rank answers with a copy, without communication and without a record. Reductions add in group order on every rank, so that all
    ranks hold the same bits (DistComm on backends with their own reductions: in the backend's order). float16 and bfloat16 sums are
    accumulated in float32 and rounded once. Wrong arguments raise ``CommError`` before anything is sent.

    Attributes:
        mesh: the mesh.
        rank: this rank on the mesh.
        coords: its coordinate along every axis.
        device: where its tensors live.
        records: one ``Record`` a collective, in program order, since the last ``take_records``.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str | None = None) -> None:
        self.mesh = mesh
        self.rank = rank
        self.coords = mesh.coords(rank)
        self.device = torch.device(device or mesh.device or "cpu")
        self.records: list[Record] = []
        self._known: dict[tuple[str, ...], Group] = {}
        self._held: Callable[[], None] | None = None
        self._blocks: list[Tensor] = []  # memory at hand, 1-D, the longest unused first
        self._in_use = self._most_in_use = 0  # bytes that were taken and not given back, now and at most

    # -- memory of flat tensors that live for a part of a step

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of whatever values, for a large one from memory that was given back, if some fits.

        Memory fresh from the system costs as much as what is done with it. CUDA's allocator keeps its own.
        """
        size = numel * dtype.itemsize
        if self.device.type != "cpu" or size < LARGE:
            return torch.empty(numel, dtype=dtype, device=self.device)
        fitting = [b for b in self._blocks if b.dtype == dtype and numel <= b.numel() <= 2 * numel]
        block = min(fitting, key=Tensor.numel) if fitting else None
        self._blocks = [b for b in self._blocks if b is not block]
        self._in_use += size if block is None else block.nbytes
        self._most_in_use = max(self._most_in_use, self._in_use)
        if block is None:
            # what lies idle must not add much to what was ever in use at once
            while self._blocks and self._in_use + sum(b.nbytes for b in self._blocks) > IDLE * self._most_in_use:
                self._blocks.pop(0)
            block = torch.empty(numel, dtype=dtype, device=self.device)
        return block[:numel]

    def give(self, x: Tensor) -> None:
        """Takes back what ``empty`` gave: nobody reads or writes it, or a view of it, any more."""
        if self.device.type == "cpu" and x.nbytes >= LARGE:
            self._blocks.append(x.new_empty(0).set_(x.untyped_storage()))
            self._in_use -= self._blocks[-1].nbytes

    # -- what subclasses give

    @abstractmethod
    def _begin(self, call: Call) -> Callable[[], Tensor]:
        """Starts a collective of at least two ranks; the function returned completes it and gives the result."""

    @abstractmethod
    def exchange_later(self, obj: Any, *, site: str = "") -> Callable[[], list[Any]]:
        """Starts an exchange; the function returned waits for it and gives every rank's ``obj``, by rank."""

    @abstractmethod
    def _begin_send(self, x: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        """Starts to send to a rank; the function returned waits until ``x`` may be written to."""

    @abstractmethod
    def _begin_receive(self, out: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        """Starts to receive from a rank into ``out``."""

    def send(self, x: Tensor, peer: int, channel: str, *, site: str = "") -> Handle:
        """Sends to another rank of the mesh.

        Messages from one rank to another in one channel (``CHANNELS``) arrive in the order in which they were sent, and are received in
        that order: every transport can do that.
        """
        return self._message("send", x.detach().contiguous(), peer, channel, site)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int, channel: str, *, site: str = "") -> Handle:
        """Receives from another rank of the mesh what it sends next in a channel."""
        return self._message("receive", torch.empty(tuple(shape), dtype=dtype, device=self.device), peer, channel, site)

    def _message(self, kind: str, x: Tensor, peer: int, channel: str, site: str) -> Handle:
        if channel not in CHANNELS:
            raise CommError(f"{kind}: unknown channel {channel!r}", where=site, hint=f"channels are {', '.join(CHANNELS)}")
        if not 0 <= peer < self.mesh.size or peer == self.rank:
            raise CommError(f"{kind}: rank {self.rank} has no messages with rank {peer}", where=site)
        begun = time.perf_counter()
        if self._held is not None:
            self.settle()
        record = Record(site, kind, ("pp",), x.numel() * x.itemsize if kind == "send" else 0)
        finish = (self._begin_send if kind == "send" else self._begin_receive)(x, peer, channel, site)
        self.records.append(record)
        record.seconds_start = time.perf_counter() - begun
        return Handle(finish, record)

    def exchange(self, obj: Any, *, site: str = "") -> list[Any]:
        """Every rank's small picklable ``obj``, by rank. Blocks; for control, not for data, and not recorded."""
        return self.exchange_later(obj, site=site)()

    def hold(self, check: Callable[[], None] | None) -> None:
        """``check`` is to be called before the next collective of at least two ranks is started; what it raises, the collective raises.

        It is how an exchange hides behind the compute before the first collective, and yet is known before any tensor is sent.
        """
        self._held = check

    def settle(self) -> None:
        """Calls the check that is held, if no collective has done so yet."""
        check, self._held = self._held, None
        if check is not None:
            check()

    # -- hooks: the local arithmetic of all collectives; a test that plants a fault overrides one

    def _cut(self, x: Tensor, parts: int, dim: int) -> list[Tensor]:
        """``x`` in equal contiguous pieces along ``dim`` (views where they can be)."""
        return [piece.contiguous() for piece in x.tensor_split(parts, dim)]

    def _reduce(self, parts: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
        """Into ``out``: the parts reduced elementwise, first to last. ``out`` may be one of the parts."""
        if op == "sum" and out.dtype in _SHORT:
            total = parts[0].float()
            for part in parts[1:]:
                total.add_(part)
            return out.copy_(total)
        fold = OPS[op]
        # a part that is still to be read must not be overwritten
        total = torch.empty_like(out) if any(part.data_ptr() == out.data_ptr() for part in parts[2:]) else out
        fold(parts[0], parts[1], out=total)
        for part in parts[2:]:
            fold(total, part, out=total)
        return total if total is out else out.copy_(total)

    def _gather(self, parts: Sequence[Tensor], dim: int, out: Tensor) -> Tensor:
        """Into ``out``: the parts joined along ``dim``."""
        return torch.cat(list(parts), dim, out=out) if out.numel() else out

    # -- the collectives

    def all_reduce(self, x: Tensor, axes: Sequence[str], op: str = "sum", *, site: str = "", out: Tensor | None = None) -> Handle:
        """The sum (``max``, ``min``) of the group's tensors, shape of ``x``. ``out`` may be ``x``."""
        self._check_op(x, op, "all_reduce", site)
        return self._run("all_reduce", x, axes, site, op=op, out=out)

    def all_gather(self, x: Tensor, axes: Sequence[str], dim: int = 0, *, site: str = "", out: Tensor | None = None) -> Handle:
        """The group's tensors joined along ``dim`` in group order. ``x`` may be its own place in ``out`` (dim 0)."""
        return self._run("all_gather", x, axes, site, dim=dim, out=out)

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[str], dim: int = 0, op: str = "sum", *, site: str = "", out: Tensor | None = None,
        spent: bool = False,
    ) -> Handle:  # fmt: skip
        """This rank's piece of the group's sum, ``x`` cut along ``dim`` in as many equal pieces as there are ranks.

        ``out`` may be this rank's piece of ``x`` (dim 0). ``spent``: ``x`` came from ``empty`` and is given back when this is done.
        """
        self._check_op(x, op, "reduce_scatter", site)
        return self._run("reduce_scatter", x, axes, site, dim=dim, op=op, out=out, spent=spent)

    def all_to_all(self, x: Tensor, axes: Sequence[str], split_dim: int, concat_dim: int, *, site: str = "") -> Handle:
        """Piece ``i`` of ``x`` along ``split_dim`` goes to the group's rank ``i``; what arrives is joined along ``concat_dim``."""
        return self._run("all_to_all", x, axes, site, dim=split_dim, concat_dim=concat_dim)

    def shift(self, x: Tensor, axes: Sequence[str], *, site: str = "") -> Handle:
        """The tensor of the rank before this one in the group, the last before the first: all tensors one place on, around a ring."""
        return self._run("shift", x, axes, site)

    def mirror(self, x: Tensor, axes: Sequence[str], dim: int, *, site: str = "") -> Handle:
        """``x`` with the second half along ``dim`` of the rank as far from the end of the group as this one is from its beginning.

        Done twice it gives ``x``.
        """
        if x.shape[self._dim(x, dim, "mirror", site)] % 2:
            raise CommError(f"mirror of {list(x.shape)}: dim {dim} has no halves", where=site)
        return self._run("mirror", x, axes, site, dim=dim)

    def barrier(self, *, site: str = "") -> None:
        """Returns when every rank of the mesh has called it."""
        self.exchange(None, site=site or "barrier")

    def prepare(self, axes_list: Iterable[Sequence[str]], channels: bool = False) -> None:
        """Makes ready every group over each of these tuples of axes, and the channels between stages; all ranks ask for the same.

        Without it a backend that needs a process group for each makes it at its first use, which blocks until its ranks have come there.
        """
        for axes in axes_list:
            self.group(axes)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An error inside is told to the other ranks, who may wait for this one; not one that every rank raises alike."""
        yield

    def take_records(self) -> list[Record]:
        """The records since the last call, which are then forgotten here."""
        taken, self.records = self.records, []
        return taken

    def group(self, axes: Sequence[str]) -> Group:
        """The group of this rank over ``axes``."""
        axes = tuple(axes)
        if axes not in self._known:
            if len(set(axes)) != len(axes):
                raise CommError(f"an axis is named twice in {axes}")
            ranks = self.mesh.group(self.rank, axes)
            self._known[axes] = Group(axes, ranks, self.mesh.index(self.rank, axes))
        return self._known[axes]

    # -- shared parts

    def _run(
        self,
        kind: str,
        x: Tensor,
        axes: Sequence[str],
        site: str,
        *,
        dim: int = 0,
        concat_dim: int = 0,
        op: str = "sum",
        out: Tensor | None = None,
        spent: bool = False,
    ) -> Handle:
        begun = time.perf_counter()
        group = self.group(axes)
        shape = list(x.shape)
        if kind not in ("all_reduce", "shift"):
            dim = self._dim(x, dim, kind, site)
            concat_dim = self._dim(x, concat_dim, kind, site)
            if kind in ("reduce_scatter", "all_to_all"):
                if shape[dim] % group.size:
                    raise CommError(f"{kind} of {shape}: dim {dim} does not divide by the {group.size} ranks over {group.axes}", where=site)
                shape[dim] //= group.size
            if kind in ("all_gather", "all_to_all"):
                shape[concat_dim if kind == "all_to_all" else dim] *= group.size
        if out is not None and (list(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous()):
            got = f"{out.dtype} {list(out.shape)} with strides {out.stride()}"
            raise CommError(f"{kind}: out must be a contiguous {x.dtype} of shape {shape}, not {got}", where=site)
        x = x.detach()
        target = None if out is None else out.detach()
        if group.size == 1:
            value = x.clone(memory_format=torch.contiguous_format) if target is None else target.copy_(x)
            if spent:
                self.give(x)
            return Handle(lambda: value if out is None else out)
        if self._held is not None:
            self.settle()
        record = Record(site, kind, group.axes)
        call = Call(kind, x.contiguous(), group, record, tuple(shape), dim, concat_dim, op, target)
        finish = self._begin(call)
        self.records.append(record)
        record.seconds_start = time.perf_counter() - begun

        def complete() -> Tensor:
            value = finish()
            if spent:
                self.give(x)
            return value if out is None else out

        return Handle(complete, record)

    @staticmethod
    def _dim(x: Tensor, dim: int, kind: str, site: str) -> int:
        if not -x.dim() <= dim < x.dim():
            raise CommError(f"{kind}: dim {dim} does not exist in shape {list(x.shape)}", where=site)
        return dim % x.dim()

    @staticmethod
    def _check_op(x: Tensor, op: str, kind: str, site: str) -> None:
        if op not in OPS:
            raise CommError(f"{kind}: unknown op {op!r}", where=site, hint=f"ops are {', '.join(OPS)}")
        if x.dtype == torch.bool and op == "sum":
            raise CommError(f"{kind}: bools have no sum", where=site, hint="op max is any, op min is all")


def _leading(shape: Sequence[int], dim: int) -> bool:
    """Whether pieces along ``dim`` are contiguous blocks of the whole."""
    return all(size == 1 for size in shape[:dim])


class _Once:
    """A step that either of two threads may do, once; a failure is raised to everyone who asks. ``claimed``: a wait is about to do it."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.claimed = False
        self._step: Callable[[], None] | None = step
        self._error: CommError | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._step is not None:
                try:
                    self._step()
                except CommError as error:
                    self._error = error
                    raise
                finally:
                    self._step = None


class _Progress:
    """A thread that brings two-round collectives past their first round while the program computes.

    torch can't ask a gloo message whether it has arrived (``is_completed`` stays False until waited for), so only a thread of its own can
    start the second round early. It takes them in starting order; a ``wait`` does the step itself where the thread hasn't come to it,
    so the thread never delays and never decides whether ranks block each other.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, _Once] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, args=(self._queue,), name="autopar-progress", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def add(self, step: _Once) -> None:
        # a program that waits at once is faster alone than with a second thread that wakes for the same messages
        self._queue.put((time.monotonic() + _HEAD_START, step))

    @staticmethod
    def _loop(steps: queue.SimpleQueue[tuple[float, _Once] | None]) -> None:
        # results may be inference tensors, which can be written only in inference mode; nothing made here outlives the step
        with torch.inference_mode():
            while (item := steps.get()) is not None:
                due, step = item
                time.sleep(max(0.0, due - time.monotonic()))
                try:
                    if not step.claimed:
                        step()
                except CommError:
                    pass  # kept by the step, raised to the one who waits
                del item, step


class _Scratch:
    """Buffers of messages, kept for the next of their size: memory fresh from the system costs more than what is done with it.

    There are as many of a size as were in use at the same time.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        free = self._free.get((like.shape, like.dtype, like.device))
        return free.pop() if free else torch.empty_like(like)

    def give(self, used: list[Tensor]) -> None:
        for t in used:
            self._free.setdefault((t.shape, t.dtype, t.device), []).append(t)
        used.clear()


#: messages under way: the torch handle and the mesh rank at the other end.
_Works = list[tuple[Any, int]]


class DistComm(Comm):
    """Collectives over torch.distributed.

    On gloo every collective is made of direct messages, receives posted before sends: measured on loopback this is 2 to 5 times faster than
    gloo's own reduce-scatter and all-gather and as fast as its all-reduce and all-to-all, moves no more than the needed bytes, and sums in
    group order. The messages of all axes share one process group, and control exchanges another, both made here so that two comms never
    mix theirs: tags tell the groups' collectives apart, and pairs of ranks that differ along different axes have different sockets
    anyway. Other backends use their own asynchronous collectives, in a process group for each set of ranks. A mesh of one rank needs no
    process group at all.

    Making, preparing and closing a comm are done by all ranks in the same order.

    Args:
        mesh: the mesh; its rank ``r`` is rank ``r`` of the process group.
        group: the process group that the mesh spans; None is the default group.
        device: where tensors live; default the mesh's, else the CPU.
        timeout: seconds that this rank waits for a message; default the process group's.
        direct: whether to use direct messages; None chooses by backend.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        direct: bool | None = None,
    ) -> None:
        self._watch: Watch | None = None
        self._started = 0  # collectives and exchanges
        self._direct = False
        self._transport: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._progress: _Progress | None = None
        self._broken = ""
        self._counts: dict[int, int] = {}
        self._sent_counts: dict[tuple[str, int, int], int] = {}
        self._channels: dict[str, dist.ProcessGroup] = {}
        self._scratch = _Scratch()
        self._pgs: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._made: list[dist.ProcessGroup] = []
        self._is_world = group is None
        self._globals = [0]
        rank = 0
        if mesh.size > 1:
            if not dist.is_initialized():
                hint = "call autopar.runtime.launch.init first"
                raise CommError(f"the mesh {mesh} has {mesh.size} ranks, but there is no process group", hint=hint)
            whole = group if group is not None else dist.group.WORLD
            assert whole is not None
            if whole.size() != mesh.size:
                raise CommError(f"the mesh {mesh} has {mesh.size} ranks, the process group {whole.size()}")
            rank = whole.rank()
            given: Any = whole.get_group_store()  # its stubs don't know of the timeout
            self._timeout = timedelta(seconds=timeout) if timeout is not None else given.timeout
            me = weakref.ref(self)
            self._watch = Watch(whole, rank, lambda: comm._sever() if (comm := me()) is not None else None)
            self._meet(str(mesh))
            self._globals = dist.get_process_group_ranks(whole)
            self._pgs[tuple(range(mesh.size))] = whole
        super().__init__(mesh, rank, device)
        self._waiting = self._watch.waiting if self._watch is not None else {}
        self._everyone = Group(mesh.names, tuple(range(mesh.size)), rank)
        if direct is None:
            direct = mesh.size == 1 or self._pgs[self._everyone.key]._get_backend(self.device).name() == "gloo"
        self._direct = direct
        if direct and mesh.size > 1:
            self._transport = self._make_process_group(self._everyone.key, together=self._is_world)
            # a small message would wait behind all the data that is under way on the same socket
            self._control = self._make_process_group(self._everyone.key, together=self._is_world)

    def prepare(self, axes_list: Iterable[Sequence[str]], channels: bool = False) -> None:
        wanted = [tuple(axes) for axes in axes_list]
        super().prepare(wanted, channels)
        for rank, other in enumerate(self.exchange(wanted, site="prepare")):
            if other != wanted:
                raise CommError(f"ranks prepare different groups: rank {self.rank} {wanted}, rank {rank} {other}")
        if self._direct:
            return
        for channel in CHANNELS if channels and self.mesh.size > 1 and not self._channels else ():
            self._channels[channel] = self._make_process_group(self._everyone.key, together=self._is_world)
        for axes in wanted:
            for ranks in self.mesh.groups(axes):
                key = tuple(sorted(ranks))
                if len(key) > 1 and key not in self._pgs and (self._is_world or self.rank in key):
                    made = self._make_process_group(key, together=self._is_world)
                    if self.rank in key:
                        self._pgs[key] = made

    def close(self) -> None:
        """Ends the helper threads and the process groups made here. No handle may be under way; nothing can be started after."""
        error = sys.exception()
        if self._watch is not None:
            if error is not None and not getattr(error, "everywhere", False):
                self._watch.tell(Failure.of(error, self.rank))  # closed on the way out of an error
            self._watch.close("it closed its step while others went on")
        self._progress = None
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
        self._transport = self._control = None
        self._broken = "the comm is closed"

    def exchange_later(self, obj: Any, *, site: str = "") -> Callable[[], list[Any]]:
        if self.mesh.size == 1:
            return lambda: [obj]
        self._check_usable(f"exchange at {site}" if site else "exchange")
        finish = (self._direct_exchange if self._direct else self._native_exchange)((site, obj), site)

        def complete() -> list[Any]:
            found = finish()
            for rank, (theirs, _) in enumerate(found):
                if theirs != found[0][0]:
                    raise CommError(
                        f"rank {rank} is at {theirs or 'an exchange'}, rank 0 at {found[0][0] or 'an exchange'}", where="exchange",
                        why="every rank makes the same calls of a step, in one order",
                    ).alike()  # fmt: skip
            return [value for _, value in found]

        return complete

    def _native_exchange(self, obj: Any, site: str) -> Callable[[], list[Any]]:
        found: list[Any] = [None] * self.mesh.size
        try:
            dist.all_gather_object(found, obj, group=self._pgs[self._everyone.key])
        except RuntimeError as error:
            raise self._failure("exchange", self._everyone, site, None, error) from error
        return lambda: found

    def _direct_exchange(self, obj: Any, site: str) -> Callable[[], list[Any]]:
        # every rank to every other: who died is noticed by all, not only by its neighbours on a ring
        group, n, tag = self._everyone, self.mesh.size, self._tag(_EXCHANGE)
        text = pickle.dumps(obj)
        own = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text.ljust(_FRAME - 8, b"\0")), dtype=torch.uint8)
        frames = [own.new_empty(_FRAME) for _ in range(n)]
        works, _ = self._post(group, tag, [own[:_FRAME]] * n, frames, "exchange", site, self._control)

        def finish() -> list[Any]:
            self._await(group, works, "exchange", site)
            frames[self.rank] = own
            lengths = [int.from_bytes(frame[:8].numpy().tobytes(), "little") for frame in frames]
            rests = [own.new_empty(max(0, length + 8 - _FRAME)) for length in lengths]
            more, _ = self._post(group, tag + 1, [own[_FRAME:]] * n, rests, "exchange", site, self._control)
            self._await(group, more, "exchange", site)
            rests[self.rank] = own[_FRAME:]
            return [
                pickle.loads(torch.cat([frame[8:_FRAME], rest])[:length].numpy().tobytes())
                for frame, rest, length in zip(frames, rests, lengths, strict=True)
            ]

        return finish

    # -- messages

    def _check_usable(self, doing: str) -> None:
        self._started += 1
        if self._broken:
            raise CommError(f"{doing}: communication has failed before or was closed", why=self._broken)

    def _failure(self, doing: str, group: Group, site: str, peer: int | None, error: Exception) -> CommError:
        whom = "" if peer is None else f" (message with rank {peer})"
        told = str(error).rpartition("] ")[2] if str(error).startswith("[/") else str(error)  # without the place in gloo's own source
        doing = f"{doing} failed{whom}; its ranks are {list(group.ranks)}: {type(error).__name__}: {told.split('. This is')[0]}"
        if self._watch is None:
            made = CommError(doing, where=site)
        else:
            # a backend's own collective doesn't say whose message is missing
            other = peer if peer is not None else next((r for r in group.ranks if r != self.rank), self.rank)
            made = self._watch.error(self._watch.broken(other, error, self._timeout.total_seconds()), doing)
        if not self._broken:
            self._broken = f"{made.what}: {made.why}"
        return made

    @contextmanager
    def guard(self) -> Iterator[None]:
        before = self._started
        try:
            yield
        except BaseException as error:
            # nobody waits in a call in which nothing was sent yet
            if self._watch is not None and self._started != before and not getattr(error, "everywhere", False):
                first = self._watch.tell(Failure.of(error, self.rank))
                self._broken = self._broken or f"rank {first.rank} failed: {first.text}"
                self._sever()
            raise

    def _sever(self) -> None:
        """Fails everything that this rank waits for or starts, and by that what others wait for from it. From any thread."""
        own = [group for group in (self._transport, self._control) if group is not None]
        groups = own or ([] if self._direct else list(self._pgs.values()))
        for group in groups:
            try:
                group.abort()
                if group._get_backend(self.device).name() == "gloo":
                    # gloo can't be told to stop, but closes all connections of a group in which a message was waited for in vain
                    peer = (group.rank() + 1) % group.size()
                    group.recv([torch.empty(1)], peer, _TAGS_PER_COUNT - 1).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass

    def _meet(self, mesh: str) -> None:
        """All ranks are here, with one mesh."""
        assert self._watch is not None
        everyone = self._watch.meet(mesh, self._timeout.total_seconds())
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise InputError(f"rank {rank} has the mesh {theirs}, rank 0 {everyone[0]}", hint="one mesh on every rank").alike()

    def _post(
        self,
        group: Group,
        tag: int,
        sends: Sequence[Tensor],
        recvs: Sequence[Tensor],
        doing: str,
        site: str,
        over: dist.ProcessGroup | None,
    ) -> tuple[_Works, int]:
        """Posts the messages of one round, and counts the bytes sent.

        Entry ``i`` of both lists is for the group's rank ``i``, the own entries are ignored. Empty tensors are not sent: both ends know the
        shapes.
        """
        works: _Works = []
        sent = 0
        peer = self.rank
        try:
            # peers in turn from the own place on, so that not everyone talks to rank 0 first
            for step in range(1, group.size):
                at = (group.index - step) % group.size
                if recvs[at].numel():
                    peer = group.ranks[at]
                    works.append((dist.irecv(recvs[at], src=self._globals[peer], group=over, tag=tag), peer))
            for step in range(1, group.size):
                at = (group.index + step) % group.size
                if sends[at].numel():
                    peer = group.ranks[at]
                    works.append((dist.isend(sends[at], dst=self._globals[peer], group=over, tag=tag), peer))
                    sent += sends[at].numel() * sends[at].itemsize
        except RuntimeError as error:
            raise self._failure(f"starting {doing}", group, site, peer, error) from error
        return works, sent

    def _await(self, group: Group, works: _Works, doing: str, site: str) -> None:
        waiting, me = self._waiting, threading.get_ident()
        waiting[me] = doing
        for work, peer in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(doing, group, site, peer, error) from error
        del waiting[me]
        works.clear()

    def _tag(self, number: int) -> int:
        """An even tag, the next of a kind of groups; the same on all ranks of a group as they run the same program. The next odd is free.

        Two collectives between the same two ranks have different tags: their groups differ in ``number``, or they differ in the count.
        """
        count = self._counts.get(number, 0)
        self._counts[number] = count + 1
        return count % _COUNTS * _TAGS_PER_COUNT + 2 * number

    def _number(self, group: Group) -> int:
        """Which axes a group is over, whatever their order: a bit an axis."""
        axes = {axis_of(a) for a in group.axes}
        part = _WITHIN if any("%" in a for a in group.axes) else _ACROSS if any("/" in a for a in group.axes) else 0
        return part + sum(1 << bit for bit, (name, size) in enumerate(self.mesh.axes) if size > 1 and name in axes)

    def _exchange_round(self, call: Call, tag: int, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> _Works:
        works, sent = self._post(call.group, tag, sends, recvs, call.position(), call.site, self._transport)
        call.record.bytes += sent
        return works

    def _finish_round(self, call: Call, works: _Works) -> None:
        self._await(call.group, works, call.position(), call.site)

    def _begin(self, call: Call) -> Callable[[], Tensor]:
        self._check_usable(call.position())
        start = getattr(self, f"_{'direct' if self._direct else 'native'}_{call.kind}")
        return start(call)

    # -- between two ranks

    def _begin_send(self, x: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        return self._begin_message("send", x, peer, channel, site)

    def _begin_receive(self, out: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        return self._begin_message("receive", out, peer, channel, site)

    def _begin_message(self, kind: str, x: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        at = f" at {site}" if site else ""
        doing = f"{kind} ({channel}){at}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        self._check_usable(doing)
        if not x.numel():
            return lambda: x
        group = Group(("pp",), tuple(sorted((self.rank, peer))), int(self.rank > peer))
        number = _CHANNEL + CHANNELS.index(channel)
        count = self._sent_counts.get((kind, peer, number), 0)
        self._sent_counts[kind, peer, number] = count + 1
        tag = count % _COUNTS * _TAGS_PER_COUNT + 2 * number
        over = self._transport if self._direct else self._channel_group(channel)
        try:
            if kind == "send":
                work = dist.isend(x, dst=self._globals[peer], group=over, tag=tag)
            else:
                work = dist.irecv(x, src=self._globals[peer], group=over, tag=tag)
        except RuntimeError as error:
            raise self._failure(f"starting {doing}", group, site, peer, error) from error
        works: _Works = [(work, peer)]

        def finish() -> Tensor:
            self._await(group, works, doing, site)
            return x

        return finish

    def _channel_group(self, channel: str) -> dist.ProcessGroup:
        """Backends that run messages of one group one after the other get a group for each channel."""
        found = self._channels.get(channel)
        if found is None:
            raise CommError(f"channel {channel!r} was not prepared", hint="comm.prepare(axes, channels=True) on all ranks")
        return found

    # -- from direct messages

    def _direct_all_gather(self, call: Call) -> Callable[[], Tensor]:
        x, n, out = call.x, call.group.size, call.result()
        in_place = _leading(x.shape, call.dim)
        places = list(out.tensor_split(n, call.dim)) if in_place else [torch.empty_like(x) for _ in range(n)]
        works = self._exchange_round(call, self._tag(self._number(call.group)), [x] * n, places)
        own = places[call.group.index]
        if not in_place:
            places[call.group.index] = x
        elif own.data_ptr() != x.data_ptr():
            own.copy_(x)

        def finish() -> Tensor:
            self._finish_round(call, works)
            return out if in_place else self._gather(places, call.dim, out)

        return finish

    def _direct_reduce_scatter(self, call: Call) -> Callable[[], Tensor]:
        n, out = call.group.size, call.result()
        pieces = self._cut(call.x, n, call.dim)
        parts = [pieces[0] if i == call.group.index else self._scratch.take(pieces[0]) for i in range(n)]
        works = self._exchange_round(call, self._tag(self._number(call.group)), pieces, parts)
        parts[call.group.index] = pieces[call.group.index]

        def finish() -> Tensor:
            self._finish_round(call, works)
            pieces.clear()
            total = self._reduce(parts, call.op, out)
            del parts[call.group.index]
            self._scratch.give(parts)
            return total

        return finish

    def _direct_all_to_all(self, call: Call) -> Callable[[], Tensor]:
        n, out = call.group.size, call.result()
        pieces = self._cut(call.x, n, call.dim)
        in_place = _leading(pieces[0].shape, call.concat_dim)
        places = list(out.tensor_split(n, call.concat_dim)) if in_place else [torch.empty_like(pieces[0]) for _ in range(n)]
        works = self._exchange_round(call, self._tag(self._number(call.group)), pieces, places)
        if in_place:
            places[call.group.index].copy_(pieces[call.group.index])
        else:
            places[call.group.index] = pieces[call.group.index]

        def finish() -> Tensor:
            self._finish_round(call, works)
            pieces.clear()
            return out if in_place else self._gather(places, call.concat_dim, out)

        return finish

    def _direct_shift(self, call: Call) -> Callable[[], Tensor]:
        n, index, out = call.group.size, call.group.index, call.result()
        sends, places = ([call.x.new_empty(0)] * n for _ in range(2))
        sends[(index + 1) % n], places[(index - 1) % n] = call.x, out
        works = self._exchange_round(call, self._tag(self._number(call.group)), sends, places)

        def finish() -> Tensor:
            self._finish_round(call, works)
            sends.clear()
            return out

        return finish

    def _direct_mirror(self, call: Call) -> Callable[[], Tensor]:
        n, index, out = call.group.size, call.group.index, call.result()
        first, second = self._cut(call.x, 2, call.dim)
        sends, places = ([call.x.new_empty(0)] * n for _ in range(2))
        sends[n - 1 - index], places[n - 1 - index] = second, torch.empty_like(second)
        works = self._exchange_round(call, self._tag(self._number(call.group)), sends, places)

        def finish() -> Tensor:
            self._finish_round(call, works)
            sends.clear()
            return self._gather([first, second if 2 * index == n - 1 else places[n - 1 - index]], call.dim, out)

        return finish

    def _direct_all_reduce(self, call: Call) -> Callable[[], Tensor]:
        x, n, index, out = call.x.reshape(-1), call.group.size, call.group.index, call.result()
        flat, tag = out.view(-1), self._tag(self._number(call.group))
        if x.numel() * x.itemsize <= SMALL_ALL_REDUCE:
            parts = [torch.empty_like(x) for _ in range(n)]
            works = self._exchange_round(call, tag, [x] * n, parts)
            parts[index] = x

            def finish_small() -> Tensor:
                self._finish_round(call, works)
                self._reduce(parts, call.op, flat)
                return out

            return finish_small

        spans = [chunk(x.numel(), n, i) for i in range(n)]
        pieces = [x.narrow(0, start, size) for start, size in spans]
        places = [flat.narrow(0, start, size) for start, size in spans]
        parts = [torch.empty_like(pieces[index]) for _ in range(n)]
        # out may be x: the second round brings piece i only from the rank that has received, and summed, this rank's piece i
        first = self._exchange_round(call, tag, pieces, parts)
        parts[index] = pieces[index]
        second: _Works = []

        def between() -> None:
            self._finish_round(call, first)
            self._reduce(parts, call.op, places[index])
            parts.clear()
            second.extend(self._exchange_round(call, tag + 1, [places[index]] * n, places))

        once = _Once(between)
        if self._progress is None:
            self._progress = _Progress()
        self._progress.add(once)

        def finish() -> Tensor:
            once.claimed = True
            once()
            self._finish_round(call, second)
            return out

        return finish

    # -- from the backend's own collectives (pieces travel in the process group's order, which is sorted by rank)

    def _make_process_group(self, key: tuple[int, ...], together: bool) -> dist.ProcessGroup:
        """A new process group of a sorted set of mesh ranks.

        Args:
            together: all ranks of the world are here, in the same order. Else only the members meet; such a group is never destroyed, as
                torch would give its name, and with it the stale addresses in the store, to the next one of the same ranks.
        """
        ranks = [self._globals[rank] for rank in key]
        try:
            made = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=not together)
        except RuntimeError as error:
            raise self._failure("making a process group", Group((), key, 0), "", None, error) from error
        if together and self.rank in key:
            self._made.append(made)
        return made

    def _launch(self, call: Call, start: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
        group, doing = call.group, call.position()
        if group.key not in self._pgs:
            self._pgs[group.key] = self._make_process_group(group.key, together=False)
        try:
            work = start(*args, group=self._pgs[group.key], async_op=True, **kwargs)
        except RuntimeError as error:
            raise self._failure(f"starting {doing}", group, call.site, None, error) from error
        call.record.bytes = bytes_sent(call.kind, call.x.numel(), call.x.itemsize, group.size, group.index)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(doing, group, call.site, None, error) from error

        return wait

    @staticmethod
    def _seats(group: Group) -> list[int]:
        """For each place in group order, the place in the process group."""
        return [group.key.index(rank) for rank in group.ranks]

    def _native_all_reduce(self, call: Call) -> Callable[[], Tensor]:
        out = call.result().copy_(call.x)
        if not out.numel():
            return lambda: out
        wait = self._launch(call, dist.all_reduce, out, op=_REDUCE_OPS[call.op])

        def finish() -> Tensor:
            wait()
            return out

        return finish

    def _native_all_gather(self, call: Call) -> Callable[[], Tensor]:
        x, n, out, seats = call.x, call.group.size, call.result(), self._seats(call.group)
        if not x.numel():
            return lambda: out
        in_place = _leading(x.shape, call.dim) and seats == sorted(seats)
        landing = out.view(-1) if in_place else x.new_empty(n * x.numel())
        wait = self._launch(call, dist.all_gather_into_tensor, landing, x.view(-1))

        def finish() -> Tensor:
            wait()
            if in_place:
                return out
            rows = landing.view(n, *x.shape)
            return self._gather([rows[seat] for seat in seats], call.dim, out)

        return finish

    def _native_reduce_scatter(self, call: Call) -> Callable[[], Tensor]:
        out, packed = call.result(), self._pack(call)
        if not call.x.numel():
            return lambda: out
        wait = self._launch(call, dist.reduce_scatter_tensor, out.view(-1), packed, op=_REDUCE_OPS[call.op])

        def finish() -> Tensor:
            wait()
            return out

        return finish

    def _native_all_to_all(self, call: Call) -> Callable[[], Tensor]:
        n, out, seats = call.group.size, call.result(), self._seats(call.group)
        if not call.x.numel():
            return lambda: out
        packed = self._pack(call)
        landing = torch.empty_like(packed)
        wait = self._launch(call, dist.all_to_all_single, landing, packed)
        shape = list(call.x.shape)
        shape[call.dim] //= n

        def finish() -> Tensor:
            wait()
            rows = landing.view(n, *shape)
            return self._gather([rows[seat] for seat in seats], call.concat_dim, out)

        return finish

    def _native_shift(self, call: Call) -> Callable[[], Tensor]:
        n, index, out, seats = call.group.size, call.group.index, call.result(), self._seats(call.group)
        if not call.x.numel():
            return lambda: out
        from_, to = ([0] * n for _ in range(2))
        from_[seats[(index - 1) % n]] = to[seats[(index + 1) % n]] = call.x.numel()
        wait = self._launch(call, dist.all_to_all_single, out.view(-1), call.x.view(-1), from_, to)

        def finish() -> Tensor:
            wait()
            return out

        return finish

    def _native_mirror(self, call: Call) -> Callable[[], Tensor]:
        n, index, out, seats = call.group.size, call.group.index, call.result(), self._seats(call.group)
        if not call.x.numel():
            return lambda: out
        first, second = self._cut(call.x, 2, call.dim)
        landing, sizes = torch.empty_like(second), [0] * n
        sizes[seats[n - 1 - index]] = second.numel()
        wait = self._launch(call, dist.all_to_all_single, landing.view(-1), second.view(-1), sizes, sizes)

        def finish() -> Tensor:
            wait()
            return self._gather([first, landing], call.dim, out)

        return finish

    def _pack(self, call: Call) -> Tensor:
        """The pieces of ``x`` along ``dim``, each flat, in the process group's order: 1-D, as many elements as ``x``."""
        seats = self._seats(call.group)
        if _leading(call.x.shape, call.dim) and seats == sorted(seats):
            return call.x.view(-1)
        pieces = self._cut(call.x, call.group.size, call.dim)
        return torch.cat([pieces[seats.index(place)].view(-1) for place in range(call.group.size)])


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
