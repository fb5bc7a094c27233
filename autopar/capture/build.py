"""From the traced graph to a Program: inputs and outputs by their descriptors, folded tuples, no devices, readable names."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar._torch import BufferAOTInput, GradAOTOutput, InputMutationAOTOutput, ParamAOTInput, PlainAOTInput, PlainAOTOutput
from autopar.capture.source import KEY
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.program import Input, Node, Output, Phase, Program, Ref, TensorType, Where

# Arguments that say where a tensor lies, not what it is: the emitter decides that anew for every rank.
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad"})
# One tensor in, the same values out.
_SAME = frozenset(f"aten.{name}.default" for name in ("detach", "alias", "lift", "lift_fresh", "lift_fresh_copy"))
# They check or constrain and give nothing that a value depends on.
_CHECKS = re.compile(r"aten\._*(functional_)?(assert|sym_constrain)\w*\.")
_OUT_NAMES: Mapping[str, tuple[str, ...]] = {
    "aten.native_layer_norm.default": ("", "mean", "rstd"),
    "aten.native_group_norm.default": ("", "mean", "rstd"),
    "aten.native_layer_norm_backward.default": ("", "weight", "bias"),
    "aten.native_dropout.default": ("", "mask"),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": ("", "logsumexp"),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": ("query", "key", "value"),
    "aten.nll_loss_forward.default": ("", "total_weight"),
    "aten.max.dim": ("", "indices"),
    "aten.min.dim": ("", "indices"),
    "aten.topk.default": ("", "indices"),
    "aten.sort.default": ("", "indices"),
}
_SHORT: Mapping[str, str] = {
    "scaled_dot_product_flash_attention_for_cpu": "sdpa",
    "scaled_dot_product_flash_attention_for_cpu_backward": "sdpa_backward",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "native_dropout": "dropout",
    "native_dropout_backward": "dropout_backward",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "log_softmax_backward_data": "log_softmax_backward",
    "softmax_backward_data": "softmax_backward",
    "nll_loss_forward": "nll_loss",
    "embedding_dense_backward": "embedding_backward",
    "unsafe_view": "view",
    "to_copy": "to",
}
# Sizes among the arguments in which -1 stands for something that is known here.
_SIZED = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.expand.default"})
_RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | {"torch", "aten", "comm", "autopar", "self"}


class Names:
    """Unique Python identifiers, in order of asking."""

    def __init__(self) -> None:
        self.taken: set[str] = set(_RESERVED)
        self.next: dict[str, int] = {}

    def fresh(self, wish: str) -> str:
        base = re.sub(r"\W+", "_", wish, flags=re.ASCII).strip("_") or "value"
        base = f"m{base}" if base[0].isdigit() else base
        name = base
        while name in self.taken:
            self.next[base] = self.next.get(base, 0) + 1
            name = f"{base}_{self.next[base]}"
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class Tied:
    """One tensor of the model under all its names. ``kind`` as of ``Input``."""

    kind: str
    names: tuple[str, ...]
    trainable: bool
    type: TensorType


@dataclass
class Builder:
    """Takes one traced graph apart. ``tied`` maps every state name to its group; ``prefix`` is the wrapper's name for the model."""

    graph: fx.GraphModule
    tied: Mapping[str, Tied]
    batch_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    output_tree: Any
    values: Mapping[str, torch.Tensor]
    has_loss: bool
    prefix: str = "model."
    names: Names = field(default_factory=Names)
    types: dict[str, TensorType] = field(default_factory=dict)
    inputs: dict[tuple[str, str], Input] = field(default_factory=dict)
    consts: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    #: fx node → the name of its value, a tuple of names, or None where it isn't a tensor.
    env: dict[fx.Node, Any] = field(default_factory=dict)
    sequence: dict[str, int] = field(default_factory=dict)
    where: dict[str, Where] = field(default_factory=dict)

    def build(self) -> Program:
        self._declare_state()
        placed = _Placed(self.graph.graph)
        tangent: Input | None = None
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                made = self._placeholder(node)
                if made is not None and made.kind == "tangent":
                    tangent = made
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node, placed)
            elif node.op == "output":
                outputs, unreached = self._outputs(node)
            else:
                raise UnsupportedError(f"The traced graph has a {node.op} node, {node.name}")
        nodes = self._live(outputs)
        return self._finish(nodes, outputs, unreached, tangent)

    # -- inputs ----------------------------------------------------------------------------------------------------------

    def _declare_state(self) -> None:
        letters = {"param": "p", "buffer": "b", "const": "c"}
        for tied in dict.fromkeys(self.tied.values()):
            name = self.names.fresh(f"{letters[tied.kind]}_{tied.names[0]}")
            self.types[name] = tied.type
            self.inputs[tied.kind, tied.names[0]] = Input(name, tied.kind, tied.names[0], tied.names[1:], tied.trainable)  # type: ignore[arg-type]

    def _state(self, target: str) -> Input:
        tied = self.tied[target.removeprefix(self.prefix)]
        return self.inputs[tied.kind, tied.names[0]]

    def _placeholder(self, node: fx.Node) -> Input | None:
        desc = node.meta["desc"]
        if isinstance(desc, (ParamAOTInput, BufferAOTInput)):
            made = self._state(desc.target)
        elif isinstance(desc, PlainAOTInput):
            path = self.batch_paths[desc.idx]
            name = self.names.fresh(path if not path[:1].isdigit() else f"batch_{path}")
            made = self.inputs["batch", path] = Input(name, "batch", path)
            self.types[name] = _type(node.meta["val"])
        elif isinstance(desc, _torch.TOKENS):
            self.env[node] = None
            return None
        elif isinstance(desc, _torch.TangentAOTInput):
            if not isinstance(desc.output, PlainAOTOutput) or desc.output.idx != 0:
                if isinstance(desc.output, InputMutationAOTOutput) and not isinstance(desc.output.mutated_input, BufferAOTInput):
                    self._mutation(desc.output.mutated_input, None, {})
                # A mutated buffer that depends on parameters asks for a tangent of its own; eager keeps that graph alive over steps.
                raise CaptureError(
                    f"The step returns something else than its loss that carries gradient ({desc.expr()})",
                    why="a buffer was overwritten by a value that depends on trainable parameters, without torch.no_grad()",
                    hint="write buffers under torch.no_grad() or from detached values",
                )
            made = self.inputs["tangent", "loss"] = Input(self.names.fresh("tangent"), "tangent", "loss")
            self.types[made.name] = _type(node.meta["val"])
        else:
            raise UnsupportedError(f"The traced graph has an input of an unknown kind: {desc}")
        self.env[node] = made.name
        return made

    def _constant(self, node: fx.Node) -> None:
        value = getattr(self.graph, str(node.target))
        if not isinstance(value, torch.Tensor):
            self.env[node] = None
            return
        if isinstance(value, _torch.FakeTensor):
            if value.constant is None:
                raise CaptureError(f"A tensor without data was baked into the graph ({node.target})", hint="keep tensors as buffers")
            value = value.constant
        path = f"literal.{sum(p.startswith('literal.') for p in self.consts)}"
        name = self.names.fresh(f"c_{path}")
        self.inputs["const", path] = Input(name, "const", path)
        self.types[name] = _type(value)
        self.consts[path] = value.detach().to("cpu", copy=True)
        self.env[node] = name

    # -- nodes -----------------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node, placed: _Placed) -> None:
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            self.env[node] = self.env[parent][index]
            return
        phase: Phase = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
        where = self._merge_where(node.all_input_nodes, placed) if _torch.is_accumulation(node) else placed.of(node, phase)
        if (effect := _torch.effect_of(node)) is not None:
            self._effect(node, *effect, phase, where)
            return
        if not isinstance(node.target, _torch.OpOverload):
            raise UnsupportedError(
                f"{getattr(node.target, '__name__', node.target)} can't be captured", where=str(where),
                why="it is not a plain ATen operation (a higher-order operator or a symbolic size)",
            )  # fmt: skip
        op = str(node.target)
        if _CHECKS.match(op):
            self.env[node] = None
            return
        args = tuple(self._value(a) for a in node.args)
        kwargs = {k: self._value(v) for k, v in node.kwargs.items() if k not in _PLACEMENT and v is not None}
        if "generator" in kwargs or any(isinstance(a, torch.Generator) for a in args):
            raise UnsupportedError("A random op with a generator of its own", where=str(where), hint="leave generator= away")
        if op in _SAME or (op == "aten._to_copy.default" and self._keeps_dtype(args, kwargs)):
            self.env[node] = args[0].name
            return
        if op == "aten.cat.default":
            # torch lets an empty vector take part in any cat (caches begin so); it adds nothing.
            args = (tuple(a for a in args[0] if self.types[a.name].shape != (0,)) or args[0], *args[1:])
            if len(args[0]) == 1:
                self.env[node] = args[0][0].name
                return
        if op == "aten.slice.Tensor" and self.types[args[0].name] == _type(node.meta["val"]):
            self.env[node] = args[0].name  # x[:]
            return
        if op == "aten.copy.default":
            self.env[node] = self._copy(node, args, phase, where)
            return
        value = node.meta.get("val")
        outs = value if isinstance(value, (tuple, list)) else (value,)
        names: list[str] = []
        if op in _SIZED:
            args = (args[0], _type(value).shape, *args[2:])
        short = node.target._schema.name.split("::")[1].strip("_")
        stem = _stem(phase, where) + _SHORT.get(short, short)
        for index, out in enumerate(outs):
            if not isinstance(out, torch.Tensor):
                names.append("")
                continue
            if out.layout != torch.strided:
                raise UnsupportedError(
                    f"{op} makes a sparse tensor ({out.layout})", where=str(where), hint="sparse=False, for dense gradients"
                )
            names.append(self._define(stem + _out_name(op, index, isinstance(value, list)), _type(out), node, where))
        self.nodes.append(Node(op, args, tuple(names), tuple(sorted(kwargs.items())), phase, where))
        self.env[node] = tuple(names) if isinstance(value, (tuple, list)) else names[0]

    def _effect(self, node: fx.Node, op: Any, args: tuple[Any, ...], phase: Phase, where: Where) -> None:
        """A check of what an op on matrices says of itself: who reads its result from here on reads the checked one."""
        if str(op) != "aten._linalg_check_errors.default":
            raise UnsupportedError(f"{op} has side effects", where=str(where), why="the step is a graph of values")
        info, name = self.env[args[0]], args[1]
        result = next(n for n in self.nodes if info in n.outs).outs[0]
        made = self._define(f"{result}_checked", self.types[result], node, where)
        self.nodes.append(Node("autopar.checked", (Ref(result), Ref(info), name, node.kwargs["is_matrix"]), (made,), (), phase, where))
        for key, held in self.env.items():
            if held == result:
                self.env[key] = made
            elif isinstance(held, tuple):
                self.env[key] = tuple(made if h == result else h for h in held)
        self.env[node] = (None, None)

    def _define(self, wish: str, type: TensorType, node: fx.Node | None, where: Where) -> str:
        name = self.names.fresh(wish)
        self.types[name] = type
        self.where[name] = where
        if node is not None and (number := node.meta.get("seq_nr")) is not None and not _torch.is_accumulation(node):
            self.sequence[name] = number
        return name

    def _keeps_dtype(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return kwargs.get("dtype", self.types[args[0].name].dtype) == self.types[args[0].name].dtype

    def _copy(self, node: fx.Node, args: tuple[Any, ...], phase: Phase, where: Where) -> str:
        """``copy(to, from)`` has the shape and dtype of the first and the values of the second: the first itself is never read."""
        target, source = self.types[args[0].name], args[1].name
        stem = _stem(phase, where)
        if self.types[source].dtype != target.dtype:
            name = self._define(stem + "to", TensorType(target.dtype, self.types[source].shape), node, where)
            self.nodes.append(Node("aten._to_copy.default", (Ref(source),), (name,), (("dtype", target.dtype),), phase, where))
            source = name
        if self.types[source].shape != target.shape:
            name = self._define(stem + "expand", target, node, where)
            self.nodes.append(Node("aten.expand.default", (Ref(source), target.shape), (name,), (), phase, where))
            source = name
        return source

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            found = self.env[arg]
            return tuple(Ref(f) if f else None for f in found) if isinstance(found, tuple) else None if found is None else Ref(found)
        if isinstance(arg, (tuple, list)):
            return tuple(self._value(a) for a in arg)
        if isinstance(arg, torch.device) or isinstance(arg, (torch.layout, torch.memory_format)):
            return None
        return arg

    def _merge_where(self, inputs: Iterable[fx.Node], placed: _Placed) -> Where:
        """A sum of gradients belongs to the use that comes first in the forward: the last gradient to arrive."""
        found = [name for name in map(self.env.get, inputs) if isinstance(name, str) and name in self.where]
        return self._earliest(found)

    def _earliest(self, names: Iterable[str]) -> Where:
        ranked = sorted((self.sequence.get(n, 1 << 62), n) for n in names if n in self.where)
        return self.where[ranked[0][1]] if ranked else Where()

    # -- outputs ---------------------------------------------------------------------------------------------------------

    def _outputs(self, node: fx.Node) -> tuple[list[Output], list[str]]:
        loss: list[Output] = []
        buffers: dict[str, Output] = {}
        leaves: list[Output] = []
        parts: dict[str, list[str]] = {}
        flat = node.args[0]
        assert isinstance(flat, (tuple, list))
        for value, desc in zip(flat, node.meta["desc"], strict=True):
            name = self.env[value] if isinstance(value, fx.Node) else None
            if isinstance(desc, _torch.TOKENS) or (desc is None and name is None):
                continue  # the place of a gradient of something that has none
            if isinstance(desc, GradAOTOutput):
                if isinstance(desc.grad_of, ParamAOTInput) and isinstance(name, str):
                    parts.setdefault(self._state(desc.grad_of.target).path, []).append(name)
            elif isinstance(desc, InputMutationAOTOutput):
                self._mutation(desc.mutated_input, name, buffers)
            elif isinstance(desc, PlainAOTOutput):
                # Our wrapper returns clones, so that no output is an alias of another value; they end here.
                name = self._unclone(value)
                if self.has_loss and desc.idx == 0:
                    loss.append(Output(name, "loss", "loss"))
                else:
                    leaves.append(Output(name, "output", self.output_paths[desc.idx - self.has_loss]))
            else:
                raise UnsupportedError(f"The traced graph has an output of an unknown kind: {desc}")
        grads = [Output(self._sum(path, parts[path]), "grad", path) for kind, path in self.inputs if kind == "param" and path in parts]
        unreached = [path for (kind, path), made in self.inputs.items() if kind == "param" and made.trainable and path not in parts]
        return [*loss, *grads, *buffers.values(), *leaves], unreached

    def _mutation(self, desc: Any, name: str | None, buffers: dict[str, Output]) -> None:
        if isinstance(desc, BufferAOTInput):
            made = self._state(desc.target)
            if made.kind == "buffer" and name is not None:
                if made.path in buffers and buffers[made.path].value != name:
                    raise CaptureError(f"The buffer {made.path} is written through two of its names ({', '.join(made.aliases)})")
                buffers[made.path] = Output(name, "buffer", made.path)
                return
            raise CaptureError(
                f"The model writes to its tensor attribute {made.path}", why="a step keeps the new value of registered buffers only",
                hint="register_buffer(name, tensor)",
            )  # fmt: skip
        if isinstance(desc, ParamAOTInput):
            what = f"its parameter {self._state(desc.target).path}"
        else:
            what = f"its input {self.batch_paths[desc.idx]!r}"
        raise CaptureError(
            f"The model writes to {what} in place", why="a step must leave its batch and parameters as they are",
            hint="write to a copy: x = x.clone()",
        )  # fmt: skip

    def _unclone(self, value: Any) -> str:
        while isinstance(value, fx.Node) and str(value.target) in {*_SAME, "aten.clone.default"} and _annotated(value) is None:
            value = value.args[0]
        name = self.env[value]
        assert isinstance(name, str)
        return name

    def _sum(self, path: str, parts: list[str]) -> str:
        """The gradient of a tied parameter is the sum of what its names received."""
        total = parts[0]
        for index, part in enumerate(parts[1:], 2):
            where = self._earliest(parts[:index])
            name = self._define(f"d_{path}_tied", self.types[total], None, where)
            self.nodes.append(Node("aten.add.Tensor", (Ref(total), Ref(part)), (name,), (), "backward", where))
            total = name
        return total

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _live(self, outputs: Iterable[Output]) -> list[Node]:
        """Nodes that an output depends on. Random ops stay even if nobody reads them: they are counted."""
        wanted = {o.value for o in outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if wanted.isdisjoint(node.outs) and (node.op.startswith("autopar.") or not _torch.is_random(_torch.resolve(node.op))):
                continue
            wanted.update(node.refs())
            kept.append(node)
        return [replace(node, outs=tuple(o if o in wanted else "" for o in node.outs)) for node in reversed(kept)]

    def _finish(self, nodes: list[Node], outputs: list[Output], unreached: list[str], tangent: Input | None) -> Program:
        read = {name for node in nodes for name in node.refs()} | {o.value for o in outputs}
        inputs = [i for i in self.inputs.values() if i.kind != "const" or i.name in read]
        for made in inputs:
            if made.kind == "const" and made.path not in self.consts:
                if self.values[made.path].is_meta:
                    raise CaptureError(
                        f"The model reads its tensor attribute {made.path}, which is on meta",
                        why="a plain attribute can't be initialised later",
                        hint="register_buffer, or build this tensor on a real device",
                    )
                self.consts[made.path] = self.values[made.path].detach().to("cpu", copy=True)
        order = ("param", "buffer", "const", "batch", "tangent")
        inputs.sort(key=lambda i: order.index(i.kind))
        known = {i.name for i in inputs} | {o for n in nodes for o in n.outs if o}
        return Program(
            inputs=tuple(inputs),
            nodes=tuple(nodes),
            outputs=tuple(outputs),
            types={n: t for n, t in self.types.items() if n in known},
            consts={i.path: self.consts[i.path] for i in inputs if i.kind == "const"},
            unreached=tuple(unreached),
            output_tree=self.output_tree,
        )


class _Placed:
    """The Where of traced nodes: by annotation, or that of the forward node with the nearest sequence number."""

    def __init__(self, graph: fx.Graph) -> None:
        self.by_number: dict[int, Where] = {}
        self.last = Where()
        for node in graph.nodes:
            number = node.meta.get("seq_nr")
            if number is not None and node.meta.get("partitioner_tag") != "is_backward" and (found := _annotated(node)):
                self.by_number.setdefault(number, found)
        self.numbers = sorted(self.by_number)

    def of(self, node: fx.Node, phase: Phase) -> Where:
        found, number = _annotated(node), node.meta.get("seq_nr")
        if found is None and phase == "backward" and number is not None:
            at = bisect_right(self.numbers, number)
            found = self.by_number[self.numbers[max(at - 1, 0)]] if self.numbers else None
        if found is None:
            # Nodes made by Python that is no torch function: they run in the module of what ran just before.
            found = self.last
        found = replace(found, order=self.last.order if number is None and phase == "forward" else -1 if number is None else number)
        if phase == "forward":
            self.last = found
        return found


def _annotated(node: fx.Node) -> Where | None:
    found = node.meta.get("custom", {}).get(KEY)
    if found is None:
        return None
    module, file, line, code, again = found
    return Where(module, file, line, code, again=again)


def _stem(phase: Phase, where: Where) -> str:
    return ("d_" if phase == "backward" else "") + (f"{where.module}_" if where.module else "")


def _type(value: Any) -> TensorType:
    return TensorType(value.dtype, tuple(int(s) for s in value.shape))


def _out_name(op: str, index: int, is_list: bool) -> str:
    if op in _OUT_NAMES:
        name = _OUT_NAMES[op][index] if index < len(_OUT_NAMES[op]) else f"o{index}"
        return f"_{name}" if name else ""
    return f"_o{index}" if index or is_list else ""
