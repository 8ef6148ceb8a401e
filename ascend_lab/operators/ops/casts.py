"""Conversions of number formats: casts, and quantisation to integers.

A cast rounds once, like the vector unit's instruction vconv. Quantisation with scale s and offset o
is q = clip(round(x / s) + o), and dequantisation x = (q - o) s.

    quantise(x)              q of a float                      AscendQuant
    dequantise(q)            a float of q                      AscendDequant, AscendAntiQuant
    requantise(sums)         q of int32 sums of products       AscendRequant
    add_dequantised(x, q)    x + (q - o) s, a residual         the vendor's fused vadd

The scale of a whole tensor is an attribute; `scales` of its channels are an input. A `bias` is an
integer that is added to the sums before they are scaled, as the cube does it. `small_bias` states
that the cube can add the bias as one more step of K (`kernels.epilogue_plan`); it changes no value.
Source: hicann/amct, docs and graph_based custom_op; ONNX QuantizeLinear and DequantizeLinear.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.ops import elementwise, formats as forms
from ascend_lab.operators.ops.expressions import narrow, stretch
from ascend_lab.operators.ops.formats import (
    FLOATS,
    Range,
    Tolerance,
    TypeRule,
    Values,
    exact,
    rounded,
)
from ascend_lab.operators.ops.operator import REQUIRED, Domain, Example, Template, define

DIRECT_CASTS: Mapping[str, tuple[str, ...]] = {
    "fp16": ("fp32", "int32", "int8", "uint8"),
    "fp32": ("fp16", "bf16", "int32"),
    "bf16": ("fp32",),
    "int32": ("fp32", "fp16"),
    "int8": ("fp16",),
    "uint8": ("fp16",),
}
"""Format -> the formats of a cast by one vconv; other casts go through fp32 or fp16."""
ROUNDINGS = {"rint": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


def _intermediate_formats(source: str, target: str) -> tuple[str, ...]:
    """Return the intermediate formats of a cast that vconv cannot do directly.

    They are chosen so that only one step rounds: bf16 -> fp32 -> int32 -> fp16 -> int8 rounds in
    fp32 -> int32. The exception is int32 -> bf16, which rounds twice for numbers above 2^24.
    """
    if target == source or target in DIRECT_CASTS[source]:
        return ()
    if source == "bf16":
        return ("fp32", *_intermediate_formats("fp32", target))
    # fp32 -> int8: a cast to fp16 first would round twice, e.g. 2.5001 -> 2.5 -> 2 instead of 3
    if source == "fp32":
        return ("int32", "fp16")
    if target == "bf16":
        return (*_intermediate_formats(source, "fp32"), "fp32")
    return ("fp16",)


def _cast_result(main: str, attrs: Mapping[str, Any]) -> str:
    dtype = attrs["dtype"]
    mode = attrs["round"]
    forms.numpy_type(dtype)
    if dtype == "fp64":
        raise errors.TypeMismatchError("cast: a format of the chips", dtype, "use fp32")
    if mode not in ROUNDINGS:
        raise errors.InputError(f"cast: round in {', '.join(ROUNDINGS)}", repr(mode), "choose one")
    if mode != "rint" and forms.is_float(dtype):
        needed = f"cast: round={mode} only to a whole format"
        raise errors.TypeMismatchError(needed, f"{main} -> {dtype}", "leave round out")
    return str(dtype)


def _cast_values(x: Values, *, dtype: str, round: str) -> Values:  # noqa: A002 - the attribute's name
    """Return x rounded and saturated for an integer format; floats are rounded by the caller."""
    if forms.is_float(dtype):
        return x.astype(np.float64)
    info = np.iinfo(forms.numpy_type(dtype))
    integers = np.nan_to_num(ROUNDINGS[round](x.astype(np.float64)))
    result: Values = np.clip(integers, info.min, info.max).astype(np.int64)
    return result


def _cast(x: te.Tensor, *, dtype: str, round: str) -> te.Tensor:  # noqa: A002
    if round == "rint" or not forms.is_float(x.dtype):
        # int8 to bf16: fp16, then fp32, then bf16, all exact for a byte.
        for step in (*_intermediate_formats(x.dtype, dtype), dtype):
            x = te.cast_to(x, step)
        return x
    in_fp32 = te.cast_to(x, "fp32")
    if round == "trunc":  # toward zero: floor above, ceil below
        # -2.7: max(x, 0) gives 0, and ceil(min(x, 0)) = -2; their sum is -2.
        above = te.cast_to(te.floor(te.vrelu(in_fp32)), "fp32")
        integers = te.vadd(above, te.cast_to(te.ceil(te.vmins(in_fp32, 0.0)), "fp32"))
    else:
        integers = te.floor(in_fp32) if round == "floor" else te.ceil(in_fp32)
    return _cast(integers, dtype=dtype, round="rint")


_CASTS = (
    ("fp32", ""),
    ("fp16", ""),
    ("int32", ""),
    ("int32", "floor"),
    ("int8", ""),
    ("int32", "ceil"),
    ("int32", "trunc"),
    ("fp32", ""),
    ("fp16", ""),
    ("fp16", ""),
)
define(
    "cast",
    ("x",),
    _cast_values,
    _cast,
    "x in another number format; whole formats round (rint, floor, ceil, trunc) and saturate",
    attrs={"dtype": REQUIRED, "round": "rint"},
    types=TypeRule(tuple(DIRECT_CASTS), result=_cast_result),
    backward=lambda s: (s.g if forms.is_float(s.attrs["dtype"]) else None,),
    template=Template(
        lambda call, chip: kernels.reshape_launch(
            chip, call.shapes[0], call.outputs[0], call.dtypes[0]
        ),
        applies=lambda call, chip: bool(call.attrs["dtype"] == call.dtypes[0]),
    ),
    traits=elementwise.LANES,
    domains={"x": Domain(-300.0, 300.0)},
    tolerances=exact("a cast rounds once, as the reference does"),
    allows_empty=True,
    examples=tuple(
        Example(example.shapes, {"dtype": dtype, **({"round": mode} if mode else {})})
        for example, (dtype, mode) in zip(elementwise.EXAMPLES, _CASTS, strict=True)
    ),
)


# -- quantised -------------------------------------------------------------------------------------
BYTES = ("int8", "uint8")
QUANTISED = ("quantise", "dequantise", "requantise", "add_dequantised")
"""Operators on bytes; on a chip bytes have blocks of 32 channels, floats blocks of 16."""
SCALES: Range = (1.2e-38, 3.4e38)
OFFSETS: Range = (-128, 255)
MAX_FP16_OFFSET = 512.0
"""Up to this offset q - o is computed in fp16; a larger one would cost digits of q."""
FP16_FACTOR_RANGE = 2.0**-14, 65504.0
"""The smallest and the largest normal number of fp16."""
_ATTRS = {"scale": 1.0, "offset": 0}
_RANGES: Mapping[str, Range] = {"scale": SCALES, "offset": OFFSETS}
_QUANTISED_TOLERANCE = {
    name: Tolerance(0.0, 1.0, "a quotient near .5 may round to the other side")
    for name in (*BYTES, *FLOATS)
}
_FP16_SUM_TOLERANCE = Tolerance(
    2.0, 0.625, "scale, product, offset and sum are halves: scales up to 2"
)
"""(|q scale| 2 + |offset scale| + |(q - offset) scale|) / 2048 with bytes and a scale of 2."""
_OPTIONAL_INPUTS = (("scales", "fp32"), ("bias", "int32"))
_CASES = (
    Example(((1,),)),
    Example(((129,),), {"scale": 0.02}),
    Example(((2, 17, 3),), {"scale": 0.03, "offset": -7}),
    Example(((1, 3, 5, 5),), {"scale": 0.05, "offset": 20}),
)
_PAIRS = (
    Example(((1,),)),
    Example(((129,),), {"scale": 0.02}),
    Example(((2, 17, 3, 3), (17, 1, 1)), {"scale": 0.5, "offset": 3}),
    Example(((5, 33), (33,), (33,)), {"offset": 4}),
)


def _result_format(key: str, *allowed: str) -> Any:
    """Return the result's format: an attribute, one of `allowed`."""

    def result(main: str, attrs: Mapping[str, Any]) -> str:
        if attrs[key] not in allowed:
            needed = f"{key} {' or '.join(allowed)}"
            raise errors.TypeMismatchError(needed, str(attrs[key]), "choose one")
        return str(attrs[key])

    return result


