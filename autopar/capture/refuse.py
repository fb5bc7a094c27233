"""What capture refuses, and how it says so. Nothing that tracing would lose goes by without a word."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import _torch
from autopar.capture.source import place_of_error
from autopar.errors import AutoparError, CaptureError, UnsupportedError
from autopar.ir.program import Program, Where

_PLAIN = (bool, int, float, complex, str, type(None))
#: what an attribute may hold things in; torch keeps hooks in an OrderedDict.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict)


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


def check_arguments(tree: Any, where: Where) -> None:
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
        raise CaptureError(
            f"The captured graph has a gradient for {', '.join(extra)}", why="eager autograd doesn't reach them from the loss"
        )


def check_attributes(program: Program, rewritten: set[str]) -> None:
    """A tensor attribute may be written (a cache, a weight made anew in every forward) unless its old value was read."""
    for made in program.inputs_of("const"):
        if made.path in rewritten:
            raise CaptureError(
                f"The model reads its tensor attribute {made.path} and replaces it",
                why="a step keeps the new value of registered buffers only", hint="register_buffer(name, tensor)",
            )  # fmt: skip


#: the parameters, buffers and hooks of every module.
TABLES = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict) and key != "_modules")


class Attributes:
    """What the attributes of a model's modules are now: the same objects in the same order, and what lists, dicts and sets hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.saved = {path: dict(vars(module)) for path, module in self.modules.items()}
        self.contents = {path: {k: copy.copy(v) for k, v in own.items() if type(v) in _CONTAINERS} for path, own in self.saved.items()}

    def restore(self) -> None:
        for path, module in self.modules.items():
            # vars() is the module's own dict, whatever a type checker makes of it.
            own: Any = vars(module)
            own.clear()
            own.update(self.saved[path])
            for key, value in self.contents[path].items():
                _refill(self.saved[path][key], value)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Let the modules' attributes be changed, then put them back. Tables (parameters, buffers, hooks) are copies meanwhile."""
    before = Attributes(model)
    try:
        for module in before.modules.values():
            own: Any = vars(module)
            for key in TABLES & own.keys():
                own[key] = own[key].copy()
        yield
    finally:
        before.restore()


class Outside:
    """The plain data that a model's code can reach beside its modules: globals, class attributes, variables that functions close over."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, tuple[str, Any]] = {}
        self._seen: set[int] = set()
        for module in model.modules():
            for kind in type(module).__mro__:
                if kind.__module__.split(".")[0] not in ("torch", "builtins", "typing", "abc"):
                    self._places.setdefault(id(kind), (kind.__qualname__, kind))
                    for function in vars(kind).values():
                        self._add(function)
            for value in vars(module).values():
                self._add(value)
        self._before = {at: self._now(place) for at, (_, place) in self._places.items()}

    def _add(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._seen or (function.__module__ or "").startswith("torch."):
            return
        self._seen.add(id(function))
        self._places.setdefault(id(function.__globals__), (function.__module__, function.__globals__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._places.setdefault(id(cell), (f"{name} of {function.__qualname__}", cell))
            try:
                self._add(cell.cell_contents)  # what a decorator wraps
            except ValueError:
                pass

    @staticmethod
    def _now(place: Any) -> dict[str, Any]:
        if isinstance(place, CellType):
            try:
                table = {"": place.cell_contents}
            except ValueError:  # not set yet
                table = {}
        else:
            table = place if isinstance(place, dict) else dict(vars(place))
        return {k: v for k, v in table.items() if isinstance(v, _PLAIN)} | {
            k: type(v)(v) for k, v in table.items() if type(v) in (list, dict, set) and not k.startswith("__") and _plain_items(v) == v
        }

    def check(self) -> None:
        """Raises CaptureError where a value isn't what it was when this was made."""
        for at, (name, place) in self._places.items():
            now = self._now(place)
            for key, old in self._before[at].items():
                if key in now and now[key] != old:
                    raise CaptureError(
                        f"The model changes {'.'.join(filter(None, (name, key)))} in its forward, from {old!r} to {now[key]!r}",
                        why="a captured graph keeps the one value it saw", hint="keep counters as buffers: register_buffer and .add_(1)",
                    )  # fmt: skip


