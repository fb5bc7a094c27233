"""Rows of ops that mix whole dims of every sample: Fourier transforms, solvers and decompositions of matrices.

The dims before those are a batch, which may be cut.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.program import Node
from autopar.rules.rule import Rule, Types, letters, normal_dim


def inner(text: str) -> Callable[[Node, Types], str]:
    """The row of an op by how many dims at the end of every operand and output are whole, as in ``2 1 -> 2``; those before broadcast."""
    left, right = (list(map(int, side.split())) for side in text.split("->"))

    def row(node: Node, types: Types) -> str:
        kinds: list[str] = []

        def terms(counts: list[int], side: str) -> str:
            out = []
            for k, count in enumerate(counts):
                names = [f"{side}{k}_{i}" for i in range(count)]
                kinds.extend(f"{n}: whole" for n in names)
                out.append(" ".join(["*", *names]))
            return ", ".join(out)

        return f"{terms(left, 'x')} -> {terms(right, 'y')} ; {', '.join(kinds)}"

    return row


def _solve(node: Node, types: Types) -> str:
    """The right side is a vector or a matrix, of which each column is solved for itself."""
    left, right = (len(types[r].shape) for r in node.refs())
    vector = right == 1 or (right == left - 1 and types[node.refs()[1]].shape == types[node.refs()[0]].shape[:-1])
    side = ("b", "x") if vector else ("b k", "x k")
    return f"* m n, * {side[0]} -> * {side[1]}, * l u, * p, * ; {', '.join(f'{f}: whole' for f in 'mnbxlup')}"


def _triangular(node: Node, types: Types) -> str:
    """The columns, or the rows where the matrix stands on the right, are solved each for itself."""
    if dict(node.kwargs).get("left", True):
        return "* m n, * b k -> * x k ; m: whole, n: whole, b: whole, x: whole"
    return "* m n, * k b -> * k x ; m: whole, n: whole, b: whole, x: whole"


def _transform(node: Node, types: Types) -> str:
    """A Fourier transform of some dims; one of them may change its length."""
    rank = len(types[node.refs()[0]].shape)
    left, right, kinds = letters(rank), letters(rank), []
    for dim in {normal_dim(d, rank) for d in node.args[1]}:
        left[dim], right[dim] = f"x{dim}", f"y{dim}"
        kinds += [f"x{dim}: whole", f"y{dim}: whole"]
    return f"{' '.join(left)} -> {' '.join(right)} ; {', '.join(kinds)}"


def _checked(node: Node, types: Types) -> str:
    """A result and the codes of what went wrong with its matrices, which are its first dims."""
    names = letters(len(types[node.refs()[0]].shape))
    return f"{' '.join(names)}, {' '.join(names[: len(types[node.refs()[1]].shape)])} -> {' '.join(names)}"


RULES = (
    Rule("aten._fft_c2c.default", _transform, "0", samples=("c[4, 6, 3], (1,), 0, True", "c[4, 6], (0, 1), 2, False")),
    Rule("aten._fft_r2c.default", _transform, "0", samples=("f[4, 6, 3], (1,), 0, True", "f[4, 6], (1,), 0, False")),
    Rule("aten._fft_c2r.default", _transform, "0", samples=("c[4, 4, 3], (1,), 2, 6",)),
    Rule("autopar.checked", _checked, "0", samples=("f[4, 6, 6], i1[4], 'torch.linalg.inv', True", "f[4, 6], i1[4], 'solve', True")),
    Rule("aten.linalg_inv_ex.default", inner("2 -> 2 0"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_cholesky_ex.default", inner("2 -> 2 0"), samples=("spd[4, 6, 6]",)),
    Rule("aten._linalg_solve_ex.default", _solve, samples=("f[4, 6, 6], f[4, 6, 2]", "f[4, 6, 6], f[4, 6]", "f[6, 6], f[6]")),
    Rule("aten.linalg_lu_factor_ex.default", inner("2 -> 2 1 0"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_lu.default", inner("2 -> 2 2 2"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_lu_solve.default", "* m n, * p, * b k -> * x k ; m: whole, n: whole, p: whole, b: whole, x: whole", "2",
         samples=("spd[4, 6, 6], ramp[4, 6], f[4, 6, 2]",)),
    Rule("aten.lu_unpack.default", inner("2 1 -> 2 2 2"), samples=("f[4, 6, 6], ramp[4, 6]",)),
    Rule("aten._linalg_svd.default", inner("2 -> 2 1 2"), samples=("f[4, 6, 6]", "f[4, 6, 3], False")),
    Rule("aten._linalg_eigh.default", inner("2 -> 1 2"), samples=("spd[4, 6, 6]",)),
    Rule("aten.linalg_eig.default", inner("2 -> 1 2"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_qr.default", inner("2 -> 2 2"), samples=("f[4, 6, 6]", "f[4, 6, 3]")),
    Rule("aten._linalg_det.default", inner("2 -> 0 2 1"), samples=("f[4, 6, 6]",)),
    Rule("aten._linalg_slogdet.default", inner("2 -> 0 0 2 1"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_solve_triangular.default", _triangular, "1",
         samples=("spd[4, 6, 6], f[4, 6, 2], upper=True", "spd[4, 6, 6], f[4, 2, 6], upper=False, left=False")),
    Rule("aten.cholesky_solve.default", "* b k, * m n -> * x k ; m: whole, n: whole, b: whole, x: whole", "0",
         samples=("f[4, 6, 2], spd[4, 6, 6]",)),
    Rule("aten.cholesky_inverse.default", inner("2 -> 2"), samples=("spd[4, 6, 6]",)),
    Rule("aten.linalg_pinv.atol_rtol_tensor", inner("2 -> 2"), samples=("f[4, 6, 3]",)),
    Rule("aten.linalg_matrix_exp.default", inner("2 -> 2"), samples=("f[4, 6, 6]",)),
    Rule("aten.linalg_householder_product.default", inner("2 1 -> 2"), samples=("f[4, 6, 3], f[4, 3]",)),
    Rule("aten.geqrf.default", inner("2 -> 2 1"), samples=("f[4, 6, 3]",)),
    Rule("aten.linalg_cross.default", "* x, * x -> * x ; x: whole", "0 | 1", samples=("f[4, 6, 3], f[4, 6, 3]",)),
    Rule("aten._pdist_forward.default", "n d -> p ; n: whole, d: whole, p: whole", samples=("f[4, 6], 2.0",)),
    Rule("aten._pdist_backward.default", "p, n d, p -> n d ; n: whole, p: whole", lambda n, _: "0 | 1" if n.args[2] == 2 else "0",
         samples=("f[6], f[4, 6], 2.0, pos[6]",)),
)  # fmt: skip
