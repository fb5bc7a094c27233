"""autopar beside other parallelisms, in one run: ``python benchmarks/peers.py`` (``--help`` lists the options).

Every contestant trains the same model from the same weights on the same batches with the same optimizer. All of them live in the same
two processes of one thread each and take turns, a block of steps at a time, so that whatever else the machine does hits them alike;
ratios are those of neighbouring blocks. Their losses are compared step by step: the run fails where one computes something else. Memory
and the first step are measured apart, each contestant alone in fresh processes.

What a contestant needs and doesn't find here (a package, a C++ compiler) leaves it out, and the run says why. ``--links 1gbit`` runs the
same processes on two emulated hosts (``hosts.sh``, needs root; without it that link is left out, with the
reason). ``--check-bytes`` compares the bytes that autopar says it sends with the counters of the hosts' network interfaces.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shares import shares
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
HOSTS = Path(__file__).resolve().with_name("hosts.sh")
sys.path.insert(0, str(ROOT))

#: the contestant that the losses and the first column of ratios are compared with.
BASE = "DDP"
#: compiled code is found by the function compiled, which all models here share: each contestant must get code of its own.
COMPILE: dict[str, Any] = {"isolate_recompiles": True}
#: what is wanted of autopar's eager step on a link, in medians: at most so many times its best peer's.
WANTED = {
    ("dp", "loopback"): 1.0, ("dp", "1gbit"): 0.95, ("tp", "loopback"): 0.8, ("tp", "1gbit"): 0.8, ("zero2", "1gbit"): 0.6,
    ("zero3", "1gbit"): 0.6,
}  # fmt: skip
#: relative difference of losses from which on two contestants compute different things.
TOLERANCE = 1e-5
#: share of the bytes by which autopar's count and the interface's may differ.
BYTES_TOLERANCE = 0.02
MIB = 2**20

Batch = tuple[Tensor, Tensor]


@dataclass
class Settings:
    """What a worker is told. ``share``: of a core, for each rank (0: as it comes), by what it writes to its one of ``files``."""

    names: list[str]
    model: str = "gpt"
    preset: str = "bench"
    batch: int = 8
    lr: float = 3e-4
    steps: int = 3
    blocks: int = 5
    timeout: float = 900.0
    check_bytes: bool = False
    share: float = 0.0
    files: list[int] = field(default_factory=list)


@dataclass
class Runner:
    """A contestant, ready to run.

    Attributes:
        step: one training step on a global batch; this rank's share of the loss (``mean_of_ranks``) or the loss itself.
        mean_of_ranks: the loss is the mean over ranks of what ``step`` returns.
        loss_at: otherwise it is what this rank returns.
        metrics: figures of the last step that the contestant keeps itself, by name.
        after: more of them, for which ranks talk to each other: asked once a block, while the clock stands.
    """

    step: Callable[[Batch], Tensor]
    mean_of_ranks: bool = False
    loss_at: int = 0
    metrics: Callable[[], dict[str, float]] = field(default=lambda: dict[str, float]())
    after: Callable[[], dict[str, float]] = field(default=lambda: dict[str, float]())


# -- contestants


def build(settings: Settings) -> nn.Module:
    """The model, from the same weights each time."""
    torch.manual_seed(0)
    return importlib.import_module(f"models.{settings.model}").build(settings.preset)


def batches(settings: Settings, count: int = 4) -> list[Batch]:
    """Global batches. Every label counts, so that DDP's mean of the ranks' means is the mean over the batch."""
    generator = torch.Generator().manual_seed(1)
    made = [importlib.import_module(f"models.{settings.model}").batch(settings.batch, generator, settings.preset) for _ in range(count)]
    return [(ids, ids.roll(-1, 1)) for ids, _ in made]


def rows(batch: Batch) -> Batch:
    """This rank's rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, labels = (t.tensor_split(world)[rank] for t in batch)
    return ids, labels


