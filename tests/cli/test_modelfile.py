"""Model files, and how text becomes a model's batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.inspect.bench import regions_of_calls
from autopar.modelfile import literal, load, parse_overrides
from autopar.train import text_form
from models import gpt, llama, mlp, vit

ROOT = Path(__file__).parents[2]


def test_overrides() -> None:
    assert parse_overrides(["a=4", "b=1e-3", "c=True", "d=dict", "e=(1, 2)", "f=false"]) == {
        "a": 4, "b": 1e-3, "c": True, "d": "dict", "e": (1, 2), "f": False,
    }  # fmt: skip
    assert literal("") == ""
    with pytest.raises(InputError):
        parse_overrides(["=4"])


def test_load_calls_with_what_the_file_takes(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "import torch\ndef build(width=3):\n    return torch.nn.Linear(width, 1)\n"
        "def batch(size, generator):\n    return torch.randn(size, 3, generator=generator)\n"
    )
    file = load(path, None, {"width": 5})
    assert file.build(0).weight.shape == (1, 5) and file.batch(2, 0).shape == (2, 3) and file.loss is None
    assert torch.equal(file.batch(2, 1), file.batch(2, 1)) and torch.equal(file.build(3).weight, file.build(3).weight)
    assert file.build(0, meta=True).weight.is_meta
    with pytest.raises(InputError, match="takes no 'preset'"):
        load(path, "demo")
    assert load(ROOT / "models" / "mlp.py").loss is not None


class Shifts(nn.Module):
    """Takes labels as transformers do: those of the same place, shifted inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 4)


def test_text_form() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.arange(20).view(2, 10), torch.arange(1, 21).view(2, 10)
    form = text_form(gpt.build(), gpt.batch(4, generator))
    assert form is not None and form.shifted and form.sequence == 16
    assert form.fill(ids, labels)[0] is ids and form.fill(ids, labels)[1] is labels
    form = text_form(llama.build(), llama.batch(4, generator))
    assert form is not None and form.shifted and form.fill(ids, labels) == {"ids": ids, "labels": labels}
    x = torch.randint(300, (4, 10), generator=generator)
    form = text_form(Shifts(), {"attention_mask": torch.ones_like(x), "input_ids": x, "labels": x.masked_fill(x < 9, -100)})
    assert form is not None and not form.shifted
    filled = form.fill(ids, labels)
    assert filled["input_ids"] is ids and torch.equal(filled["labels"], ids) and bool(filled["attention_mask"].all())
    assert text_form(gpt.build(vocab=255), gpt.batch(4, generator, vocab=255)) is None
    assert text_form(vit.build(), vit.batch(4, generator)) is None
    assert text_form(mlp.build(), mlp.batch(4, generator)) is None
    assert text_form(Shifts(), (x, torch.randint(2, (4, 10), generator=generator))) is None


def test_regions_of_calls() -> None:
    flat = "def a_forward_1(x):\n    return x\ndef step(x):\n    y = a_forward_1(x)\n    z = other(y)\n    return a_forward_1(z)\n"
    assert regions_of_calls(flat, ["a_forward_1"]) == (0, 2, 0)
    loop = "def step(x):\n    y = a(x)\n    for mb in range(2):\n        y = a(b(y))\n    y = b(y)\n    return y\n"
    assert regions_of_calls(loop, ["a", "b"]) == (1, 4, 1)
