"""``capture``: the training step of an unmodified model as a Program."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch
from autopar.capture import refuse
from autopar.capture.build import Builder, Tied
from autopar.capture.source import Modules, SourceMode
from autopar.capture.tree import BatchTree, OutputTree, take_batch, take_output
from autopar.errors import AutoparError, CaptureError, InputError
from autopar.ir.program import Program, TensorType

Loss = Callable[[Any, Any], Tensor]


def capture(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, train: bool | None = True, grads: bool = True,
    tick: Callable[[], None] | None = None,
) -> Program:  # fmt: skip
    """One step of ``model`` on a batch of these shapes, as a Program with global sizes.

    Args:
        model: any module; on any device, meta too. It is left exactly as it was.
        batch: a tensor (``model(x)``), a tuple or list (``model(*batch)``) or a mapping (``model(**batch)``). Leaves that are no
            tensors are constants of the program.
        loss: ``loss(output, batch)`` → scalar; without it the output is the loss, or has it as ``.loss`` or ``["loss"]``.
        train: True captures the model in train mode (a model that is in train mode keeps the flags of its submodules), False in eval
            mode, None as its flags are.
        grads: True gives forward and backward, False the forward alone, for which a loss is optional.
        tick: called whenever a module's forward begins.
    """
    refuse.check_model(model, grads)
    tree, tensors = take_batch(batch)
    state = State.of(model)
    with _preserved_random(model), torch.inference_mode(False), torch.set_grad_enabled(grads), _torch.no_mkldnn():
        first = _Run(model, state, tree, tensors, loss, train, grads, tick)
        with first.ready() as step:
            reached = first.rehearse(step)
            if first.leaves_behind():
                first.rehearse(step)
        second = _Run(model, state, tree, tensors, loss, train, grads, tick)
        with second.ready() as step:
            graph = second.trace(step)
    assert second.output is not None
    builder = Builder(
        graph=graph, tied=state.tied, batch_paths=tree.paths, output_paths=second.output.paths, output_tree=second.output,
        values=state.values, has_loss=second.has_loss,
    )  # fmt: skip
    program = builder.build()
    refuse.check_random(graph, first.drawn)
    if grads:
        refuse.check_reached(program, reached)
    refuse.check_attributes(program, second.rewritten)
    return program


@dataclass(frozen=True)
class State:
    """Parameters, buffers and plain tensor attributes of a model, grouped by identity."""

    tied: Mapping[str, Tied]
    values: Mapping[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> State:
        groups: dict[int, tuple[str, list[str], Tensor]] = {}
        for kind, name, tensor in _tensors(model):
            groups.setdefault(id(tensor), (kind, [], tensor))[1].append(name)
        refuse.check_storage([(kind, names[0], tensor) for kind, names, tensor in groups.values()])
        tied: dict[str, Tied] = {}
        values: dict[str, Tensor] = {}
        for kind, names, tensor in groups.values():
            type = TensorType(tensor.dtype, tuple(tensor.shape))
            group = Tied(kind, tuple(names), kind == "param" and tensor.requires_grad, type)
            tied.update(dict.fromkeys(names, group))
            values[names[0]] = tensor
        return State(tied, values)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor: all parameters, then all buffers, then plain attributes; a tied one comes once for each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "param", name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer
    for path, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield "const", f"{path}.{key}" if path else key, value


@contextmanager
def _preserved_random(model: nn.Module) -> Iterator[None]:
    """Tracing draws nothing; a model that draws from Python's or numpy's generator would be captured with one draw baked in."""
    numpy = sys.modules.get("numpy")
    with torch.random.fork_rng(devices=[]):
        before = random.getstate()
        before_numpy = numpy.random.get_state(legacy=False) if numpy is not None else None
        try:
            yield
            drawn = "random" if random.getstate() != before else ""
            if numpy is not None and str(numpy.random.get_state(legacy=False)) != str(before_numpy):
                drawn = "numpy.random"
            if drawn:
                raise CaptureError(
                    f"The model draws from {drawn} in its forward", where=type(model).__name__,
                    why="the one number drawn while capturing would be used in every step", hint="draw with torch: torch.rand, F.dropout",
                )  # fmt: skip
        finally:
            random.setstate(before)
            if numpy is not None:
                numpy.random.set_state(before_numpy)


class Step(nn.Module):
    """The traced function: tensor leaves of the batch in, the loss and the model's output leaves out."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.model = run.model
        self._run = run

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self._run.forward(leaves)


