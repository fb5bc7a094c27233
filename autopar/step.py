"""Step: a training step compiled for a mesh, as a user holds it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from autopar import _torch, agree
from autopar.capture import copied, filled, rebuild_output, without_values
from autopar.capture.follow import Followed
from autopar.capture.tree import BatchTree, take_batch
from autopar.codegen.emit import emit
from autopar.codegen.stages import emit_stage
from autopar.compiler import Compiled
from autopar.deal import deal
from autopar.errors import AutoparError, CommError, InputError, UnsupportedError
from autopar.inspect import tables
from autopar.inspect.timeline import Timeline, make_timeline
from autopar.ir.text import show_program
from autopar.layout.mesh import Mesh
from autopar.passes.bounds import check_bounds
from autopar.plan.plan import Plan
from autopar.programs import WEIGHT, Options, compile_step, cut_rows, filled_plan, find_dims, row_dims
from autopar.progress import Progress
from autopar.runtime import optimizer as opt
from autopar.runtime.comm import Comm
from autopar.runtime.executor import Executable, State, cut, flatten, gather, gather_fixed, make_state, waited
from autopar.runtime.pipeline import Pipeline, save_stages
from autopar.runtime.random import step_key
from autopar.runtime.update import update
from autopar.sources import code_digest

#: what a program gives: loss, gradients by bucket, new buffers by path, outputs
Started = tuple[Tensor | None, tuple[Any, ...], dict[str, Tensor], tuple[Tensor, ...]]
F = TypeVar("F", bound=Callable[..., Any])


def guarded(method: F) -> F:
    """A method of a step in which ranks may wait for each other: an error of one is told to all."""

    @functools.wraps(method)
    def run(self: Step, *args: Any, **kwargs: Any) -> Any:
        with self._comm.guard():
            return method(self, *args, **kwargs)

    return cast(F, run)


class _Call(NamedTuple):
    """What a program is compiled for. ``types``: dtype and shape of the batch's tensors; ``state``, ``flags``: digests of the model's.

    ``whole``: the tensors are the rows of all ranks.
    """

    kind: str
    structure: str = ""
    paths: tuple[str, ...] = ()
    constants: str = ""
    types: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    state: int = 0
    flags: int = 0
    whole: bool = False


class _NotReady(Exception):
    """Ranks can't all run the program that this one has begun."""

    def __init__(self, answer: agree.Answer) -> None:
        super().__init__(answer.value)
        self.answer = answer


def _all_ready(check: Callable[[], agree.Answer]) -> None:
    if (answer := check()) is not agree.Answer.READY:
        raise _NotReady(answer)


@dataclass
class _Loaded:
    """A compilation, loaded for running, and which dim of each of its batch's tensors counts samples."""

    compiled: Compiled
    run: Executable | Pipeline
    dims: list[int | None]
    whole: bool  # every data rank computes all rows
    peak: int | None = None  # predicted bytes of what a step makes, once asked for


