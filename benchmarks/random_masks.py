"""Time of making random tensors by global index, against torch's own generator: ``python benchmarks/random_masks.py``.

Prints a table of milliseconds (the best of several runs, on one thread unless ``--threads`` says otherwise): eager for the
whole tensor and for pieces of one, compiled with ``--compiled``, for several block sizes with ``--blocks``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from autopar.runtime import random as rnd
from autopar.runtime.random import Piece

KEY = rnd.step_key(0, 1)
SITE = rnd.site("blocks.0.drop", "native_dropout", 0)


def best_ms(run: Callable[[], object], times: int) -> float:
    """The shortest of `times` runs after one to warm up, in milliseconds."""
    run()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def cases(n: int) -> list[tuple[str, Callable[[], object] | None, Callable[[Tensor, Tensor], Tensor]]]:
    """(name, native form, our form of key and site) for tensors of `n` elements (a multiple of 4096)."""
    x, flat, whole = torch.randn(n), (n,), Piece.whole((n,))
    rows = n // 4096
    # A piece of [2 rows, 3, 5120] (columns 512..4607 of the middle), and one whose inner run is short.
    columns = Piece((rows, 4096), (rows, 512), (15360, 1))
    short = Piece((n // 16, 16), (0, 48), (64, 1))
    far = Piece((rows, 4096), (2**24, 512), (5120, 1))
    probs = torch.full(flat, 0.5)
    return [
        ("keep p=0.1, whole", lambda: torch.native_dropout(x, 0.1, True), lambda k, s: rnd.keep(k, s, whole, flat, 0.1)),
        ("  rows of 4096", None, lambda k, s: rnd.keep(k, s, columns, (rows, 4096), 0.1)),
        ("  rows of 16", None, lambda k, s: rnd.keep(k, s, short, (n // 16, 16), 0.1)),
        ("  over 2^32", None, lambda k, s: rnd.keep(k, s, far, (rows, 4096), 0.1)),
        ("uniform float32", lambda: torch.rand(n), lambda k, s: rnd.uniform(k, s, whole, flat, torch.float32)),
        (
            "uniform float64",
            lambda: torch.rand(n, dtype=torch.float64),
            lambda k, s: rnd.uniform(k, s, whole, flat, torch.float64),
        ),
        ("normal float32", lambda: torch.randn(n), lambda k, s: rnd.normal(k, s, whole, flat, torch.float32)),
        ("bernoulli(probs)", lambda: torch.bernoulli(probs), lambda k, s: rnd.bernoulli(k, s, whole, probs)),
        ("randint", lambda: torch.randint(10, flat), lambda k, s: rnd.randint(k, s, whole, flat, 0, 10)),
    ]


def table(n: int, times: int, compiled: bool) -> list[str]:
    """The lines of the table."""
    lines = [f"{'ms for ' + format(n, ',') + ' elements':28}{'native':>10}{'eager':>10}" + (f"{'compiled':>10}" if compiled else "")]
    site = torch.tensor(SITE)
    for name, native, ours in cases(n):
        line = f"{name:28}" + (f"{best_ms(native, times):10.1f}" if native else f"{'':10}")
        line += f"{best_ms(lambda ours=ours: ours(KEY, site), times):10.1f}"  # type: ignore[misc]
        if compiled:
            torch.compiler.reset()
            fast = torch.compile(ours, fullgraph=True)
            line += f"{best_ms(lambda fast=fast: fast(KEY, site), times):10.1f}"  # type: ignore[misc]
        lines.append(line)
    return lines


def block_table(n: int, times: int) -> list[str]:
    """Time of a mask's words alone, for several block sizes."""
    lines = [f"{'elements in a block':28}{'ms':>10}"]
    states = [rnd._call_state(KEY, SITE, 0)]
    for power in range(12, 21):
        run = lambda power=power: [None for _ in rnd._blocks(states, 0, [(n, 1)], 1 << power)]  # noqa: E731
        lines.append(f"{1 << power:<28,}{best_ms(run, times):10.1f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 23, help="elements of the tensors, a multiple of 4096")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile's form (minutes to compile)")
    parser.add_argument("--blocks", action="store_true", help="time block sizes instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("\n".join(block_table(args.elements, args.times) if args.blocks else table(args.elements, args.times, args.compiled)))


if __name__ == "__main__":
    main()
