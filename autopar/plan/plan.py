"""Plan: everything that is decided about a step, and nothing that is derived from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from autopar.errors import PlanError, UnsupportedError

#: fields of the surface whose mechanism isn't built, and the words that say so.
_LATER = {
    "per_microbatch": "statistics per microbatch",
}

#: levels of ZeRO.
LEVELS = (0, 1, 2, 3)

#: settings of ``recompute`` that are words.
FULL, SELECTIVE = "full", "selective"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int | None:
    """``"80GB"``, ``"1.5 GiB"`` or ``"4096"`` as a number of bytes; None where it says none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    return int(float(match.group(1)) * _UNITS[match.group(2)]) if match and match.group(2) in _UNITS else None


def limit_of(recompute: Any) -> int | None:
    """The limit on bytes that a setting of ``recompute`` is, if it is one."""
    if isinstance(recompute, str):
        return parse_bytes(recompute)
    return recompute if isinstance(recompute, int) and not isinstance(recompute, bool) else None


def _can_be_recompute(value: Any) -> bool:
    globs = isinstance(value, tuple) and all(isinstance(g, str) for g in value)
    return value is None or globs or value in (FULL, SELECTIVE) or (limit_of(value) or 0) > 0


@dataclass(frozen=True)
class Plan:
    """A plan, whole or partial. A field that is None is chosen; a set field is a pin.

    Attributes:
        zero: what each rank of ``dp`` (and of other axes that share a parameter) holds only its part of: 0, nothing; 1 (the default),
            optimizer state; 2, gradients too; 3, parameters too.
        zero_ranks: how many neighbours along ``dp`` share that out, where not all do: hybrid sharding. The others hold copies, and the
            gradients of a part are summed over them once a step.
        regather: under ZeRO 3, whether the backward gathers parameters again (the default) or keeps what the forward gathered; stages
            always gather again.
        sequence: ``tp`` also shards the sequence of activations between the matrices.
        context: how ``cp`` splits fused attention: ``heads`` (the split moves from sequence to heads: all-to-all), ``gather`` (queries
            stay cut, keys and values are gathered) or ``ring`` (these go from rank to rank); by default what is predicted to be fastest.
        microbatches: parts of the batch whose gradients are summed (gradient accumulation).
        interleave: how many microbatches run side by side, so that one's collectives hide behind another's compute; 1 (the default): none.
        decompose: in how many pieces a product beside a collective runs, one's collective behind the next one's product; 1 (the default):
            whole.
        schedule: of the stages of ``pp``: a name (``1f1b``, the default, ``gpipe``, ``interleaved``, ``zb-h1``, ``zb-h2``, ``zb-v``,
            ``dualpipev``; ``search``: found for the stages' predicted times), or a function of (stages, microbatches, ranks) that
            gives an ``autopar.schedule.Schedule``.
        cuts: paths of the modules that begin all stages but the first; a multiple of ``pp`` stages.
        recompute: what the backward makes again instead of keeping it: ``"full"``, all but the inputs of the repeated layers;
            ``"selective"``, what takes little work for its memory; a glob of modules or several, all inside of them; or a limit on the
            bytes of a rank's parameters, gradients and activations (``"8GB"``, or a number), under which the least time is added. By
            default the regions that the model itself runs under ``torch.utils.checkpoint``; ``()``, nothing.
        buckets: bytes after which a bucket of gradients is closed.
        shard: parameter globs to placements: ``{"*.up.weight": "dim0@tp", "head.*": "replicate"}``; of two that match the later wins.
        strict: a request that can't be met is an error instead of a note.
        mesh: text of the mesh it was made for (in plans that autopar made).
        parameters: sharding of every parameter by path, as text (likewise).
        seconds: predicted seconds by axis (likewise).
    """

    zero: int | None = None
    zero_ranks: int | None = None
    regather: bool | None = None
    sequence: bool | None = None
    context: str | None = None
    microbatches: int | None = None
    interleave: int | None = None
    decompose: int | None = None
    per_microbatch: Any = None
    schedule: Any = None
    cuts: Any = None
    recompute: Any = None
    buckets: int | None = None
    shard: Mapping[str, str] | None = None
    strict: bool = False
    mesh: str | None = None
    parameters: Mapping[str, str] | None = None
    seconds: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for name, words in _LATER.items():
            if getattr(self, name) is not None:
                raise UnsupportedError(f"Plan({name}=...): {words} are not supported yet", hint=f"leave {name} out")
        for name in ("sequence", "regather"):
            if not isinstance(getattr(self, name), bool | None):
                raise PlanError(f"Plan({name}={getattr(self, name)!r}) is neither True nor False")
        if self.context not in (None, "heads", "gather", "ring"):
            raise PlanError(f"Plan(context={self.context!r}) is no way to split attention", hint="heads, gather or ring")
        if self.shard is not None and not (isinstance(self.shard, Mapping) and all(isinstance(v, str) for v in self.shard.values())):
            raise PlanError(f"Plan(shard={self.shard!r}) is not a table of pins", hint='{"*.up.weight": "dim0@tp"}')
        if self.cuts is not None:
            if isinstance(self.cuts, str) or not all(isinstance(c, str) for c in self.cuts):
                raise PlanError(f"Plan(cuts={self.cuts!r}) is not a list of module paths", hint='cuts=("layers.4", "layers.8")')
            object.__setattr__(self, "cuts", tuple(self.cuts))
        if self.schedule is not None and not isinstance(self.schedule, str) and not callable(self.schedule):
            raise PlanError(f"Plan(schedule={self.schedule!r}) is neither a name nor a function", hint='schedule="1f1b"')
        if any(isinstance(n, bool) for n in (self.zero, self.zero_ranks, self.microbatches, self.interleave, self.decompose)):
            raise PlanError("zero, zero_ranks, microbatches, interleave and decompose are numbers, not flags")
        if self.zero is not None and self.zero not in LEVELS:
            raise PlanError(f"Plan(zero={self.zero!r}) is no ZeRO level", hint="zero=0, 1, 2 or 3")
        numbers = {"microbatches": "microbatches", "interleave": "microbatches", "zero_ranks": "ranks", "decompose": "pieces"}
        for name, what in numbers.items():
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise PlanError(f"Plan({name}={number!r}) is not a number of {what}", hint="an integer of at least 1")
        if self.zero_ranks is not None and self.zero == 0:
            raise PlanError(f"Plan(zero=0, zero_ranks={self.zero_ranks}): nothing is shared out", hint="zero=1, 2 or 3")
        if self.microbatches is not None and self.microbatches % (self.interleave or 1):
            raise PlanError(
                f"Plan(interleave={self.interleave}) doesn't divide Plan(microbatches={self.microbatches})",
                hint=f"a multiple of {self.interleave} microbatches",
            )
        if isinstance(self.recompute, list):
            object.__setattr__(self, "recompute", tuple(self.recompute))
        if isinstance(self.recompute, str) and self.recompute not in (FULL, SELECTIVE) and limit_of(self.recompute) is None:
            object.__setattr__(self, "recompute", (self.recompute,))  # a glob
        if not _can_be_recompute(self.recompute):
            raise PlanError(
                f"Plan(recompute={self.recompute!r}) is no request", hint='"full", "selective", globs of modules ("layers.*",), or "8GB"'
            )
        if self.buckets is not None and (not isinstance(self.buckets, int) or self.buckets < 1):
            raise PlanError(f"Plan(buckets={self.buckets!r}) is not a number of bytes")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan saved as JSON. Raises PlanError where the file isn't one."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan {str(path)!r} can't be read", why=str(error)) from error
        known = {f.name for f in fields(Plan)}
        if not isinstance(data, dict) or not set(data) <= known:
            raise PlanError(
                f"{str(path)!r} is not a plan", why=f"unknown fields {sorted(set(data) - known)}" if isinstance(data, dict) else ""
            )
        return Plan(**data)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.text() + "\n")

    def text(self) -> str:
        """The fields that are set, as JSON with sorted keys: the same plan gives the same text."""
        found = {k: v for k, v in asdict(self).items() if v is not None and not (k == "strict" and not v)}
        return json.dumps(found, indent=1, sort_keys=True, default=lambda f: getattr(f, "__qualname__", type(f).__name__))

    def __str__(self) -> str:
        return self.text()

    def filled(self, **chosen: Any) -> Plan:
        """The plan with what was chosen for the fields that aren't set."""
        return replace(self, **{k: v for k, v in chosen.items() if getattr(self, k) is None})


def as_plan(plan: Plan | str | Path | None) -> Plan:
    """``"auto"`` and None are the plan without pins; a path is loaded."""
    if isinstance(plan, Plan):
        return plan
    return Plan() if plan is None or plan == "auto" else Plan.load(plan)
