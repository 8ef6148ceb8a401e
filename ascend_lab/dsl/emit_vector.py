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
    c0, steps = c0_of(view.dtype), row_major(sizes)
    tile = unit.take(view.dtype, math.prod(sizes) * c0)
    source = View(view.memory, view.dtype, view.offset, tuple(view.strides[d] for d in outer))
    _spread(unit, View(tile, view.dtype, 0, tuple(s * c0 for s in steps)), source, sizes)
    strides = [0] * (len(dims) - 1)
    for d, s in zip(outer, steps, strict=True):
        strides[d] = s * c0
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
    to, what = with_dims((dst, src), dims)
    _spread_rows(unit, to, what, [n for n, _ in dims])


def _spread_rows(unit: Unit, dst: View, src: View, sizes: list[int]) -> None:
    if len(sizes) > 1:
        with unit.repeat(sizes[0]) as index:
            rest = range(1, len(sizes))
            _spread_rows(
                unit, dst.moved(0, index).take(rest), src.moved(0, index).take(rest), sizes[1:]
            )
        return
    c0, count = c0_of(src.dtype), sizes[0]
    for at, part in unit.parts(count, min(count, 8 * unit.builder.chip.max_repeat)):
        out = dst.memory.region(dst.offset + at * c0, (part, c0))
        unit.builder.vector("vbrcb", out, src.memory.region(src.offset + at, part))


def _emit_side_by_side(
    unit: Unit, op: Op, views: Sequence[View], sizes: Sequence[int], factor: int
) -> None:
    """Emit with `factor` rows as one, operands that repeat copied as often side by side."""
    *outer, rows, last = sizes
    wide, tiles, operands = factor * last, [], []
    for v in views:
        if v.strides[-2]:
            operands.append(View(v.memory, v.dtype, v.offset, (*v.strides[:-2], wide, 1)))
            continue
        own = [n if v.strides[d] else 1 for d, n in enumerate(outer)]
        tiles.append(unit.take(v.dtype, math.prod(own) * wide))
        steps = tuple(s * wide for s in row_major(own))
        copy = View(tiles[-1], v.dtype, 0, (*steps, last, 1))
        _emit(unit, Op("vcopy"), [copy, v], [*own, factor, last])
        steps = tuple(s if v.strides[d] else 0 for d, s in enumerate(steps))
        operands.append(View(tiles[-1], v.dtype, 0, (*steps, 0, 1)))
    whole, rest = divmod(rows, factor)
    _emit(unit, op, operands, [*outer, whole, wide])
    if rest:
        ends = [v.moved(len(outer), whole) for v in operands]
        _emit(unit, op, [v.take([*range(len(outer)), -1]) for v in ends], [*outer, rest * last])
    for tile in tiles:
        unit.give(tile)


