"""All ranks of a mesh in one process: a thread each, one running at a time, no process group. For tests and for checking programs."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.errors import CommError
from autopar.layout.mesh import Mesh
from autopar.layout.traffic import bytes_sent
from autopar.runtime.comm import Call, Comm

T = TypeVar("T")


class _Stopped(BaseException):
    """Unwinds a rank because another one failed. Not an Exception, so that programs don't catch it."""


@dataclass
class _Slot:
    """The k-th collective of a group: what each rank brought, by rank."""

    signature: tuple[Any, ...]
    first: int
    text: str
    size: int
    parts: dict[int, Any] = field(default_factory=dict)
    taken: int = 0

    @property
    def full(self) -> bool:
        return len(self.parts) == self.size


class SimWorld:
    """What the simulated ranks share: whose turn it is, what they have posted, and the first failure."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self._gates = [threading.Semaphore(0) for _ in range(mesh.size)]
        self._ready: list[Callable[[], bool] | None] = [None] * mesh.size
        self._position = ["not begun"] * mesh.size
        self._finished = [False] * mesh.size
        self._slots: dict[tuple[Any, int], _Slot] = {}
        self._counts: dict[tuple[Any, int], int] = {}
        #: messages that were sent and not yet received, by sender, receiver, channel and place in it; and how many of either there were
        self.mail: dict[tuple[int, int, str, int], tuple[str, Tensor]] = {}
        self.sent: Counter[tuple[int, int, str]] = Counter()
        self.read: Counter[tuple[int, int, str]] = Counter()

    def positions(self) -> str:
        """Every rank's position, a line each."""
        return "\n".join(f"    rank {rank}: {text}" for rank, text in enumerate(self._position))

    # -- the baton

    def begin(self, rank: int) -> None:
        """Called first by each rank's thread: waits for its turn."""
        self._gates[rank].acquire()
        self._check()
        self._position[rank] = "running"

    def open(self) -> None:
        """Gives rank 0 the first turn."""
        self._gates[0].release()

    def block(self, rank: int, position: str, ready: Callable[[], bool]) -> None:
        """Returns when ``ready()``, letting other ranks run until then.

        Raises:
            CommError: no rank can run: each waits for another; or the run is over, and what is waited for will not come.
        """
        if self._finished[rank] and not ready():
            raise CommError("the simulated ranks have ended", where=position)
        if not self._finished[rank]:
            self._check()
        if ready():
            return
        self._ready[rank], self._position[rank] = ready, f"waits in {position}"
        follower = self._next(rank)
        if follower is None:
            raise self._deadlock("every rank waits for a collective that others have not started")
        self._gates[follower].release()
        self._gates[rank].acquire()
        self._check()
        self._ready[rank], self._position[rank] = None, "running"

    def end(self, rank: int, failure: BaseException | None) -> None:
        """Called last by each rank's thread."""
        if failure is not None and not isinstance(failure, _Stopped) and self.failure is None:
            self.failed_rank, self.failure = rank, failure
        self._finished[rank] = True
        if self.failure is not None:
            self.stop()
            return
        self._position[rank] = "finished"
        follower = self._next(rank)
        if follower is not None:
            self._gates[follower].release()
        elif not all(self._finished):
            self.failed_rank = rank
            self.failure = self._deadlock("ranks wait for one that has finished")
            self.stop()

    def _deadlock(self, why: str) -> CommError:
        return CommError("deadlock: no simulated rank can go on", why=f"{why}\n{self.positions()}")

    def stop(self) -> None:
        """Wakes all ranks so that they unwind."""
        for gate in self._gates:
            gate.release()

    def _check(self) -> None:
        if self.failure is not None:
            raise _Stopped

    def _next(self, rank: int) -> int | None:
        """The next rank in round-robin order that can run."""
        for step in range(1, self.mesh.size + 1):
            other = (rank + step) % self.mesh.size
            ready = self._ready[other]
            if not self._finished[other] and (ready is None or ready()) and other != rank:
                return other
        return None

    # -- meeting in a collective

    def post(self, key: Any, rank: int, size: int, signature: tuple[Any, ...], text: str, part: Any) -> _Slot:
        """Brings a rank's part to its next collective on ``key``.

        Raises:
            CommError: another rank of the group brought a different collective as its k-th.
        """
        self._check()
        count = self._counts.get((key, rank), 0)
        self._counts[key, rank] = count + 1
        slot = self._slots.setdefault((key, count), _Slot(signature, rank, text, size))
        if slot.signature != signature:
            raise CommError(
                f"ranks disagree on collective {count} of their group {list(key)}",
                why=f"rank {slot.first} started {slot.text}\n    rank {rank} started {text}",
            )
        slot.parts[rank] = part
        if slot.full:
            del self._slots[key, count]  # the handles hold it from now on
        return slot


