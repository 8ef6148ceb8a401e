"""Operands of whole-tile instructions: a piece of memory and its step along every axis of a box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.isa import Affine, Region, c0_of


class Memory(Protocol):
    """A buffer or one slot of a queue."""

    def region(
        self,
        offset: Affine | int = 0,
        sizes: Sequence[int] | int | None = None,
        strides: Sequence[int] | None = None,
    ) -> Region:
        """Return a strided region."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements offset + sum(index_d * strides[d]) of a memory; `blocks`: each element of the outer
    axes fills one 32-byte block, the innermost axis repeats within it.
    """

    memory: Memory
    dtype: str
    offset: Affine | int
    strides: tuple[int, ...]
    blocks: bool = False

    def moved(self, axis: int, by: Affine | int) -> View:
        """Return the view `by` steps further along an axis."""
        offset = self.offset + by * self.strides[axis] if self.strides[axis] else self.offset
        return View(self.memory, self.dtype, offset, self.strides, self.blocks)

    def take(self, axes: Sequence[int]) -> View:
        """Return the view of some of the axes, the others at their start."""
        return self.stepping(tuple(self.strides[a] for a in axes))

    def inner(self) -> View:
        """Return the view without its outermost axis."""
        return self.stepping(self.strides[1:])

    def stepping(self, strides: tuple[int, ...]) -> View:
        """Return the view from the same start with other steps."""
        return View(self.memory, self.dtype, self.offset, strides, self.blocks)


Dims = list[tuple[int, tuple[int, ...]]]
"""Per axis: its size, and the step of every operand."""


def coalesce(sizes: Sequence[int], views: Sequence[View]) -> Dims:
    """Return the axes of a box, ones dropped, neighbours merged where all operands allow it."""
    dims: Dims = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        steps = tuple(v.strides[axis] for v in views)
        if dims:
            outer, outer_steps = dims[-1]
            if all(o == s * size for o, s in zip(outer_steps, steps, strict=True)):
                dims[-1] = (outer * size, steps)
                continue
        dims.append((size, steps))
    return dims


def with_dims(views: Sequence[View], dims: Dims) -> list[View]:
    """Return the views with the steps of coalesced axes."""
    return [v.stepping(tuple(steps[n] for _, steps in dims)) for n, v in enumerate(views)]


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the steps of a row-major array."""
    steps, step = [], 1
    for size in reversed(sizes):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def rows_side_by_side(views: Sequence[View], sizes: Sequence[int], repeat_bytes: int) -> int:
    """Return how many rows one repeat of an instruction can take, 1 where rows stay apart.

    Rows, along the last axis but one, are longer than a block and a fraction of a repeat, and lie
    behind each other in the destination; some operand is the same for all.
    """
    if len(sizes) < 2 or any(v.blocks or v.strides[-1] != 1 for v in views):
        return 1
    rows, last = sizes[-2:]
    lanes = min(repeat_bytes // DTYPE_BYTES[v.dtype] for v in views)
    if any(last % c0_of(v.dtype) for v in views) or last == min(c0_of(v.dtype) for v in views):
        return 1
    if lanes % last or rows < 2 * (lanes // last):
        return 1
    steps = [v.strides[-2] for v in views]
    fits = steps[0] == last and 0 in steps and all(s in (0, last) for s in steps)
    return lanes // last if fits else 1


def block_steps(
    sizes: Sequence[int], unit: int, *, always: bool = False
) -> tuple[tuple[int, ...], int]:
    """Row-major steps with rows at multiples of `unit`, and the elements they take.

    A row is the innermost axis with more than one element; a single row is not filled up unless
    `always`.
    """
    long = [d for d, n in enumerate(sizes) if n > 1]
    row = long[-1] if long else len(sizes) - 1
    rows = math.prod(sizes[:row])
    pitch = sizes[row] if rows == 1 and not always else -(-sizes[row] // unit) * unit
    outer = (s * pitch for s in row_major(sizes[:row]))
    return (*outer, *((1,) * (len(sizes) - row))), rows * pitch
