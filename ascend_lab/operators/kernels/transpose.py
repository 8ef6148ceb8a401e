"""Transpose and permute: strided copies, or blocks transposed in UB, divided over all cores.

Two axes matter: the one whose elements are neighbours in x and the one whose elements are
neighbours in y. If they are the same, runs stay runs and a strided copy is good. If not, a strided
copy moves single elements, and each costs a transfer of 32 bytes. The block method reads runs,
transposes a tile on the vector unit in blocks of 16 x 16 two-byte elements, and writes runs. The
two axes may have any length: the last tile starts earlier, so that it is whole. The elements it
shares with its neighbour are not stored again (rows of y), or stored twice with equal values
(columns of y).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ascend_lab import errors
from ascend_lab.machine import layout, sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Program,
    Share,
    Tile,
    spread,
)
from ascend_lab.machine.layout.maps import AddressMap, Dim, merged

METHODS = ("auto", "strided", "blocks")
BLOCK = 16
"""Side of the square of 2-byte elements that `vtranspose` turns."""
AREA = BLOCK * BLOCK
"""Elements of that square: 256, or 512 bytes."""
TILES_PER_CORE = 4
"""Tiles a core should have at least, so that loads, transposes and stores overlap."""


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of axes, in which axes that move together are joined to one.

    `dims` are counters with both strides, y's innermost last; `kept_run` is the number of elements
    that stay neighbours; `start` is where x is read first and y written.
    """

    dims: tuple[Dim, ...]
    kept_run: int
    start: tuple[int, int] = (0, 0)

    @property
    def column(self) -> Dim:
        """The counter along which x is contiguous."""
        return min(self.dims, key=lambda d: d.source_stride)

    @property
    def row(self) -> Dim:
        """The counter along which y is contiguous."""
        return self.dims[-1]

    @property
    def outer(self) -> tuple[Dim, ...]:
        """The other counters."""
        return tuple(d for d in self.dims if d not in (self.row, self.column))

    def fits(self, dtype: str) -> bool:
        """Tell whether the block method applies: single elements move, two axes are long enough."""
        turn = turn_of(dtype)
        is_long = self.row.count >= turn.rows and self.column.count >= turn.columns
        return self.kept_run == 1 and is_long and self.row != self.column


def permutation(shape: Sequence[int], perm: Sequence[int]) -> Permutation:
    """Return the joined counters of y = x.transpose(perm). Raises `ShapeError`."""
    if sorted(perm) != list(range(len(shape))) or min(shape, default=1) < 1:
        needed = f"a permutation of axes 0..{len(shape) - 1} and sizes of 1 or more"
        raise errors.ShapeError(needed, f"{tuple(perm)} of {tuple(shape)}", "name each axis once")
    source = layout.row_major(shape)
    target = layout.row_major([shape[p] for p in perm])
    steps = zip((shape[p] for p in perm), (source[p] for p in perm), target, strict=True)
    dims = merged([Dim(*step) for step in steps])
    # x.transpose(1, 0, 2) of (4, 5, 6): runs of 6 elements stay neighbours. (0, 2, 1): none do.
    innermost = dims[-1]
    stays = innermost.source_stride == innermost.target_stride == 1
    return Permutation(dims, innermost.count if stays else 1)


def transpose_launch(
    chip: Chip, shape: Sequence[int], perm: Sequence[int], dtype: str, method: str = "auto"
) -> Launch:
    """Return the launch of y = x.transpose(perm) on all vector cores; x and y are row-major.

    `method`: "strided" copies runs or elements; "blocks" transposes tiles in UB, and needs both
    moved axes to be at least one unit long (16 x 16 for 2 bytes, 128 rows x 8 columns for 4, 32 x
    32 for 1); "auto" takes the one that `simulate` finds faster. Raises `ShapeError`, `InputError`.
    """
    if method not in METHODS:
        raise errors.InputError(f"a method of {', '.join(METHODS)}", repr(method), "choose one")
    plan = permutation(shape, perm)
    turn = turn_of(dtype)
    fits = plan.fits(dtype)
    if method == "blocks" and not fits:
        raise errors.ShapeError(
            f"blocks: two axes that change places, {turn.rows} rows and {turn.columns} columns",
            f"{plan.row.count} and {plan.column.count}, runs of {plan.kept_run}",
            'use method="auto"',
        )
    if method == "auto" and fits:
        launches = [
            transpose_launch(chip, shape, perm, dtype, candidate)
            for candidate in ("blocks", "strided")
        ]
        return min(launches, key=lambda launch: sim.simulate(launch, chip).cycles)
    total = math.prod(shape)
    if method == "blocks":
        return block_launch(chip, dtype, plan, total, total)
    views = ([d.count for d in plan.dims], [d.source_stride for d in plan.dims])
    steps = [d.target_stride for d in plan.dims]
    return layout.copy_launch(
        chip, dtype, *views, steps, source_elements=total, target_elements=total, name="transpose"
    )


