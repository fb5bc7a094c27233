"""autopar: a plain PyTorch model and a device mesh in, its training step as a program for every rank out.

Names load on first use, so that generated code, which imports only ``autopar.runtime``, runs without the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import errors as errors
    from autopar.api import parallelize as parallelize
    from autopar.api import search as search
    from autopar.api import verify as verify
    from autopar.layout.mesh import Mesh as Mesh
    from autopar.plan.plan import Plan as Plan
    from autopar.rules import rule as rule
    from autopar.runtime.launch import launch as launch

_HOMES = {
    "Mesh": "autopar.layout.mesh",
    "Plan": "autopar.plan.plan",
    "launch": "autopar.runtime.launch",
    "parallelize": "autopar.api",
    "rule": "autopar.rules",
    "search": "autopar.api",
    "verify": "autopar.api",
}

__all__ = ["Mesh", "Plan", "errors", "launch", "parallelize", "rule", "search", "verify"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("autopar.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
