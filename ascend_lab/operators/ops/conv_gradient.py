"""The two gradients of a convolution as operators: with respect to its image, and its weights.

The gradient of the image is conv_transpose2d(grad, weight), the transposed convolution, in which
every input pixel adds its weighted kernel to the output. It has the attributes of conv2d and, if
the stride does not divide h + pads - reach, the remainder as `output_padding` (see
`input_remainder`).

The gradient of the weights, (k, c / groups, r, s), is conv2d_grad_weight(x, grad), where x
(n, c, h, w) is the input of conv2d and grad (n, k, oh, ow) is d(loss)/d(output). With one group for
each channel it is also the gradient of depthwise_conv2d, (c, 1, r, s).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.kernels.deconv import (
    DeconvShape,
    deconv_kernel,
    pack_deconv,
    unpack_deconv,
)
from ascend_lab.operators.kernels.weight_gradient import ZEROS, splits_of, weight_gradient_launch
from ascend_lab.operators.kernels.weight_plan import has_plan, weight_plan
from ascend_lab.operators.ops import convolution, formats as forms, gradients
from ascend_lab.operators.ops.convolution import (
    ATTRS,
    CONV_TYPES,
    check_groups,
    convolved,
    geometry,
    grouped,
)
from ascend_lab.operators.ops.expressions import (
    Pair,
    add_windows,
    cropped,
    narrow,
    out_size,
    reach,
    wide,
)
from ascend_lab.operators.ops.formats import Pairs, Shape, TypeRule, Values, check_rank, pair, span
from ascend_lab.operators.ops.matmul import SUMS, cube_result
from ascend_lab.operators.ops.operator import REQUIRED, Call, Example, Grads, Template, define
from ascend_lab.operators.ops.slicing import (
    AxisRule,
    Range,
    Ranges,
    Reduction,
    SliceRules,
    Source,
    Window,
)


# -- the gradient of the image --------------------------------------------------------------------
def _output_pads(output_padding: Any) -> Pair:
    return pair("output_padding", output_padding, least=0)


def _output_size(
    size: Pair, kernel: Pair, strides: Pair, pads: Pairs, dilations: Pair, output_pads: Pair
) -> Pair:
    """Return (size - 1) stride + reach - pads + output_pads per axis."""
    spans = reach(kernel, dilations)
    # 3 rows, 3 x 3 kernel, stride 2, no pads, output padding 1: (3 - 1) 2 + 3 + 1 = 8.
    rows, columns = (
        (size[i] - 1) * strides[i] + spans[i] - sum(pads[i]) + output_pads[i] for i in range(2)
    )
    return rows, columns


def _dx_shape(x: Shape, weight: Shape, *bias: Shape, output_padding: Any, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    check_rank("weight (c, k / groups, r, s)", weight, 4)
    groups = attrs["groups"]
    output_pads = _output_pads(output_padding)
    strides, pads, dilations = geometry(**attrs)
    check_groups(x[1], weight[1] * groups, groups)
    if weight[0] != x[1]:
        needed = f"weights of {x[1]} input channels, as x {x}"
        raise errors.ShapeError(needed, f"weight {weight}", "(c, k/groups, r, s)")
    if any(output_pads[i] >= max(strides[i], dilations[i]) for i in range(2)):
        needed = f"output_padding below stride {strides} or dilation {dilations}"
        raise errors.ShapeError(needed, str(output_pads), "reduce it")
    convolution.check_bias(bias, weight[1] * groups)
    out_hw = _output_size(
        (x[2], x[3]), (weight[2], weight[3]), strides, pads, dilations, output_pads
    )
    if min(out_hw) < 1:
        raise errors.ShapeError("an output of at least 1 x 1", str(out_hw), "use less padding")
    return (x[0], weight[1] * groups, *out_hw)


def _dx_values(
    x: Values, weight: Values, *bias: Values, output_padding: Any, groups: int, **attrs: Any
) -> Values:
    strides, pads, dilations = geometry(**attrs)
    kernel = (weight.shape[2], weight.shape[3])
    output_pads = _output_pads(output_padding)
    size = _output_size((x.shape[2], x.shape[3]), kernel, strides, pads, dilations, output_pads)
    # Each pixel (i, j) of x times the kernel: (n, g, k, i, j, r, s), added where it falls below.
    parts = np.einsum(
        "ngcij,gckrs->ngkijrs", grouped(x, groups, 1), grouped(weight, groups, 0), optimize=True
    )
    n, g, k = parts.shape[:3]
    # the padded output is larger than the windows' reach by the output padding, at the far side
    padded_size = tuple(s + sum(p) for s, p in zip(size, pads, strict=True))
    image = add_windows(
        parts.reshape((n, g * k, *parts.shape[3:])), (n, g * k, *padded_size), strides, dilations
    )
    result = cropped(image, pads, size)
    return result + bias[0].reshape(-1, 1, 1) if bias else result


def _deconv_gradients(s: gradients.Site) -> Grads:
    """Return dx, the convolution of the gradient; dw, with image and gradient exchanged; db."""
    net = s.net
    attrs = convolution.window_attrs(s)
    grads = convolution.bias_gradient(s)
    grad = net.in_format(s.g, s.kind().dtype)
    image = s.shape()
    dx = net.conv2d(grad, s.x(1), **attrs)
    if dx.shape != image:  # output_padding left pixels that no window reaches
        dx = net.slice(dx, begin=(0, 0, 0, 0), end=image)
        grad = _reached_grad(s, grad)
    if s.needs_gradient[1]:
        kernel = (s.shape(1)[2], s.shape(1)[3])
        grads[1] = net.conv2d_grad_weight(grad, s.x(0), kernel=kernel, **attrs)
    grads[0] = dx
    return grads


def _reached_grad(s: gradients.Site, grad: Any) -> Any:
    """Return the gradient without the last rows and columns that no window reaches.

    Output padding may exceed the stride if the dilation is larger. conv2d_grad_weight takes a
    remainder below the stride only, so whole strides are cut off.
    """
    output_pads = _output_pads(s.attrs["output_padding"])
    strides = pair("stride", s.attrs["stride"])
    # Output padding 3 at stride 2: 2 rows are cut off, and 1 is left as the remainder.
    unreached = tuple(e - e % n for e, n in zip(output_pads, strides, strict=True))
    end = (*grad.shape[:2], grad.shape[2] - unreached[0], grad.shape[3] - unreached[1])
    return s.net.slice(grad, begin=(0, 0, 0, 0), end=end)


def with_zeros_between(x: te.Tensor, strides: Pair) -> te.Tensor:
    """Return x with stride - 1 zeros between neighbouring pixels."""
    # along each axis: (n) -> (n, 1) -> padded to (n, stride) -> (n stride) -> last zeros cut off;
    # a, b with stride 3 becomes a 0 0 b
    for axis, stride in ((2, strides[0]), (3, strides[1])):
        if stride == 1 or x.shape[axis] == 1:
            continue
        with_gap = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
        widths = tuple((0, stride - 1) if i == axis + 1 else (0, 0) for i in range(5))
        shape = tuple(s * stride if i == axis else s for i, s in enumerate(x.shape))
        padded = te.reshape(te.pad(te.reshape(x, with_gap), widths), shape)
        x = te.slice(padded, *span(shape, axis, 0, shape[axis] - stride + 1))
    return x


def _flipped(weight: te.Tensor, groups: int) -> te.Tensor:
    """Return weights (c, k/g, r, s) rotated by 180 degrees, as a convolution's (k, c/g, r, s)."""
    for axis in (2, 3):
        last_row = weight.shape[axis] - 1
        rows = [
            te.slice(weight, *span(weight.shape, axis, i, i + 1)) for i in range(last_row, -1, -1)
        ]
        if len(rows) > 1:
            weight = te.concat(rows, axis)
    c, k, r, s = weight.shape
    # (c, k / g, r, s) in 2 groups of 3 channels: (2, 3, k / g, r, s), turned to (2, k / g, 3, r,
    # s).
    by_group = te.reshape(weight, (groups, c // groups, k, r, s))
    return te.reshape(te.transpose(by_group, (0, 2, 1, 3, 4)), (groups * k, c // groups, r, s))


def _dx_expression(
    x: te.Tensor, weight: te.Tensor, *bias: te.Tensor, groups: int, **attrs: Any
) -> te.Tensor:
    """Return the convolution of the image with gaps and the flipped kernel.

    The padding is reach - 1 - pad. If pad exceeds reach - 1 it is negative, and rows are cut off.
    """
    strides, pads, dilations = geometry(**attrs)
    spans = reach((weight.shape[2], weight.shape[3]), dilations)
    output_pads = _output_pads(attrs["output_padding"])
    # the convolution pads reach - 1 - pad on both sides, and adds the output padding at the end
    # 3 x 3, pad 1, output padding 1: sides (1, 2).
    sides = [
        (spans[i] - 1 - pads[i][0], spans[i] - 1 - pads[i][1] + output_pads[i]) for i in range(2)
    ]
    image = with_zeros_between(x, strides)
    if min(map(min, sides)) < 0:
        ends = (n - max(0, -high) for n, (_, high) in zip(image.shape[2:], sides, strict=True))
        begin = (0, 0, *(max(0, -low) for low, _ in sides))
        image = te.slice(image, begin, (*image.shape[:2], *ends))
    pad = tuple(max(0, n) for side in sides for n in side)
    out_dtype = cube_result(x.dtype, attrs)
    flipped = _flipped(weight, groups)
    return convolved(image, flipped, bias, out_dtype, pad=pad, dilation=dilations, groups=groups)


def _channel_rule(shapes: tuple[Shape, ...], groups: int) -> AxisRule:
    """Return the rule of the output channels: free, in whole groups."""
    weight = shapes[1]
    grain = weight[1] if groups > 1 else 1
    inner_channels = weight[0] // groups
    sources = [Source(2, 0, grain=grain)] if len(shapes) > 2 else []
    if groups > 1:
        sources += [Source(0, 1, grain=inner_channels), Source(1, 0, grain=inner_channels)]
    else:
        sources += [Source(1, 1)]
    return AxisRule(1, "free", tuple(sources), (1,), grain)


def _dx_slices(
    shapes: tuple[Shape, ...], *, output_padding: Any, groups: int, **attrs: Any
) -> SliceRules:
    weight = shapes[1]
    output_pads = _output_pads(output_padding)
    strides, pads, dilations = geometry(**attrs)
    spans = reach((weight[2], weight[3]), dilations)
    windows = [
        Window(pads[i][0], spans[i] - 1 - pads[i][0], strides[i], dilations[i], inverse=True)
        for i in range(2)
    ]
    rules = (
        AxisRule(0, "free", (Source(0, 0),), (0,)),
        _channel_rule(shapes, groups),
        *(AxisRule(2 + i, "halo", (Source(0, 2 + i, windows[i]),), (2 + i,)) for i in range(2)),
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        """Return the padding that removes what the piece's inputs add outside of the piece.

        If they do not reach its end, output padding extends the result.
        """
        if axis < 2:
            keeps_groups = axis == 0 or groups == 1
            return {} if keeps_groups else {"groups": (piece[1] - piece[0]) // weight[1]}
        i = axis - 2
        first, last = ranges[0][axis]
        # in the padded output of the piece's inputs alone, the piece begins at `low`
        # 8 outputs of 4 rows (3 x 3, stride 2, pad 1): outputs 0 .. 3 read rows 0 .. 2, which alone
        # make (3 - 1) 2 + 3 = 7 rows; low = 1 is cut off in front, high = 7 - 1 - 4 = 2 behind.
        low = piece[0] + pads[i][0] - first * strides[i]
        high = (last - first - 1) * strides[i] + spans[i] - low - (piece[1] - piece[0])
        padding = list(pads)
        filling = list(output_pads)
        padding[i] = (low, max(0, high))
        filling[i] = max(0, -high)
        return {"pad": tuple(padding), "output_padding": tuple(filling)}

    return SliceRules("SlidingWindowDeconv", rules, adjust=adjust)


def deconv_shape(call: Call) -> DeconvShape:
    """Return the transposed convolution of a call in the form that the kernels take."""
    (n, c, h, w), (_, k, r, s) = call.shapes[:2]
    attrs = call.attrs
    main = call.dtypes[0]
    strides, pads, dilations = geometry(**attrs)
    return DeconvShape(
        n=n,
        c=c,
        h=h,
        w=w,
        k=k * attrs["groups"],
        r=r,
        s=s,
        stride=strides,
        pad=(*pads[0], *pads[1]),
        dtype=main,
        out_dtype=cube_result(main, attrs),
        dilation=dilations,
        groups=attrs["groups"],
        output_pad=_output_pads(attrs["output_padding"]),
    )


define(
    "conv_transpose2d",
    ("x", "weight", "bias"),
    _dx_values,
    _dx_expression,
    "the transpose of conv2d: output (size - 1) stride + reach - pads + output_padding",
    attrs={**ATTRS, "output_padding": 0},
    optional=1,
    shape_rule=_dx_shape,
    types=CONV_TYPES,
    slicing=_dx_slices,
    backward=_deconv_gradients,
    template=convolution.conv_template(deconv_shape, deconv_kernel, pack_deconv, unpack_deconv),
    weights=(1, 2),
    tolerances=SUMS,
    examples=(
        Example(((1, 1, 1, 1), (1, 1, 1, 1))),
        Example(((1, 16, 4, 4), (16, 8, 3, 3)), {"stride": 2, "pad": 1, "output_padding": 1}),
        Example(((2, 3, 5, 4), (3, 5, 2, 3)), {"stride": (3, 1), "pad": ((0, 1), (1, 0))}),
        Example(((1, 4, 5, 5), (4, 3, 3, 3)), {"groups": 2, "dilation": 2}),
        Example(((1, 2, 3, 3), (2, 5, 3, 3), (5,)), {"stride": 2}),
    ),
)


# -- the gradient of the weights ------------------------------------------------------------------
GRADIENT_INPUTS = ("fp16", "bf16")
"""Formats of x and grad: whole numbers have no gradients."""


def _dw_shape(x: Shape, grad: Shape, *, kernel: Any, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    check_rank("grad (n, k, oh, ow)", grad, 4)
    groups = attrs["groups"]
    size = pair("kernel", kernel)
    check_groups(x[1], grad[1], groups)
    grad_shape = (x[0], grad[1], *out_size("conv2d", (x[2], x[3]), size, *geometry(**attrs)))
    if grad != grad_shape:
        needed = f"a gradient of shape {grad_shape}: what conv2d makes of x {x}"
        raise errors.ShapeError(needed, str(grad), "check kernel, pad")
    return (grad[1], x[1] // groups, *size)


def _dw_values(x: Values, grad: Values, *, kernel: Any, groups: int, **attrs: Any) -> Values:
    return convolution.conv_weight_slope(grad, x, pair("kernel", kernel), geometry(**attrs), groups)


def _dw_slices(shapes: tuple[Shape, ...], *, groups: int, **attrs: Any) -> SliceRules:
    x, grad = shapes
    features = grad[1] // groups
    grain = features if groups > 1 else 1
    outputs = [Source(1, 1, grain=grain)]
    inputs = AxisRule(1, "free", (Source(0, 1),), (1,))
    if groups > 1:
        outputs.append(Source(0, 1, grain=x[1] // groups))
        inputs = AxisRule(1, "whole", reason="channels of a group lie apart in x", joins=(1,))
    reason = "one pass over the pixels sees every tap"
    taps = (AxisRule(2 + i, "whole", reason=reason, joins=(2 + i,)) for i in range(2))

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        keeps_groups = axis > 0 or groups == 1
        return {} if keeps_groups else {"groups": (piece[1] - piece[0]) // features}

    rules = (AxisRule(0, "free", tuple(outputs), (0,), grain), inputs, *taps)
    return SliceRules("CubeMatmul", rules, (Reduction(((0, 0), (1, 0)), "sum"),), adjust)


def _dw_expression(
    x: te.Tensor, grad: te.Tensor, *, kernel: Any, groups: int, **attrs: Any
) -> te.Tensor:
    """Return dw[k, c, p, q] = sum of grad[b, k, i, j] x[b, c, i stride + p dilation, ...] in fp32.

    The sum runs over images b and pixels i, j, on the vector unit.
    """
    r, s = pair("kernel", kernel)
    strides, pads, dilations = geometry(**attrs)
    n, k, oh, ow = grad.shape
    image = wide(te.pad(x, ((0, 0), (0, 0), *pads)) if np.any(pads) else x)
    image = te.reshape(image, (n, groups, x.shape[1] // groups, *image.shape[2:]))
    slope = te.reshape(wide(grad), (n, groups, k // groups, oh, ow))
    pixels = _reduced_axes(n, oh, ow)
    b, i, j = pixels

    def formula(g: Any, f: Any, c: Any, p: Any, q: Any) -> Any:
        row = i * strides[0] + p * dilations[0]
        column = j * strides[1] + q * dilations[1]
        return te.sum(slope[b, g, f, i, j] * image[b, g, c, row, column], pixels)

    # One sum over n oh ow products for each weight.
    total = te.compute((groups, k // groups, x.shape[1] // groups, r, s), formula)
    out_dtype = cube_result(x.dtype, attrs)
    return narrow(te.reshape(total, (k, x.shape[1] // groups, r, s)), out_dtype)


def _reduced_axes(n: int, oh: int, ow: int) -> tuple[Any, Any, Any]:
    """Return the reduction axes: images, rows and columns of the gradient."""
    return te.reduce_axis(n, "b"), te.reduce_axis(oh, "i"), te.reduce_axis(ow, "j")


def weight_gradient_in_blocks(
    x: te.Tensor, grad: te.Tensor, out_dtype: str, **attrs: Any
) -> te.Tensor:
    """Return the sums of `_dw_expression` for images stored as NC1HWC0, in the order of FRACTAL_Z.

    x (n, c1, h, w, 16) and grad (n, k1, oh, ow, 16) give dw (c1, r, s, k1, 16, 16). With a group
    for each channel dw is row-major, (groups, r, s).
    """
    groups: int = attrs["groups"]
    strides, pads, dilations = geometry(**attrs)
    r, s = pair("kernel", attrs["kernel"])
    n, k1, oh, ow, lanes = grad.shape
    slope = wide(grad)
    image = wide(te.pad(x, ((0, 0), (0, 0), *pads, (0, 0))))
    pixels = _reduced_axes(n, oh, ow)
    b, i, j = pixels

    def formula(c: Any, p: Any, q: Any, f: Any, row: Any, lane: Any) -> Any:
        pixel = i * strides[0] + p * dilations[0], j * strides[1] + q * dilations[1]
        return te.sum(slope[b, f, i, j, row] * image[b, c, *pixel, lane], pixels)

    if groups == 1:
        return narrow(te.compute((x.shape[1], r, s, k1, lanes, lanes), formula), out_dtype)
    # With a group for each channel, channel c of x meets channel c of grad only.
    diagonal = te.compute((k1, lanes, r, s), lambda c, lane, p, q: formula(c, p, q, c, lane, lane))
    by_channel = te.reshape(diagonal, (k1 * lanes, r, s))
    return narrow(te.slice(by_channel, (0, 0, 0), (groups, r, s)), out_dtype)


def weight_shape(call: Call) -> kernels.ConvShape:
    """Return the convolution whose weights get the gradient, in the form that the kernels take."""
    (n, c, h, w), (_, k, _, _) = call.shapes
    strides, pads, dilations = geometry(**call.attrs)
    main = call.dtypes[0]
    r, s = pair("kernel", call.attrs["kernel"])
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
        out_dtype=cube_result(main, call.attrs),
        dilation=dilations,
        groups=call.attrs["groups"],
    )


def is_depthwise(shape: kernels.ConvShape) -> bool:
    """Return whether every channel is a separate group."""
    return 1 < shape.groups == shape.c == shape.k


def _applies_to_cube(call: Call, chip: Chip) -> bool:
    """Return whether the cube can be used: one group, or one for each channel, that fits L0C."""
    shape = weight_shape(call)
    return (shape.groups == 1 or is_depthwise(shape)) and has_plan(shape, chip)


def weight_kernel(shape: kernels.ConvShape, chip: Chip) -> isa.Kernel:
    """Return the kernel on the cube, with a phase that adds partial sums if cores share pixels.

    Its tensors are x, grad, `ZEROS` zeros, and y in FRACTAL_Z. With a group for each channel it
    also reads `eye` (16, 16), takes the diagonals of the fractals, and y is row-major. Raises the
    errors of `weight_plan`.
    """
    depthwise = is_depthwise(shape)
    # Diagonals are taken before anything is rounded: the fractals stay in fp32.
    sums_shape = replace(shape, out_dtype="fp32") if depthwise else shape
    plan = weight_plan(sums_shape, chip)
    launch = weight_gradient_launch(sums_shape, chip, plan)
    splits = splits_of(sums_shape, plan)
    # cores that share the pixels store `partial`, which a second phase sums
    phases = [isa.renamed(launch, {"y": "total"}) if depthwise else launch]
    if splits > 1:
        # 4 cores that share the pixels store 4 sums of each weight, one behind the other.
        count = next(t.elements for t in launch.tensors if t.name == "partial") // splits
        partial = te.placeholder((splits, count), "fp32", "partial")
        y = te.renamed(narrow(te.reduce_sum(partial, 0), sums_shape.out_dtype), "y")
        summing_phases = te.lower(te.auto_schedule(y, chip)).phases
        phases += [
            isa.renamed(phase, {"y": "total"}) if depthwise else phase for phase in summing_phases
        ]
    return isa.Kernel(launch.name, (*phases, *(_diagonals(shape, chip) if depthwise else ())))


def _diagonals(shape: kernels.ConvShape, chip: Chip) -> tuple[isa.Launch, ...]:
    """Return the phases that take the diagonals of `total` (C1 r s, 16, 16), and store them.

    A product with the identity `eye` leaves only the diagonal, and a sum over rows collects it.
    """
    blocks = shape.blocks[0] * shape.taps
    out_dtype = shape.out_dtype
    total = te.placeholder((blocks, isa.FRACTAL, isa.FRACTAL), "fp32", "total")
    eye = te.placeholder((1, isa.FRACTAL, isa.FRACTAL), "fp32", "eye")
    # [[a, b], [c, d]] times the identity is [[a, 0], [0, d]]; its column sums are (a, d).
    lanes = te.reduce_sum(te.vmul(total, te.broadcast(eye, total.shape)), 1)
    diagonal_phases = te.lower(
        te.auto_schedule(te.renamed(narrow(lanes, out_dtype), "lanes"), chip)
    ).phases
    image = (1, shape.c, shape.r, shape.s)
    maps = (
        layout.address_map("NC1HWC0", image, out_dtype, c0=isa.FRACTAL),
        layout.address_map("NCHW", image, out_dtype),
    )
    return (
        *diagonal_phases,
        isa.renamed(layout.maps_launch(*maps, chip, "unpack"), {"x": "lanes"}),
    )


def _dw_extra(call: Call) -> dict[str, Values]:
    tensors = {"zeros": np.zeros(ZEROS, forms.numpy_type(call.dtypes[0]))}
    if call.attrs["groups"] > 1:
        tensors["eye"] = np.eye(isa.FRACTAL, dtype=np.float32)
    return tensors


def _dw_fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    if call.attrs["groups"] > 1:
        return (memory["y"].reshape(call.outputs[0]),)
    out_dtype = cube_result(call.dtypes[0], call.attrs)
    fractal_map = layout.address_map("FRACTAL_Z", call.outputs[0], out_dtype, c0=isa.FRACTAL)
    return (layout.unpack(fractal_map, memory["y"].reshape(-1)),)


_DW_EXAMPLES = (
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
    "conv2d_grad_weight",
    ("x", "grad"),
    _dw_values,
    _dw_expression,
    "dw[k,c,r,s] = sum over n, i, j of grad[n,k,i,j] x[n, c, i stride + r dilation - pad, ...]",
    outputs=("dw",),
    attrs={"kernel": REQUIRED, **ATTRS},
    shape_rule=_dw_shape,
    types=TypeRule(GRADIENT_INPUTS, result=cube_result, unit="cube"),
    slicing=_dw_slices,
    template=Template(
        lambda call, chip: weight_kernel(weight_shape(call), chip),
        ("x", "grad"),
        "NC1HWC0",
        extra=_dw_extra,
        applies=_applies_to_cube,
        fetch=_dw_fetch,
    ),
    tolerances=SUMS,
    examples=_DW_EXAMPLES,
)
