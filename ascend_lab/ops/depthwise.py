"""Depthwise convolution on the vector unit: every channel has a kernel of its own.

The cube would multiply mostly zeros. The vector unit multiplies and adds tap by tap in fp16, which
rounds twice a tap: faster, and less exact than conv2d with as many groups as channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.kernels.depthwise import depthwise_launch, pack_depthwise
from ascend_lab.kernels.layouts import unpack_conv
from ascend_lab.ops.convolution import LAYOUTS, conv_shape, conv_slopes
from ascend_lab.ops.formats import TypeRule, rounded
from ascend_lab.ops.operator import Example, Operator
from ascend_lab.ops.registry import get, register
from ascend_lab.ops.shapes import Shape, check_rank
from ascend_lab.ops.slicing import AxisRule, Range, Ranges, SliceRules
from ascend_lab.ops.template import Call, Template

Values = NDArray[Any]
CONV = get("conv2d")


def _full(x: Shape, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of conv2d: as many groups as channels."""
    return {**attrs, "groups": x[1], "out_dtype": None}


def _depthwise_shape(x: Shape, weight: Shape, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    if weight[:2] != (x[1], 1):
        raise ShapeError(
            f"weights ({x[1]}, 1, r, s) for the {x[1]} channels of x {x}", str(weight), "reshape it"
        )
    out: Shape = CONV.shape_rule(x, weight, **_full(x, attrs))
    return out


def _depthwise_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    """Return conv2d's rules; channels are free, and groups follow from them."""
    rules = CONV.slice_rules(shapes, _full(shapes[0], attrs))

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        assert rules.adjust is not None
        return {k: v for k, v in rules.adjust(axis, piece, ranges).items() if k != "groups"}

    axes: tuple[AxisRule, ...] = rules.axes
    return replace(rules, axes=axes, adjust=adjust)


def _conv_call(call: Call) -> Call:
    return replace(call, attrs=_full(call.shapes[0], dict(call.attrs)))


def _depthwise_feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    return pack_depthwise(conv_shape(_conv_call(call)), arrays[0], arrays[1])


DEPTHWISE_KERNEL = Template(
    lambda call, chip: depthwise_launch(conv_shape(_conv_call(call)), chip),
    _depthwise_feed,
    lambda call, memory: (unpack_conv(conv_shape(_conv_call(call)), memory),),
)


def _depthwise(x: te.Tensor, weight: te.Tensor, **attrs: Any) -> te.Tensor:
    y: te.Tensor = CONV.expression(x, weight, **_full(x.shape, attrs))
    return y


register(
    Operator(
        "depthwise_conv2d",
        ("x", "weight"),
        lambda x, weight, **attrs: CONV.formula(x, weight, **_full(x.shape, attrs)),
        _depthwise,
        "each channel convolved with its own kernel, on the vector unit in fp16",
        attrs={"stride": 1, "pad": 0, "dilation": 1},
        shape_rule=_depthwise_shape,
        types=TypeRule(("fp16",)),
        slicing=_depthwise_slices,
        backward=conv_slopes,
        template=DEPTHWISE_KERNEL,
        layouts=LAYOUTS,
        examples=(
            Example(((1, 1, 1, 1), (1, 1, 1, 1))),
            Example(((1, 16, 8, 8), (16, 1, 3, 3)), {"pad": 1}),
            Example(((2, 17, 7, 9), (17, 1, 3, 2)), {"stride": (2, 1), "pad": ((1, 0), (0, 1))}),
            Example(((1, 7, 9, 9), (7, 1, 3, 3)), {"dilation": 2}),
        ),
        # 9 products and sums in fp16, each off by half an ulp of a number below 32
        tolerances=rounded(ulps=4.0, atol=2.0**-4),
    )
)
