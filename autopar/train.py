"""The job of ``autopar train``, as every rank runs it: data, steps, held-out loss, and what is left on disk."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from autopar.api import parallelize
from autopar.capture.tree import BatchTree, take_batch
from autopar.errors import InputError
from autopar.layout.mesh import Mesh
from autopar.modelfile import ModelFile, load
from autopar.plan.plan import Plan
from autopar.runtime.data import ByteText
from autopar.step import Step

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
#: the smallest vocabulary that holds a byte.
_BYTES = 256
#: offset of the seeds of held-out batches of a model's own.
_HELD_OUT = 2**40


@dataclass(frozen=True)
class Job:
    """What to train, as the command line says it: plain values, so that it travels to workers."""

    file: str
    mesh: Mesh
    plan: Plan
    steps: int
    batch: int
    preset: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    optimizer: str = "adamw"
    weight_decay: float | None = None
    clip: float | None = None
    out: str = "out/train"
    eval_every: int = 0
    eval_batches: int = 8
    data: str = "auto"
    seed: int = 0
    backend: str = "eager"
    precision: str | None = None
    json: bool = False

    def load(self) -> ModelFile:
        """The model file."""
        return load(self.file, self.preset, self.overrides)

    def factory(self) -> Callable[..., torch.optim.Optimizer]:
        """What makes the optimizer."""
        extra = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return partial(OPTIMIZERS[self.optimizer], lr=self.lr, **extra)


# -- data


class Data(Protocol):
    """Global batches, the same on every rank."""

    unit: str
    words: str

    def train(self, step: int) -> Any: ...
    def held_out(self) -> list[Any]: ...
    def units(self, batch: Any) -> int: ...


class OwnData:
    """The model file's own ``batch``, other rows every step."""

    unit = "rows"
    words = "the model file's own batches"

    def __init__(self, file: ModelFile, size: int, batches: int, seed: int) -> None:
        self._file, self._size, self._batches, self._seed = file, size, batches, seed

    def train(self, step: int) -> Any:
        return self._file.batch(self._size, self._seed + 1 + step)

    def held_out(self) -> list[Any]:
        return [self._file.batch(self._size, self._seed + _HELD_OUT + n) for n in range(self._batches)]

    def units(self, batch: Any) -> int:
        return self._size


class TextData:
    """Real text as bytes, in the form of the model's own batch."""

    unit = "tokens"

    def __init__(self, form: TextForm, size: int, batches: int, seed: int, root: str | None = None) -> None:
        self._form, self._size, self._batches, self._seed = form, size, batches, seed
        self._text, self._held = ByteText(form.sequence, "train", root), ByteText(form.sequence, "held_out", root)
        counts = {split: len(files) for split, files in self._text.files.items()}
        source = "the Python standard library's source" if root is None else f"the *.py files of {root}"
        self.words = f"{source} as bytes, {counts['train']} files to train on and {counts['held_out']} held out"

    def train(self, step: int) -> Any:
        return self._form.fill(*self._text.batch(step, self._size, self._seed))

    def held_out(self) -> list[Any]:
        return [self._form.fill(*pair) for pair in self._held.held_out(self._size, self._size * self._batches)]

    def units(self, batch: Any) -> int:
        return self._size * self._form.sequence


@dataclass(frozen=True)
class TextForm:
    """Where the ids and labels of a text go in a model's batch; ``shifted``: labels are the next ids, else the model shifts them itself."""

    tree: BatchTree
    ids: int
    labels: int
    sequence: int
    shifted: bool

    def fill(self, ids: Tensor, labels: Tensor) -> Any:
        leaves: list[Tensor] = [torch.ones_like(ids)] * len(self.tree.paths)  # a mask, if there is a third: all of it counts
        leaves[self.ids], leaves[self.labels] = ids, labels if self.shifted else ids.clone()
        return self.tree.fill(leaves)


