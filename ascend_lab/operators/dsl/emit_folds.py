"""Write folds (reductions) as vector instructions: sum, max, min or product over axes of a box.

A fold over rows combines whole slices, 128 elements a repeat in fp16. A fold along the lanes, the
contiguous elements of a row, needs instructions that work across lanes: `vcgadd` makes one sum of
each block of 32 bytes, `vcadd` one of up to 256 bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ascend_lab import errors
from ascend_lab.machine import layout
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.machine.isa import c0_of
from ascend_lab.operators.dsl.emit_vector import (
    Op,
    Unit,
    View,
    apply,
    block_steps,
    coalesce,
    with_dims,
)

COMBINE = {"sum": "vadd", "max": "vmax", "min": "vmin", "prod": "vmul"}
"""Instructions that fold two tiles, element by element."""
REPEAT_FOLDS = {"sum": "vcadd", "max": "vcmax", "min": "vcmin"}
"""Instructions that fold each repeat to one element."""
BLOCK_FOLDS = {"sum": "vcgadd", "max": "vcgmax"}
"""Instructions that fold each 32-byte block of a repeat to one element."""
MIN_SLICE_REPEATS = 8
"""Slices of fewer repeats are combined half with half, in fewer and longer instructions.

One by one, most of their time would be the start-up of instructions.
"""
Sizes = Sequence[int]


@dataclass(frozen=True, slots=True)
class BoxFold:
    """A fold of a box: dst[data axes] = fold of src[fold axes, data axes] over its first axes.

    With `add`, the present contents of `dst` are included in the fold. The column sums of a
    (100, 64) matrix have the fold sizes (100,) and the data sizes (64,).
    """

    dst: View
    src: View
    fold_sizes: Sizes
    data_sizes: Sizes
    add: bool = False


@dataclass(frozen=True, slots=True)
class LaneFold:
    """A fold along the lanes: dst[rows] = fold of src[rows, lanes], where lanes are contiguous."""

    dst: View
    src: View
    rows: Sizes
    lanes: int


def neutral_number(fold: str, dtype: str) -> float:
    """Return the neutral number of a fold: 0, 1, or the format's least or largest number."""
    # -inf changes no maximum; integer formats have no infinity, so their least number is used.
    largest = {"int32": 2147483647.0, "int8": 127.0, "uint8": 255.0}
    top = largest.get(dtype, math.inf)
    return {"sum": 0.0, "prod": 1.0, "max": -top, "min": top}[fold]