def torch_loop(model: nn.Module, settings: Settings, *, shard: bool, params: Any = None) -> Runner:
    """The loop that everyone writes: loss, backward, AdamW over lists of parameters."""
    optimizer = torch.optim.AdamW(params or model.parameters(), lr=settings.lr, foreach=True)

    def step(batch: Batch) -> Tensor:
        loss = model(*(rows(batch) if shard else batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Runner(step, mean_of_ranks=shard)


def plain(settings: Settings) -> Runner:
    """One process, the whole batch."""
    return torch_loop(build(settings), settings, shard=False)


def ddp(settings: Settings, compiled: bool = False) -> Runner:
    """torch DistributedDataParallel; gradients are views of its buckets, which saves it a copy."""
    model: nn.Module = torch.nn.parallel.DistributedDataParallel(build(settings), gradient_as_bucket_view=True)
    return torch_loop(torch.compile(model, **COMPILE) if compiled else model, settings, shard=True)  # type: ignore[arg-type]


def deepspeed(settings: Settings, compiled: bool = False, stage: int = 1) -> Runner:
    """DeepSpeed ZeRO in float32 with torch's AdamW and its own sizes of buckets; ``engine.compile`` is its own way to compile."""
    import deepspeed as ds

    model, world = build(settings), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, foreach=True)
    config = {
        "train_batch_size": settings.batch,
        "train_micro_batch_size_per_gpu": settings.batch // world,
        "zero_optimization": {"stage": stage} | ({"compute_grad_norm": False} if stage < 3 else {}),  # 3 always does
        "gradient_clipping": 0.0,  # else it clips to a norm of 1, which nobody else here does
        "steps_per_print": 10**9,
    }
    engine = ds.initialize(model=model, optimizer=optimizer, config=config)[0]
    if compiled:
        engine.compile(backend="inductor", compile_kwargs=COMPILE)

    def step(batch: Batch) -> Tensor:
        loss = engine(*rows(batch))
        engine.backward(loss)
        engine.step()  # forgets the gradients as well
        return loss.detach()

    return Runner(step, mean_of_ranks=True)


def fsdp2(settings: Settings, compiled: bool = False, again: bool = True, made: Callable[[Settings], nn.Module] = build) -> Runner:
    """torch ``fully_shard``, a group for each block. Compiled, each block is: its hooks, which talk, stay outside.

    ``again``: parameters are gathered again for the backward, as in ZeRO 3; else they are kept from the forward on, as in ZeRO 2.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = made(settings), init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                if compiled:
                    layer.compile()
                fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return torch_loop(model, settings, shard=True)


def autopar_step(settings: Settings, axis: str, backend: str = "eager", **plan: Any) -> Runner:
    """autopar over one axis, ZeRO-1 as by default."""
    import autopar

    mesh = autopar.Mesh([(axis, dist.get_world_size())])
    optimizer = partial(torch.optim.AdamW, lr=settings.lr, foreach=True)
    step = autopar.parallelize(build(settings), mesh, optimizer=optimizer, plan=autopar.Plan(**plan), backend=backend)

    def metrics() -> dict[str, float]:
        sent, exposed = step.metrics["comm_bytes"], step.metrics["exposed_comm_s"]
        return {"sent": float(sum(sent.values())), "exposed": sum(exposed.values())}

    return Runner(lambda batch: step(step.shard(batch)), metrics=metrics)


def dtensor(settings: Settings, sequence: bool, compiled: bool = False) -> Runner:
    """torch ``parallelize_module`` for ``models/gpt.py``, with vocabulary-parallel embedding and loss.

    The fused projection of q, k and v has no such plan: its rows are first put in order of ranks, and the attention takes its heads by the
    sizes that it finds.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    world = dist.get_world_size()
    model: Any = build(settings)
    for block in model.blocks:
        attention = block.attention
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            by_rank = parameter.data.unflatten(0, (3, world, -1)).transpose(0, 1)
            parameter.data = by_rank.reshape(parameter.shape).contiguous()
        attention.forward = partial(_attention, attention, attention.heads // world)
    between: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": tp.ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    layer: dict[str, Any] = {
        "attention.qkv": tp.ColwiseParallel(),
        "attention.out": tp.RowwiseParallel(output_layouts=between),
        "mlp.up": tp.ColwiseParallel(),
        "mlp.down": tp.RowwiseParallel(output_layouts=between),
    }
    if sequence:
        gather = partial(tp.PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"positions": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), "norm": tp.SequenceParallel()}
        layer |= {"norm1": tp.SequenceParallel(), "norm2": tp.SequenceParallel(), "attention": gather(), "mlp": gather()}
    plan |= {f"blocks.{n}.{name}": style for n in range(len(model.blocks)) for name, style in layer.items()}
    tp.parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (split, whole) if group]  # lists of both kinds at once are refused
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, foreach=True)
    forward = torch.compile(model, **COMPILE) if compiled else model

    def step(batch: Batch) -> Tensor:
        with tp.loss_parallel():
            logits = forward(batch[0])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return cast(DTensor, loss).full_tensor().detach()

    return Runner(step)


