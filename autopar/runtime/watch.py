"""What ranks tell each other beside the tensors: who failed first, and with what error.

A rank that fails writes its error into the store of the process group and then breaks its connections off. On every rank a thread
looks there once a second, and breaks off this rank's waits when another rank has failed. A process that dies needs no word: its
connections break by themselves. Being slow is no failure: a rank that computes, compiles or stands in a debugger is waited for as long
as the comm's timeout says.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, CommError

#: seconds between two looks at the store.
_PERIOD = 1.0
#: seconds that a process which ends after a failure waits for the others to show theirs, as a launcher kills those that are left.
_LINGER = 5.0
#: code of these folders is not the user's.
_NOT_THEIRS = tuple(str(Path(file).parent) + os.sep for file in (Path(__file__).parent, torch.__file__, os.__file__))
_KEYS = "autopar"


@dataclass(frozen=True)
class Failure:
    """The first failure of a comm. ``rank`` is on its mesh; ``late``: a message didn't come in time; ``gone``: the process ended."""

    rank: int
    text: str
    where: str = ""
    why: str = ""
    late: bool = False
    gone: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(error: BaseException, rank: int) -> Failure:
        if isinstance(error, AutoparError):
            return Failure(rank, f"{type(error).__name__}: {error.what}", error.where, error.why)
        text = "".join(traceback.format_exception_only(error)).strip()
        return Failure(rank, text, _place(reversed(list(traceback.walk_tb(error.__traceback__)))))


