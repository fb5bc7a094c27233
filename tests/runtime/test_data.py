"""Real text: the split by files, and batches that depend on seed and step alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.errors import InputError
from autopar.runtime.data import SKIPPED, ByteText


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files; file i is a line of its own number, many times."""
    for i in range(40):
        path = tmp_path / f"part{i % 3}" / f"file{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"value = {i:02}\n" * 50)
    for name in ("tests", "site-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("skipped\n" * 100)
    (tmp_path / "notes.txt").write_text("not source\n" * 100)
    return tmp_path


@pytest.fixture(scope="module")
def stdlib() -> ByteText:
    return ByteText(64)


def test_standard_library(stdlib: ByteText) -> None:
    sizes = {split: sum(path.stat().st_size for path in files) for split, files in stdlib.files.items()}
    assert sizes["train"] > 2_000_000 and sizes["held_out"] > 100_000
    assert 0.03 < sizes["held_out"] / sum(sizes.values()) < 0.25
    ids, _ = stdlib.batch(0, 8)
    assert ids.float().mean() < 128  # text, not noise


def test_split_is_by_files(folder: Path) -> None:
    files = ByteText(16, root=folder).files
    train, held_out = (set(files[split]) for split in ("train", "held_out"))
    assert train and held_out and not train & held_out
    assert len(train | held_out) == 40
    assert not any(SKIPPED & set(path.relative_to(folder).parts) for path in train | held_out)

    text = {path: path.read_bytes() for path in train | held_out}
    line = {path: content[: content.index(b"\n")] for path, content in text.items()}
    for split, own, others in (("train", train, held_out), ("held_out", held_out, train)):
        ids, _ = ByteText(20, split, root=folder).batch(0, 256)
        drawn = b"|".join(bytes(row.tolist()) for row in ids)
        assert any(line[path] in drawn for path in own)
        assert not any(line[path] in drawn for path in others)


def test_labels_are_the_next_bytes(stdlib: ByteText) -> None:
    ids, labels = stdlib.batch(3, 4)
    assert ids.shape == labels.shape == (4, 64)
    assert ids.dtype == labels.dtype == torch.int64 and ids.is_contiguous() and labels.is_contiguous()
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert 0 <= ids.min() and ids.max() < 256


def test_batches_depend_on_seed_and_step(stdlib: ByteText) -> None:
    state = torch.random.get_rng_state()
    first = stdlib.batch(1, 8, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    again, step, seed, smaller = stdlib.batch(1, 8, 2), stdlib.batch(2, 8, 2), stdlib.batch(1, 8, 3), stdlib.batch(1, 2, 2)
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert all(torch.equal(x[:2], y) for x, y in zip(first, smaller))
    assert not torch.equal(first[0], step[0]) and not torch.equal(first[0], seed[0])


def test_batches_are_the_same_in_another_process(stdlib: ByteText) -> None:
    code = "from autopar.runtime.data import ByteText; print(ByteText(64).batch(5, 2, 7)[0].tolist())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(stdlib.batch(5, 2, 7)[0].tolist())


def test_held_out_windows(folder: Path) -> None:
    data = ByteText(10, root=folder)
    text = b"".join(path.read_bytes() + b"\0" for path in data.files["held_out"])
    windows = [window for ids, _ in data.held_out(2) for window in ids.tolist()]
    assert len(windows) == (len(text) - 1) // 10 // 2 * 2
    some = [window for ids, labels in data.held_out(4, limit=11) for window in ids.tolist()]
    assert len(some) == 8
    starts = [i * ((len(text) - 1) // 10) // 8 * 10 for i in range(8)]
    assert some == [list(text[start : start + 10]) for start in starts]
    assert some == [window for ids, _ in data.held_out(4, limit=8) for window in ids.tolist()]


def test_held_out_windows_do_not_overlap(folder: Path) -> None:
    data = ByteText(10, root=folder)
    text = b"".join(path.read_bytes() + b"\0" for path in data.files["held_out"])
    whole = [byte for ids, _ in data.held_out(1) for byte in ids.flatten().tolist()]
    assert bytes(whole) == text[: len(whole)] and len(text) - len(whole) <= 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ByteText(16, "test"), "no split 'test'"),
        (lambda folder: ByteText(0), "empty"),
        (lambda folder: ByteText(16, root=folder / "none").batch(0, 1), "has 0 bytes"),
        (lambda folder: ByteText(10**6, root=folder).batch(0, 1), "a window takes 1000001"),
        (lambda folder: next(ByteText(16, root=folder).held_out(4, limit=3)), "no batch of 4"),
    ],
)
def test_errors(folder: Path, make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(folder)
