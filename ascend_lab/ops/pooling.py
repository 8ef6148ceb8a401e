"""The kernels of pooling: images lie in device memory as NC1HWC0, and windows are folded there.

Rows of `C0` channels stay together, so that every window element is one contiguous block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Kernel
from ascend_lab.layout import address_map, pack, unpack
from ascend_lab.ops.expressions import (
    Pair,
    fold_windows,
    in_fp32,
    narrow,
    out_size,
    padded,
    piece_pads,
    wide,
    window_rule,
)
from ascend_lab.ops.formats import FLOATS, Tolerances, TypeRule, Values, exact, numpy_type, rounded
from ascend_lab.ops.operator import (
    REQUIRED,
    Call,
    Domain,
    Example,
    Template,
    define,
)
from ascend_lab.ops.reduction import shared
from ascend_lab.ops.shapes import Pairs, Shape, check_rank, pad_pairs, pair
from ascend_lab.ops.slicing import AxisRule, Range, Ranges, Reduction, SliceRules, Source

Geometry = Callable[[Call], tuple[Pair, Pair, Pairs]]
LOWEST = {"fp16": -65504.0, "fp32": -3.0e38, "bf16": -3.0e38}
"""What padding holds when the largest element is sought: no value is smaller."""


def folded(x: te.Tensor, size: Pair, step: Pair, kind: str) -> te.Tensor:
    """Return the "max" or "sum" of every window of a padded image (n, c1, h, w, c0)."""
    n, c1, h, w, c0 = x.shape
    out = (n, c1, (h - size[0]) // step[0] + 1, (w - size[1]) // step[1] + 1, c0)
    r, s = te.reduce_axis(size[0], "r"), te.reduce_axis(size[1], "s")
    fold = te.max if kind == "max" else te.sum

    def formula(b: Any, c: Any, i: Any, j: Any, lane: Any) -> Any:
        return fold(x[b, c, r + i * step[0], s + j * step[1], lane], (r, s))

    return te.compute(out, formula)


def _blocks(call: Call) -> tuple[int, ...]:
    return address_map("NC1HWC0", call.shapes[0], call.dtypes[0]).storage_shape


def _edges(pads: Pairs) -> tuple[tuple[int, int], ...]:
    return ((0, 0), (0, 0), *pads, (0, 0))


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    x = arrays[0]
    return {"x": pack(address_map("NC1HWC0", x.shape, call.dtypes[0]), x)}


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    layout = address_map("NC1HWC0", call.outputs[0], call.dtypes[0])
    return (unpack(layout, memory["y"].reshape(-1)),)


def max_kernel(geometry: Geometry) -> Template:
    """Return the template of maximum pooling."""

    def build(call: Call, chip: Chip) -> Kernel:
        size, step, pads = geometry(call)
        x = te.placeholder(_blocks(call), call.dtypes[0], "x")
        padded = te.pad(x, _edges(pads), LOWEST[x.dtype])
        values = wide(padded) if x.dtype == "bf16" else padded
        y = narrow(folded(values, size, step, "max"), x.dtype)
        return te.lower(te.auto_schedule(te.renamed(y, "y"), chip))

    return Template(build, _feed, _fetch)


def average_kernel(geometry: Geometry, counts: Callable[[Call], Values]) -> Template:
    """Return the template of average pooling; `counts(call)` (oh, ow) is what to divide by.

    Where all counts are equal they are a number of the program; otherwise their reciprocals are a
    small fp32 tensor `rate` beside x.
    """

    def build(call: Call, chip: Chip) -> Kernel:
        size, step, pads = geometry(call)
        x = te.placeholder(_blocks(call), call.dtypes[0], "x")
        total = folded(wide(te.pad(x, _edges(pads))), size, step, "sum")
        many = counts(call)
        if np.ptp(many) == 0:
            mean = te.vmuls(total, 1.0 / float(many.flat[0]))
        else:
            rate = te.placeholder((*many.shape, 1), "fp32", "rate")
            mean = te.vmul(total, te.broadcast(rate, total.shape))
        return te.lower(te.auto_schedule(te.renamed(narrow(mean, x.dtype), "y"), chip))

    def feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        many, tensors = counts(call), _feed(call, arrays)
        if np.ptp(many):
            tensors["rate"] = (1.0 / many).astype(numpy_type("fp32"))
        return tensors

    return Template(build, feed, _fetch)


# Pooling of (n, c, h, w) images: maximum, average, and both over the whole image.


C0 = 16
"""Channels of one block of the pooling layout NC1HWC0."""


def geometry(kernel: Any, stride: Any, pad: Any) -> tuple[Pair, Pair, Pairs]:
    """Return kernel, stride (default: the kernel) and padding as pairs; padding < kernel."""
    size = pair("kernel", kernel)
    step = size if stride is None else pair("stride", stride)
    pads = pad_pairs("pool", pad)
    if any(max(pads[i]) >= size[i] for i in range(2)):
        raise ShapeError(
            f"padding smaller than the kernel {size}", str(pads), "a window needs a real element"
        )
    return size, step, pads


def _shape(x: Shape, *, kernel: Any, stride: Any, pad: Any, **attrs: Any) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    size, step, pads = geometry(kernel, stride, pad)
    return (*x[:2], *out_size("pool", (x[2], x[3]), size, step, pads))


def _slices(
    shapes: tuple[Shape, ...], *, kernel: Any, stride: Any, pad: Any, **attrs: Any
) -> SliceRules:
    size, step, pads = geometry(kernel, stride, pad)
    rules = (
        AxisRule(0, "free", (Source(0, 0),), (0,)),
        AxisRule(1, "free", (Source(0, 1),), (1,)),
        *(window_rule(2 + i, size[i], step[i], pads[i]) for i in range(2)),
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        return {"pad": piece_pads(rules[axis], pads, piece, ranges)} if axis >= 2 else {}

    return SliceRules("SlidingWindow", rules, adjust=adjust)


def _pooled(x: te.Tensor, size: Pair, step: Pair, pads: Pairs, mode: str) -> te.Tensor:
    """Pool in NC1HWC0, the layout of the operation: channels padded to blocks of 16."""
    n, c, h, w = x.shape
    c1 = -(-c // C0)
    blocks = te.reshape(te.pad(x, ((0, 0), (0, c1 * C0 - c), (0, 0), (0, 0))), (n, c1, C0, h, w))
    image = te.transpose(blocks, (0, 1, 3, 4, 2))
    out = te.pooling2d(image, size, step, (*pads[0], *pads[1]), mode)
    oh, ow = out.shape[2:4]
    back = te.reshape(te.transpose(out, (0, 1, 4, 2, 3)), (n, c1 * C0, oh, ow))
    return back if c == c1 * C0 else te.slice(back, (0, 0, 0, 0), (n, c, oh, ow))


# -- maximum --------------------------------------------------------------------------------------
def _max_values(x: Values, *, kernel: Any, stride: Any, pad: Any) -> Values:
    size, step, pads = geometry(kernel, stride, pad)
    return fold_windows(padded(x, pads, -np.inf), size, step, np.maximum)


def _max(x: te.Tensor, *, kernel: Any, stride: Any, pad: Any) -> te.Tensor:
    return _pooled(x, *geometry(kernel, stride, pad), "max")


# -- average --------------------------------------------------------------------------------------
def window_counts(size: Pair, kernel: Pair, step: Pair, pads: Pairs, include: bool) -> Values:
    """Return how many elements each window averages, (1, 1, oh, ow)."""
    axes = []
    for n, width, stride, (before, after) in zip(size, kernel, step, pads, strict=True):
        real = np.pad(np.ones(n), (before, after), constant_values=float(include))
        sums = np.append(0, np.cumsum(real))
        axes.append((sums[width:] - sums[:-width])[::stride])
    counts: Values = np.multiply.outer(*axes)[None, None]
    return counts


def _average_values(
    x: Values, *, kernel: Any, stride: Any, pad: Any, count_include_pad: bool
) -> Values:
    size, step, pads = geometry(kernel, stride, pad)
    counts = window_counts(x.shape[2:], size, step, pads, count_include_pad)
    result: Values = fold_windows(padded(x, pads), size, step, np.add) / counts
    return result


def _average(
    x: te.Tensor, *, kernel: Any, stride: Any, pad: Any, count_include_pad: bool
) -> te.Tensor:
    """Average with zeros counted; without them divide by the average of an image of ones."""
    size, step, pads = geometry(kernel, stride, pad)
    mean = _pooled(x, size, step, pads, "avg")
    if count_include_pad or not any(map(any, pads)):
        return mean
    row = te.slice(x, (0, 0, 0, 0), (1, 1, *x.shape[2:]))
    ones = te.vadds(te.vmuls(te.vmaxs(te.vmins(row, 0.0), 0.0), 0.0), 1.0)
    share = _pooled(ones, size, step, pads, "avg")
    return te.vdiv(mean, te.broadcast(share, mean.shape))


# -- kernels --------------------------------------------------------------------------------------
def _call_geometry(call: Call) -> tuple[Pair, Pair, Pairs]:
    return geometry(*(call.attrs[a] for a in ("kernel", "stride", "pad")))


def _call_counts(call: Call) -> Values:
    size, step, pads = _call_geometry(call)
    include = call.attrs["count_include_pad"]
    h, w = call.shapes[0][2:]
    counts: Values = window_counts((h, w), size, step, pads, include)[0, 0]
    return counts


# -- the whole image ------------------------------------------------------------------------------
def _global_shape(x: Shape) -> Shape:
    check_rank("x (n, c, h, w)", x, 4)
    return (*x[:2], 1, 1)


def _global_slices(combine: Any) -> Any:
    def slicing(shapes: tuple[Shape, ...]) -> SliceRules:
        free = tuple(AxisRule(i, "free", (Source(0, i),), (i,)) for i in range(2))
        single = tuple(AxisRule(i, "whole", reason="size 1", joins=(i,)) for i in (2, 3))
        ways = tuple(Reduction(((0, i),), combine) for i in (2, 3)) if combine else ()
        return SliceRules("Reduce", (*free, *single), ways)

    return slicing


def _global_mean(x: te.Tensor) -> te.Tensor:
    total = te.reduce_sum(x, (2, 3), keepdims=True)
    return te.vmuls(total, 1.0 / (x.shape[2] * x.shape[3]))


# -- registration ---------------------------------------------------------------------------------
_ATTRS = {"kernel": REQUIRED, "stride": None, "pad": 0}
_EXAMPLES = (
    Example(((1, 1, 1, 1),), {"kernel": 1}),
    Example(((1, 16, 6, 6),), {"kernel": 2}),
    Example(((2, 3, 7, 5),), {"kernel": 3, "stride": 2, "pad": 1}),
    Example(((1, 17, 8, 9),), {"kernel": (3, 2), "stride": (1, 2), "pad": ((1, 0), (0, 1))}),
)
_GLOBAL = tuple(Example((s,)) for s in ((1, 1, 1, 1), (2, 3, 5, 7), (1, 16, 4, 4), (2, 17, 7, 1)))
_LAYOUT = {"x": "NC1HWC0", "y": "NC1HWC0"}


def _pool(name: str, summary: str, formula: Any, compute: Any, backward: Any, **more: Any) -> None:
    base: dict[str, Any] = {"attrs": _ATTRS, "shape_rule": _shape, "slicing": _slices}
    define(
        name, ("x",), formula, compute,
        summary,
        types=TypeRule(FLOATS),
        backward=backward,
        layouts=_LAYOUT,
        **{**base, "examples": _EXAMPLES, **more},
    )  # fmt: skip


_SUMS: Tolerances = rounded(fp32_ulps=16, atol=2.0**-18)
_DISTINCT = {"x": Domain(distinct=True)}
_pool(
    "max_pool2d",
    "largest element of each window; padding never wins",
    _max_values,
    in_fp32(_max, ("bf16",)),
    lambda s: (s.net.max_pool2d_grad(s.x(), s.y(), s.g, **s.attrs),),
    template=max_kernel(_call_geometry),
    domains=_DISTINCT,
    tolerances=exact(),
)
_pool(
    "avg_pool2d",
    "mean of each window, over real elements only or, with count_include_pad, over padding too",
    _average_values,
    in_fp32(_average),
    lambda s: (s.net.avg_pool2d_grad(s.g, size=s.shape()[2:], **s.attrs),),
    template=average_kernel(_call_geometry, _call_counts),
    attrs={**_ATTRS, "count_include_pad": False},
    examples=(
        *_EXAMPLES,
        Example(_EXAMPLES[2].shapes, {**_EXAMPLES[2].attrs, "count_include_pad": True}),
    ),
    tolerances=_SUMS,
)
_pool(
    "global_max_pool",
    "largest element of each channel",
    lambda x: x.max(axis=(2, 3), keepdims=True),
    in_fp32(lambda x: te.reduce_max(x, (2, 3), keepdims=True), ("bf16",)),
    lambda s: (shared(s, s.g, s.y(), (2, 3)),),
    wide=True,
    attrs={},
    shape_rule=_global_shape,
    slicing=_global_slices("max"),
    domains=_DISTINCT,
    examples=_GLOBAL,
    tolerances=exact(),
)
_pool(
    "global_avg_pool",
    "mean of each channel",
    lambda x: x.mean(axis=(2, 3), keepdims=True),
    in_fp32(_global_mean),
    lambda s: (s.net.stretched(s.net.scaled(s.g, 1.0 / prod(s.shape()[2:])), s.shape()),),
    attrs={},
    shape_rule=_global_shape,
    slicing=_global_slices(None),
    examples=_GLOBAL,
    tolerances=_SUMS,
)
