"""The surface: ``parallelize`` and ``verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import copied
from autopar.capture.refuse import check_model
from autopar.capture.tree import take_batch
from autopar.compare import Report, Run, compare
from autopar.cost.device import GENERIC
from autopar.errors import InputError, UnsupportedError
from autopar.layout.mesh import Mesh
from autopar.plan.cache import as_cache
from autopar.plan.plan import Plan, as_plan
from autopar.programs import Options
from autopar.reference import Trace, plain_steps
from autopar.rules import DEFAULT, Rule
from autopar.runtime.comm import Comm, DistComm
from autopar.runtime.launch import init as join
from autopar.runtime.sim import SimComm, run_simulated
from autopar.step import Step

Optimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], Tensor]


def parallelize(
    model: nn.Module,
    mesh: Any,
    *,
    example: Any = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    plan: Plan | str | Path = "auto",
    precision: str | None = None,
    batch_dim: Any = 0,
    init: str | Callable[[nn.Module], None] = "check",
    clip_grad_norm: float | None = None,
    seed: int = 0,
    backend: str = "eager",
    rules: Iterable[Rule] = (),
    progress: bool = True,
    timeout: float | None = None,
    cache: str | Path | MutableMapping[str, str] | None = None,
) -> Step:
    """Turns the training step of a plain model into the program of this rank on a mesh.

    Args:
        model: written for one device; it is not modified.
        mesh: ``autopar.Mesh`` or a torch ``DeviceMesh`` whose dims are named as its axes.
        example: this rank's rows of a batch; compiles now instead of at the first batch.
        loss: ``loss(output, batch)`` → scalar; None: the output is the scalar, has ``.loss`` or ``["loss"]``.
        optimizer: a factory that gets ``[(name, parameter)]`` with original names and shapes; None: gradients only.
        plan: ``"auto"``, an ``autopar.Plan`` (set fields are pins), or the path of a saved one.
        precision: None keeps the model's dtypes; ``"fp32"`` or ``"fp64"`` computes and stores in that type.
        batch_dim: which dim of every leaf counts samples: an int for all, or a tree like the batch of ints and None.
        init: ``"check"``: weights must agree over ranks; ``"broadcast"``: rank 0's; or a function that fills a module that is on meta.
        clip_grad_norm: clips the global gradient norm before the update.
        seed: of random ops (dropout and the like).
        backend: ``"eager"`` or ``"inductor"`` (compiles the segments; needs a C++ compiler on CPU).
        rules: rows for ops that autopar doesn't know (``autopar.rule``).
        progress: compiling that takes more than two seconds says on rank 0's stderr what it does; False is quiet.
        timeout: seconds that a rank waits for another one; default the process group's, 600 where there was none yet. A rank that failed
            or ended is noticed within seconds; this limits one that hangs.
        cache: a folder, or a dict that several steps share, which keeps the layouts that were chosen. The model is captured all the same;
            an entry is used for an equal program, mesh, plan and versions, and ``step.reports`` says what became of it.

    Raises:
        AutoparError: the kinds in ``autopar.errors``; the same text on every rank.
    """
    mesh = as_mesh(mesh)
    options = make_options(loss, optimizer, plan, precision, batch_dim, init, clip_grad_norm, seed, backend, rules)
    options = replace(options, progress=progress, cache=as_cache(cache))
    check_mesh(mesh)
    if timeout is not None and (isinstance(timeout, (bool, str)) or not timeout > 0):
        raise InputError(f"timeout={timeout!r} is not a time", hint="a positive number of seconds, or None")
    joined = join(mesh if mesh.size > 1 else None, timeout=timeout or 600.0)
    step = Step(model, mesh, DistComm(mesh, device=mesh.device or joined.device, timeout=timeout), options)
    if example is not None:
        step.compile(example)
    return step


def make_options(
    loss: Loss | None, optimizer: Optimizer | None, plan: Any, precision: str | None, batch_dim: Any,
    init: str | Callable[[nn.Module], None], clip_grad_norm: float | None, seed: int, backend: str, rules: Iterable[Rule],
) -> Options:  # fmt: skip
    """Checks the arguments of ``parallelize`` that need no model. Raises InputError or UnsupportedError."""
    if backend not in ("eager", "inductor"):
        raise InputError(f"backend={backend!r} is not known", hint='"eager" or "inductor"')
    if precision in ("bf16", "fp16"):
        raise UnsupportedError(f"precision={precision!r} is not supported yet", hint="precision=None computes in the model's own types")
    if precision not in (None, "fp32", "fp64"):
        raise InputError(f"precision={precision!r} is not known", hint='"fp32", "fp64" or None')
    if isinstance(init, str) and init not in ("check", "broadcast"):
        raise InputError(f"init={init!r} is not known", hint='"check", "broadcast" or a function of a module')
    if clip_grad_norm is not None and (isinstance(clip_grad_norm, (bool, str)) or not clip_grad_norm > 0):
        raise InputError(f"clip_grad_norm={clip_grad_norm!r} is not a norm", hint="a positive number, or None")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed={seed!r} is not an integer")
    if loss is not None and not callable(loss):
        raise InputError(f"loss={loss!r} is not a function", hint="loss(output, batch) -> scalar")
    given = list(rules) if isinstance(rules, Iterable) else [rules]
    if not all(isinstance(r, Rule) for r in given):
        raise InputError(f"rules={rules!r} is not a list of rules", hint='[autopar.rule("mylib::op", "* -> *")]')
    if not isinstance(plan, (str, Path, Plan, type(None))):  # a caller may pass anything
        raise InputError(f"plan={plan!r} is not a plan", hint='"auto", autopar.Plan(...), or the path of a saved one')
    if optimizer is not None and not callable(optimizer):
        raise InputError("optimizer= is a factory, not an optimizer", hint="partial(torch.optim.AdamW, lr=3e-4)")
    table = DEFAULT.with_rules(given)
    return Options(loss, optimizer, as_plan(plan), precision, batch_dim, init, clip_grad_norm, seed, backend, table, GENERIC)


def as_mesh(mesh: Any) -> Mesh:
    """An ``autopar.Mesh``; a torch DeviceMesh is read by the names and sizes of its dims."""
    if isinstance(mesh, Mesh):
        return mesh
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    if shape is None:
        raise InputError(f"{mesh!r} is not a mesh", hint="autopar.Mesh(dp=2, tp=2), or a torch DeviceMesh with mesh_dim_names")
    if not names:
        raise InputError("the DeviceMesh has no mesh_dim_names", hint='init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))')
    return Mesh(list(zip(names, shape, strict=True)), device=getattr(mesh, "device_type", None))


def check_mesh(mesh: Mesh) -> None:
    """Refuses axes whose parallelism isn't built. Raises UnsupportedError."""
    for axis, size in mesh.axes:
        if size > 1 and axis not in ("pp", "dp", "cp", "tp"):
            raise UnsupportedError(f"mesh axis {axis}={size} is not supported yet", hint="use pp, dp, cp and tp")


