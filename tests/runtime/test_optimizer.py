"""Optimizers on flat parts against the same optimizer on whole parameters, the global norm against torch's, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import InputError, UnsupportedError, VerifyError
from autopar.layout.bucket import Bucket, Member, padded
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import shard, whole
from autopar.runtime.comm import Comm
from autopar.runtime.optimizer import LEFT_OUT, Prepared, attach, clip, norm_axes, prepare
from autopar.runtime.sim import run_simulated

F64 = torch.float64
#: dim0 of 1, 2 and 3, scalars, nothing, and a matrix.
SHAPES: dict[str, tuple[int, ...]] = {
    "one.weight": (1, 3),
    "one.bias": (1,),
    "two.weight": (2, 5),
    "two.bias": (2,),
    "three.weight": (3, 2, 2),
    "scale": (),
    "none.weight": (0, 4),
    "none.bias": (0,),
    "big.weight": (7, 6),
}
STEPS = 5

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam maximize": (torch.optim.Adam, {"maximize": True}),
    "Adam tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW no foreach": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2.0}),
}

Named = list[tuple[str, nn.Parameter]]


def by_ndim(kind: type[Optimizer], options: dict[str, Any], named: Named) -> Optimizer:
    """Two groups, weight decay for matrices only; Rprop knows none, so that its groups differ in the rate."""
    decay = {"lr": 0.02} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
    rest = {} if kind is torch.optim.Rprop else {"weight_decay": 0.0}
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    matrices, others = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    return kind([{"params": matrices, **decay}, {"params": others, **rest}], **options)  # type: ignore[call-arg]


def tensors(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=F64, generator=generator).to(dtype) for name, shape in shapes.items()}


def bucket(
    name: str, shapes: dict[str, tuple[int, ...]], mesh: Mesh, axes: tuple[str, ...], group: int = 0, dtype: torch.dtype = F64
) -> Bucket:
    members, offset = [], 0
    for path, shape in shapes.items():
        members.append(Member(path, offset, shape, whole(shape)))
        offset += members[-1].numel
    return Bucket(name, dtype, group, axes, axes, tuple(members), padded(offset, mesh.count(axes)))


def flat(of: Bucket, values: dict[str, Tensor]) -> Tensor:
    out = torch.zeros(of.numel, dtype=of.dtype)
    for m in of.members:
        out[m.offset : m.offset + m.numel] = values[m.path].reshape(-1)
    return out


def buckets_of(prepared: Prepared, shapes: dict[str, tuple[int, ...]], mesh: Mesh, dtype: torch.dtype = F64) -> list[Bucket]:
    """A bucket for each group; scalars and empty parameters of the second group have buckets of their own."""
    made = []
    for group in sorted(set(prepared.group_of.values())):
        mine = {n: s for n, s in shapes.items() if prepared.group_of[n] == group}
        for pick in (lambda s: s == (), lambda s: 0 in s, lambda s: s != () and 0 not in s):
            some = {n: s for n, s in mine.items() if pick(s)}
            if some:
                made.append(bucket(f"bucket{len(made)}", some, mesh, ("dp",), group, dtype))
    return made


def plain(factory: Callable[[Named], Optimizer], scheduler: Callable[[Optimizer], Any], dtype: torch.dtype) -> dict[str, Tensor]:
    params = {name: nn.Parameter(value) for name, value in tensors(SHAPES, 0, dtype).items()}
    optimizer = factory(list(params.items()))
    schedule = scheduler(optimizer)
    for step in range(STEPS):
        for name, grad in tensors(SHAPES, 1 + step, dtype).items():
            params[name].grad = grad
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in params.items()}


def parted(
    factory: Callable[[Named], Optimizer], scheduler: Callable[[Optimizer], Any], dtype: torch.dtype, owners: int, zero: int
) -> list[dict[str, Tensor]]:
    """Every rank's view of the parameters after the same steps on flat parts."""
    mesh = Mesh(dp=owners)

    def rank(comm: Comm) -> dict[str, Tensor]:
        prepared = prepare(factory, [(name, shape, dtype) for name, shape in SHAPES.items()])
        optimizer, groups = prepared.optimizer, list(prepared.optimizer.param_groups)
        schedule = scheduler(optimizer)  # wraps before there are parts
        buckets = buckets_of(prepared, SHAPES, mesh, dtype)

        def own(of: Bucket, values: dict[str, Tensor]) -> Tensor:
            part = of.part(mesh)
            whole_ = flat(of, values)
            return whole_ if zero == 0 else whole_[comm.rank * part : (comm.rank + 1) * part].clone()

        parts = [nn.Parameter(own(b, tensors(SHAPES, 0, dtype))) for b in buckets]
        attach(prepared, {g: [p for p, b in zip(parts, buckets) if b.group == g] for g in range(len(groups))})
        assert prepared.optimizer is optimizer and all(a is b for a, b in zip(groups, optimizer.param_groups))
        for step in range(STEPS):
            for part, b in zip(parts, buckets):
                part.grad = own(b, tensors(SHAPES, 1 + step, dtype))
            optimizer.step()
            schedule.step()
        out = {}
        for part, b in zip(parts, buckets):
            full = part.detach() if zero == 0 else comm.all_gather(part.detach(), b.axes).wait()
            for m in b.members:
                out[m.path] = full[m.offset : m.offset + m.numel].reshape(m.shape)
        return out

    return run_simulated(mesh, rank)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 3)),
    "from 0": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: step / 3),
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False),
    "OneCycleLR momentum": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
}