def text_form(model: nn.Module, batch: Any) -> TextForm | None:
    """How a text becomes a batch of this model; None where the model doesn't take ids and labels of at least 256 kinds.

    Found from a batch of the model's own: ids and labels are two integer tensors of one shape ``(rows, sequence)``, and where a label is
    not negative it is the id of its place, or of the next.
    """
    tree, leaves = take_batch(batch)
    if len(leaves) not in (2, 3) or any(t.dim() != 2 or t.dtype != torch.long or t.shape != leaves[0].shape for t in leaves):
        return None
    names = list(tree.paths)
    ids, labels = 0, 1
    if tree.form == "dict":
        if "labels" not in names:
            return None
        labels = names.index("labels")
        ids = next(n for n, name in enumerate(names) if n != labels and "mask" not in name)
        if len(leaves) == 3 and not any("mask" in name for name in names):
            return None
    elif len(leaves) == 3:
        return None
    if _vocabulary(model) < _BYTES or leaves[0].shape[1] < 2:
        return None
    x, y = leaves[ids], leaves[labels]
    counts = y >= 0
    if bool((counts & (x == y))[counts].all()):
        return TextForm(tree, ids, labels, x.shape[1], shifted=False)
    inner = counts[:, :-1]
    if bool((x[:, 1:] == y[:, :-1])[inner].all()):
        return TextForm(tree, ids, labels, x.shape[1], shifted=True)
    return None


def _vocabulary(model: nn.Module) -> int:
    """Kinds of tokens: as the model's config says, else the rows of its first embedding."""
    config = getattr(model, "config", None)
    for name in ("vocab", "vocab_size"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 0)


def find_data(job: Job, file: ModelFile, model: nn.Module) -> Data:
    """Real text where the model takes it, else its own batches; or what ``--data`` says."""
    if job.data == "own":
        return OwnData(file, job.batch, job.eval_batches, job.seed)
    form = text_form(model, file.batch(job.batch, job.seed))
    if form is None:
        if job.data == "auto":
            return OwnData(file, job.batch, job.eval_batches, job.seed)
        raise InputError(
            f"{type(model).__name__} does not take text",
            why="its batch is not (ids, labels) with at least 256 kinds of ids",
            hint="--data own",
        )
    root = None if job.data in ("auto", "text") else job.data
    if root is not None and not Path(root).is_dir():
        raise InputError(f"--data {root!r} is not a folder", hint="auto, text, own, or a folder of *.py files")
    return TextData(form, job.batch, job.eval_batches, job.seed, root)


# -- being told to stop


class Stop:
    """Notes SIGINT and SIGTERM, so that training ends after the step it is in."""

    def __init__(self) -> None:
        self.asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handlers are set inside, and only where they can be (the main thread)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, step: Step) -> bool:
        """Whether any rank was asked to stop: the same answer on all, who must stop at the same step."""
        return step.any(self.asked)


# -- the job


def train(job: Job) -> dict[str, Any]:
    """Trains on this rank. Rank 0 shows progress, writes ``job.out`` and returns the figures; the others whether it was interrupted."""
    file = job.load()
    model = file.build(job.seed)
    step = parallelize(
        model, job.mesh, loss=file.loss, optimizer=job.factory(), plan=job.plan, precision=job.precision, clip_grad_norm=job.clip,
        seed=job.seed, backend=job.backend,
    )  # fmt: skip
    try:
        training = _Training(job, step, find_data(job, file, model), model)
        del model  # the step has its weights
        return training.run()
    finally:
        step.close()


