"""The command line: ``autopar train | plan | inspect | verify | bench``.

Exit codes: 0 done, 1 ``verify`` found a difference, 2 a mistake of the user's, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import AutoparError, CommError, InputError, PlanError, UnsupportedError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan, as_plan

DONE, DIFFERENT, MISTAKE, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Says a mistake in one message, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message, hint=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        _quiet()
        return arguments.run(arguments)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, say) has seen enough
        return DONE


# -- the commands


def _train(a: argparse.Namespace) -> int:
    from autopar.train import Job

    mesh, plan = _mesh_and_plan(a)
    job = Job(
        file=a.file, mesh=mesh, plan=plan, steps=a.steps, batch=_batch(a, mesh, plan, 8), preset=a.preset, overrides=_overrides(a), lr=a.lr,
        optimizer=a.optimizer, weight_decay=a.weight_decay, clip=a.clip, out=a.out, eval_every=a.eval_every, eval_batches=a.eval_batches,
        data=a.data, seed=a.seed, backend=a.backend, precision=a.precision, json=a.json,
    )  # fmt: skip
    job.load()  # mistakes show before workers start
    with _writing(a.out):
        Path(a.out).mkdir(parents=True, exist_ok=True)
    _on_workers(_train_rank, mesh, job)
    return DONE


def _train_rank(job: Any) -> None:
    from autopar.train import summary, train

    result = train(job)
    if "explain" in result:  # rank 0
        print(json.dumps({k: v for k, v in result.items() if k != "explain"}) if job.json else summary(result), flush=True)
    if result["interrupted"]:
        if job.mesh.size > 1:
            # the launcher has asked for the end, reads no results any more, and kills whom torch's tearing down keeps for seconds
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise SystemExit(INTERRUPTED)


def _plan(a: argparse.Namespace) -> int:
    if a.cluster is not None or a.memory is not None:
        raise UnsupportedError(
            "autopar plan --cluster: the search over meshes is not supported yet", hint="--mesh dp=2,tp=2 prints the plan for one mesh"
        )
    if a.mesh is None:
        raise InputError("autopar plan needs a mesh", hint="--mesh dp=2,tp=2")
    inspection = _inspection(a)
    if a.save is not None:
        with _writing(a.save):
            inspection.plan.save(a.save)
    print(inspection.plan.text() if a.json or a.save is None else f"plan: {a.save}")
    return DONE


def _inspect(a: argparse.Namespace) -> int:
    if a.html is not None:
        raise UnsupportedError(
            "autopar inspect --html: report pages are not supported yet", hint="leave --html out: the tables have it all"
        )
    inspection = _inspection(a, a.stage)
    phase = None if a.graph in (None, "all") else a.graph
    if a.json:
        extra = {
            **({"graph": inspection.graph(phase, a.stage)} if a.graph else {}),
            **({"source": inspection.source(a.stage)} if a.source else {}),
        }
        print(json.dumps({**inspection.to_json(), **extra}))
        return DONE
    parts = [inspection.graph(phase, a.stage)] if a.graph else []
    parts += [inspection.source(a.stage)] if a.source else []
    print("\n\n".join(parts or [inspection.table()]))
    return DONE


def _verify(a: argparse.Namespace) -> int:
    from autopar.api import verify

    if a.backend != "eager":
        raise UnsupportedError(f"autopar verify --backend {a.backend} is not supported yet", hint="verify compares the eager backend")
    mesh, plan = _mesh_and_plan(a)
    file = _file(a)
    report = verify(
        file.build(a.seed), mesh, file.batch(_batch(a, mesh, plan, 4), a.seed), plan=plan, loss=file.loss, precision=a.precision or "fp64",
        seed=a.seed, steps=a.steps, clip_grad_norm=a.clip,
    )  # fmt: skip
    if a.json:
        rows = [
            {"kind": r.kind, "name": r.name, "difference": _finite(r.difference), "allowed": r.allowed, "ok": r.ok} for r in report.rows
        ]
        print(json.dumps({
            "ok": report.ok, "mesh": str(mesh), "worst": _finite(report.worst), "steps": a.steps, "rows": rows,
            "replicas_that_differ": list(report.replicas), "first": report.first, "notes": list(report.notes),
        }))  # fmt: skip
    else:
        print(report.table())
    return DONE if report.ok else DIFFERENT


def _bench(a: argparse.Namespace) -> int:
    mesh, plan = _mesh_and_plan(a)
    job = BenchJob(
        file=a.file, mesh=mesh, plan=plan, batch=_batch(a, mesh, plan, 8), preset=a.preset, overrides=_overrides(a), steps=a.steps,
        blocks=a.blocks, optimizer=a.optimizer, lr=a.lr, seed=a.seed, backend=a.backend, precision=a.precision,
        plain_threads=a.plain_threads,
    )  # fmt: skip
    job.load()
    bench = _on_workers(run_bench, mesh, job)
    if bench is not None:
        print(json.dumps(bench.to_json()) if a.json else bench.table())
    return DONE


@dataclass(frozen=True)
class BenchJob:
    """What to time."""

    file: str
    mesh: Mesh
    plan: Plan
    batch: int
    preset: str | None
    overrides: dict[str, Any]
    steps: int
    blocks: int
    optimizer: str
    lr: float
    seed: int
    backend: str
    precision: str | None
    plain_threads: int | None

    def load(self) -> Any:
        """The model file."""
        from autopar.modelfile import load

        return load(self.file, self.preset, self.overrides)


def run_bench(job: BenchJob) -> Any:
    """Times on this rank; rank 0 returns the figures."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from autopar.api import parallelize
    from autopar.inspect.bench import PlainStep, bench_step
    from autopar.train import OPTIMIZERS

    file = job.load()
    optimizer = partial(OPTIMIZERS[job.optimizer], lr=job.lr)
    step = parallelize(
        file.build(job.seed), job.mesh, loss=file.loss, optimizer=optimizer, plan=job.plan, precision=job.precision, seed=job.seed,
        backend=job.backend,
    )  # fmt: skip
    first = job.mesh.size == 1 or dist.get_rank() == 0
    plain = None
    batch = file.batch(job.batch, job.seed)
    if first:
        model = file.build(job.seed)
        wanted = {"fp32": torch.float32, "fp64": torch.float64}.get(job.precision or "")
        plain = PlainStep(model.to(wanted) if wanted is not None else model, optimizer, file.loss, job.backend)
        batch = batch if wanted is None else _cast(batch, wanted)
    # the plain model gets the threads that all ranks together have
    threads = job.plain_threads or min(torch.get_num_threads() * job.mesh.size, _cores())
    try:
        bench = bench_step(step, plain, batch, steps=job.steps, blocks=job.blocks, plain_threads=threads, backend=job.backend)
    finally:
        step.close()
    return bench if first else None


