"""A model file of the command line.

A Python file with ``build() -> nn.Module`` and ``batch(size, generator) -> batch``, and maybe ``loss(output, batch)``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, InputError


@dataclass(frozen=True)
class ModelFile:
    """A loaded model file, and what its functions are called with.

    Attributes:
        arguments: of ``build``; ``batch`` gets those that it takes.
    """

    path: Path
    functions: Mapping[str, Callable[..., Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """The file's own loss, if it has one."""
        return self.functions.get("loss")

    def build(self, seed: int, *, meta: bool = False) -> nn.Module:
        """The model, its weights from torch's generator under ``seed``; with ``meta`` without values, where the file can do that."""
        if meta:
            try:
                with torch.device("meta"):
                    return self._build()
            except AutoparError:
                pass  # the file reads values while it builds; the same mistake without meta is told below
        torch.manual_seed(seed)
        return self._build()

    def _build(self) -> nn.Module:
        model = self._call("build", **self.arguments)
        if not isinstance(model, nn.Module):
            raise InputError(f"build() gives a {type(model).__name__}, not a module", where=str(self.path))
        return model

    def batch(self, size: int, seed: int) -> Any:
        """A global batch of the file's own, drawn under ``seed``."""
        taken = _accepted(self.functions["batch"], self.arguments)
        return self._call("batch", size, torch.Generator().manual_seed(seed), **taken)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.functions[name](*args, **kwargs)
        except AutoparError:
            raise
        except Exception as error:
            shown = ", ".join(f"{k}={v!r}" for k, v in kwargs.items())
            raise InputError(f"{name}({shown}) fails: {_told(error)}", where=_line(error, self.path)) from error


def load(path: str | Path, preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> ModelFile:
    """Runs a model file and checks what it exposes. Raises InputError where it can't be used."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no model file {str(path)!r}", hint="the path of a Python file with build() and batch(size, generator)")
    spec = importlib.util.spec_from_file_location(f"autopar_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else _line(error, path)
        raise InputError(f"the model file {str(path)!r} can't be run: {_told(error)}", where=where) from error
    found = {name: getattr(module, name) for name in ("build", "batch", "loss") if callable(getattr(module, name, None))}
    missing = [name for name in ("build", "batch") if name not in found]
    if missing:
        raise InputError(
            f"the model file {str(path)!r} has no {' and no '.join(f'{m}()' for m in missing)}",
            why="a model file exposes build() -> nn.Module and batch(size, generator) -> batch",
        )
    arguments = {**({"preset": preset} if preset is not None else {}), **(overrides or {})}
    presets = getattr(module, "PRESETS", None)
    if preset is not None and isinstance(presets, Mapping) and preset not in presets:
        raise InputError(f"{str(path)!r} has no preset {preset!r}", hint=f"one of {', '.join(map(str, presets))}")
    unknown = [name for name in arguments if name not in _accepted(found["build"], arguments)]
    if unknown:
        option = "--preset" if unknown[0] == "preset" else f"--set {unknown[0]}=..."
        raise InputError(f"build() of {str(path)!r} takes no {unknown[0]!r}", hint=f"leave {option} out")
    return ModelFile(path, found, arguments)


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """``["layers=4", "tied=True", "outputs=dict"]`` as keyword arguments: Python literals where they are, text otherwise."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, eq, text = pair.partition("=")
        if not eq or not name.isidentifier():
            raise InputError(f"--set {pair!r} is not well formed", hint="write it like --set layers=4")
        out[name] = literal(text)
    return out


def literal(text: str) -> Any:
    """A Python literal, ``true`` and ``false`` too; any other text is itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function takes by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(arguments)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {k: v for k, v in arguments.items() if k in names}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _line(error: BaseException, path: Path) -> str:
    """The innermost line of the model file in an error's traceback."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"{path}:{lines[-1]}" if lines else str(path)


__all__ = ["ModelFile", "literal", "load", "parse_overrides"]
