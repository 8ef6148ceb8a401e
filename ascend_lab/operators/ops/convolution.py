"""Convolutions of (n, c, h, w) images: conv2d on the cube, depthwise_conv2d on the vector unit.

Stride, padding, dilation and groups are arbitrary, and a bias is optional.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ascend_lab.errors import ShapeError, UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.kernels.depthwise import depthwise_launch, pack_depthwise
from ascend_lab.operators.ops import expressions, formats as forms, gradients, matmul
from ascend_lab.operators.ops.expressions import (
    Pair,
    along,
    narrow,
    out_size,
    padded,
    reach,
    windows,
)
from ascend_lab.operators.ops.formats import Pairs, Shape, TypeRule, Values, rounded
from ascend_lab.operators.ops.operator import Call, Example, Grads, Template, define
from ascend_lab.operators.ops.slicing import AxisRule, Range, Ranges, Reduction, SliceRules, Source

CONV_INPUTS = tuple(d for d in forms.CUBE_INPUTS if d in isa.ACCUMULATOR)
"""Formats that both the cube and the hand-written kernels accept."""
CONV_TYPES = TypeRule(CONV_INPUTS, (("bias", "result"),), matmul.cube_result, "cube")
COLUMN_BYTES = 2**26
"""Largest size of the columns (im2col) that the reference computes at once, 64 MiB."""
ATTRS = {"stride": 1, "pad": 0, "dilation": 1, "groups": 1, "out_dtype": None}


class Geometry(NamedTuple):
    """The positions of windows: strides, padding and dilations, each for rows and columns."""

    strides: Pair
    pads: Pairs
    dilations: Pair


def geometry(stride: Any, pad: Any, dilation: Any, **others: Any) -> Geometry:
    """Return the attributes stride, padding and dilation as pairs."""
    return Geometry(
        forms.pair("stride", stride),
        forms.pad_pairs("conv", pad),
        forms.pair("dilation", dilation),
    )


def _groups(x: Shape, attrs: Mapping[str, Any]) -> int:
    """Return the number of groups; a depthwise convolution has one group for each channel."""
    groups: int = attrs.get("groups", x[1])
    return groups


def check_groups(channels: int, features: int, groups: Any) -> None:
    """Raise `ShapeError` unless the groups divide input and output channels."""
    if not forms.is_whole(groups) or groups < 1 or channels % groups or features % groups:
        needed = f"groups that divide {channels} input and {features} output channels"
        remedy = "use 1, or the number of channels for a depthwise convolution"
        raise ShapeError(needed, repr(groups), remedy)


def check_bias(bias: tuple[Shape, ...], features: int) -> None:
    """Raise `ShapeError` unless an optional bias has one number per output channel."""
    if bias and bias[0] != (features,):
        raise ShapeError(f"a bias of shape ({features},)", str(bias[0]), "one per output channel")


def _shape(x: Shape, weight: Shape, *bias: Shape, **attrs: Any) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    forms.check_rank("weight (k, c / groups, r, s)", weight, 4)
    groups = attrs["groups"]
    check_groups(x[1], weight[0], groups)
    if weight[1] * groups != x[1]:
        needed = f"weights over {x[1] // groups} channels: {x[1]} of x {x} in {groups} groups"
        raise ShapeError(needed, f"{weight[1]} in weight {weight}", "change groups or the weights")
    check_bias(bias, weight[0])
    size = (x[2], x[3])
    kernel = (weight[2], weight[3])
    return (x[0], weight[0], *out_size("conv2d", size, kernel, *geometry(**attrs)))


# -- NumPy ----------------------------------------------------------------------------------------
def grouped(values: Values, groups: int, axis: int) -> Values:
    """Return channels (.., c, ..) as (.., groups, c / groups, ..)."""
    # 6 channels in 2 groups: (n, 6, h, w) becomes (n, 2, 3, h, w).
    return values.reshape(
        (*values.shape[:axis], groups, values.shape[axis] // groups, *values.shape[axis + 1 :])
    )


def conv_values(
    x: Values, weight: Values, positions: Geometry, groups: int, pad_value: int = 0
) -> Values:
    """Return the convolution as products of weights and im2col columns, for some rows at a time.

    `pad_value` is the value of padding: in a quantised image the zero point, which stands for 0.
    """
    kernel = (weight.shape[2], weight.shape[3])
    # (groups, features / groups, channels * taps): a row holds the weights of one output channel.
    matrices = grouped(weight, groups, 0)
    matrices = matrices.reshape((*matrices.shape[:2], -1))
    window_view = windows(
        padded(x, positions.pads, pad_value), kernel, positions.strides, positions.dilations
    )
    n, _, out_h, out_w = window_view.shape[:4]
    result = np.empty((n, groups, matrices.shape[1], out_h, out_w), np.result_type(x, weight))
    row_bytes = groups * matrices.shape[2] * out_w * window_view.itemsize
    # 64 channels, 3 x 3 taps, 112 columns in fp64: 64 * 9 * 112 * 8 = 516 kB an output row, so 130
    # rows at once.
    rows = max(1, COLUMN_BYTES // max(1, row_bytes))
    for image in range(n):
        for top in range(0, out_h, rows):
            strip = window_view[image, :, top : top + rows].transpose(0, 3, 4, 1, 2)
            # (groups, features / groups, taps) @ (groups, taps, pixels)
            columns = strip.reshape((groups, matrices.shape[2], -1))
            products = matrices @ columns
            result[image, :, :, top : top + rows] = products.reshape(
                (*products.shape[:2], -1, out_w)
            )
    return result.reshape((n, weight.shape[0], out_h, out_w))


def conv_weight_slope(
    grad: Values, x: Values, kernel: Pair, positions: Geometry, groups: int
) -> Values:
    """Return d/dweight: windows times output gradients, summed over images and pixels."""
    window_view = windows(padded(x, positions.pads), kernel, positions.strides, positions.dilations)
    window_view = grouped(window_view[:, :, : grad.shape[2], : grad.shape[3]], groups, 1)
    # n images, g groups, k features and c channels of a group, i j output pixels, r s taps.
    slope: Values = np.einsum(
        "ngkij,ngcijrs->gkcrs", grouped(grad, groups, 1), window_view, optimize=True
    )
    return slope.reshape((grad.shape[1], *slope.shape[2:]))


def _values(x: Values, weight: Values, *bias: Values, **attrs: Any) -> Values:
    pad_value = attrs.get("pad_value", 0)
    result = conv_values(x, weight, geometry(**attrs), _groups(x.shape, attrs), pad_value)
    return result + bias[0].reshape(-1, 1, 1) if bias else result


# -- gradients ------------------------------------------------------------------------------------
def input_remainder(size: Pair, kernel: Pair, stride: Any, pad: Any, dilation: Any = 1) -> Pair:
    """Return the number of last rows and columns that no window reads.

    It is (size + pads - reach) mod stride. conv_transpose2d needs it as `output_padding` to produce
    an image of `size`. With size 8, a 3 x 3 kernel, stride 2 and no padding, windows start at rows
    0, 2 and 4; row 7 is never read.
    """
    strides, pads, dilations = geometry(stride, pad, dilation)
    spans = reach(kernel, dilations)
    rows, columns = ((size[i] + sum(pads[i]) - spans[i]) % strides[i] for i in range(2))
    return rows, columns


def window_attrs(s: gradients.Site) -> dict[str, Any]:
    """Return stride, padding, dilation and groups."""
    window = {key: s.attrs[key] for key in ("stride", "pad", "dilation")}
    return {"groups": _groups(s.shape(), s.attrs), **window}


def bias_gradient(s: gradients.Site) -> list[Any | None]:
    """Return a list of gradients in which only that of a bias, the sum of each channel, is set."""
    grads: list[Any | None] = [None] * len(s.inputs)
    if len(grads) > 2 and s.needs_gradient[2]:
        sums = s.net.channel_sums(s.net.wide(s.g))
        grads[2] = s.net.shaped(sums, s.shape(2))
    return grads


def conv_gradients(s: gradients.Site) -> Grads:
    """Return dx, the transposed convolution of the gradient with the weights; dw; and db."""
    net = s.net
    attrs = window_attrs(s)
    grads = bias_gradient(s)
    grad = net.in_format(s.g, s.kind().dtype)
    kernel = (s.shape(1)[2], s.shape(1)[3])
    if s.needs_gradient[1]:
        grads[1] = net.conv2d_grad_weight(s.x(0), grad, kernel=kernel, **attrs)
    if s.needs_gradient[0]:
        size = (s.shape()[2], s.shape()[3])
        remainder = input_remainder(size, kernel, attrs["stride"], attrs["pad"], attrs["dilation"])
        grads[0] = net.conv_transpose2d(grad, s.x(1), output_padding=remainder, **attrs)
    return grads


# -- tensor expression and slices -----------------------------------------------------------------
def convolved(
    x: te.Tensor, weight: te.Tensor, bias: tuple[te.Tensor, ...], out_dtype: str, **window: Any
) -> te.Tensor:
    """Return the convolution in a format; a bias is added to fp32 sums, which are rounded once."""
    sums_dtype = out_dtype if not bias or out_dtype == "int32" else "fp32"
    y = te.conv2d(x, weight, out_dtype=sums_dtype, **window)
    if not bias:
        return y
    return narrow(te.vadd(y, along(narrow(bias[0], y.dtype), 1, y.shape)), out_dtype)


def _expression(x: te.Tensor, weight: te.Tensor, *bias: te.Tensor, **attrs: Any) -> te.Tensor:
    strides, pads, dilations = geometry(**attrs)
    if attrs.get("pad_value", 0):
        raise UnsupportedError("zeros around an image", str(attrs["pad_value"]), "use the kernel")
    window = {"stride": strides, "pad": (*pads[0], *pads[1]), "dilation": dilations}
    out_dtype = matmul.cube_result(x.dtype, attrs)
    groups = _groups(x.shape, attrs)
    return convolved(x, weight, bias, out_dtype, groups=groups, **window)


def _slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    weight = shapes[1]
    has_bias = len(shapes) > 2
    groups = _groups(shapes[0], attrs)
    strides, pads, dilations = geometry(**attrs)
    # 16 output channels in 4 groups can be cut at 4, 8 and 12 only: the grain is 4.
    features = weight[0] // groups
    grain = features if groups > 1 else 1
    sources = [Source(1, 0, grain=grain)]
    if has_bias:
        sources.append(Source(2, 0, grain=grain))
    if groups > 1:
        sources.append(Source(0, 1, grain=weight[1]))
    rules = (
        AxisRule(0, "free", (Source(0, 0),), (0,)),
        AxisRule(1, "free", tuple(sources), (1,), grain),
        *expressions.window_rules((weight[2], weight[3]), strides, pads, dilations),
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        if axis == 1 and groups > 1 and "groups" in attrs:
            # Outputs 4 .. 11 of 16 in 4 groups are groups 1 and 2: a convolution of 2 groups.
            return {"groups": (piece[1] - piece[0]) // features}
        return expressions.piece_pads(rules, pads, axis, piece, ranges)

    reductions = () if groups > 1 or has_bias else (Reduction(((0, 1), (1, 1)), "sum"),)
    return SliceRules("SlidingWindow", rules, reductions, adjust)


# -- kernel ----------------------------------------------------------------------------------------
def conv_shape(call: Call) -> kernels.ConvShape:
    """Return the convolution of a call in the form that the kernels take."""
    (n, c, h, w), (k, _, r, s) = call.shapes[:2]
    strides, pads, dilations = geometry(**call.attrs)
    main = call.dtypes[0]
    groups = _groups(call.shapes[0], call.attrs)
    return kernels.ConvShape(
        n=n,
        c=c,
        h=h,
        w=w,
        k=k,
        r=r,
        s=s,
        stride=strides,
        pad=(*pads[0], *pads[1]),
        dtype=main,
        out_dtype=matmul.cube_result(main, call.attrs),
        dilation=dilations,
        groups=groups,
        pad_value=call.attrs.get("pad_value", 0),
    )


# -- a bias ----------------------------------------------------------------------------------------
# The cube's phase stores its sums unrounded as (n, k1, pixels, 16); a second phase on the vector
# unit adds the bias and rounds once.
def conv_template(
    describe: Callable[[Call], Any],
    launch: Callable[[Any, Chip], Any],
    pack: Callable[..., dict[str, Values]],
    unpack: Callable[[Any, Mapping[str, Values]], Values],
) -> Template:
    """Return the template of a convolution; a third input is a bias."""

    def kernel(call: Call, chip: Chip) -> isa.Kernel:
        if len(call.shapes) == 2:
            return isa.as_kernel(launch(describe(call), chip))
        main = call.dtypes[0]
        # fp16 images: sums in fp32, bias added in fp32, one cast to fp16.
        wide_call = replace(call, attrs={**call.attrs, "out_dtype": isa.ACCUMULATOR[main]})
        sums_kernel = isa.as_kernel(launch(describe(wide_call), chip))
        phases = tuple(isa.renamed(phase, {"y": "sums"}) for phase in sums_kernel.phases)
        pixels = next(t.elements for t in sums_kernel.tensors if t.name == "y")
        added = _bias_kernel(call, chip, pixels, matmul.cube_result(main, call.attrs))
        return isa.Kernel(f"{sums_kernel.name}_bias", (*phases, *added.phases))

    def tensors(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        packed = pack(describe(call), *arrays[:2])
        if len(arrays) > 2:
            channels = call.outputs[0][1]
            packed["bias"] = np.zeros((-(-channels // isa.FRACTAL), isa.FRACTAL), arrays[2].dtype)
            packed["bias"].reshape(-1)[:channels] = arrays[2]
        return packed

    return Template(
        kernel, feed=tensors, fetch=lambda call, memory: (unpack(describe(call), memory),)
    )


def _bias_kernel(call: Call, chip: Chip, elements: int, dtype: str) -> isa.Kernel:
    """Return y = sums + bias on (n, k1, pixels, 16), cast to `dtype` at the end."""
    n, channels = call.outputs[0][:2]
    blocks = -(-channels // isa.FRACTAL)
    # 33 channels are 3 blocks of 16; the last one holds one channel and 15 lanes of padding.
    pixels = elements // (n * blocks * isa.FRACTAL)
    sums_dtype = isa.ACCUMULATOR[call.dtypes[0]]
    sums = te.placeholder((n, blocks, pixels, isa.FRACTAL), sums_dtype, "sums")
    bias = narrow(te.placeholder((blocks, isa.FRACTAL), call.dtypes[2], "bias"), sums_dtype)
    # 33 channels: a bias (3, 16), the same for all images and pixels.
    column = te.reshape(bias, (1, blocks, 1, isa.FRACTAL))
    total = narrow(te.vadd(sums, te.broadcast(column, sums.shape)), dtype)
    return te.lower(te.auto_schedule(te.renamed(total, "y"), chip))


_EXAMPLES = (
    Example(((1, 1, 1, 1), (1, 1, 1, 1))),
    Example(((1, 16, 8, 8), (16, 16, 3, 3)), {"pad": 1}),
    Example(((2, 3, 7, 9), (5, 3, 3, 2)), {"stride": (2, 1), "pad": ((1, 0), (0, 1))}),
    Example(((1, 17, 9, 9), (33, 17, 1, 1))),
    Example(((1, 4, 9, 8), (6, 2, 3, 3)), {"groups": 2, "dilation": 2, "pad": 2}),
    Example(((1, 7, 6, 6), (7, 1, 3, 3)), {"groups": 7, "pad": 1}),
    Example(((1, 8, 5, 5), (4, 8, 3, 3), (4,)), {"stride": 2}),
)
define(
    "conv2d",
    ("x", "weight", "bias"),
    _values,
    _expression,
    "y[n,k,i,j] = sum over c, r, s of x[n, c, i stride + r dilation - pad, ...] w[k,c,r,s]",
    attrs={**ATTRS, "pad_value": 0},
    optional=1,
    shape_rule=_shape,
    types=CONV_TYPES,
    slicing=_slices,
    backward=conv_gradients,
    template=conv_template(conv_shape, kernels.conv_launch, kernels.pack_conv, kernels.unpack_conv),
    traits=("convolution",),
    weights=(1, 2),
    tolerances=matmul.SUMS,
    examples=_EXAMPLES,
)


# -- depthwise, on the vector unit ----------------------------------------------------------------
# On the cube a block of 16 channels needs a 16 x 16 fractal of weights for each tap, of which only
# the diagonal is not 0. The vector unit multiplies and adds tap by tap in fp16 instead: it rounds
# twice for each tap, and so is faster but less exact than conv2d with a group for each channel.
def _depthwise_shape(x: Shape, weight: Shape, **attrs: Any) -> Shape:
    forms.check_rank("x (n, c, h, w)", x, 4)
    if weight[:2] != (x[1], 1):
        needed = f"weights ({x[1]}, 1, r, s) for the {x[1]} channels of x {x}"
        raise ShapeError(needed, str(weight), "reshape it")
    return _shape(x, weight, groups=x[1], **attrs)


define(
    "depthwise_conv2d",
    ("x", "weight"),
    _values,
    _expression,
    "each channel convolved with its own kernel, on the vector unit in fp16",
    attrs={"stride": 1, "pad": 0, "dilation": 1},
    shape_rule=_depthwise_shape,
    types=TypeRule(("fp16",)),
    slicing=_slices,
    backward=conv_gradients,
    template=conv_template(conv_shape, depthwise_launch, pack_depthwise, kernels.unpack_conv),
    traits=("convolution",),
    weights=(1,),
    # 9 products and sums in fp16, each off by half an ulp of a number below 32
    tolerances=rounded(ulps=4.0, atol=2.0**-4),
    examples=(
        Example(((1, 1, 1, 1), (1, 1, 1, 1))),
        Example(((1, 16, 8, 8), (16, 1, 3, 3)), {"pad": 1}),
        Example(((2, 17, 7, 9), (17, 1, 3, 2)), {"stride": (2, 1), "pad": ((1, 0), (0, 1))}),
        Example(((1, 7, 9, 9), (7, 1, 3, 3)), {"dilation": 2}),
    ),
)