class _Training:
    def __init__(self, job: Job, step: Step, data: Data, model: nn.Module) -> None:
        self.job, self.step, self.data = job, step, data
        self.size = sum(p.numel() for p in model.parameters())
        self.name = type(model).__name__
        self.rank = dist.get_rank() if job.mesh.size > 1 else 0
        self.out = Path(job.out)
        self.held = [step.shard(batch) for batch in data.held_out()] if job.eval_batches else []
        self.held_out: list[tuple[int, float]] = []
        self.seconds: list[float] = []
        self.units = 0

    def say(self, text: str) -> None:
        if self.rank == 0:
            tqdm.write(text, file=sys.stderr)

    def evaluate(self, done: int) -> float | None:
        """The held-out loss after ``done`` steps."""
        if not self.held:
            return None
        loss = self.step.evaluate(self.held)[0]
        self.held_out.append((done, loss))
        self.say(f"step {done:>5}: held-out loss {loss:.4f}{' nats a byte' if self.data.unit == 'tokens' else ''}")
        return loss

    def run(self) -> dict[str, Any]:
        job, step, data = self.job, self.step, self.data
        begun = time.perf_counter()
        ranks = f"mesh {job.mesh}, {job.mesh.size} ranks" if job.mesh.size > 1 else "one rank"
        self.say(f"{self.name}, {self.size:,} parameters, on {ranks} of {torch.get_num_threads()} thread(s); data: {data.words}")
        first = step.shard(data.train(0))
        step.compile(first)
        self.say(f"compiled in {time.perf_counter() - begun:.1f} s")
        self.evaluate(0)
        done = 0
        with Stop().listening() as stop, self.log() as write, self.bar() as bar:
            while done < job.steps and not stop.agreed(step):
                batch = data.train(done)
                rows = first if done == 0 else step.shard(batch)
                at = time.perf_counter()
                loss = float(step(rows))
                self.seconds.append(time.perf_counter() - at)
                self.units += data.units(batch)
                done += 1
                rate = data.units(batch) / self.seconds[-1]
                bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} {data.unit}/s", refresh=False)
                bar.update()
                held = self.evaluate(done) if job.eval_every and done % job.eval_every == 0 and done < job.steps else None
                write(done, loss, held, rate)
            interrupted = done < job.steps
            if interrupted:
                self.say(f"interrupted after {done} of {job.steps} steps: writing what there is")
            else:
                write(done, None, self.evaluate(done), None)
        return self.finish(done, interrupted, time.perf_counter() - begun)

    @contextmanager
    def log(self) -> Iterator[Callable[..., None]]:
        """Writes a row a step to ``losses.csv``, at once: what an interrupted run has done can be read."""
        if self.rank:
            yield lambda *row: None
            return
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / "losses.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("step", "loss", "held_out_loss", f"{self.data.unit}_per_s"))
            if self.held_out:
                rows.writerow((0, "", self.held_out[0][1], ""))

            def write(done: int, loss: float | None, held: float | None, rate: float | None) -> None:
                if loss is None and held is None:
                    return
                rows.writerow((done, "" if loss is None else loss, "" if held is None else held, "" if rate is None else f"{rate:.1f}"))
                file.flush()

            yield write

    def bar(self) -> tqdm:
        # a terminal shows every second what happens; a log file every ten
        return tqdm(total=self.job.steps, unit="step", disable=self.rank != 0, file=sys.stderr, dynamic_ncols=True,
                    mininterval=0.5 if sys.stderr.isatty() else 10.0)  # fmt: skip

    def finish(self, done: int, interrupted: bool, seconds: float) -> dict[str, Any]:
        """Writes plan, report, source and weights. Collective."""
        weights = self.step.full_state_dict()
        if self.rank:
            return {"interrupted": interrupted}
        out = self.out
        explained = self.step.explain()
        source = self.step.save_source(out / "source")
        self.step.plan.save(out / "plan.json")
        (out / "explain.txt").write_text(explained + "\n")
        held = out / "weights.pt.part"
        torch.save(weights, held)
        os.replace(held, out / "weights.pt")  # whole or not there at all
        settled = self.seconds[min(2, len(self.seconds) - 1) :]
        result = {
            "model": self.name, "parameters": self.size, "mesh": str(self.job.mesh), "ranks": self.job.mesh.size, "steps": done,
            "interrupted": interrupted, "data": self.data.words, "held_out": self.held_out,
            "held_out_loss": self.held_out[-1][1] if self.held_out else None, "unit": self.data.unit,
            "per_s": self.units / done / median(settled) if settled else None, "step_s": median(settled) if settled else None,
            "seconds": seconds, "plan": json.loads(self.step.plan.text()),
            "files": {"report": str(out / "explain.txt"), "source": str(source), "plan": str(out / "plan.json"),
                      "losses": str(out / "losses.csv"), "weights": str(out / "weights.pt")},
        }  # fmt: skip
        (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        return {**result, "explain": explained}


def summary(result: dict[str, Any]) -> str:
    """The end of a training as text: plan, losses, throughput, and where everything lies."""
    lines = [result["explain"], ""]
    if result["held_out"]:
        first, last = result["held_out"][0], result["held_out"][-1]
        unit = ", nats a byte" if result["unit"] == "tokens" else ""
        lines.append(f"held-out loss{unit}: {first[1]:.4f} before, {last[1]:.4f} after {last[0]} steps")
    if result["per_s"] is not None:
        rate = f"{result['per_s']:,.0f} {result['unit']}/s (median step {result['step_s'] * 1e3:.0f} ms)"
        lines.append(f"throughput: {rate}; {result['seconds']:.0f} s in all")
    files = result["files"]
    lines += [f"{name + ':':9} {files[name]}" for name in ("report", "source", "plan", "losses", "weights")]
    return "\n".join(lines)


__all__ = ["Job", "OwnData", "TextData", "TextForm", "find_data", "summary", "text_form", "train"]