def _cast(batch: Any, dtype: Any) -> Any:
    from autopar.capture.tree import take_batch

    tree, tensors = take_batch(batch)
    return tree.fill([t.to(dtype) if t.is_floating_point() else t for t in tensors])


# -- shared parts


@dataclass(frozen=True)
class _Failed:
    """A mistake that a worker found: carried home as a value, so that no launcher prints a traceback of it."""

    error: AutoparError


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path!r} can't be written", why=str(error)) from error


def _quiet() -> None:
    """torch logs a traceback of an op that fails during capture; the error that follows says the same in the user's terms."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def _guarded(fn: Callable[[Any], Any], job: Any) -> Any:
    _quiet()
    try:
        return fn(job)
    except AutoparError as error:
        return _Failed(error)


def _on_workers(fn: Callable[[Any], Any], mesh: Mesh, job: Any) -> Any:
    """``fn(job)`` on every rank; what rank 0 returned. Raises the first mistake that is not about lost communication."""
    import torch

    from autopar.api import check_mesh

    check_mesh(mesh)
    if mesh.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device", hint="--device cpu")
    if mesh.size == 1:
        results = [_guarded(fn, job)]
    else:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from autopar.runtime.launch import launch

        try:
            results = launch(_guarded, mesh.size, fn, job)
        except SignalException as error:
            raise KeyboardInterrupt from error
    failed = [r.error for r in results if isinstance(r, _Failed)]
    if failed:
        # ranks that lose a peer fail too, in its wake
        raise min(failed, key=lambda e: isinstance(e, CommError))
    return results[0]


def _file(a: argparse.Namespace) -> Any:
    from autopar.modelfile import load

    return load(a.file, a.preset, _overrides(a))


def _overrides(a: argparse.Namespace) -> dict[str, Any]:
    from autopar.modelfile import parse_overrides

    return parse_overrides(a.set)


def _inspection(a: argparse.Namespace, stage: int = 0) -> Any:
    from functools import partial

    from autopar.api import check_mesh, make_options
    from autopar.inspect.model import inspect_model
    from autopar.train import OPTIMIZERS

    mesh, plan = _mesh_and_plan(a)
    check_mesh(mesh)
    file = _file(a)
    options = make_options(file.loss, partial(OPTIMIZERS[a.optimizer], lr=1e-3), plan, a.precision, 0, "check", None, a.seed, a.backend, ())
    return inspect_model(file.build(a.seed, meta=True), mesh, file.batch(_batch(a, mesh, plan, 4), a.seed), options, sys.stderr, stage)


def _mesh_and_plan(a: argparse.Namespace) -> tuple[Mesh, Plan]:
    """The mesh: as given, else the one that a saved plan was made for, else one rank."""
    plan = parse_plan(a.plan)
    text = a.mesh if a.mesh is not None else plan.mesh or ""
    mesh = Mesh.parse(text)
    return Mesh(mesh.axes, device=a.device), plan


def _batch(a: argparse.Namespace, mesh: Mesh, plan: Plan, least: int) -> int:
    """Rows of the global batch: as given, else the fewest over ``least`` that data ranks and microbatches divide."""
    if a.batch is not None:
        return a.batch
    unit = mesh["dp"] * (plan.microbatches or plan.interleave or 1)
    return -(-least // unit) * unit


def parse_plan(text: str | None) -> Plan:
    """``auto``, the path of a saved plan, or one written out: ``zero=0,microbatches=2,sequence,shard:head.*=dim0@tp``."""
    if text is None or text == "auto":
        return Plan()
    if Path(text).is_file() or text.endswith(".json"):
        return as_plan(text)
    from autopar.modelfile import literal

    known = [f.name for f in fields(Plan) if f.name not in ("shard", "mesh", "parameters", "seconds")]
    values: dict[str, Any] = {}
    shard: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, eq, value = part.partition("=")
        if name.startswith("shard:"):
            if not eq or not value:
                raise PlanError(f"--plan: {part!r} has no placement", hint="shard:head.weight=dim0@tp")
            shard[name.removeprefix("shard:")] = value
        elif name not in known:
            raise PlanError(
                f"--plan: {part!r} is no field of a plan and {text!r} no file",
                hint=f"{', '.join(known)} or shard:GLOB=PLACEMENT, with commas between; or the path of a saved plan",
            )
        else:
            values[name] = literal(value) if eq else True
    for name in ("sequence", "strict", "regather"):
        if not isinstance(values.get(name, False), bool):
            raise PlanError(f"--plan: {name}={values[name]} is neither true nor false")
    return replace(Plan(**values), shard=shard or None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finite(x: float) -> float | str:
    """JSON has no infinity."""
    return x if x == x and abs(x) != float("inf") else str(x)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _parser() -> Parser:
    parser = Parser(prog="autopar", description="A plain PyTorch model and a mesh in, its training step as a program for every rank out.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="train | plan | inspect | verify | bench")

    def command(name: str, run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words)
        sub.set_defaults(run=run)
        sub.add_argument("file", help="a Python file with build() and batch(size, generator), maybe loss(output, batch)")
        sub.add_argument("--mesh", help="axes and sizes, like dp=2,tp=2; default: the plan's, or one rank")
        sub.add_argument("--plan", help="a saved plan, or one like zero=0,microbatches=2,sequence; default: auto")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--preset", help="of the model file: build(preset=...)")
        sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further argument of build(); may be repeated")
        sub.add_argument("--batch", "--global-batch", type=_count, help="rows of the global batch")
        sub.add_argument("--seed", type=_natural, default=0, help="of weights, batches and random ops")
        sub.add_argument("--backend", choices=("eager", "inductor"), default="eager")
        sub.add_argument("--precision", help="fp32 or fp64; default: the model's own")
        sub.add_argument("--device", choices=("cpu", "cuda"), help="where tensors live; default: cpu")
        return sub

    def training(sub: argparse.ArgumentParser, lr: float) -> None:
        sub.add_argument("--lr", type=_positive, default=lr, help=f"learning rate, {lr:g}")
        sub.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")

    train = command("train", _train, "train on local workers, or on the ranks of torchrun")
    training(train, 1e-3)
    train.add_argument("--steps", type=_count, default=50)
    train.add_argument("--weight-decay", type=float, help="default: the optimizer's own")
    train.add_argument("--clip", type=_positive, help="clip the global gradient norm")
    train.add_argument(
        "--data", default="auto", help="text, own, a folder of *.py files; default: real text where the model takes ids and labels"
    )
    train.add_argument("--eval-every", type=_natural, default=100, help="steps between held-out losses; 0: only before and after")
    train.add_argument("--eval-batches", type=_natural, default=8, help="batches of the held-out loss; 0: none")
    train.add_argument("--out", default="out/train", help="folder for report, source, plan, losses and weights")

    plan = command("plan", _plan, "print the plan for a mesh")
    plan.add_argument("--cluster", help="search over the meshes of a cluster (not yet)")
    plan.add_argument("--memory", help="of a device (not yet)")
    plan.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    plan.add_argument("--save", metavar="PATH", help="write it there: --plan PATH takes it")

    look = command("inspect", _inspect, "show what a mesh would run, without processes: parameters, collectives, memory")
    look.add_argument("--stage", type=_natural, default=0)
    look.add_argument("--graph", nargs="?", const="all", choices=("all", "forward", "backward"), help="the rewritten graph")
    look.add_argument("--source", action="store_true", help="the generated module")
    look.add_argument("--html", metavar="PATH", help="a report page (not yet)")
    look.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="whose state the memory table counts")

    check = command("verify", _verify, "run all ranks in this process and compare them with the plain model")
    check.add_argument("--steps", type=_count, default=3)
    check.add_argument("--clip", type=_positive, help="clip the global gradient norm")

    bench = command("bench", _bench, "time the generated code by phase and collective, beside the plain model")
    training(bench, 1e-3)
    bench.add_argument("--steps", type=_count, default=10, help="in a block")
    bench.add_argument("--blocks", type=_count, default=5, help="of the generated step, in turn with as many of the plain model")
    bench.add_argument("--plain-threads", type=_count, help="threads of the plain model; default: those of all ranks together")
    return parser


if __name__ == "__main__":
    sys.exit(main())
