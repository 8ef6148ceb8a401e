"""Computing while importing: nodes whose inputs are all known and small, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ascend_lab.errors import GraphError
from ascend_lab.graph.onnx.converter import Context
from ascend_lab.graph.onnx.tensors import SMALL, Tensor, Values, known

Fold = Callable[..., Any]


def folded(ctx: Context) -> Tensor | None:
    """Return the result of a node if all its inputs are known and small, else None."""
    fold = FOLDERS.get(ctx.op)
    given = [t for t in ctx.inputs if t is not None and t.known is not None]
    if fold is None or not given or len(given) < len(ctx.inputs):
        return None
    if sum(t.elements for t in given) > SMALL:
        return None
    arrays = [t.array() for t in given]
    with np.errstate(all="ignore"):
        found = fold(ctx, *arrays)
    return None if found is None else known(found)


def _wide(*arrays: Values) -> bool:
    """Tell whether arrays broadcast to more elements than are computed while importing."""
    return int(np.prod(np.broadcast_shapes(*(a.shape for a in arrays)), dtype=object)) > SMALL


def _elementwise(compute: Callable[..., Any]) -> Fold:
    """Return the fold of an elementwise operator; the result has the first operand's type."""

    def fold(ctx: Context, *arrays: Values) -> Values | None:
        if _wide(*arrays):
            return None
        return np.asarray(compute(*arrays)).astype(arrays[0].dtype)

    return fold


def _logical(compute: Callable[..., Any]) -> Fold:
    def fold(ctx: Context, *arrays: Values) -> Values | None:
        return None if _wide(*arrays) else np.asarray(compute(*arrays), np.bool_)

    return fold


def _chained(compute: np.ufunc) -> Fold:
    def fold(ctx: Context, *arrays: Values) -> Values | None:
        if _wide(*arrays):
            return None
        total = arrays[0]
        for array in arrays[1:]:
            total = compute(total, array)
        return np.asarray(total)

    return fold


def _quotient(a: Values, b: Values) -> Values:
    """Divide; whole numbers toward zero."""
    if a.dtype.kind == "f" or a.dtype.kind == "V":
        return np.asarray(a / b)
    if not np.all(b):
        raise GraphError("a divisor that is not 0", "0", "mend the model")
    whole = np.abs(a) // np.abs(b)
    return np.asarray(np.where((a < 0) != (b < 0), -whole, whole))


def _mod(ctx: Context, a: Values, b: Values) -> Values | None:
    if _wide(a, b):
        return None
    if a.dtype.kind in "iu" and not np.all(b):
        raise GraphError("a divisor that is not 0", "0", "mend the model")
    return np.asarray(np.fmod(a, b) if ctx.attr("fmod") else np.mod(a, b))


def _where(ctx: Context, condition: Values, x: Values, y: Values) -> Values | None:
    return None if _wide(condition, x, y) else np.where(condition, x, y)


def _range(ctx: Context, start: Values, limit: Values, delta: Values) -> Values:
    first, last, step = (v.reshape(()).item() for v in (start, limit, delta))
    if step == 0:
        raise GraphError("a step that is not 0", "0", "mend the model")
    count = max(0, int(-(-(last - first) // step)))
    if count > SMALL:
        ctx.unsupported(f"a range of at most {SMALL} numbers", str(count))
    return np.asarray(first + step * np.arange(count), start.dtype)


def _concat(ctx: Context, *arrays: Values) -> Values:
    return np.concatenate(arrays, ctx.attr("axis"))


def _gather(ctx: Context, x: Values, indices: Values) -> Values | None:
    axis = ctx.attr("axis")
    if indices.size * (x.size // max(1, x.shape[axis])) > SMALL:
        return None
    size = x.shape[axis]
    if indices.size and (indices.min() < -size or indices.max() >= size):
        raise GraphError(f"indices from {-size} to {size - 1}", str(indices)[:40], "mend the model")
    return np.take(x, indices, axis)


def _cumulated(ctx: Context, x: Values, axis: Values) -> Values:
    """Return running sums; exclusive ones leave the own element out, reverse ones run back."""
    at = int(axis.reshape(()).item())
    flipped = np.flip(x, at) if ctx.attr("reverse") else x
    total = np.cumsum(flipped, at, dtype=x.dtype)
    total = total - flipped if ctx.attr("exclusive") else total
    return np.asarray(np.flip(total, at) if ctx.attr("reverse") else total)


FOLDERS: dict[str, Fold] = {
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _elementwise(_quotient),
    "Pow": _elementwise(np.power),
    "Neg": _elementwise(np.negative),
    "Abs": _elementwise(np.abs),
    "Sqrt": _elementwise(np.sqrt),
    "Exp": _elementwise(np.exp),
    "Log": _elementwise(np.log),
    "Sin": _elementwise(np.sin),
    "Cos": _elementwise(np.cos),
    "Reciprocal": _elementwise(np.reciprocal),
    "Floor": _elementwise(np.floor),
    "Ceil": _elementwise(np.ceil),
    "Round": _elementwise(np.rint),
    "Sign": _elementwise(np.sign),
    "Mod": _mod,
    "Sum": _chained(np.add),
    "Max": _chained(np.maximum),
    "Min": _chained(np.minimum),
    "Equal": _logical(np.equal),
    "Greater": _logical(np.greater),
    "GreaterOrEqual": _logical(np.greater_equal),
    "Less": _logical(np.less),
    "LessOrEqual": _logical(np.less_equal),
    "And": _logical(np.logical_and),
    "Or": _logical(np.logical_or),
    "Xor": _logical(np.logical_xor),
    "Not": _logical(np.logical_not),
    "Where": _where,
    "Range": _range,
    "Concat": _concat,
    "Gather": _gather,
    "CumSum": _cumulated,
    "NonZero": lambda ctx, x: np.array(np.nonzero(x), np.int64),
}
"""NumPy's form of operators that compute shapes, indices and masks."""
