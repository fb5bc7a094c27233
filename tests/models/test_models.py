"""Every file of models/: the contract of build and batch, one step in float64, and the options of its config."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

MODELS = sorted((Path(__file__).parents[2] / "models").glob("*.py"))
OPTIONS = [
    ("gpt", {}),
    ("gpt", {"tied": True, "dropout": 0.1}),
    ("gpt", {"hidden": 64, "layers": 1, "sequence": 8}),
    ("llama", {}),
    ("llama", {"fused_gate_up": True, "native_gqa": True, "outputs": "dict"}),
    ("llama", {"kv_heads": 8}),
    ("encdec", {}),
    ("encdec", {"dropout": 0.1, "source": 6, "decoder": 1}),
    ("lstm", {}),
    ("lstm", {"kind": "gru", "dropout": 0.1}),
    ("lstm", {"kind": "rnn"}),
    ("lstm", {"kind": "lstm cells"}),
    ("lstm", {"kind": "gru cells", "layers": 1}),
    ("moe", {}),
    ("moe", {"dispatch": "sorted", "dropout": 0.1}),
    ("moe", {"chosen": 1, "experts": 8}),
    ("mlp", {}),
    ("mlp", {"bias": False}),
    ("resnet", {}),
    ("resnet", {"stem": 7, "pool": True, "stages": (2, 1)}),
    ("unet", {}),
    ("unet", {"upsample": "nearest", "levels": 1, "dropout": 0.1}),
    ("unet", {"upsample": "bilinear"}),
    ("vit", {}),
    ("vit", {"dropout": 0.1, "height": 8, "width": 8}),
]


def load(name: str) -> ModuleType:
    """As the command line does: a file by its path, outside any package."""
    path = next(path for path in MODELS if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"_model_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def double(batch: Any) -> Any:
    return tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)


def loss_of(file: ModuleType, model: nn.Module, batch: Any) -> Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    if hasattr(file, "loss"):
        return file.loss(output, batch)
    return output["loss"] if isinstance(output, dict) else output


def test_every_file_is_listed() -> None:
    assert {path.stem for path in MODELS} == {name for name, _ in OPTIONS}


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_step(name: str, options: dict[str, Any]) -> None:
    file = load(name)
    torch.manual_seed(0)
    model = file.build(**options).double()
    batch = double(file.batch(4, torch.Generator().manual_seed(0), **options))
    assert all(leaf.shape[0] == 4 for leaf in tree_leaves(batch))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(file, model, batch)
        assert loss.shape == () and loss.dtype == torch.float64 and loss.isfinite()
        loss.backward()
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), path
        optimizer.step()
        losses.append(loss.item())
    if not options.get("dropout"):
        assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("name", [path.stem for path in MODELS])
def test_batch_follows_its_generator(name: str) -> None:
    file = load(name)
    first, again, other = (tree_leaves(file.batch(4, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not all(torch.equal(x, y) for x, y in zip(first, other))


@pytest.mark.parametrize("name", [path.stem for path in MODELS])
def test_sizes_can_be_cut_in_four(name: str) -> None:
    for path, parameter in load(name).build().named_parameters():
        sizes = [size for size in parameter.shape[:2] if size not in (1, 3)]  # 1: a broadcast dim, 3: the channels of an image
        assert all(size % 4 == 0 for size in sizes), (path, parameter.shape)


@pytest.mark.parametrize("name", [path.stem for path in MODELS])
def test_presets_build_on_meta(name: str) -> None:
    file = load(name)
    with torch.device("meta"):
        for preset in file.PRESETS:
            assert all(parameter.is_meta for parameter in file.build(preset).parameters())


@pytest.mark.parametrize("name", ["encdec", "gpt", "llama", "lstm", "moe"])
def test_rows_have_unequal_label_counts(name: str) -> None:
    file = load(name)
    batch = file.batch(8, torch.Generator().manual_seed(0))
    *_, ids, labels = batch.values() if isinstance(batch, dict) else batch
    counts = (labels != file.IGNORE).sum(1)
    assert counts.min() >= 1 and len(set(counts.tolist())) > 3
    assert torch.where(labels[:, :-1] == file.IGNORE, ids[:, 1:], labels[:, :-1]).equal(ids[:, 1:])


def test_no_label_means_logits() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    assert load("gpt").build()(ids).shape == (2, 16, 256)
    assert load("llama").build()(ids).shape == (2, 16, 256)
    assert load("vit").build()(torch.zeros(2, 3, 12, 20)).shape == (2, 16)


def test_tie_is_one_parameter() -> None:
    model = load("gpt").build(tied=True)
    assert model.head.weight is model.tokens.weight


def test_fused_and_native_llama_compute_the_same() -> None:
    file = load("llama")
    plain, other = file.build().double(), file.build(fused_gate_up=True, native_gqa=True).double()
    state = plain.state_dict()
    for i in range(plain.config.layers):
        gate, up = (state.pop(f"blocks.{i}.mlp.{part}.weight") for part in ("gate", "up"))
        state[f"blocks.{i}.mlp.gate_up.weight"] = torch.cat((gate, up))
    other.load_state_dict(state)
    batch = file.batch(2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(**batch), other(**batch), rtol=1e-12, atol=0)


def test_sorted_and_dense_experts_compute_the_same() -> None:
    file = load("moe")
    torch.manual_seed(0)
    plain, other = file.build().double(), file.build(dispatch="sorted").double()
    other.load_state_dict(plain.state_dict())
    batch = file.batch(4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain(*batch), other(*batch), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.bfloat16()(*batch), other.bfloat16()(*batch), rtol=1e-2, atol=0)


def test_padding_of_a_source_is_not_looked_at() -> None:
    file = load("encdec")
    torch.manual_seed(0)
    model = file.build().double()
    batch = file.batch(4, torch.Generator().manual_seed(0))
    other = batch["source"].where(batch["kept"], 0)
    assert not torch.equal(other, batch["source"])
    torch.testing.assert_close(model(**batch), model(**{**batch, "source": other}), rtol=1e-12, atol=0)
