"""The shardings that are chosen at sizes where it matters, as text; nothing is run, the weights are on meta."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import Compiled, compile_program
from autopar.cost.live import kept_bytes
from autopar.inspect.tables import sent
from autopar.layout.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.rules import DEFAULT
from models import gpt, llama

SIZES: dict[str, dict[str, Any]] = {
    "gpt": dict(hidden=4096, layers=2, heads=32, vocab=32000, sequence=2048),
    "llama": dict(hidden=4096, layers=2, heads=32, kv_heads=8, mlp_hidden=14336, vocab=32000),
}


@cache
def compiled(name: str, mesh: str, sequence: bool = False, dropout: float = 0.0) -> Compiled:
    sizes = SIZES[name] | ({"dropout": dropout} if dropout else {})
    with torch.device("meta"):
        model = {"gpt": gpt, "llama": llama}[name].build(**sizes).to(torch.bfloat16)
        ids = torch.zeros(8, 2048, dtype=torch.long)
    program = capture(model, (ids, ids) if name == "gpt" else {"ids": ids, "labels": ids})
    program = dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    return compile_program(program, Mesh.parse(mesh), Plan(sequence=sequence), DEFAULT, {i.name: 0 for i in program.inputs_of("batch")})


def collectives(c: Compiled, axis: str) -> list[tuple[str, str, str, int]]:
    """(phase, kind, module, bytes) of the collectives of activations on an axis."""
    found = []
    for node in c.final.nodes:
        if node.op.startswith("comm.") and node.args[1] == (axis,) and not node.where.module.startswith("bucket"):
            found.append((node.phase, node.op.removeprefix("comm."), node.where.module, sent(c, node)))
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layout_as_text(name: str, sequence: bool, golden: Callable[[str, str], None]) -> None:
    c = compiled(name, "dp=2,tp=4", sequence)
    lines = [f"{i.path}: {c.local.global_types[i.name].dtype} {c.local.shardings[i.name]}" for i in c.local.inputs_of("param")]
    lines += [f"{phase} {kind} {module or '(loss)'} {size}" for phase, kind, module, size in collectives(c, "tp")]
    golden("\n".join(lines), f"layout_{name}{'_sequence' if sequence else ''}")


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_two_collectives_a_layer_and_phase(name: str) -> None:
    large = [c for c in collectives(compiled(name, "tp=4"), "tp") if c[3] > 2**20]
    layers = SIZES[name]["layers"]
    for phase in ("forward", "backward"):
        mine = [c for c in large if c[0] == phase]
        assert {kind for _, kind, _, _ in mine} == {"all_reduce"}
        assert len(mine) == 2 * layers + 1  # and the embedding, and the gradient of the head's input
    # one size: a hidden state. The loss sends a number a token: maximum, sum and picked label; nothing of the size of the logits
    assert len({size for _, _, _, size in large}) == 1
    assert all(size <= 4 * 8 * 2048 * 4 for _, _, _, size in collectives(compiled(name, "tp=4"), "tp") if size <= 2**20)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_column_then_row_and_vocabulary(name: str) -> None:
    c = compiled(name, "tp=4")
    shardings = {i.path: str(c.local.shardings[i.name]) for i in c.local.inputs_of("param")}
    assert shardings["tokens.weight"] == "[32000@tp, 4096]"
    assert shardings["head.weight"] == "[32000@tp, 4096]"
    if name == "gpt":
        assert shardings["blocks.0.attention.qkv.weight"] == "[(3 32@tp 128), 4096]"
        assert shardings["blocks.0.attention.out.weight"] == "[4096, (32@tp 128)]"
        assert shardings["blocks.0.mlp.up.weight"] == "[16384@tp, 4096]"
        assert shardings["blocks.0.mlp.down.weight"] == "[4096, 16384@tp]"
    else:
        assert shardings["blocks.0.attention.k.weight"] == "[(8@tp 128), 4096]"
        assert shardings["blocks.0.mlp.gate.weight"] == "[14336@tp, 4096]"


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sequence_moves_the_same_bytes_and_keeps_less(name: str) -> None:
    plain, split = compiled(name, "tp=4"), compiled(name, "tp=4", True)
    assert not [c for c in collectives(split, "tp") if c[1] == "all_reduce" and c[3] > 2**20]

    def total(c: Compiled) -> int:
        return sum(size for _, _, _, size in collectives(c, "tp") if size > 2**20)

    # a gather more: the gradient of the embedding, whose rows any rank may own
    one = max(size for _, kind, _, size in collectives(split, "tp") if kind == "all_gather")
    assert total(plain) <= total(split) + one and total(split) <= total(plain) + one
    assert kept_bytes(split.final) < 0.8 * kept_bytes(plain.final)


def test_sequence_splits_norms_and_dropouts() -> None:
    c = compiled("gpt", "tp=4", True, 0.1)
    for n, node in enumerate(c.split.nodes):
        if node.op in ("aten.native_layer_norm.default", "autopar.dropout") and node.phase == "forward":
            assert any(s.on("tp").kind == "shard" for s in c.layout.nodes[n][1]), f"{node.op} {node.where}"


def test_pins_hold() -> None:
    with torch.device("meta"):
        model = gpt.build(hidden=256, layers=2, heads=4, vocab=512, sequence=64)
        ids = torch.zeros(4, 64, dtype=torch.long)
    program = capture(model, (ids, ids))
    program = dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    dims = {i.name: 0 for i in program.inputs_of("batch")}
    pins = {"*.up.weight": "dim1@tp", "blocks.1.*.up.weight": "replicate", "*.qkv.weight": "dim0@tp"}
    c = compile_program(program, Mesh(tp=2), Plan(shard=pins), DEFAULT, dims)
    shardings = {i.path: str(c.local.shardings[i.name]) for i in c.local.inputs_of("param")}
    assert shardings["blocks.0.mlp.up.weight"] == "[1024, 256@tp]"
    assert shardings["blocks.1.mlp.up.weight"] == "[1024, 256]"
    assert shardings["blocks.0.attention.qkv.weight"] == "[(3 4@tp 64), 256]"


def context(name: str, mesh: str, sequence: int, **sizes: Any) -> tuple[Compiled, Counter[str]]:
    """A compilation for one row, and how often each kind of collective occurs on ``cp``."""
    with torch.device("meta"):
        model = {"gpt": gpt, "llama": llama}[name].build(**SIZES[name] | {"sequence": sequence} | sizes).to(torch.bfloat16)
        ids = torch.zeros(1, sequence, dtype=torch.long)
    program = capture(model, (ids, ids) if name == "gpt" else {"ids": ids, "labels": ids})
    program = dataclasses.replace(program, outputs=tuple(o for o in program.outputs if o.kind != "output"))
    c = compile_program(program, Mesh.parse(mesh), Plan(), DEFAULT, {i.name: 0 for i in program.inputs_of("batch")})
    return c, Counter(kind for _, kind, module, _ in collectives(c, "cp") if module)


def test_context_moves_heads_where_sequences_are_short() -> None:
    """Of fused q, k and v one all-to-all, one of what attention gives, and those of the gradients; parameters are whole, gradients sums."""
    c, kinds = context("gpt", "cp=4", 2048)
    assert kinds == {"all_to_all": 4 * SIZES["gpt"]["layers"]}
    assert all(not c.local.shardings[i.name].placements for i in c.local.inputs_of("param"))
    assert all(b.axes == b.partial == ("cp",) for b in c.final.buckets)
    hidden = [o for n in c.local.nodes for o in n.outs if o and n.op == "aten.native_layer_norm.default" and c.local.shardings[o].dims]
    assert hidden and all("2048@cp" in str(c.local.shardings[o]) for o in hidden)


def test_context_goes_around_a_ring_where_they_are_long() -> None:
    """Compute hides what is sent: keys and values seven times a layer and once more with their gradients, which come home in eight."""
    _, kinds = context("gpt", "cp=8", 65536)
    layers = SIZES["gpt"]["layers"]
    assert kinds == {"shift": (2 * 7 + 2 * 7 + 2 * 8) * layers, "mirror": 8 * layers}


def test_context_gathers_few_key_heads() -> None:
    _, kinds = context("llama", "cp=4", 2048, kv_heads=1)
    layers = SIZES["llama"]["layers"]
    assert kinds == {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
