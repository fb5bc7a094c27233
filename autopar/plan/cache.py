"""Keeping what was chosen: layouts by a digest of everything that they follow from, in a mapping or in a folder.

A model is captured anew every time, since no key could say all that arbitrary Python may look at; what is kept follows from the captured
program alone. Only choices are kept. What they make of the program is made and verified again, and must come out as the text that
they made before: an entry that doesn't fit is left aside with its reason, whatever went wrong with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.cost.device import Device
from autopar.errors import InputError
from autopar.ir.program import Program
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import PARTIAL_SUM, REPLICATE, Placement, partial, shard
from autopar.plan.layout import Layout, apply, replicated
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT, Rules
from autopar.rules.atoms import Atoms
from autopar.rules.strategies import Strategy
from autopar.sources import code_digest

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The digest of everything that an entry follows from, and the digests of its parts by name."""

    text: str
    parts: Mapping[str, str]

    @staticmethod
    def of(parts: Mapping[str, str]) -> Key:
        return Key(digest_of(json.dumps(parts, sort_keys=True)), parts)


class Unfit(Exception):
    """An entry can't be used; the text says why."""


@dataclass
class Cache:
    """Chosen layouts by key.

    Attributes:
        read: the text of an entry by key, None where there is none.
        write: keeps the text of an entry.
        reports: what became of the entries asked for since ``take_reports``.
    """

    read: Callable[[str], str | None]
    write: Callable[[str, str], None]
    reports: list[str] = field(default_factory=list)

    def key(self, make: Callable[[], Key]) -> Key | None:
        """The key that a function makes; None, under which nothing is kept, where there is none that says it all."""
        try:
            return make()
        except Unfit as error:
            self.reports.append(f"cache: nothing is kept: {error}")
            return None

    def find(self, key: Key | None, program: Program, atoms: Atoms, mesh: Mesh) -> tuple[Layout, str] | None:
        """The layout kept under a key and the digest of the text that it made; None where there is none that fits."""
        try:
            text = self.read(key.text) if key is not None else None
            return decode(text, key, program, atoms, mesh) if key is not None and text is not None else None
        except (OSError, UnicodeDecodeError, Unfit) as error:
            self._refuse(key, str(error))
            return None

    def tried(self, key: Key | None, kept: tuple[Layout, str], realize: Callable[[Layout], T], source: Callable[[T], str]) -> T | None:
        """What ``realize`` makes of a layout that was found; None where that fails or gives another text than it gave when it was kept."""
        layout, digest = kept
        try:
            made = realize(layout)
        except Exception as error:  # noqa: BLE001 - whatever the layout of another program leads to; without it the fault shows again
            self._refuse(key, f"its layout doesn't fit: {error}")
            return None
        if digest_of(source(made)) != digest:
            self._refuse(key, "it makes another text than it made when it was kept")
            return None
        self.reports.append(f"cache: the layout is that of the entry {_short(key)}")
        return made

    def _refuse(self, key: Key | None, why: str) -> None:
        self.reports.append(f"cache: the entry {_short(key)} is not used and made anew: {why}")

    def keep(self, key: Key | None, layout: Layout, program: Program, mesh: Mesh, source: str) -> None:
        """Keeps a layout and the digest of the text that it made."""
        if key is None:
            return
        try:
            self.write(key.text, encode(key, layout, program, mesh, source))
        except OSError as error:
            self.reports.append(f"cache: the entry {_short(key)} can't be written: {error}")

    def take_reports(self) -> list[str]:
        """What was reported since the last call."""
        found, self.reports = self.reports, []
        return found


def _short(key: Key | None) -> str:
    return key.text[:16] if key is not None else ""


def as_cache(given: Any) -> Cache | None:
    """A folder or a mapping of text to text as a cache. Raises InputError for anything else."""
    if given is None or isinstance(given, Cache):
        return given
    if isinstance(given, (str, Path)):
        folder = Path(given)
        return Cache(lambda key: _read(folder, key), lambda key, text: _write(folder, key, text))
    if isinstance(given, MutableMapping):
        return Cache(given.get, given.__setitem__)
    raise InputError(f"cache={given!r} is neither a folder nor a mapping", hint='cache="out/cache", or cache={} shared by several steps')


