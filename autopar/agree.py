"""What all ranks must agree on, compared before any collective of tensors. A difference is an InputError with one text on every rank."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.errors import AutoparError, InputError
from autopar.runtime.comm import Comm

T = TypeVar("T")


def together(comm: Comm, make: Callable[[], T], site: str) -> T:
    """What each rank makes by itself; where one can't, all raise its error, with one text, and nothing is lost. Collective."""
    made, problem = None, None
    try:
        made = make()
    except AutoparError as error:
        problem = error
    raise_first(comm.exchange(problem, site=site), problem)
    return made  # type: ignore[return-value]


def raise_first(everyone: Sequence[AutoparError | None], mine: AutoparError | None) -> None:
    """Raises the first of the ranks' errors, on every rank alike; one that all have as it is, that of a few with their rank."""
    first = next((rank for rank, error in enumerate(everyone) if error is not None), None)
    if first is None:
        return
    told = everyone[first]
    assert told is not None
    if mine is not None and all(str(error) == str(told) for error in everyone):
        raise mine.alike()
    raise type(told)(f"rank {first}: {told.what}", where=told.where, why=told.why, hint=told.hint).alike() from mine


def compare_ranks(comm: Comm, mine: Mapping[str, Any], site: str) -> None:
    """Every rank's table must be the first rank's. Collective."""
    if comm.mesh.size > 1:
        first_difference(comm.exchange(mine, site=site))


def compare_stages(comm: Comm, mine: Mapping[str, Any], site: str) -> None:
    """Every rank's table must be that of the first rank with its coordinate along ``pp``: others run other stages. Collective."""
    everyone = comm.exchange(mine, site=site)
    stages = [comm.mesh.coords(rank).get("pp", 0) for rank in range(comm.mesh.size)]
    for stage in dict.fromkeys(stages):
        ranks = [rank for rank, other in enumerate(stages) if other == stage]
        first_difference([everyone[rank] for rank in ranks], ranks)


def first_difference(everyone: Sequence[Mapping[str, Any]], ranks: Sequence[int] | None = None) -> None:
    """Raises InputError, the same on every rank, where a rank's table differs from the first rank's; ``ranks``: whose they are."""
    for n, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                rank, first = (n, 0) if ranks is None else (ranks[n], ranks[0])
                raise InputError(
                    f"rank {rank} has another {name} than rank {first}", why=_difference(theirs[name], value),
                    hint="every rank makes the same calls, with batches of the same shapes",
                ).alike()  # fmt: skip


def _difference(theirs: Any, first: Any) -> str:
    """Two values that differ, in words; of two tables or lists the entries that do."""
    if isinstance(theirs, Mapping) and isinstance(first, Mapping):
        keys = [k for k in dict.fromkeys((*first, *theirs)) if theirs.get(k) != first.get(k)]
        told = "; ".join(f"{k}: {theirs.get(k, 'none')} against {first.get(k, 'none')}" for k in keys[:3])
        return told + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")
    return f"{theirs} against {first}"


def compare_values(comm: Comm, tensors: Mapping[str, Tensor], site: str, hint: str) -> None:
    """All ranks hold the same whole tensors. Collective."""
    if comm.mesh.size == 1:
        return
    digests = comm.exchange({n: digest([t]) for n, t in tensors.items()}, site=site)
    for rank, theirs in enumerate(digests):
        differ = [n for n in digests[0] if theirs.get(n) != digests[0][n]]
        if differ:
            raise InputError(
                f"rank {rank} has other values of {differ[0]} than rank 0", why=f"{len(differ)} tensors differ", hint=hint
            ).alike()


class Answer(Enum):
    """What the ranks of a call have in common."""

    READY = "all have its program"
    COMPILE = "not all have its program"
    UNEVEN = "data ranks hold different numbers of rows"


def compare_call(
    comm: Comm,
    mine: Mapping[str, Any],
    held: Mapping[str, Any],
    rows: Sequence[int] | None,
    tensors: Sequence[Tensor],
    problem: AutoparError | None,
    ready: bool,
) -> Callable[[], Answer]:
    """Starts to compare a call: all ranks make the same one, on batches of one kind; ranks of one data coordinate hold the same rows.

    One small exchange a call: without it ranks that differ would wait for each other for ever. Only where they differ a second one tells
    in what.

    Args:
        mine: what the call is, by name.
        held: what ranks of one coordinate along ``pp`` have in common besides, by name: those of others hold other parts.
        rows: how many rows every input of the batch has here, where data ranks may differ in it; None where they may not.
        tensors: this rank's rows.
        problem: why this rank can't take part: then nobody does.
        ready: whether this rank has the program.

    Returns:
        The rest of it, which waits for the others and raises, the same on all, where ranks differ or one can't. Collective.
    """
    mesh = comm.mesh
    if mesh.size == 1:
        raise_first([problem], problem)
        return lambda: Answer.READY if ready else Answer.COMPILE
    seen = 0
    if mesh.size > mesh["dp"]:
        for t in tensors:
            seen = zlib.crc32(_bytes(t), seen)
    told = hashlib.sha256(repr(mine).encode()).digest()
    about = hashlib.sha256(repr(held).encode()).digest()
    finish = comm.exchange_later((told, about, comm.coords.get("dp", 0), seen, problem, ready, rows), site="call")

    def check() -> Answer:
        everyone = finish()
        raise_first([said[4] for said in everyone], problem)
        if any(said[0] != everyone[0][0] for said in everyone):
            first_difference(comm.exchange(mine, site="difference"))
        stages = [mesh.coords(rank).get("pp", 0) for rank in range(mesh.size)]
        if len(set(zip(stages, (said[1] for said in everyone)))) > mesh["pp"]:
            compare_stages(comm, held, "difference")
        first: dict[int, tuple[int, int]] = {}
        for rank, (_, _, data, digested, *_) in enumerate(everyone):
            other, known = first.setdefault(data, (rank, digested))
            if known != digested:
                raise InputError(
                    f"ranks {other} and {rank} have the same data coordinate (dp={data}) but other rows",
                    hint="ranks that differ only in tp or pp pass the same rows; step.shard(global_batch) cuts them",
                ).alike()
        if any(said[6] != everyone[0][6] for said in everyone):
            return Answer.UNEVEN
        return Answer.READY if all(said[5] for said in everyone) else Answer.COMPILE

    return check


def digest(tensors: Sequence[Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(repr((t.dtype, tuple(t.shape))).encode())
        h.update(_bytes(t))
    return h.hexdigest()


def _bytes(t: Tensor) -> bytes:
    t = t.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element of stride 0 counts as contiguous, and isn't
    return t.view(-1).view(torch.uint8).numpy().tobytes()
