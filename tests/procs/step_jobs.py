"""What the ranks of ``test_step`` run: functions of a module's top level, which give back what the test compares."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.api import parallelize
from autopar.errors import InputError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from models import gpt

STEPS = 3
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3),
}


def model_of(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if name in ("gpt", "gpt without dropout"):
        return gpt.build(dropout=0.2 if name == "gpt" else 0.0).double()
    config = GPT2Config(
        vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def batches_of(name: str, count: int = STEPS, rows: int = 8) -> list[Any]:
    """Other rows in every step."""
    generator = torch.Generator().manual_seed(5)
    if name in ("gpt", "gpt without dropout"):
        return [gpt.batch(rows, generator) for _ in range(count)]
    ids = [torch.randint(97, (rows, 10), generator=generator) for _ in range(count)]
    return [{"input_ids": x, "labels": x.masked_fill(x % 5 == 0, -100)} for x in ids]


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that changes with every step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(name: str, mesh: str, optimizer: str, plan: Plan) -> dict[str, Any]:
    """Three steps with clipping and a learning-rate scheduler."""
    step = parallelize(
        model_of(name), Mesh.parse(mesh), optimizer=OPTIMIZERS[optimizer], clip_grad_norm=0.5, seed=3, precision="fp64",
        plan=replace(plan, buckets=8192),
    )  # fmt: skip
    scheduler = halved(step.optimizer)
    losses, norms = [], []
    for batch in batches_of(name):
        losses.append(step(step.shard(batch)))
        norms.append(float(step.metrics["grad_norm"]))
        scheduler.step()
    result = {"losses": losses, "norms": norms, "gradients": step.gradients(), "state": step.full_state_dict(), "pieces": step.state_dict()}
    step.close()
    return result


def rest(mesh: str) -> dict[str, Any]:
    """Everything of a step beside training."""
    where, model = Mesh.parse(mesh), model_of("gpt")
    ways, row = where["dp"], torch.distributed.get_rank() // where["tp"]
    first, second = batches_of("gpt", 2)
    step = parallelize(model, where, optimizer=OPTIMIZERS["SGD"], example=None)
    found: dict[str, Any] = {}

    def rows(batch: tuple[Tensor, Tensor], start: int = 0, stop: int | None = None) -> tuple[Tensor, ...]:
        return tuple(t[start:stop].chunk(ways)[row].contiguous() for t in batch)

    step(rows(first))
    compiled = len(step.reports)
    step(rows(second))
    found["compiled again"] = len(step.reports) - compiled
    found["evaluate"] = step.evaluate([rows(first), rows(second), rows(second, 0, 2 * ways)])
    compiled = len(step.reports)
    step.evaluate([rows(first), rows(second, 0, 2 * ways)])
    found["evaluate compiled again"] = len(step.reports) - compiled
    found["logits"] = step.forward(rows(first)[:1])
    found["state"] = step.full_state_dict()
    found["module"] = step.module().state_dict()
    shorter = tuple(t[:, :12].contiguous() for t in rows(first))
    compiled = len(step.reports)
    found["short"] = [step(shorter), step(shorter)]
    found["short reports"] = step.reports[compiled:]
    step.load_state_dict(found["state"])
    found["loaded"] = step.full_state_dict()
    other = parallelize(model_of("gpt", seed=1), where, optimizer=OPTIMIZERS["SGD"])
    other.load_state_dict(found["state"])  # before the first batch: kept until then
    found["other"] = other.evaluate([rows(first)])
    found["again"] = step.evaluate([rows(first)])
    other.close()
    found["after the other"] = step.evaluate([rows(first)])
    step.close()
    try:
        step(rows(first))
    except InputError as error:
        found["closed"] = error.what
    return found


def filled(module: nn.Module) -> None:
    """Weights that don't depend on how the module was made."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-0.1, 0.1 + k * 1e-3, p.numel(), dtype=p.dtype).view_as(p))


def ways_to_begin(mesh: str) -> dict[str, Any]:
    """A DeviceMesh, weights broadcast from rank 0, a model on meta, weights that differ."""
    where = Mesh.parse(mesh)
    batch = batches_of("gpt", 1)[0]
    rank, found = torch.distributed.get_rank(), {}
    names, sizes = zip(*where.axes, strict=True)
    device_mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    step = parallelize(model_of("gpt", seed=rank), device_mesh, init="broadcast")
    found["broadcast"] = step(step.shard(batch))
    step.close()
    with torch.device("meta"):
        model = gpt.build(dropout=0.2).double()
    step = parallelize(model, where, init=filled)
    found["meta"] = step(step.shard(batch))
    step.close()
    step = parallelize(model_of("gpt", seed=rank), where)
    try:
        step(step.shard(batch))
    except InputError as error:
        found["differ"] = error.what
    step.close()
    return found


def own_optimizer(mesh: str) -> dict[str, Any]:
    """Without an optimizer: ``.grad`` of the parts is written, and the user steps."""
    step = parallelize(model_of("gpt"), Mesh.parse(mesh), example=None, seed=3)
    batches, optimizer = batches_of("gpt"), None
    losses = []
    for batch in batches:
        losses.append(step(step.shard(batch)))
        optimizer = optimizer or torch.optim.SGD(step.parameters(), lr=0.3)
        optimizer.step()
    found = {"losses": losses, "state": step.full_state_dict()}
    step.close()
    return found


def other_rows(mesh: str) -> str:
    """Ranks of one data coordinate that pass other rows."""
    step = parallelize(model_of("gpt"), Mesh.parse(mesh))
    ids, labels = batches_of("gpt", 1)[0]
    try:
        step((ids + (torch.distributed.get_rank() == 1), labels))
    except InputError as error:
        return error.what
    finally:
        step.close()
    return ""
