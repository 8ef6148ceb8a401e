"""Whole numbers that stand for others: q = clip(round(x / s) + o), x = (q - o) s.

    quantise(x)              q of a float                      AscendQuant
    dequantise(q)            a float of q                      AscendDequant, AscendAntiQuant
    requantise(sums)         q of int32 sums of products       AscendRequant
    add_dequantised(x, q)    x + (q - o) s, a residual         the vendor's fused vadd

One scale serves a tensor, as an attribute, or `scales` serve its channels, as an input; a `bias`
is whole and added to sums first, as the cube does; `small_bias` says that the cube itself can, in
one step of depth (`kernels.conv_stage`), and changes no value.
Source: hicann/amct, docs and graph_based custom_op; ONNX QuantizeLinear and DequantizeLinear.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.errors import TypeMismatchError
from ascend_lab.ops.expressions import narrow, stretch
from ascend_lab.ops.formats import FLOATS, Range, Tolerance, TypeRule, Values, rounded
from ascend_lab.ops.operator import Domain, Example, define

WHOLE = ("int8", "uint8")
QUANTISED = ("quantise", "dequantise", "requantise", "add_dequantised")
"""The operators here; on a chip bytes lie in blocks of 32 channels, floats in blocks of 16."""
SCALES: Range = (1.2e-38, 3.4e38)
OFFSETS: Range = (-128, 255)
_ATTRS = {"scale": 1.0, "offset": 0}
_RANGES: Mapping[str, Range] = {"scale": SCALES, "offset": OFFSETS}
_STEP = {
    name: Tolerance(0.0, 1.0, "a quotient near .5 may round to the other side")
    for name in (*WHOLE, *FLOATS)
}
_HALVES = Tolerance(2.0, 0.625, "scale, product, offset and sum are halves: scales up to 2")
"""(|q scale| 2 + |offset scale| + |(q - offset) scale|) / 2048 with bytes and a scale of 2."""
_OTHERS = (("scales", "fp32"), ("bias", "int32"))
_CASES = (
    Example(((1,),)), Example(((129,),), {"scale": 0.02}),
    Example(((2, 17, 3),), {"scale": 0.03, "offset": -7}),
    Example(((1, 3, 5, 5),), {"scale": 0.05, "offset": 20}),
)  # fmt: skip
_PAIRS = (
    Example(((1,),)), Example(((129,),), {"scale": 0.02}),
    Example(((2, 17, 3, 3), (17, 1, 1)), {"scale": 0.5, "offset": 3}),
    Example(((5, 33), (33,), (33,)), {"offset": 4}),
)  # fmt: skip


def _kind(key: str, *able: str) -> Any:
    """Return the result's format: an attribute, one of `able`."""

    def result(main: str, attrs: Mapping[str, Any]) -> str:
        if attrs[key] not in able:
            raise TypeMismatchError(f"{key} {' or '.join(able)}", str(attrs[key]), "choose one")
        return str(attrs[key])

    return result


def _saturated(x: te.Tensor, offset: int, dtype: str) -> te.Tensor:
    """Return round(x) + offset in a byte: halves count exactly as far as bytes reach."""
    whole = te.cast_to(x, "int32") if x.dtype == "fp32" else x
    half = narrow(whole, "fp16")
    return te.cast_to(te.vadds(half, float(offset)) if offset else half, dtype)


def _scaled(x: te.Tensor, scale: float, *scales: te.Tensor) -> te.Tensor:
    if scales:
        x = te.vmul(*stretch(x, scales[0]))
    return te.vmuls(x, scale) if scale != 1 else x


def _quantise(x: te.Tensor, *, scale: float, offset: int, dtype: str) -> te.Tensor:
    x = te.cast_to(x, "fp32") if x.dtype == "bf16" else x
    return _saturated(_scaled(x, 1 / scale), offset, dtype)


def _wide(x: te.Tensor, bias: tuple[te.Tensor, ...], offset: int, dtype: str) -> te.Tensor:
    """Return q - offset in a float that holds it: fp32 for sums, else fp16 unless asked for."""
    if bias:
        whole = x if x.dtype == "int32" else te.cast_to(te.cast_to(x, "fp16"), "int32")
        x = te.vadd(*stretch(whole, bias[0]))
    x = te.cast_to(x, "fp32" if x.dtype == "int32" else "fp16")
    x = te.vadds(x, float(-offset)) if offset else x
    return narrow(x, dtype) if dtype == "fp32" else x