def _attention(self: Any, heads: int, x: Tensor) -> Tensor:
    """``models.gpt.Attention.forward`` on a rank's heads."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
    return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Contestant:
    """How one is made.

    Attributes:
        kind: what it splits, ``dp`` or ``tp``; it is compared with peers of its kind and form (eager or compiled). "" for one process.
        package: what must be installed for it.
    """

    make: Callable[..., Runner]
    kind: str = ""
    compiled: bool = False
    own: bool = False
    package: str = ""


CONTESTANTS = {
    "plain": Contestant(plain),
    "DDP": Contestant(ddp, "dp"),
    "DeepSpeed": Contestant(deepspeed, "dp", package="deepspeed"),
    "FSDP2": Contestant(fsdp2, "dp"),
    "autopar dp": Contestant(partial(autopar_step, axis="dp"), "dp", own=True),
    "DeepSpeed zero2": Contestant(partial(deepspeed, stage=2), "zero2", package="deepspeed"),
    "FSDP2 zero2": Contestant(partial(fsdp2, again=False), "zero2"),
    "autopar zero2": Contestant(partial(autopar_step, axis="dp", zero=2), "zero2", own=True),
    "DeepSpeed zero3": Contestant(partial(deepspeed, stage=3), "zero3", package="deepspeed"),
    "FSDP2 zero3": Contestant(fsdp2, "zero3"),
    "autopar zero3": Contestant(partial(autopar_step, axis="dp", zero=3), "zero3", own=True),
    "DTensor tp": Contestant(partial(dtensor, sequence=False), "tp"),
    "DTensor tp+seq": Contestant(partial(dtensor, sequence=True), "tp"),
    "autopar tp": Contestant(partial(autopar_step, axis="tp", sequence=False), "tp", own=True),
    "autopar tp+seq": Contestant(partial(autopar_step, axis="tp", sequence=True), "tp", own=True),
    "autopar tp x2": Contestant(partial(autopar_step, axis="tp", sequence=False, interleave=2), "tp", own=True),
    "autopar tp+seq x2": Contestant(partial(autopar_step, axis="tp", sequence=True, interleave=2), "tp", own=True),
    "autopar tp d2": Contestant(partial(autopar_step, axis="tp", sequence=False, decompose=2), "tp", own=True),
    "DDP compiled": Contestant(partial(ddp, compiled=True), "dp", True),
    "DeepSpeed compiled": Contestant(partial(deepspeed, compiled=True), "dp", True, package="deepspeed"),
    "FSDP2 compiled": Contestant(partial(fsdp2, compiled=True), "dp", True),
    "autopar dp compiled": Contestant(partial(autopar_step, axis="dp", backend="inductor"), "dp", True, True),
    "DTensor tp compiled": Contestant(partial(dtensor, sequence=False, compiled=True), "tp", True),
    "DTensor tp+seq compiled": Contestant(partial(dtensor, sequence=True, compiled=True), "tp", True),
    "autopar tp compiled": Contestant(partial(autopar_step, axis="tp", sequence=False, backend="inductor"), "tp", True, True),
    "autopar tp+seq compiled": Contestant(partial(autopar_step, axis="tp", sequence=True, backend="inductor"), "tp", True, True),
}


def why_not(names: list[str], model: str, contestants: Mapping[str, Contestant] = CONTESTANTS) -> dict[str, str]:
    """The reasons of those that can't run here, by name."""
    found: dict[str, str] = {}
    compiler = no_compiler() if any(contestants[name].compiled for name in names) else ""
    for name in names:
        contestant = contestants[name]
        if contestant.package and importlib.util.find_spec(contestant.package) is None:
            found[name] = f"package {contestant.package} is not installed (pip install -e '.[bench]')"
        elif contestant.compiled and compiler:
            found[name] = compiler
        elif name.startswith("DTensor") and model != "gpt":
            found[name] = f"its plan here is for models/gpt.py, not for {model}"
    return found


