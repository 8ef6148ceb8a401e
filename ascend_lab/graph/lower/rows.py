"""Layer norm and softmax of rows on a matrix that lies in fractals.

In FRACTAL_NZ (.., N1, M1, M0, N0) a row is spread over the axes N1 and N0: folds over a row fold
both. There must be no padding in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.ops.lifting import in_fp32


def _axes(x: te.Tensor) -> tuple[int, int]:
    return len(x.shape) - 4, len(x.shape) - 1


def _count(x: te.Tensor) -> int:
    first, last = _axes(x)
    return x.shape[first] * x.shape[last]


def _spread(x: te.Tensor, like: te.Tensor) -> te.Tensor:
    return te.broadcast(x, like.shape)


def _layer_norm(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> te.Tensor:
    share = 1.0 / _count(x)
    mean = te.vmuls(te.reduce_sum(x, _axes(x), keepdims=True), share)
    apart = te.vsub(x, _spread(mean, x))
    square = te.reduce_sum(te.vmul(apart, apart), _axes(x), keepdims=True)
    slope = te.vrsqrt(te.vadds(te.vmuls(square, share), epsilon))
    unit = te.vmul(apart, _spread(slope, x))
    return te.vadd(te.vmul(unit, _spread(scale, x)), _spread(bias, x))


def _softmax(x: te.Tensor, *, axis: int = -1) -> te.Tensor:
    top = te.reduce_max(x, _axes(x), keepdims=True)
    size = te.vexp(te.vsub(x, _spread(top, x)))
    total = te.reduce_sum(size, _axes(x), keepdims=True)
    return te.vdiv(size, _spread(total, x))


ROW_WISE: dict[str, Callable[..., Any]] = {
    "layer_norm": in_fp32(_layer_norm),
    "softmax": in_fp32(_softmax),
}
"""Expressions on FRACTAL_NZ of operators that work along the last axis."""