def _dequantise(
    x: te.Tensor, *others: te.Tensor, scale: float, offset: int, dtype: str, small_bias: bool
) -> te.Tensor:
    """Scale in fp32 where the scales are: one rounding at the end."""
    wide = _wide(x, others[1:], offset, "fp32" if others or dtype != "fp16" else dtype)
    return narrow(_scaled(wide, scale, *others[:1]), dtype)


def _requantise(
    x: te.Tensor, *others: te.Tensor, scale: float, offset: int, relu: bool, small_bias: bool
) -> te.Tensor:
    y = _scaled(_wide(x, others[1:], 0, "fp32"), scale, *others[:1])
    return _saturated(te.vrelu(y) if relu else y, offset, "int8")


def _add(x: te.Tensor, q: te.Tensor, *, scale: float, offset: float) -> te.Tensor:
    half = te.cast_to(q, "fp16")
    other = _scaled(half if x.dtype == "fp16" else te.cast_to(half, "fp32"), scale)
    other = te.vadds(other, -offset * scale) if offset else other
    return narrow(te.vadd(*stretch(narrow(x, other.dtype), other)), x.dtype)


def _rounded(x: Values, scale: float, offset: int) -> Values:
    result: Values = np.rint(x / scale) + offset
    return result


def _floats(x: Values, others: tuple[Values, ...], scale: float, offset: int) -> Values:
    total = x + others[1] if len(others) > 1 else x
    result: Values = (total - offset) * scale * (others[0] if others else 1.0)
    return result


def _requantised(
    x: Values, *others: Values, scale: float, offset: int, relu: bool, small_bias: bool
) -> Values:
    y = _floats(x, others, scale, 0)
    return _rounded(np.maximum(y, 0) if relu else y, 1.0, offset)


define(
    "quantise", ("x",), lambda x, scale, offset, dtype: _rounded(x, scale, offset), _quantise,
    "round(x / scale) + offset in a byte", outputs=("q",),
    attrs={**_ATTRS, "dtype": "int8"}, ranges=_RANGES,
    types=TypeRule(FLOATS, result=_kind("dtype", *WHOLE)), traits=("lanes",),
    tolerances=_STEP, examples=_CASES, allows_empty=True,
)  # fmt: skip
define(
    "dequantise", ("x", "scales", "bias"),
    lambda x, *others, scale, offset, dtype, small_bias: _floats(x, others, scale, offset),
    _dequantise, "(x + bias - offset) scale, and times one of the scales each channel",
    attrs={**_ATTRS, "dtype": "fp32", "small_bias": False}, ranges=_RANGES, optional=2,
    types=TypeRule((*WHOLE, "int32"), _OTHERS, _kind("dtype", *FLOATS)),
    domains={"scales": Domain(0.01, 0.1)}, traits=("lanes",),
    tolerances=rounded(ulps=2.0), examples=_PAIRS, allows_empty=True,
)  # fmt: skip
define(
    "requantise", ("x", "scales", "bias"), _requantised, _requantise,
    "round((x + bias) scale) + offset in int8, of int32 sums; relu before it is rounded",
    outputs=("q",), attrs={**_ATTRS, "relu": False, "small_bias": False}, ranges=_RANGES,
    optional=2, types=TypeRule(("int32",), _OTHERS, lambda main, attrs: "int8"),
    domains={"scales": Domain(0.01, 0.1)}, traits=("lanes",),
    tolerances=_STEP, examples=_PAIRS, allows_empty=True,
)  # fmt: skip
define(
    "add_dequantised", ("x", "q"), lambda x, q, scale, offset: x + (q - offset) * scale, _add,
    "x + (q - offset) scale: a quantised summand, its offset any number",
    attrs={"scale": 1.0, "offset": 0.0}, ranges={"scale": SCALES},
    types=TypeRule(FLOATS, (("q", "int8"),)), traits=("lanes",),
    tolerances={**rounded(ulps=2.0, atol=2.0**-7), "fp16": _HALVES},
    examples=(
        Example(((1,), (1,))), Example(((129,), (129,)), {"scale": 0.02}),
        Example(((2, 17, 3), (2, 17, 3)), {"scale": 0.03, "offset": -7.5}),
    ), allows_empty=True,
)  # fmt: skip
