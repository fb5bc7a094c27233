"""Random numbers by global index: pieces, bits, distributions, replacements. Statistics run over 2^23 words."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import InputError, UnsupportedError
from autopar.runtime import random as R
from autopar.runtime.random import Piece

SITE = R.site("blocks.0.drop", "native_dropout", 0)
KEY = R.step_key(1, 2)
N = 1 << 23
GOLDEN_SITE = 2629154720892963816
GOLDEN_KEY = [8043282278396977780, -57654268626097952]
GOLDEN_WORDS = [829756906, 1341229216, 464114329]
MAX_Z = 4.9  # two-sided 1e-6 for one normal statistic: the thousands of statistics below are expected under it

DRAWS: dict[str, Callable[[Piece, tuple[int, ...]], Tensor]] = {
    "keep": lambda piece, shape: R.keep(KEY, SITE, piece, shape, 0.3),
    "uniform32": lambda piece, shape: R.uniform(KEY, SITE, piece, shape, torch.float32),
    "uniform64": lambda piece, shape: R.uniform(KEY, SITE, piece, shape, torch.float64),
    "uniform16": lambda piece, shape: R.uniform(KEY, SITE, piece, shape, torch.bfloat16),
    "normal32": lambda piece, shape: R.normal(KEY, SITE, piece, shape, torch.float32),
    "normal64": lambda piece, shape: R.normal(KEY, SITE, piece, shape, torch.float64),
    "randint": lambda piece, shape: R.randint(KEY, SITE, piece, shape, -5, 1000),
}


def words(key: Tensor = KEY, site: int = SITE, n: int = N, offset: int = 0, stride: int = 1, lane: int = 0) -> np.ndarray:
    """uint32[n]: the raw words at offset + i * stride."""
    states = [R._call_state(key, site, lane)]
    if n <= R._CPU_BLOCK:
        return R._words(states, offset, [(n, stride)])[0].numpy().view(np.uint32)
    out = np.empty(n, np.uint32)
    for begin, end, found in R._blocks(states, offset, [(n, stride)], R._CPU_BLOCK):
        out[begin:end] = found[0].numpy().view(np.uint32)
    return out


def reference_word(key: Tensor, site: int, index: int, lane: int = 0) -> int:
    """One word in plain Python integers: the specification that all tensor paths must meet."""
    m32, m64 = (1 << 32) - 1, (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
        return x ^ (x >> 31)

    a, b = (int(w) & m64 for w in key)
    state = (mix((mix(a ^ site) + b) & m64) + 0xD1B54A32D192ED03 * lane) & m64
    first = mix((mix(state) + 0x9E3779B97F4A7C15 * (index >> 32)) & m64)
    second = mix((first + 0x9E3779B97F4A7C15) & m64)
    start = x = ((index & m32) + (first & m32)) & m32
    x = ((x ^ (x >> 17)) * 0xED5AD4BB + (first >> 32)) & m32
    x = ((x ^ (x >> 11)) * 0xAC4C1B51 + (second & m32)) & m32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & m32
    return x ^ (x >> 14) ^ start


# ----------------------------------------------------------------------------------------------------------- pieces


def cut(shape: tuple[int, ...], cuts: list[tuple[int, int]]) -> tuple[Piece, tuple[slice, ...]]:
    whole = Piece.whole(shape)
    piece = Piece(tuple(e - b for b, e in cuts), tuple(b for b, _ in cuts), whole.strides)
    return piece, tuple(slice(b, e) for b, e in cuts)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("shape", [(7, 5, 11), (1, 13), (3, 1, 2, 9), (17,), ()])
def test_piece_of_whole_is_whole_of_piece(name: str, shape: tuple[int, ...]) -> None:
    whole = DRAWS[name](Piece.whole(shape), shape)
    assert tuple(whole.shape) == shape
    options = [[(0, s), (0, s // 2), (s // 2, s), (s // 3, s), (s, s)] for s in shape]
    for cuts in itertools.islice(itertools.product(*options), 0, None, 3):
        piece, slices = cut(shape, list(cuts))
        assert torch.equal(DRAWS[name](piece, piece.sizes), whole[slices])


def test_nested_pieces_permuted_atoms_and_merged_dims() -> None:
    whole = R.uniform(KEY, SITE, Piece.whole((6, 10, 8)), (6, 10, 8), torch.float32)
    # A piece of a piece adds starts.
    inner = R.uniform(KEY, SITE, Piece((2, 3, 4), (2 + 1, 5 + 1, 2), (80, 8, 1)), (2, 3, 4), torch.float32)
    assert torch.equal(inner, whole[2:5, 5:][1:3, 1:4, 2:6])
    # Atoms in another order: what a transposed tensor holds.
    turned = R.uniform(KEY, SITE, Piece((8, 6, 10), (0, 0, 0), (1, 80, 8)), (8, 6, 10), torch.float32)
    assert torch.equal(turned, whole.permute(2, 0, 1))
    # Dim 1 cut as two atoms (2 x 5) of which the inner is split, under a local shape that merges them.
    split = R.uniform(KEY, SITE, Piece((6, 2, 3, 8), (0, 0, 2, 0), (80, 40, 8, 1)), (6, 6, 8), torch.float32)
    assert torch.equal(split, whole.view(6, 2, 5, 8)[:, :, 2:].reshape(6, 6, 8))


@pytest.mark.parametrize("offset", [0, 2**31 - 3, 2**32 - 3, 2**40 + 12345, 2**62])
@pytest.mark.parametrize("stride", [1, 7, 2**31 - 1, 2**33 + 5])
def test_words_meet_the_specification_at_huge_indices(offset: int, stride: int) -> None:
    found = words(n=9, offset=offset, stride=stride, lane=1)
    assert [int(w) for w in found] == [reference_word(KEY, SITE, offset + i * stride, lane=1) for i in range(9)]


@pytest.mark.parametrize(
    ("offset", "atoms"),
    [
        (0, [(301, 1)]),
        (2**32 - 150, [(301, 1)]),  # a page ends within a block
        (2**32 - 7 * 5120, [(20, 5120), (64, 1)]),
        (2**33 - 1000, [(3, 2**31), (5, 17), (40, 1)]),
        (3, [(40, 1), (5, 977), (3, 40)]),
        (2**45, [(2, 2**40), (130, 3), (1, 1), (2, 1)]),
        (0, [(65, 64), (33, 1)]),
    ],
)
@pytest.mark.parametrize("block", [1, 13, 32, 64, 100])
def test_blocks_equal_one_expression(offset: int, atoms: list[tuple[int, int]], block: int) -> None:
    states = [R._call_state(KEY, SITE, lane) for lane in (0, 1)]
    expected = R._words(states, offset, atoms)
    got = [torch.zeros_like(w) for w in expected]
    end = 0
    for begin, stop, parts in R._blocks(states, offset, atoms, block):
        assert begin == end and stop - begin <= max(block, 1)
        end = stop
        for out, part in zip(got, parts, strict=True):
            out[begin:stop] = part
    assert end == len(expected[0])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    index = [offset + sum(c * s for c, (_, s) in zip(i, atoms, strict=True)) for i in itertools.product(*(range(n) for n, _ in atoms))]
    for j in range(0, len(index), 37):
        assert int(expected[0][j]) & 0xFFFFFFFF == reference_word(KEY, SITE, index[j])


def test_large_piece_takes_blocks_and_agrees() -> None:
    shape = (5, 3, 40001)
    for name in ("keep", "uniform64", "normal32", "randint"):
        whole = DRAWS[name](Piece.whole(shape), shape)
        piece, slices = cut(shape, [(1, 4), (0, 3), (7, 30000)])
        assert torch.equal(DRAWS[name](piece, piece.sizes), whole[slices])
    probs = torch.linspace(-0.1, 1.1, math.prod(shape)).reshape(shape)
    got = R.bernoulli(KEY, SITE, Piece.whole(shape), probs)
    assert torch.equal(got[1:4, :, 7:30000], R.bernoulli(KEY, SITE, piece, probs[1:4, :, 7:30000]))
    assert (got[probs <= 0] == 0).all() and (got[probs >= 1] == 1).all()


def test_start_may_be_a_tensor() -> None:
    for start in (0, 3, 2**33):
        number = R.normal(KEY, SITE, Piece((4, 6), (start, 1), (8, 1)), (4, 6), torch.float32)
        assert torch.equal(number, R.normal(KEY, SITE, Piece((4, 6), (torch.tensor(start), 1), (8, 1)), (4, 6), torch.float32))
    big = (3, 50000)
    expected = R.keep(KEY, SITE, Piece(big, (2, 0), (50000, 1)), big, 0.5)
    assert torch.equal(R.keep(KEY, SITE, Piece(big, (torch.tensor(2), 0), (50000, 1)), big, 0.5), expected)


def test_empty_and_scalar_pieces() -> None:
    for name, draw in DRAWS.items():
        assert draw(Piece.whole((0, 3)), (0, 3)).shape == (0, 3), name
        assert draw(Piece((2, 0), (1, 4), (4, 1)), (2, 0)).shape == (2, 0), name
        assert draw(Piece.whole(()), ()).dtype == draw(Piece.whole((0,)), (0,)).dtype
    assert R.bernoulli(KEY, SITE, Piece.whole((0,)), torch.empty(0)).shape == (0,)


# ------------------------------------------------------------------------------------------------------- keys, values


def test_site_is_stable_and_apart() -> None:
    assert SITE == R.site("blocks.0.drop", "native_dropout", 0) and 0 <= SITE < 1 << 63
    code = "from autopar.runtime.random import site; print(site('blocks.0.drop', 'native_dropout', 0))"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) == SITE
    names = [("a", "bc", 0), ("ab", "c", 0), ("a", "bc", 1), ("", "abc", 0), ("a", "b", 10), ("a", "b1", 0)]
    assert len({R.site(*n) for n in names}) == len(names)
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (11, 1), (1, 11), (-1, 0), (2**70, 0)]
    keys = [tuple(R.step_key(seed, step).tolist()) for seed, step in pairs]
    assert len(set(keys)) == len(keys)


def test_golden_values() -> None:
    """The numbers are part of a checkpoint's meaning: they must not change between versions."""
    assert R.site("m", "op", 0) == GOLDEN_SITE
    assert R.step_key(0, 0).tolist() == GOLDEN_KEY
    key = R.step_key(0, 0)
    assert [int(w) for w in words(key, 0, n=3)] == GOLDEN_WORDS == [reference_word(key, 0, i) for i in range(3)]


