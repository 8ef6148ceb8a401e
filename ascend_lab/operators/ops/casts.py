"""Casts: conversions of number formats, which round once, as the vector unit's vconv does.

For example, 2.5 in fp32 becomes 2 in int32, and 300 becomes 127 in int8.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.ops import elementwise, formats as forms
from ascend_lab.operators.ops.formats import TypeRule, Values, exact
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


# For each of `elementwise.EXAMPLES`, the format and the rounding with which the cast is tested.
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
