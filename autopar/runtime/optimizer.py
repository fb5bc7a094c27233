"""The user's optimizer over flat parts of buckets, and the global gradient norm.

The user's factory sees parameters under their original names and shapes, without storage. What the optimizer then really updates are
this rank's flat parts of buckets: 1-D, of one dtype, each made of pieces of several parameters and padding. That gives the same numbers
only if the update of an element depends on that element's own value, gradient and state, and on nothing else. No list says which classes
are so: ``prepare`` tries it out.

State lives in ``optimizer.state[part]`` as torch made it: a tensor with as many elements as the part is elementwise (a member of the bucket
has its slice of it), anything else (a step count) holds for every member alike.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError, UnsupportedError, VerifyError
from autopar.layout.bucket import Bucket
from autopar.layout.mesh import Mesh
from autopar.runtime.comm import Comm

#: the group of a parameter that the factory left out.
LEFT_OUT = -1

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

#: Shapes of the probe. Few and many dims, because optimizers tell matrices, kernels and vectors apart; one beyond 128 x 128, from where on
#: several factor a matrix or quantize blocks; and all of them together are cut where no shape ends.
_SHAPES = ((5, 4), (2, 3, 2, 2), (7,), (), (130, 130))
_STEPS = 8  # some classes change their ways after a few steps (RAdam after five)
_RTOL = 1e-12


@dataclass(frozen=True, eq=False)
class Prepared:
    """The user's optimizer, found fit for flat parts.

    Attributes:
        optimizer: what schedulers wrap: the same object, with the same group dicts, for ever. Its parameters have no storage until
            ``attach``.
        group_of: index in ``optimizer.param_groups`` of every parameter by name; ``LEFT_OUT`` for one that the factory didn't give to
            the optimizer: it keeps its value, though it has a gradient.
        makes_state: the class makes state when it is built, not in its first step (Adagrad).
        in_turns: calls of ``step`` for some parameters at a time (the others have no gradient) give the same as one call for all.
    """

    optimizer: torch.optim.Optimizer
    group_of: dict[str, int]
    makes_state: bool
    in_turns: bool = False


def prepare(
    factory: Factory,
    named: Sequence[tuple[str, Sequence[int], torch.dtype]],
    *,
    frozen: Collection[str] = (),
    device: torch.device | str = "cpu",
) -> Prepared:
    """Calls the factory, once, and checks that its optimizer can work on flat parts.

    Args:
        named: name, shape and dtype of every parameter, a tied one once.
        frozen: names of those with ``requires_grad`` False.
        device: where the parts will live; the probe runs there, because some options (``capturable``) are only for some devices.

    Raises:
        InputError: the factory fails, returns no optimizer, or one over other parameters than it was given, or over one twice.
        UnsupportedError: the optimizer is not elementwise, needs a closure, draws random numbers, or can't run on flat parts.
    """
    given = []
    for name, shape, dtype in named:
        given.append((name, nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"), name not in frozen)))
    optimizer = _call(factory, given)
    names = {id(p): name for name, p in given}
    group_of = {name: LEFT_OUT for name, _ in given}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            known = names.get(id(p))
            if known is None:
                raise InputError(
                    f"the optimizer has a parameter of shape {list(p.shape)} that its factory was not given",
                    where=f"optimizer=, parameter group {index}",
                    hint="build it from the (name, parameter) pairs that the factory gets, not from the model's own parameters",
                )
            if group_of[known] != LEFT_OUT:
                raise InputError(f"the optimizer has parameter {known!r} twice", where=f"optimizer=, parameter group {index}")
            group_of[known] = index
    prepared = Prepared(optimizer, group_of, bool(optimizer.state))
    tried: set[str] = set()
    in_turns = True
    for index, group in enumerate(optimizer.param_groups):
        dtypes = sorted({p.dtype for p in group["params"]}, key=str)
        # groups mostly differ in the learning rate, which the probe sets itself
        what = repr(sorted((k, repr(v)) for k, v in _options(group).items() if k not in ("lr", "initial_lr"))) + repr(dtypes)
        if group["params"] and what not in tried:
            tried.add(what)
            in_turns &= _probe(prepared, index, dtypes, torch.device(device))
    return replace(prepared, in_turns=in_turns)


def attach(prepared: Prepared, parts: Mapping[int, Sequence[nn.Parameter]]) -> None:
    """Puts this rank's flat parts in the place of the optimizer's parameters. State of earlier parts is dropped.

    The optimizer, its group dicts and everything in them but ``params`` (hyperparameters, ``initial_lr``) stay as they are. Parts without
    elements are kept: torch's classes take them (a test says so for each), and they have state like everything else.

    Args:
        parts: 1-D parameters by group index. A group without parts is empty on this rank; parts under ``LEFT_OUT`` are left alone.

    Raises:
        InputError: a parameter group was added after the optimizer was built.
        VerifyError: there is no such group, or a part is not flat.
    """
    groups = prepared.optimizer.param_groups
    placed = max(prepared.group_of.values(), default=LEFT_OUT) + 1
    for group in groups[placed:]:
        if group["params"]:
            raise InputError("a parameter group was added to the optimizer after it was built", hint="make all groups in the factory")
    for index, new in parts.items():
        if not LEFT_OUT <= index < len(groups):
            raise VerifyError(f"parts for parameter group {index}, but the optimizer has {len(groups)}")
        for part in new:
            if part.dim() != 1 or not part.is_leaf:
                raise VerifyError(f"a part of parameter group {index} is not a flat leaf but has shape {list(part.shape)}")
    _put(prepared.optimizer, [parts.get(index, ()) for index in range(len(groups))], prepared.makes_state)


def norm_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the one collective of ``clip``, for ``Comm.prepare``."""
    return tuple(name for name, size in mesh.axes if size > 1)


