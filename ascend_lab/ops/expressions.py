"""Words that operators are written with: fp32 inside, broadcasting, sliding windows."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ascend_lab import dsl as te
from ascend_lab.limits import WINDOWS, refuse_above
from ascend_lab.ops.formats import Values
from ascend_lab.ops.shapes import Pairs, Shape, broadcast_shape, window_count
from ascend_lab.ops.slicing import AxisRule, Range, Ranges, Source, Window

NARROW = ("fp16", "bf16")


def wide(tensor: te.Tensor) -> te.Tensor:
    """Return a tensor in fp32 if its format is a narrow float, else unchanged."""
    return te.cast_to(tensor, "fp32") if tensor.dtype in NARROW else tensor


def narrow(tensor: te.Tensor, dtype: str) -> te.Tensor:
    """Return a tensor in format `dtype`, cast only if it is not there already."""
    return tensor if tensor.dtype == dtype else te.cast_to(tensor, dtype)


def in_fp32(compute: Callable[..., Any], only: tuple[str, ...] = NARROW) -> Callable[..., Any]:
    """Return `compute` with operands of the formats `only` cast to fp32 and results cast back.

    x fp16 -> fp32 -> compute -> fp16: one rounding at the end, as the reference does it.
    """

    @wraps(compute)
    def lifted(*tensors: te.Tensor, **attrs: Any) -> Any:
        main = tensors[0].dtype
        if main not in only:
            return compute(*tensors, **attrs)
        out = compute(*(wide(t) for t in tensors), **attrs)
        if isinstance(out, tuple):
            return tuple(narrow(t, main) for t in out)
        return narrow(out, main)

    return lifted


def stretch(*tensors: te.Tensor) -> tuple[te.Tensor, ...]:
    """Broadcast tensors to their common shape, explicitly."""
    shape = broadcast_shape("operands", *(t.shape for t in tensors))
    return tuple(t if t.shape == shape else te.broadcast(t, shape) for t in tensors)


def along(tensor: te.Tensor, axis: int, shape: tuple[int, ...]) -> te.Tensor:
    """Broadcast a vector along `axis` of `shape`: (n,) -> (1, .., n, .., 1) -> shape."""
    column = tuple(n if i == axis else 1 for i, n in enumerate(shape))
    return te.broadcast(te.reshape(tensor, column), shape)


# -- sliding windows in NumPy: the view that reads them, and its transpose that adds them up -------
Pair = tuple[int, int]


def reach(kernel: Pair, dilation: Pair) -> Pair:
    """Return the input rows and columns a dilated kernel spans: (k - 1) d + 1."""
    return (kernel[0] - 1) * dilation[0] + 1, (kernel[1] - 1) * dilation[1] + 1


def out_size(
    where: str, size: Pair, kernel: Pair, stride: Pair, pads: Pairs, dilation: Pair = (1, 1)
) -> Pair:
    """Return output height and width; raise `ShapeError` if no window fits."""
    spans = reach(kernel, dilation)
    rows, columns = (window_count(where, size[i], spans[i], stride[i], pads[i]) for i in range(2))
    return rows, columns


def windows(x: Values, kernel: Pair, stride: Pair, dilation: Pair = (1, 1)) -> Values:
    """Return the windows of a padded image (n, c, h, w) as a view (n, c, oh, ow, r, s)."""
    view = sliding_window_view(x, reach(kernel, dilation), axis=(2, 3))
    result: Values = view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return result


def fold_windows(x: Values, kernel: Pair, stride: Pair, combine: np.ufunc) -> Values:
    """Return each window of a padded image folded by a ufunc: (n, c, oh, ow)."""
    seen = windows(x, kernel, stride)
    refuse_above("elements in all windows", seen.size, WINDOWS, "use smaller ones")
    if kernel[0] * kernel[1] > seen.shape[2] * seen.shape[3]:
        whole: Values = combine.reduce(seen, axis=(4, 5))
        return whole
    result: Values = seen[..., 0, 0].copy()
    for tap in range(1, kernel[0] * kernel[1]):
        combine(result, seen[..., tap // kernel[1], tap % kernel[1]], out=result)
    return result


def add_windows(parts: Values, shape: Shape, stride: Pair, dilation: Pair = (1, 1)) -> Values:
    """Return an image (n, c, h, w) with windows (n, c, oh, ow, r, s) added where they were read."""
    image = np.zeros(shape, parts.dtype)
    _, _, oh, ow, kernel_h, kernel_w = parts.shape
    for r in range(kernel_h):
        for s in range(kernel_w):
            top, left = r * dilation[0], s * dilation[1]
            rows = slice(top, top + (oh - 1) * stride[0] + 1, stride[0])
            columns = slice(left, left + (ow - 1) * stride[1] + 1, stride[1])
            image[:, :, rows, columns] += parts[..., r, s]
    return image


def padded(x: Values, pads: Pairs, value: float = 0.0) -> Values:
    """Return an image with rows and columns of one value around it."""
    return np.pad(x, ((0, 0), (0, 0), *pads), constant_values=value)


def cropped(x: Values, pads: Pairs, size: Pair) -> Values:
    """Return the h x w middle of a padded image."""
    (top, _), (left, _) = pads
    return x[:, :, top : top + size[0], left : left + size[1]]


def window_rule(axis: int, kernel: int, stride: int, pads: Pair, dilation: int = 1) -> AxisRule:
    """Return the rule of a height or width axis: output o reads o*stride - pad ... + reach - 1."""
    after = (kernel - 1) * dilation - pads[0]
    window = Window(pads[0], after, stride, dilation)
    plain = kernel == 1 and not sum(pads)
    return AxisRule(axis, "free" if plain else "halo", (Source(0, axis, window),), (axis,))


def piece_pads(rule: AxisRule, pads: Pairs, piece: Range, ranges: Ranges) -> Pairs:
    """Return the padding of a piece: what its windows reach beyond the part it was given."""
    own = pads[rule.axis - 2]
    if own[0] == 0 and rule.kind == "free":
        return pads
    low, high = rule.sources[0].window.needs(*piece)
    first, last = ranges[0][rule.axis]
    changed = (first - low, high - last)
    return tuple(changed if i == rule.axis - 2 else p for i, p in enumerate(pads))