def _saturated(x: te.Tensor, offset: int, dtype: str) -> te.Tensor:
    """Return round(x) + offset as a byte; fp16 represents integers up to 2048 exactly."""
    integers = te.cast_to(x, "int32") if x.dtype == "fp32" else x
    # 100 + 100 = 200 as a float, which the cast to int8 then limits to 127; int8 would wrap to -56.
    in_fp16 = narrow(integers, "fp16")
    return te.cast_to(te.vadds(in_fp16, float(offset)) if offset else in_fp16, dtype)


def fits_fp16(number: float) -> bool:
    """Return whether a factor is a normal number of fp16, with its full 11 bits.

    The product of a byte and such a factor is off by at most 255 / 2048 of a quantisation step.
    """
    return FP16_FACTOR_RANGE[0] <= abs(number) <= FP16_FACTOR_RANGE[1]


def _scaled(x: te.Tensor, scale: float, *scales: te.Tensor) -> te.Tensor:
    if scales:
        x = te.vmul(*stretch(x, scales[0]))
    return te.vmuls(x, scale) if scale != 1 else x


def _quantise(x: te.Tensor, *, scale: float, offset: int, dtype: str) -> te.Tensor:
    # Scale 1e-6: 1 / scale is 10^6, which fp16 does not hold, so x goes to fp32.
    if x.dtype == "bf16" or (x.dtype == "fp16" and not fits_fp16(1 / scale)):
        x = te.cast_to(x, "fp32")
    # x = 2.3, scale 0.5, offset 3: round(4.6) + 3 = 8, which stands for (8 - 3) 0.5 = 2.5; x = 100
    # would be 203 and saturates at 127.
    return _saturated(_scaled(x, 1 / scale), offset, dtype)


