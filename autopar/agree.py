"""What all ranks must agree on, compared before any collective of tensors. A difference is an InputError with one text on every rank."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.comm import Comm


def compare_ranks(comm: Comm, mine: Mapping[str, Any], site: str) -> None:
    """Every rank's table must be the first rank's. Collective."""
    if comm.mesh.size > 1:
        first_difference(comm.exchange(mine, site=site))


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError, the same on every rank, where a rank's table differs from the first rank's."""
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise InputError(
                    f"rank {rank} has another {name} than rank 0", why=f"{theirs[name]} against {value}",
                    hint="every rank makes the same calls, with batches of the same shapes",
                ).alike()  # fmt: skip


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


def compare_call(comm: Comm, mine: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """All ranks make the same call on batches of one kind; ranks of one data coordinate hold the same rows. Collective.

    One small exchange a call: without it ranks that differ would wait for each other for ever.

    Args:
        mine: what the call is, by name.
        tensors: this rank's rows.
    """
    mesh = comm.mesh
    if mesh.size == 1:
        return
    rows = 0
    if mesh.size > mesh["dp"]:
        for t in tensors:
            rows = zlib.crc32(_bytes(t), rows)
    everyone = comm.exchange((mine, comm.coords.get("dp", 0), rows), site="call")
    first_difference([theirs for theirs, _, _ in everyone])
    first: dict[int, tuple[int, int]] = {}
    for rank, (_, data, digested) in enumerate(everyone):
        other, known = first.setdefault(data, (rank, digested))
        if known != digested:
            raise InputError(
                f"ranks {other} and {rank} have the same data coordinate (dp={data}) but other rows",
                hint="ranks that differ only in tp pass the same rows; step.shard(global_batch) cuts them",
            ).alike()


def digest(tensors: Sequence[Tensor]) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(repr((t.dtype, tuple(t.shape))).encode())
        h.update(_bytes(t))
    return h.hexdigest()


def _bytes(t: Tensor) -> bytes:
    t = t.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element of stride 0 counts as contiguous, and isn't
    return t.view(-1).view(torch.uint8).numpy().tobytes()
