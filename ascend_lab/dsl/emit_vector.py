"""Whole-box vector operations: cut a box of any rank into instructions of at most 255 repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.dsl.unit import Op, Unit
from ascend_lab.dsl.views import (
    Dims,
    View,
    coalesce,
    row_major,
    rows_side_by_side,
    with_dims,
)
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, Region, c0_of


def apply(unit: Unit, op: Op, dst: View, srcs: Sequence[View], sizes: Sequence[int]) -> None:
    """Emit dst[box] = op(srcs[box]) for a box of `sizes`; steps of 0 repeat an operand."""
    dims = _lanes_last(coalesce(sizes, (dst, *srcs)))
    views = with_dims((dst, *srcs), dims)
    expanded = [_expand(unit, v, dims) if n else v for n, v in enumerate(views)]
    box = [size for size, _ in dims]
    factor = rows_side_by_side(expanded, box, unit.builder.chip.vector_bytes_per_repeat)
    if factor > 1:
        _emit_side_by_side(unit, op, expanded, box, factor)
    else:
        _emit(unit, op, expanded, box)
    for old, new in zip(views, expanded, strict=True):
        if new.memory is not old.memory:
            unit.give(new.memory)


def _lanes_last(dims: Dims) -> Dims:
    """Put the axis along which the destination is contiguous last."""
    if not dims:
        return [(1, (0,) * 8)]
    place = next((d for d, (_, steps) in enumerate(dims) if steps[0] == 1), None)
    if place is None:
        return [*dims, (1, (0,) * len(dims[0][1]))]
    return [*dims[:place], *dims[place + 1 :], dims[place]]


def _expand(unit: Unit, view: View, dims: Dims) -> View:
    """Turn an operand that repeats along the lanes into one 32-byte block per element."""
    size, step = dims[-1][0], view.strides[-1]
    if step == 1 or size == 1:
        return view
    if step:
        raise ScheduleError(
            "vector operands of neighbouring elements",
            f"elements {step} apart",
            "transpose the tensor first, or vectorise another axis",
        )
    outer = [d for d in range(len(dims) - 1) if view.strides[d]]
    sizes = [dims[d][0] for d in outer]
    c0 = c0_of(view.dtype)
    steps = [s * c0 for s in row_major(sizes)]
    tile = unit.take(view.dtype, math.prod(sizes) * c0)
    _spread(unit, View(tile, view.dtype, 0, tuple(steps)), view.take(outer), sizes)
    strides = [0] * (len(dims) - 1)
    for d, s in zip(outer, steps, strict=True):
        strides[d] = s
    return View(tile, view.dtype, 0, (*strides, 1), True)


def _spread(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Give every element of src a block of dst; rows of neighbours go together."""
    c0 = c0_of(src.dtype)
    dims = coalesce(sizes, (dst, src)) or [(1, (c0, 1))]
    if dims[-1][1][1] != 1:
        raise ScheduleError(
            "neighbouring elements to repeat along the lanes",
            f"steps {src.strides}",
            "copy them to a tile of their own",
        )
    *outer, count = (n for n, _ in dims)
    for to, what in unit.over(outer, with_dims((dst, src), dims)):
        for at, part in unit.parts(count, min(count, 8 * unit.builder.chip.max_repeat)):
            out = to.memory.region(to.offset + at * c0, (part, c0))
            unit.builder.vector("vbrcb", out, what.memory.region(what.offset + at, part))


def _emit_side_by_side(
    unit: Unit, op: Op, views: Sequence[View], sizes: Sequence[int], factor: int
) -> None:
    """Emit with `factor` rows as one, operands that repeat copied as often side by side."""
    *outer, rows, last = sizes
    wide, tiles, operands = factor * last, [], []
    for v in views:
        if v.strides[-2]:
            operands.append(v.stepping((*v.strides[:-2], wide, 1)))
            continue
        own = [n if v.strides[d] else 1 for d, n in enumerate(outer)]
        tiles.append(unit.take(v.dtype, math.prod(own) * wide))
        steps = tuple(s * wide for s in row_major(own))
        copy = View(tiles[-1], v.dtype, 0, (*steps, last, 1))
        _emit(unit, Op("vcopy"), [copy, v], [*own, factor, last])
        steps = tuple(s if v.strides[d] else 0 for d, s in enumerate(steps))
        operands.append(copy.stepping((*steps, 0, 1)))
    whole, rest = divmod(rows, factor)
    _emit(unit, op, operands, [*outer, whole, wide])
    if rest:
        ends = [v.moved(len(outer), whole) for v in operands]
        _emit(unit, op, [v.take([*range(len(outer)), -1]) for v in ends], [*outer, rest * last])
    for tile in tiles:
        unit.give(tile)


