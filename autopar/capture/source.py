"""Where a traced operation comes from: the module path it runs in and the user's line that asked for it."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar._torch import annotate, recompute_region
from autopar.capture.rewritten import REWRITTEN
from autopar.ir.program import Where

#: the key of our annotation in ``node.meta["custom"]``.
KEY = "autopar.where"

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple(sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib"))
# Reading these makes no node, and models read them all the time.
_QUIET = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "is_leaf", "layout", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}


def is_user_file(file: str) -> bool:
    """Whether a frame's file belongs to the user: not torch, not autopar, not the standard library."""
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return file.startswith(_SITE) or not file.startswith(_STDLIB)


def short_file(file: str) -> str:
    """A file relative to the working directory or to the installed packages, so that no machine's paths end up in a program."""
    for root in (os.getcwd() + os.sep, *_SITE):
        if file.startswith(root):
            return file[len(root) :]
    return file


def place(frame: FrameType | None, module: str) -> Where:
    """The nearest user frame at or above ``frame``."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return _where(module, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Where(module)


def _where(module: str, file: str, line: int) -> Where:
    return Where(module, short_file(file), line, linecache.getline(file, line).strip())


def place_of_error(error: BaseException, module: str) -> Where:
    """The innermost user line of an error's traceback."""
    found = Where(module)
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            found = _where(module, file, trace.tb_lineno)
        trace = trace.tb_next
    return found


class Modules:
    """The path of the module whose forward is running. ``paths`` maps a module to the first name it has in the model."""

    def __init__(self, model: nn.Module, tick: Callable[[], None] | None = None) -> None:
        self.tick = tick
        self.paths: Mapping[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self.stack: list[str] = []
        #: where the innermost module was when an error passed through it.
        self.failed: str | None = None

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hooks in place: ours is the first before and the last after a module's own hooks, so that those run in its path."""
        handles: list[Any] = []
        self.stack.clear()
        try:
            for module, path in self.paths.items():
                handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True))
                handles.append(module.register_forward_hook(self._leave))
            yield
        finally:
            if self.failed is None and self.stack:
                self.failed = self.current
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(path)
            if self.tick is not None:
                self.tick()

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()


class SourceMode(TorchFunctionMode):
    """Marks every node that a torch function makes with its Where.

    Calls ``before(arguments, where)`` and ``after(name of the function, arguments, result)``.
    """

    def __init__(
        self, modules: Modules, before: Callable[[Any, Where], None] | None = None, after: Callable[[str, Any, Any], None] | None = None
    ) -> None:
        super().__init__()
        self.modules, self.before, self.after = modules, before, after
        self.regions: dict[Any, int] = {}  # of the model's own recompute, and their numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUIET:
            return func(*args, **(kwargs or {}))
        where = place(sys._getframe(1), self.modules.current)
        args, kwargs = _on_cpu(func, args, dict(kwargs or {}))
        if self.before is not None:
            self.before((args, kwargs), where)
        if func in _MOVES:
            func = Tensor.cpu
        func = REWRITTEN.get(func, func)
        region = recompute_region()
        again = 0 if region is None else self.regions.setdefault(region, len(self.regions) + 1)
        with annotate({KEY: (where.module, where.file, where.line, where.code, again)}):
            result = func(*args, **kwargs)
        if self.after is not None:
            self.after(getattr(func, "__name__", ""), (args, kwargs), result)
        return result


_MOVES = frozenset({Tensor.cuda, Tensor.xpu, Tensor.cpu})


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call without devices: a program has none, and the fakes it is traced with are on the CPU, whatever the model asks for."""
    if func in _MOVES:
        return args[:1], {}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, int)):
        args = (args[0], torch.device("cpu"), *args[2:])
    return tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args), kwargs