def _refill(container: Any, value: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(value) or any(a is not b for a, b in zip(container, value, strict=True)):
            container[:] = value
    elif (
        len(container) != len(value)
        or any(k not in container for k in value)
        or any(isinstance(value, dict) and container[k] is not value[k] for k in value)
    ):
        container.clear()
        container.update(value)


def check_python_state(before: Attributes) -> None:
    """A number or a flag that a forward changed is refused: the graph holds one value of it."""
    for path, module in before.modules.items():
        old = before.saved[path]
        for key, value in vars(module).items():
            if key == "training" or value is old.get(key, value):
                continue
            if isinstance(value, _PLAIN) and isinstance(old.get(key), _PLAIN) and value != old[key]:
                name = f"{path}.{key}" if path else key
                raise CaptureError(
                    f"The model changes its attribute {name} in its forward, from {old[key]!r} to {value!r}",
                    why="a captured graph keeps the one value it saw", hint="keep counters as buffers: register_buffer and .add_(1)",
                )  # fmt: skip
        for key, content in before.contents[path].items():
            now = vars(module).get(key)
            if key not in TABLES and key != "_modules" and type(now) is type(content) and _plain_items(now) != _plain_items(content):
                raise CaptureError(
                    f"The model changes what its attribute {path + '.' if path else ''}{key} holds in its forward",
                    why="a captured graph keeps the one value it saw", hint="keep counters as buffers: register_buffer and .add_(1)",
                )  # fmt: skip


def _plain_items(container: Any) -> Any:
    """The plain data in a container: what a forward counts or remembers there is lost, tensors are looked at elsewhere."""
    if isinstance(container, dict):
        return {k: v for k, v in container.items() if isinstance(k, _PLAIN) and isinstance(v, _PLAIN)}
    return (
        [v for v in container if isinstance(v, _PLAIN)] if isinstance(container, list) else {v for v in container if isinstance(v, _PLAIN)}
    )


class Constants:
    """Which tensors of a run depend on nothing that changes from step to step: made without a tensor, or from such tensors."""

    _RANDOM = re.compile("rand|normal|uniform|bernoulli|dropout|multinomial|exponential|poisson")

    def __init__(self) -> None:
        # By identity, and held, so that no identity is used twice.
        self.held: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> None:
        self.held[id(tensor)] = tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.held

    def after(self, function: str, arguments: Any, result: Any) -> None:
        constant = not self._RANDOM.search(function) and all(t in self for t in _walk(arguments) if isinstance(t, Tensor))
        written = arguments[0][0] if function == "__setitem__" else None
        for tensor in _walk((result, written)):
            if isinstance(tensor, Tensor):
                if constant:
                    self.add(tensor)
                else:
                    self.held.pop(id(tensor), None)


class CountRandom(_torch.ReplaceMode):
    """Counts the random ops that run in here."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += _torch.is_random(func)
        return func(*args, **(kwargs or {}))


def check_random(graph: fx.GraphModule, drawn: int) -> None:
    """Every random op that eager runs is in the graph: torch's decompositions may lose one."""
    traced = sum(_torch.is_random(n.target) and n.meta.get("partitioner_tag") != "is_backward" for n in graph.graph.nodes)
    if traced < drawn:
        raise UnsupportedError(
            f"The model runs {drawn} random ops in its forward, of which {traced} were traced",
            why="torch's tracing of some layer loses them",
            hint="use plain ops (F.dropout, torch.rand) in place of that layer's own dropout",
        )  # fmt: skip


def left_behind(before: Attributes, constants: Constants) -> dict[int, tuple[str, Tensor]]:
    """Tensors that a forward left in the model's attributes, by identity; caches of constants don't count."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in before.modules.items():
        for key, value in vars(module).items():
            if key in TABLES or key == "_modules":
                continue
            for tensor in _walk(value):
                if isinstance(tensor, _torch.FakeTensor) and not isinstance(tensor, nn.Parameter) and tensor not in constants:
                    found[id(tensor)] = (f"{path}.{key}" if path else key, tensor)
    return found


def check_left_behind(tree: Any, where: Where, left: Mapping[int, tuple[str, Tensor]]) -> None:
    """In a second run nothing may be read that the first one left behind."""
    for leaf in _walk(tree):
        if id(leaf) in left:
            raise CaptureError(
                f"The model reads what an earlier step left in its attribute {left[id(leaf)][0]}", where=str(where),
                why="a step keeps the new value of registered buffers only",
                hint="register_buffer(name, tensor), and write it in the forward",
            )  # fmt: skip


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
    if "use_reentrant=True" in str(error):
        return UnsupportedError(
            "A region under torch.utils.checkpoint with use_reentrant=True", where=where, why="its backward calls .backward() itself",
            hint="use_reentrant=False",
        )  # fmt: skip
    if type(error).__name__ == "UncapturedHigherOrderOpError":
        return UnsupportedError(
            "A control-flow operator (torch.cond, while_loop, map, scan)", where=where, why="the step is one graph of plain operations",
            hint="torch.where, or a Python loop of fixed length",
        )  # fmt: skip
    text = str(error).strip().splitlines()
    return CaptureError(
        f"The model raised {type(error).__name__} while it was captured: {text[0] if text else ''}", where=where,
        why="it runs on CPU tensors that have shapes but no data",
    )  # fmt: skip
