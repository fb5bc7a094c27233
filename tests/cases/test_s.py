"""Tensor sharding rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from tests.cases.run import MB2, SEQUENCE, Net, equal, ranks, values


class Attention(nn.Module):
    """Heads and head size are constants in its views; the sequence is -1."""

    def __init__(self, kv: int = 4, form: str = "") -> None:
        super().__init__()
        self.kv, self.form = kv, form
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 4 * kv), nn.Linear(16, 4 * kv), nn.Linear(16, 16)
        slopes, j = torch.tensor([2.0 ** -(i + 1) for i in range(4)]), torch.arange(6.0)
        self.register_buffer("alibi", slopes.view(4, 1, 1) * (j[None, :] - j[:, None]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, groups = x.shape[0], 4 // self.kv
        q = self.q(x).view(b, -1, 4, 4).transpose(1, 2)
        k, v = (part(x).view(b, -1, self.kv, 4).transpose(1, 2) for part in (self.k, self.v))
        bias = mask
        if self.form == "interleave":
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        if self.form == "expand":
            k, v = (t[:, :, None].expand(b, self.kv, groups, -1, 4).reshape(b, 4, -1, 4) for t in (k, v))
        if self.form == "alibi":
            bias = self.alibi
        if self.form == "alibi inside":
            i = torch.arange(6)
            bias = (2.0 ** -(torch.arange(4, dtype=x.dtype) + 1)).view(4, 1, 1) * (i[None, :] - i[:, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=self.form == "gqa")
        return self.o(y.transpose(1, 2).reshape(b, -1, 16)).pow(2).mean()


BY_HEADS = Plan(shard={"q.weight": "dim0@tp", "o.weight": "dim1@tp"})


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=4"])
def test_s03_constants_in_views(mesh: str) -> None:
    torch.manual_seed(0)
    equal(Attention(), torch.randn(2, 6, 16), (mesh,), (None, BY_HEADS))


@pytest.mark.parametrize("form", ["interleave", "expand", "gqa"])
@pytest.mark.parametrize("kv", [1, 2])
def test_s04_fewer_kv_heads_than_ranks(form: str, kv: int) -> None:
    torch.manual_seed(0)
    equal(Attention(kv, form), torch.randn(2, 6, 16), ("tp=2", "tp=4"), (None, BY_HEADS))


@pytest.mark.parametrize("form", ["alibi", "alibi inside"])
def test_s05_slopes_of_each_head(form: str) -> None:
    torch.manual_seed(0)
    equal(Attention(form=form), torch.randn(2, 6, 16), ("tp=2", "dp=2,tp=2"), (None, BY_HEADS))


@pytest.mark.parametrize("rows", [True, False])
def test_s05_masks(rows: bool) -> None:
    torch.manual_seed(0)
    mask = (torch.rand(*((2, 1) if rows else ()), 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool)
    batch_dim = {"x": 0, "mask": 0 if rows else None}
    equal(Attention(), {"x": torch.randn(2, 6, 16), "mask": mask}, ("tp=2", "dp=2,tp=2"), (None, BY_HEADS), batch_dim=batch_dim)


@pytest.mark.parametrize("pad", [1, 5, -1])
def test_s06_padding_row_has_no_gradient(pad: int) -> None:
    torch.manual_seed(0)
    model = Net(lambda m, ids: (m.e(ids) * torch.arange(1, 5)).pow(2).sum(), e=nn.Embedding(6, 4, padding_idx=pad))
    ids, pin = torch.tensor([[0, 1, 4, 1], [5, 5, 2, 4]]), Plan(shard={"e.weight": "dim0@tp"})
    equal(model, ids, ("tp=2", "dp=2,tp=2"), (None, pin))
    for _, gradients in values("tp=2", model, ids, plan=pin):
        assert not gradients["e.weight"][pad].any() and gradients["e.weight"][4].all() and not gradients["e.weight"][3].any()
    assert not model.e.weight[pad].any()


def _vector(m: Any, x: Tensor) -> Tensor:
    return (x * m.w).pow(2).sum()


def _columns(m: Any, x: Tensor) -> Tensor:
    return F.embedding(x.long(), m.w).pow(2).sum()


@pytest.mark.parametrize(("forward", "shape", "pin"), [(_vector, (4,), "dim0@tp"), (_columns, (6, 4), "dim1@tp")])
def test_any_parameter_can_be_pinned(forward: Any, shape: tuple[int, ...], pin: str) -> None:
    torch.manual_seed(0)
    equal(Net(forward, w=nn.Parameter(torch.randn(shape))), torch.ones(2, 4), ("tp=2",), (Plan(shard={"w": pin}),))


def test_s08_bias_of_a_row_parallel_linear() -> None:
    model = Net(lambda m, x: m.l(x).sum(), l=nn.Linear(8, 4))
    nn.init.ones_(model.l.bias)
    pin = Plan(shard={"l.weight": "dim1@tp"})
    for loss, gradients in values("tp=2", model, torch.zeros(3, 8), plan=pin):
        assert loss.item() == 12.0 and torch.equal(gradients["l.bias"], torch.full((4,), 3.0, dtype=torch.float64))
    equal(model, torch.randn(3, 8), ("tp=2",), (pin,))


def test_s11_scalars_and_pending_sums() -> None:
    kinds = {"s + 5": 15.0, "5 - s": -5.0, "s / n": 5.0, "s + tensor": 15.0, "s * 2": 20.0, "s * s": 100.0}
    for kind, right in kinds.items():

        def forward(m: Any, x: Tensor, kind: str = kind) -> Tensor:
            s = (x * m.w).sum()
            return {"s + 5": s + 5, "5 - s": 5 - s, "s / n": s / 2, "s + tensor": s + torch.tensor(5), "s * 2": s * 2, "s * s": s * s}[kind]

        model = Net(forward, w=nn.Parameter(torch.ones(())))
        batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert [loss.item() for loss, _ in values("dp=2", model, batch)] == [right, right], kind
        equal(model, batch, ("dp=2", "tp=2"))


def test_s11_multiplier_is_fresh_in_every_call() -> None:
    model = Net(lambda m, x, k: (x * m.w).sum() * k, w=nn.Parameter(torch.ones((), dtype=torch.float64)))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    for found in ranks("dp=2", model, lambda step, _: [step(step.shard((x, k))).item() for k in (2, 3, 2)]):
        assert found == [20.0, 30.0, 20.0]


@pytest.mark.parametrize("kind", ["clamp_", "relu_", "masked_fill_", "dropout"])
def test_s12_in_place_on_a_pending_sum(kind: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.l(x)
        if kind == "clamp_":
            z.clamp_(max=5)
        elif kind == "relu_":
            F.relu_(z)
        elif kind == "masked_fill_":
            z.masked_fill_(x[:, :1] > 1, 2.0)
        else:
            F.dropout(z, 0.5, True, inplace=True)
        return z.sum()

    model, pin = Net(forward, l=nn.Linear(2, 1, bias=False)), Plan(shard={"l.weight": "dim1@tp"})
    with torch.no_grad():
        model.l.weight.copy_(torch.tensor([[3.0, 4.0]]))
    if kind == "clamp_":
        assert [loss.item() for loss, _ in values("tp=2", model, torch.ones(1, 2), plan=pin)] == [5.0, 5.0]
    equal(model, torch.randn(4, 2), ("tp=2", "dp=2,tp=2"), (pin,))


def test_s14_norm_weights_under_a_sharded_sequence() -> None:
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.c(m.n2((h := x + m.p) + m.b(m.a(m.n1(h)).relu()))).pow(2).mean(), p=nn.Parameter(torch.randn(6, 8)),
        n1=nn.LayerNorm(8), a=nn.Linear(8, 16), b=nn.Linear(16, 8), n2=nn.LayerNorm(8), c=nn.Linear(8, 8),
    )  # fmt: skip
    pin = Plan(sequence=True, shard={"a.weight": "dim0@tp", "b.weight": "dim1@tp"})
    equal(model, torch.randn(4, 6, 8), ("tp=2", "dp=2,tp=2"), (SEQUENCE, pin, Plan(sequence=True, microbatches=2)), steps=10)


@pytest.mark.parametrize(
    "axes", [{"dp": 1}, {"dp": 1, "tp": 1}, {"pp": 1, "dp": 1, "tp": 1}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], ids=str
)
def test_s17_axes_of_size_one(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    mesh = Mesh(**axes)
    model = Net(lambda m, x: m.b(m.n(m.a(x)).relu()).pow(2).mean(), a=nn.Linear(8, 16), n=nn.LayerNorm(16), b=nn.Linear(16, 8))
    equal(model, torch.randn(4, 6, 8), (str(mesh),), (None, MB2, SEQUENCE))


def test_s17_one_row_for_two_ranks() -> None:
    model = Net(lambda m, x: m.a(x).mean(), a=nn.Linear(4, 2))
    with pytest.raises(InputError, match="has 1 rows.*2 data ranks"):
        equal(model, torch.randn(1, 4), ("dp=2",))
    equal(model, torch.randn(1, 4), ("tp=2",))