def clip(
    grads: Sequence[Tensor | None], buckets: Sequence[Bucket], max_norm: float | None, comm: Comm, zero: int, *, site: str = "clip"
) -> Tensor:
    """The global 2-norm of all gradients; scales them in place as ``torch.nn.utils.clip_grad_norm_`` does, if ``max_norm`` is given.

    A bucket is replicated over ``bucket.axes`` and over all other axes its members are cut, so that ranks there hold other elements.
    With ``zero`` from 1 on, a rank holds the one part that it owns: the sum over all ranks of the mesh counts every element once. With
    ``zero`` 0 the ranks of ``bucket.axes`` hold the same whole bucket, of which each counts the part that it would own. Of ranks that hold
    copies of a part the first counts it. Padding has gradient 0.

    One all-reduce of one float64, whatever the number of buckets; every rank of the mesh calls it, also one without gradients.

    Args:
        grads: for each bucket this rank's flat gradient (its own part, or with ``zero`` 0 the whole bucket), or None.
        max_norm: None: only the norm.

    Returns:
        The norm before clipping, float64, 0-dim. A norm that is inf or nan makes gradients 0 or nan, as in torch.

    Raises:
        VerifyError: a gradient doesn't have the size of its part.
    """
    if len(grads) != len(buckets):
        raise VerifyError(f"{len(grads)} gradients for {len(buckets)} buckets")
    total = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for grad, bucket in zip(grads, buckets):
        if grad is None:
            continue
        part = bucket.part(comm.mesh)
        if tuple(grad.shape) != (bucket.numel if zero == 0 else part,):
            raise VerifyError(f"the gradient of {bucket.name} has shape {list(grad.shape)} at ZeRO level {zero}", where=site)
        if comm.group(bucket.copies).index:
            continue
        own = grad.detach()
        if zero == 0:
            own = own.narrow(0, comm.group(bucket.axes).index * part, part)
        # the norm of 16-bit numbers may not fit, and is rounded coarsely, in their own format
        wide = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else None
        total += torch.linalg.vector_norm(own, dtype=wide).double().square()
    norm = comm.all_reduce(total, norm_axes(comm.mesh), site=site).wait().sqrt().reshape(())
    if max_norm is not None:
        # always multiplied: asking whether it is needed would wait for the device
        scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        for grad in grads:
            if grad is not None:
                grad.detach().mul_(scale)
    return norm


