"""Expressions in fp32: narrow operands are cast up first, results are cast back once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.ops.shapes import broadcast_shape

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
