"""Two maps composed: the boxes that one strided copy moves from one layout to the other.

Where both maps step evenly along every axis, source and target address are affine in the same
counters: that part of the array is a box. Blocks and ragged ends cut the array into a few boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import LayoutError
from ascend_lab.layout.formats import format_of
from ascend_lab.layout.maps import AddressMap


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