def _call(factory: Factory, given: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
        raise InputError(
            f"optimizer= takes a factory, but is of type {type(factory).__name__}",
            hint="functools.partial(torch.optim.AdamW, lr=3e-4), or a function of a list of (name, parameter) pairs",
        )
    try:
        optimizer = factory(list(given))
    except Exception as error:
        raise InputError(
            f"the factory given as optimizer= failed: {_text(error)}",
            hint="it gets a list of (name, parameter) pairs; the parameters have the original shapes and no values",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"the factory given as optimizer= returned no torch optimizer but a value of type {type(optimizer).__name__}")
    return optimizer


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, as copies that a probe may change."""
    return {k: _copied(v) for k, v in group.items() if k not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _again(kind: type[torch.optim.Optimizer], like: Mapping[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Another optimizer of the same class over these groups.

    Groups name all their options, which is enough for most classes; arguments that are no options come from attributes of that name.
    """
    args = {}
    for name, parameter in list(inspect.signature(kind).parameters.items())[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            if name in groups[0]:
                args[name] = _copied(groups[0][name])
            elif name in like:
                args[name] = like[name]
    return kind(groups, **args)


def _put(optimizer: torch.optim.Optimizer, parts: Sequence[Sequence[nn.Parameter]], makes_state: bool) -> None:
    """``attach`` without checks; the probe takes this way too, and so finds optimizers that also keep parameters elsewhere."""
    optimizer.state.clear()
    for index, (group, new) in enumerate(zip(optimizer.param_groups, parts)):
        group["params"][:] = new
        if "param_names" in group:
            group["param_names"] = [f"group{index}.part{n}" for n in range(len(new))]
    if makes_state and optimizer.param_groups:
        groups = [{**_options(group), "params": list(group["params"])} for group in optimizer.param_groups]
        optimizer.state.update(_again(type(optimizer), vars(optimizer), groups).state)


def _probe(prepared: Prepared, index: int, dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    """Steps the optimizer on small tensors, whole and as flat parts, with the options of one group.

    The flat parts are shared out between two optimizers as between two ranks, so that sums over all of an optimizer's parameters show up
    too.

    Returns:
        Whether the flat parts can also be stepped in turns.

    Raises:
        UnsupportedError: the two differ, or one doesn't run.
    """
    optimizer = prepared.optimizer
    kind = type(optimizer)
    options = _options(optimizer.param_groups[index])
    # from a learning rate of (nearly) 0, as at the start of a warm-up, nothing could be seen
    if isinstance(options.get("lr"), Tensor):
        options["lr"].fill_(0.1)
    elif isinstance(options.get("lr"), float | int):
        options["lr"] = 0.1

    def refusal(why: str, hint: str = "") -> UnsupportedError:
        return UnsupportedError(
            f"optimizer {kind.__name__} can't update flat parts of parameters",
            where=f"optimizer=, parameter group {index}",
            why=why,
            hint="use one whose update of an element depends on that element alone, such as SGD, Adam or AdamW" + hint,
        )

    def build(values: Sequence[Tensor]) -> torch.optim.Optimizer:
        return _again(kind, vars(optimizer), [{**_options(options), "params": [nn.Parameter(v.clone()) for v in values]}])

    def stepped(built: torch.optim.Optimizer, grads: Callable[[int], Sequence[Tensor]], steps: int, in_turns: bool = False) -> list[Tensor]:
        params = built.param_groups[0]["params"]
        for step in range(steps):
            for p, g in zip(params, grads(step)):
                p.grad = g.clone()
                if in_turns:
                    built.step()
                    p.grad = None
            if not in_turns:
                built.step()
        return [p.detach() for p in params]

    def flat(values: Tensor, grads: Sequence[Tensor], in_turns: bool = False) -> Tensor:
        sizes = [values.numel() // 3, 1, values.numel() - values.numel() // 3 - 1]
        done: list[Tensor] = []
        for own in (slice(0, 2), slice(2, 3)):  # a rank's parts
            built = build([torch.empty(3, 2, dtype=values.dtype, device="meta")])
            _put(built, [[nn.Parameter(v.clone()) for v in values.split(sizes)[own]]], prepared.makes_state)
            done += stepped(built, lambda step: grads[step].split(sizes)[own], len(grads), in_turns)  # noqa: B023 - called within the turn
        return torch.cat(done)

    needed = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed):
        raise refusal("its step needs a closure that evaluates the model again")

    numels = [torch.Size(shape).numel() for shape in _SHAPES]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(numels), dtype=torch.float64, generator=generator).to(device)
    # growing and shrinking, so that limits on a tensor's norm or its change are met
    raw = [torch.randn(sum(numels), dtype=torch.float64, generator=generator) for _ in range(_STEPS)]
    grads = [(g * 4.0 ** (step % 3 - 1)).to(device) for step, g in enumerate(raw)]

    def shaped(x: Tensor) -> list[Tensor]:
        return [piece.view(shape) for piece, shape in zip(x.split(numels), _SHAPES)]

    doing = "on flat parts"
    with _fixed_random(device) as drew:
        try:
            flat_values = flat(values, grads)
            for dtype in dtypes:
                doing = f"on flat {str(dtype).removeprefix('torch.')} parts"
                flat(values.to(dtype), [grads[0].to(dtype)])
            doing = "on whole parameters"
            whole = torch.cat([p.reshape(-1) for p in stepped(build(shaped(values)), lambda step: shaped(grads[step]), _STEPS)])
        except Exception as error:
            raise refusal(f"{doing} it fails: {_text(error)}", f", with options that torch takes on {device.type}") from error
        if drew():
            raise refusal("it draws random numbers, which would differ from the ones for whole parameters")
    if not (whole.isfinite().all() and flat_values.isfinite().all()):
        raise refusal("it gives numbers that are not finite for ordinary gradients")
    if torch.equal(flat_values, values) and not torch.equal(whole, values):
        raise refusal("it keeps its parameters elsewhere than in param_groups, where they can't be replaced")
    if not torch.allclose(flat_values, whole, rtol=_RTOL, atol=_RTOL):
        worst = (flat_values - whole).abs().max().item()
        raise refusal(
            "its update of an element depends on other elements or on the parameter's shape: "
            f"after {_STEPS} steps, whole parameters and flat parts of them differ by {worst:.1e}"
        )
    try:
        return torch.equal(flat(values, grads, in_turns=True), flat_values)
    except Exception:  # noqa: BLE001 - whatever it is: such an optimizer is stepped for all parts at once
        return False


@contextmanager
def _fixed_random(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Within it torch's generators may be used without a trace; the function given tells whether they were."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):

        def states() -> list[Tensor]:
            return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

        before = states()
        yield lambda: any(not torch.equal(a, b) for a, b in zip(before, states()))


def _text(error: Exception) -> str:
    """An error of other people's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
