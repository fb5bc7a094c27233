"""What a captured program takes from a model beside its tensors: plain attributes, flags, submodules. A change needs a new capture."""

from __future__ import annotations

import zlib
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

    Read once; after that a look compares what lies there with what lay there, a few dict lookups a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read()

    def now(self) -> tuple[int, int, tuple[str, ...]]:
        """Digest of the plain state, digest of the training flags, and the trainable parameters: equal where nothing changed."""
        if self._changed():
            self._read()
        return self._now

    def told(self) -> dict[str, str]:
        """The plain state by name, to be compared between ranks."""
        return dict(self._told)

    def _changed(self) -> bool:
        for own, key, before in self._plain:
            now = own.get(key)
            if now is not before and (type(now) is not type(before) or now != before):
                return True
        for table, key, parameter, trained in self._parameters:
            if table.get(key) is not parameter or parameter.requires_grad is not trained:
                return True
        for own, size in self._sizes:
            if len(own) != size:
                return True
        for now, before in self._containers:
            if now != before:
                return True
        return False

    def _read(self) -> None:
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._parameters: list[tuple[dict[str, Any], str, Tensor, bool]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._told: dict[str, str] = {}
        flags: list[bool] = []
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            own: Any = vars(module)
            flags.append(module.training)
            table = own["_parameters"]
            self._parameters += [(table, k, p, p.requires_grad) for k, p in table.items() if p is not None]
            self._sizes.append((table, len(table)))
            self._containers.append((own["_modules"], dict(own["_modules"])))
            self._containers += [(own[k], dict(own[k])) for k in _HOOKS]
            stem = f"{path}." if path else ""
            hooks = [[getattr(h, "__qualname__", type(h).__name__) for h in own[k].values()] for k in _HOOKS]
            self._told[stem + "class"] = f"{type(module).__qualname__} {hooks}" if any(hooks) else type(module).__qualname__
            self._take(stem, own, seen, 0)
        text = repr(self._told).encode()
        names = tuple(n for n, p in self._model.named_parameters() if p.requires_grad)
        self._now = (zlib.crc32(text), zlib.crc32(bytes(flags)), names)

    def _take(self, stem: str, own: dict[str, Any], seen: set[int], depth: int) -> None:
        """Notes what an object holds as plain data."""
        for key, value in own.items():
            if key in TABLES or key == "_modules":
                continue
            if isinstance(value, _PLAIN):
                self._plain.append((own, key, value))
                if key != "training":
                    self._told[stem + key] = repr(value)
            elif type(value) in _CONTAINERS:
                if id(value) not in seen and _only_plain(value):
                    seen.add(id(value))
                    self._plain.append((own, key, value))
                    if type(value) is not tuple:
                        self._containers.append((value, type(value)(value)))
                    self._told[stem + key] = repr(sorted(value, key=repr) if isinstance(value, set) else value)
            elif depth < _DEPTH and id(value) not in seen and _is_record(value):
                seen.add(id(value))
                self._plain.append((own, key, value))
                self._take(f"{stem}{key}.", vars(value), seen, depth + 1)
        self._sizes.append((own, len(own)))


def _only_plain(value: Any) -> bool:
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(isinstance(v, _PLAIN) for v in items)


def _is_record(value: Any) -> bool:
    """An object with attributes that is neither a tensor, a module, code nor torch's own: a config, say."""
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "numpy", "typing", "types")


__all__ = ["Followed"]
