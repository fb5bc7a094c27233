"""Every private name of torch that autopar uses, wrapped once.

Tried on: torch 2.13.0. A name that moves in a later torch is mended here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config as inductor_config
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK, annotate, preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _checkpoint_hook

from autopar.ir.program import TensorType

__all__ = [
    "TOKENS", "BufferAOTInput", "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "GradAOTOutput", "HigherOrderOperator", "InputMutationAOTOutput", "OpOverload", "ParamAOTInput", "PlainAOTInput",
    "PlainAOTOutput", "ReplaceMode", "TangentAOTInput", "TreeSpec", "UnsupportedOperatorException", "accumulation_leaves",
    "annotate", "argument_position", "compiling", "effect_of", "fake_like", "fake_mode", "infer", "is_accumulation", "is_random",
    "is_wrapped", "no_mkldnn", "recompute_region", "resolve", "takes_dtype", "trace_joint", "tree_flatten",
    "tree_leaves", "tree_map", "tree_paths", "tree_unflatten",
]  # fmt: skip

TreeSpec = pytree.TreeSpec
#: inputs and outputs that only put ops with side effects in order.
TOKENS = (ForwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTInput, BackwardTokenAOTOutput)
#: base class of modes that see every ATen call and may answer it with something else: override ``__torch_dispatch__``.
ReplaceMode = TorchDispatchMode


def recompute_region() -> Any:
    """An object of the innermost call of ``torch.utils.checkpoint`` whose forward is running, each time the same; None outside of them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith(f"{_checkpoint_hook.__qualname__}.") else None


# -- trees ---------------------------------------------------------------------------------------------------------------


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and spec of a tree of tuples, lists, dicts, named tuples and registered classes; None is a leaf."""
    return pytree.tree_flatten(tree)


def tree_unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def tree_leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def tree_map(fn: Callable[..., Any], tree: Any) -> Any:
    return pytree.tree_map(fn, tree)


def tree_paths(tree: Any) -> tuple[list[str], list[Any], TreeSpec]:
    """Dotted paths, leaves and spec of a tree: ``aux.mask``, ``0.hidden``; the path of a bare leaf is empty."""
    pairs, spec = pytree.tree_flatten_with_path(tree)
    return [".".join(map(_key, path)) for path, _ in pairs], [leaf for _, leaf in pairs], spec


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# -- ops -----------------------------------------------------------------------------------------------------------------


def resolve(op: str) -> OpOverload:
    """``aten.mm.default`` → ``torch.ops.aten.mm.default``; any registered namespace."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    if not name:
        name, overload = rest, "default"
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload)
    return found


def effect_of(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The op with side effects that a node runs, and its arguments; None of any other node. Its results come after a token."""
    if node.target is not with_effects:
        return None
    _, op, *args = node.args
    assert isinstance(op, OpOverload)
    return op, tuple(args)


def is_random(op: Any) -> bool:
    """Whether an op draws from a random generator."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def takes_dtype(op: OpOverload) -> bool:
    """Whether an op has an argument that says the type of its result."""
    return any(argument.name == "dtype" for argument in op._schema.arguments)


def argument_position(op: OpOverload, name: str) -> int | None:
    """Where an argument stands in an op's signature; None where it has none of that name."""
    return next((k for k, argument in enumerate(op._schema.arguments) if argument.name == name), None)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and dtypes but no data; real tensors met on the way are converted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A CPU fake with the size, strides and dtype of a tensor, which may be on any device, meta too."""
    with mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def infer(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[TensorType | None, ...]:
    """Types of the outputs of an op, in order; TensorTypes stand for tensors in the arguments. An output that is no tensor is None."""
    pairs = tuple(sorted((kwargs or {}).items()))
    kinds: list[type] = []
    _kinds((args, pairs), kinds)
    return _inferred(op, args, pairs, tuple(kinds), torch.get_default_dtype())


def _kinds(tree: Any, found: list[type]) -> None:
    """The Python types of all leaves: 2, 2.0 and True are equal as arguments, and give other results."""
    for t in tree:
        if isinstance(t, tuple):
            _kinds(t, found)
        else:
            found.append(type(t))


@lru_cache(maxsize=65536)
def _inferred(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], kinds: tuple[type, ...], default: torch.dtype
) -> tuple[TensorType | None, ...]:
    """``infer``; equal layers ask the same. ``kinds`` and ``default``, torch's default dtype, are what equal arguments may differ in."""

    def build(tree: Any) -> Any:
        if isinstance(tree, (tuple, list)):
            return [build(t) for t in tree]
        return torch.empty(tree.shape, dtype=tree.dtype, device="cpu") if isinstance(tree, TensorType) else tree

    with FakeTensorMode(), torch.no_grad():
        result = op(*(build(a) for a in args), **{k: build(v) for k, v in kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(TensorType(r.dtype, tuple(map(int, r.shape))) if isinstance(r, torch.Tensor) else None for r in results)


# -- tracing -------------------------------------------------------------------------------------------------------------


@contextmanager
def compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true in here: the public question by which a model asks whether it may look at values.

    Exporting stays false: models answer that with masks written out, where a compiler keeps ``is_causal``.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def no_mkldnn() -> Iterator[None]:
    """Recurrent layers come as plain ops in here, not as the one fused op that only CPUs have."""
    # The public torch.backends.mkldnn.flags sets precisions as well, and warns about them.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def trace_joint(module: nn.Module, args: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> fx.GraphModule:
    """The functional ATen graph of a module's forward and, if its first output requires grad, backward, with descriptors.

    ``meta["desc"]`` of placeholders is an ``...AOTInput``; that of the output node a list of ``...AOTOutput``. Parameters, buffers
    and args are fakes of ``mode``.
    """
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(mode)
        stack.enter_context(preserve_node_meta())  # a trace without backward would drop annotations otherwise
        # Unread random ops stay in the graph: they are calls that are counted.
        stack.enter_context(inductor_config.patch(fallback_random=True))
        return aot_export_joint_with_descriptors(stack, module, args).graph_module


def is_accumulation(node: fx.Node) -> bool:
    """Whether a node is an addition that autograd made to sum the gradients of several uses; such nodes carry no source of their own."""
    return GRADIENT_ACC_SPECIAL_STACK in (node.meta.get("stack_trace") or "")


def accumulation_leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaf tensors whose ``.grad`` a backward from ``loss`` would write."""
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    if loss.grad_fn is None and loss.requires_grad:
        yield loss
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            yield function.variable
        todo.extend(parent for parent, _ in function.next_functions)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the tracer's own: a functional wrapper around a fake, not a tensor that the model holds."""
    return isinstance(tensor, FunctionalTensor) or torch._is_functional_tensor(tensor)


def returns_own_memory(op: OpOverload) -> bool:
    """Whether no result of an op is, or may be, a view of an operand, and no operand is written to."""
    schema = op._schema
    return all(part.alias_info is None for part in (*schema.returns, *schema.arguments))


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to by torch's ops, through any view of it (not through ``.data``)."""
    return tensor._version


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is to be called before or after each ``step`` of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