def maps_phases(
    source: AddressMap, target: AddressMap, chip: Chip, name: str
) -> tuple[Launch, ...]:
    """Return the phases that move tensor `x` from one address map to another one, in `y`.

    They are strided copies, or transposes of blocks with a second phase for the blocks that padding
    cuts off. The faster of the two in simulation is taken.
    """
    strided = (layout.maps_launch(source, target, chip, name),)
    boxes = layout.copy_boxes(source, target)
    # The largest box is transposed in blocks; the other boxes, at the padding, are small.
    box = max(boxes, key=lambda candidate: candidate.elements)
    plan = Permutation(box.dims, box.run, (box.source_start, box.target_start))
    if not plan.fits(source.dtype):
        return strided
    elements = source.elements, target.elements
    blocks = replace(block_launch(chip, source.dtype, plan, *elements), name=name)
    block_phases: tuple[Launch, ...] = (blocks,)
    if box.elements < min(elements):
        block_phases += (layout.maps_launch(source, target, chip, f"{name}_ends", box),)

    def cycles(phases: tuple[Launch, ...]) -> int:
        gap_cycles = (len(phases) - 1) * chip.all_cores_cycles
        return sum(sim.simulate(phase, chip).cycles for phase in phases) + gap_cycles

    return min(block_phases, strided, key=cycles)


