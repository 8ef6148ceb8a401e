"""Builds kernels that only move data: layout conversions, slices, concatenations, pads.

A layout says where each element of a tensor is stored; `maps` describes layouts as address maps.
The kernels in this file copy from GM to GM through UB, on all vector cores.

A job copies a box (a multidimensional range of elements, one counter per dimension) from one tensor
to another, at an affine address in each, or fills a box with a number. If the chip's copies need
whole 32-byte blocks in UB, each tile is cut into boxes of whole blocks, and the remaining elements
are copied one by one by the scalar unit, each at the latency of L2. A chip whose copies can pad the
last block needs no such cut. Fills are copied from a tile in UB that holds the number. The values
are right for every size; the time is good only for runs of whole blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# fmt: off
# isort: off
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.errors import ShapeError, TypeMismatchError
from ascend_lab.machine.isa import (
    Affine, Buffer, KernelBuilder, Launch, Part, Program, Queue, binding_of,
)
from ascend_lab.machine.layout.maps import (
    FORMATS, AddressMap, Box, Dim, Format, Piece, address, address_map, addresses, burst_bytes,
    convert, copy_boxes, element_at, merged, pack, unpack, zero_boxes,
)
# fmt: on
# isort: on

__all__ = [
    "FORMATS",
    "AddressMap",
    "Box",
    "Dim",
    "Format",
    "Piece",
    "address",
    "address_map",
    "addresses",
    "burst_bytes",
    "conversion_launch",
    "convert",
    "copy_boxes",
    "element_at",
    "pack",
    "unpack",
    "zero_boxes",
]

MIN_TILES = 4
"""A core divides its work into at least this many tiles, so that loads and stores overlap."""

MIN_TILE_BYTES = 2048
"""Tiles are at least this large: starting a copy would cost more than the overlap saves."""


@dataclass(frozen=True, slots=True)
class View:
    """The elements offset + sum(i_d * strides[d]) of a GM tensor; strides may be 0 or negative."""

    tensor: str
    strides: tuple[int, ...]
    offset: int = 0

    def reach(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the lowest and the highest element that a view of these sizes touches."""
        reaches = [(n - 1) * s for n, s in zip(sizes, self.strides, strict=True)]
        low = sum(s for s in reaches if s < 0)
        high = sum(s for s in reaches if s > 0)
        return self.offset + low, self.offset + high


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the box `sizes` from `source` to `target`; without a source, fill it with `value`."""

    sizes: tuple[int, ...]
    target: View
    source: View | None = None
    value: float = 0.0

    def check(self, tensors: Mapping[str, int]) -> None:
        """Raise `ShapeError` unless the views fit the sizes and stay inside their tensors."""
        for view in (self.target, *([self.source] if self.source else ())):
            if len(view.strides) != len(self.sizes) or min(self.sizes, default=1) < 0:
                raise ShapeError(
                    f"a stride of {view.tensor} for each of the sizes {self.sizes}, none negative",
                    str(view.strides),
                    "check the rank of the view",
                )
            # a view with a size of 0 touches nothing
            low, high = view.reach(self.sizes) if math.prod(self.sizes) else (0, -1)
            if low < 0 or high >= tensors[view.tensor]:
                needed = f"a view inside the {tensors[view.tensor]} elements of {view.tensor}"
                raise ShapeError(needed, f"{low}..{high}", "check offset, sizes and strides")

    @property
    def job(self) -> "Job":
        """The move as a job, whose box has as few counters as possible (see `maps.merged`)."""
        source = self.source or View("", (0,) * len(self.sizes))
        counters = zip(self.sizes, source.strides, self.target.strides, strict=True)
        dims = merged([Dim(*counter) for counter in counters])
        box = Box(dims, source.offset, self.target.offset)
        return Job(box, self.target.tensor, source.tensor, self.value)


@dataclass(frozen=True, slots=True)
class Job:
    """A box to copy from tensor `source` to `target`, or with source "" to fill with `value`."""

    box: Box
    target: str
    source: str = ""
    value: float = 0.0


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: (2, 3, 4) has (12, 4, 1)."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element; raise `TypeMismatchError` for an unknown number format."""
    if dtype not in DTYPE_BYTES:
        raise TypeMismatchError("a number format", repr(dtype), f"use {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def whole_blocks(dims: Sequence[Dim], c0: int) -> tuple[list[Box], list[Box]]:
    """Cut a box into boxes whose element count is a multiple of c0, and boxes that remain.

    With c0 = 16, a power of two, the box (3, 5, 20) has 300 elements. The size 20 contains a factor
    of 4; the other factor of 4 comes from shortening 5 to 4. So (3, 4, 20) is 15 whole blocks. The
    end (3, 1, 20) is cut again: (3, 1, 16) is 3 whole blocks, and (3, 1, 4) remains.
    """
    sizes = [d.count for d in dims]
    if not math.prod(sizes) % c0:
        return [Box(tuple(dims), 0, 0)], []
    missing_factor = c0
    units = [1] * len(sizes)  # each axis is shortened to a multiple of its unit
    for i, size in enumerate(sizes):
        units[i] = math.gcd(missing_factor, size)
        missing_factor //= units[i]
    # axes with many units first: shortening these cuts off the smallest share
    for i in sorted(range(len(sizes)), key=lambda i: -(sizes[i] // units[i])):
        factor = min(missing_factor, 1 << (sizes[i] // units[i]).bit_length() - 1)
        units[i] = units[i] * factor
        missing_factor = missing_factor // factor
    if missing_factor > 1:  # the box is too small for a whole block
        return [], [Box(tuple(dims), 0, 0)]
    shortened = [size // unit * unit for size, unit in zip(sizes, units, strict=True)]
    block_boxes = [Box(_resized(dims, shortened), 0, 0)]
    remaining_boxes = list[Box]()
    for i, dim in enumerate(dims):
        if shortened[i] < dim.count:
            # the end of axis i: shortened sizes on the axes before it, full sizes on those after it
            end_sizes = [*shortened[:i], dim.count - shortened[i], *sizes[i + 1 :]]
            blocks_of_end, remaining_of_end = whole_blocks(_resized(dims, end_sizes), c0)
            source_start = shortened[i] * dim.source_stride
            target_start = shortened[i] * dim.target_stride
            for boxes, boxes_of_end in (
                (block_boxes, blocks_of_end),
                (remaining_boxes, remaining_of_end),
            ):
                boxes += [
                    Box(b.dims, b.source_start + source_start, b.target_start + target_start)
                    for b in boxes_of_end
                ]
    return block_boxes, remaining_boxes


def _resized(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(replace(d, count=n) for n, d in zip(sizes, dims, strict=True))


# -- launches -------------------------------------------------------------------------------------
def conversion_launch(
    shape: Sequence[int], dtype: str, source: str, target: str, chip: Chip
) -> Launch:
    """Convert tensor `x` (layout `source`) into tensor `y` (layout `target`) on all vector cores.

    `shape` is the logical shape. Values equal `convert`, padding of `y` is zero. Raises
    `LayoutError`, and `CapacityError` if UB cannot hold a tile.
    """
    maps = address_map(source, shape, dtype), address_map(target, shape, dtype)
    return maps_launch(*maps, chip, f"{source}_to_{target}")


def maps_launch(
    source: AddressMap, target: AddressMap, chip: Chip, name: str, excluded: Box | None = None
) -> Launch:
    """Copy every element of tensor `x` in layout `source` to tensor `y` in layout `target`.

    Padding of `y` becomes zero. `excluded` is one of the boxes of `copy_boxes` that is not copied,
    because another kernel moves it.
    """
    jobs = [Job(box, "y", "x") for box in copy_boxes(source, target) if box != excluded]
    jobs += [Job(box, "y") for box in zero_boxes(target)]
    tensors = {"x": source.elements, "y": target.elements}
    return _divided_launch(name, chip, source.dtype, tensors, jobs, by_lanes=True)


def copy_launch(
    chip: Chip,
    dtype: str,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    *,
    source_offset: int = 0,
    source_elements: int | None = None,
    target_elements: int | None = None,
    name: str = "copy",
) -> Launch:
    """Copy a strided view of tensor `x` to a strided view of tensor `y`, on all vector cores.

    Without `source_elements` or `target_elements` a tensor ends where its view ends. Raises
    `ShapeError` for views of different rank or outside their tensor, `PathError` for a wrong
    format.
    """
    source = View("x", tuple(source_strides), source_offset)
    target = View("y", tuple(target_strides))
    move = Move(tuple(sizes), target, source)
    tensors = {}
    for view, length in ((source, source_elements), (target, target_elements)):
        # strides of another rank have no end here; `Move.check` will raise for them
        same_rank = len(view.strides) == len(sizes)
        reach = view.reach(sizes)[1] + 1 if length is None and same_rank else 1
        tensors[view.tensor] = reach if length is None else length
    return moves_launch(chip, dtype, tensors, [move], name=name)


def moves_launch(
    chip: Chip, dtype: str, tensors: Mapping[str, int], moves: Sequence[Move], *, name: str
) -> Launch:
    """Distribute the moves over all vector cores; `tensors` gives the elements of each tensor.

    No element may be written twice. Raises `ShapeError` as `Move.check` does.
    """
    for move in moves:
        move.check(tensors)
    jobs = [move.job for move in moves if math.prod(move.sizes)]
    if not jobs:
        raise ShapeError(f"{name}: an element to move", "none", "leave the operator out")
    return _divided_launch(name, chip, dtype, tensors, jobs)


def _divided_launch(
    name: str,
    chip: Chip,
    dtype: str,
    tensors: Mapping[str, int],
    jobs: Sequence[Job],
    *,
    by_lanes: bool = False,
) -> Launch:
    """Divide every job among the cores; cores with equal work share a program.

    Every second job is divided from the last core backwards: a short job has work for a few cores
    only, and the next job then begins with the idle ones.
    """
    cores = chip.cores_of("vector")
    c0 = BLOCK_BYTES // item_bytes(dtype)
    cuts = [_cut_over_cores(job, cores, c0, i % 2 == 1) for i, job in enumerate(jobs)]
    cores_by_work: dict[tuple[int, ...], list[int]] = {}  # steps of each job: cores that do them
    for core in range(cores):
        steps = tuple(cut.steps_on(core, cores) for cut in cuts)
        if any(steps):
            cores_by_work.setdefault(steps, []).append(core)
    parts = []
    for steps, equal_cores in cores_by_work.items():
        # The program is written for the first of these cores; its param `core` gives the others.
        pairs = zip(cuts, steps, strict=True)
        jobs_of_first = [cut.job_of(equal_cores[0], cores, count) for cut, count in pairs if count]
        moved = [job for job, _ in jobs_of_first]
        writer = MoveWriter(name, chip, dtype, tensors, moved, by_lanes)
        program = writer.program(jobs_of_first, len(equal_cores))
        bindings = tuple(binding_of({"core": i}) for i in range(len(equal_cores)))
        parts.append(Part(program, bindings))
    return Launch(name, tuple(parts))


@dataclass(frozen=True, slots=True)
class _CutJob:
    """A job that is divided along counter `along`: `steps_per_core` each, the last core fewer."""

    job: Job
    along: int
    steps_per_core: int
    backwards: bool

    def _first_step(self, core: int, cores: int) -> int:
        return (cores - 1 - core if self.backwards else core) * self.steps_per_core

    def steps_on(self, core: int, cores: int) -> int:
        """Return how many steps of the cut counter core `core` of `cores` takes."""
        from_here = self.job.box.dims[self.along].count - self._first_step(core, cores)
        return max(min(from_here, self.steps_per_core), 0)

    def job_of(self, core: int, cores: int, count: int) -> tuple[Job, Dim]:
        """Return the job of a core that takes `count` steps, and the distance to the next core's.

        The distance is a `Dim` of one step: elements of the source and of the target.
        """
        box = self.job.box
        start = self._first_step(core, cores)
        dims = list(box.dims)
        dim = box.dims[self.along]
        dims[self.along] = replace(dim, count=count)
        source = box.source_start + start * dim.source_stride
        target = box.target_start + start * dim.target_stride
        step = -self.steps_per_core if self.backwards else self.steps_per_core
        to_next_core = Dim(1, step * dim.source_stride, step * dim.target_stride)
        return replace(self.job, box=Box(tuple(dims), source, target)), to_next_core


def _cut_over_cores(job: Job, cores: int, c0: int, backwards: bool) -> _CutJob:
    """Divide a job along its longest counter, so that cores get whole blocks if possible.

    The innermost counter, which makes the bursts long, is divided only if it is the only one, or if
    the others are too short for all cores and each core still gets at least 8 blocks of it.
    """
    sizes = [d.count for d in job.box.dims]
    inner = len(sizes) - 1
    along = max(range(len(sizes)), key=lambda i: (i != inner or inner == 0, sizes[i]))
    if sizes[along] < cores and sizes[inner] >= 8 * c0 * cores:
        along = inner
    # A step moves as many elements as the product of the other counters. With 24 elements a step
    # and c0 = 16, a core gets an even number of steps: 2 steps are 48 elements, 3 blocks.
    steps_of_blocks = c0 // math.gcd(c0, math.prod(sizes) // sizes[along])
    steps_per_core = -(-sizes[along] // cores)
    if steps_of_blocks <= sizes[along]:
        steps_per_core = -(-steps_per_core // steps_of_blocks) * steps_of_blocks
    return _CutJob(job, along, steps_per_core, backwards)


# -- one core -------------------------------------------------------------------------------------
class MoveWriter:
    """Writes the program of one core, with a queue of tiles for copies and a tile per fill value.

    A tile holds at most `tile_elements`. Its size is rounded up to whole blocks, and boxes are cut
    so that a tile's elements fill whole blocks. With `by_lanes` the size is rounded down and boxes
    are cut at multiples of C0 steps, which suits boxes whose inner counter already has C0 steps.
    """

    def __init__(
        self,
        name: str,
        chip: Chip,
        dtype: str,
        tensors: Mapping[str, int],
        jobs: Sequence[Job],
        by_lanes: bool = False,
    ) -> None:
        """Declare the tensors that the jobs use; allocate the fill tiles, then the queue."""
        self.builder = KernelBuilder(name, chip)
        self.chip = chip
        self.by_lanes = by_lanes
        self.itemsize = item_bytes(dtype)
        self.loop_count = 0
        ub_bytes = chip.buffers["UB"]
        self.c0 = BLOCK_BYTES // self.itemsize
        used = {n for job in jobs for n in (job.source, job.target)}
        self.gm = {
            n: self.builder.tensor(n, dtype, size) for n, size in tensors.items() if n in used
        }
        largest_fill: dict[float, int] = {}  # elements of the largest box, by fill value
        for job in jobs:
            if not job.source:
                largest_fill[job.value] = max(largest_fill.get(job.value, 0), job.box.elements)
        # All fill tiles together take at most a quarter of UB.
        bytes_per_fill = ub_bytes // 4 // max(len(largest_fill), 1)
        self.fill_tiles = {
            value: self._fill_tile(f"fill{i}", dtype, value, elements, bytes_per_fill)
            for i, (value, elements) in enumerate(largest_fill.items())
        }
        free_bytes = ub_bytes - sum(b.elements for b in self.fill_tiles.values()) * self.itemsize
        largest_copy = max((job.box.elements for job in jobs if job.source), default=0)
        tile_bytes = max(-(-largest_copy // MIN_TILES) * self.itemsize, MIN_TILE_BYTES)
        tile_bytes += 0 if by_lanes else BLOCK_BYTES - 1
        # the queue has two slots: each gets at most half of the free bytes, in whole blocks
        self.tile_elements = min(free_bytes // 2, tile_bytes) // BLOCK_BYTES * self.c0
        self.queue: Queue | None = None
        if largest_copy:
            elements = self.tile_elements
            self.queue = self.builder.queue("tile", "UB", dtype, elements, src="MTE2", dst="MTE3")
        if self.fill_tiles:
            self._wait_for_fills()

    def _wait_for_fills(self) -> None:
        """Let the pipes that copy from the fill tiles wait until V has written them."""
        for pipe in ("MTE3", "S"):
            self.builder.set_flag("V", pipe, 0)
            self.builder.wait_flag("V", pipe, 0)

    def _fill_tile(
        self, name: str, dtype: str, value: float, elements: int, room_bytes: int
    ) -> Buffer:
        """Allocate a tile of up to `elements` in UB and fill it with `value` on V."""
        lanes = self.chip.vector_bytes_per_repeat // self.itemsize
        max_repeats = max(min(room_bytes // (lanes * self.itemsize), self.chip.max_repeat), 1)
        repeats = min(-(-elements // lanes), max_repeats)
        buffer = self.builder.buffer(name, "UB", dtype, repeats * lanes)
        self.builder.vector("vdup", buffer.region(0, (repeats, lanes)), scalar=value)
        return buffer

    def program(self, jobs: Sequence[tuple[Job, Dim]], cores: int) -> Program:
        """Return the program for `cores` cores with equal work.

        The jobs are those of the first core. The `Dim` of a job is its distance from core to core,
        which is multiplied by the param `core`.
        """
        core = self.builder.param("core", cores)
        for job, to_next_core in jobs:
            source = core * to_next_core.source_stride
            target = core * to_next_core.target_stride
            self.emit(
                job, job.box.dims, source + job.box.source_start, target + job.box.target_start
            )
        return self.builder.finish()

    def emit(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move a box: loop over its outer counters until a tile fits."""
        max_elements = self.tile_elements if job.source else self.fill_tiles[job.value].elements
        if math.prod(d.count for d in dims) <= max_elements:
            self._tile(job, dims, source, target)
            return
        outer = dims[0]
        inner_dims = tuple(dims[1:])
        elements_per_step = math.prod(d.count for d in inner_dims)
        # Steps of the outer counter in one tile: 1 if even that is too much, and then the
        # recursion cuts the inner counters. More than 1 are rounded down to whole blocks.
        steps = max(max_elements // elements_per_step, 1)
        unit = self.c0 if self.by_lanes else self.c0 // math.gcd(self.c0, elements_per_step)
        steps -= steps % unit if steps > unit else 0
        passes, tail = divmod(outer.count, steps)
        tile_dims = (Dim(steps, outer.source_stride, outer.target_stride), *inner_dims)
        pass_dims = tile_dims if steps > 1 else inner_dims
        self.loop_count += 1
        with self.builder.loop(f"i{self.loop_count}", passes) as i:
            first_step = i * steps
            pass_source = source + first_step * outer.source_stride
            self.emit(job, pass_dims, pass_source, target + first_step * outer.target_stride)
        if tail:
            first_tail_step = passes * steps
            tail_dims = (Dim(tail, outer.source_stride, outer.target_stride), *inner_dims)
            tail_source = source + first_tail_step * outer.source_stride
            self.emit(job, tail_dims, tail_source, target + first_tail_step * outer.target_stride)

    def _tile(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move a box that fits into a tile: whole blocks by copies, single elements by S."""
        block_boxes = [Box(tuple(dims), 0, 0)]
        remaining_boxes = list[Box]()
        if self.chip.combined:  # such a chip has no padding copies
            block_boxes, remaining_boxes = whole_blocks(dims, self.c0)
        for boxes, write in ((block_boxes, self._copy), (remaining_boxes, self._by_element)):
            for box in boxes:
                write(job, box.dims, source + box.source_start, target + box.target_start)

    def _copy(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Copy a box through a tile of the queue, in which it is contiguous, or a fill tile."""
        sizes = tuple(d.count for d in dims)
        pad = math.prod(sizes) % self.c0 != 0
        y = self.gm[job.target].region(target, sizes, [d.target_stride for d in dims])
        if not job.source:
            self.builder.copy(y, self.fill_tiles[job.value].region(0, sizes), pad=pad)
            return
        assert self.queue is not None
        x = self.gm[job.source].region(source, sizes, [d.source_stride for d in dims])
        self.builder.copy(self.queue.alloc().region(0, sizes), x, pad=pad)
        self.queue.enqueue()
        self.builder.copy(y, self.queue.dequeue().region(0, sizes), pad=pad)
        self.queue.free()

    def _by_element(self, job: Job, dims: Sequence[Dim], source: Affine, target: Affine) -> None:
        """Move a box element by element on S; every load and every store takes L2's latency."""
        if dims:
            outer = dims[0]
            self.loop_count += 1
            with self.builder.loop(f"i{self.loop_count}", outer.count) as i:
                element_source = source + i * outer.source_stride
                element_target = target + i * outer.target_stride
                self._by_element(job, dims[1:], element_source, element_target)
            return
        fill = None if job.source else self.fill_tiles[job.value].region(0, 1)
        l2_cycles = (1 if fill else 2) * self.chip.l2.latency_cycles
        # the scalar instruction counts its time in steps of `scalar_cycles` each
        steps = max(l2_cycles // max(self.chip.scalar_cycles, 1), 1)
        src = fill or self.gm[job.source].region(source, 1)
        self.builder.scalar(self.gm[job.target].region(target, 1), src, steps=steps)
