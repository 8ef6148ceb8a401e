"""Local response normalisation: each number divided by a power of its neighbour channels' mean.

Source: Krizhevsky et al. 2012, ImageNet Classification with Deep Convolutional Neural Networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.ops.attributes import is_whole
from ascend_lab.ops.formats import rounded
from ascend_lab.ops.lifting import in_fp32
from ascend_lab.ops.operator import REQUIRED, Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import Shape
from ascend_lab.ops.slicing import AxisRule, SliceRules, Source

Values = NDArray[Any]


def _sides(size: int) -> tuple[int, int]:
    """Return how many channels in front and behind count as neighbours."""
    return (size - 1) // 2, size // 2


def _shape(x: Shape, *, size: Any, **attrs: Any) -> Shape:
    if len(x) < 2 or not is_whole(size) or not 1 <= size <= 2 * x[1] + 1:
        raise ShapeError("x (n, c, ...) and a size from 1 to about 2 c", f"{x}, {size}", "check it")
    return x


def _total(x: Values, size: int, alpha: float, bias: float) -> Values:
    """Return bias + alpha / size times the sum of x^2 over the neighbour channels."""
    around = [(0, 0), _sides(size), *((0, 0) for _ in x.shape[2:])]
    square = np.pad(x * x, around)
    near = np.sum([square[:, i : i + x.shape[1]] for i in range(size)], axis=0)
    found: Values = near * (alpha / size) + bias
    return found


def _values(x: Values, *, size: int, alpha: float, beta: float, bias: float) -> Values:
    found: Values = x / _total(x, size, alpha, bias) ** beta
    return found


def _expression(x: te.Tensor, *, size: int, alpha: float, beta: float, bias: float) -> te.Tensor:
    """Return x e^(-beta ln(total)); the sum of a window of channels is a fold."""
    n, c = x.shape[:2]
    inner = int(np.prod(x.shape[2:], dtype=np.int64))
    flat = te.reshape(x, (n, c, inner))
    square = te.pad(te.vmul(flat, flat), ((0, 0), _sides(size), (0, 0)))
    r = te.reduce_axis(size, "r")
    near = te.compute((n, c, inner), lambda b, k, i: te.sum(square[b, k + r, i], r))
    total = te.vadds(te.vmuls(near, alpha / size), bias)
    slope = te.vexp(te.vmuls(te.vlog(total), -beta))
    return te.reshape(te.vmul(flat, slope), x.shape)


def _slices(shapes: tuple[Shape, ...], *, size: int, **attrs: Any) -> SliceRules:
    """Return free axes but for the channels, whose pieces need their neighbours."""
    before, after = _sides(size)
    rules = [AxisRule(i, "free", (Source(0, i),), (i,)) for i in range(len(shapes[0]))]
    if size > 1:
        rules[1] = AxisRule(1, "whole", reason=f"{before} channels before and {after} after count")
    return SliceRules("SlidingWindow", tuple(rules))


register(
    Operator(
        "lrn",
        ("x",),
        _values,
        in_fp32(_expression),
        "x / (bias + alpha mean of x^2 over `size` neighbour channels)^beta",
        attrs={"size": REQUIRED, "alpha": 1e-4, "beta": 0.75, "bias": 1.0},
        shape_rule=_shape,
        slicing=_slices,
        examples=(
            Example(((1, 1, 1, 1),), {"size": 1}),
            Example(((1, 16, 4, 4),), {"size": 5}),
            Example(((2, 7, 5, 3),), {"size": 3, "alpha": 0.5, "bias": 2.0}),
            Example(((1, 17, 33, 1),), {"size": 7, "alpha": 1.0, "beta": 0.5}),
        ),
        # exp(-beta ln(total)): the errors of both functions add up
        tolerances=rounded(fp32_ulps=24, atol=2.0**-20),
    )
)
