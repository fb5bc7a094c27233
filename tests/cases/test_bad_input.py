"""Bad input: one clear error, with the same text on every rank, before any tensor is sent; the next good call works."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import step as step_module
from autopar.api import make_options
from autopar.errors import AutoparError, CaptureError, InputError, LayoutError, PlanError, RuleError, UnsupportedError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.comm import Comm
from autopar.runtime.sim import run_simulated
from autopar.step import Step
from tests.cases.run import DEFAULTS, Net

IDS, LABELS = torch.arange(8), torch.arange(8).flip(0)


def lm() -> nn.Module:
    return Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)), y), e=nn.Embedding(16, 8), l=nn.Linear(8, 16))


def each(
    mesh: str, call: Callable[[Step, int], Any], model: Callable[[int], nn.Module] | None = None,
    options: Callable[[int], dict[str, Any]] | None = None, good: Any = (IDS, LABELS), first: bool = False,
) -> AutoparError:  # fmt: skip
    """The error that every rank raises in ``call``; a good step before it (if ``first``) and one after it work.

    Args:
        model, options: of a rank; what ranks differ in is not there in the good step's own run.
    """
    parsed = Mesh.parse(mesh)

    def rank(comm: Comm) -> tuple[AutoparError, list[float]]:
        chosen = make_options(**{**DEFAULTS, **(options(comm.rank) if options else {})})
        torch.manual_seed(0)
        step = Step(model(comm.rank) if model else lm(), parsed, comm, chosen)
        losses = [step(step.shard(good)).item()] if first else []
        with pytest.raises(AutoparError) as caught:
            call(step, comm.rank)
        if good is not None:
            losses.append(step(step.shard(good)).item())
        return caught.value, losses

    found = run_simulated(parsed, rank, timeout=60.0)
    assert len({(type(e), str(e)) for e, _ in found}) == 1, "\n\n".join(str(e) for e, _ in found)
    assert all(losses == found[0][1] for _, losses in found)
    return found[0][0]


def on(rank: int, change: Callable[[Any], Any]) -> Callable[[Step, int], Any]:
    """A step on the good batch, whose rows one rank (all: -1) has changed."""
    return lambda step, me: step(change(step.shard((IDS, LABELS))) if rank in (me, -1) else step.shard((IDS, LABELS)))


# -- batches


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("mesh", "ranks"), [("dp=2", 1), ("dp=2,tp=2", -1), ("tp=2", -1)])
@pytest.mark.parametrize("leaf", [0, 1])
def test_id_or_label_out_of_range(mesh: str, ranks: int, leaf: int, first: bool) -> None:
    """Found before the step, though only one rank has it and the table may be cut."""

    def wrong(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = list(rows)
        changed[leaf] = torch.where(torch.arange(len(rows[leaf])) == 1, 16, rows[leaf])
        return tuple(changed)

    error = each(mesh, on(ranks, wrong), first=first)
    assert isinstance(error, InputError) and f"batch input '{leaf}' holds 16, which is out of range" in error.what
    assert error.what.startswith("rank 1: ") == (ranks == 1)
    assert "test_bad_input.py" in error.where and ("16 rows: 0 to 15" in error.why if leaf == 0 else "0 to 15" in error.why)


def test_ignored_and_padded_labels_are_in_range() -> None:
    torch.manual_seed(0)

    def forward(m: Any, ids: Tensor, y: Tensor) -> Tensor:
        shifted = F.pad(y, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(m.l(m.e(ids)).flatten(0, 1), shifted.flatten())

    ids, y = torch.randint(16, (4, 6)), torch.randint(16, (4, 6))
    y[:, 0], y[1, 2] = 99, -100  # the first label of a row is never used

    def run(step: Step, rank: int) -> None:
        rows = step.shard((ids, y))
        step(rows)
        step((rows[0], rows[1].index_fill(1, torch.tensor([3]), 99)))

    made = lambda rank: Net(forward, e=nn.Embedding(16, 8), l=nn.Linear(8, 16))  # noqa: E731
    error = each("dp=2", run, made, good=(ids, y))
    assert "batch input '1' holds 99" in error.what and "the label -100 is ignored: 0 to 15" in error.why


INDEXED: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "gather": (lambda x, i: x.gather(1, i[:, None]), 0, 5),
    "index": (lambda x, i: x[torch.arange(len(i)), i], -6, 5),
    "index_select": (lambda x, i: x.T.index_select(0, i), 0, 5),
    "scatter": (lambda x, i: x.scatter(1, i[:, None], 1.0), 0, 5),
    "long": (lambda x, i: x.gather(1, i.to(torch.float64).long()[:, None]), 0, 5),
}


@pytest.mark.parametrize("kind", INDEXED)
def test_every_way_to_index(kind: str) -> None:
    function, low, high = INDEXED[kind]
    made = lambda rank: Net(lambda m, x, i: function(m.l(x), i).pow(2).mean(), l=nn.Linear(3, 6))  # noqa: E731
    x = torch.ones(4, 3)
    for wrong in (low - 1, high + 1):

        def call(step: Step, rank: int, wrong: int = wrong) -> Any:
            rows = step.shard((x, torch.tensor([0, wrong, 0, 0])))
            return step(rows)

        error = each("dp=2", call, made, good=(x, torch.tensor([low, high, 0, 1])))
        assert f"holds {wrong}, which is out of range" in error.what and f"{low} to {high}" in error.why


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: (rows[0].to("meta"), rows[1]), "is on meta"),
        (lambda rows: (rows[0].numpy(), rows[1]), "is a numpy.ndarray"),
        (lambda rows: (rows[0].to_sparse(), rows[1]), "is sparse"),
        (lambda rows: (rows[0].double().requires_grad_(), rows[1]), "requires grad"),
        (lambda rows: None, "holds no tensor"),
    ],
)
@pytest.mark.parametrize("ranks", [1, -1])
def test_leaf_that_is_no_rows(change: Callable[[Any], Any], text: str, ranks: int) -> None:
    error = each("dp=2", on(ranks, change), first=True)
    assert text in error.what and error.what.startswith("rank 1: ") == (ranks == 1)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_wrong_dtype(mesh: str) -> None:
    error = each(mesh, on(-1, lambda rows: (rows[0].double(), rows[1])))
    assert isinstance(error, CaptureError) and "test_bad_input.py" in error.where
    error = each(mesh, on(1, lambda rows: (rows[0].int(), rows[1])), first=True)
    assert "rank 1 has another batch shapes than rank 0" in error.what and "int32" in error.why


def test_not_a_number_is_no_error() -> None:
    model = Net(lambda m, x: m.l(x).mean(), l=nn.Linear(4, 2)).double()

    def rank(comm: Comm) -> tuple[float, float]:
        step = Step(copy.deepcopy(model), Mesh(dp=2), comm, make_options(**DEFAULTS))
        rows = step.shard(torch.ones(4, 4, dtype=torch.float64))
        return step(rows * torch.nan).item(), step(rows).item()

    for bad, good in run_simulated(Mesh(dp=2), rank):
        assert bad != bad and good == good


def test_microbatches_that_do_not_divide() -> None:
    error = each(
        "dp=2", lambda step, rank: step((IDS[:3], LABELS[:3])), options=lambda rank: {"plan": Plan(microbatches=2)},
        good=(IDS, LABELS),
    )  # fmt: skip
    assert "3 rows on this rank" in error.what


def test_calls_and_shapes_that_differ() -> None:
    assert "another call than rank 0" in each("dp=2", lambda s, r: (s.forward if r else s)(s.shard((IDS, LABELS))), first=True).what
    assert "another batch shapes" in each("dp=2", on(1, lambda rows: (rows[0][:, None], rows[1])), first=True).what
    assert "another structure of its batch" in each("dp=2", on(1, lambda rows: list(rows)), first=True).what


# -- models


def _branch(m: Any, x: Tensor) -> Tensor:
    return m.l(x).mean() if x.sum() > 0 else m.l(x).sum()


def _no_rule(m: Any, x: Tensor) -> Tensor:
    return m.l(torch.nextafter(x, x + 1)).mean()


@pytest.mark.parametrize(
    ("forward", "kind", "what"),
    [
        (_branch, CaptureError, "reads a tensor's value in Python"),
        (_no_rule, RuleError, ""),
        (lambda m, x: [m.l(x)], InputError, "returns no loss"),
        (lambda m, x: m.l(x), InputError, "not a scalar"),
        (lambda m, x: m.l(x).argmax(), InputError, "has dtype"),
        (lambda m, x: x.mean(), CaptureError, "doesn't depend on any trainable parameter"),
        (lambda m, x: m.l(x @ x).mean(), CaptureError, "raised RuntimeError while it was captured"),
    ],
)
def test_models_that_cannot_be_compiled(forward: Callable[..., Any], kind: type[AutoparError], what: str) -> None:
    x = torch.ones(4, 5, 4) if "RuntimeError" in what else torch.ones(4, 4, 4)
    error = each("dp=2", lambda s, r: s(s.shard(x)), lambda r: Net(forward, l=nn.Linear(4, 4)), good=None)
    assert isinstance(error, kind) and what in error.what and error.where


def test_a_rank_that_cannot_capture_alone() -> None:
    """The same parameters, but code that fails on one rank."""

    def model(rank: int) -> nn.Module:
        return Net(_branch if rank == 1 else lambda m, x: m.l(x).mean(), l=nn.Linear(4, 4))

    error = each("dp=2", lambda s, r: s(s.shard(torch.ones(4, 4))), model, good=None)
    assert error.what.startswith("rank 1: The model reads a tensor's value in Python")


# -- ranks that differ

DIFFER: dict[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    "seed": (lambda r: {"seed": r}, "seed", "1 against 0"),
    "plan": (lambda r: {"plan": Plan(zero=r)}, "plan", "zero: 1 against 0"),
    "clip": (lambda r: {"clip_grad_norm": 1.0 + r}, "clip_grad_norm", "2.0 against 1.0"),
    "precision": (lambda r: {"precision": ("fp32", "fp64")[r]}, "precision", "fp64 against fp32"),
    "optimizer": (
        lambda r: {"optimizer": (lambda n: torch.optim.SGD([p for _, p in n], lr=0.1, momentum=0.5 * r))},
        "optimizer",
        "momentum",
    ),
    "learning rate": (lambda r: {"optimizer": (lambda n: torch.optim.SGD([p for _, p in n], lr=0.1 + r))}, "learning rate", "1.1"),
}


@pytest.mark.parametrize("kind", DIFFER)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_options_that_differ(kind: str, mesh: str) -> None:
    options, name, why = DIFFER[kind]
    error = each(mesh, on(-1, lambda rows: rows), options=options, good=None)
    assert error.what == f"rank 1 has another {name} than rank 0" and why in error.why


def test_models_that_differ() -> None:
    def model(rank: int) -> nn.Module:
        return Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)), y), e=nn.Embedding(16, 8), l=nn.Linear(8, 16, bias=rank == 0))

    error = each("dp=2", on(-1, lambda rows: rows), model, good=None)
    assert error.what == "rank 1 has another model than rank 0" and "l.bias: none against torch.float32[16]" in error.why

    def weights(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        return Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)), y), e=nn.Embedding(16, 8), l=nn.Linear(8, 16))

    assert "rank 1 has other values of" in each("dp=2", on(-1, lambda rows: rows), weights, good=None).what

    def code(rank: int) -> nn.Module:
        return Net(lambda m, ids, y: F.cross_entropy(m.l(m.e(ids)) * (1 + rank), y), e=nn.Embedding(16, 8), l=nn.Linear(8, 16))

    assert "rank 1 has another program than rank 0" in each("dp=2", on(-1, lambda rows: rows), code, good=None).what


@pytest.mark.parametrize("what", ["torch", "autopar"])
def test_versions_that_differ(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def digest() -> str:
        calls.append(len(calls))
        return str(calls[-1])

    class Version(str):
        """Another text on every use."""

        def __reduce__(self) -> Any:
            return str, (f"2.13.{len(calls)}{calls.append(0) or ''}",)

    if what == "autopar":
        monkeypatch.setattr(step_module, "code_digest", digest)
    else:
        monkeypatch.setattr(torch, "__version__", Version("2.13"))
    error = each("dp=2", on(-1, lambda rows: rows), good=None)
    name = "torch" if what == "torch" else "version of autopar's code"
    assert error.what == f"rank 1 has another {name} than rank 0"


# -- meshes and pins


def test_meshes() -> None:
    with pytest.raises(LayoutError, match="data"):
        Mesh(data=2)
    with pytest.raises(UnsupportedError, match="mesh axis ep=2 is not supported yet"):
        autopar.parallelize(lm(), Mesh(ep=2))
    with pytest.raises(InputError, match="the mesh dp=2 has 2 ranks, but 1 process was launched"):
        autopar.parallelize(lm(), Mesh(dp=2))


@pytest.mark.parametrize(
    ("pins", "text"),
    [({"nothing.*": "dim0@tp"}, "nothing"), ({"l.weight": "dim7@tp"}, "no dim 7"), ({"l.weight": "dim0@xx"}, "xx"),
     ({"e.weight": "dim0@tp", "l.weight": "dim0@dp"}, "l.weight"), ({"l.weight": "sideways"}, "sideways")],
)  # fmt: skip
def test_pins_that_cannot_hold(pins: dict[str, str], text: str) -> None:
    error = each("dp=2,tp=2", on(-1, lambda rows: rows), options=lambda r: {"plan": Plan(shard=pins)}, good=None)
    assert isinstance(error, (PlanError, LayoutError, InputError)) and re.search(text, str(error))


def test_pins_that_contradict_each_other() -> None:
    def model(rank: int) -> nn.Module:
        made = Net(lambda m, x: m.b(m.a(x)).mean(), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        made.b.weight = made.a.weight
        return made

    pins = {"a.weight": "dim0@tp", "b.weight": "dim1@tp"}
    error = each("tp=2", lambda s, r: s(torch.ones(4, 4)), model, lambda r: {"plan": Plan(shard=pins)}, good=None)
    assert isinstance(error, PlanError) and "a.weight" in str(error) and "b.weight" in str(error)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_a_model_of_other_modules_or_in_another_mode(mesh: str) -> None:
    """Said as what it is."""

    def other(rank: int) -> nn.Module:
        return Net(lambda m, ids, y: F.cross_entropy(m.l(m.k(m.e(ids))), y), e=nn.Embedding(16, 8), k=nn.Linear(8, 8), l=nn.Linear(8, 16))

    error = each(mesh, on(5, _same), model=lambda rank: other(rank) if rank == 1 else lm(), good=None)
    assert error.what == "rank 1 has another model than rank 0" and "k.weight" in error.why, error
    error = each(mesh, on(5, _same), model=lambda rank: lm().train(rank == 0), good=None)
    assert error.what == "rank 1 has another training flag than rank 0" and error.why == "eval against train", error


def _same(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return rows
