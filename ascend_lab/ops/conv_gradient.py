"""The gradient of a convolution with respect to its weights.

`conv2d_grad_weight(x, grad; kernel, stride, pad, dilation, groups, out_dtype)`: x (n, c, h, w) is
what conv2d read, grad (n, k, oh, ow) is d(loss)/d(its output), `kernel` is the height and width of
its weights as a number or a pair, the other attributes are conv2d's. The result is
d(loss)/d(weight), (k, c / groups, r, s):

    dw[k,c,r,s] = sum over n, i, j of grad[n,k,i,j] x[n, c, i stride + r dilation - pad, ...]

With as many groups as channels it is also the gradient of depthwise_conv2d, (c, 1, r, s).

The gradient with respect to x needs no operator of its own: it is conv_transpose2d(grad, weight)
with conv2d's attributes and, where the stride does not divide h + pads - reach, that remainder as
`output_padding` (`input_remainder` returns it).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Kernel, Launch
from ascend_lab.isa.launch import renamed
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import FRACTAL
from ascend_lab.kernels.weight_gradient import ZEROS, splits_of, weight_gradient_launch
from ascend_lab.kernels.weight_plan import has_plan, weight_plan
from ascend_lab.layout import address_map, unpack
from ascend_lab.layout.moves import maps_launch
from ascend_lab.ops.convolution import ATTRS, check_groups, conv_weight_slope, geometry
from ascend_lab.ops.expressions import narrow, out_size, wide
from ascend_lab.ops.formats import Shape, TypeRule, Values, check_rank, numpy_type, pair
from ascend_lab.ops.matmul import SUMS, cube_result
from ascend_lab.ops.operator import REQUIRED, Call, Example, Template, define
from ascend_lab.ops.slicing import AxisRule, Range, Ranges, Reduction, SliceRules, Source

GRADIENT_INPUTS = ("fp16", "bf16")
"""Formats of x and grad: whole numbers have no gradients."""


def _shape(x: Shape, grad: Shape, *, kernel: Any, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    check_rank("grad (n, k, oh, ow)", grad, 4)
    groups, size = attrs["groups"], pair("kernel", kernel)
    check_groups(x[1], grad[1], groups)
    out = (x[0], grad[1], *out_size("conv2d", (x[2], x[3]), size, *geometry(**attrs)))
    if grad != out:
        needed = f"a gradient of shape {out}: what conv2d makes of x {x}"
        raise ShapeError(needed, str(grad), "check kernel, pad")
    return (grad[1], x[1] // groups, *size)


def _values(x: Values, grad: Values, *, kernel: Any, groups: int, **attrs: Any) -> Values:
    return conv_weight_slope(grad, x, pair("kernel", kernel), *geometry(**attrs), groups)


def _slices(shapes: tuple[Shape, ...], *, groups: int, **attrs: Any) -> SliceRules:
    x, grad = shapes
    features = grad[1] // groups
    grain = features if groups > 1 else 1
    outputs = [Source(1, 1, grain=grain)]
    inputs = AxisRule(1, "free", (Source(0, 1),), (1,))
    if groups > 1:
        outputs.append(Source(0, 1, grain=x[1] // groups))
        inputs = AxisRule(1, "whole", reason="channels of a group lie apart in x", joins=(1,))
    why = "one pass over the pixels sees every tap"
    taps = (AxisRule(2 + i, "whole", reason=why, joins=(2 + i,)) for i in range(2))

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        whole = axis or groups == 1
        return {} if whole else {"groups": (piece[1] - piece[0]) // features}

    rules = (AxisRule(0, "free", tuple(outputs), (0,), grain), inputs, *taps)
    return SliceRules("CubeMatmul", rules, (Reduction(((0, 0), (1, 0)), "sum"),), adjust)


def _expression(
    x: te.Tensor, grad: te.Tensor, *, kernel: Any, groups: int, **attrs: Any
) -> te.Tensor:
    """Sum products of two channels over images and pixels on the vector unit, in fp32."""
    (r, s), (step, pads, spread) = pair("kernel", kernel), geometry(**attrs)
    n, k, oh, ow = grad.shape
    image = wide(te.pad(x, ((0, 0), (0, 0), *pads)) if np.any(pads) else x)
    image = te.reshape(image, (n, groups, x.shape[1] // groups, *image.shape[2:]))
    slope = te.reshape(wide(grad), (n, groups, k // groups, oh, ow))
    b, i, j = pixels = _reduced(n, oh, ow)

    def formula(g: Any, f: Any, c: Any, p: Any, q: Any) -> Any:
        row, column = i * step[0] + p * spread[0], j * step[1] + q * spread[1]
        return te.sum(slope[b, g, f, i, j] * image[b, g, c, row, column], pixels)

    total = te.compute((groups, k // groups, x.shape[1] // groups, r, s), formula)
    out = cube_result(x.dtype, attrs)
    return narrow(te.reshape(total, (k, x.shape[1] // groups, r, s)), out)


def _reduced(n: int, oh: int, ow: int) -> tuple[Any, Any, Any]:
    """Return the axes that are summed over: images, rows and columns of the gradient."""
    return te.reduce_axis(n, "b"), te.reduce_axis(oh, "i"), te.reduce_axis(ow, "j")


def in_blocks(x: te.Tensor, grad: te.Tensor, out_dtype: str, **attrs: Any) -> te.Tensor:
    """Return the same sums of images stored as NC1HWC0, in the order of FRACTAL_Z.

    x (n, c1, h, w, 16), grad (n, k1, oh, ow, 16) -> dw (c1, r, s, k1, 16, 16); with a group per
    channel, all of `groups`, row-major.
    """
    groups: int = attrs["groups"]
    step, pads, spread = geometry(**attrs)
    (r, s), (n, k1, oh, ow, lanes) = pair("kernel", attrs["kernel"]), grad.shape
    slope, image = wide(grad), wide(te.pad(x, ((0, 0), (0, 0), *pads, (0, 0))))
    b, i, j = pixels = _reduced(n, oh, ow)

    def formula(c: Any, p: Any, q: Any, f: Any, row: Any, lane: Any) -> Any:
        place = i * step[0] + p * spread[0], j * step[1] + q * spread[1]
        return te.sum(slope[b, f, i, j, row] * image[b, c, *place, lane], pixels)

    if groups == 1:
        return narrow(te.compute((x.shape[1], r, s, k1, lanes, lanes), formula), out_dtype)
    own = te.compute((k1, lanes, r, s), lambda c, lane, p, q: formula(c, p, q, c, lane, lane))
    each = te.reshape(own, (k1 * lanes, r, s))
    return narrow(te.slice(each, (0, 0, 0), (groups, r, s)), out_dtype)


# -- kernel ----------------------------------------------------------------------------------------
def weight_shape(call: Call) -> ConvShape:
    """Return the convolution whose weights the call is about, as the kernels describe it."""
    (n, c, h, w), (_, k, _, _) = call.shapes
    step, pads, spread = geometry(**call.attrs)
    main = call.dtypes[0]
    return ConvShape(
        n, c, h, w, k, *pair("kernel", call.attrs["kernel"]), step, (*pads[0], *pads[1]), main,
        cube_result(main, call.attrs), spread, call.attrs["groups"],
    )  # fmt: skip


def is_depthwise(shape: ConvShape) -> bool:
    """Tell whether every channel is a group of its own."""
    return 1 < shape.groups == shape.c == shape.k


def _applies(call: Call, chip: Chip) -> bool:
    """Tell whether the cube does it: no groups or one per channel, sums of all taps fit L0C."""
    shape = weight_shape(call)
    return (shape.groups == 1 or is_depthwise(shape)) and has_plan(shape, chip)


def weight_kernel(shape: ConvShape, chip: Chip) -> Kernel:
    """Return the product on the cube, and the sum of partial sums where cores share the pixels.

    Tensors are x, grad, zeros (`ZEROS` of them) and y, FRACTAL_Z; with a group per channel `eye`
    (16, 16) too, and y is row-major. Raises as `weight_plan`.
    """
    depthwise = is_depthwise(shape)
    wide = replace(shape, out_dtype="fp32") if depthwise else shape
    plan = weight_plan(wide, chip)
    launch, splits = weight_gradient_launch(wide, chip, plan), splits_of(wide, plan)
    phases = [renamed(launch, {"y": "total"}) if depthwise else launch]
    if splits > 1:
        count = next(t.elements for t in launch.tensors if t.name == "partial") // splits
        partial = te.placeholder((splits, count), "fp32", "partial")
        y = te.renamed(narrow(te.reduce_sum(partial, 0), wide.out_dtype), "y")
        added = te.lower(te.auto_schedule(y, chip)).phases
        phases += [renamed(phase, {"y": "total"}) if depthwise else phase for phase in added]
    return Kernel(launch.name, (*phases, *(_diagonals(shape, chip) if depthwise else ())))


def _diagonals(shape: ConvShape, chip: Chip) -> tuple[Launch, ...]:
    """Return the phases that take the diagonals of `total` (C1 r s, 16, 16), and store them."""
    blocks, out = shape.blocks[0] * shape.taps, shape.out_dtype
    total = te.placeholder((blocks, FRACTAL, FRACTAL), "fp32", "total")
    eye = te.placeholder((1, FRACTAL, FRACTAL), "fp32", "eye")
    lanes = te.reduce_sum(te.vmul(total, te.broadcast(eye, total.shape)), 1)
    taken = te.lower(te.auto_schedule(te.renamed(narrow(lanes, out), "lanes"), chip)).phases
    image = (1, shape.c, shape.r, shape.s)
    maps = (address_map("NC1HWC0", image, out, c0=FRACTAL), address_map("NCHW", image, out))
    return (*taken, renamed(maps_launch(*maps, chip, "unpack"), {"x": "lanes"}))


def _extra(call: Call) -> dict[str, Values]:
    tensors = {"zeros": np.zeros(ZEROS, numpy_type(call.dtypes[0]))}
    if call.attrs["groups"] > 1:
        tensors["eye"] = np.eye(FRACTAL, dtype=np.float32)
    return tensors


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    if call.attrs["groups"] > 1:
        return (memory["y"].reshape(call.outputs[0]),)
    out = cube_result(call.dtypes[0], call.attrs)
    stored = address_map("FRACTAL_Z", call.outputs[0], out, c0=FRACTAL)
    return (unpack(stored, memory["y"].reshape(-1)),)


_ATTRS = {"kernel": REQUIRED, **ATTRS}
_EXAMPLES = (
    Example(((1, 1, 1, 1), (1, 1, 1, 1)), {"kernel": 1}),
    Example(((2, 16, 8, 8), (2, 16, 8, 8)), {"kernel": 3, "pad": 1}),
    Example(
        ((2, 3, 7, 9), (2, 5, 3, 9)), {"kernel": (3, 2), "stride": (2, 1), "pad": ((1, 0), (0, 1))}
    ),
    Example(((1, 17, 9, 9), (1, 33, 5, 5)), {"kernel": 1, "stride": 2}),
    Example(((1, 4, 9, 8), (1, 6, 9, 8)), {"kernel": 3, "groups": 2, "dilation": 2, "pad": 2}),
    Example(((3, 7, 6, 6), (3, 7, 6, 6)), {"kernel": 3, "groups": 7, "pad": 1}),
)
define(
    "conv2d_grad_weight", ("x", "grad"), _values, _expression,
    "dw[k,c,r,s] = sum over n, i, j of grad[n,k,i,j] x[n, c, i stride + r dilation - pad, ...]",
    outputs=("dw",), attrs=_ATTRS,
    shape_rule=_shape, types=TypeRule(GRADIENT_INPUTS, result=cube_result, unit="cube"),
    slicing=_slices,
    template=Template(
        lambda call, chip: weight_kernel(weight_shape(call), chip), ("x", "grad"), "NC1HWC0",
        extra=_extra, applies=_applies, fetch=_fetch,
    ),
    tolerances=SUMS,
    examples=_EXAMPLES,
)  # fmt: skip