def _read(folder: Path, key: str) -> str | None:
    try:
        return (folder / f"{key}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _write(folder: Path, key: str, text: str) -> None:
    """Whole or not at all, whoever else writes the same entry: a file of its own, moved to its place."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        made.write_text(text, encoding="utf-8")
        os.replace(made, folder / f"{key}.json")
    finally:
        made.unlink(missing_ok=True)


# -- keys


def key_of(
    program: Program, rules: Rules, mesh: Mesh, plan: Plan, batch_dims: Mapping[str, int | None], device: Device,
    held: Mapping[str, str], further: Mapping[str, Any],
) -> Key:  # fmt: skip
    """The digest of everything that a layout and the text made from it follow from.

    Args:
        program: canonical, with its loop; its files, lines and values of constants play no part.
        held: shardings of parameters that are to be kept.
        further: what else the text depends on, as values with an exact ``repr``.

    Raises:
        Unfit: where a rule of the user's is a function, of which no text says what it does.
    """
    versions = {
        "autopar": code_digest(), "torch": torch.__version__, "highspy": version("highspy"), "numpy": version("numpy"),
        "python": platform.python_version(), "machine": platform.machine(),
    }  # fmt: skip
    parts: dict[str, object] = {
        "program": "\n".join(_parts(program)), "mesh": (mesh.axes, mesh.device), "plan": plan.text(),
        "batch dims": sorted(batch_dims.items()), "device": device, "layout held": sorted(held.items()), "rules": _own_rules(rules),
        "default dtype": torch.get_default_dtype(), "versions": versions, **further,
    }  # fmt: skip
    return Key.of({name: digest_of(repr(value)) for name, value in parts.items()})


def _parts(program: Program) -> Iterator[str]:
    types = program.types
    for i in program.inputs:
        yield repr((i.kind, i.name, i.path, i.aliases, i.trainable, str(types[i.name])))
    for node in program.nodes:
        outs = [(o, str(types[o]) if o else "") for o in node.outs]
        yield repr((node.op, node.args, node.kwargs, outs, node.phase, node.region, node.where.module))
    for o in program.outputs:
        yield repr((o.kind, o.value, o.path))
    yield repr((program.unreached, program.microbatches))


def _own_rules(rules: Rules) -> list[str]:
    """The rules that aren't autopar's own, as text."""
    found = []
    for op, rule in sorted(rules.table.items()):
        if rule is DEFAULT.table.get(op):
            continue
        if not (isinstance(rule.row, str) and isinstance(rule.linear, str) and isinstance(rule.soft, bool) and rule.local is None):
            raise Unfit(f"the rule for {op} is a function")
        found.append(repr(rule))
    return found


# -- entries


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def encode(key: Key, layout: Layout, program: Program, mesh: Mesh, source: str) -> str:
    """An entry as text: for every axis the different strategies, and which of them a node takes; placements of the inputs."""
    axes: dict[str, Any] = {}
    for axis, size in mesh.axes:
        if size == 1:
            continue
        table: dict[str, int] = {}
        nodes = []
        for n in range(len(program.nodes)):
            shown = " -> ".join(" ".join(str(s.on(axis)) for s in side) for side in layout.nodes[n])
            nodes.append(table.setdefault(shown, len(table)))
        axes[axis] = {
            "strategies": list(table), "nodes": nodes, "inputs": {name: str(s.on(axis)) for name, s in layout.inputs.items()},
        }  # fmt: skip
    body = json.dumps({"axes": axes, "notes": layout.notes, "seconds": dict(layout.seconds), "source": digest_of(source)})
    return json.dumps(
        {"what": "a layout that autopar chose", "key": key.text, "parts": dict(key.parts), "digest": digest_of(body), "body": body}
    )


def decode(text: str, key: Key, program: Program, atoms: Atoms, mesh: Mesh) -> tuple[Layout, str]:
    """The layout of an entry and the digest of the text that it made. Raises Unfit where the text isn't an entry of this key."""
    try:
        entry = json.loads(text)
        if not isinstance(entry, dict) or not {"key", "parts", "digest", "body"} <= set(entry):
            raise Unfit("it is no entry of a cache")
        others = sorted({*key.parts, *entry["parts"]})
        if others := [name for name in others if entry["parts"].get(name) != key.parts.get(name)]:
            raise Unfit(f"it was kept for another {', '.join(others)}")
        if entry["key"] != key.text:
            raise Unfit("it was kept under another key")
        if not isinstance(entry["body"], str) or digest_of(entry["body"]) != entry["digest"]:
            raise Unfit("it is damaged")
        body = json.loads(entry["body"])
        layout = replicated(program, atoms)
        wanted = [axis for axis, size in mesh.axes if size > 1]
        if list(body["axes"]) != wanted:
            raise Unfit(f"it is for the axes {list(body['axes'])}, not {wanted}")
        for axis, found in body["axes"].items():
            options = [_strategy(shown) for shown in found["strategies"]]
            if len(found["nodes"]) != len(program.nodes) or set(found["inputs"]) != set(layout.inputs):
                raise Unfit("it is for another program")
            nodes = {n: options[k] for n, k in enumerate(found["nodes"])}
            layout = apply(layout, axis, mesh, nodes, {name: _placement(p) for name, p in found["inputs"].items()})
        return Layout(layout.inputs, layout.nodes, tuple(body["notes"]), dict(body["seconds"])), str(body["source"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Unfit(f"it is not well formed: {type(error).__name__}: {error}") from error


def _strategy(text: str) -> Strategy:
    left, arrow, right = text.partition(" -> ") if not text.startswith("-> ") else ("", "-> ", text[3:])
    if not arrow:
        raise ValueError(f"{text!r} is no strategy")
    return Strategy(tuple(map(_placement, left.split())), tuple(map(_placement, right.split())))


def _placement(text: str) -> Placement:
    if text == "R":
        return REPLICATE
    if text == "Psum":
        return PARTIAL_SUM
    if text in ("Pmax", "Pmin"):
        return partial(text[1:])
    if text[:1] == "S" and text[1:].isdigit():
        return shard(int(text[1:]))
    raise ValueError(f"{text!r} is no placement")


__all__ = ["Cache", "Key", "Unfit", "as_cache", "decode", "digest_of", "encode", "key_of"]
