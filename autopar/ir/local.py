"""LocalProgram: what one rank runs. Local shapes, explicit collectives, and beside every value the sharding it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.program import Program, TensorType
from autopar.layout.bucket import Bucket
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding


@dataclass(frozen=True)
class LocalProgram(Program):
    """A program for every rank of a mesh; ranks differ in coordinates only, which appear as ``Offset`` arguments.

    Ops beside those of a Program: ``comm.all_reduce(x, axes, combine)``, ``comm.all_gather(x, axes, dim)``,
    ``comm.reduce_scatter(x, axes, dim)``, ``comm.all_to_all(x, axes, split dim, concat dim)``, ``comm.shift(x, axes)``,
    ``comm.mirror(x, axes, dim)``.

    ``zero`` is the level of ZeRO by which its buckets are sharded: from 2 on gradients too, at 3 parameters.

    ``types`` are local. ``shardings`` and ``global_types`` hold for the values that stand for a tensor of the captured program.
    """

    mesh: Mesh = field(default_factory=Mesh)
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    global_types: Mapping[str, TensorType] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    zero: int = 1