@dataclass
class _Run:
    """One pass through the model with fakes in place of its tensors."""

    model: nn.Module
    state: State
    batch: BatchTree
    tensors: list[Tensor]
    loss: Loss | None
    train: bool | None
    grads: bool
    tick: Callable[[], None] | None = None
    output: OutputTree | None = None
    has_loss: bool = False
    rewritten: set[str] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)

    constants: refuse.Constants | None = None
    left: Mapping[int, tuple[str, Tensor]] = field(default_factory=dict)
    before: refuse.Attributes | None = None
    #: how many random ops the forward ran.
    drawn: int = 0

    def __post_init__(self) -> None:
        self.mode = _torch.fake_mode()
        self.modules = Modules(self.model, self.tick)
        self.leaves = tuple(_torch.fake_like(self.mode, t) for t in self.tensors)

    @contextmanager
    def ready(self) -> Iterator[Step]:
        """Fakes, flags and hooks in place; whatever happens, the model's modules get back the very dicts' contents they had."""
        with refuse.restored(self.model):
            self._swap()
            if self.train is None:
                pass
            elif not self.train:
                self.model.eval()
            elif not self.model.training:
                self.model.train()
            try:
                with self.modules.entered(), _torch.compiling():
                    yield Step(self)
            except AutoparError:
                raise
            except Exception as error:
                raise refuse.explain(error, self.modules.failed or "") from error

    def _swap(self) -> None:
        fakes: dict[str, Tensor] = {}
        for group in dict.fromkeys(self.state.tied.values()):
            fake = _torch.fake_like(self.mode, self.state.values[group.names[0]])
            if group.kind == "param":
                fake = nn.Parameter(fake, requires_grad=group.trainable and self.grads)
                self.parameters[id(fake)] = group.names[0]
            fakes.update(dict.fromkeys(group.names, fake))
        for path, module in self.model.named_modules():
            own = vars(module)
            stem = f"{path}." if path else ""
            for key, value in list(own.items()):
                # A plain tensor attribute becomes a buffer for the time of the capture, so that it is an input like the others.
                if isinstance(value, Tensor) and not isinstance(value, _torch.FakeTensor):
                    del own[key]
                    own["_buffers"][key] = fakes[stem + key]
            for table in (own["_parameters"], own["_buffers"]):
                for key, value in table.items():
                    if value is not None:
                        table[key] = fakes[stem + key]

    def forward(self, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        before = self.before = refuse.Attributes(self.model)
        held = {(module, key): t for module in self.model.modules() for key, t in vars(module)["_buffers"].items()}
        outside = refuse.Outside(self.model) if self.constants is None else None
        self.modules.stack.clear()
        batch = self.batch.fill(leaves)
        with SourceMode(self.modules, self._check_arguments, self.constants.after if self.constants else None):
            output = self.batch.call(self.model, batch)
            loss = find_loss(self.model, output, batch, self.loss, self.grads)
        self._write_back(held)
        refuse.check_python_state(before)
        if outside is not None:  # what changes in every run; a flag that the first run sets is no counter
            outside.check()
        if self.constants is None:
            # The trace runs the forward more than once; each run must find the model as the first one did.
            before.restore()
        self.output, tensors = take_output(output)
        self.has_loss = loss is not None
        # Clones: an output that is a view of another value, or an input, would make the trace return bases and views.
        return (*(() if loss is None else (loss.clone(),)), *(t.detach().clone() for t in tensors))

    def _write_back(self, held: Mapping[tuple[nn.Module, str], Tensor | None]) -> None:
        """``self.buffer = new`` becomes ``self.buffer.copy_(new)``, which the trace sees."""
        for (module, key), old in held.items():
            table = vars(module)["_buffers"]
            new = table.get(key)
            if new is old:
                continue
            path = self.modules.paths[module]
            name = f"{path}.{key}" if path else key
            if name in self.state.tied and self.state.tied[name].kind == "const":
                self.rewritten.add(name)
            elif not isinstance(new, Tensor) or old is None or new.shape != old.shape or new.dtype != old.dtype:
                raise CaptureError(
                    f"The model replaces its buffer {name} by {_describe(new)}", where=path, why=f"it was {_describe(old)}",
                    hint="a buffer keeps shape and dtype over steps",
                )  # fmt: skip
            else:
                with torch.no_grad():
                    old.copy_(new.detach())
            table[key] = old

    def _check_arguments(self, tree: Any, where: Any) -> None:
        refuse.check_arguments(tree, where)
        if self.left:
            refuse.check_left_behind(tree, where, self.left)

    def leaves_behind(self) -> bool:
        """Whether the forward stored values of this step in the model's attributes. They may not be read by the next one."""
        assert self.before is not None and self.constants is not None
        self.left = refuse.left_behind(self.before, self.constants)
        return bool(self.left)

    def rehearse(self, step: Step) -> frozenset[str]:
        """Run eagerly on fakes. Finds what can't be captured early, with the user's line, and which parameters autograd reaches."""
        self.constants = refuse.Constants()
        for module in self.model.modules():
            for buffer in vars(module)["_buffers"].values():
                if buffer is not None:
                    self.constants.add(buffer)
        with self.mode, refuse.CountRandom() as counted:
            # Leaves of its own: a batch that the model keeps a reference to isn't read again by reading the next one.
            results = step(*(_torch.fake_like(self.mode, t) for t in self.tensors))
        self.drawn = counted.count
        if not self.grads:
            return frozenset()
        if not results[0].requires_grad:
            trainable = any(t.trainable for t in self.state.tied.values())
            raise CaptureError(
                "The loss doesn't depend on any trainable parameter", where=type(self.model).__name__,
                why="" if trainable else "no parameter has requires_grad",
                hint="unfreeze a parameter, or use step.evaluate and step.forward for a model that isn't trained",
            )  # fmt: skip
        return frozenset(self.parameters[id(t)] for t in _torch.accumulation_leaves(results[0]) if id(t) in self.parameters)

    def trace(self, step: Step) -> Any:
        return _torch.trace_joint(step, self.leaves, self.mode)


def _describe(value: Any) -> str:
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def find_loss(model: nn.Module, output: Any, batch: Any, loss: Loss | None, needed: bool = True) -> Tensor | None:
    """The scalar loss of an output; None where there is none and none is needed."""
    name = type(model).__name__
    value: Any
    if loss is not None:
        value, source = loss(output, batch), "loss(output, batch)"
    elif isinstance(output, Tensor):
        value, source = output, f"the output of {name}"
        if not needed and (output.dim() or not output.is_floating_point()):
            return None
    else:
        named = isinstance(output, Mapping) and "loss" in output
        has = named or hasattr(output, "loss")
        value = output["loss"] if isinstance(output, Mapping) and named else getattr(output, "loss", None)
        source = f"the loss in the output of {name}"
        if value is None:
            if not needed:
                return None
            raise InputError(
                f"{name} returns no loss", where=name,
                why="the loss in its output is None: were labels passed?" if has else f"it returns {_kind(output)}, without a loss in it",
                hint="pass labels in the batch" if has else "pass loss=lambda output, batch: ...",
            )  # fmt: skip
    if not isinstance(value, Tensor):
        raise InputError(f"{source} is {_kind(value)}, not a tensor", where=name, hint="return a scalar tensor")
    if not value.is_floating_point():
        raise InputError(f"{source} has dtype {value.dtype}", where=name, why="only a floating-point loss has gradients")
    if value.dim() and tuple(value.shape) != (1,):
        raise InputError(
            f"{source} has shape {list(value.shape)}, not a scalar", where=name, why="a step minimises one number",
            hint="reduce it: .mean(); or pass loss=lambda output, batch: ...",
        )  # fmt: skip
    return value.reshape(()) if value.dim() else value


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