def no_compiler() -> str:
    """Why torch can't compile here, by compiling a line; "" if it can."""
    line = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(3))"
    tried = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=300)
    if tried.returncode == 0:
        return ""
    return f"torch.compile doesn't work here: {said(tried.stderr)}"


def said(text: str) -> str:
    """The last error in what a process printed, on one line; its last line if there is no error in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["unknown reason"]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt|Exit|Invalid\w+): ", line)]
    return (errors or lines)[-1][:300]


# -- what a rank does


def interface_bytes() -> int | None:
    """Bytes that this host's network interface has sent; None where all ranks share one."""
    path = Path("/sys/class/net/eth0/statistics/tx_bytes")
    emulated = os.environ.get("GLOO_SOCKET_IFNAME") == "eth0"
    return int(path.read_text()) if emulated and path.exists() else None


def settle(limit: float = 5.0) -> None:
    """Waits, at most ``limit`` seconds, until nothing is sent any more, so that no one's last transfers meet another's steps."""
    name = "eth0" if os.environ.get("GLOO_SOCKET_IFNAME") == "eth0" else "lo"
    path, last, quiet, end = Path(f"/sys/class/net/{name}/statistics/tx_bytes"), -1, 0, time.perf_counter() + limit
    while quiet < 3 and time.perf_counter() < end:
        time.sleep(0.02)
        now = int(path.read_text())
        last, quiet = now, quiet + 1 if now - last < 4096 and last >= 0 else 0


