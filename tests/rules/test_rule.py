"""A user's own rules, the language of samples, and what errors say."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import RuleError
from autopar.ir.program import Node, Ref, TensorType
from autopar.layout.mesh import Mesh
from autopar.layout.sharding import Sharding, shard
from autopar.rules import DEFAULT, Local, rule
from autopar.rules.check import check, parse_sample
from autopar.rules.row import bind
from autopar.rules.rule import view_row
from autopar.rules.strategies import strategies


@pytest.mark.parametrize("op", ["aten::mm", "aten.mm", "aten.mm.default", "aten::mm.default", torch.ops.aten.mm.default])
def test_names_of_ops(op: object) -> None:
    assert rule(op, "m k, k n -> m n ; k: sum").op == "aten.mm.default"


@pytest.mark.parametrize("op", ["mm", "a.b.c.d", "aten::", ""])
def test_bad_names_are_refused(op: str) -> None:
    with pytest.raises(RuleError, match="not the name of an op"):
        rule(op, "* -> *")


@pytest.mark.parametrize(
    ("row", "linear", "message"),
    [
        ("m k, k n", "", "no '->'"),
        ("m -> m ; m: hole", "", "not 'factor: kind'"),
        ("m -> m", "first", "doesn't say which operands"),
    ],
)
def test_malformed_rules_are_refused(row: str, linear: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        rule("my::op", row, linear)


def test_a_factor_that_no_output_has_needs_a_kind() -> None:
    with pytest.raises(RuleError, match="factor k is in no output"):
        bind("m k, k n -> m n", [(4, 6), (6, 8)], [(4, 8)])


def test_own_rule_is_checked_right_wrong_and_timid() -> None:
    samples = ("f[4, 6]",)
    right = check(rule("aten.cumsum", "a b -> a b ; b: whole", "0", samples=("f[4, 6], 1",)))
    assert right.ok and right.tried > 5
    assert "claims hold" in str(right)
    wrong = check(rule("aten.cumsum", "a b -> a b", "0", samples=("f[4, 6], 1",)))
    assert any(f.claim.startswith("b cut") for f in wrong.wrong)
    timid = check(rule("aten.exp", "a b -> a b ; b: whole", samples=samples))
    assert [f.claim for f in timid.timid] == ["b is whole and could be plain"]
    assert check(rule("aten.neg", "* -> *", samples=samples)).timid[0].claim == "linear in [0]"


def test_own_op_of_a_library() -> None:
    with torch.library._scoped_library("autopar_test", "DEF") as lib:
        lib.define("rows(Tensor x, Tensor w) -> Tensor")
        lib.impl("rows", lambda x, w: x @ w, "CompositeExplicitAutograd")
        assert check(rule("autopar_test::rows", "* k, k n -> * n ; k: sum", "each", samples=("f[4, 2, 6], f[6, 2]",))).ok
        assert not check(rule("autopar_test::rows", "* k, k n -> * n ; k: max", "each", samples=("f[4, 2, 6], f[6, 2]",))).ok


def test_with_rules_wins_over_the_table() -> None:
    own = rule("aten.exp", "* -> * ", samples=("f[4]",))
    table = DEFAULT.with_rules([own])
    assert table["aten.exp.default"] is own
    assert DEFAULT["aten.exp.default"] is not own


def test_missing_rule_says_where_and_guesses() -> None:
    node = Node("my.op.default", (Ref("x"), Ref("y")), ("z",))
    types = {n: TensorType(torch.float32, (4, 6)) for n in "xyz"}
    with pytest.raises(RuleError) as info:
        DEFAULT.bind(node, types)
    assert 'autopar.rule("my.op.default", "*, * -> *")' in str(info.value)


def test_samples() -> None:
    node, values = parse_sample("my.op.default", "f[4, 6], [i9[2], None], u6[2, 4], b[], (1, -2), dtype=f64, k=0.5")
    assert node.args == (Ref("x0"), (Ref("x1"), None), Ref("x2"), Ref("x3"), (1, -2))
    assert node.kwargs == (("dtype", torch.float64), ("k", 0.5))
    assert [tuple(v.shape) for v in values.values()] == [(4, 6), (2,), (2, 4), ()]
    assert all(len(set(row.tolist())) == 4 for row in values["x2"])
    again = parse_sample("my.op.default", "f[4, 6], [i9[2], None], u6[2, 4], b[], (1, -2), dtype=f64, k=0.5")[1]
    assert all(torch.equal(values[n], again[n]) for n in values)
    for bad in ("f[4", "g[4]", "what"):
        with pytest.raises(RuleError):
            parse_sample("my.op.default", bad)


@pytest.mark.parametrize(
    ("source", "target", "row"),
    [
        ((4, 6), (24,), "f0=4 f1=6 -> (f0=4 f1=6)"),
        ((4, 6, 1), (2, 12), "(f0=2 f1=2) f2=6 1 -> f0=2 (f1=2 f2=6)"),
        ((6, 4), (4, 6), "w0=6 w1=4 -> w2=4 w3=6 ; w0: whole, w1: whole, w2: whole, w3: whole"),
        ((8, 3), (8, 3), "f0=8 f1=3 -> f0=8 f1=3"),
    ],
)
def test_view_rows(source: tuple[int, ...], target: tuple[int, ...], row: str) -> None:
    assert view_row(source, target) == row


def test_strategies_of_a_dim_that_another_axis_cut() -> None:
    row = bind("(a=4 b=6) -> a b", [(24,)], [(4, 6)])
    dims = [((4, 6),), ((4,), (6,))]
    left = [((2, 6),), ((2,), (6,))]
    assert {s.factor for s in strategies(row, dims, 4)} == {"", "a"}
    assert {s.factor for s in strategies(row, dims, 2, left)} == {"", "a", "b"}
    assert {s.factor for s in strategies(row, dims, 4, left)} == {""}


def test_starts_of_nested_axes() -> None:
    mesh = Mesh(dp=2, tp=3)
    sharding = Sharding(((12, 2), (4,))).with_placement("dp", shard(0), mesh).with_placement("tp", shard(0), mesh)
    local = Local(mesh, (sharding,), (sharding,))
    assert local.out_shape() == (4, 4)
    starts = local.atom_starts(sharding)
    for rank in range(6):
        coords = mesh.coords(rank)
        assert local.start(sharding, 0).at(coords) == 4 * rank
        assert tuple(s.at(coords) for s in starts) == sharding.starts(mesh, coords)