def near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.filterwarnings("error::UserWarning")  # of torch's schedulers: step order
@pytest.mark.parametrize("owners", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_whole_parameters(name: str, owners: int) -> None:
    factory = partial(by_ndim, *OPTIMIZERS[name])
    scheduler = SCHEDULERS["LambdaLR"]
    want = plain(factory, scheduler, F64)
    for got in parted(factory, scheduler, F64, owners, zero=1):
        near(got, want)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        *((name, scheduler) for name in ("SGD momentum", "AdamW", "AdamW fused") for scheduler in SCHEDULERS),
        *(("Adagrad", scheduler) for scheduler in SCHEDULERS if "momentum" not in scheduler),
    ],
)
def test_schedulers(name: str, scheduler: str) -> None:
    factory = partial(by_ndim, *OPTIMIZERS[name])
    want = plain(factory, SCHEDULERS[scheduler], F64)
    for got in parted(factory, SCHEDULERS[scheduler], F64, 3, zero=1):
        near(got, want)


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW fused", "RAdam"])
def test_whole_buckets_stay_equal_to_the_bit(name: str) -> None:
    factory = partial(by_ndim, *OPTIMIZERS[name])
    want = plain(factory, SCHEDULERS["OneCycleLR momentum"], F64)
    ranks = parted(factory, SCHEDULERS["OneCycleLR momentum"], F64, 3, zero=0)
    for got in ranks:
        near(got, want)
        assert all(torch.equal(got[path], ranks[0][path]) for path in got)


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "AdamW no foreach", "AdamW fused"])
def test_float32(name: str) -> None:
    factory = partial(by_ndim, *OPTIMIZERS[name])
    want = plain(factory, SCHEDULERS["LambdaLR"], torch.float32)
    for got in parted(factory, SCHEDULERS["LambdaLR"], torch.float32, 2, zero=1):
        near(got, want, 1e-6)


