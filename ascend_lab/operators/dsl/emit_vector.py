"""Write a vector operation on a whole box as instructions of at most 255 repeats.

`apply` takes a box (a multidimensional range of elements) of any rank: y = x + 1 on 64 rows of 100
numbers in fp16 is one `vadds` of 50 repeats of 128 numbers if the rows are contiguous. A `View` is
an operand: a memory and its stride along every axis of the box. A `Unit` manages the scratch tiles
and loops of a kernel while it is written.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.machine.isa import Affine, Buffer, KernelBuilder, Region, Tile, c0_of
from ascend_lab.machine.layout import row_major

Memory = Buffer | Tile


@dataclass(frozen=True, slots=True)
class View:
    """Elements offset + sum(index_d * strides[d]) of a memory.

    With `blocks` each element of the outer axes fills one 32-byte block, and the innermost axis
    repeats within it. The padding behind rows of `row` elements (0: unknown), up to the next whole
    block, may be read.
    """

    memory: Memory
    dtype: str
    offset: Affine | int
    strides: tuple[int, ...]
    blocks: bool = False
    row: int = 0

    def moved(self, axis: int, by: Affine | int) -> "View":
        """Return the view `by` steps further along an axis."""
        offset = self.offset + by * self.strides[axis] if self.strides[axis] else self.offset
        return View(self.memory, self.dtype, offset, self.strides, self.blocks, self.row)

    def take(self, axes: Sequence[int]) -> "View":
        """Return the view along some of the axes, with index 0 along the others."""
        return self.stepping(tuple(self.strides[a] for a in axes))

    def inner(self) -> "View":
        """Return the view without its outermost axis."""
        return self.stepping(self.strides[1:])

    def stepping(self, strides: tuple[int, ...]) -> "View":
        """Return the view from the same start with other steps."""
        return View(self.memory, self.dtype, self.offset, strides, self.blocks, self.row)


Dims = list[tuple[int, tuple[int, ...]]]
"""Per axis: its size, and the step of every operand."""


def coalesce(sizes: Sequence[int], views: Sequence[View]) -> Dims:
    """Return a box's axes without those of size 1, with neighbours merged if all views allow."""
    dims: Dims = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        # A box of 64 x 100 whose operands all have the steps (100, 1) is one axis of 6,400. An
        # operand with the steps (0, 1), a row repeated for all rows, keeps them apart.
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


