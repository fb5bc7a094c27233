"""What capture refuses, and how it says so. Nothing that tracing would lose goes by without a word."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.capture.source import place_of_error
from autopar.errors import AutoparError, CaptureError, UnsupportedError
from autopar.ir.program import Program, Where

_PLAIN = (bool, int, float, complex, str, type(None))


def check_model(model: nn.Module, grads: bool) -> None:
    """Things that can be seen before anything runs."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"The model is a {type(model).__name__}, not an nn.Module")
    for path, module in model.named_modules():
        where = f"{path or '(model)'}, a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError("A TorchScript module can't be captured", where=where, hint="pass the Python module")
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"):
            raise UnsupportedError(f"The model is wrapped in {type(module).__name__}", where=where, hint="pass the module inside")
        own = vars(module)
        if grads and (own.get("_backward_hooks") or own.get("_backward_pre_hooks")):
            raise CaptureError(
                "A module has backward hooks", where=where, why="the captured backward is a graph that doesn't call them",
                hint="remove them, or write what they do into the model",
            )  # fmt: skip
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise UnsupportedError("A sparse embedding gradient", where=where, hint="sparse=False")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__.startswith("Uninitialized"):
            raise CaptureError(f"The parameter {name} has no shape yet", hint="run a lazy module once first")
        if parameter.layout != torch.strided or type(parameter.data).__name__ != "Tensor":
            raise UnsupportedError(f"The parameter {name} is a {type(parameter.data).__name__} of layout {parameter.layout}")
        if grads and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            raise CaptureError(
                f"The parameter {name} has gradient hooks", why="the captured backward is a graph that doesn't call them",
                hint="remove them; clipping is clip_grad_norm=",
            )  # fmt: skip


def check_storage(groups: Sequence[tuple[str, str, Tensor]]) -> None:
    """Two parameters on one piece of memory would be two in the program and one in torch."""
    seen: dict[tuple[Any, int], str] = {}
    for kind, name, tensor in groups:
        if kind != "param" or tensor.is_meta or not tensor.numel():
            continue
        key = (tensor.device, tensor.data_ptr())
        if key in seen:
            raise CaptureError(
                f"The parameters {seen[key]} and {name} share memory but are two Parameter objects",
                why="a tie is found by identity", hint="tie them with one Parameter: a.weight = b.weight",
            )  # fmt: skip
        seen[key] = name


def check_arguments(tree: Any, where: Where, mode: Any) -> None:
    """A real tensor that requires grad takes part, though every parameter was replaced: the model holds it somewhere else."""
    for leaf in _walk(tree):
        if isinstance(leaf, Tensor) and leaf.requires_grad and type(leaf) in (Tensor, nn.Parameter) and _is_real(leaf):
            raise CaptureError(
                "The model uses a trainable tensor that isn't one of its parameters", where=str(where),
                why="it is held in a list, a dict, a closure or a global, so its gradient would be lost",
                hint="register it: nn.Parameter as an attribute, nn.ParameterList, nn.ParameterDict",
            )  # fmt: skip
    for kind in ("cuda", "xpu", "mps"):
        if torch.is_autocast_enabled(kind):
            raise UnsupportedError(
                f"The model runs under torch.autocast({kind!r})", where=str(where), why="programs are captured without a device",
                hint="device_type=x.device.type, or precision=",
            )  # fmt: skip


def _is_real(leaf: Tensor) -> bool:
    return not isinstance(leaf, _torch.FakeTensor) and not _torch.is_wrapped(leaf)