def block_launch(
    chip: Chip, dtype: str, plan: Permutation, elements: int, written: int, *, relu: bool = False
) -> Launch:
    """Return the launch that transposes blocks on all vector cores.

    The cores divide one counter of `plan`. Two are simulated: the counter that keeps the cores
    busiest, and the busiest of the outer counters, with which tiles stay long. The tensors have
    `elements` and `written` elements. With `relu` negative numbers become 0.
    """
    job = _Job(plan, dtype, elements, written, relu)
    turn = turn_of(dtype)
    cores = chip.cores_of("vector")
    counts = [d.count for d in (*plan.outer, plan.column, plan.row)]
    # An outer counter may be cut anywhere, the two that blocks transpose only between units.
    steps = [1] * len(plan.outer) + [turn.columns, turn.rows]
    units = [count // step for count, step in zip(counts, steps, strict=True)]

    def busy_share(i: int) -> tuple[float, int]:
        """Return the busy share of the cores' time if they divide the units of counter i."""
        # 6 units on 4 cores take 2 turns: 6 of 8 places have work, 0.75.
        return units[i] / (cores * -(-units[i] // cores)), -i

    def cut(along: int) -> Launch:
        sizes = _shares(counts[along], steps[along], cores)

        def program(share: Share) -> Program:
            return _Writer(chip, job, along, share).program()

        return spread("transpose", {"core": sizes}, program)

    counters = {max(range(len(units)), key=busy_share)}
    if plan.outer:
        counters.add(max(range(len(plan.outer)), key=busy_share))
    launches = [cut(along) for along in sorted(counters)]
    if len(launches) == 1:
        return launches[0]
    return min(launches, key=lambda launch: sim.simulate(launch, chip).cycles)


def _shares(count: int, step: int, cores: int) -> list[int]:
    """Return each core's share of a counter, in multiples of `step`, with the rest on the last.

    So the last core also has the columns of the last, partial block: a block that is written twice
    is written by one core.
    """
    # 100 rows in steps of 16 on 3 cores: 6 units, 2 a core: 32, 32, and 32 + 4 for the last.
    units = count // step
    core_size = -(-units // cores) * step
    sizes = [core_size] * (units * step // core_size)
    remainder = count - sum(sizes)
    if remainder and remainder < step:
        remainder += sizes.pop()
    return [*sizes, remainder] if remainder else sizes


# -- one core -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Turn:
    """A way to transpose a tile, which consists of b1 x a1 units.

    A unit is the smallest piece that can be transposed: `rows` rows of the source by `columns`
    columns, 16 x 16 for elements of 2 bytes. The transposed tile is (b1, a1 * columns, rows),
    row-major: row a of the result is in b1 pieces, one from each unit.

    order           (count, source rows, source columns) for the counters of a unit as it is
                    loaded, outermost first; empty: the tile is loaded row by row
    scratch_items   elements of 2 bytes of scratch per element of the tile
    """

    rows: int
    columns: int
    order: tuple[tuple[int, int, int], ...]
    scratch_items: int

    @property
    def area(self) -> int:
        """Elements of a unit."""
        return self.rows * self.columns


_TURNS = {
    1: Turn(32, 32, (), 2),
    2: Turn(16, 16, ((16, 1, 0), (16, 0, 1)), 0),
    4: Turn(128, 8, ((8, 1, 0), (16, 8, 0), (8, 0, 1)), 2),
}
"""Bytes of an element -> how it is transposed.

Bytes are converted to fp16 and back, 2-byte elements are transposed as they are, and 4-byte
elements in two rounds as pairs of 2-byte halves.
"""


def turn_of(dtype: str) -> Turn:
    """Return the way to transpose tiles of a number format."""
    return _TURNS[layout.item_bytes(dtype)]


@dataclass(frozen=True, slots=True)
class _Strip:
    """`count` tiles of `units` units along one axis from element `start` on.

    The first `skip` elements are those of the tile before, which has stored them already.
    """

    count: int
    units: int
    start: int
    skip: int = 0


def _strips(size: int, unit: int, tile_units: int) -> Iterator[_Strip]:
    """Yield the tiles of `size` elements.

    They are those of `tile_units` units, then one of the remaining units, then a unit that ends
    with the last element.
    """
    # 150 in units of 16 and tiles of 4: 2 tiles of 4 units, 1 of 1 unit, then the unit that begins
    # at 134 and skips the 10 elements that are done.
    units, end = divmod(size, unit)
    if units // tile_units:
        yield _Strip(units // tile_units, tile_units, 0)
    if units % tile_units:
        yield _Strip(1, units % tile_units, units // tile_units * tile_units * unit)
    if end:
        yield _Strip(1, 1, size - unit, unit - end)


@dataclass(frozen=True, slots=True)
class _Job:
    """What all cores of a launch have in common.

    Tensor x has `elements`, y has `written`; with `relu` the tiles are rectified on the way.
    """

    plan: Permutation
    dtype: str
    elements: int
    written: int
    relu: bool


class _Writer:
    """Writes the program of cores with equal shares of the counter `along`."""

    def __init__(self, chip: Chip, job: _Job, along: int, share: Share) -> None:
        dtype = job.dtype
        plan = job.plan
        self.k = KernelBuilder("transpose", chip)
        self.plan = plan
        self.turn = turn_of(dtype)
        self.x = self.k.tensor("x", dtype, job.elements)
        self.y = self.k.tensor("y", dtype, job.written)
        dims = [*plan.outer, plan.column, plan.row]
        self.sizes = [d.count for d in dims]
        self.sizes[along] = share[0]
        # The distance of the core's share from the first core's, along the counter.
        place = self.k.param("core", share[2]) * share[1]
        steps = dims[along].source_stride, dims[along].target_stride
        first_source, first_target = plan.start
        self.start = first_source + place * steps[0], first_target + place * steps[1]
        self.item = DTYPE_BYTES[dtype]
        self.relu = job.relu
        self.names = 0
        # Bytes are transposed as fp16, so a repeat holds 128 of them.
        self.lanes = chip.vector_bytes_per_repeat // max(self.item, 2)
        self.tile = self._tile(chip)
        size = math.prod(self.tile) * self.turn.area
        self.load = self.k.queue("load", "UB", dtype, size, src="MTE2", dst="V")
        self.store = self.k.queue("store", "UB", dtype, size, src="V", dst="MTE3")
        self.scratch = self._scratch(size)

    def _tile(self, chip: Chip) -> tuple[int, int]:
        """Return the units of a tile (along row, along column): square, four tiles per core."""
        turn = self.turn
        # Two slots in, two out, and scratch elements of 2 bytes.
        element_bytes = 4 * self.item + 2 * self.turn.scratch_items
        max_elements = min(chip.buffers["UB"] // element_bytes, chip.max_repeat * self.lanes)
        core_units = math.prod(self.sizes) // turn.area
        max_units = max(min(max_elements // turn.area, core_units // TILES_PER_CORE), 1)
        limits = [self.sizes[-1] // turn.rows, self.sizes[-2] // turn.columns]
        tile = [1, 1]
        # Double the shorter side until no more units fit: 1 x 1, 2 x 1, 2 x 2, 4 x 2, ...
        while True:
            sides = [tile[0] * turn.rows, tile[1] * turn.columns]
            growing = [i for i in (0, 1) if 2 * tile[i] <= limits[i]]
            if not growing or 2 * tile[0] * tile[1] > max_units:
                return tile[0], tile[1]
            tile[min(growing, key=lambda i: sides[i])] *= 2

    def program(self) -> Program:
        """Write everything and return the program."""
        self._loops(0, *self.start)
        return self.k.finish()

    def _loops(self, level: int, source: Affine, target: Affine) -> None:
        """Write a loop for each outer counter, and inside them the tiles of the two inner axes."""
        if level < len(self.plan.outer):
            dim = self.plan.outer[level]
            with self.k.loop(f"o{level}", self.sizes[level]) as i:
                self._loops(
                    level + 1, source + i * dim.source_stride, target + i * dim.target_stride
                )
            return
        row = self.plan.row
        column = self.plan.column
        for down in _strips(self.sizes[-1], self.turn.rows, self.tile[0]):
            with self.k.loop(self._name(), down.count) as i:
                b = i * (down.units * self.turn.rows) + down.start
                for right in _strips(self.sizes[-2], self.turn.columns, self.tile[1]):
                    with self.k.loop(self._name(), right.count) as j:
                        a = j * (right.units * self.turn.columns) + right.start
                        source_start = source + b * row.source_stride + a * column.source_stride
                        target_start = target + b * row.target_stride + a * column.target_stride
                        self._move(
                            source_start, target_start, (down.units, right.units), right.skip
                        )

    def _name(self) -> str:
        """Return a new name for a loop."""
        self.names += 1
        return f"t{self.names}"

    def _move(self, source: Affine, target: Affine, units: tuple[int, int], skip: int) -> None:
        """Load a tile, transpose it, and store all but the first `skip` of its rows of y."""
        row = self.plan.row
        column = self.plan.column
        turn = self.turn
        if turn.order:
            counters = [(units[0], turn.rows, 0), (units[1], 0, turn.columns), *turn.order]
        else:
            counters = [(units[0] * turn.rows, 1, 0), (units[1] * turn.columns, 0, 1)]
        sizes = [count for count, _, _ in counters]
        strides = [
            rows * row.source_stride + columns * column.source_stride
            for _, rows, columns in counters
        ]
        self.k.copy(self.load.alloc().region(0, sizes), self.x.region(source, sizes, strides))
        self.load.enqueue()
        loaded = self.load.dequeue()
        result = self.store.alloc()
        if self.relu:
            elements = math.prod(units) * turn.area
            self.k.each("vrelu", elements, (loaded, 0), (loaded, 0))
        write_turn = {1: self._bytes, 2: self._halves, 4: self._words}[self.item]
        write_turn(loaded, result, units)
        self.load.free()
        self.store.enqueue()
        # The transposed tile is (b1, a, rows): row a of y is in b1 pieces, one from each unit.
        width = units[1] * turn.columns
        y_sizes = [width - skip, units[0], turn.rows]
        tile_strides = [turn.rows, width * turn.rows, 1]
        tile_rows = self.store.dequeue().region(skip * turn.rows, y_sizes, tile_strides)
        y_strides = (column.target_stride, turn.rows * row.target_stride, row.target_stride)
        self.k.copy(
            self.y.region(target + skip * column.target_stride, y_sizes, y_strides), tile_rows
        )
        self.store.free()

    # -- three ways to transpose ------------------------------------------------------------------
    def _scratch(self, size: int) -> tuple[Buffer, ...]:
        """Allocate the scratch buffers that transposing needs besides the tiles."""
        if self.item == 1:
            return tuple(self.k.buffer(name, "UB", "fp16", size) for name in ("wide", "blocks"))
        if self.item == 2:
            return ()
        # Elements of 4 bytes are pairs of halves: vtranspose turns 2-byte elements only.
        loaded_halves = self.k.view(self.load.buffer, "before_halves", "fp16")
        result_halves = self.k.view(self.store.buffer, "after_halves", "fp16")
        return loaded_halves, result_halves, self.k.buffer("halves", "UB", "fp16", 2 * size)

    def _blocks(self, target: Tile | Buffer, source: Tile | Buffer, count: int) -> None:
        """Transpose every 512-byte block of `source` to block i of `target`."""
        with self.k.loop(self._name(), count) as i:
            block = source.region(i * AREA, (BLOCK, BLOCK))
            self.k.vector("vtranspose", target.region(i * AREA, (BLOCK, BLOCK)), block)

    def _halves(self, loaded: Tile, result: Tile, units: tuple[int, int]) -> None:
        """Transpose 2-byte elements: a unit is one block."""
        self._blocks(result, loaded, units[0] * units[1])

    def _words(self, loaded: Tile, result: Tile, units: tuple[int, int]) -> None:
        """Transpose 4-byte elements as pairs of 2-byte halves h; a row is 8 p + q, a column j.

        (q, p, (j, h)) -> (q, (j, h), p) -> (j, (q, h), p) -> (j, p, (q, h)): the first transpose of
        blocks moves h in front of p, a copy of whole 32-byte blocks brings (q, h) together, and the
        second transpose moves h to the end again.
        """
        loaded_halves = Tile(self.scratch[0], loaded.slot)
        result_halves = Tile(self.scratch[1], result.slot)
        halves = self.scratch[2]
        count = units[0] * units[1]
        # 128 rows x 8 columns of 4 bytes are 2048 halves: 8 blocks of 256.
        self._blocks(halves, loaded_halves, 8 * count)
        sizes = (count, 8, 8, 2, BLOCK)
        blocks = halves.region(0, sizes, (2048, 32, 256, 16, 1))
        self.k.copy(loaded_halves.region(0, sizes), blocks)
        self._blocks(result_halves, loaded_halves, 8 * count)

    def _bytes(self, loaded: Tile, result: Tile, units: tuple[int, int]) -> None:
        """Transpose bytes: convert to fp16, form blocks, transpose, form rows, convert to bytes."""
        wide, blocks = self.scratch
        rows = units[0] * 2
        columns = units[1] * 2
        elements = rows * columns * AREA
        width = columns * BLOCK
        self.k.each("vconv", elements, (wide, 0), (loaded, 0))
        block_sizes = (rows, columns, BLOCK, BLOCK)
        # A block has 16 lines of 16 numbers, each `width` behind the one above.
        lines = wide.region(0, block_sizes, (BLOCK * width, BLOCK, width, 1))
        self.k.copy(blocks.region(0, block_sizes), lines)
        self._blocks(wide, blocks, rows * columns)
        unit_sizes = (units[0], width, 2, BLOCK)
        strip = width * BLOCK
        # Two blocks one above the other are the 32 rows of a unit: put their lines side by side.
        pieces = wide.region(0, unit_sizes, (2 * strip, BLOCK, strip, 1))
        self.k.copy(blocks.region(0, unit_sizes), pieces)
        self.k.each("vconv", elements, (result, 0), (blocks, 0))