def peak_rss() -> float:
    """Largest resident memory of this process since the last ``forget_peak``, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Starts the peak anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def everyone(value: Any) -> list[Any]:
    """Every rank's value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def race(settings: Settings, contestants: Mapping[str, Contestant] = CONTESTANTS) -> dict[str, Any]:
    """Alternating blocks of steps of all contestants; the first block warms up. Times are those of the slowest rank."""
    data = batches(settings)
    here = [name for name in settings.names if name != "plain" or dist.get_rank() == 0]
    runners, first = {}, {}
    for name in settings.names:
        dist.barrier()
        begun = time.perf_counter()
        if name in here:
            runners[name] = contestants[name].make(settings)
        first[name] = time.perf_counter() - begun
    losses: dict[str, list[Tensor]] = {name: [] for name in settings.names}
    seconds: dict[str, list[float]] = {name: [] for name in settings.names}
    work: dict[str, list[float]] = {name: [] for name in settings.names}
    wire: dict[str, list[float]] = {name: [] for name in settings.names}
    own: dict[str, list[dict[str, float]]] = {name: [] for name in settings.names}
    for block in range(settings.blocks + 1):
        turn = block % len(settings.names)
        for name in settings.names[turn:] + settings.names[:turn]:
            dist.barrier()
            sent, start = interface_bytes(), time.perf_counter()
            worked, begun = time.process_time(), start
            if name in here:
                for n in range(settings.steps + 1):
                    if n == 1:  # what a step leaves for the next, such as gathers on their way, is there when the clock starts
                        worked, begun = time.process_time(), time.perf_counter()
                    losses[name].append(runners[name].step(data[(block * (settings.steps + 1) + n) % len(data)]))
                    if block == 0 and n == 0:
                        first[name] += time.perf_counter() - start
                    if block and n:
                        own[name].append(runners[name].metrics())
            took, worked = time.perf_counter() - begun, time.process_time() - worked
            dist.barrier()
            settle()
            dist.barrier()
            after = interface_bytes()
            if block and name in here:
                own[name].append(runners[name].after())
            if block:
                seconds[name].append(took / settings.steps)
                work[name].append(worked / settings.steps)
                if sent is not None and after is not None:
                    wire[name].append((after - sent) / (settings.steps + 1))
    peak = 0.0
    if len(settings.names) == 1:
        whole, name = peak_rss(), settings.names[0]
        forget_peak()
        dist.barrier()
        if name in here:
            for n in range(2):
                losses[name].append(runners[name].step(data[n]))
        peak = peak_rss()
    else:
        whole = 0.0
    mine = {
        "losses": {name: [float(loss) for loss in values] for name, values in losses.items()},
        "seconds": seconds, "work": work, "wire": wire, "own": own, "first": first, "peak": peak, "whole": whole,
    }  # fmt: skip
    ranks = everyone(mine)
    means = {name for name, runner in runners.items() if runner.mean_of_ranks}
    at = {name: runner.loss_at for name, runner in runners.items()}

    def loss(name: str) -> list[float]:
        told = [r["losses"][name] for r in ranks]
        return [sum(values) / len(values) for values in zip(*told)] if name in means else told[at.get(name, 0)]

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    def figures(name: str, rank: int) -> dict[str, float | None]:
        found = ranks[rank]["own"][name]
        told = {key: median([m[key] for m in found if key in m]) for m in found for key in m}
        told |= {key: median(ranks[rank][key][name]) for key in ("work", "wire")}
        return told | {"whole": max(ranks[rank]["whole"], ranks[rank]["peak"])}

    return {
        name: {
            "losses": loss(name),
            "seconds": [max(values) for values in zip(*(r["seconds"][name] for r in ranks))],
            "work": ranks[0]["work"][name],
            "first": max(r["first"][name] for r in ranks),
            "wire": figures(name, 0)["wire"],
            "sent": figures(name, 0).get("sent"),
            "exposed": figures(name, 0).get("exposed"),
            "ranks": [figures(name, rank) for rank in range(len(ranks))],
            "peak": max(r["peak"] for r in ranks[: 1 if name == "plain" else None]),
            "whole": max(max(r["whole"], r["peak"]) for r in ranks[: 1 if name == "plain" else None]),
        }
        for name in settings.names
    }