def _minus_offset(x: te.Tensor, bias: tuple[te.Tensor, ...], offset: int, dtype: str) -> te.Tensor:
    """Return q - offset in a float format: fp32 for sums, otherwise fp16 unless fp32 is asked."""
    if bias:
        # No vconv goes from bytes to int32 at once: fp16 between holds each byte exactly.
        sums = x if x.dtype == "int32" else te.cast_to(te.cast_to(x, "fp16"), "int32")
        x = te.vadd(*stretch(sums, bias[0]))
    x = te.cast_to(x, "fp32" if x.dtype == "int32" else "fp16")
    x = te.vadds(x, float(-offset)) if offset else x
    return narrow(x, dtype) if dtype == "fp32" else x


def _dequantise(
    x: te.Tensor,
    *scales_and_bias: te.Tensor,
    scale: float,
    offset: int,
    dtype: str,
    small_bias: bool,
) -> te.Tensor:
    """Return (x + bias - offset) scale, scaled in fp16 if it can hold the scale, else in fp32.

    `scales` per channel are fp32, so they always ask for fp32.
    """
    in_fp16 = dtype == "fp16" and not scales_and_bias and fits_fp16(scale)
    shifted = _minus_offset(x, scales_and_bias[1:], offset, "fp16" if in_fp16 else "fp32")
    return narrow(_scaled(shifted, scale, *scales_and_bias[:1]), dtype)


def _requantise(
    x: te.Tensor,
    *scales_and_bias: te.Tensor,
    scale: float,
    offset: int,
    relu: bool,
    small_bias: bool,
) -> te.Tensor:
    # y = (sums + bias) scale * scales[channel], in steps of the result; the offset comes behind
    # relu.
    y = _scaled(_minus_offset(x, scales_and_bias[1:], 0, "fp32"), scale, *scales_and_bias[:1])
    return _saturated(te.vrelu(y) if relu else y, offset, "int8")


