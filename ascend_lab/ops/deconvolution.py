"""Transposed convolution: every input pixel adds its weighted kernel to the output."""

from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.kernels.deconv import DeconvShape, deconv_kernel, pack_deconv, unpack_deconv
from ascend_lab.ops.convolution import (
    ATTRS,
    CONV_TYPES,
    bias_slope,
    check_bias,
    check_groups,
    conv_template,
    convolved,
    geometry,
    grouped,
    window_attrs,
)
from ascend_lab.ops.expressions import Pair, add_windows, cropped, reach
from ascend_lab.ops.formats import Pairs, Shape, Values, check_rank, pair, span
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.matmul import SUMS, cube_result
from ascend_lab.ops.operator import Call, Example, Grads, define
from ascend_lab.ops.slicing import AxisRule, Range, Ranges, SliceRules, Source, Window


def _extra(output_padding: Any) -> Pair:
    return pair("output_padding", output_padding, least=0)


def _out(size: Pair, kernel: Pair, step: Pair, pads: Pairs, spread: Pair, extra: Pair) -> Pair:
    """Return (size - 1) stride + reach - pads + extra per axis."""
    spans = reach(kernel, spread)
    rows, columns = ((size[i] - 1) * step[i] + spans[i] - sum(pads[i]) + extra[i] for i in range(2))
    return rows, columns


