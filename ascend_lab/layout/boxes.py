"""Two maps composed: the boxes that one strided copy moves from one layout to the other.

Where both maps step evenly along every axis, source and target address are affine in the same
counters: that part of the array is a box. Blocks and ragged ends cut the array into a few boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import LayoutError
from ascend_lab.layout.maps import AddressMap, format_of


@dataclass(frozen=True, slots=True)
class Dim:
    """One counter of a box: `count` steps, each `source` and `target` elements further."""

    count: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Box:
    """Elements source + sum(i * d.source) that go to target + sum(i * d.target)."""

    dims: tuple[Dim, ...]
    source: int
    target: int

    @property
    def elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(d.count for d in self.dims)

    @property
    def run(self) -> int:
        """Elements that lie one after another at both ends: the burst of its copy."""
        run = 1
        for dim in reversed(self.dims):
            if dim.source != run or dim.target != run:
                break
            run *= dim.count
        return run


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of one logical axis from `start`, counted in even steps: (count, step) pairs."""

    start: int
    counters: tuple[tuple[int, int], ...]


def check_pair(source: AddressMap, target: AddressMap) -> None:
    """Raise `LayoutError` unless both maps hold the same array."""
    kinds = [format_of(layout.format).kind for layout in (source, target)]
    if kinds[0] != kinds[1]:
        raise LayoutError(
            f"two layouts of the same axes, as {source.format} has {' '.join(source.axes)}",
            f"{target.format} with {' '.join(target.axes)}",
            "name the axes of the array: NCHW for images, ND for matrices",
        )
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise LayoutError(
            f"a target of shape {source.shape} in {source.dtype}",
            f"{target.shape} in {target.dtype}",
            "both maps describe one array; cast before or after",
        )


