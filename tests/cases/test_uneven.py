"""Dims that an axis doesn't divide: computed right, and what is kept whole for it is in the report with its reason and cost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import make_options
from autopar.errors import PlanError
from autopar.inspect import tables
from autopar.inspect.model import Inspection, inspect_model
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.uneven import Uneven
from autopar.step import Step
from models import moe
from tests.cases.run import SEQUENCE, Net, adamw, double, equal, near, plain, ranks

MESHES = ("dp=2", "tp=2", "tp=4")


def inspected(model: nn.Module, batch: Any, mesh: str, plan: Plan | None = None) -> Inspection:
    options = make_options(None, None, plan or Plan(), None, 0, "check", None, 0, "eager", ())
    return inspect_model(copy.deepcopy(model).double(), Mesh.parse(mesh), double(batch), options)


def uneven(model: nn.Module, batch: Any, mesh: str, plan: Plan | None = None) -> dict[tuple[str, int], Uneven]:
    """What the report lists by (first name, size); its text is in the tables, and nothing is on a mesh without tp."""
    found = inspected(model, batch, mesh, plan)
    rows = tables.uneven_rows(found.compiled, found.plan)
    assert all(str(r) in found.table() for r in rows) and [r["text"] for r in found.to_json()["uneven"]] == [str(r) for r in rows]
    for r in rows:
        assert r.size % r.ways and r.fits % r.ways == 0 and 0 < r.fits - r.size < r.ways
        assert f"{r.axis}={r.ways} doesn't divide {r.size}, {r.fits} would do" in str(r)
    shardings = {i.path: found.compiled.local.shardings[i.name] for i in found.compiled.local.inputs_of("param")}
    for r in rows:
        if r.kind == "parameter":
            assert all((not shardings[n].axes_of(a)) for n in r.names if r.instead is None for a in range(len(shardings[n].atoms)))
    return {(r.names[0] if r.kind == "parameter" else f"{r.kind} {r.names[0]}", r.size): r for r in rows}


class Block(nn.Module):
    """Attention of ``heads`` query and ``kv`` key heads, then an MLP; all before a norm."""

    def __init__(self, hidden: int, heads: int, kv: int, size: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, size
        self.norm, self.q = nn.LayerNorm(hidden), nn.Linear(hidden, heads * size)
        self.k, self.v, self.out = nn.Linear(hidden, kv * size), nn.Linear(hidden, kv * size), nn.Linear(heads * size, hidden)
        self.norm2, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.norm(x)
        q, k, v = (l(y).view(b, t, -1, self.size).transpose(1, 2) for l in (self.q, self.k, self.v))
        k, v = (z.repeat_interleave(self.heads // self.kv, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(
        self, vocab: int = 16, heads: int = 4, kv: int = 4, size: int = 4, hidden: int = 16, inner: int = 32, tied: bool = False,
        smooth: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.smooth = smooth
        self.tokens, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=not tied)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv, size, inner) for _ in range(2))
        if tied:
            self.head.weight = self.tokens.weight

    def logits(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=self.smooth)


def text(vocab: int = 16, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(vocab, (rows, length), generator=generator) for _ in range(2))
    labels[:, -2:] = -100
    labels[0, 0] = vocab - 1  # the last row of the table
    return ids, labels


def test_nothing_where_all_is_divided() -> None:
    for mesh in MESHES:
        assert uneven(Language(), text(), mesh) == {}
    assert "every dim that an axis would cut is divided by it" in inspected(Language(), text(), "tp=4").table()
    assert uneven(Language(vocab=17), text(), "dp=2") == {}  # over dp parameters are whole anyway


@pytest.mark.parametrize(("tied", "smooth"), [(False, 0.1), (True, 0.0)], ids=["untied", "tied"])
def test_odd_vocabulary(tied: bool, smooth: float) -> None:
    model, batch = Language(vocab=17, tied=tied, smooth=smooth), text(17)
    equal(model, batch, (*MESHES, "dp=2,tp=2"))
    for ways, fits in ((2, 18), (4, 20)):
        found = uneven(model, batch, f"tp={ways}")
        weight = found["tokens.weight", 17]
        whole, piece = 17 * 16 * 8, fits // ways * 16 * 8
        why = f"kept whole, tp={ways} doesn't divide 17, {fits} would do; {whole - piece:,} bytes more a rank"
        assert str(weight) == f"tokens.weight dim 0 (17): {why}"
        names = ("tokens.weight",) if tied else ("tokens.weight", "head.weight", "head.bias")
        assert {k for k in found if not k[0].startswith("products")} == {(n, 17) for n in names}
        share = found["products head", 17].share
        # the head's three products are whole, what the blocks have is split; attention's own products too
        head, block = 3 * 2 * 24 * 16 * 17, 2 * 3 * 2 * 24 * (4 * 16 * 16 + 2 * 16 * 32) / ways
        assert share < head / (head + block) and share > 0.8 * head / (head + block)


def test_the_next_size_that_fits_is_cut() -> None:
    for ways, fits in ((2, 18), (4, 20)):
        found = inspected(Language(vocab=fits), text(fits), f"tp={ways}")
        assert not tables.uneven_rows(found.compiled, found.plan)
        row = next(r for r in tables.parameter_rows(found.compiled) if r.path == "tokens.weight")
        assert row.sharding == f"[{fits}@tp, 16]"


@pytest.mark.parametrize("size", [3, 4])
def test_five_heads(size: int) -> None:
    model = Language(heads=5, kv=5, size=size)
    equal(model, text(), MESHES)
    for ways in (2, 4):
        found = uneven(model, text(), f"tp={ways}")
        for name in ("q", "k", "v"):
            row = found[f"blocks.0.{name}.weight", 5]
            assert row.names == tuple(f"blocks.{n}.{name}.weight" for n in range(2)) and row.atoms == (5, size) and row.dim == 0
            assert str(row).startswith(f"blocks.*.{name}.weight dim 0 (5 of 5·{size}): ")
        if size == 4:  # what lies inside of a head is cut, and attention is done whole
            assert str(found["blocks.0.out.weight", 5]).endswith("would do; 4 of the same dim is cut instead")
            assert found["products blocks.0", 5].names == ("blocks.0", "blocks.1")


def test_hidden_five() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.c(m.b(m.a(x).relu()).relu()).pow(2).mean(), a=nn.Linear(8, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3))
    x = double(torch.randn(4, 8))
    equal(model, x, MESHES)
    for ways in (2, 4):
        found = uneven(model, x, f"tp={ways}")
        assert ("b.weight", 5) in found and found["b.weight", 5].instead is None
        assert any(r.kind == "products" and "b" in r.names for r in found.values())
    pinned = Plan(shard={"b.weight": "dim0@tp"})
    with pytest.raises(PlanError, match=r"pin 'b.weight': dim 0 of parameter b.weight is \(5,\) and axis 'tp' has 2 ranks"):
        inspected(model, x, "tp=2", pinned)
    assert ("b.weight", 5) not in uneven(model, x, "tp=2", Plan(shard={"b.weight": "replicate"}))  # it is what was asked for


def test_seventeen_classes() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=nn.Linear(7, 17))
    batch = (double(torch.randn(8, 7)), torch.arange(8) * 2 + 2)
    equal(model, batch, MESHES, clip_grad_norm=0.05, optimizer=adamw)
    found = uneven(model, batch, "tp=2")
    why = "kept whole, tp=2 doesn't divide 17, 18 would do"
    assert {n for n, _ in found} == {"head.weight", "head.bias", "products head"}
    assert str(found["head.weight", 17]) == f"head.weight dim 0 (17): {why}; {8 * 7 * 8:,} bytes more a rank"
    assert str(found["products head", 17]).endswith("100.0% of a rank's products")
    # with an even dim before it the head is cut there whatever the classes are: nothing to report
    wide = Net(lambda m, x, y: F.cross_entropy(m.head(m.a(x).relu()), y), a=nn.Linear(7, 12), head=nn.Linear(12, 17))
    assert uneven(wide, batch, "tp=2") == {}


def test_one_key_head_for_four() -> None:
    """The keys of a head of 3 are whole on every rank, whose queries differ: their gradients are summed."""
    for size in (3, 4):
        model = Language(kv=1, size=size)
        equal(model, text(), MESHES)
        found = uneven(model, text(), "tp=4")
        compiled = inspected(model, text(), "tp=4").compiled
        shardings = {r.path: r.sharding for r in tables.parameter_rows(compiled)}
        assert shardings["blocks.0.q.weight"] == f"[(4@tp {size}), 16]"
        assert shardings["blocks.0.k.weight"] == ("[3, 16]" if size == 3 else "[4@tp, 16]")
        if size == 3:
            why = "kept whole, tp=4 doesn't divide 3, 4 would do"
            assert str(found["blocks.0.v.weight", 3]).startswith(f"blocks.*.v.weight dim 0 (3): {why}")
        else:
            assert found == {}


@pytest.mark.parametrize("size", [3, 4])
def test_two_key_heads_on_four_ranks(size: int) -> None:
    model = Language(kv=2, size=size)
    equal(model, text(), MESHES)
    assert uneven(model, text(), "tp=2") == {}
    row = uneven(model, text(), "tp=4")["blocks.0.k.weight", 2]
    assert row.atoms == (2, size) and row.fits == 4


def test_dims_smaller_than_the_axis() -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.b(m.a(x).tanh()).pow(2).mean(), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    x = double(torch.randn(4, 3))
    equal(model, x, MESHES)
    row = uneven(model, x, "tp=4")["a.weight", 3]
    assert row.fits == 4 and row.bytes == 2 * 3 * 8


def test_odd_sequence() -> None:
    batch = text(length=5)
    equal(Language(), batch, MESHES, (SEQUENCE,))
    assert uneven(Language(), batch, "tp=2") == {}
    found = uneven(Language(), batch, "tp=2", SEQUENCE)
    (row,) = found.values()
    assert (row.kind, row.size, row.fits) == ("activations", 5, 6) and row.bytes > 0
    assert str(row).startswith("activations in ") and "blocks.*.norm" in str(row)
    assert uneven(Language(), text(length=4), "tp=2", SEQUENCE) == {}


def test_odd_channels_and_groups() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.norm(m.a(x)).relu()
        return F.cross_entropy(m.head(m.b(h).relu().mean((2, 3))), y)

    model = Net(forward, a=nn.Conv2d(2, 9, 3, padding=1), norm=nn.GroupNorm(3, 9), b=nn.Conv2d(9, 5, 3, padding=1), head=nn.Linear(5, 3))
    batch = (double(torch.randn(4, 2, 4, 4)), torch.tensor([0, 1, 2, 2]))
    equal(model, batch, MESHES)
    for mesh in ("tp=2", "tp=4"):
        found = uneven(model, batch, mesh)
        assert {size for name, size in found if name == "a.weight"} <= {3, 9} and ("b.weight", 5) in found
        assert any(name == "a.weight" for name, _ in found)


@pytest.mark.parametrize("dispatch", ["dense", "sorted"])
def test_three_experts(dispatch: str) -> None:
    torch.manual_seed(0)
    config: dict[str, Any] = dict(experts=3, hidden=16, inner=15, vocab=16, layers=1, sequence=6, dispatch=dispatch)
    model, batch = moe.build(**config), moe.batch(4, torch.Generator().manual_seed(0), **config)
    equal(model, batch, MESHES)
    for mesh in ("tp=2", "tp=4"):
        assert {size for name, size in uneven(model, batch, mesh) if "experts" in name} & {3, 15}


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_of_few_elements(mesh: str, zero: int) -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return ((x * m.one + m.two.sum() + m.three.sum() * m.one).pow(2).mean() + m.none.sum()) * m.scalar

    sizes = dict(one=(1,), two=(2,), three=(3, 1), none=(0,), scalar=())
    model = Net(forward, **{n: nn.Parameter(torch.randn(s)) for n, s in sizes.items()})
    x = double(torch.randn(8, 3))
    equal(model, x, (mesh,), (Plan(zero=zero),), optimizer=adamw, clip_grad_norm=0.1)
    loss, gradients = plain(model, x)

    def saved(step: Step, rank: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        return step(step.shard(x)).clone(), step.gradients(), step.full_state_dict()

    for found, grads, state in ranks(mesh, model, saved, plan=Plan(zero=zero)):
        assert near(found, loss) and all(near(grads[n], g) for n, g in gradients.items())
        assert {n: tuple(t.shape) for n, t in state.items()} == sizes
        assert all(torch.equal(state[n], p.double()) for n, p in model.named_parameters())


class Labelled(Language):
    """Also gives what it takes for the label: never one of a padding."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.logits(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": loss, "best": logits.argmax(-1), "likely": logits.log_softmax(-1).amax(-1)}


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "tp=4"])
def test_argmax_norm_and_saved_state(mesh: str) -> None:
    batch = text(17)
    model = Labelled(vocab=17, heads=5, kv=5, size=3).double()
    with torch.no_grad():
        model.head.bias[:] = -5.0  # a padding, which has no bias, would be the best
        model.tokens.weight.mul_(0.01)
    by_hand = Labelled(vocab=17, heads=5, kv=5, size=3).double()
    by_hand.load_state_dict(model.state_dict())
    wanted = model(*batch)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01, weight_decay=0.1)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        by_hand(*batch)["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05))
        optimizer.step()

    def train(step: Step, rank: int) -> Any:
        rows = step.shard(batch)
        step.compile(rows)
        out = step.forward(rows)
        seen = [(step(rows), step.metrics["grad_norm"])[1] for _ in range(3)]
        assert ("head.weight dim 0 (17): kept whole" in step.explain()) == mesh.startswith("tp")
        return step.shard(wanted_rows), out, seen, step.full_state_dict()

    wanted_rows = {n: wanted[n].detach() for n in ("best", "likely")}
    for rows, out, seen, state in ranks(mesh, model, train, optimizer=adamw, clip_grad_norm=0.05, loss=lambda out, _: out["loss"]):
        assert torch.equal(out["best"], rows["best"]) and near(out["likely"], rows["likely"])
        assert all(near(torch.as_tensor(a), b) for a, b in zip(seen, norms, strict=True))
        final = by_hand.state_dict()
        assert state.keys() == final.keys() and all(state[n].shape == p.shape and near(state[n], p, 1e-9) for n, p in final.items())