def verify(
    model: nn.Module,
    mesh: Any,
    batch: Any,
    *,
    plan: Plan | str | Path = "auto",
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    precision: str | None = "fp64",
    batch_dim: Any = 0,
    clip_grad_norm: float | None = None,
    seed: int = 0,
    steps: int = 3,
    rules: Iterable[Rule] = (),
    make: Callable[..., Comm] = SimComm,
) -> Report:
    """Runs all ranks of a mesh in this process and the plain model beside them, and compares everything they give.

    Losses, gradients, parameters and buffers after ``steps`` steps on the (global) batch; replicas to the bit. In float64 unless
    ``precision`` says otherwise. Where something differs the report names the first value of the program that does.

    Args:
        optimizer: default ``SGD(lr=0.1)``: the scale of gradients shows in it, which Adam hides.
    """
    mesh = as_mesh(mesh)
    check_mesh(mesh)
    check_model(model, grads=True)  # a copy of the model has lost the hooks of its parameters
    chosen: Optimizer = optimizer if optimizer is not None else lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    options = make_options(loss, chosen, plan, precision, batch_dim, "check", clip_grad_norm, seed, "eager", rules)
    wanted = {"fp64": torch.float64, "fp32": torch.float32}.get(precision or "")

    def changed(t: Tensor) -> Tensor:
        return t.to(wanted) if wanted is not None and t.is_floating_point() else t

    tree, tensors = take_batch(batch)
    batch = tree.fill([changed(t) for t in tensors])
    plain = copied(model)
    if wanted is not None:
        _cast(plain, wanted)
    share: dict[Any, Any] = {}

    def rank(comm: Comm) -> Run:
        step = Step(copied(plain), mesh, comm, options, share)
        rows, run = step.shard(batch), Run()
        for _ in range(steps):
            run.losses.append(step(rows).clone())
            run.gradients = step.gradients()
        run.state = step._whole()  # noqa: SLF001 - one of the rooms that sees it all
        run.pieces = step.state_dict()
        run.compiled = step._need_compiled()  # noqa: SLF001
        return run

    runs = run_simulated(mesh, rank, timeout=600.0, make=make)

    def train(exact: torch.dtype | None) -> Trace:
        return plain_steps(
            copied(plain), [batch] * steps, loss=loss, optimizer=chosen, clip_grad_norm=clip_grad_norm, seed=seed, exact=exact
        )

    assert runs[0].compiled is not None
    casts = runs[0].compiled.lifted is not None
    return compare(runs, train(None), plain, batch, mesh, seed, make, train(wanted) if casts else None)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers in another precision, ties kept. ``Module.to`` would make complex tables real."""
    for t in (*model.parameters(), *model.buffers()):
        if t.is_floating_point() or t.is_complex():
            t.data = t.data.to(dtype.to_complex() if t.is_complex() else dtype)


def search(*args: Any, **kwargs: Any) -> Any:
    """Not supported yet."""
    raise UnsupportedError("autopar.search: the search over meshes is not supported yet", hint="parallelize(model, Mesh(dp=..., tp=...))")
