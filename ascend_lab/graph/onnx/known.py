"""Known tensors stay known: reshaped, transposed or cast without making large arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.errors import GraphError
from ascend_lab.graph.ir import Fill
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result
from ascend_lab.graph.onnx.tensors import NUMPY, Known, Shape, Tensor, Values


def reshaped(ctx: Context, tensor: Tensor, shape: Shape) -> Result:
    """Return a tensor in another shape of as many elements; known ones stay known."""
    if math.prod(shape) != tensor.elements:
        raise GraphError(f"{ctx.where}: {tensor.elements} elements", str(shape), "keep the number")
    if shape == tensor.shape:
        return tensor
    if tensor.known is None and tensor.elements:
        return ctx.emit("reshape", ctx.value(tensor), shape=shape)
    if tensor.known is None:
        return ctx.known(np.zeros(shape), tensor.elem)
    made: Known
    if isinstance(tensor.known, Fill):
        made = tensor.known
    elif callable(tensor.known):
        made = lambda: tensor.array().reshape(shape)  # noqa: E731
    else:
        made = tensor.array().reshape(shape)
    return Tensor(tensor.elem, shape, known=made)


def transposed(ctx: Context, tensor: Tensor, perm: Shape) -> Result:
    """Return a tensor with its axes permuted; a known one stays known."""
    if tensor.known is None:
        return ctx.emit("transpose", ctx.value(tensor), perm=perm)
    shape = tuple(tensor.shape[p] for p in perm)
    if isinstance(tensor.known, Fill):
        return Tensor(tensor.elem, shape, known=tensor.known)
    return Tensor(tensor.elem, shape, known=lambda: tensor.array().transpose(perm))


def recast(tensor: Tensor, elem: str) -> Tensor:
    """Return a known tensor in another element type, as C and NumPy cast."""
    kind = NUMPY[elem]

    def made() -> Values:
        with np.errstate(all="ignore"):
            return tensor.array().astype(kind)

    if isinstance(tensor.known, Fill):
        with np.errstate(all="ignore"):
            value = np.array(tensor.known.value, NUMPY[tensor.elem]).astype(kind).item()
        return Tensor(elem, tensor.shape, known=Fill(value))
    return Tensor(elem, tensor.shape, known=made)


def sliced(tensor: Tensor, parts: Sequence[slice]) -> Tensor:
    """Return a slice of a known tensor; large ones are read when asked for."""
    lengths = zip(parts, tensor.shape, strict=True)
    shape = tuple(len(range(*part.indices(n))) for part, n in lengths)
    if isinstance(tensor.known, Fill):
        return Tensor(tensor.elem, shape, known=tensor.known)
    return Tensor(tensor.elem, shape, known=lambda: tensor.array()[tuple(parts)])
