"""Rules of operators that move elements: their gradients move them back, or add them up."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from ascend_lab.graph import TensorType, Value
from ascend_lab.ops.shapes import Shape, axis_of
from ascend_lab.train.rules import Grads, Site, rule


@rule("reshape")
def _reshape(s: Site) -> Grads:
    return (s.net.shaped(s.g, s.shape()),)


@rule("trans_data")
def _trans_data(s: Site) -> Grads:
    return (s.g,)


@rule("transpose")
def _transpose(s: Site) -> Grads:
    rank = len(s.shape())
    perm = s.attrs["perm"] or tuple(reversed(range(rank)))
    inverse = tuple(int(i) for i in np.argsort([p % rank for p in perm]))
    return (s.net.transpose(s.g, perm=inverse),)


@rule("expand")
def _expand(s: Site) -> Grads:
    return (s.net.summed_to(s.g, s.shape()),)


@rule("pad")
def _pad(s: Site) -> Grads:
    begin = tuple(before for before, _ in s.attrs["pads"])
    end = tuple(b + n for b, n in zip(begin, s.shape(), strict=True))
    return (s.net.slice(s.g, begin=begin, end=end),)


@rule("slice")
def _slice(s: Site) -> Grads:
    """Return the gradient with zeros around it; where the slice skips, added into zeros."""
    shape = s.shape()
    steps = s.attrs["step"] or (1,) * len(shape)
    bounds = [slice(b, e).indices(n)[:2] for b, e, n in _ranges(s)]
    grad = s.g
    for axis, step in enumerate(steps):
        if step > 1:
            places = np.arange(*bounds[axis], step, dtype=np.int32)
            grad = _added(s, grad, s.net.constant(places, name="places"), axis, shape[axis])
            bounds[axis] = (0, shape[axis])
    pads = tuple((low, n - high) for (low, high), n in zip(bounds, shape, strict=True))
    return (s.net.pad(grad, pads=pads) if any(map(any, pads)) else grad,)


def _ranges(s: Site) -> list[tuple[int, int, int]]:
    return list(zip(s.attrs["begin"], s.attrs["end"], s.shape(), strict=True))


# -- joining --------------------------------------------------------------------------------------
@rule("concat")
def _concat(s: Site) -> Grads:
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    sizes = tuple(s.shape(i)[axis] for i in range(len(s.node.inputs)))
    found: list[Value | None] = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        shape = s.out_kind().shape
        begin = tuple(end - size if i == axis else 0 for i in range(len(shape)))
        stop = tuple(end if i == axis else n for i, n in enumerate(shape))
        found.append(s.net.slice(s.g, begin=begin, end=stop))
    return found


@rule("split")
def _split(s: Site) -> Grads:
    parts = [
        s.net.number(0.0, s.out_kind(i)) if grad is None else grad for i, grad in enumerate(s.grads)
    ]
    return (s.net.concat(*parts, axis=s.attrs["axis"]) if len(parts) > 1 else parts[0],)


# -- indices --------------------------------------------------------------------------------------
def _added(s: Site, grad: Value, indices: Value, axis: int, size: int) -> Value:
    """Return zeros of `size` along an axis, to which gradients are added where indices say."""
    net, width, rank = s.net, len(indices.shape), len(grad.shape)
    if axis:
        front = (*range(axis, axis + width), *range(axis), *range(axis + width, rank))
        grad = net.transpose(grad, perm=front)
    shape: Shape = (size, *grad.shape[width:])
    zeros = net.number(0.0, TensorType(shape, grad.type.dtype))
    found: Value = net.scatter_add(zeros, indices, grad)
    if axis:
        perm = (*range(1, axis + 1), 0, *range(axis + 1, len(shape)))
        found = net.transpose(found, perm=perm)
    return found


@rule("embedding")
def _embedding(s: Site) -> Grads:
    return _added(s, s.g, s.x(1), 0, s.shape()[0]), None


@rule("gather")
def _gather(s: Site) -> Grads:
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    return _added(s, s.g, s.x(1), axis, s.shape()[axis]), None


@rule("scatter_add")
def _scatter_add(s: Site) -> Grads:
    return s.g, None, s.net.gather(s.g, s.x(1), axis=0)