def _walk(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for t in tree:
            yield from _walk(t)
    elif isinstance(tree, dict):
        yield from _walk(list(tree.values()))
    else:
        yield tree


def check_reached(program: Program, reached: frozenset[str]) -> None:
    """A parameter that autograd reaches must have its gradient in the graph, and the other way round."""
    got = {o.path for o in program.outputs_of("grad")}
    if lost := sorted(reached - got):
        raise CaptureError(
            f"The captured graph lost the gradient of {', '.join(lost)}", why="eager autograd reaches them from the loss; the graph doesn't"
        )
    if extra := sorted(got - reached):
        raise CaptureError(f"The captured graph has a gradient for {', '.join(extra)}", why="eager autograd doesn't reach them from the loss")


def check_attributes(program: Program, rewritten: set[str]) -> None:
    """A tensor attribute may be written (a cache, a weight made anew in every forward) unless its old value was read."""
    for made in program.inputs_of("const"):
        if made.path in rewritten:
            raise CaptureError(
                f"The model reads its tensor attribute {made.path} and replaces it", why="a step keeps the new value of registered buffers only",
                hint="register_buffer(name, tensor)",
            )  # fmt: skip


@contextmanager
def restored(model: nn.Module) -> Iterator[Mapping[str, dict[str, Any]]]:
    """Let the modules' attributes be changed, then put back what they were: the same objects, in the same order.

    Yields a snapshot of each module's attributes. Tables (parameters, buffers, hooks) are copies meanwhile, lists and dicts in
    attributes get their contents back.
    """
    modules = dict(model.named_modules())
    saved = {path: dict(vars(module)) for path, module in modules.items()}
    contents = {path: {k: type(v)(v) for k, v in own.items() if type(v) in (list, dict, set)} for path, own in saved.items()}
    try:
        for path, module in modules.items():
            for key, value in saved[path].items():
                if key != "_modules" and key.startswith("_") and type(value) in (dict, OrderedDict) and key in _TABLES:
                    vars(module)[key] = value.copy()
        yield saved
    finally:
        for path, module in modules.items():
            own = vars(module)
            own.clear()
            own.update(saved[path])
            for key, value in contents[path].items():
                _refill(saved[path][key], value)


_TABLES = frozenset(
    key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, OrderedDict)) and key != "_modules"
)  # the parameters, buffers and hooks of every module


def _refill(container: Any, value: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(value) or any(a is not b for a, b in zip(container, value, strict=True)):
            container[:] = value
    elif len(container) != len(value) or any(k not in container for k in value) or any(
        isinstance(value, dict) and container[k] is not value[k] for k in value
    ):
        container.clear()
        container.update(value)


def check_python_state(model: nn.Module, before: Mapping[str, dict[str, Any]]) -> set[str]:
    """Names of tensor attributes that were replaced. A number or a flag that changed is refused: the graph holds one value of it."""
    for path, module in model.named_modules():
        own, old = vars(module), before[path]
        for key, value in own.items():
            if key == "training" or value is old.get(key, value):
                continue
            if isinstance(value, _PLAIN) and isinstance(old.get(key), _PLAIN) and value != old[key]:
                name = f"{path}.{key}" if path else key
                raise CaptureError(
                    f"The model changes its attribute {name} in its forward, from {old[key]!r} to {value!r}",
                    why="a captured graph keeps the one value it saw", hint="keep counters as buffers: register_buffer and .add_(1)",
                )  # fmt: skip
    return set()


def explain(error: Exception, module: str) -> AutoparError:
    """The error of a run on fakes, in terms of the user's model."""
    where = str(place_of_error(error, module))
    if isinstance(error, (_torch.DataDependentOutputException, _torch.DynamicOutputShapeException)):
        op = str(getattr(error, "func", ""))
        shape = isinstance(error, _torch.DynamicOutputShapeException)
        return CaptureError(
            f"The shape of {op} depends on data" if shape else f"The model reads a tensor's value in Python ({op})",
            where=where, why="the step is one graph for every batch; it can't branch on values or have sizes that depend on them",
            hint="torch.where with a mask of fixed size" if shape else "keep it a tensor: torch.where instead of if, no .item() or bool()",
        )  # fmt: skip
    if isinstance(error, _torch.UnsupportedOperatorException):
        return UnsupportedError(f"{error.func} can't run on tensors without data", where=where, hint="register a fake implementation")
    text = str(error).strip().splitlines()
    return CaptureError(
        f"The model raised {type(error).__name__} while it was captured: {text[0] if text else ''}", where=where,
        why="it runs on CPU tensors that have shapes but no data",
    )  # fmt: skip
