"""Two maps composed: boxes that one strided copy moves, and arrays from layout to layout.

Where both maps step evenly along every axis, source and target address are affine in the same
counters: that part of the array is a box. Blocks and ragged ends cut the array into a few boxes.
"""

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


_Span = tuple[int, tuple[tuple[int, int], ...]]
"""A stretch of one logical axis: its start, and the (count, step) pairs that count it."""


def check_pair(source: AddressMap, target: AddressMap) -> None:
    """Raise `LayoutError` unless both maps hold the same array."""
    kinds = [format_of(layout.format).kind for layout in (source, target)]
    if kinds[0] != kinds[1]:
        needed = f"two layouts of the same axes, as {source.format} has {' '.join(source.axes)}"
        remedy = "name the axes of the array: NCHW for images, ND for matrices"
        raise LayoutError(needed, f"{target.format} with {' '.join(target.axes)}", remedy)
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        needed = f"a target of shape {source.shape} in {source.dtype}"
        got = f"{target.shape} in {target.dtype}"
        raise LayoutError(needed, got, "both maps describe one array; cast before or after")


def copy_boxes(source: AddressMap, target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that move every element once. Raises `LayoutError`."""
    check_pair(source, target)
    steps = [sorted({1, *_cuts(source, a), *_cuts(target, a)}) for a in range(len(source.shape))]
    spans = [_spans(n, s) for n, s in zip(source.shape, steps, strict=True)]
    return tuple(_box(chosen, source, target) for chosen in itertools.product(*spans))


def zero_boxes(target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the padding of `target`; their source strides are 0."""
    steps = [sorted({1, *_cuts(target, a)}) for a in range(len(target.shape))]
    real = [_spans(n, s) for n, s in zip(target.shape, steps, strict=True)]
    full = [_spans(n, s) for n, s in zip(target.padded_shape, steps, strict=True)]
    boxes: list[Box] = []
    for axis, (size, padded) in enumerate(zip(target.shape, target.padded_shape, strict=True)):
        ends = [(size, ((padded - size, 1),))] if size < padded else []
        choices = itertools.product(*real[:axis], ends, *full[axis + 1 :])
        boxes += (_box(chosen, None, target) for chosen in choices)
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


def _spans(size: int, steps: Sequence[int]) -> list[_Span]:
    """Cut [0, size) into whole multiples of the largest step, then of the next."""
    spans, start = list[_Span](), 0
    for level in reversed(range(len(steps))):
        if count := (size - start) // steps[level]:
            inner = [(steps[i + 1] // steps[i], steps[i]) for i in reversed(range(level))]
            spans.append((start, ((count, steps[level]), *inner)))
            start += count * steps[level]
    return spans


def _box(spans: Sequence[_Span], source: AddressMap | None, target: AddressMap) -> Box:
    """Compose the maps over spans of all axes; without a source its addresses are 0."""
    dims, starts = [], []
    for layout in (source, target):
        steps, start = [], 0
        for axis, (first, counters) in enumerate(spans):
            pieces = layout.of_axis(axis) if layout else ()
            start += sum(first // p.step % p.count * p.stride for p in pieces)
            for _, step in counters:
                piece = next((p for p in pieces if p.step <= step), None)
                steps.append(piece.stride * (step // piece.step) if piece else 0)
        dims.append(steps)
        starts.append(start)
    counts = [count for _, counters in spans for count, _ in counters]
    return Box(merged([Dim(*dim) for dim in zip(counts, *dims, strict=True)]), *starts)


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


def whole_blocks(dims: Sequence[Dim], c0: int) -> tuple[list[Box], list[Box]]:
    """Cut a box into boxes of whole blocks (element count a multiple of c0) and what is left.

    Axes that already contribute factors of two are kept; the longest axes are shortened by what is
    still needed, and what they lose is cut again.
    """
    sizes = [d.count for d in dims]
    if not math.prod(sizes) % c0:
        return [Box(tuple(dims), 0, 0)], []
    need, units = c0, [1] * len(sizes)
    for i, size in enumerate(sizes):
        units[i] = math.gcd(need, size)
        need //= units[i]
    for i in sorted(range(len(sizes)), key=lambda i: -(sizes[i] // units[i])):
        factor = min(need, 1 << (sizes[i] // units[i]).bit_length() - 1)
        units[i], need = units[i] * factor, need // factor
    if need > 1:
        return [], [Box(tuple(dims), 0, 0)]
    kept = [size // unit * unit for size, unit in zip(sizes, units, strict=True)]
    found = [Box(_resized(dims, kept), 0, 0)], list[Box]()
    for i, dim in enumerate(dims):
        if kept[i] < dim.count:
            end = _resized(dims, [*kept[:i], dim.count - kept[i], *sizes[i + 1 :]])
            far = kept[i] * dim.source, kept[i] * dim.target
            for boxes, more in zip(found, whole_blocks(end, c0), strict=True):
                boxes.extend(Box(b.dims, b.source + far[0], b.target + far[1]) for b in more)
    return found


def _resized(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(replace(d, count=n) for n, d in zip(sizes, dims, strict=True))


# -- arrays in NumPy: undo one map, apply the other ------------------------------------------------


Values = NDArray[Any]


def pack(layout: AddressMap, array: Values) -> Values:
    """Store an array of the logical shape: fill up with zeros, cut the axes, permute the pieces.

    Returns an array of `layout.storage_shape`. Raises `LayoutError` for another shape or an
    element size that is not the layout's.
    """
    _check_item(layout, array)
    if array.shape != layout.shape:
        needed = f"{layout.format}: an array of the logical shape {layout.shape}"
        got = str(array.shape)
        raise LayoutError(needed, got, f"bring its axes into the order {' '.join(layout.axes)}")
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
        needed = f"{layout.format}: elements of {DTYPE_BYTES[layout.dtype]} bytes ({layout.dtype})"
        remedy = "C0 depends on the size: cast the array or change the layout's dtype"
        raise LayoutError(needed, f"{array.dtype.itemsize} ({array.dtype})", remedy)
