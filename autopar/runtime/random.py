"""Random tensors that depend on (seed, step, site, global element index) and on nothing else.

torch's generators hand out numbers in the order of the calls and of the elements in memory, so a rank that holds a piece
of a tensor can't make its part of the whole tensor's numbers. Here every number is a function of where it stands: a rank
makes exactly its piece, whatever the mesh, the microbatches, the stage or the recomputation.

How a number comes about:

1. The 128-bit step key (`step_key`), the 63-bit site (`site`), the lane (a second word for one element) and the *page*
   (the upper 32 bits of the global index) are hashed to three 32-bit words. That happens once per page, not per element.
2. The lower 32 bits of the index pass three rounds of xor-shift and multiply, with one of the words added before each
   round, and what went in is xor-ed with what came out. Without that last step all the words of a page would be different
   (a permutation of 2^32 values), which independent words aren't.

Everything up to the last conversion is integer arithmetic modulo 2^32 or 2^64, and the conversions are exact or rounded
once. So the bits are the same in eager and in compiled code and don't depend on vector width, or on contraction of
multiplications and additions.

Not for cryptography. Sources of the published numbers: the shifts and multipliers of the rounds are `triple32` of Chris
Wellons' hash-prospector; the 64-bit hash is the finalizer of splitmix64 with David Stafford's "Mix13" constants.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from autopar.errors import InputError, UnsupportedError

__all__ = ["REPLACEMENTS", "Piece", "bernoulli", "keep", "normal", "randint", "site", "step_key", "uniform"]

# Elements in one block of the eager path: three int32 buffers of this length stay in a core's second-level cache
# (benchmarks/random_masks.py --blocks measures it). On an accelerator a block costs kernel launches, so it is large there.
_CPU_BLOCK: Final = 1 << 16
_DEVICE_BLOCK: Final = 1 << 26


def _signed(value: int, bits: int) -> int:
    """`value` modulo 2^bits as a signed integer of that many bits (torch takes no scalar above the signed maximum)."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15, 64)  # 2^64 / golden ratio, odd: the increment of splitmix64
_LANE: Final = _signed(0xD1B54A32D192ED03, 64)  # any other odd constant: keeps lanes away from pages
_MIX_A: Final = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_B: Final = _signed(0x94D049BB133111EB, 64)
# triple32: shift, multiplier, three times, and a last shift.
_ROUNDS: Final = ((17, _signed(0xED5AD4BB, 32)), (11, _signed(0xAC4C1B51, 32)), (15, _signed(0x31848BAB, 32)))
_LAST_SHIFT: Final = 14