# -- over rows: whole slices of the box are combined --------------------------------------------
def fold_box(unit: Unit, fold: str, box: BoxFold) -> None:
    """Emit the fold of a box.

    The axis along which src is contiguous is folded across lanes, the others row by row.
    """
    src = box.src
    fold_sizes = box.fold_sizes
    data_sizes = box.data_sizes
    # An axis of size 1 folds nothing.
    fold_axes = [d for d, n in enumerate(fold_sizes) if n > 1]
    data_axes = range(len(fold_sizes), len(fold_sizes) + len(data_sizes))
    lane_axis = next((d for d in fold_axes if src.strides[d] == 1), None)
    row_axes = [d for d in fold_axes if d != lane_axis]
    row_sizes = [fold_sizes[d] for d in row_axes]
    if lane_axis is None:
        rows = src.take([*row_axes, *data_axes])
        _fold_rows(unit, fold, replace(box, src=rows, fold_sizes=row_sizes))
        return
    source = src.take([*row_axes, *data_axes, lane_axis])
    lanes = fold_sizes[lane_axis]
    if not row_axes and not box.add:
        fold_lanes(unit, fold, LaneFold(box.dst, source, data_sizes, lanes))
        return
    # Lanes first, into scratch with one element a row, then the rows of that.
    results = math.prod(data_sizes)
    block = c0_of(src.dtype)
    pitch = 1 if results == 1 else -(-results // block) * block
    row_steps = (step * pitch for step in layout.row_major(row_sizes))
    scratch = unit.take(src.dtype, pitch * math.prod(row_sizes))
    partial = View(scratch, src.dtype, 0, (*row_steps, *layout.row_major(data_sizes)))
    fold_lanes(unit, fold, LaneFold(partial, source, [*row_sizes, *data_sizes], lanes))
    fold_box(unit, fold, replace(box, src=partial, fold_sizes=row_sizes))
    unit.give(partial.memory)


def _fold_rows(unit: Unit, fold: str, box: BoxFold) -> None:
    """Combine the slices of src one after another into dst."""
    src = box.src
    fold_sizes = box.fold_sizes
    data_sizes = box.data_sizes
    if fold_sizes and 1 not in src.strides[len(fold_sizes) :] and max(data_sizes, default=1) > 1:
        needed = "a fold with contiguous elements along a kept axis, or along the folded one"
        raise errors.ScheduleError(needed, f"steps {src.strides}", "transpose the tensor first")
    op = Op(COMBINE[fold])
    if not fold_sizes and not box.add:
        apply(unit, Op("vcopy"), box.dst, (src,), data_sizes)
        return
    size_bytes = math.prod(data_sizes) * DTYPE_BYTES[src.dtype]
    is_short = size_bytes < MIN_SLICE_REPEATS * unit.builder.chip.vector_bytes_per_repeat
    if len(fold_sizes) == 1 and is_short and fold_sizes[0] >= 4:
        _fold_by_halves(unit, op, box)
        return
    # The longest axis innermost: its slices are one loop, the others are loops around it.
    order = sorted(range(len(fold_sizes)), key=lambda d: fold_sizes[d])
    slices = src.take([*order, *range(len(fold_sizes), len(src.strides))])
    _combine_slices(unit, op, replace(box, src=slices, fold_sizes=[fold_sizes[d] for d in order]))


def _fold_by_halves(unit: Unit, op: Op, box: BoxFold) -> None:
    """Combine the second half of the slices with the first half, repeatedly, in scratch.

    With 7 slices: 3 are combined with the next 3, and the seventh with the first; of the 3 results,
    1 is combined with 1, and then with the third.
    """
    src = box.src
    data_sizes = box.data_sizes
    count = box.fold_sizes[0]
    half = count // 2
    block = c0_of(src.dtype)
    steps, elements = block_steps(data_sizes, block) if data_sizes else ((), 1)
    # Each half starts at a whole block, where vector instructions must begin.
    pitch = -(-elements // block) * block
    rows = View(unit.take(src.dtype, half * pitch), src.dtype, 0, (pitch, *steps))
    top_row = rows.inner()
    apply(unit, op, rows, (src, src.moved(0, half)), [half, *data_sizes])
    if count % 2:
        apply(unit, op, top_row, (top_row, src.moved(0, count - 1).inner()), data_sizes)
    while half > 1:
        count = half
        half = half // 2
        apply(unit, op, rows, (rows, rows.moved(0, half)), [half, *data_sizes])
        if count % 2:
            apply(unit, op, top_row, (top_row, rows.moved(0, count - 1).inner()), data_sizes)
    if box.add:
        apply(unit, op, box.dst, (box.dst, top_row), data_sizes)
    else:
        apply(unit, Op("vcopy"), box.dst, (top_row,), data_sizes)
    unit.give(rows.memory)


def _combine_slices(unit: Unit, op: Op, box: BoxFold) -> None:
    """Combine all slices into dst; without `add` the first instruction combines two slices."""
    src = box.src
    fold_sizes = box.fold_sizes
    if not fold_sizes:
        apply(unit, op, box.dst, (box.dst, src), box.data_sizes)
        return
    start = 0
    if not box.add and len(fold_sizes) > 1:
        _combine_slices(unit, op, replace(box, src=src.inner(), fold_sizes=fold_sizes[1:]))
        start = 1
    elif not box.add:
        apply(unit, op, box.dst, (src.inner(), src.moved(0, 1).inner()), box.data_sizes)
        start = 2
    if fold_sizes[0] > start:
        with unit.repeat(fold_sizes[0] - start) as index:
            inner = src.moved(0, index + start).inner()
            _combine_slices(unit, op, replace(box, src=inner, fold_sizes=fold_sizes[1:], add=True))


# -- along the lanes: the contiguous elements of each row become one element ----------------------
def fold_lanes(unit: Unit, fold: str, job: LaneFold) -> None:
    """Emit the fold of each row along its lanes."""
    dtype = job.src.dtype
    width = unit.builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[dtype]
    if fold == "prod":
        _multiply_lanes(unit, job)
    elif fold in BLOCK_FOLDS and dtype in ("fp16", "fp32"):
        _fold_by_groups(unit, fold, job)
    elif job.lanes > width:
        # A row of 1,000 lanes in int32 becomes 64, one repeat: each combines 15 or 16 of them.
        combined = _scratch_rows(unit, dtype, job.rows, width)
        _combine_chunks(unit, Op(COMBINE[fold]), replace(job, dst=combined), width)
        _fold_repeats(unit, REPEAT_FOLDS[fold], replace(job, src=combined, lanes=width))
        unit.give(combined.memory)
    else:
        _fold_repeats(unit, REPEAT_FOLDS[fold], job)


def _scratch_rows(unit: Unit, dtype: str, rows: Sizes, width: int) -> View:
    """Return scratch for rows of `width` lanes, one behind the other."""
    # Dense: one instruction can then run over the rows of several outer axes.
    tile = unit.take(dtype, math.prod(rows) * width)
    return View(tile, dtype, 0, (*(s * width for s in layout.row_major(rows)), 1))


def _fold_by_groups(unit: Unit, fold: str, job: LaneFold) -> None:
    """Fold every block to one element, repeatedly, until a row is one block; then fold that.

    A row of 1,000 numbers in fp16 has 63 blocks: 63 sums in 4 blocks, then 4 sums in 1 block.
    `vcgadd` takes one cycle per repeat, while `vadd` takes two. Rows of few blocks are first
    combined block by block, eight rows per repeat.
    """
    dtype = job.src.dtype
    rows = job.rows
    block = c0_of(dtype)
    scratch_lines = list[View]()
    while job.lanes > block:
        blocks = -(-job.lanes // block)
        if _is_faster_by_blocks(unit, COMBINE[fold], math.prod(rows), blocks):
            lanes_left = block
            lines = _scratch_rows(unit, dtype, rows, block)
            _combine_chunks(unit, Op(COMBINE[fold]), replace(job, dst=lines), block)
        else:
            lanes_left = -(-blocks // block) * block
            lines = _scratch_rows(unit, dtype, rows, lanes_left)
            if lanes_left > blocks:
                # 63 sums of blocks do not fill 4 blocks: the rest must not change the fold.
                neutral = Op("vdup", neutral_number(fold, dtype))
                last_block = lines.moved(len(rows), lanes_left - block)
                apply(unit, neutral, last_block, (), [*rows, block])
            blocks_to_elements(unit, fold, replace(job, dst=lines))
        scratch_lines.append(lines)
        job = replace(job, src=lines, lanes=lanes_left)
    _fold_last_blocks(unit, fold, job)
    for lines in scratch_lines:
        unit.give(lines.memory)


def _is_faster_by_blocks(unit: Unit, op: str, rows: int, blocks: int) -> bool:
    """True if combining the blocks of rows first takes fewer cycles than folding each block."""
    chip = unit.builder.chip
    cost = chip.vector_costs[op]
    group = chip.vector_costs["vcgadd"]
    blocks_per_repeat = chip.vector_bytes_per_repeat // BLOCK_BYTES
    repeats_by_rows = -(-rows // blocks_per_repeat)
    repeats_by_groups = -(-blocks // blocks_per_repeat)
    # cycles of an instruction = head + slope * repeats
    by_rows = (blocks - 1) * (cost.head_cycles + cost.slope_cycles * repeats_by_rows)
    return by_rows < repeats_by_groups * (group.head_cycles + group.slope_cycles * rows)


def blocks_to_elements(unit: Unit, fold: str, job: LaneFold) -> None:
    """Emit dst[rows, block number] = fold of each block of src; the last one may be shorter."""
    dst = job.dst
    src = job.src
    rows = job.rows
    block = c0_of(src.dtype)
    place = len(rows)
    blocks_per_repeat = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES
    blocks, ragged = divmod(job.lanes, block)
    # The elements behind a row in its last block may be garbage: a mask leaves them out.
    is_masked = bool(ragged) and src.row == job.lanes
    full_repeats = blocks // blocks_per_repeat
    if full_repeats:
        lanes = blocks_per_repeat * block
        # The axis of lanes becomes two: the repeat, and the block or the lane in it.
        dst_by_repeat = View(
            dst.memory, dst.dtype, dst.offset, (*dst.strides[:-1], blocks_per_repeat, 1)
        )
        src_by_repeat = View(src.memory, src.dtype, src.offset, (*src.strides[:-1], lanes, 1))
        in_repeats = LaneFold(dst_by_repeat, src_by_repeat, [*rows, full_repeats], lanes)
        _fold_repeats(unit, BLOCK_FOLDS[fold], in_repeats)
    tail = blocks - full_repeats * blocks_per_repeat
    tail += 1 if is_masked else 0
    if tail:
        start = full_repeats * blocks_per_repeat
        ends = (dst.moved(place, start), src.moved(place, start * block))
        mask = (1 << (tail * block - block + ragged)) - 1 if is_masked else None
        _fold_repeats(unit, BLOCK_FOLDS[fold], LaneFold(*ends, rows, tail * block), mask)
    if ragged and not is_masked:
        ends = (dst.moved(place, blocks), src.moved(place, blocks * block))
        _fold_repeats(unit, REPEAT_FOLDS[fold], LaneFold(*ends, rows, ragged))


def _fold_last_blocks(unit: Unit, fold: str, job: LaneFold) -> None:
    """Emit the fold of rows of at most one block each: eight rows per repeat."""
    dst = job.dst
    src = job.src
    lanes = job.lanes
    block = c0_of(src.dtype)
    blocks_per_repeat = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES
    dims = coalesce(job.rows, (dst, src.stepping(src.strides[:-1]))) or [(1, (1, block))]
    count, (step, pitch) = dims[-1]
    outer_sizes = [n for n, _ in dims[:-1]]
    if lanes < block and src.row != lanes:
        _fold_repeats(unit, REPEAT_FOLDS[fold], job)
        return
    lane_mask = (1 << lanes) - 1
    if step != 1 or pitch % block or count < blocks_per_repeat:
        mask = lane_mask if lanes < block else None
        _fold_repeats(unit, BLOCK_FOLDS[fold], replace(job, lanes=block), mask)
        return
    in_full_repeats = count - count % blocks_per_repeat
    views = with_dims((dst, src), dims)
    for first_row, repeats, blocks in (
        (0, in_full_repeats // blocks_per_repeat, blocks_per_repeat),
        (in_full_repeats, 1, count % blocks_per_repeat),
    ):
        if not blocks:
            continue
        # The same lanes of each block: with 3 lanes a block, 0b111 in each of the 8.
        mask = sum(lane_mask << i * block for i in range(blocks)) if lanes < block else None
        strides = (pitch * blocks, pitch, 1)
        moved_views = [v.moved(len(outer_sizes), first_row) for v in views]
        for out, row in unit.over(outer_sizes, moved_views):
            for start, rows_here in unit.parts(repeats, unit.builder.chip.max_repeat):
                target = out.memory.region(out.offset + start * blocks, (rows_here, blocks))
                begin = row.offset + start * (pitch * blocks)
                source = row.memory.region(begin, (rows_here, blocks, block), strides)
                unit.builder.vector(BLOCK_FOLDS[fold], target, source, mask=mask)


def _multiply_lanes(unit: Unit, job: LaneFold) -> None:
    """Emit dst[rows] = product along the lanes, for which there is no instruction.

    First the blocks of a row are multiplied; then each lane of the product is copied to all lanes
    of a separate block, and these blocks are multiplied; a one-lane maximum writes the results.
    """
    op = Op("vmul")
    src = job.src
    block = c0_of(src.dtype)
    lines = _scratch_rows(unit, src.dtype, job.rows, block)
    factors = min(job.lanes, block)
    if job.lanes > block:
        _combine_chunks(unit, op, replace(job, dst=lines), block)
    else:
        apply(unit, Op("vcopy"), lines, (src,), [*job.rows, job.lanes])
    spread = View(unit.take(src.dtype, block * block), src.dtype, 0, (block, 1))
    with unit.repeat(math.prod(job.rows)) as row:
        out = View(lines.memory, src.dtype, row * block, (1,))
        target = spread.memory.region(0, (factors, block))
        unit.builder.vector("vbrcb", target, lines.memory.region(out.offset, factors))
        if factors > 1:
            apply(unit, op, out, (spread.inner(), spread.moved(0, 1).inner()), [block])
        if factors > 2:
            with unit.repeat(factors - 2) as index:
                apply(unit, op, out, (out, spread.moved(0, index + 2).inner()), [block])
    _fold_repeats(unit, "vcmax", replace(job, src=lines, lanes=1))
    unit.give(spread.memory)
    unit.give(lines.memory)


def _combine_chunks(unit: Unit, op: Op, job: LaneFold, width: int) -> None:
    """Emit dst[rows, width] = the combination of all chunks of `width` lanes of src."""
    dst = job.dst
    src = job.src
    rows = job.rows
    lane_axis = len(rows)
    chunks = job.lanes // width
    ragged = job.lanes % width
    combined_chunks = min(chunks, 2)
    if chunks > 1:
        apply(unit, op, dst, (src, src.moved(lane_axis, width)), [*rows, width])
    else:
        apply(unit, Op("vcopy"), dst, (src,), [*rows, width])
    if chunks > combined_chunks:
        with unit.repeat(chunks - combined_chunks) as index:
            chunk = src.moved(lane_axis, index * width + combined_chunks * width)
            apply(unit, op, dst, (dst, chunk), [*rows, width])
    if ragged:
        chunk = src.moved(lane_axis, job.lanes - ragged)
        apply(unit, op, dst, (dst, chunk), [*rows, ragged])


def _fold_repeats(unit: Unit, op: str, job: LaneFold, mask: int | None = None) -> None:
    """Emit one cross-lane instruction per up to 255 rows of at most one repeat each."""
    dst = job.dst
    src = job.src
    # `vcgadd` of 128 lanes leaves 8 numbers, one per block; `vcadd` leaves one.
    results = job.lanes // c0_of(src.dtype) if op in BLOCK_FOLDS.values() else 1
    axes = range(len(job.rows))
    dims = coalesce(job.rows, (dst.take(axes), src.take(axes))) or [(1, (1, 0))]
    # The longest axis is the one an instruction repeats over; the others are loops.
    dims.sort(key=lambda d: d[0])
    *outer, count = (n for n, _ in dims)
    for out, row in unit.over(outer, with_dims((dst, src), dims)):
        step = out.strides[0]
        pitch = row.strides[0]
        for at, rows_here in unit.parts(count, unit.builder.chip.max_repeat):
            target = out.memory.region(out.offset + at * step, (rows_here, results), (step, 1))
            begin = row.offset + at * pitch
            source = row.memory.region(begin, (rows_here, job.lanes), (pitch, 1))
            unit.builder.vector(op, target, source, mask=mask)