def test_dtypes_show_one_number() -> None:
    piece, shape = Piece.whole((4099,)), (4099,)
    wide = R.uniform(KEY, SITE, piece, shape, torch.float64)
    for dtype, bits in ((torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        got = R.uniform(KEY, SITE, piece, shape, dtype)
        assert got.dtype == dtype and torch.equal(got.double(), (wide * 2**bits).floor() / 2**bits)
    normal = R.normal(KEY, SITE, piece, shape, torch.float64)
    assert torch.equal(R.normal(KEY, SITE, piece, shape, torch.float32), normal.float())
    assert torch.equal(R.normal(KEY, SITE, piece, shape, torch.bfloat16), normal.float().bfloat16())
    # Both forms of dropout keep the same elements.
    keep = R.keep(KEY, SITE, piece, shape, 0.3)
    assert torch.equal(keep, R.bernoulli(KEY, SITE, piece, torch.full(shape, 1 - 0.3, dtype=torch.float64)).bool())


def test_keep_bounds() -> None:
    shape = (3, 1001)
    piece = Piece.whole(shape)
    assert R.keep(KEY, SITE, piece, shape, 0.0).all() and not R.keep(KEY, SITE, piece, shape, 1.0).any()
    assert R.keep(KEY, SITE, piece, shape, 0).dtype == torch.bool
    assert R._ceiling(0.0) == -(2**31) and R._ceiling(1.0) == 2**31 and R._ceiling(0.5) == 0


def test_normal_against_the_formula() -> None:
    a, b = words(n=50000).astype(np.float64), words(n=50000, lane=1)
    quarter = (b & 0x7FFFFFFF) / 2**31
    radius = np.sqrt(-2 * np.log((a + 1) / 2**32))
    expected = radius * np.sin(np.pi / 2 * quarter) * np.where(b >> 31, -1, 1)
    got = R.normal(KEY, SITE, Piece.whole((50000,)), (50000,), torch.float64).numpy()
    assert (np.abs(got - expected) * np.minimum(radius, 1)).max() < 3e-8
    # The ends of both words: u = 2^-32 and u = 1, angle 0 and the largest.
    ends = torch.tensor([0, -1, 1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for i, j in itertools.product(ends, ends):
        z = float(R._gauss(i.reshape(1), j.reshape(1)))
        q = (int(j) & 0x7FFFFFFF) / 2**31
        u = ((int(i) & 0xFFFFFFFF) + 1) / 2**32
        assert abs(abs(z) - math.sqrt(-2 * math.log(u)) * math.sin(math.pi / 2 * q)) < 3e-5


def test_randint_range() -> None:
    piece, shape = Piece.whole((60000,)), (60000,)
    got = R.randint(KEY, SITE, piece, shape, -3, 4)
    counts = torch.bincount(got + 3).double()
    assert len(counts) == 7 and float(((counts - 60000 / 7) ** 2 / (60000 / 7)).sum()) < 30
    assert R.randint(KEY, SITE, piece, shape, 5, 6, torch.int32).unique().tolist() == [5]
    high = R.randint(KEY, SITE, piece, shape, 0, 2**62)
    assert int(high.min()) >= 0 and float(high.double().mean()) / 2**61 == pytest.approx(1, abs=0.02)


def test_errors() -> None:
    piece = Piece.whole((4,))
    with pytest.raises(InputError, match="number"):
        R.uniform(KEY, SITE, piece, (5,), torch.float32)
    with pytest.raises(InputError, match="probability"):
        R.keep(KEY, SITE, piece, (4,), 1.5)
    with pytest.raises(InputError, match="key"):
        R.keep(torch.zeros(2), SITE, piece, (4,), 0.5)
    with pytest.raises(InputError, match="range"):
        R.randint(KEY, SITE, piece, (4,), 3, 3)
    with pytest.raises(UnsupportedError, match="int32"):
        R.uniform(KEY, SITE, piece, (4,), torch.int32)
    with pytest.raises(InputError, match="one size"):
        Piece((1,), (0, 0), (1,))
    with pytest.raises(InputError, match="negative"):
        Piece((1,), (-1,), (1,))


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_compiled_bits_and_one_compilation() -> None:
    near = Piece((5, 3, 37), (2, 1, 3), (400, 80, 2))
    far = Piece((2, 41), (2**20, 5), (2**40 + 1, 2**30 + 1))
    over = Piece((77,), (2**32 - 30,), (1,))

    def draw(key: Tensor, site: Tensor, start: Tensor, probs: Tensor) -> list[Tensor]:
        moving = Piece((6, 35), (start, 2), (40, 1))
        return [
            R.keep(key, site, near, near.sizes, 0.3),
            R.uniform(key, site, near, near.sizes, torch.bfloat16),
            R.uniform(key, site, far, far.sizes, torch.float64),
            R.normal(key, site, over, over.sizes, torch.float64),
            R.randint(key, site, over, over.sizes, -7, 2**40 + 3),
            R.bernoulli(key, site, moving, probs),
        ]

    torch.compiler.reset()
    compiled = torch.compile(draw, fullgraph=True)
    probs = torch.linspace(0, 1, 210).reshape(6, 35)
    sites = [torch.tensor(R.site("m", "op", call)) for call in range(3)]
    args = [(R.step_key(7, call), sites[call], torch.tensor((0, 9, 2**33)[call]), probs) for call in range(3)]
    compiled(*args[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for arg in args:
            for i, (got, expected) in enumerate(zip(compiled(*arg), draw(*arg), strict=True)):
                assert got.dtype == expected.dtype and torch.equal(got, expected), i


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_compiled_large_keep_equals_blocks() -> None:
    piece = Piece((3, 50001), (1, 7), (60000, 1))
    torch.compiler.reset()
    compiled = torch.compile(lambda key, site: R.keep(key, site, piece, (3, 50001), 0.1), fullgraph=True)
    assert torch.equal(compiled(KEY, torch.tensor(SITE)), R.keep(KEY, SITE, piece, (3, 50001), 0.1))


def test_site_as_tensor() -> None:
    for name in (R.uniform, R.normal):
        a = name(KEY, SITE, Piece.whole((9,)), (9,), torch.float32)
        assert torch.equal(a, name(KEY, torch.tensor(SITE), Piece.whole((9,)), (9,), torch.float32))


# ---------------------------------------------------------------------------------------------------------- statistics


def ones_z(bits: np.ndarray) -> float:
    """z of the number of ones among independent fair bits."""
    return (int(bits.sum(dtype=np.int64)) - len(bits) / 2) / (math.sqrt(len(bits)) / 2)


def chi_z(cells: np.ndarray, n_cells: int) -> float:
    """z of the chi-square of equal cell frequencies."""
    expected = len(cells) / n_cells
    chi = ((np.bincount(cells, minlength=n_cells) - expected) ** 2).sum() / expected
    return float((chi - (n_cells - 1)) / math.sqrt(2 * (n_cells - 1)))


def pair_zs(a: np.ndarray, b: np.ndarray) -> Iterator[float]:
    """Correlation of two streams as numbers and in some bits."""
    yield float(np.dot(a / 2**32 - 0.5, b / 2**32 - 0.5)) * 12 / math.sqrt(len(a))
    differ = a ^ b
    for bit in (31, 30, 24, 16, 8, 0):
        yield ones_z((differ >> np.uint32(bit)) & np.uint32(1))


def test_bits_are_balanced() -> None:
    for seed in range(2):
        w = words(R.step_key(seed, 0))
        assert max(abs(ones_z((w >> np.uint32(b)) & np.uint32(1))) for b in range(32)) < MAX_Z


def test_no_serial_correlation() -> None:
    w = words(R.step_key(3, 1))
    u = (w / 2**32 - 0.5).astype(np.float32)
    for lag in [*range(1, 65), *(1 << j for j in range(7, 22))]:
        assert abs(float(np.dot(u[:-lag].astype(np.float64), u[lag:])) * 12 / math.sqrt(N - lag)) < MAX_Z, lag
        if lag & (lag - 1) == 0:
            assert all(abs(z) < MAX_Z for z in pair_zs(w[:-lag], w[lag:])), lag


@pytest.mark.parametrize("shift", [0, 12, 22])
def test_equidistribution_in_two_and_three_dims(shift: int) -> None:
    w = words(R.step_key(4, 5)) << np.uint32(shift)
    top10 = (w >> np.uint32(22)).astype(np.int64)
    assert abs(chi_z(top10[0::2] * 1024 + top10[1::2], 1 << 20)) < MAX_Z
    top6 = (w >> np.uint32(26)).astype(np.int64)[: N // 3 * 3].reshape(-1, 3)
    assert abs(chi_z((top6[:, 0] * 64 + top6[:, 1]) * 64 + top6[:, 2], 1 << 18)) < MAX_Z


@pytest.mark.parametrize("stride", [2, 3, 64, 1000, 1 << 16, (1 << 20) + 1, 1 << 24, 1 << 32, 12345678901])
def test_strided_indices_are_as_good(stride: int) -> None:
    w = words(n=1 << 20, stride=stride)
    assert abs(chi_z((w >> np.uint32(20)).astype(np.int64), 4096)) < MAX_Z
    assert abs(chi_z((w & np.uint32(4095)).astype(np.int64), 4096)) < MAX_Z
    assert all(abs(z) < MAX_Z for z in pair_zs(w[1:], w[:-1]))


def test_streams_are_uncorrelated() -> None:
    n = 1 << 21
    key = R.step_key(5, 10)
    base = words(key, n=n)
    others = [words(R.step_key(5, 10 + d), n=n) for d in (1, 2, 1 << 20)] + [words(R.step_key(5 + d, 10), n=n) for d in (1, 1 << 31)]
    others += [words(R.step_key(10, 5), n=n), words(key.flip(0), n=n), words(key, n=n, lane=1)]
    others += [words(key, n=n, offset=o) for o in (1 << 21, 1 << 32, 1 << 33, 1 << 50)]
    others += [words(key, SITE ^ (1 << b), n=n) for b in range(0, 63, 2)]
    for i, other in enumerate(others):
        assert all(abs(z) < MAX_Z for z in pair_zs(base, other)), i


def test_masks_of_steps_are_uncorrelated() -> None:
    shape = (1 << 21,)
    masks = [R.keep(R.step_key(0, step), SITE, Piece.whole(shape), shape, 0.1).numpy() for step in range(6)]
    n, q = shape[0], 0.9
    for mask in masks:
        assert abs((mask.sum() - n * q) / math.sqrt(n * q * (1 - q))) < MAX_Z
    for a, b in itertools.combinations(masks, 2):
        both = q * q
        assert abs(((a & b).sum() - n * both) / math.sqrt(n * both * (1 - both))) < MAX_Z


def avalanche(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest |z| of any output bit's flips, over all pairs of streams that differ in one input bit."""
    return max(abs(ones_z(((a ^ b) >> np.uint32(o)) & np.uint32(1))) for a, b in pairs for o in range(32))


def test_avalanche_of_index_key_and_site() -> None:
    n = 1 << 18
    index = words(n=n)
    positions = np.arange(n)
    # Each pair once: index with the bit clear against index with the bit set.
    inside = ((index[(positions >> b) & 1 == 0], index[(positions >> b) & 1 == 1]) for b in range(18))
    assert avalanche(inside) < MAX_Z
    assert avalanche((index, words(n=n, offset=1 << b)) for b in range(18, 62)) < MAX_Z
    m = 1 << 16
    masks = [R._signed(1 << b, 64) for b in range(64)]
    flipped = [KEY ^ torch.tensor(pair) for mask in masks for pair in ((mask, 0), (0, mask))]
    assert avalanche((index[:m], words(key, n=m)) for key in flipped) < MAX_Z
    assert avalanche((index[:m], words(site=SITE ^ (1 << b), n=m)) for b in range(63)) < MAX_Z


def test_birthdays() -> None:
    for seed in range(2):
        w = np.sort(words(R.step_key(seed, 3)))
        expected = N**2 / 2 / 2**32 - N**3 / 6 / 2**64  # repeated words: a permutation would have none
        assert abs((int((np.diff(w) == 0).sum()) - expected) / math.sqrt(expected)) < MAX_Z
        # Marsaglia's spacings: 2048 years of 4096 birthdays in 2^32 days, about n^3 / 4 d equal spacings each.
        year = np.sort(words(R.step_key(seed, 4)).reshape(2048, 4096).astype(np.int64), 1)
        spacings = np.sort(np.diff(year, axis=1), 1)
        expected = 2048 * 4096**3 / 4 / 2**32
        assert abs((int((np.diff(spacings, axis=1) == 0).sum()) - expected) / math.sqrt(expected)) < MAX_Z


def test_normal_moments_and_tails() -> None:
    z = R.normal(R.step_key(2, 8), SITE, Piece.whole((N,)), (N,), torch.float64).numpy()
    for power, mean, var in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - mean) / math.sqrt(var / N) < MAX_Z, power
    for bound in (0.5, 1, 2, 3, 4):
        p = math.erfc(bound / math.sqrt(2))
        assert abs((int((np.abs(z) > bound).sum()) - N * p) / math.sqrt(N * p * (1 - p))) < MAX_Z, bound
    assert abs(float(np.dot(z[1:], z[:-1])) / math.sqrt(N)) < MAX_Z


# --------------------------------------------------------------------------------------------------------- replacements


class Replacing(TorchDispatchMode):
    """A reference mode: every random op by ours, one site per call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        replacement = R.REPLACEMENTS.get(str(func))
        if replacement is None:
            return func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        return replacement(*args, **(kwargs or {}), key=KEY, site=SITE)


def test_replacements_under_a_mode() -> None:
    shape = (4, 33)
    piece = Piece.whole(shape)
    u, z = R.uniform(KEY, SITE, piece, shape, torch.float32), R.normal(KEY, SITE, piece, shape, torch.float32)
    x, kept = torch.randn(shape), R.keep(KEY, SITE, piece, shape, 0.25)
    with Replacing() as mode:
        assert torch.equal(torch.rand(shape), u) and torch.equal(torch.rand_like(x), u) and torch.equal(torch.empty(shape).uniform_(), u)
        assert torch.equal(torch.randn(shape), z) and torch.equal(torch.randn_like(x), z) and torch.equal(torch.empty(shape).normal_(), z)
        assert torch.equal(torch.empty(shape).normal_(2, 3), z * 3 + 2) and torch.equal(torch.empty(shape).uniform_(-1, 1), u * 2 - 1)
        for dtype in (torch.float32, torch.int32):
            assert torch.equal(torch.randint(9, shape, dtype=dtype), R.randint(KEY, SITE, piece, shape, 0, 9, dtype))
        assert torch.equal(torch.randint(-2, 9, shape), R.randint(KEY, SITE, piece, shape, -2, 9))
        assert torch.equal(torch.randint_like(x, 9), R.randint(KEY, SITE, piece, shape, 0, 9, torch.float32))
        assert torch.equal(torch.randint_like(x, -1, 9), R.randint(KEY, SITE, piece, shape, -1, 9, torch.float32))
        assert torch.equal(torch.bernoulli(u), R.bernoulli(KEY, SITE, piece, u))
        assert torch.equal(torch.ops.aten.bernoulli.p(x, 0.75), kept.float())
        assert torch.equal(torch.empty(shape).bernoulli_(u), R.bernoulli(KEY, SITE, piece, u))
        # Both forms of dropout, and a transposed target of an in-place fill.
        assert torch.equal(torch.nn.functional.dropout(x, 0.25) != 0, kept)
        assert torch.equal(torch.native_dropout(x, 0.25, True)[1], kept)
        assert torch.equal(torch.empty(33, 4).t().bernoulli_(0.75), kept.float())
    assert len(mode.calls) == 19 and "aten.bernoulli_.float" in mode.calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_native_dropout_rounds_as_torch(dtype: torch.dtype) -> None:
    x = torch.randn(4096).to(dtype)
    theirs, mask = torch.native_dropout(x, 0.3, True)
    assert torch.equal(theirs, x * mask.to(dtype).mul(1 / (1 - 0.3)))
    ours, kept = R.REPLACEMENTS["aten.native_dropout.default"](x, 0.3, True, key=KEY, site=SITE)
    assert ours.dtype == dtype and kept.dtype == torch.bool
    assert torch.equal(ours, x * kept.to(dtype).mul(1 / (1 - 0.3)))
    for p, train in ((0.3, False), (0.0, True), (1.0, True)):
        theirs, mask = torch.native_dropout(x, p, train)
        ours, kept = R.REPLACEMENTS["aten.native_dropout.default"](x, p, train, key=KEY, site=SITE)
        assert torch.equal(theirs, ours) and torch.equal(mask, kept)


def test_replacement_of_a_piece_and_gradient() -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    out, mask = R.REPLACEMENTS["aten.native_dropout.default"](x, 0.5, True, key=KEY, site=SITE)
    part, _ = R.REPLACEMENTS["aten.native_dropout.default"](x[2:5], 0.5, True, key=KEY, site=SITE, piece=Piece((3, 8), (2, 0), (8, 1)))
    assert torch.equal(out[2:5], part)
    out.sum().backward()
    assert torch.equal(x.grad, mask * 2.0)


def test_unsplittable_ops_are_refused_by_name() -> None:
    x = torch.rand(4)
    draws: dict[str, Callable[[], object]] = {
        "multinomial": lambda: torch.multinomial(x, 2),
        "randperm": lambda: torch.randperm(4),
        "exponential_": lambda: x.exponential_(),
        "cauchy_": lambda: x.cauchy_(),
        "log_normal_": lambda: x.log_normal_(),
        "geometric_": lambda: x.geometric_(0.5),
        "random_": lambda: x.random_(),
        "poisson": lambda: torch.poisson(x),
        "normal": lambda: torch.normal(x, 1.0),
    }
    for name, draw in draws.items():
        with Replacing(), pytest.raises(UnsupportedError, match=name):
            draw()


def test_table_names_exist() -> None:
    for name in R.REPLACEMENTS:
        namespace, op, overload = name.split(".")
        assert namespace == "aten" and str(getattr(getattr(torch.ops.aten, op), overload)) == name