def count_bytes(settings: Settings) -> list[list[Any]]:
    """Collectives of large tensors: (ranks, kind, MiB of the whole tensor, bytes counted, bytes at the interface), of the worst rank."""
    from autopar import Mesh
    from autopar.runtime.comm import DistComm

    world = dist.get_world_size()
    comm = DistComm(Mesh(dp=world))
    comm.prepare([("dp",)])
    comm.all_reduce(torch.ones(1), ("dp",)).wait()
    comm.take_records()
    lines = []
    for size in (24, 64):
        whole = torch.ones(size * MIB // 4)
        part = torch.ones(whole.numel() // world)
        starts: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(comm.all_reduce, whole, ("dp",)),
            "reduce_scatter": partial(comm.reduce_scatter, whole, ("dp",)),
            "all_gather": partial(comm.all_gather, part, ("dp",)),
            "all_to_all": partial(comm.all_to_all, whole.view(world, -1), ("dp",), 0, 1),
        }
        for kind, start in starts.items():
            comm.barrier()
            time.sleep(0.2)  # what is on its way has left the interface
            before = interface_bytes()
            start().wait()
            comm.barrier()
            time.sleep(0.2)
            after = interface_bytes()
            assert before is not None and after is not None, "only on emulated hosts does each rank have an interface of its own"
            counted = sum(r.bytes for r in comm.take_records())
            told = everyone((counted, after - before))
            worst = max(told, key=lambda pair: abs(pair[1] / pair[0] - 1))
            lines.append([world, kind, size, *worst])
    comm.close()
    return lines


def worker(measure: Callable[[], Any], out: Path, files: Sequence[int] = ()) -> None:
    """One rank. Rank 0 writes what was found. ``files``: of ``Settings``."""
    torch.set_num_threads(1)
    if files:
        os.write(files[int(os.environ["RANK"])], b"0")
    # many models are compiled in these processes, and none of them may fall back to eager
    torch.compiler.config.recompile_limit, torch.compiler.config.fail_on_recompile_limit_hit = 64, True
    dist.init_process_group("gloo")
    found = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of several process groups don't always survive the interpreter's own end


# -- starting ranks


def hosts_missing() -> str:
    """Why hosts can't be emulated here; "" if they can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need iproute2: {', '.join(missing)} not found"
    tried = subprocess.run([str(HOSTS), "2", "1gbit", "true"], capture_output=True, text=True, timeout=60)
    return "" if tried.returncode == 0 else f"hosts can't be emulated here: {(tried.stderr.strip().splitlines() or ['unknown reason'])[-1]}"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(settings: Settings, link: str, ranks: int = 2, script: str = __file__) -> Any:
    """Runs the workers on this host or on emulated ones, and returns what they found. Raises RuntimeError with their last words.

    Args:
        script: what every rank runs, with ``--worker`` and ``--out``.
    """
    with tempfile.TemporaryDirectory() as folder, shares(ranks, settings.share) if settings.share else nullcontext([]) as files:
        out, log = Path(folder, "found.json"), Path(folder, "log")
        told = json.dumps(settings.__dict__ | {"files": files})
        command = [sys.executable, str(Path(script).resolve()), "--worker", told, "--out", str(out)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), "HOSTS_LOG": str(log)}
        if len(settings.names) == 1:  # a first step is one without what earlier runs have compiled
            env["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "compiled"))
        running: list[subprocess.Popen[bytes]] = []
        try:
            with open(f"{log}.0", "wb") as first:
                if link == "loopback":
                    for rank in range(ranks):
                        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                        with open(f"{log}.{rank}", "wb") as text:
                            own |= {"GLOO_SOCKET_IFNAME": "lo"}
                            running.append(subprocess.Popen(command, env=env | own, stdout=text, stderr=subprocess.STDOUT, pass_fds=files))
                else:
                    line = [str(HOSTS), str(ranks), link, *command]
                    running.append(subprocess.Popen(line, env=env, stdout=first, stderr=subprocess.STDOUT, pass_fds=files))
            codes = [process.wait(timeout=settings.timeout) for process in running]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(timeout=20)
                    except subprocess.TimeoutExpired:
                        process.kill()
        if any(codes) or not out.exists():
            last = "\n".join(f"rank {p.suffix[1:]}: ...{p.read_text(errors='replace')[-1500:]}" for p in sorted(Path(folder).glob("log.*")))
            why = f"no end within {settings.timeout:.0f} s" if codes == [-1] else f"exit status {codes}"
            raise RuntimeError(f"{link}: {why}\n{last}")
        return json.loads(out.read_text())


# -- tables


def check_losses(found: dict[str, Any], base: str) -> float:
    """The largest relative difference of any loss from the base's at the same step. Raises AssertionError over the tolerance."""
    worst = 0.0
    for name, result in found.items():
        pairs = list(zip(result["losses"], found[base]["losses"], strict=True))
        far = max(range(len(pairs)), key=lambda n: abs(pairs[n][0] / pairs[n][1] - 1))
        difference = abs(pairs[far][0] / pairs[far][1] - 1)
        assert difference < TOLERANCE, f"{name} computes something else than {base}: losses {pairs[far]} in step {far}"
        worst = max(worst, difference)
    return worst


def ratios(found: dict[str, Any], name: str, other: str) -> list[float]:
    """Seconds of one by those of another, block by block."""
    return [mine / theirs for mine, theirs in zip(found[name]["seconds"], found[other]["seconds"], strict=True)]


def peers(names: Iterable[str], name: str) -> list[str]:
    """Those that a contestant is compared with: of its kind and form, and not autopar's."""
    one = CONTESTANTS[name]
    others = {other: CONTESTANTS[other] for other in names if other != name}
    return [n for n, other in others.items() if one.kind and (other.kind, other.compiled) == (one.kind, one.compiled) and not other.own]


def best_peer(found: dict[str, Any], name: str) -> str | None:
    """The peer with the smallest median; None without one."""
    return min(peers(found, name), key=lambda n: statistics.median(found[n]["seconds"]), default=None)


def show(found: dict[str, Any], alone: dict[str, Any], base: str) -> str:
    """The table of one link."""

    def number(value: float | None, scale: float = 1.0, form: str = ".0f") -> str:
        return "-" if value is None else format(value * scale, form)

    lines = []
    for name, result in found.items():
        times, single, peer = result["seconds"], alone.get(name, {}), best_peer(found, name)
        by_base, by_peer = ratios(found, name, base), ratios(found, name, peer) if peer else None
        lines.append({
            "": name,
            "median ms": number(statistics.median(times), 1e3),
            "best ms": number(min(times), 1e3),
            f"× {base}": number(statistics.median(by_base), 1, ".2f"),
            "× best peer": number(statistics.median(by_peer) if by_peer else None, 1, ".2f"),
            "range": f"{min(by_peer):.2f}-{max(by_peer):.2f}" if by_peer else "-",
            "CPU ms": number(statistics.median(result["work"]), 1e3),
            "first step s": number(single.get("first"), 1, ".1f"),
            "steady RSS": number(single.get("peak")),
            "peak RSS": number(single.get("whole")),
            "sent": number(result["sent"], 1 / MIB, ".1f"),
            "interface": number(result["wire"], 1 / MIB, ".1f"),
            "exposed ms": number(result["exposed"], 1e3),
        })  # fmt: skip
    align = ["left", *["right"] * (len(lines[0]) - 1)]
    return tabulate(lines, "keys", tablefmt="github", disable_numparse=True, colalign=align)


def verdicts(found: dict[str, Any], alone: dict[str, Any], link: str) -> list[str]:
    """A line for each of autopar's contestants: step and memory (where that was measured) beside the best peer's, and what is wanted."""

    def wanted(value: float, limit: float | None) -> str:
        return (
            f"{value:.2f} ×" if limit is None else f"{value:.2f} × (wanted: at most {limit:.2f}, {'met' if value <= limit else 'missed'})"
        )

    lines = []
    for name in (n for n in found if CONTESTANTS[n].own):
        one, peer = CONTESTANTS[name], best_peer(found, name)
        if peer is None:
            lines.append(f"{name}: no peer of its kind and form ran")
            continue
        limit = None if one.compiled else WANTED.get((one.kind, link))
        line = f"{name}: step {wanted(statistics.median(ratios(found, name, peer)), limit)} {peer}'s"
        measured = [n for n in peers(found, name) if n in alone]
        if name in alone and measured:
            least = min(measured, key=lambda n: alone[n]["whole"])
            line += f"; peak memory {wanted(alone[name]['whole'] / alone[least]['whole'], None if one.compiled else 1.0)} {least}'s"
        lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="gpt", help="a file of models/ whose batch is (ids, labels)")
    parser.add_argument("--preset", default="bench")
    parser.add_argument("--batch", type=int, default=8, help="rows of the global batch")
    parser.add_argument("--steps-per-block", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each contestant; one more warms up")
    parser.add_argument("--links", default="loopback,1gbit,200mbit", help="loopback, or rates of emulated hosts' links")
    parser.add_argument("--only", help=f"contestants, of {', '.join(CONTESTANTS)}; default all")
    parser.add_argument("--no-alone", action="store_true", help="skip the runs that measure memory and the first step")
    parser.add_argument("--check-bytes", action="store_true", help="only compare counted bytes with those at the interfaces")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one link may take")
    parser.add_argument("--json", help="also write everything that was measured to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        told = Settings(**json.loads(args.worker))
        worker(partial(count_bytes if told.check_bytes else race, told), Path(args.out))
        return 0
    if args.check_bytes:
        return check_bytes(args.timeout)
    names = picked(parser, args.only, CONTESTANTS)
    left_out = why_not(names, args.model)
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}")
    names = [name for name in names if name not in left_out]
    if not names:
        print("no contestant is left")
        return 1
    settings = Settings(names, args.model, args.preset, args.batch, steps=args.steps_per_block, blocks=args.blocks, timeout=args.timeout)
    alone: dict[str, Any] = {}
    for name in [] if args.no_alone else list(names):
        try:
            alone |= run_ranks(Settings(**{**settings.__dict__, "names": [name], "steps": 1, "blocks": 0}), "loopback")
        except RuntimeError as e:
            if CONTESTANTS[name].own or not CONTESTANTS[name].kind:
                raise
            settings.names = names = [other for other in names if other != name]
            print(f"{name} is left out, it doesn't run here: {said(str(e))}", flush=True)
    base = BASE if BASE in names else names[0]
    what = f"models/{args.model}.py preset {args.preset}, float32, global batch {args.batch}"
    print(f"torch {torch.__version__}, {what}, 2 ranks of 1 thread;")
    print(f"{args.blocks} blocks of {args.steps_per_block} steps each, taking turns; CPU: seconds of all threads of rank 0, which other")
    print("processes of the machine disturb least; the first step includes compiling; memory in MiB per rank,")
    print("steady: in later steps; sent: MiB per rank and step by autopar's records, and as the network interface counts them;")
    print("best peer: the smallest median of those with the same kind of split and form (eager or compiled), autopar's not counted;")
    print("range: of the ratios to it.")
    measured = {}
    missing = hosts_missing() if any(link != "loopback" for link in args.links.split(",")) else ""
    for link in args.links.split(","):
        if link != "loopback" and missing:
            print(f"\n{link}: left out, {missing}")
            continue
        found = measured[link] = run_ranks(settings, link)
        worst = check_losses(found, base)
        print(f"\n{link}: losses agree within {worst:.0e} over {len(found[base]['losses'])} steps\n")
        print(show(found, alone, base))
        print("", *verdicts(found, alone, link), sep="\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"alone": alone, "links": measured}, indent=1))
    return 0


def picked(parser: argparse.ArgumentParser, only: str | None, table: Mapping[str, Any]) -> list[str]:
    """The names of a table that an option asks for; all without one. Ends the program where one isn't there."""
    names = [name.strip() for name in only.split(",")] if only else list(table)
    unknown = [name for name in names if name not in table]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(table)}")
    return names


def check_bytes(timeout: float) -> int:
    """Prints counted bytes beside those at the interfaces, on two and four hosts. 1 if they differ too much."""
    missing = hosts_missing()
    if missing:
        print(f"bytes are not checked: {missing}")
        return 0
    lines = []
    for ranks in (2, 4):
        for world, kind, size, counted, seen in run_ranks(Settings([], check_bytes=True, timeout=timeout), "1gbit", ranks):
            lines.append([world, kind, size, f"{counted / MIB:.2f}", f"{seen / MIB:.2f}", f"{(seen / counted - 1) * 100:+.2f} %"])
    headers = ["hosts", "collective", "MiB", "counted MiB", "interface MiB", "difference"]
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True))
    return int(any(abs(float(line[-1].split()[0])) > BYTES_TOLERANCE * 100 for line in lines))


if __name__ == "__main__":
    sys.exit(main())