def _shape(x: Shape, weight: Shape, *bias: Shape, output_padding: Any, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    check_rank("weight (c, k / groups, r, s)", weight, 4)
    groups, extra = attrs["groups"], _extra(output_padding)
    step, pads, spread = geometry(**attrs)
    check_groups(x[1], weight[1] * groups, groups)
    if weight[0] != x[1]:
        needed = f"weights of {x[1]} input channels, as x {x}"
        raise ShapeError(needed, f"weight {weight}", "(c, k/groups, r, s)")
    if any(extra[i] >= max(step[i], spread[i]) for i in range(2)):
        needed = f"output_padding below stride {step} or dilation {spread}"
        raise ShapeError(needed, str(extra), "reduce it")
    check_bias(bias, weight[1] * groups)
    out = _out((x[2], x[3]), (weight[2], weight[3]), step, pads, spread, extra)
    if min(out) < 1:
        raise ShapeError("an output of at least 1 x 1", str(out), "use less padding")
    return (x[0], weight[1] * groups, *out)


def _values(
    x: Values, weight: Values, *bias: Values, output_padding: Any, groups: int, **attrs: Any
) -> Values:
    step, pads, spread = geometry(**attrs)
    kernel, extra = (weight.shape[2], weight.shape[3]), _extra(output_padding)
    size = _out((x.shape[2], x.shape[3]), kernel, step, pads, spread, extra)
    parts = np.einsum(
        "ngcij,gckrs->ngkijrs", grouped(x, groups, 1), grouped(weight, groups, 0), optimize=True
    )
    n, g, k = parts.shape[:3]
    # the far side may reach beyond the windows by the output padding
    room = tuple(s + sum(p) for s, p in zip(size, pads, strict=True))
    image = add_windows(
        parts.reshape((n, g * k, *parts.shape[3:])), (n, g * k, *room), step, spread
    )
    out = cropped(image, pads, size)
    return out + bias[0].reshape(-1, 1, 1) if bias else out


# -- gradients ------------------------------------------------------------------------------------
def _slopes(s: Site) -> Grads:
    """Return dx: the convolution of the gradient; dw with image and gradient exchanged; db."""
    net, attrs, found = s.net, window_attrs(s), bias_slope(s)
    grad, image = net.in_format(s.g, s.kind().dtype), s.shape()
    dx = net.conv2d(grad, s.x(1), **attrs)
    if dx.shape != image:  # output_padding left pixels that no window reaches
        dx = net.slice(dx, begin=(0, 0, 0, 0), end=image)
        grad = _reached(s, grad)
    if s.wanted[1]:
        kernel = (s.shape(1)[2], s.shape(1)[3])
        found[1] = net.conv2d_grad_weight(grad, s.x(0), kernel=kernel, **attrs)
    found[0] = dx
    return found


def _reached(s: Site, grad: Any) -> Any:
    """Return the gradient without the rows and columns of more than one stride of padding."""
    extra, step = _extra(s.attrs["output_padding"]), pair("stride", s.attrs["stride"])
    over = tuple(e - e % n for e, n in zip(extra, step, strict=True))
    end = (*grad.shape[:2], grad.shape[2] - over[0], grad.shape[3] - over[1])
    return s.net.slice(grad, begin=(0, 0, 0, 0), end=end)


# -- tensor expression ----------------------------------------------------------------------------
def stretched(x: te.Tensor, step: Pair) -> te.Tensor:
    """Return x with stride - 1 zeros between neighbouring pixels."""
    for axis, stride in ((2, step[0]), (3, step[1])):
        if stride == 1 or x.shape[axis] == 1:
            continue
        split = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
        widths = tuple((0, stride - 1) if i == axis + 1 else (0, 0) for i in range(5))
        shape = tuple(s * stride if i == axis else s for i, s in enumerate(x.shape))
        wide = te.reshape(te.pad(te.reshape(x, split), widths), shape)
        x = te.slice(wide, *span(shape, axis, 0, shape[axis] - stride + 1))
    return x


def _flipped(weight: te.Tensor, groups: int) -> te.Tensor:
    """Return weights (c, k/g, r, s) turned upside down and as a convolution's (k, c/g, r, s)."""
    for axis in (2, 3):
        last = weight.shape[axis] - 1
        rows = [te.slice(weight, *span(weight.shape, axis, i, i + 1)) for i in range(last, -1, -1)]
        weight = te.concat(rows, axis) if len(rows) > 1 else weight
    c, k, r, s = weight.shape
    split = te.reshape(weight, (groups, c // groups, k, r, s))
    return te.reshape(te.transpose(split, (0, 2, 1, 3, 4)), (groups * k, c // groups, r, s))


def _expression(
    x: te.Tensor, weight: te.Tensor, *bias: te.Tensor, groups: int, **attrs: Any
) -> te.Tensor:
    """Convolve the stretched image with the flipped kernel; negative padding is cut off."""
    step, pads, spread = geometry(**attrs)
    spans = reach((weight.shape[2], weight.shape[3]), spread)
    extra = _extra(attrs["output_padding"])
    sides = [(spans[i] - 1 - pads[i][0], spans[i] - 1 - pads[i][1] + extra[i]) for i in range(2)]
    image = stretched(x, step)
    if min(map(min, sides)) < 0:
        ends = (n - max(0, -high) for n, (_, high) in zip(image.shape[2:], sides, strict=True))
        begin = (0, 0, *(max(0, -low) for low, _ in sides))
        image = te.slice(image, begin, (*image.shape[:2], *ends))
    pad = tuple(max(0, n) for side in sides for n in side)
    out, turned = cube_result(x.dtype, attrs), _flipped(weight, groups)
    return convolved(image, turned, bias, out, pad=pad, dilation=spread, groups=groups)


# -- slices ---------------------------------------------------------------------------------------
def _channels(shapes: tuple[Shape, ...], groups: int) -> AxisRule:
    """Return the rule of the output channels: free, in whole groups."""
    weight = shapes[1]
    grain = weight[1] if groups > 1 else 1
    inner = weight[0] // groups
    sources = [Source(2, 0, grain=grain)] if len(shapes) > 2 else []
    if groups > 1:
        sources += [Source(0, 1, grain=inner), Source(1, 0, grain=inner)]
    else:
        sources += [Source(1, 1)]
    return AxisRule(1, "free", tuple(sources), (1,), grain)


def _slices(
    shapes: tuple[Shape, ...], *, output_padding: Any, groups: int, **attrs: Any
) -> SliceRules:
    weight, extra = shapes[1], _extra(output_padding)
    step, pads, spread = geometry(**attrs)
    spans = reach((weight[2], weight[3]), spread)
    windows = [
        Window(pads[i][0], spans[i] - 1 - pads[i][0], step[i], spread[i], inverse=True)
        for i in range(2)
    ]
    rules = (
        AxisRule(0, "free", (Source(0, 0),), (0,)),
        _channels(shapes, groups),
        *(AxisRule(2 + i, "halo", (Source(0, 2 + i, windows[i]),), (2 + i,)) for i in range(2)),
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        """Cut off what the piece's inputs add outside it; fill up what they do not reach."""
        if axis < 2:
            whole = axis == 0 or groups == 1
            return {} if whole else {"groups": (piece[1] - piece[0]) // weight[1]}
        i = axis - 2
        first, last = ranges[0][axis]
        low = piece[0] + pads[i][0] - first * step[i]
        high = (last - first - 1) * step[i] + spans[i] - low - (piece[1] - piece[0])
        padding, more = list(pads), list(extra)
        padding[i], more[i] = (low, max(0, high)), max(0, -high)
        return {"pad": tuple(padding), "output_padding": tuple(more)}

    return SliceRules("SlidingWindowDeconv", rules, adjust=adjust)


# -- kernel ----------------------------------------------------------------------------------------
def deconv_shape(call: Call) -> DeconvShape:
    """Return the call as the kernels' description of a transposed convolution."""
    (n, c, h, w), (_, k, r, s) = call.shapes[:2]
    attrs, main = call.attrs, call.dtypes[0]
    step, pads, spread = geometry(**attrs)
    return DeconvShape(
        n, c, h, w, k * attrs["groups"], r, s, step, (*pads[0], *pads[1]), main,
        cube_result(main, attrs), spread, attrs["groups"], _extra(attrs["output_padding"]),
    )  # fmt: skip


define(
    "conv_transpose2d", ("x", "weight", "bias"), _values, _expression,
    "the transpose of conv2d: output (size - 1) stride + reach - pads + output_padding",
    attrs={**ATTRS, "output_padding": 0}, optional=1,
    shape_rule=_shape, types=CONV_TYPES, slicing=_slices, backward=_slopes,
    template=conv_template(deconv_shape, deconv_kernel, pack_deconv, unpack_deconv), weights=(1, 2),
    tolerances=SUMS,
    examples=(
        Example(((1, 1, 1, 1), (1, 1, 1, 1))),
        Example(((1, 16, 4, 4), (16, 8, 3, 3)), {"stride": 2, "pad": 1, "output_padding": 1}),
        Example(((2, 3, 5, 4), (3, 5, 2, 3)), {"stride": (3, 1), "pad": ((0, 1), (1, 0))}),
        Example(((1, 4, 5, 5), (4, 3, 3, 3)), {"groups": 2, "dilation": 2}),
        Example(((1, 2, 3, 3), (2, 5, 3, 3), (5,)), {"stride": 2}),
    ),
)  # fmt: skip
