"""Rows of pointwise ops. They differ only in their linearity, so each class is a list of names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.ir.program import Node
from autopar.rules.rule import Rule, Types


def broadcast(node: Node, types: Types) -> str:
    """Every operand broadcasts to every output."""
    return f"{', '.join('*' for _ in node.refs())} -> {', '.join('*' for _ in node.outs)}"


def _number(dtype: torch.dtype) -> bool:
    return dtype != torch.bool


def _sum_of_two(node: Node, types: Types) -> str:
    """a + b is linear in both together; with a Python number in place of b it is not linear at all."""
    return "0 1" if len(node.refs()) == 2 and _number(types[node.outs[0]].dtype) else ""


def _product(node: Node, types: Types) -> str:
    return "each" if _number(types[node.outs[0]].dtype) else ""


def _cast(node: Node, types: Types) -> str:
    """Casts that round at most are linear; those that cut off, or to and from bool, are not."""
    source, target = types[node.refs()[0]].dtype, types[node.outs[0]].dtype
    if not (_number(source) and _number(target)) or (source.is_floating_point and not target.is_floating_point):
        return ""
    return "0"


def _where_scalar_other(node: Node, types: Types) -> str:
    return "1" if node.args[2] == 0 else ""


def _where_scalar_self(node: Node, types: Types) -> str:
    return "1" if node.args[1] == 0 else ""  # operand 1 is the third argument


def _masked_fill(node: Node, types: Types) -> str:
    return "0" if node.args[2] == 0 else ""


#: f(x) without linearity: (name, sample)
NONLINEAR = (
    *((f"{n}.default", "f[4, 6]") for n in (
        "exp", "exp2", "expm1", "sigmoid", "tanh", "relu", "silu", "gelu", "erf", "erfc", "sin", "cos", "tan", "sinh", "cosh", "asinh",
        "atan", "abs", "sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "isnan", "isinf", "isfinite", "logical_not", "hardtanh",
        "hardsigmoid", "hardswish", "leaky_relu", "elu", "celu", "selu", "softplus", "log_sigmoid_forward", "mish", "relu6", "square",
        "softshrink", "hardshrink", "signbit", "log_sigmoid",
    )),
    *((f"{n}.default", "pos[4, 6]") for n in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma",
                                             "erfinv")),
    *((f"{n}.default", "unit[4, 6]") for n in ("asin", "acos", "atanh", "logit")),
    # whole numbers, or hardly anything would be equal
    *((f"{n}.Tensor", "i3[4, 6], i3[6]") for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((f"{n}.Scalar", "i3[4, 6], 1") for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((f"{n}.default", "b[4, 6], b[6]") for n in ("logical_and", "logical_or", "logical_xor")),
    *((f"{n}.Tensor", "i9[4, 6], i9[6]") for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_right_shift")),
    *((f"{n}.Scalar", "i9[4, 6], 3") for n in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    ("bitwise_not.default", "i9[4, 6]"),
    *((f"{n}.default", "f[4, 6], f[6]") for n in ("maximum", "minimum", "fmax", "fmin", "atan2")),
    *((f"{n}.Tensor", "f[4, 6], pos[6]") for n in ("fmod", "remainder")),
    *((f"{n}.Scalar", "f[4, 6], 0.7") for n in ("fmod", "remainder")),
    ("clamp.default", "f[4, 6], -0.5, 0.5"), ("clamp.Tensor", "f[4, 6], f[6], None"), ("clamp_min.default", "f[4, 6], 0.1"),
    ("clamp_max.default", "f[4, 6], 0.1"), ("clamp_min.Tensor", "f[4, 6], f[6]"), ("clamp_max.Tensor", "f[4, 6], f[6]"),
    ("pow.Tensor_Scalar", "f[4, 6], 2"), ("pow.Tensor_Tensor", "pos[4, 6], f[6]"), ("pow.Scalar", "1.5, f[4, 6]"),
    ("rsub.Scalar", "f[4, 6], 1.5"), ("add.Scalar", "f[4, 6], 1.5"), ("sub.Scalar", "f[4, 6], 1.5"),
    ("div.Tensor_mode", "f[4, 6], pos[6], rounding_mode='floor'"), ("div.Scalar_mode", "f[4, 6], 0.3, rounding_mode='trunc'"),
    ("floor_divide.default", "f[4, 6], pos[6]"), ("threshold.default", "f[4, 6], 0.1, 0.2"),
    ("copysign.Tensor", "f[4, 6], f[6]"), ("hypot.default", "f[4, 6], f[6]"),
    *((f"{n}.default", "f[4, 6]") for n in ("sinc", "i0", "special_i0e", "special_i1", "special_i1e", "special_erfcx",
                                            "special_log_ndtr")),
    ("special_entr.default", "pos[4, 6]"), ("special_ndtri.default", "unit[4, 6]"),
    ("polygamma.default", "1, pos[4, 6]"), ("mvlgamma.default", "pos[4, 6], 1"), ("frexp.Tensor", "f[4, 6]"),
    ("special_zeta.default", "pos[4, 6], pos[6]"), ("special_zeta.other_scalar", "pos[4, 6], 1.5"),
    ("special_zeta.self_scalar", "1.5, pos[4, 6]"),
    ("angle.default", "c[4, 6]"), ("logaddexp2.default", "f[4, 6], f[6]"),
    ("logaddexp.default", "f[4, 6], f[6]"), ("isclose.default", "f[4, 6], f[6]"), ("heaviside.default", "f[4, 6], f[6]"),
)  # fmt: skip

#: linear in one operand or another, or in sets of them
LINEAR: tuple[tuple[str, str | Callable[[Node, Types], str], tuple[str, ...]], ...] = (
    ("mul.Tensor", _product, ("f[4, 6], f[6]", "f[4, 6], 1.5", "b[4, 6], b[6]")),
    ("mul.Scalar", "0", ("f[4, 6], 1.5",)),
    ("div.Tensor", "0", ("f[4, 6], pos[6]", "f[4, 6], 1.5")),
    ("div.Scalar", "0", ("f[4, 6], 1.5",)),
    ("add.Tensor", _sum_of_two, ("f[4, 6], f[6]", "f[4, 1], f[6], alpha=2", "f[4, 6], 1.5")),
    ("sub.Tensor", _sum_of_two, ("f[4, 6], f[6]", "f[4, 6], 1.5")),
    ("rsub.Tensor", _sum_of_two, ("f[4, 6], f[6]",)),
    ("neg.default", "0", ("f[4, 6]",)),
    ("polar.default", "0", ("pos[4, 6], f[6]",)),
    ("_conj_physical.default", "0", ("c[4, 6]",)),
    ("complex.default", "0 1", ("f[4, 6], f[6]",)),
    ("ldexp.Tensor", "0", ("f[4, 6], i3[6]",)),
    ("deg2rad.default", "0", ("f[4, 6]",)),
    ("_to_copy.default", _cast, ("f[4, 6], dtype=f64", "f[4, 6], dtype=i64", "i9[4, 6], dtype=f64", "b[4, 6], dtype=f64",
                                "f[4, 6], dtype=bool")),
    ("where.self", "1 2", ("b[4, 6], f[4, 6], f[6]",)),
    ("where.ScalarOther", _where_scalar_other, ("b[4, 6], f[4, 6], 0.0", "b[4, 6], f[4, 6], 0.5")),
    ("where.ScalarSelf", _where_scalar_self, ("b[4, 6], 0.0, f[4, 6]", "b[4, 6], 0.5, f[4, 6]")),
    ("masked_fill.Scalar", _masked_fill, ("f[4, 6], b[6], 0", "f[4, 6], b[6], 1.5")),
    ("masked_fill.Tensor", "0 2", ("f[4, 6], b[6], f[]",)),
    ("bitwise_left_shift.Tensor", "0", ("i9[4, 6], i9[6]",)),
    ("fill.Tensor", "1", ("f[4, 6], f[]",)),
    ("fill.Scalar", lambda node, types: "0" if node.args[1] == 0 else "", ("f[4, 6], 1.5", "f[4, 6], 0")),
    ("copy.default", "1", ("f[4, 6], f[6]",)),
    ("addcmul.default", "0 1 | 0 2", ("f[4, 6], f[6], f[4, 1], value=0.5",)),
    ("addcdiv.default", "0 1", ("f[4, 6], f[6], pos[4, 1], value=0.5",)),
    ("lerp.Scalar", "0 1", ("f[4, 6], f[4, 6], 0.3",)),
    ("lerp.Tensor", "0 1", ("f[4, 6], f[4, 6], f[6]",)),
    *((f"{n}.default", "0", (sample,)) for n, sample in (
        ("threshold_backward", "f[4, 6], f[4, 6], 0"), ("gelu_backward", "f[4, 6], f[4, 6]"), ("silu_backward", "f[4, 6], f[4, 6]"),
        ("tanh_backward", "f[4, 6], f[4, 6]"), ("sigmoid_backward", "f[4, 6], f[4, 6]"),
        ("hardtanh_backward", "f[4, 6], f[4, 6], -0.5, 0.5"),
        ("hardsigmoid_backward", "f[4, 6], wide[4, 6]"), ("hardswish_backward", "f[4, 6], f[4, 6]"),
        ("leaky_relu_backward", "f[4, 6], f[4, 6], 0.1, False"), ("elu_backward", "f[4, 6], 1.0, 1.0, 1.0, False, f[4, 6]"),
        ("softplus_backward", "f[4, 6], f[4, 6], 1.0, 20.0"), ("log_sigmoid_backward", "f[4, 6], f[4, 6], pos[4, 6]"),
        ("mish_backward", "f[4, 6], f[4, 6]"), ("softshrink_backward", "f[4, 6], f[4, 6], 0.5"),
        ("hardshrink_backward", "f[4, 6], f[4, 6], 0.5"),
        ("logit_backward", "f[4, 6], unit[4, 6]"),
    )),
)  # fmt: skip

RULES = (
    *(Rule(f"aten.{name}", broadcast, samples=(sample,)) for name, sample in NONLINEAR),
    *(Rule(f"aten.{name}", broadcast, linear, samples=samples) for name, linear, samples in LINEAR),
    *(
        Rule(f"aten.{name}.default", "* -> *", "moves", samples=("f[4, 6]",))
        for name in ("clone", "alias", "detach", "lift_fresh_copy", "contiguous")
    ),
    Rule("aten.nan_to_num.default", broadcast, samples=("f[4, 6]",), timid_ok="it is linear only where all addends are finite"),
    Rule(
        "aten.xlogy.Tensor", broadcast, samples=("pos[4, 6], pos[6]",), timid_ok="0 times log(0) is 0 for the sum but not for its addends"
    ),
    Rule("aten._prelu_kernel.default", broadcast, samples=("f[4, 6], f[6]",)),
    Rule("aten._prelu_kernel_backward.default", broadcast, "0", samples=("f[4, 6], f[4, 6], f[4, 6]",)),
    Rule("autopar.dropout", "*, * -> *", "0", samples=("f[4, 6], b[4, 6], 1.25",)),
)