class Watch:
    """A rank's view of the failures of one comm. Made and closed by all ranks of a comm in the same order.

    Args:
        group: the process group whose store carries the words.
        rank: this rank of it.
        sever: breaks off everything that this rank waits for.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, sever: Callable[[], None]) -> None:
        self.rank, self.size = rank, group.size()
        self.failure: Failure | None = None
        self.waiting: dict[int, str] = {}  # by thread: what it waits for
        self._sever = sever
        self._world = dist.PrefixStore(_KEYS, group.get_group_store().clone())  # type: ignore[attr-defined]
        self._number = self._world.add(f"made/{rank}", 1)
        self._store = dist.PrefixStore(str(self._number), self._world)
        self._since = 0.0
        self._closed = threading.Event()
        reference = weakref.ref(self)
        weakref.finalize(self, self._closed.set)
        atexit.register(_at_exit, reference)
        self._thread = threading.Thread(target=_watch, args=(reference, self._closed), name="autopar-watch", daemon=True)
        self._thread.start()

    def meet(self, mine: str, timeout: float) -> list[str]:
        """Every rank's ``mine``, by rank, once all have come here. Raises CommError where one fails first, or doesn't come."""
        self._store.set(f"met/{self.rank}", mine)
        end, pause = time.monotonic() + timeout, 0.001
        while not self._store.check([f"met/{r}" for r in range(self.size)]):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if (failure := self.look()) is not None:
                raise self.error(failure, "it waited for all ranks to make their step")
            if time.monotonic() > end:
                missing = [r for r in range(self.size) if not self._store.check([f"met/{r}"])]
                raise CommError(
                    f"ranks {missing} did not come within {timeout:g} s", why="every rank calls parallelize, in one order",
                    hint="look for their errors; timeout= sets how long the others wait",
                )  # fmt: skip
        return [self._store.get(f"met/{r}").decode() for r in range(self.size)]

    # -- failures

    def tell(self, failure: Failure) -> Failure:
        """Makes a failure known; the first one that was is returned, and wins."""
        known = self.look()
        if known is None:
            try:
                known = _read(self._store.compare_set("first", "", failure.to_json()))
            except RuntimeError:  # the store has gone with the rank that held it
                known = failure
            self._note(known)
        return known

    def look(self) -> Failure | None:
        """The first failure of a rank, if there is one."""
        if self.failure is None:
            try:
                if self._store.check(["first"]):
                    self._note(_read(self._store.get("first")))
                elif self._world.check(["ended"]):
                    self._note(_read(self._world.get("ended")))
            except RuntimeError:
                pass
        return self.failure

    def broken(self, peer: int, error: Exception, timeout: float) -> Failure:
        """The failure behind a message that failed."""
        known = self.look()
        if known is not None:
            return known
        if "timed out" in str(error).lower():
            try:
                late = [r for r in range(self.size) if r != self.rank and not self._has(f"waits/{r}")] or [peer]
            except RuntimeError:
                late = [peer]
            return self.tell(Failure(late[0], f"no message came from it within {timeout:g} s: it hangs, or is busy elsewhere", late=True))
        note = ""
        try:
            note = self._store.get(f"ended/{peer}").decode() if self._has(f"ended/{peer}") else ""
        except RuntimeError:
            pass
        text = note or "its process ended without a word: it was killed, crashed, or ran out of memory"
        return self.tell(Failure(peer, text, gone=True))

    def error(self, failure: Failure, doing: str) -> CommError:
        """What this rank raises because of a failure."""
        where, hint = failure.where, f"mend the error of rank {failure.rank}; this one follows from it"
        if failure.late:
            where, hint = self._position(failure.rank), "timeout= of parallelize says how long a rank is waited for"
        why = "; ".join(filter(None, (failure.why, f"rank {self.rank} can't go on: {doing}")))
        return CommError(f"rank {failure.rank} failed first: {failure.text}", where=where, why=why, hint=hint)

    def close(self, note: str) -> None:
        """This rank takes no further part; who waits for it is told ``note``."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self._store.set(f"ended/{self.rank}", note)
            self._store.set(f"done/{self.rank}", "1")
        except RuntimeError:
            pass

    # -- inside

    def _has(self, key: str) -> bool:
        """Whether a key has a value that isn't empty."""
        return self._store.check([key]) and self._store.get(key) != b""

    def _note(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure, self._since = failure, time.monotonic()

    def _position(self, rank: int) -> str:
        """Where a late rank's program stands, if its thread answers."""
        for _ in range(20):
            try:
                if self._has(f"where/{rank}"):
                    return self._store.get(f"where/{rank}").decode()
            except RuntimeError:
                break
            time.sleep(0.1)
        return ""

    def tick(self, before: str) -> str:
        """One look of the thread; ``before`` is what the main thread waited for at the last one."""
        failure = self.look()
        if failure is not None:
            if failure.late and failure.rank == self.rank:
                main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way to a thread's stack
                self._store.set(f"where/{self.rank}", _place(traceback.walk_stack(main)) if main is not None else "")
            self._sever()
            self._closed.set()
            return ""
        now = next(iter(list(self.waiting.values())), "")
        if now == before:
            return now
        try:
            self._store.set(f"waits/{self.rank}", now)
        except RuntimeError:
            pass
        return now

    def leave(self) -> None:
        """The process ends: says so, and after a failure gives the others time to show their errors."""
        error = getattr(sys, "last_value", None)  # what the interpreter has printed: nobody caught it
        if isinstance(error, BaseException) and self.failure is None and not self._closed.is_set():
            self.tell(Failure.of(error, self.rank))
            self._sever()
        self.close("its process ended while others went on")
        if self.failure is None:
            return
        others = [f"done/{r}" for r in range(self.size) if not (self.failure.gone and r == self.failure.rank)]
        try:
            while time.monotonic() < self._since + _LINGER and not self._store.check(others):
                time.sleep(0.05)
        except RuntimeError:
            pass


def report_end(error: BaseException) -> None:
    """For a launcher's worker that ends with an error: known to every comm of this process's default group."""
    if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None and dist.get_world_size() > 1:
        store = dist.PrefixStore(_KEYS, dist.group.WORLD.get_group_store())
        try:
            store.compare_set("ended", "", Failure.of(error, dist.get_rank()).to_json())
        except RuntimeError:
            pass


def _read(raw: bytes) -> Failure:
    return Failure(**json.loads(raw))


def _watch(reference: weakref.ref[Watch], closed: threading.Event) -> None:
    before = ""
    while not closed.wait(_PERIOD):
        watch = reference()
        if watch is None:
            return
        before = watch.tick(before)
        del watch


def _at_exit(reference: weakref.ref[Watch]) -> None:
    watch = reference()
    if watch is not None:
        watch.leave()


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The user's line among frames, innermost first; the innermost of all if none is theirs."""
    places = [(f.f_code.co_filename, f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}") for f, line in frames]
    theirs = [place for file, place in places if not file.startswith(("<", *_NOT_THEIRS))]
    return (theirs or [place for _, place in places] or [""])[0]
