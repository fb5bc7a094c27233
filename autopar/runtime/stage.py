"""What an emitted module of a stage doesn't say of itself: its tasks, what each reads and makes, and what crosses to other stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    """A function of a stage's module: ``function(comm, given, constants, key, mb)`` gives the values ``makes``.

    Attributes:
        reads: the values of ``given``, in order.
        frees: those of them that nobody reads after it.
    """

    function: str
    reads: tuple[str, ...]
    frees: frozenset[str]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Message:
    """A value that one stage makes in a task and another needs in one; ``dtype`` and ``shape`` are those of a rank."""

    value: str
    source: int
    made: str
    target: int
    wanted: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StageSpec:
    """A stage's module.

    Attributes:
        tasks: by kind: ``pre`` and ``post`` run once a step; ``F`` and ``B``, or ``F``, ``I`` and ``W``, for every microbatch.
        inputs: (value, kind, path): a ``param``, ``buffer``, ``batch``, ``bucket`` (whole or a part), ``gather`` (of a bucket, under
            way), or the ``flat`` tensor in which a bucket's gradients are packed.
        totals: values that are summed over microbatches.
        turns: values that exist once a microbatch; the others exist once a step.
        messages: all that this stage sends and receives.
        consts: paths of the constants that ``constants`` takes; ``shared`` the values that it gives.
        loss: the value of the loss.
        grads: (bucket, value) of the reduced gradients.
        buffers, outputs: (path, value).
        axes: the groups of axes that it communicates over.
    """

    stage: int
    tasks: Mapping[str, Task]
    inputs: tuple[tuple[str, str, str], ...]
    totals: tuple[str, ...]
    turns: frozenset[str]
    messages: tuple[Message, ...]
    consts: tuple[str, ...]
    shared: tuple[str, ...]
    loss: str | None
    grads: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    axes: tuple[tuple[str, ...], ...]

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""
        data = {k: v for k, v in asdict(self).items() if k not in ("tasks", "turns", "messages")}
        data["tasks"] = {k: [t.function, t.reads, sorted(t.frees), t.makes] for k, t in self.tasks.items()}
        data["turns"] = sorted(self.turns)
        data["messages"] = [
            [m.value, m.source, m.made, m.target, m.wanted, str(m.dtype).removeprefix("torch."), m.shape] for m in self.messages
        ]
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> StageSpec:
        data = json.loads(text)
        tasks = {k: Task(f, tuple(reads), frozenset(frees), tuple(makes)) for k, (f, reads, frees, makes) in data["tasks"].items()}
        messages = tuple(Message(v, s, m, t, w, getattr(torch, dtype), tuple(shape)) for v, s, m, t, w, dtype, shape in data["messages"])

        def rows(name: str) -> Any:
            return tuple(tuple(row) for row in data[name])

        return StageSpec(
            data["stage"], tasks, rows("inputs"), tuple(data["totals"]), frozenset(data["turns"]), messages, tuple(data["consts"]),
            tuple(data["shared"]), data["loss"], rows("grads"), rows("buffers"), rows("outputs"), rows("axes"),
        )  # fmt: skip