class SimComm(Comm):
    """One simulated rank. Same interface, order of summation and counted bytes as ``DistComm``.

    It is stricter than a real transport: an input that was changed, or not kept, until ``wait`` is an error, and a float ``out`` holds NaN
    until then. ``prepare`` is not needed.
    """

    def __init__(self, world: SimWorld, rank: int, device: torch.device | str | None = None) -> None:
        super().__init__(world.mesh, rank, device)
        self._world = world

    def exchange_later(self, obj: Any, *, site: str = "") -> Callable[[], list[Any]]:
        everyone = tuple(range(self.mesh.size))
        text = f"exchange at {site}" if site else "exchange"
        # pickled as between processes, so that ranks never share an object
        slot = self._world.post(("exchange", *everyone), self.rank, self.mesh.size, ("exchange", site), text, pickle.dumps(obj))

        def finish() -> list[Any]:
            self._world.block(self.rank, text, lambda: slot.full)
            return [pickle.loads(slot.parts[rank]) for rank in everyone]

        return finish

    def give(self, x: Tensor) -> None:
        """What is read after it was given back shows."""
        super().give(x)
        if x.is_floating_point():
            x.fill_(float("nan"))

    def _begin_send(self, x: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        self._world._check()
        sent, key = x.clone(), (self.rank, peer, channel)
        self._world.mail[*key, self._world.sent[key]] = (site, sent)
        self._world.sent[key] += 1

        def finish() -> Tensor:
            if not torch.equal(bits(x), bits(sent)):
                raise CommError(f"send ({channel}) at {site}: the tensor was modified between start and wait", where=site)
            return x

        return finish

    def _begin_receive(self, out: Tensor, peer: int, channel: str, site: str) -> Callable[[], Tensor]:
        self._world._check()
        key, mail = (peer, self.rank, channel), self._world.mail
        place = self._world.read[key]
        self._world.read[key] += 1
        if out.is_floating_point():
            out.fill_(float("nan"))

        def finish() -> Tensor:
            self._world.block(self.rank, f"receive ({channel}) from rank {peer} at {site}", lambda: (*key, place) in mail)
            theirs, x = mail.pop((*key, place))
            if theirs != site or x.shape != out.shape or x.dtype != out.dtype:
                raise CommError(
                    f"rank {peer} sent {theirs} in place {place} of its channel {channel!r} to rank {self.rank}, which expects {site}",
                    why=f"{x.dtype}{list(x.shape)} was sent, {out.dtype}{list(out.shape)} is expected", where=site,
                )  # fmt: skip
            return out.copy_(x)

        return finish

    def _begin(self, call: Call) -> Callable[[], Tensor]:
        group, x = call.group, call.x
        signature = (call.kind, group.axes, tuple(x.shape), x.dtype, call.dim, call.concat_dim, call.op, call.site)
        detail = {"all_reduce": f"op {call.op}", "all_gather": f"dim {call.dim}", "reduce_scatter": f"dim {call.dim}, op {call.op}"}
        text = f"{call.position()}, {detail.get(call.kind, f'dims {call.dim} to {call.concat_dim}')}"
        sent = x.clone()
        slot = self._world.post(group.key, self.rank, group.size, signature, text, sent)
        call.record.bytes = bytes_sent(call.kind, x.numel(), x.itemsize, group.size, group.index)
        if call.out is not None and call.out.is_floating_point() and _storage(call.out) != _storage(x):
            call.out.fill_(float("nan"))

        def finish() -> Tensor:
            self._world.block(self.rank, text, lambda: slot.full)
            if not torch.equal(bits(x), bits(sent)):
                raise CommError(f"{call.position()}: the input was modified between start and wait", where=call.site)
            parts = [slot.parts[rank] for rank in group.ranks]
            slot.taken += 1
            if slot.taken == slot.size:
                slot.parts.clear()
            value = self._combine(call, parts)
            if tuple(value.shape) != call.shape:  # torch resizes an `out` that doesn't fit
                raise CommError(f"{call.position()}: the result has shape {list(value.shape)}, not {list(call.shape)}", where=call.site)
            return value

        return finish

    def _combine(self, call: Call, parts: list[Tensor]) -> Tensor:
        """The result of a collective from all ranks' inputs in group order."""
        out, n, index = call.result(), call.group.size, call.group.index
        if call.kind == "all_reduce":
            return self._reduce(parts, call.op, out)
        if call.kind == "all_gather":
            return self._gather(parts, call.dim, out)
        if call.kind == "shift":
            return out.copy_(parts[index - 1])
        if call.kind == "mirror":
            return self._gather([self._cut(parts[index], 2, call.dim)[0], self._cut(parts[n - 1 - index], 2, call.dim)[1]], call.dim, out)
        pieces = [self._cut(part, n, call.dim)[index] for part in parts]
        if not all(piece.is_contiguous() for piece in pieces):
            raise CommError(f"{call.position()}: a piece isn't contiguous, and a transport sends memory as it lies", where=call.site)
        if call.kind == "reduce_scatter":
            return self._reduce(pieces, call.op, out)
        return self._gather(pieces, call.concat_dim, out)


def _storage(x: Tensor) -> int:
    """Where the memory that ``x`` is a view of begins."""
    return x.untyped_storage().data_ptr()


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, 1-D uint8: NaN equals itself, and -0.0 differs from 0.0."""
    # a copy: a tensor of one element may have stride 0 and count as contiguous, but not be viewed in another type
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def run_simulated(
    mesh: Mesh,
    fn: Callable[[Any], T],
    *,
    timeout: float = 120.0,
    device: torch.device | str | None = None,
    make: Callable[[SimWorld, int, torch.device | str | None], Comm] = SimComm,
) -> list[T]:
    """Runs ``fn(comm)`` once per rank of the mesh and returns the results by rank.

    Ranks run one at a time and change only where one has to wait (``Handle.wait``, ``exchange``, ``barrier``), in round-robin order: every
    run is the same. Gradient and inference mode are per thread in torch; ``fn`` sets its own.

    Args:
        timeout: seconds for the whole run.
        device: given to every comm.
        make: makes a rank's comm; a test that plants a fault gives a subclass of ``SimComm``.

    Raises:
        CommError: deadlock (with every rank's position), ranks that disagree, an input modified in flight, or the timeout.
        Exception: whatever ``fn`` raised first, with a note that names the rank.
    """
    world = SimWorld(mesh)
    results: list[Any] = [None] * mesh.size

    def rank_main(rank: int) -> None:
        failure: BaseException | None = None
        try:
            world.begin(rank)
            results[rank] = fn(make(world, rank, device))
        except BaseException as error:  # noqa: BLE001 (an exit in a thread must end the run as well)
            failure = error
        world.end(rank, failure)

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"simulated rank {rank}", daemon=True) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    world.open()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads) and world.failure is None:
        where = world.positions()
        world.failure = late = CommError(f"the simulated run on {mesh} took longer than {timeout:g} s", why="positions:\n" + where)
        world.stop()
        raise late
    if world.failure is not None:
        failure = world.failure
        failure.add_note(f"on simulated rank {world.failed_rank} {mesh.coords(world.failed_rank)} of mesh {mesh}")
        raise failure
    return results