@dataclass(frozen=True)
class Piece:
    """Which part of a global tensor this rank holds, in atoms (the finest dims that any reshape or sharding cuts).

    The global index (row-major in the *global* tensor, in elements, 64 bits) of the local element ``i`` is
    ``sum((starts[a] + i[a]) * strides[a])``. Atoms are listed in the local tensor's row-major order; their strides may
    come in any order.

    Args:
        sizes: local size of every atom.
        starts: where the local part starts in the global atom. An entry may be a 0-dim int64 tensor, so that compiled code
            can be shared by microbatches or ranks (slower: pages are then worked out per element in compiled code).
        strides: global stride of every atom, in elements.

    Raises:
        InputError: the three tuples differ in length, or an entry is negative.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.starts) == len(self.strides):
            raise InputError("A Piece needs one size, start and stride for every atom.", why=f"got {self}")
        if any(v < 0 for v in (*self.sizes, *self.strides, *(s for s in self.starts if isinstance(s, int)))):
            raise InputError("A Piece can't have negative sizes, starts or strides.", why=f"got {self}")

    @staticmethod
    def whole(shape: Sequence[int]) -> Piece:
        """The piece that is the whole tensor of `shape`."""
        strides = [1] * len(shape)
        for d in range(len(shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * shape[d + 1]
        return Piece(tuple(shape), (0,) * len(shape), tuple(strides))


# ---------------------------------------------------------------------------------------------------------------- keys


def site(path: str, op: str, call: int) -> int:
    """The 63-bit number of a random call: the same in every process, different for every (path, op, call).

    Args:
        path: module path, as ``blocks.0.attn.drop``.
        op: name of the op, as ``native_dropout``.
        call: which call of this op in this module, from 0.
    """
    # A length before each text keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(path)}:{path}{len(op)}:{op}{call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def step_key(seed: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """int64[2]: 128 bits hashed from `seed` and `step` (any Python ints). It is a tensor so that compiled code takes it as
    an input and is never recompiled for a new step."""
    digest = hashlib.blake2b(f"{seed},{step}".encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def _shifted(x: Tensor, n: int, bits: int) -> Tensor:
    """`x` shifted right by `n` with zeros coming in (torch's shift of a signed integer repeats the sign)."""
    return (x >> n) & ((1 << (bits - n)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """A permutation of int64 in which every input bit flips every output bit with probability 1/2."""
    x = (x ^ _shifted(x, 30, 64)) * _MIX_A
    x = (x ^ _shifted(x, 27, 64)) * _MIX_B
    return x ^ _shifted(x, 31, 64)


def _call_state(key: Tensor, site: int | Tensor, lane: int) -> Tensor:
    """int64 0-dim: the hash of key, site and lane."""
    if isinstance(site, Tensor):
        site = site.to(key.device)
    # Two hashes, one key word before each: swapping the words gives something else.
    return _mix64(_mix64(key[0] ^ site) + key[1]) + _signed(_LANE * lane, 64)


def _words_of_page(state: Tensor, page: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three int32 round words of a page; of the shape of `page` (an int gives 0-dim words)."""
    turn = _signed(_GOLDEN * page, 64) if isinstance(page, int) else page * _GOLDEN
    first = _mix64(_mix64(state) + turn)
    second = _mix64(first + _GOLDEN)
    return first.to(torch.int32), (first >> 32).to(torch.int32), second.to(torch.int32)


# -------------------------------------------------------------------------------------------------------------- indices


def _merged(piece: Piece) -> tuple[int | Tensor, list[tuple[int, int]]]:
    """(global index of local element 0, atoms (size, stride) in local order without those that run on into each other)."""
    offset: int | Tensor = 0
    for start, stride in zip(piece.starts, piece.strides, strict=True):
        offset = offset + start * stride
    atoms: list[tuple[int, int]] = []
    for size, stride in zip(piece.sizes, piece.strides, strict=True):
        if size == 1:
            continue
        if atoms and atoms[-1][1] == size * stride:
            atoms[-1] = (atoms[-1][0] * size, stride)
        else:
            atoms.append((size, stride))
    return offset, atoms


def _lattice(atoms: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Flat tensor of ``sum(i[a] * stride[a])`` over the atoms in row-major order."""
    index = torch.zeros((), dtype=dtype, device=device)
    for size, stride in atoms:
        index = index.unsqueeze(-1) + torch.arange(size, dtype=dtype, device=device) * stride
    return index.reshape(-1)


def _span(atoms: Sequence[tuple[int, int]]) -> int:
    """The largest value in the lattice of the atoms (none of which is empty)."""
    return sum((size - 1) * stride for size, stride in atoms)


# ---------------------------------------------------------------------------------------------------------------- words


def _rounds(x: Tensor, k1: Tensor, k2: Tensor) -> Tensor:
    """int32 words of the int32 inputs (index plus first word): the three rounds, one expression for a compiler to fuse."""
    start = x
    for (shift, factor), word in zip(_ROUNDS, (k1, k2, None), strict=True):
        x = (x ^ _shifted(x, shift, 32)) * factor
        if word is not None:
            x = x + word
    return x ^ _shifted(x, _LAST_SHIFT, 32) ^ start


def _rounds_in_place(x: Tensor, start: Tensor, spare: Tensor, k1: Tensor, k2: Tensor) -> None:
    """`_rounds` of `start` into `x`, without allocating: `start` and `spare` are buffers like `x`; `start` is kept."""
    source = start
    for (shift, factor), word in zip(_ROUNDS, (k1, k2, None), strict=True):
        torch.bitwise_right_shift(source, shift, out=spare)
        spare.bitwise_and_((1 << (32 - shift)) - 1)
        torch.bitwise_xor(source, spare, out=x)
        if word is None:
            x.mul_(factor)
        else:
            torch.add(word, x, alpha=factor, out=x)  # x * factor + word in one pass
        source = x
    torch.bitwise_right_shift(x, _LAST_SHIFT, out=spare)
    spare.bitwise_and_((1 << (32 - _LAST_SHIFT)) - 1)
    x.bitwise_xor_(spare).bitwise_xor_(start)


def _words(states: Sequence[Tensor], offset: int | Tensor, atoms: Sequence[tuple[int, int]]) -> list[Tensor]:
    """One flat int32 word per element and state, as one expression."""
    device = states[0].device
    if isinstance(offset, int) and offset + _span(atoms) < 1 << 31:
        index = _lattice(atoms, device, torch.int32) + offset
        pages: int | Tensor = 0
    else:
        wide = _lattice(atoms, device, torch.int64) + (offset.to(device) if isinstance(offset, Tensor) else offset)
        one_page = isinstance(offset, int) and offset >> 32 == (offset + _span(atoms)) >> 32
        pages = offset >> 32 if one_page and isinstance(offset, int) else wide >> 32
        # Signed 32 bits, reduced before the conversion: converting a value out of range is undefined in C.
        index = (((wide + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
    found = []
    for state in states:
        k0, k1, k2 = _words_of_page(state, pages)
        found.append(_rounds(index + k0, k1, k2))
    return found


def _blocks(states: Sequence[Tensor], offset: int, atoms: list[tuple[int, int]], block: int) -> Iterator[tuple[int, int, list[Tensor]]]:
    """The words of a large piece in cache-sized parts: (first element, end, one int32 word tensor per state).

    The tensors are buffers that the next part overwrites. The inner atoms make a lattice that is the same in all parts, so
    a part only differs in the index of its first element, a Python int, and mostly has one page.
    """
    device = states[0].device
    inner = len(atoms)
    count = 1
    while inner > 0 and count * atoms[inner - 1][0] <= block:
        inner -= 1
        count *= atoms[inner][0]
    # Cut the next atom outward into equal parts that still fit.
    cut, cut_stride = atoms[inner - 1] if inner else (1, 0)
    parts = -(-cut // max(1, block // count))
    step = -(-cut // parts)
    local = [(step, cut_stride), *atoms[inner:]]
    lattice = _lattice(local, device, torch.int64)
    narrow = (((lattice + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
    buffers = [torch.empty_like(narrow) for _ in states]
    start_buffer, spare_buffer = torch.empty_like(narrow), torch.empty_like(narrow)
    words: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    done = 0
    for base in _bases(offset, atoms[: max(inner - 1, 0)]):
        for first in range(0, cut, step):
            rows = min(step, cut - first)
            n, begin = rows * count, base + first * cut_stride
            page = begin >> 32
            if page == (begin + _span([(rows, cut_stride), *atoms[inner:]])) >> 32:
                if page not in words:
                    words = {page: [_words_of_page(state, page) for state in states]}
                for out, (k0, k1, k2) in zip(buffers, words[page], strict=True):
                    torch.add(narrow[:n], k0 + _signed(begin, 32), out=start_buffer[:n])
                    _rounds_in_place(out[:n], start_buffer[:n], spare_buffer[:n], k1, k2)
                yield done, done + n, [out[:n] for out in buffers]
            else:
                yield done, done + n, _words(states, begin, [(rows, cut_stride), *atoms[inner:]])
            done += n


def _bases(offset: int, atoms: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Global indices of the lattice of the atoms, row-major, as Python ints."""
    if not atoms:
        yield offset
        return
    (size, stride), rest = atoms[0], atoms[1:]
    for i in range(size):
        yield from _bases(offset + i * stride, rest)


def _generate(
    key: Tensor,
    site: int | Tensor,
    piece: Piece,
    shape: Sequence[int],
    dtype: torch.dtype,
    finish: Callable[..., Tensor],
    lanes: int = 1,
    operand: Tensor | None = None,
) -> Tensor:
    """A tensor of `shape` and `dtype`: ``finish(words of lane 0, ..., [part of the flat operand])``, flat part by flat part."""
    if tuple(key.shape) != (2,) or key.dtype != torch.int64:
        raise InputError("A random op needs the int64[2] key of step_key().", why=f"got {key.dtype} of shape {tuple(key.shape)}")
    count = math.prod(piece.sizes)
    if math.prod(shape) != count:
        raise InputError("The shape and the piece have different numbers of elements.", why=f"{tuple(shape)} and {piece.sizes}")
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=key.device)
    flat = () if operand is None else (operand.reshape(-1),)
    states = [_call_state(key, site, lane) for lane in range(lanes)]
    offset, atoms = _merged(piece)
    block = _CPU_BLOCK if key.device.type == "cpu" else _DEVICE_BLOCK
    if count <= block or torch.compiler.is_compiling():
        return finish(*_words(states, offset, atoms), *flat).to(dtype).reshape(tuple(shape))
    out = torch.empty(count, dtype=dtype, device=key.device)
    for begin, end, words in _blocks(states, int(offset), atoms, block):
        out[begin:end] = finish(*words, *(part[begin:end] for part in flat))
    return out.reshape(tuple(shape))


# ---------------------------------------------------------------------------------------------------------- distributions


def _ceiling(probability: float) -> int:
    """How many of the 2^32 words are below `probability`, as a signed bound: word + 2^31 < probability * 2^32."""
    if not 0.0 <= probability <= 1.0:
        raise InputError("A probability must lie between 0 and 1.", why=f"got {probability}")
    # A power of two times a float is exact, so the ceiling is too.
    return math.ceil(probability * 2.0**32) - (1 << 31)


def _below(probability: float) -> Callable[..., Tensor]:
    """Words to bools that are True with `probability`, by comparing integers (a word minus 2^31 is its signed value)."""
    bound = _ceiling(probability)
    if bound == 1 << 31:  # doesn't fit an int32: every word is below it
        return lambda word, *_: torch.ones_like(word, dtype=torch.bool)
    return lambda word, *_: word < bound


def keep(key: Tensor, site: int | Tensor, piece: Piece, shape: Sequence[int], p: float) -> Tensor:
    """bool tensor of `shape`, True with probability ``1 - p`` (to 2^-32): what dropout keeps. p = 0 keeps all, p = 1 none.

    Equal to ``bernoulli`` with the float64 probability ``1 - p``, as torch's two forms of dropout are.

    Raises:
        InputError: p outside [0, 1], or a key, shape or piece that don't fit.
    """
    return _generate(key, site, piece, shape, torch.bool, _below(1.0 - p))


def _unit(dtype: torch.dtype) -> tuple[int, Callable[..., Tensor]]:
    """(lanes, words to numbers in [0, 1) of `dtype`): as many leading bits as the dtype holds, so a narrower dtype is the
    wider one rounded down and 1 is never reached."""
    if dtype == torch.float64:  # 53 bits: 32 of lane 0 and 21 of lane 1

        def wide(upper: Tensor, lower: Tensor) -> Tensor:
            high = upper.to(torch.int64) & 0xFFFFFFFF
            low = _shifted(lower, 11, 32).to(torch.int64)
            return ((high << 21) | low).to(torch.float64) * 2.0**-53

        return 2, wide
    bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype)
    if bits is None:
        raise UnsupportedError(f"Random numbers of {dtype} can't be made.", hint="float64, float32, float16 or bfloat16")
    return 1, lambda word: (_shifted(word, 32 - bits, 32).to(torch.float32) * 2.0**-bits).to(dtype)


def uniform(key: Tensor, site: int | Tensor, piece: Piece, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) of `shape`: 53 bits in float64, 24 in float32, 11 in float16, 8 in bfloat16.

    All dtypes show the same number: a narrower one is the float64 number rounded down to its bits.

    Raises:
        InputError: a key, shape or piece that don't fit. UnsupportedError: another dtype.
    """
    lanes, finish = _unit(dtype)
    return _generate(key, site, piece, shape, dtype, finish, lanes)


# ln(1.5 + t) for t in [-1/2, 1/2), times 2^32, lowest degree first; error 3.3e-12. Chebyshev fits of our own.
_LOG: Final = (
    1741459379, 2863311531, -954437172, 424194293, -212097433, 113118827, -62836919,
    35904115, -21022628, 12475829, -7024602, 4199816, -3907344, 2475311,
)  # fmt: skip
_LOG_2: Final = 2977044472  # ln(2) * 2^32
# sin(pi/2 * sqrt(y)) / sqrt(y) for y in [0, 1], times 2^31; error 8e-14
_SINE: Final = (3373259426, -1387197337, 171138611, -10053989, 344540, -7722, 117)


def _horner(coefficients: Sequence[int], x: Tensor) -> Tensor:
    """The polynomial at `x` (times 2^31) in fixed point; every product stays below 2^63."""
    value = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = ((value * x) >> 31) + c
    return value


def _gauss(radius_word: Tensor, angle_word: Tensor) -> Tensor:
    """float64 normal numbers of two words: Box and Muller's ``sqrt(-2 ln u) * sin(angle)``.

    Logarithms, sines and even square roots of different libraries and vector widths differ in the last bit (torch 2.13's
    own eager and compiled square roots do), so all are integers here; the one product of floats is rounded correctly
    everywhere. Error below 3e-8 where the radius exceeds 1; largest magnitude 6.66, beyond which a normal number lies with
    probability 3e-11.
    """
    u = ((radius_word.to(torch.int64) & 0xFFFFFFFF) + 1).to(torch.float64)  # 1 .. 2^32, exact: u / 2^32 is in (0, 1]
    bits = u.view(torch.int64)
    exponent = (bits >> 52) - 1023
    t = ((bits >> 21) & 0x7FFFFFFF) - (1 << 30)  # mantissa - 1.5, times 2^31
    log = (exponent - 32) * _LOG_2 + _horner(_LOG, t)
    square = torch.clamp(log * -2, min=0) << 24  # radius^2 * 2^56, below 2^62
    radius = square.to(torch.float64).sqrt().to(torch.int64)  # the floor of the root, or one off
    radius = radius - (radius * radius > square).to(torch.int64)
    radius = radius + ((radius + 1) * (radius + 1) <= square).to(torch.int64)
    q = angle_word.to(torch.int64) & 0x7FFFFFFF  # the quarter wave holds all that the sine takes; the sign bit does the rest
    sine = ((q * _horner(_SINE, (q * q) >> 31)) >> 12).to(torch.float64) * 2.0**-50
    return radius.to(torch.float64) * 2.0**-28 * torch.where(angle_word < 0, -sine, sine)


def normal(key: Tensor, site: int | Tensor, piece: Piece, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers of `shape`; every dtype shows the float64 number, rounded by way of float32 if narrower.

    Raises:
        InputError: a key, shape or piece that don't fit. UnsupportedError: no floating dtype of `uniform`.
    """
    _unit(dtype)
    through = torch.float64 if dtype == torch.float64 else torch.float32
    return _generate(key, site, piece, shape, dtype, lambda a, b: _gauss(a, b).to(through).to(dtype), lanes=2)


def bernoulli(key: Tensor, site: int | Tensor, piece: Piece, probs: Tensor) -> Tensor:
    """0 or 1 of the shape and dtype of `probs`, 1 with probability `probs` (to 2^-32).

    Probabilities outside [0, 1] act like the nearer bound and NaN like 0: checking would wait for the device.

    Raises:
        InputError: a key or piece that doesn't fit.
    """

    def finish(word: Tensor, part: Tensor) -> Tensor:
        # Both sides exact in float64: 32 bits, and a float times a power of two.
        return (word.to(torch.float64) + 2.0**31) < part.to(torch.float64) * 2.0**32

    return _generate(key, site, piece, probs.shape, probs.dtype, finish, operand=probs)


def randint(
    key: Tensor, site: int | Tensor, piece: Piece, shape: Sequence[int], low: int, high: int, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Integers of `shape` in [low, high): 63 random bits modulo ``high - low``, so the bias is below (high - low) / 2^63.

    Raises:
        InputError: an empty range, or one of 2^63 or more; a key, shape or piece that don't fit.
    """
    if not 0 < high - low < 1 << 63:
        raise InputError("randint needs low < high and a range below 2^63.", why=f"got low={low}, high={high}")

    def finish(upper: Tensor, lower: Tensor) -> Tensor:
        bits = ((upper.to(torch.int64) & 0x7FFFFFFF) << 32) | (lower.to(torch.int64) & 0xFFFFFFFF)
        return (bits % (high - low) + low).to(dtype)

    return _generate(key, site, piece, shape, dtype, finish, lanes=2)


# ------------------------------------------------------------------------------------------------ replacements of torch ops


def _like(shape: Sequence[int], piece: Piece | None) -> Piece:
    return Piece.whole(shape) if piece is None else piece


def _float_dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _placed(value: Tensor, options: Mapping[str, Any]) -> Tensor:
    device = options.get("device")
    return value if device is None else value.to(device)


def _native_dropout(x: Tensor, p: float, train: bool | None, *, key: Tensor, site: int | Tensor, piece: Piece | None = None) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = keep(key, site, _like(x.shape, piece), x.shape, p)
    # torch (CPU, 2.13) scales the mask in the input's dtype, then multiplies: in bfloat16 the order shows.
    return x * mask.to(x.dtype).mul(0.0 if p == 1 else 1 / (1 - p)), mask


def _rand(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(
        size: Sequence[int],
        *,
        key: Tensor,
        site: int | Tensor,
        piece: Piece | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Tensor:
        return _placed(draw(key, site, _like(size, piece), size, _float_dtype(dtype)), options)

    return make


def _rand_like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(
        x: Tensor, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        return _placed(draw(key, site, _like(x.shape, piece), x.shape, dtype or x.dtype), options)

    return make


def _randint(
    low: int, high: int, size: Sequence[int], *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **options: Any
) -> Tensor:
    return _placed(randint(key, site, _like(size, piece), size, low, high, options.get("dtype") or torch.int64), options)


def _randint_like(low: int, high: int, x: Tensor, **options: Any) -> Tensor:
    return _randint(low, high, x.shape, **{**options, "dtype": options.get("dtype") or x.dtype})


def _uniform(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **_: Any
) -> Tensor:
    return uniform(key, site, _like(x.shape, piece), x.shape, x.dtype) * (high - low) + low


def _normal(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **_: Any
) -> Tensor:
    return normal(key, site, _like(x.shape, piece), x.shape, x.dtype) * std + mean


def _bernoulli(x: Tensor, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **_: Any) -> Tensor:
    return bernoulli(key, site, _like(x.shape, piece), x)


def _bernoulli_p(x: Tensor, p: float = 0.5, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **_: Any) -> Tensor:
    return _generate(key, site, _like(x.shape, piece), x.shape, x.dtype, _below(p))


def _bernoulli_tensor(x: Tensor, probs: Tensor, *, key: Tensor, site: int | Tensor, piece: Piece | None = None, **_: Any) -> Tensor:
    return bernoulli(key, site, _like(x.shape, piece), probs.expand(x.shape)).to(x.dtype)


def _writing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The in-place form: what `make` gives is copied into the first argument, which is returned."""

    def write(x: Tensor, *args: Any, **options: Any) -> Tensor:
        with torch.no_grad():  # as torch's own in-place fills, which know no gradient
            return x.copy_(make(x.detach(), *args, **options))

    return write


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise UnsupportedError(
            f"The random op {name} can't be split over ranks.",
            why="autopar has no form of it that depends on the global element index alone",
            hint="build it from rand, randn, randint or bernoulli",
        )

    return refuse


_REFUSED: Final = (
    "multinomial.default", "randperm.default", "randperm.generator", "exponential_.default", "exponential.default",
    "cauchy_.default", "cauchy.default", "geometric_.default", "geometric.default", "log_normal_.default", "log_normal.default",
    "random_.default", "random_.from", "random_.to", "random.default", "random.from", "random.to", "poisson.default",
    "binomial.default", "_standard_gamma.default", "_sample_dirichlet.default", "rrelu_with_noise.default", "_fused_dropout.default",
    "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "normal.float_float",
    "rand.generator", "randn.generator", "randint.generator", "randint.low_generator",
)  # fmt: skip

_FORMS: Final[dict[str, Callable[..., Any]]] = {
    "aten.native_dropout.default": _native_dropout,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli_p,
    "aten.bernoulli.Tensor": _bernoulli_tensor,
    "aten.bernoulli_.float": _writing(_bernoulli_p),
    "aten.bernoulli_.Tensor": _writing(_bernoulli_tensor),
    "aten.rand.default": _rand(uniform),
    "aten.randn.default": _rand(normal),
    "aten.rand_like.default": _rand_like(uniform),
    "aten.randn_like.default": _rand_like(normal),
    "aten.randint.default": lambda high, size, **options: _randint(0, high, size, **options),
    "aten.randint.low": _randint,
    "aten.randint_like.default": lambda x, high, **options: _randint_like(0, high, x, **options),
    "aten.randint_like.low_dtype": lambda x, low, high, **options: _randint_like(low, high, x, **options),
    "aten.uniform.default": _uniform,
    "aten.uniform_.default": _writing(_uniform),
    "aten.normal_functional.default": _normal,
    "aten.normal_.default": _writing(_normal),
}

REPLACEMENTS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(_FORMS | {f"aten.{name}": _refusing(name) for name in _REFUSED})
"""``str(op overload)`` to a function of the op's own arguments and the keywords ``key``, ``site`` and ``piece`` (a Piece, by
default the whole tensor) that gives what autopar gives. Ops whose name ends in ``_`` write into their first argument. An op
that can't be split raises UnsupportedError by name. A random op that isn't here is unknown: refuse it."""