def stride_of(layout: AddressMap, axis: int, step: int) -> int:
    """Return how far the address moves when a logical index moves by `step` inside a block."""
    piece = next(p for p in layout.of_axis(axis) if p.step <= step)
    return piece.stride * (step // piece.step)


def offset_of(layout: AddressMap, axis: int, index: int) -> int:
    """Return the share of logical index `index` of one axis in the address."""
    return sum(index // p.step % p.count * p.stride for p in layout.of_axis(axis))


def copy_boxes(source: AddressMap, target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that move every element once. Raises `LayoutError`."""
    check_pair(source, target)
    axes = range(len(source.shape))
    steps = [sorted({1, *_cuts(source, a), *_cuts(target, a)}) for a in axes]
    spans = [_spans(0, n, s) for n, s in zip(source.shape, steps, strict=True)]
    return tuple(_box(chosen, source, target) for chosen in itertools.product(*spans))


def zero_boxes(target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the padding of `target`; their source strides are 0."""
    steps = [sorted({1, *_cuts(target, a)}) for a in range(len(target.shape))]
    real = [_spans(0, n, s) for n, s in zip(target.shape, steps, strict=True)]
    full = [_spans(0, n, s) for n, s in zip(target.padded_shape, steps, strict=True)]
    boxes: list[Box] = []
    for axis, (size, padded) in enumerate(zip(target.shape, target.padded_shape, strict=True)):
        if size == padded:
            continue
        ends = [_Span(size, ((padded - size, 1),))]
        choices = [*real[:axis], ends, *full[axis + 1 :]]
        boxes += (_box(chosen, None, target) for chosen in itertools.product(*choices))
    return tuple(boxes)


def burst_bytes(source: AddressMap, target: AddressMap) -> int:
    """Return the longest burst of a strided copy between two layouts, in bytes.

    It is the longest run that lies together in both, and the same in both directions. Raises
    `LayoutError` for layouts of different arrays.
    """
    return max(box.run for box in copy_boxes(source, target)) * DTYPE_BYTES[source.dtype]


def _cuts(layout: AddressMap, axis: int) -> list[int]:
    """Return the steps of an axis at which its stride changes: the sizes of its blocks."""
    pieces = [p for p in layout.of_axis(axis) if p.count > 1]
    return [
        outer.step
        for outer, inner in itertools.pairwise(pieces)
        if outer.stride * inner.step != inner.stride * outer.step
    ]


def _spans(start: int, size: int, steps: Sequence[int]) -> list[_Span]:
    """Cut [start, start + size) into whole multiples of the largest step, then of the next."""
    spans = []
    for level in reversed(range(len(steps))):
        count = size // steps[level]
        if count:
            inner = [(steps[i + 1] // steps[i], steps[i]) for i in reversed(range(level))]
            spans.append(_Span(start, ((count, steps[level]), *inner)))
            start, size = start + count * steps[level], size - count * steps[level]
    return spans


def _box(spans: Sequence[_Span], source: AddressMap | None, target: AddressMap) -> Box:
    dims = []
    for axis, span in enumerate(spans):
        for count, step in span.counters:
            far = 0 if source is None else stride_of(source, axis, step)
            dims.append(Dim(count, far, stride_of(target, axis, step)))
    start = [0, 0]
    for axis, span in enumerate(spans):
        start[0] += 0 if source is None else offset_of(source, axis, span.start)
        start[1] += offset_of(target, axis, span.start)
    return Box(merged(dims), start[0], start[1])


def merged(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the same counters, ordered by target stride, neighbours joined where they can be."""
    out: list[Dim] = []
    for dim in sorted((d for d in dims if d.count > 1), key=lambda d: -d.target):
        last = out[-1] if out else None
        if last and (last.source, last.target) == (dim.source * dim.count, dim.target * dim.count):
            out[-1] = replace(dim, count=last.count * dim.count)
        else:
            out.append(dim)
    return tuple(out) or (Dim(1, 1, 1),)


# Arrays from one layout to another in NumPy: one mechanism for every pair.
#
# A map says how to reshape and permute; a conversion undoes one map and applies the other.


Values = NDArray[Any]


def pack(layout: AddressMap, array: Values) -> Values:
    """Store an array of the logical shape: fill up with zeros, cut the axes, permute the pieces.

    Returns an array of `layout.storage_shape`. Raises `LayoutError` for another shape or an
    element size that is not the layout's.
    """
    _check_item(layout, array)
    if array.shape != layout.shape:
        raise LayoutError(
            f"{layout.format}: an array of the logical shape {layout.shape}",
            str(array.shape),
            f"bring its axes into the order {' '.join(layout.axes)}",
        )
    if layout.padded_shape != layout.shape:
        wide = np.zeros(layout.padded_shape, array.dtype)
        wide[tuple(slice(n) for n in layout.shape)] = array
        array = wide
    cut = array.reshape([p.count for a in range(len(layout.shape)) for p in layout.of_axis(a)])
    return np.ascontiguousarray(cut.transpose(_order(layout))).reshape(layout.storage_shape)


def unpack(layout: AddressMap, stored: Values) -> Values:
    """Return the array of the logical shape from its storage: `pack` backwards, padding dropped.

    `stored` may have the storage shape, one axis per piece, or be flat. Raises `LayoutError`.
    """
    _check_item(layout, stored)
    if stored.shape not in (layout.storage_shape, layout.piece_shape, (layout.elements,)):
        raise LayoutError(
            f"{layout.format} {layout.shape} in {layout.dtype}: stored as {layout.storage_shape}",
            str(stored.shape),
            "reshape it, or correct the layout",
        )
    cut = stored.reshape(layout.piece_shape).transpose(np.argsort(_order(layout)))
    array = cut.reshape(layout.padded_shape)[tuple(slice(n) for n in layout.shape)]
    return np.ascontiguousarray(array)


def convert(stored: Values, source: AddressMap, target: AddressMap) -> Values:
    """Return what is stored in layout `source` in layout `target`; padding becomes zero.

    Raises `LayoutError` for maps of different arrays or a wrong storage shape.
    """
    check_pair(source, target)
    return pack(target, unpack(source, stored))


def _order(layout: AddressMap) -> list[int]:
    """Return, for every piece, its place when the pieces stand in the order of logical axes."""
    logical = [p for a in range(len(layout.shape)) for p in layout.of_axis(a)]
    return [logical.index(piece) for piece in layout.pieces]


def _check_item(layout: AddressMap, array: Values) -> None:
    if array.dtype.itemsize != DTYPE_BYTES[layout.dtype]:
        raise LayoutError(
            f"{layout.format}: elements of {DTYPE_BYTES[layout.dtype]} bytes ({layout.dtype})",
            f"{array.dtype.itemsize} ({array.dtype})",
            "C0 depends on the size: cast the array or change the layout's dtype",
        )