def _add_dequantised(x: te.Tensor, q: te.Tensor, *, scale: float, offset: float) -> te.Tensor:
    q_fp16 = te.cast_to(q, "fp16")
    narrow_factors = x.dtype == "fp16" and fits_fp16(scale)
    summand = q_fp16 if narrow_factors else te.cast_to(q_fp16, "fp32")
    # q minus an integer of up to 512 is an integer of up to 640, which fp16 holds exactly
    if abs(offset) <= MAX_FP16_OFFSET:
        summand = _scaled(te.vadds(summand, -offset) if offset else summand, scale)
    else:
        summand = te.vadds(_scaled(summand, scale), -offset * scale)
    return narrow(te.vadd(*stretch(narrow(x, summand.dtype), summand)), x.dtype)


def _quantised_values(x: Values, scale: float, offset: int) -> Values:
    result: Values = np.rint(x / scale) + offset
    return result


def _dequantised_values(x: Values, others: tuple[Values, ...], scale: float, offset: int) -> Values:
    # Sums 100 with bias 20, offset 0, scale 0.5: (100 + 20) 0.5 = 60.
    total = x + others[1] if len(others) > 1 else x
    result: Values = (total - offset) * scale * (others[0] if others else 1.0)
    return result


def _requantised(
    x: Values, *others: Values, scale: float, offset: int, relu: bool, small_bias: bool
) -> Values:
    y = _dequantised_values(x, others, scale, 0)
    return _quantised_values(np.maximum(y, 0) if relu else y, 1.0, offset)


define(
    "quantise",
    ("x",),
    lambda x, scale, offset, dtype: _quantised_values(x, scale, offset),
    _quantise,
    "round(x / scale) + offset in a byte",
    outputs=("q",),
    attrs={**_ATTRS, "dtype": "int8"},
    ranges=_RANGES,
    types=TypeRule(FLOATS, result=_result_format("dtype", *BYTES)),
    traits=("lanes",),
    tolerances=_QUANTISED_TOLERANCE,
    examples=_CASES,
    allows_empty=True,
)
define(
    "dequantise",
    ("x", "scales", "bias"),
    lambda x, *others, scale, offset, dtype, small_bias: _dequantised_values(
        x, others, scale, offset
    ),
    _dequantise,
    "(x + bias - offset) scale, and times one of the scales each channel",
    attrs={**_ATTRS, "dtype": "fp32", "small_bias": False},
    ranges=_RANGES,
    optional=2,
    types=TypeRule((*BYTES, "int32"), _OPTIONAL_INPUTS, _result_format("dtype", *FLOATS)),
    domains={"scales": Domain(0.01, 0.1)},
    traits=("lanes",),
    tolerances=rounded(ulps=2.0),
    examples=_PAIRS,
    allows_empty=True,
)
define(
    "requantise",
    ("x", "scales", "bias"),
    _requantised,
    _requantise,
    "round((x + bias) scale) + offset in int8, of int32 sums; relu before it is rounded",
    outputs=("q",),
    attrs={**_ATTRS, "relu": False, "small_bias": False},
    ranges=_RANGES,
    optional=2,
    types=TypeRule(("int32",), _OPTIONAL_INPUTS, lambda main, attrs: "int8"),
    domains={"scales": Domain(0.01, 0.1)},
    traits=("lanes",),
    tolerances=_QUANTISED_TOLERANCE,
    examples=_PAIRS,
    allows_empty=True,
)
define(
    "add_dequantised",
    ("x", "q"),
    lambda x, q, scale, offset: x + (q - offset) * scale,
    _add_dequantised,
    "x + (q - offset) scale: a quantised summand, its offset any number",
    attrs={"scale": 1.0, "offset": 0.0},
    ranges={"scale": SCALES},
    types=TypeRule(FLOATS, (("q", "int8"),)),
    traits=("lanes",),
    tolerances={**rounded(ulps=2.0, atol=2.0**-7), "fp16": _FP16_SUM_TOLERANCE},
    examples=(
        Example(((1,), (1,))),
        Example(((129,), (129,)), {"scale": 0.02}),
        Example(((2, 17, 3), (2, 17, 3)), {"scale": 0.03, "offset": -7.5}),
    ),
    allows_empty=True,
)