def test_factory_gets_named_parameters_once() -> None:
    calls: list[Named] = []

    def factory(named: Named) -> Optimizer:
        calls.append(named)
        return torch.optim.AdamW(named, lr=0.1)  # torch takes pairs, and keeps the names

    named = [("a", (2, 3), F64), ("b", (3,), torch.bfloat16), ("c", (), F64)]
    prepared = prepare(factory, named, frozen={"c"})
    assert len(calls) == 1
    assert [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in calls[0]] == [
        ("a", (2, 3), F64, True),
        ("b", (3,), torch.bfloat16, True),
        ("c", (), F64, False),
    ]
    assert prepared.group_of == {"a": 0, "b": 0, "c": 0}
    prepared.optimizer.step()  # nothing to do yet
    parts = [nn.Parameter(torch.ones(6, dtype=F64)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    attach(prepared, {0: parts})
    group = prepared.optimizer.param_groups[0]
    assert all(a is b for a, b in zip(group["params"], parts)) and len(group["param_names"]) == 2
    for part in parts:
        part.grad = torch.ones_like(part)
    prepared.optimizer.step()
    assert all((p < 1).all() for p in parts)
    assert prepared.optimizer.state_dict()["state"].keys() == {0, 1}


def test_left_out_parameters_have_no_group() -> None:
    prepared = prepare(lambda named: torch.optim.SGD([p for n, p in named if n != "b"], lr=1.0), [("a", (2,), F64), ("b", (2,), F64)])
    assert prepared.group_of == {"a": 0, "b": LEFT_OUT}
    a, b = nn.Parameter(torch.ones(2, dtype=F64)), nn.Parameter(torch.ones(2, dtype=F64))
    attach(prepared, {0: [a], LEFT_OUT: [b]})
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    prepared.optimizer.step()
    assert a.tolist() == [0, 0] and b.tolist() == [1, 1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_missing_gradients_and_empty_groups(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    prepared = prepare(partial(by_ndim, kind, options), [("w", (2, 2), F64), ("b", (2,), F64)])
    part, idle, empty = (nn.Parameter(torch.ones(n, dtype=F64)) for n in (3, 2, 0))
    attach(prepared, {0: [empty, idle, part]})  # group 1 has nothing on this rank
    for _ in range(2):
        part.grad, empty.grad = torch.ones_like(part), torch.ones_like(empty)
        prepared.optimizer.step()
    assert not part.eq(1).any() and idle.tolist() == [1, 1]
    attach(prepared, {})
    prepared.optimizer.step()
    only = nn.Parameter(torch.ones(0, dtype=F64))
    attach(prepared, {1: [only]})
    only.grad = torch.ones_like(only)
    prepared.optimizer.step()


def test_attach_again_drops_state() -> None:
    prepared = prepare(partial(torch.optim.Adagrad, initial_accumulator_value=0.5), [("w", (4,), F64)])
    for size in (4, 2):
        part = nn.Parameter(torch.ones(size, dtype=F64))
        attach(prepared, {0: [part]})
        assert list(prepared.optimizer.state) == [part]
        assert prepared.optimizer.state[part]["sum"].tolist() == [0.5] * size
        part.grad = torch.ones_like(part)
        prepared.optimizer.step()


def test_attach_refuses() -> None:
    prepared = prepare(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), [("w", (4,), F64)])
    with pytest.raises(VerifyError, match="has 1"):
        attach(prepared, {1: []})
    with pytest.raises(VerifyError, match=r"shape \[2, 2\]"):
        attach(prepared, {0: [nn.Parameter(torch.ones(2, 2))]})
    prepared.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(InputError, match="after it was built"):
        attach(prepared, {})


# -- which optimizers are taken


class Lion(Optimizer):
    """Elementwise, with an option that is no group option, and another rate name."""

    def __init__(self, params: Iterable[Any], rate: float, betas: tuple[float, float] = (0.9, 0.99), *, sharp: bool) -> None:
        self.sharp = sharp
        super().__init__(params, {"rate": rate, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    update = m.lerp(p.grad, 1 - one)
                    p.add_(update.sign() if self.sharp else update.tanh(), alpha=-group["rate"])
                    m.lerp_(p.grad, 1 - two)


class Custom(Optimizer):
    """SGD that does one more thing with a gradient, named by its class attribute."""

    change: Callable[[Any, dict[str, Any], Tensor, Tensor], Tensor]

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(type(self).change(self, group, p, p.grad), alpha=group["lr"])


class Normed(Custom):
    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g / g.norm()


class NormedIfLarge(Custom):
    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g / max(1.0, g.norm().item() / 100)


class NormedFrom128(Custom):
    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g / g.norm(dim=0) if g.ndim == 2 and g.shape[0] >= 128 else g


class NormedKernels(Custom):
    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g - g.mean((1, 2, 3), keepdim=True) if g.ndim == 4 else g


class GroupNormed(Custom):
    """One rank can't see its parts of the sum: only optimizers apart from each other show it."""

    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g / sum(q.grad.square().sum() for q in group["params"])


class Noisy(Custom):
    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g + 0 * torch.randn_like(g)


class Apart(Custom):
    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.all:
            if p.grad is not None:
                p.sub_(p.grad)


class Decayed(Custom):
    """Weight decay for matrices, decided in the step instead of by groups."""

    def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
        return g + 0.1 * p if p.ndim > 1 else g


NAMED = [("w", (5, 4), torch.float32), ("v", (3, 4), torch.bfloat16)]


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (torch.optim.Adafactor, "depends on other elements"),
        (torch.optim.LBFGS, "needs a closure"),
        (torch.optim.Muon, "2D matrix"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (Normed, "depends on other elements"),
        (partial(Normed, lr=0.0), "depends on other elements"),
        (partial(Normed, lr=1e-30), "depends on other elements"),
        (NormedIfLarge, "depends on other elements"),
        (NormedFrom128, "depends on other elements"),
        (NormedKernels, "depends on other elements"),
        (GroupNormed, "depends on other elements"),
        (Decayed, "depends on other elements or on the parameter's shape"),
        (Noisy, "draws random numbers"),
        (Apart, "elsewhere than in param_groups"),
        (partial(torch.optim.Adam, differentiable=True), "leaf Variable that requires grad"),  # in plain torch too
        (partial(torch.optim.Adam, capturable=True), "must be on supported devices"),  # in plain torch on the CPU too
    ],
)
def test_refusals(factory: Any, why: str) -> None:
    name = getattr(factory, "func", factory).__name__
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=why) as caught:
        prepare(factory, NAMED)
    assert caught.value.what == f"optimizer {name} can't update flat parts of parameters"
    assert torch.equal(before, torch.get_rng_state())


def test_each_group_is_tried() -> None:
    class Some(Custom):
        def change(self, group: dict[str, Any], p: Tensor, g: Tensor) -> Tensor:
            return g / g.norm() if group.get("normed") else g

    def factory(named: Named) -> Optimizer:
        return Some([{"params": [named[0][1]]}, {"params": [named[1][1]], "normed": True}])

    with pytest.raises(UnsupportedError, match="parameter group 1"):
        prepare(factory, NAMED)


def test_custom_elementwise_optimizer() -> None:
    def factory(named: Named) -> Optimizer:
        return Lion([p for _, p in named], 0.1, sharp=False)

    class Still:
        def step(self) -> None: ...

    want = plain(factory, lambda _: Still(), F64)
    for got in parted(factory, lambda _: Still(), F64, 3, zero=1):
        near(got, want)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "takes a factory, but is of type SGD"),
        (None, "takes a factory"),
        (lambda named: None, "no torch optimizer but a value of type NoneType"),
        (lambda named: torch.optim.SGD([torch.zeros(2, 3)], lr=0.1), r"shape \[2, 3\] that its factory was not given"),
        (lambda named: torch.optim.SGD(named, lr=-1.0), "failed: ValueError: Invalid learning rate"),
        (torch.optim.Muon, "failed: ValueError: Muon only supports 2D"),
    ],
)
def test_factories_that_are_wrong(factory: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        prepare(factory, [*NAMED, ("b", (3,), F64)])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_given_twice() -> None:
    with pytest.raises(InputError, match="'w' twice"):
        prepare(lambda named: torch.optim.SGD([named[0][1], named[0][1]], lr=0.1), NAMED)


# -- the global norm

REPLICATED = {"emb": (3, 2), "scale": (), "bias": (5,)}
CUT = {"heads": (4,), "matrix": (6, 4), "per_head": (4, 3)}  # halves of dim 0 over tp
MESHES = ["dp=2,tp=2", "tp=2,dp=2", "dp=2", "tp=2", "", "pp=1,dp=3,cp=2"]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("text", MESHES)
def test_clip_equals_torch(text: str, max_norm: float, zero: int) -> None:
    mesh = Mesh.parse(text)
    grads = tensors(REPLICATED | CUT, 7)
    params = {name: nn.Parameter(torch.zeros_like(g)) for name, g in grads.items()}
    for name, p in params.items():
        p.grad = grads[name].clone()
    want = torch.nn.utils.clip_grad_norm_(params.values(), max_norm)

    axes = norm_axes(mesh)
    rest = tuple(a for a in axes if a != "tp")
    half = {n: (s[0] // mesh["tp"], *s[1:]) for n, s in CUT.items()}
    buckets = [bucket("same", REPLICATED, mesh, axes), bucket("cut", half, mesh, rest)]
    if "tp" in axes:
        first = buckets[1].members[0]
        assert whole(CUT["heads"]).with_placement("tp", shard(0), mesh).local_shape(mesh) == first.shape

    def rank(comm: Comm) -> Tensor:
        at, n = comm.coords.get("tp", 0), mesh["tp"]
        local = grads | {name: grads[name].chunk(n)[at] for name in CUT}
        expected = {name: p.grad for name, p in params.items()}
        expected |= {name: expected[name].chunk(n)[at] for name in CUT}  # type: ignore[union-attr]
        held, right = [], []
        for b in buckets:
            part, index = b.part(mesh), mesh.index(comm.rank, b.axes)
            keep = slice(None) if zero == 0 else slice(index * part, (index + 1) * part)
            held.append(flat(b, local)[keep].clone())
            right.append(flat(b, expected)[keep])  # type: ignore[arg-type]
        norm = clip([*held, None], [*buckets, buckets[0]], None, comm, zero)
        again = clip(held, buckets, max_norm, comm, zero)
        assert torch.equal(norm, again) and norm.shape == () and norm.dtype == F64
        assert len(comm.take_records()) == (2 if mesh.size > 1 else 0)
        for got, wanted in zip(held, right):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        return norm

    norms = run_simulated(mesh, rank)
    assert all(torch.equal(n, norms[0]) for n in norms)
    torch.testing.assert_close(norms[0], want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clip_of_what_is_not_finite(bad: float) -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, bad, 2.0])
    want = torch.nn.utils.clip_grad_norm_([p], 1.0)
    mesh = Mesh(dp=3)
    b = bucket("b", {"p": (3,)}, mesh, ("dp",), dtype=torch.float32)
    grads = [torch.tensor([x]) for x in (1.0, bad, 2.0)]
    for norm in run_simulated(mesh, lambda comm: clip([grads[comm.rank]], [b], 1.0, comm, 1)):
        assert torch.equal(norm, want.double()) or (norm.isnan() and want.isnan())
    torch.testing.assert_close(torch.cat(grads), p.grad, equal_nan=True)


def test_clip_of_short_formats_and_of_nothing() -> None:
    mesh = Mesh(dp=2)
    b = bucket("b", {"p": (4,)}, mesh, ("dp",), dtype=torch.float16)
    empty = bucket("e", {"q": (0, 3)}, mesh, ("dp",))

    def rank(comm: Comm) -> tuple[float, float]:
        grads = [torch.full((2,), 49152.0, dtype=torch.float16), torch.zeros(0, dtype=F64)]  # the norm of two is beyond float16
        norm = clip(grads, [b, empty], 1000.0, comm, 1)
        assert clip([], [], 1.0, comm, 1).item() == 0.0
        return norm.item(), grads[0][0].item()

    assert run_simulated(mesh, rank) == [(pytest.approx(98304), 500.0)] * 2


def test_clip_refuses_other_sizes() -> None:
    mesh = Mesh(dp=2)
    b = bucket("b", {"p": (4,)}, mesh, ("dp",))
    with pytest.raises(VerifyError, match=r"the gradient of b has shape \[4\] at ZeRO level 1"):
        run_simulated(mesh, lambda comm: clip([torch.zeros(4, dtype=F64)], [b], 1.0, comm, 1))
    with pytest.raises(VerifyError, match="1 gradients for 0 buckets"):
        run_simulated(mesh, lambda comm: clip([None], [], 1.0, comm, 1))