def _emit(unit: Unit, op: Op, views: list[View], sizes: list[int]) -> None:
    """Choose which axis is repeated by the instruction; loop over the others."""
    lanes = min(unit.builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[v.dtype] for v in views)
    *outer, last = sizes
    blocks = any(v.blocks for v in views[1:])
    if not outer and not blocks:
        _run(unit, op, views, last, lanes)
        return
    if not outer:
        outer = [1]
        views = [View(v.memory, v.dtype, v.offset, (0, *v.strides), v.blocks) for v in views]
    rows = max(range(len(outer)), key=lambda d: outer[d])
    chunks, tails = last // lanes, (1 if last % lanes else 0)
    by_rows = (chunks + tails) * -(-outer[rows] // unit.builder.chip.max_repeat)
    by_lanes = outer[rows] * (-(-chunks // unit.builder.chip.max_repeat) + tails)
    if by_lanes < by_rows and not blocks:
        rows = -1
    _loop_over(unit, op, views, outer, last, lanes, rows, 0)


def _loop_over(
    unit: Unit,
    op: Op,
    views: list[View],
    outer: list[int],
    last: int,
    lanes: int,
    rows: int,
    axis: int,
) -> None:
    if axis == len(outer):
        if rows < 0:
            _run(unit, op, views, last, lanes)
        else:
            _rows(unit, op, views, (rows, outer[rows]), last, lanes)
        return
    if axis == rows:
        _loop_over(unit, op, views, outer, last, lanes, rows, axis + 1)
        return
    with unit.repeat(outer[axis]) as index:
        moved = [v.moved(axis, index) for v in views]
        _loop_over(unit, op, moved, outer, last, lanes, rows, axis + 1)


def _run(unit: Unit, op: Op, views: list[View], size: int, lanes: int) -> None:
    """A contiguous run: whole repeats, then the last lanes."""
    whole = size // lanes
    for at, repeats in unit.parts(whole, unit.builder.chip.max_repeat) if whole else ():
        _instruction(unit, op, [_flat(v, at * lanes, repeats, lanes) for v in views])
    if size % lanes:
        _instruction(unit, op, [_flat(v, whole * lanes, 1, size % lanes) for v in views])


def _flat(view: View, at: Affine | int, repeats: int, lanes: int) -> tuple[View, tuple[int, ...]]:
    step = 0 if view.blocks or not view.strides[-1] else 1
    moved = View(view.memory, view.dtype, view.offset + at * step, (lanes * step,), view.blocks)
    return moved, (repeats, lanes)


def _rows(
    unit: Unit, op: Op, views: list[View], rows: tuple[int, int], last: int, lanes: int
) -> None:
    """A block of rows: each instruction does one chunk of lanes in up to 255 rows."""
    axis, count = rows
    c0 = max(c0_of(v.dtype) for v in views)
    if _whole_blocks(views, axis, last):
        _block_rows(unit, op, views, rows, last)
        return
    for at, part in unit.parts(count, unit.builder.chip.max_repeat):
        down = [v.moved(axis, at) for v in views]
        for start, width in _chunks(unit, last, lanes, c0 if any(v.blocks for v in views) else 1):
            moved: list[tuple[View, tuple[int, ...]]] = []
            for v in down:
                step = 0 if v.blocks or not v.strides[-1] else 1
                here = View(
                    v.memory, v.dtype, v.offset + start * step, (v.strides[axis],), v.blocks
                )
                moved.append((here, (part, width)))
            _instruction(unit, op, moved)


def _whole_blocks(views: Sequence[View], axis: int, last: int) -> bool:
    """True if a row is one 32-byte block in every operand, and rows lie at whole blocks."""
    return all(
        last == c0_of(v.dtype)
        and v.strides[-1] == 1
        and not v.blocks
        and not v.strides[axis] % last
        for v in views
    )


def _block_rows(
    unit: Unit, op: Op, views: Sequence[View], rows: tuple[int, int], last: int
) -> None:
    """Rows of one block each: a repeat takes as many as it has blocks."""
    axis, count = rows
    each = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES
    whole = count // each

    def emit(at: Affine | int, repeats: int, blocks: int) -> None:
        regions = []
        for v in views:
            step = v.strides[axis]
            sizes, strides = (repeats, blocks, last), (step * blocks, step, 1)
            regions.append(v.memory.region(v.offset + at * step, sizes, strides))
        _vector(unit, op, regions)

    for at, repeats in unit.parts(whole, unit.builder.chip.max_repeat) if whole else ():
        emit(at * each, repeats, each)
    if count % each:
        emit(whole * each, 1, count % each)


def _chunks(unit: Unit, last: int, lanes: int, block: int) -> Iterator[tuple[Affine | int, int]]:
    """Yield chunks of lanes; the last one split at whole blocks if an operand repeats blocks."""
    yield from unit.parts(last - last % lanes, lanes) if last >= lanes else ()
    at, rest = last - last % lanes, last % lanes
    if block > 1 and rest > block and rest % block:
        yield at, rest - rest % block
        at, rest = at + rest - rest % block, rest % block
    if rest:
        yield at, rest


def _instruction(unit: Unit, op: Op, operands: list[tuple[View, tuple[int, ...]]]) -> None:
    regions = []
    for view, (repeats, lanes) in operands:
        c0 = c0_of(view.dtype)
        if view.blocks and lanes > c0:
            region = view.memory.region(
                view.offset, (repeats, lanes // c0, c0), (view.strides[0], 0, 1)
            )
        else:
            region = view.memory.region(view.offset, (repeats, lanes), (view.strides[0], 1))
        regions.append(region)
    _vector(unit, op, regions)


def _vector(unit: Unit, op: Op, regions: Sequence[Region]) -> None:
    unit.builder.vector(
        op.name,
        *regions,
        scalar=op.number,
        compare=op.mode if op.name == "vcmp" else None,
        rounding=op.mode
        if op.name == "vconv" and regions[0].buffer.dtype[:3] in ("int", "uin")
        else None,
    )


def fill(unit: Unit, dst: View, sizes: Sequence[int], number: float) -> None:
    """Emit dst[box] = number."""
    apply(unit, Op("vdup", number), dst, (), sizes)