def _emit(unit: Unit, op: Op, views: Sequence[View], sizes: Sequence[int]) -> None:
    """Choose which axis is repeated by the instruction, the lanes or rows; loop over the others."""
    chip = unit.builder.chip
    lanes = min(chip.vector_bytes_per_repeat // DTYPE_BYTES[v.dtype] for v in views)
    *outer, last = sizes
    blocks = any(v.blocks for v in views[1:])
    if blocks and not outer:
        outer, views = [1], [v.stepping((0, *v.strides)) for v in views]
    rows = max(range(len(outer)), key=lambda d: outer[d], default=0)
    along = not outer
    if outer and not blocks:
        chunks, tails = last // lanes, (1 if last % lanes else 0)
        by_rows = (chunks + tails) * -(-outer[rows] // chip.max_repeat)
        along = outer[rows] * (-(-chunks // chip.max_repeat) + tails) < by_rows
    if along:
        for inner in unit.over(outer, views):
            _run(unit, op, inner, last, lanes)
        return
    count, around = outer[rows], [d for d in range(len(outer)) if d != rows]
    for inner in unit.over(
        [outer[d] for d in around], [v.take([*around, rows, -1]) for v in views]
    ):
        _rows(unit, op, inner, count, last, lanes)


def _run(unit: Unit, op: Op, views: Sequence[View], size: int, lanes: int) -> None:
    """A contiguous run: whole repeats, then the last lanes."""
    whole, rest = divmod(size, lanes)
    for at, repeats in unit.parts(whole, unit.builder.chip.max_repeat):
        _vector(unit, op, [_strips(v, at * lanes, None, repeats, lanes) for v in views])
    if rest:
        _vector(unit, op, [_strips(v, whole * lanes, None, 1, rest) for v in views])


def _rows(unit: Unit, op: Op, views: Sequence[View], count: int, last: int, lanes: int) -> None:
    """A block of rows: each instruction does one chunk of lanes in up to 255 rows."""
    if all(_whole_block(v, last) for v in views):
        _block_rows(unit, op, views, count, last)
        return
    c0 = max(c0_of(v.dtype) for v in views) if any(v.blocks for v in views) else 1
    for at, part in unit.parts(count, unit.builder.chip.max_repeat):
        down = [v.moved(0, at) for v in views]
        for start, width in _chunks(unit, last, lanes, c0):
            _vector(unit, op, [_strips(v, start, v.strides[0], part, width) for v in down])


def _strips(view: View, at: Affine | int, pitch: int | None, repeats: int, lanes: int) -> Region:
    """Return `repeats` times `lanes` elements from lane `at` on, `pitch` (none: `lanes`) apart.

    An operand that repeats gives the same lanes, or the same block, each time.
    """
    step = 0 if view.blocks or not view.strides[-1] else 1
    offset, c0 = view.offset + at * step, c0_of(view.dtype)
    pitch = lanes * step if pitch is None else pitch
    if view.blocks and lanes > c0:
        return view.memory.region(offset, (repeats, lanes // c0, c0), (pitch, 0, 1))
    return view.memory.region(offset, (repeats, lanes), (pitch, 1))


def _whole_block(view: View, last: int) -> bool:
    """True if a row is one 32-byte block, and rows lie at whole blocks."""
    there = last == c0_of(view.dtype) and view.strides[1] == 1 and not view.blocks
    return there and not view.strides[0] % last


def _block_rows(unit: Unit, op: Op, views: Sequence[View], count: int, last: int) -> None:
    """Rows of one block each: a repeat takes as many as it has blocks."""
    each = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES

    def emit(at: Affine | int, repeats: int, blocks: int) -> None:
        regions = []
        for v in views:
            step = v.strides[0]
            sizes, strides = (repeats, blocks, last), (step * blocks, step, 1)
            regions.append(v.memory.region(v.offset + at * step, sizes, strides))
        _vector(unit, op, regions)

    whole, rest = divmod(count, each)
    for at, repeats in unit.parts(whole, unit.builder.chip.max_repeat):
        emit(at * each, repeats, each)
    if rest:
        emit(whole * each, 1, rest)


def _chunks(unit: Unit, last: int, lanes: int, block: int) -> Iterator[tuple[Affine | int, int]]:
    """Yield chunks of lanes; the last one split at whole blocks if an operand repeats blocks."""
    yield from unit.parts(last - last % lanes, lanes)
    at, rest = last - last % lanes, last % lanes
    if block > 1 and rest > block and rest % block:
        yield at, rest - rest % block
        at, rest = at + rest - rest % block, rest % block
    if rest:
        yield at, rest


def _vector(unit: Unit, op: Op, regions: Sequence[Region]) -> None:
    whole = regions[0].buffer.dtype[:3] in ("int", "uin")
    unit.builder.vector(
        op.name,
        *regions,
        scalar=op.number,
        compare=op.mode if op.name == "vcmp" else None,
        rounding=op.mode if op.name == "vconv" and whole else None,
    )
