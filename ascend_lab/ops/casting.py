"""Casts between number formats, with the rounding the vector unit's vconv offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.errors import InputError, TypeMismatchError
from ascend_lab.kernels.rearrange import reshape_launch
from ascend_lab.ops.elementwise import EXAMPLES
from ascend_lab.ops.formats import TypeRule, exact, is_float, numpy_type
from ascend_lab.ops.operator import REQUIRED, Domain, Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.template import plain

Values = NDArray[Any]

DIRECT: Mapping[str, tuple[str, ...]] = {
    "fp16": ("fp32", "int32", "int8", "uint8"),
    "fp32": ("fp16", "bf16", "int32"),
    "bf16": ("fp32",),
    "int32": ("fp32", "fp16"),
    "int8": ("fp16",),
    "uint8": ("fp16",),
}
"""Casts of one vconv; others go through fp32 or fp16."""
ROUNDINGS = {"rint": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


def _path(source: str, target: str) -> tuple[str, ...]:
    """Return the formats to pass through from source to target, both left out.

    Chosen so that only one step rounds; int32 -> bf16 rounds twice beyond 2^24.
    """
    if target == source or target in DIRECT[source]:
        return ()
    if source == "bf16":
        return ("fp32", *_path("fp32", target))
    if source == "fp32":  # to int8: round to a whole number first, fp16 would round before that
        return ("int32", "fp16")
    if target == "bf16":
        return (*_path(source, "fp32"), "fp32")
    return ("fp16",)


def _result(main: str, attrs: Mapping[str, Any]) -> str:
    dtype, mode = attrs["dtype"], attrs["round"]
    numpy_type(dtype)
    if dtype == "fp64":
        raise TypeMismatchError("cast: a format of the chips", dtype, "use fp32")
    if mode not in ROUNDINGS:
        raise InputError(f"cast: round in {', '.join(ROUNDINGS)}", repr(mode), "choose one")
    if mode != "rint" and is_float(dtype):
        raise TypeMismatchError(
            f"cast: round={mode} only to a whole format",
            f"{main} -> {dtype}",
            "leave round out",
        )
    return str(dtype)


def _formula(x: Values, *, dtype: str, round: str) -> Values:  # noqa: A002 - the attribute's name
    """Round and saturate in a whole format; the caller's final cast rounds floats."""
    if is_float(dtype):
        return x.astype(np.float64)
    info = np.iinfo(numpy_type(dtype))
    whole = np.nan_to_num(ROUNDINGS[round](x.astype(np.float64)))
    result: Values = np.clip(whole, info.min, info.max).astype(np.int64)
    return result


def _compute(x: te.Tensor, *, dtype: str, round: str) -> te.Tensor:  # noqa: A002
    if round == "rint" or not is_float(x.dtype):
        for step in (*_path(x.dtype, dtype), dtype):
            x = te.cast_to(x, step)
        return x
    wide = te.cast_to(x, "fp32")
    if round == "trunc":  # toward zero: floor above, ceil below
        whole = te.vadd(te.cast_to(te.floor(te.vrelu(wide)), "fp32"), _ceil_below(wide))
        return _compute(whole, dtype=dtype, round="rint")
    whole = te.floor(wide) if round == "floor" else te.ceil(wide)
    return _compute(whole, dtype=dtype, round="rint")


def _ceil_below(x: te.Tensor) -> te.Tensor:
    return te.cast_to(te.ceil(te.vmins(x, 0.0)), "fp32")


def _backward(grads: Any, inputs: Any, outputs: Any, *, dtype: str, **attrs: Any) -> Values:
    """Return the gradient in the operand's format; a whole result has none."""
    result: Values = np.zeros_like(inputs[0])
    return grads[0].astype(inputs[0].dtype) if is_float(dtype) else result


register(
    Operator(
        "cast",
        ("x",),
        _formula,
        _compute,
        "x in another number format; whole formats round (rint, floor, ceil, trunc) and saturate",
        attrs={"dtype": REQUIRED, "round": "rint"},
        types=TypeRule(tuple(DIRECT), result=_result),
        backward=_backward,
        template=plain(
            lambda call, chip: reshape_launch(
                chip, call.shapes[0], call.outputs[0], call.dtypes[0]
            ),
            applies=lambda call, chip: bool(call.attrs["dtype"] == call.dtypes[0]),
        ),
        domains={"x": Domain(-300.0, 300.0)},
        examples=tuple(
            Example(example.shapes, {"dtype": dtype, **more})
            for example, (dtype, more) in zip(
                EXAMPLES,
                (
                    ("fp32", {}),
                    ("fp16", {}),
                    ("int32", {}),
                    ("int32", {"round": "floor"}),
                    ("int8", {}),
                    ("int32", {"round": "ceil"}),
                    ("int32", {"round": "trunc"}),
                    ("fp32", {}),
                    ("fp16", {}),
                    ("fp16", {}),
                ),
                strict=True,
            )
        ),
        tolerances=exact("a cast rounds once, as the reference does"),
        allows_empty=True,
    )
)