class Step:
    """One training step as a program for this rank. Made by ``autopar.parallelize``.

    Calling it with this rank's rows runs forward, backward and, with an optimizer, the update; it returns the global loss.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, comm: Comm, options: Options, share: dict[Any, Compiled] | None = None) -> None:
        self._user: Callable[[], nn.Module | None] = lambda: model
        self._skeleton: nn.Module | None = None
        self.mesh, self._comm, self._options = mesh, comm, options
        self._share = share  # simulated ranks of one process compile once
        self._loaded: dict[Any, _Loaded] = {}
        self._train: Compiled | None = None
        self._state: State | None = None
        self._grads: tuple[Tensor, ...] | None = None  # of the last step, by bucket: a rank's stages may have none
        self._plan = options.plan
        self._trained: list[str] | None = None  # trainable parameters when the step was compiled
        self._unread: dict[str, Tensor] = {}  # buffers that no step reads
        self._waiting: Mapping[str, Tensor] | None = None
        self._prepared: opt.Prepared | None = None
        self._versions: list[int] = []  # of the parts, when they were last gathered
        self._brought = (0, 0, 0)  # of a batch that came unevenly: this rank's first row, how many, and all
        self._closed = False
        self._followed = Followed(model)
        self._at_exit = partial(_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        self._metrics: dict[str, Any] = {}
        self._ran: _Loaded | None = None  # the program of the last step
        self.reports: list[str] = []
        if options.optimizer is not None:
            named = [(n, tuple(p.shape), self._dtype(p)) for n, p in model.named_parameters()]
            frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
            self._prepared = opt.prepare(options.optimizer, named, frozen=frozen, device=comm.device)

    @guarded
    def compile(self, batch: Any) -> None:
        """Compiles the training step for this rank's rows now instead of at the first call."""
        self._check_open()
        call, tree, tensors, check = self._ask("train", batch)
        self._settled(call, tree, tensors, check())

    # -- training

    @guarded
    def __call__(self, batch: Any) -> Tensor:
        """One step on this rank's rows.

        Returns the global loss: 0-dim, detached, equal on every rank. Without an optimizer ``.grad`` of ``parameters()`` is overwritten.
        """
        self._check_open()
        begun = time.perf_counter()
        self._comm.take_records()
        loaded, tensors, (loss, under_way, fresh, _) = self._run("train", batch)
        assert loss is not None and self._state is not None
        state, norm, limit = self._state, None, self._options.clip_grad_norm
        if limit is None and self._prepared is not None and self._prepared.in_turns and not _torch.has_step_hooks(self._prepared.optimizer):
            self._grads = update(state, under_way, self._prepared.optimizer, loaded.run.gathers, self._comm)
        else:
            self._grads = grads = waited(under_way)
            state.changed()
            if limit is not None:
                self._grads = tuple(g.clone() for g in grads)  # gradients() gives them before clipping
                norm = opt.clip(grads, state.buckets, limit, self._comm, state.zero)
            for part, grad in zip(state.parts, grads, strict=True):
                part.grad = grad
            if self._prepared is not None:
                self._prepared.optimizer.step()
                for part in state.parts:
                    part.grad = None
                for index in loaded.run.gathers:
                    state.begin_gather(index, self._comm)
        self._versions = [_torch.version(p) for p in state.parts]
        state.buffers.update(fresh)
        state.step += 1
        self._measure(loaded, tensors, loss, norm, time.perf_counter() - begun)
        return loss.detach()

    @guarded
    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float]:
        """The mean loss over batches in eval mode, without gradients, and what it was divided by.

        Each batch's loss counts by its own divisor (its number of valid labels, where the loss is a mean over them; its samples otherwise),
        so that a short last batch counts what it holds.
        """
        self._check_open()
        if isinstance(batches, (Tensor, Mapping)):
            raise InputError("evaluate takes several batches, not one", hint="step.evaluate([batch])")
        total = weight = 0.0
        for batch in batches:
            loaded, tensors, (loss, _, _, outputs) = self._run("eval", batch)
            if loss is None:
                raise InputError(f"{type(self._model).__name__} returns no loss to evaluate", hint="pass labels in the batch, or loss=...")
            at = loaded.compiled.module.outputs.index(WEIGHT) if WEIGHT in loaded.compiled.module.outputs else None
            share = float(outputs[at]) if at is not None else float(self._rows(tensors, loaded))
            if share:
                total += float(loss) * share
                weight += share
        return (total / weight if weight else math.nan), weight

    @guarded
    def forward(self, batch: Any) -> Any:
        """The model's outputs for this rank's rows, in eval mode, without gradients. Outputs without a batch dim are whole."""
        self._check_open()
        loaded, _, (_, _, _, outputs) = self._run("forward", batch)
        if loaded.whole:
            start, count, rows = self._brought
            dims = row_dims(loaded.compiled, self._options.rules, loaded.dims)
            outputs = tuple(
                out if d is None else out.narrow(d, start * (out.shape[d] // rows), count * (out.shape[d] // rows))
                for out, d in zip(outputs, dims, strict=True)
            )
        return rebuild_output(loaded.compiled.program.output_tree, outputs)

    # -- data

    @guarded
    def any(self, flag: bool) -> bool:
        """Whether any rank says so: to stop, for one. Collective."""
        return True in self._comm.exchange(bool(flag), site="any")

    def shard(self, batch: Any) -> Any:
        """This rank's rows of a batch that every rank holds: microbatch outer, data coordinate inner.

        The first batch has to divide. Of a later one that doesn't (the last of a data set, say) the first ranks get a row more than others.
        """
        index = self._comm.coords.get("dp", 0)
        return cut_rows(batch, self.mesh, index, self._plan, self._options.batch_dim, strict=self._train is None)

    # -- state

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer over this rank's parts."""
        if self._prepared is None:
            raise InputError("this step has no optimizer", hint="parallelize(..., optimizer=partial(torch.optim.AdamW, lr=3e-4))")
        return self._prepared.optimizer

    @guarded
    def parameters(self) -> list[nn.Parameter]:
        """This rank's flat parts, one a bucket: for an optimizer of one's own. Compiled steps only.

        Waits for gathers under way, which read them: ask again after a step. They are written to under ``torch.no_grad()``. With
        ``optimizer=`` a write through ``.data`` goes unnoticed: torch doesn't count it.
        """
        state = self._need()
        for handle in state.gathers:
            if handle is not None:
                handle.wait()
        return list(state.parts)

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the last step; empty before the first.

        ``peak_bytes`` is found when it is first asked for: on CUDA what torch's allocator had at most, elsewhere what lives between steps
        and the predicted peak of what a step makes beside it.
        """
        if self._ran is not None and not self._closed and "peak_bytes" not in self._metrics:
            self._metrics["peak_bytes"] = self._peak_bytes(self._ran)
        return self._metrics

    def _peak_bytes(self, ran: _Loaded) -> int:
        if self._comm.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._comm.device)
        if ran.peak is None:
            ran.peak = max(tables.live_peaks(ran.compiled).values())
        return ran.peak + sum(t.untyped_storage().nbytes() for held in self.tensors().values() for t in held)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What lives on this rank between steps, by kind, a tensor for each memory. State of no dims (a count of steps) is left out."""
        state = self._need()
        kept = self._prepared.optimizer.state.values() if self._prepared is not None else ()
        return {
            "parameters": [*(state.whole or state.parts), *state.fixed.values()], "gradients": list(state.grads),
            "optimizer state": [t for held in kept for t in held.values() if isinstance(t, Tensor) and t.dim()],
            "buffers": list(state.buffers.values()),
        }  # fmt: skip

    @guarded
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the last step by original name, before clipping, on every rank's CPU. Collective."""
        state = self._need()
        if self._grads is None:
            raise InputError("there are no gradients yet", hint="call the step first")
        whole = gather(state, self._grads, self.mesh, self._comm)
        return {alias: whole[path] for path, aliases in self._names().items() if path in whole for alias in (path, *aliases)}

    @guarded
    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and buffers under the model's names, on every rank's CPU; tied names share storage. Collective."""
        whole = self._whole()
        named = (*dict(self._model.named_parameters(remove_duplicate=False)), *self._model.state_dict(keep_vars=True))
        return {name: whole[name] for name in dict.fromkeys(named) if name in whole}

    def _whole(self) -> dict[str, Tensor]:
        """Whole parameters and all buffers, those that ``state_dict`` leaves out too, under every name. Collective."""
        state = self._need()
        assert self._train is not None
        whole = gather(state, list(state.parts), self.mesh, self._comm)
        whole |= gather_fixed(state.fixed, {p: s for p, (_, s) in self._train.spec.params.items()}, self.mesh, self._comm)
        buffers = {path: t.detach().cpu().clone() for path, t in (*self._unread.items(), *state.buffers.items())}
        for theirs in self._comm.exchange(buffers, site="buffers") if self.mesh["pp"] > 1 else ():
            whole |= theirs  # other stages hold others
        whole |= buffers
        for path, aliases in {**self._names(), **self._buffer_names()}.items():
            if path in whole:
                whole |= {alias: whole[path] for alias in aliases}
        return whole

    @guarded
    def state_dict(self) -> dict[str, Tensor]:
        """This rank's pieces under the model's names: of a parameter split over ``tp`` its piece, gathered over the owners of its parts."""
        state = self._need()
        flats = self._comm.exchange([p.detach().clone() for p in state.parts], site="state_dict")
        out: dict[str, Tensor] = dict(state.fixed)
        for k, bucket in enumerate(state.buckets):
            group = self.mesh.group(self._comm.rank, bucket.axes) if state.zero else (self._comm.rank,)
            flat = torch.cat([flats[r][k] for r in group])
            for m in bucket.members:
                out[m.path] = flat[m.offset : m.offset + m.numel].view(m.shape)
        out |= state.buffers
        for path, aliases in {**self._names(), **self._buffer_names()}.items():
            if path in out:
                out |= {alias: out[path] for alias in aliases}
        return out

    @guarded
    def load_state_dict(self, full: Mapping[str, Tensor]) -> None:
        """Sets weights and buffers from whole tensors by original name, the same on every rank. Collective.

        Before the first batch they are kept until the step is compiled.
        """
        wanted = {n for n, _ in self._model.named_parameters()} | {n for n in self._model.state_dict()}
        missing, unknown = (
            sorted(wanted - set(full)),
            sorted(set(full) - wanted - set(dict(self._model.named_parameters(remove_duplicate=False)))),
        )
        if missing or unknown:
            raise InputError("the state doesn't fit the model", why=f"missing {missing[:5]}, unknown {unknown[:5]}")
        shapes = {n: t.shape for n, t in (*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers())}
        wrong = [n for n, t in full.items() if n in shapes and t.shape != shapes[n]]
        if wrong:
            raise InputError(
                f"{wrong[0]} has shape {list(full[wrong[0]].shape)}, the model's {list(shapes[wrong[0]])}", where="load_state_dict"
            )
        if self._state is None:
            self._waiting = dict(full)
            return
        assert self._train is not None
        agree.compare_values(self._comm, full, "load_state_dict", "load the same file on every rank")
        state, coords = self._state, self._comm.coords
        state.changed()
        for k, bucket in enumerate(state.buckets):
            state.fill(k, flatten(bucket, full.__getitem__, self.mesh, self._comm), self._comm)
        self._versions = [_torch.version(p) for p in state.parts]
        for path, (dtype, sharding) in self._train.spec.params.items():
            state.fixed[path] = cut(full[path].to(self._comm.device), sharding, self.mesh, coords).to(dtype)
        for path in state.buffers:
            if path in full:
                state.buffers[path] = full[path].to(device=self._comm.device, dtype=state.buffers[path].dtype, copy=True)
        self._unread |= {path: full[path].to(t, copy=True) for path, t in self._unread.items() if path in full}

    @guarded
    def module(self) -> nn.Module:
        """A copy of the model with the current weights, whole. Collective."""
        full = self._whole()
        on_meta = any(t.is_meta for t in (*self._model.parameters(), *self._model.buffers()))
        out = filled(self._model) if on_meta else copied(self._model)
        named = {**dict(out.named_parameters(remove_duplicate=False)), **dict(out.named_buffers(remove_duplicate=False))}
        with torch.no_grad():
            for name, value in full.items():
                if name in named:
                    named[name].copy_(value)
        return out

    def save(self, folder: str | Path) -> None:
        """Not supported yet."""
        raise UnsupportedError(
            "step.save: checkpoints are not supported yet", hint="torch.save(step.full_state_dict(), path) keeps the weights"
        )

    def load(self, folder: str | Path) -> None:
        """Not supported yet."""
        raise UnsupportedError(
            "step.load: checkpoints are not supported yet", hint="step.load_state_dict(torch.load(path)) sets the weights"
        )

    # -- looking at it

    @property
    def plan(self) -> Plan:
        """The plan with everything that was chosen."""
        return self._plan

    def explain(self) -> str:
        """The plan and why it is so, as tables."""
        states = None
        if self._prepared is not None and self._prepared.optimizer.state:
            kept = [v for state in self._prepared.optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
            states = sum(v.numel() for v in kept) / max(1, sum(p.numel() for p in self._need().parts))
        return tables.explain(self._need_compiled(), self._plan, states)

    def graph(self, stage: int | None = None, phase: str | None = None) -> str:
        """The rewritten graph of a stage of this rank (None: its first) as text; ``phase`` forward or backward shows one."""
        final, _ = self._need_compiled().stage(stage)
        if phase is not None:
            final = replace(final, nodes=tuple(n for n in final.nodes if n.phase == phase))
        return show_program(final)

    def source(self, stage: int | None = None) -> str:
        """The generated module of a stage of this rank; None: its first."""
        return self._need_compiled().stage(stage)[1].source

    def save_source(self, folder: str | Path) -> Path:
        """Writes the generated module and what it needs to run without the compiler (``autopar.runtime.executor.load``).

        On a mesh with stages a rank writes those that it runs, a module each, for ``autopar.runtime.pipeline.load``.
        """
        compiled, folder = self._need_compiled(), Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._plan.save(folder / "plan.json")
        run = self.executable()
        if isinstance(run, Pipeline):
            return save_stages(run, folder, self._comm.coords["pp"])
        (folder / "step.py").write_text(compiled.module.source)
        (folder / "step.json").write_text(compiled.spec.to_json())
        if compiled.spec.consts:
            torch.save(dict(compiled.final.consts), folder / "step.consts.pt")
        return folder / "step.py"

    def executable(self) -> Executable | Pipeline:
        """The loaded module of the training step: for timing it."""
        compiled = self._need_compiled()
        return next(held.run for held in self._loaded.values() if held.compiled is compiled)

    def html(self, path: str | Path) -> None:
        """Not supported yet."""
        raise UnsupportedError("step.html: report pages are not supported yet", hint="print(step.explain()), step.save_source(folder)")

    @guarded
    def timeline(self, path: str | Path) -> Timeline:
        """Writes the last training step of a mesh with stages as a trace for Perfetto or chrome://tracing, and a picture beside it.

        Both hold what was measured and what the simulator predicts from the measured times; ranks that differ only along ``pp`` and have
        coordinate 0 otherwise are shown. Rank 0 writes. Collective.
        """
        run = self.executable()
        if not isinstance(run, Pipeline):
            raise UnsupportedError(
                "timelines are of stages, and this mesh has none", hint="step.metrics holds the last step's communication"
            )
        everyone = self._comm.exchange((run.begun, run.spans), site="timeline")
        if not all(spans for _, spans in everyone):
            raise InputError("there is no step to show yet", hint="call the step first").alike()
        staged = self._need_compiled().pipeline
        assert staged is not None
        ranks = [everyone[self.mesh.rank({"pp": at})] for at in range(self.mesh["pp"])]
        made = make_timeline(staged.schedule, ranks, staged.edges)
        if self._comm.rank == 0:
            made.save(path)
        return made

    def close(self) -> None:
        """Frees process groups and buffers. The step can't be used afterwards."""
        if not self._closed:
            self._closed = True
            if sys.exception() is None:
                self._landed()
            atexit.unregister(self._at_exit)
            self._loaded.clear()
            self._state = self._grads = None
            closer = getattr(self._comm, "close", None)
            if closer is not None:
                closer()

    # -- inside

    def _landed(self) -> None:
        """Waits for gathers under way: a rank that leaves before its peers have all of its part would make them fail."""
        if self._state is not None:
            try:
                self._state.changed()
            except CommError:  # told by whoever caused it
                pass

    @property
    def _model(self) -> nn.Module:
        """The model that was given, as long as someone else holds it; then a copy without values: its weights are not kept alive."""
        found = self._user() or self._skeleton
        assert found is not None
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this step is closed")

    def _need(self) -> State:
        if self._state is None:
            raise InputError("the step isn't compiled yet", hint="pass example=batch to parallelize, or call the step once")
        return self._state

    def _need_compiled(self) -> Compiled:
        self._need()
        assert self._train is not None
        return self._train

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        wanted = {"fp32": torch.float32, "fp64": torch.float64}.get(self._options.precision or "")
        return wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype

    def _names(self) -> dict[str, tuple[str, ...]]:
        assert self._train is not None
        return {i.path: i.aliases for i in self._train.program.inputs_of("param")}

    def _buffer_names(self) -> dict[str, tuple[str, ...]]:
        assert self._train is not None
        return {i.path: i.aliases for i in self._train.program.inputs_of("buffer")}

    def _rows(self, tensors: Sequence[Tensor], loaded: _Loaded) -> int:
        """Samples of the global batch; 1 where nothing counts samples."""
        ways = 1 if loaded.whole else self.mesh["dp"]
        return next((t.shape[d] * ways for t, d in zip(tensors, loaded.dims, strict=True) if d is not None), 1)

    def _placed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A batch on the mesh's device, in the wanted precision."""
        wanted = {"fp32": torch.float32, "fp64": torch.float64}.get(self._options.precision or "")
        out = []
        for t in tensors:
            t = t.to(self._comm.device)
            out.append(t.to(wanted) if wanted is not None and t.is_floating_point() else t)
        return out

    def _run(self, kind: str, batch: Any) -> tuple[_Loaded, list[Tensor], Started]:
        """Runs the program of a call; last reductions of gradients stay under way.

        Where this rank has the program, as nearly always, it is begun at once, and what the other ranks say is heard before its first
        collective. Until then nothing has changed that can't be thrown away.
        """
        call, tree, tensors, check = self._ask(kind, batch)
        if call in self._loaded:
            self._comm.hold(partial(_all_ready, check))
            try:
                return self._start(self._loaded[call], tensors)
            except _NotReady as error:
                answer = error.answer
            finally:
                self._comm.hold(None)
        else:
            answer = check()
        return self._start(*self._settled(call, tree, tensors, answer))

    def _start(self, loaded: _Loaded, tensors: Sequence[Tensor]) -> tuple[_Loaded, list[Tensor], Started]:
        state, placed = self._need(), self._placed(tensors)
        versions = [_torch.version(p) for p in state.parts]
        if self._prepared is None or versions != self._versions:
            # written to by the user; without an optimizer of ours we can't tell, as ``.data`` leaves no trace
            self._comm.settle()
            state.changed()
            self._versions = versions
        result = loaded.run.start(state, placed, step_key(self._options.seed, state.step, self._comm.device))
        self._comm.settle()
        return loaded, placed, result

    def _ask(self, kind: str, batch: Any) -> tuple[_Call, BatchTree, list[Tensor], Callable[[], agree.Answer]]:
        """What a call is, and how to hear whether the other ranks make the same."""
        call = _Call(kind)
        tree: BatchTree | None = None
        tensors: list[Tensor] = []
        dims: list[int | None] = []
        problem: AutoparError | None = None
        try:
            # what the model is, flags and plain attributes, is part of what is captured: model.eval() is followed
            state, flags, trained = self._followed.now()
            tree, tensors = take_batch(batch)
            types = tuple((t.dtype, tuple(t.shape)) for t in tensors)
            structure = f"{tree.form} {tree.spec}"
            call = _Call(kind, structure, tree.paths, str(tree.leaves), types, state, flags if kind == "train" else 0)
            self._check_batch(tree, tensors, trained)
            dims = find_dims(self._options.batch_dim, tree, tensors)
            if call in self._loaded:
                self._check_values(self._loaded[call], tensors)
        except AutoparError as error:
            problem = error
        check = self._agree_on_call(call, tensors, dims, problem)
        if problem is not None:
            check()
        assert tree is not None
        return call, tree, tensors, check

    def _settled(self, call: _Call, tree: BatchTree, tensors: list[Tensor], answer: agree.Answer) -> tuple[_Loaded, list[Tensor]]:
        """The program of a call and what it is run on, once the ranks have been heard."""
        known = answer is agree.Answer.READY
        if answer is agree.Answer.UNEVEN:
            call, tensors = self._dealt(call, tree, tensors)
            known = all(self._comm.exchange(call in self._loaded, site="program"))
        if not known:
            self._loaded.pop(call, None)  # the model of another rank has changed: all compile, and compare
            self._get(call, tree, tensors)
        loaded = self._loaded[call]
        if not known or answer is agree.Answer.UNEVEN:
            agree.together(self._comm, lambda: self._check_values(loaded, tensors), "batch")
        return loaded, tensors

    def _dealt(self, call: _Call, tree: BatchTree, tensors: list[Tensor]) -> tuple[_Call, list[Tensor]]:
        """The call on rows that data ranks hold unevenly, as a short last batch."""
        dims = find_dims(self._options.batch_dim, tree, tensors)
        made = deal(self._comm, tensors, dims, cut=call.kind != "forward")
        self._brought = made.brought
        call = call._replace(types=tuple((t.dtype, tuple(t.shape)) for t in made.tensors), whole=made.whole)
        if call not in self._loaded:
            self.reports.append(f"{call.kind}: data ranks hold different numbers of rows; {made.how}")
        return call, made.tensors

    def _check_batch(self, tree: BatchTree, tensors: Sequence[Tensor], trained: Sequence[str]) -> None:
        """What can be said against a batch before its program is known."""
        absent = [p for p, t in zip(tree.paths, tensors, strict=True) if t.is_meta]
        if absent:
            raise InputError(f"batch input {absent[0]!r} is on meta: it has no values", hint="a batch holds this rank's rows")
        if self._trained is not None and list(trained) != self._trained:
            changed = sorted(set(trained) ^ set(self._trained))
            raise InputError(
                f"requires_grad of {changed[0]} changed after the step was compiled", why=f"{len(changed)} parameters changed",
                hint="make a new step: parallelize(step.module(), mesh, ...)",
            )  # fmt: skip

    def _check_values(self, loaded: _Loaded, tensors: Sequence[Tensor]) -> None:
        check_bounds(loaded.compiled.bounds, tensors, loaded.dims)

    def _get(self, call: _Call, tree: BatchTree, tensors: Sequence[Tensor]) -> _Loaded:
        if call not in self._loaded:
            if call.kind != "train" and self._train is None:
                self._get(call._replace(kind="train", flags=self._followed.now()[1]), tree, tensors)
            self._loaded[call] = self._compile(call, tree, tensors)
        return self._loaded[call]

    def _compile(self, call: _Call, tree: BatchTree, tensors: Sequence[Tensor]) -> _Loaded:
        """Compiles for one kind of call and one set of shapes; the first is the training step, whose layout the others keep."""
        kind, begun = call.kind, time.perf_counter()
        self._agree_on_model()
        compiled = agree.together(self._comm, lambda: self._program(call, tree, tensors), "compile")
        # what the ranks run is the same text, whatever their models look like
        source = "\n".join(m.source for m in compiled.modules)
        text = hashlib.sha256((source + compiled.spec.to_json()).encode()).hexdigest()[:16]
        if len(set(self._comm.exchange((self._comm.coords.get("pp", 0), text), site="program"))) > self.mesh["pp"]:
            agree.compare_ranks(self._comm, {"state of its model": self._followed.told()}, "model state")
            agree.compare_stages(self._comm, {"program": text}, "program")
        run = self._load(compiled)
        if self._train is None:
            self._begin(compiled)
        else:
            self.reports.append(
                f"compiled {kind} for batch shapes {[tuple(t.shape) for t in tensors]} in {time.perf_counter() - begun:.1f} s"
            )
        return _Loaded(compiled, run, find_dims(self._options.batch_dim, tree, tensors), call.whole)

    def _begin(self, compiled: Compiled) -> None:
        """Takes the first compilation: its plan, the weights in its layout, the optimizer over its parts."""
        self._state = self._weights(compiled)
        self._train = compiled
        self._trained = [n for n, p in self._model.named_parameters() if p.requires_grad]
        self._plan = filled_plan(self._plan, compiled)
        self._waiting = None
        self._skeleton = without_values(self._model)
        if self._skeleton is not None:
            self._user = weakref.ref(self._model)
        self._versions = [_torch.version(p) for p in self._state.parts]
        if self._prepared is not None:
            parts: dict[int, list[nn.Parameter]] = {}
            for bucket, part in zip(self._state.buckets, self._state.parts, strict=True):
                if bucket.group != opt.LEFT_OUT:
                    parts.setdefault(bucket.group, []).append(part)
            opt.attach(self._prepared, parts)

    def _program(self, call: _Call, tree: BatchTree, tensors: Sequence[Tensor]) -> Compiled:
        """Captures on the global batch and compiles."""
        share = self._share if self._share is not None else {}
        coordinate = self._comm.coords.get("pp", 0)
        key = (call, coordinate)
        if key not in share:
            groups = self._prepared.group_of if self._prepared is not None else {}
            shown = sys.stderr if self._options.progress and self._comm.rank == 0 else None
            progress = Progress(f"{type(self._model).__name__} for {str(self.mesh) or 'one rank'}", shown)
            options = replace(self._options, plan=self._plan)
            share[key] = compile_step(
                self._model, self.mesh, options, tree, tensors, call.kind, groups, self._train, progress, call.whole, coordinate
            )
            if options.cache is not None:
                self.reports += options.cache.take_reports()
        return share[key]

    def _load(self, compiled: Compiled) -> Executable | Pipeline:
        segment, inductor = None, self._options.backend == "inductor"
        if inductor:

            def segment(fn: Callable[..., Any]) -> Callable[..., Any]:
                return torch.compile(fn, dynamic=False, fullgraph=True)

        if compiled.pipeline is not None:
            staged = compiled.pipeline
            modules = dict(staged.modules)
            if inductor:
                modules = {s: emit_stage(staged.programs[s], kinds=m.spec.tasks, tensor_sites=True) for s, m in modules.items()}
            parts = {s: (m.source, m.spec, staged.programs[s].consts) for s, m in modules.items()}
            paths = [i.path for i in compiled.program.inputs_of("batch")]
            return Pipeline(
                parts, staged.schedule.placement, staged.instructions, compiled.spec, paths, self._comm, compile_segment=segment
            )
        source = emit(compiled.final, "", tensor_sites=True).source if inductor else compiled.module.source
        return Executable(source, compiled.spec, self._comm, compiled.final.consts, compile_segment=segment)

    def _agree_on_call(
        self, call: _Call, tensors: Sequence[Tensor], dims: Sequence[int | None], problem: AutoparError | None
    ) -> Callable[[], agree.Answer]:
        """To hear whether every rank has the program of this call."""
        rows: list[int] | None = None
        shapes = [list[Any](shape) for _, shape in call.types]
        if self._train is not None:  # the first batch sets the program; later ones may be shorter
            rows = []
            for shape, dim in zip(shapes, dims):
                if dim is not None and -len(shape) <= dim < len(shape):
                    rows.append(shape[dim])
                    shape[dim] = "rows"
        mine = {
            "call": call.kind,
            "batch shapes": [
                (path, str(dtype).removeprefix("torch."), shape)
                for path, (dtype, _), shape in zip(call.paths, call.types, shapes, strict=True)
            ],
            "constant in its batch": call.constants,
            "structure of its batch": call.structure,
            "training flag": self._followed.mode() if call.kind == "train" else "",
            "learning rate": [float(g.get("lr", 0.0)) for g in self._prepared.optimizer.param_groups] if self._prepared else None,
        }
        changes = [_torch.version(p) - v for p, v in zip(self._state.parts, self._versions)] if self._state else []
        held = {"changes to parameters": changes}
        return agree.compare_call(self._comm, mine, held, rows, tensors, problem, call in self._loaded)

    def _agree_on_model(self) -> None:
        """All ranks hold one model and were given the same options. Else InputError on every rank."""
        if self.mesh.size == 1:
            return
        o = self._options
        model = {"class": type(self._model).__name__}
        model |= {n: f"{p.dtype}{list(p.shape)}{'' if p.requires_grad else ' frozen'}" for n, p in self._model.named_parameters()}
        plain = (bool, int, float, str, tuple, type(None))
        groups = [
            {k: v for k, v in g.items() if k != "params" and isinstance(v, plain)}
            for g in (self._prepared.optimizer.param_groups if self._prepared else ())
        ]
        mine = {
            "torch": torch.__version__, "version of autopar's code": code_digest(), "model": model,
            "seed": o.seed, "plan": json.loads(self._plan.text()),
            "optimizer": (type(self._prepared.optimizer).__name__, repr(groups)) if self._prepared else None,
            "loss": getattr(o.loss, "__qualname__", type(o.loss).__name__), "clip_grad_norm": o.clip_grad_norm, "precision": o.precision,
            "backend": o.backend,
        }  # fmt: skip
        agree.compare_ranks(self._comm, mine, "model")

    def _given(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers by every name, with this rank's values, as ``init`` says."""
        model, how = self._model, self._options.init
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
        if callable(how):
            model = filled(model)
            how(model)
            named, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers(remove_duplicate=False))
        given = self._waiting or {}
        named, buffers = {**named, **given}, {**buffers, **{k: v for k, v in given.items() if k in buffers}}
        if callable(how):
            made = {n: t for n, t in (*named.items(), *buffers.items()) if n not in given and not t.is_meta}
            missed = [n for n, t in made.items() if t.numel() and bool(t.isnan().any())]
            if missed:
                raise InputError(
                    f"init= left {missed[0]} without values", why=f"{len(missed)} tensors have elements that it didn't fill",
                    hint="a function that fills every parameter and buffer, those that no state_dict holds too",
                )  # fmt: skip
        on_meta = [n for n, t in (*named.items(), *buffers.items()) if t.is_meta]
        if on_meta:
            raise InputError(
                f"{on_meta[0]} is on meta: it has no values", why=f"{len(on_meta)} tensors are",
                hint="init= a function that fills a module, or step.load_state_dict(full) before the first step",
            )  # fmt: skip
        return named, buffers

    def _weights(self, compiled: Compiled) -> State:
        """The state that holds the model's weights, the same on every rank."""
        how = self._options.init
        named, buffers = agree.together(self._comm, self._given, "weights")
        if how != "broadcast":
            agree.compare_values(
                self._comm, {**named, **buffers}, "init", 'seed every rank alike before building the model, or init="broadcast"'
            )

        def broadcast(path: str) -> Tensor:
            return self._comm.exchange(named[path].detach().cpu() if self._comm.rank == 0 else None, site="init")[0]

        value: Callable[[str], Tensor] = named.__getitem__
        if self.mesh["pp"] > 1 and how == "broadcast":
            # stages ask for other parameters: all hear of all of them, in one order
            wanted = {m.path for b in compiled.spec.buckets for m in b.members} | set(compiled.spec.params)
            heard = ((i.path, broadcast(i.path)) for i in compiled.program.inputs_of("param"))
            value = {path: t for path, t in heard if path in wanted}.__getitem__
        elif self.mesh.size > 1 and how == "broadcast":
            value = broadcast
        if self.mesh.size > 1 and how == "broadcast":
            buffers = self._comm.exchange({k: v.cpu() for k, v in buffers.items()} if self._comm.rank == 0 else None, site="init")[0]
        read = {name for i in compiled.program.inputs_of("buffer") for name in (i.path, *i.aliases)}
        self._unread = {name: t.detach().clone() for name, t in buffers.items() if name not in read}
        return make_state(compiled.spec, value, buffers, self._comm)

    def _measure(self, loaded: _Loaded, tensors: Sequence[Tensor], loss: Tensor, norm: Any, seconds: float) -> None:
        records = self._comm.take_records()
        tokens = max((t.numel() for t in tensors), default=0) * (1 if loaded.whole else self.mesh["dp"])
        sent: dict[str, int] = {}
        waited: dict[str, float] = {}
        for r in records:
            axis = "+".join(r.axes)
            sent[axis] = sent.get(axis, 0) + r.bytes
            waited[axis] = waited.get(axis, 0.0) + r.seconds_start + r.seconds_wait_exposed
        self._ran = loaded
        self._metrics = {
            "loss": loss, "grad_norm": norm, "step_s": seconds, "tokens_per_s": tokens / seconds if seconds else 0.0,
            "comm_bytes": sent, "exposed_comm_s": waited, "records": records,
        }  # fmt: skip


def _at_exit(step: Callable[[], Step | None]) -> None:
    found = step()
    if found is not None:
        found._landed()


__all__ = ["Step"]
