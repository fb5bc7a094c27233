"""What a captured program takes from a model beside its tensors: plain attributes, flags, submodules. A change needs a new capture."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.refuse import TABLES

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONTAINERS = (list, tuple, dict, set)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: how deep objects that are no modules (a config in a config) are looked into.
_DEPTH = 3


class Followed:
    """The plain state of a model: numbers, flags, strings and containers of them, in its modules and in the objects that modules hold.

    Read once; after that a look compares what lies there with what lay there, a few dict lookups a module. It doesn't keep the model alive:
    of one that is gone it tells what was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._read(model)

    def now(self) -> tuple[int, int, tuple[str, ...]]:
        """Digest of the plain state, digest of the training flags, and the trainable parameters: equal where nothing changed."""
        model = self._model()
        if model is not None and self._changed():
            self._read(model)
        return self._now

    def mode(self) -> str:
        """The training flags in words: ``train``, ``eval``, or both with a digest of which."""
        return self._mode

    def told(self) -> dict[str, str]:
        """The plain state by name, to be compared between ranks."""
        return dict(self._told)

    def _changed(self) -> bool:
        for holder, key, record in self._records:
            owner = holder()
            if owner is None or vars(owner).get(key) is not record():
                return True
        for holder, size, plain in self._plain:
            owner = holder()
            if owner is None or len(own := vars(owner)) != size:
                return True
            for key, before in plain:
                now = own.get(key)
                if now is not before and (type(now) is not type(before) or now != before):
                    return True
        for holder, tables, parameters in self._modules:
            module = holder()
            if module is None or tables != _tables(module):
                return True
            table = vars(module)["_parameters"]
            for key, trained in parameters:
                if table[key].requires_grad is not trained:
                    return True
        for now, before in self._containers:
            if now != before:
                return True
        return False

    def _read(self, model: nn.Module) -> None:
        self._plain: list[tuple[Callable[[], Any], int, list[tuple[str, Any]]]] = []  # owner, how much it holds, what of it is plain
        self._records: list[tuple[Callable[[], Any], str, Callable[[], Any]]] = []
        self._modules: list[tuple[Callable[[], Any], list[Any], list[tuple[str, bool]]]] = []
        self._containers: list[tuple[Any, Any]] = []  # containers of plain data, and what was in them
        self._told: dict[str, str] = {}
        flags: list[bool] = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            own: Any = vars(module)
            flags.append(module.training)
            parameters = [(k, p.requires_grad) for k, p in own["_parameters"].items() if p is not None]
            self._modules.append((weakref.ref(module), _tables(module), parameters))
            stem = f"{path}." if path else ""
            hooks = [[getattr(h, "__qualname__", type(h).__name__) for h in own[k].values()] for k in _HOOKS]
            self._told[stem + "class"] = f"{type(module).__qualname__} {hooks}" if any(hooks) else type(module).__qualname__
            self._take(stem, module, seen, 0)
        text = repr(self._told).encode()
        names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
        trains = sum(flags)
        some = f"train in {trains} of {len(flags)} modules ({zlib.crc32(bytes(flags)):08x})"
        self._mode = "train" if trains == len(flags) else some if trains else "eval"
        self._now = (zlib.crc32(text), zlib.crc32(bytes(flags)), names)

    def _take(self, stem: str, owner: Any, seen: set[int], depth: int) -> None:
        """Notes what an object holds as plain data."""
        own, plain = vars(owner), list[tuple[str, Any]]()
        for key, value in own.items():
            if key in TABLES or key == "_modules":
                continue
            if isinstance(value, _PLAIN):
                plain.append((key, value))
                if key != "training":
                    self._told[stem + key] = repr(value)
            elif type(value) in _CONTAINERS:
                if id(value) not in seen and _only_plain(value):
                    seen.add(id(value))
                    plain.append((key, value))
                    if type(value) is not tuple:
                        self._containers.append((value, type(value)(value)))
                    self._told[stem + key] = repr(sorted(value, key=repr) if isinstance(value, set) else value)
            elif depth < _DEPTH and id(value) not in seen and _is_record(value):
                seen.add(id(value))
                self._records.append((_reference(owner), key, _reference(value)))
                self._take(f"{stem}{key}.", value, seen, depth + 1)
        self._plain.append((_reference(owner), len(own), plain))


def _tables(module: nn.Module) -> list[Any]:
    """Which parameters, submodules and hooks a module has, as what can be compared without holding them."""
    own = vars(module)
    return [[(k, id(v)) for k, v in own[name].items()] for name in ("_parameters", "_modules", *_HOOKS)]


def _reference(owner: Any) -> Callable[[], Any]:
    """A weak reference; a strong one to an object that allows none."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _only_plain(value: Any) -> bool:
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(isinstance(v, _PLAIN) for v in items)


def _is_record(value: Any) -> bool:
    """An object with attributes that is neither a tensor, a module, code nor torch's own: a config, say."""
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "numpy", "typing", "types")


__all__ = ["Followed"]