def rows_side_by_side(views: Sequence[View], sizes: Sequence[int], repeat_bytes: int) -> int:
    """Return how many rows one repeat of an instruction can take, 1 if it takes single rows.

    It takes several if rows are longer than a block and a fraction of a repeat, lie one behind the
    other in the destination, and some operand is the same for all rows.
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
    # 32 lanes of fp16 are 64 bytes: four rows fill a repeat of 256 bytes.
    fits = steps[0] == last and 0 in steps and all(s in (0, last) for s in steps)
    return lanes // last if fits else 1


def block_steps(
    sizes: Sequence[int], unit: int, *, always: bool = False
) -> tuple[tuple[int, ...], int]:
    """Return row-major strides with rows at multiples of `unit`, and the total elements.

    A row is the innermost axis with more than one element; a single row is not rounded up unless
    `always`.
    """
    row_axis = max((d for d, n in enumerate(sizes) if n > 1), default=len(sizes) - 1)
    row_count = math.prod(sizes[:row_axis])
    # (8, 100) in blocks of 16: rows at multiples of 112, 896 elements; (1, 100) takes 100.
    pitch = sizes[row_axis]
    if row_count > 1 or always:
        pitch = -(-pitch // unit) * unit
    outer_steps = (step * pitch for step in row_major(sizes[:row_axis]))
    inner_steps = (1,) * (len(sizes) - row_axis)
    return (*outer_steps, *inner_steps), row_count * pitch


@dataclass(slots=True)
class Unit:
    """The vector unit while a kernel is written: its builder, scratch tiles, names of loops.

    `free` are the scratch tiles that nothing uses now. `views` are the tiles of each address by
    number format. `loops` and `buffers` count those made so far, for their names.
    """

    builder: KernelBuilder
    free: list[Buffer] = field(default_factory=list)
    views: dict[tuple[int, str], Buffer] = field(default_factory=dict)
    loops: int = 0
    buffers: int = 0

    def take(self, dtype: str, elements: int) -> Buffer:
        """Return a scratch tile for at least `elements`; give it back with `give`.

        It may reuse the bytes of a tile in another format.
        """
        unit = BLOCK_BYTES // DTYPE_BYTES[dtype]
        rounded = -(-elements // unit) * unit
        # The smallest free tile that is large enough is taken: larger ones may be needed later.
        fits = [t for t in self.free if t.elements * t.itemsize >= rounded * DTYPE_BYTES[dtype]]
        if not fits:
            self.buffers += 1
            return self.builder.buffer(f"scratch{self.buffers}", "UB", dtype, rounded)
        tile = min(fits, key=lambda t: t.elements * t.itemsize)
        self.free.remove(tile)
        if tile.dtype == dtype:
            return tile
        key = tile.address, dtype
        if key not in self.views:
            name = f"{tile.name.partition('_')[0]}_{dtype}"
            self.views[key] = self.builder.view(tile, name, dtype)
        self.views.setdefault((tile.address, tile.dtype), tile)
        return self.views[key]

    def give(self, tile: Memory) -> None:
        """Return a scratch tile for reuse; other memories are ignored."""
        if isinstance(tile, Buffer) and tile.name.startswith("scratch"):
            self.free.append(tile)

    @contextmanager
    def repeat(self, count: int) -> Iterator[Affine]:
        """A loop of `count` passes, or the body alone where it runs once."""
        if count == 1:
            yield Affine()
            return
        self.loops += 1
        with self.builder.loop(f"v{self.loops}", count) as index:
            yield index

    def parts(self, total: int, size: int) -> Iterator[tuple[Affine, int]]:
        """Yield (start, length): a loop over whole parts of `size`, then the rest."""
        full_parts = total // size
        if full_parts:
            with self.repeat(full_parts) as index:
                yield index * size, size
        if total % size:
            yield Affine(full_parts * size), total % size

    def over(self, counts: Sequence[int], views: Sequence[View]) -> Iterator[Sequence[View]]:
        """Yield the views inside loops over their outermost axes, one per count."""
        if not counts:
            yield views
            return
        with self.repeat(counts[0]) as index:
            inner = [v.moved(0, index).inner() for v in views]
            yield from self.over(counts[1:], inner)


@dataclass(frozen=True, slots=True)
class Op:
    """A vector instruction without its operands.

    `number` is its scalar operand, `mode` the comparison of vcmp or the rounding of vconv.
    """

    name: str
    number: float | None = None
    mode: str = ""


def apply(unit: Unit, op: Op, dst: View, srcs: Sequence[View], sizes: Sequence[int]) -> None:
    """Emit dst[box] = op(srcs[box]) for a box of `sizes`; steps of 0 repeat an operand."""
    dims = _lanes_last(coalesce(sizes, (dst, *srcs)))
    views = with_dims((dst, *srcs), dims)
    dst_view, *src_views = views
    lane_views = [dst_view, *(_with_lanes(unit, v, dims) for v in src_views)]
    merged_views = lane_views
    box = [size for size, _ in dims]
    if box[-1] > 1 and not any(v.blocks for v in lane_views):  # more axes may be mergeable now
        merged_dims = coalesce(box, lane_views)
        merged_views = with_dims(lane_views, merged_dims)
        box = [size for size, _ in merged_dims]
    factor = rows_side_by_side(merged_views, box, unit.builder.chip.vector_bytes_per_repeat)
    if factor > 1:
        _emit_side_by_side(unit, op, merged_views, box, factor)
    else:
        _emit(unit, op, merged_views, box)
    for view, lane_view in zip(views, lane_views, strict=True):
        if lane_view.memory is not view.memory:
            unit.give(lane_view.memory)


def _lanes_last(dims: Dims) -> Dims:
    """Put the axis along which the destination is contiguous last."""
    if not dims:
        return [(1, (0,) * 8)]
    lane_axis = next((d for d, (_, steps) in enumerate(dims) if steps[0] == 1), None)
    if lane_axis is None:
        # no axis is contiguous: rows of one lane
        return [*dims, (1, (0,) * len(dims[0][1]))]
    return [*dims[:lane_axis], *dims[lane_axis + 1 :], dims[lane_axis]]


def _with_lanes(unit: Unit, view: View, dims: Dims) -> View:
    """Return an operand as an instruction reads it: along the lanes, or one block per element.

    An operand that repeats along the lanes becomes one 32-byte block per element.
    """
    size = dims[-1][0]
    step = view.strides[-1]
    if view.blocks:
        return view.stepping((*view.strides[:-1], 1))
    if step == 1 or size == 1:
        return view
    if step:
        needed = "vector operands of neighbouring elements"
        got = f"elements {step} apart"
        raise ScheduleError(needed, got, "transpose the tensor first, or vectorise another axis")
    # x[i, j] - m[i]: m has one number per row, but an instruction reads lanes. `vbrcb` fills a
    # block with each number, and the instruction repeats that block along the row.
    outer = [d for d in range(len(dims) - 1) if view.strides[d]]
    sizes = [dims[d][0] for d in outer]
    c0 = c0_of(view.dtype)
    row_dim = len(dims) - 2
    # Rows of two blocks that lie behind each other in the destination: if another axis repeats the
    # operand, both blocks are filled, so that all rows together are one contiguous run.
    is_reused = size == 2 * c0 and row_dim in outer and len(outer) <= row_dim
    width = size if is_reused and dims[row_dim][1][0] == size else c0
    steps = [s * width for s in row_major(sizes)]
    tile = unit.take(view.dtype, math.prod(sizes) * width)
    for at in range(0, width, c0):
        _fill_blocks(unit, View(tile, view.dtype, at, tuple(steps)), view.take(outer), sizes)
    pitch = dict(zip(outer, steps, strict=True))
    strides = *(pitch.get(d, 0) for d in range(row_dim + 1)), 1
    return View(tile, view.dtype, 0, strides, width == c0)


def _fill_blocks(unit: Unit, dst: View, src: View, sizes: Sequence[int]) -> None:
    """Fill a block of dst with each element of src; contiguous elements go together."""
    c0 = c0_of(src.dtype)
    dims = coalesce(sizes, (dst, src)) or [(1, (c0, 1))]
    step, source_step = dims[-1][1]
    if source_step != 1:
        needed = "neighbouring elements to repeat along the lanes"
        raise ScheduleError(needed, f"steps {src.strides}", "copy them to a tile of their own")
    *outer, count = (n for n, _ in dims)
    for target, source in unit.over(outer, with_dims((dst, src), dims)):
        for at, count_here in unit.parts(count, min(count, 8 * unit.builder.chip.max_repeat)):
            out = target.memory.region(target.offset + at * step, (count_here, c0), (step, 1))
            unit.builder.vector("vbrcb", out, source.memory.region(source.offset + at, count_here))


def _emit_side_by_side(
    unit: Unit, op: Op, views: Sequence[View], sizes: Sequence[int], factor: int
) -> None:
    """Emit with `factor` rows as one; operands that repeat are copied `factor` times in a row."""
    *outer, rows, lanes = sizes
    joined_lanes = factor * lanes
    tiles = []
    operands = []
    for v in views:
        if v.strides[-2]:
            operands.append(v.stepping((*v.strides[:-2], joined_lanes, 1)))
            continue
        copy_sizes = [n if v.strides[d] else 1 for d, n in enumerate(outer)]
        tiles.append(unit.take(v.dtype, math.prod(copy_sizes) * joined_lanes))
        steps = tuple(s * joined_lanes for s in row_major(copy_sizes))
        copy = View(tiles[-1], v.dtype, 0, (*steps, lanes, 1))
        _emit(unit, Op("vcopy"), [copy, v], [*copy_sizes, factor, lanes])
        outer_steps = tuple(s if v.strides[d] else 0 for d, s in enumerate(steps))
        operands.append(copy.stepping((*outer_steps, 0, 1)))
    groups, rows_left = divmod(rows, factor)
    _emit(unit, op, operands, [*outer, groups, joined_lanes])
    if rows_left:
        last_rows = [v.moved(len(outer), groups) for v in operands]
        last_views = [v.take([*range(len(outer)), -1]) for v in last_rows]
        _emit(unit, op, last_views, [*outer, rows_left * lanes])
    for tile in tiles:
        unit.give(tile)


def _emit(unit: Unit, op: Op, views: Sequence[View], sizes: Sequence[int]) -> None:
    """Choose what an instruction repeats: lanes of a row, a chunk of lanes or a block of many rows.

    The other axes become loops. The choice with the fewest cycles is taken.
    """
    chip = unit.builder.chip
    lanes = min(chip.vector_bytes_per_repeat // DTYPE_BYTES[v.dtype] for v in views)
    *outer, row_lanes = sizes
    if not outer:  # a single row
        _emit(unit, op, [v.stepping((0, *v.strides)) for v in views], [1, row_lanes])
        return
    # The longest outer axis is what an instruction may repeat over; the others are loops around it.
    row_axis = max(range(len(outer)), key=lambda d: outer[d])
    count = outer[row_axis]
    loop_axes = [d for d in range(len(outer)) if d != row_axis]
    blocks_per_repeat = chip.vector_bytes_per_repeat // BLOCK_BYTES
    c0 = max(c0_of(v.dtype) for v in views)
    full_repeats = row_lanes // lanes
    tail_count = len(list(_tail_widths(row_lanes % lanes, _block_elements(views))))
    columns = -(-row_lanes // c0)
    chunks = full_repeats + tail_count
    instructions_per_row = tail_count + (1 if full_repeats else 0)

    # Cycles = start-up cycles per instruction + slope cycles per repeat.
    def cycles(instructions: int, repeats: int) -> int:
        cost = chip.vector_costs.get(op.name, chip.vector_costs["default"])
        starts = max(instructions, -(-repeats // chip.max_repeat))
        return cost.head_cycles * starts + cost.slope_cycles * repeats

    # A box of 64 rows of 100 lanes in fp16: row by row it is 64 instructions of 1 repeat; a chunk
    # of lanes of all rows is 1 instruction of 64 repeats; block by block it is 7 instructions of 8
    # repeats.
    choices = [
        (cycles(count * instructions_per_row, count * chunks), _emit_runs),
        (cycles(chunks, count * chunks), _emit_rows),
    ]
    if all(c0_of(v.dtype) == c0 and not v.strides[row_axis] % c0 for v in views):
        # Rows begin whole blocks apart: a repeat can take one block from each of several rows.
        repeats = columns * -(-count // blocks_per_repeat)
        choices.append((cycles(columns, repeats), _emit_columns))
    emit = min(choices, key=lambda choice: choice[0])[1]
    ordered_views = [v.take([*loop_axes, row_axis, -1]) for v in views]
    for inner in unit.over([outer[d] for d in loop_axes], ordered_views):
        emit(unit, op, inner, count, row_lanes, lanes)


def _emit_runs(
    unit: Unit, op: Op, views: Sequence[View], count: int, row_lanes: int, lanes: int
) -> None:
    """Emit contiguous runs, row after row: whole repeats, then the last lanes."""
    full_repeats = row_lanes // lanes
    block = _block_elements(views)
    for row in unit.over([count], views):
        for at, repeats in unit.parts(full_repeats, unit.builder.chip.max_repeat):
            _emit_instruction(unit, op, [_region(v, at * lanes, None, repeats, lanes) for v in row])
        end = full_repeats * lanes
        for width in _tail_widths(row_lanes % lanes, block):
            _emit_instruction(unit, op, [_region(v, end, None, 1, width) for v in row])
            end += width


def _block_elements(views: Sequence[View]) -> int:
    """Return the elements of a block if an operand repeats blocks, else 1."""
    return max(c0_of(v.dtype) for v in views) if any(v.blocks for v in views) else 1


def _tail_widths(lanes_left: int, block: int) -> Iterator[int]:
    """Yield the lanes behind the last whole repeat; split at whole blocks of an operand."""
    if lanes_left > block and lanes_left % block:
        yield lanes_left - lanes_left % block
        lanes_left %= block
    if lanes_left:
        yield lanes_left


def _emit_rows(
    unit: Unit, op: Op, views: Sequence[View], count: int, row_lanes: int, lanes: int
) -> None:
    """Emit a block of rows: each instruction does one chunk of lanes in up to 255 rows."""
    block = _block_elements(views)
    for at, rows_here in unit.parts(count, unit.builder.chip.max_repeat):
        moved_views = [v.moved(0, at) for v in views]
        for begin, width in unit.parts(row_lanes - row_lanes % lanes, lanes):
            _emit_instruction(
                unit, op, [_region(v, begin, v.strides[0], rows_here, width) for v in moved_views]
            )
        end = row_lanes - row_lanes % lanes
        for width in _tail_widths(row_lanes % lanes, block):
            _emit_instruction(
                unit, op, [_region(v, end, v.strides[0], rows_here, width) for v in moved_views]
            )
            end += width


def _region(view: View, at: Affine | int, pitch: int | None, repeats: int, lanes: int) -> Region:
    """Return the region of `repeats` times `lanes` elements from lane `at` on.

    The repeats begin `pitch` elements apart, or without it `lanes` elements. An operand that
    repeats gives the same lanes, or the same block, each time.
    """
    step = 0 if view.blocks or not view.strides[-1] else 1
    offset = view.offset + at * step
    c0 = c0_of(view.dtype)
    # An operand that is one number for all lanes (step 0) stays where it is in every repeat.
    repeat_step = lanes * step if pitch is None else pitch
    if view.blocks and lanes > c0:
        return view.memory.region(offset, (repeats, lanes // c0, c0), (repeat_step, 0, 1))
    return view.memory.region(offset, (repeats, lanes), (repeat_step, 1))


def _emit_columns(
    unit: Unit, op: Op, views: Sequence[View], count: int, row_lanes: int, lanes: int
) -> None:
    """Emit rows block by block: a repeat takes one block from each of 8 rows."""
    chip = unit.builder.chip
    c0 = c0_of(views[0].dtype)
    blocks_per_repeat = chip.vector_bytes_per_repeat // BLOCK_BYTES
    row_groups, rows_left = divmod(count, blocks_per_repeat)

    def emit(lane: Affine | int, width: int, at: Affine | int, repeats: int, rows: int) -> None:
        regions = []
        for v in views:
            step = v.strides[0]
            along = 0 if v.blocks or not v.strides[1] else 1
            first = v.offset + at * step + lane * along
            shape = (repeats, rows, width)
            strides = (step * rows, step, 1)
            regions.append(v.memory.region(first, shape, strides))
        _emit_instruction(unit, op, regions)

    for lane, width in unit.parts(row_lanes, c0):
        for at, repeats in unit.parts(row_groups, chip.max_repeat):
            emit(lane, width, at * blocks_per_repeat, repeats, blocks_per_repeat)
        if rows_left:
            emit(lane, width, row_groups * blocks_per_repeat, 1, rows_left)


def _emit_instruction(unit: Unit, op: Op, regions: Sequence[Region]) -> None:
    is_integer = regions[0].buffer.dtype[:3] in ("int", "uin")
    unit.builder.vector(
        op.name,
        *regions,
        scalar=op.number,
        compare=op.mode if op.name == "vcmp" else None,
        rounding=op.mode if op.name == "vconv" and is_integer else None,
    )
