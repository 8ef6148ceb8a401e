"""Transpose one tile in UB on the vector unit, in 16 x 16 blocks of 2-byte elements.

A unit of a tile is `rows` of the source by `columns`; a tile is (b1, a1) units. Each way of turning
says how the tile must lie in UB before; it leaves (b1, a1 * columns, rows), row-major: pieces of
the transposed rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import InputError, ShapeError
from ascend_lab.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Part,
    Program,
    Region,
    Tile,
    binding_of,
)
from ascend_lab.layout.boxes import Dim, merged
from ascend_lab.layout.moves import copy_launch, item_bytes, row_major
from ascend_lab.sim import simulate

BLOCK = 16
"""Side of the block vtranspose turns."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What a turn works with: the tile before and after, and scratch buffers made once.

    `scratch` belongs to the turn that asked for it; `loop` names a loop variable nobody uses.
    """

    k: KernelBuilder
    source: Tile
    target: Tile
    scratch: tuple[Buffer, ...]
    units: tuple[int, int]
    loop: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A way to transpose tiles.

    `order` lists (count, source rows, source columns) for the counters of a unit as it is loaded,
    outermost first; empty: the tile is loaded row by row. `scratch_items` counts elements of 2
    bytes of scratch per element of the tile; `prepare` makes the buffers from the tile's two queue
    buffers and its size.
    """

    rows: int
    columns: int
    order: tuple[tuple[int, int, int], ...]
    scratch_items: int
    prepare: Callable[[KernelBuilder, Buffer, Buffer, int], tuple[Buffer, ...]]
    emit: Callable[[Desk], None]


def turn_of(dtype: str) -> Turn:
    """Return the way to transpose tiles of a number format.

    2 bytes: blocks of 16 x 16. 4 bytes: units of 128 x 8 in two rounds over halves of elements.
    1 byte: blocks of 32 x 32 through fp16, which holds every int8 and uint8.
    """
    size = item_bytes(dtype)
    if size == 2:
        return Turn(16, 16, ((16, 1, 0), (16, 0, 1)), 0, lambda *_: (), _turn_halves)
    if size == 4:
        order = ((8, 1, 0), (16, 8, 0), (8, 0, 1))
        return Turn(128, 8, order, 2, _prepare_words, _turn_words)
    return Turn(32, 32, (), 2, _prepare_bytes, _turn_bytes)


def _turn_halves(desk: Desk) -> None:
    _turn_blocks(desk, desk.target.region(), desk.source.region())


def _turn_blocks(desk: Desk, target: Region, source: Region) -> None:
    """Turn every 512-byte block of `source`: block i of `target` is its transpose."""
    area = BLOCK * BLOCK
    blocks, side = desk.units[0] * desk.units[1] * _blocks_a_unit(desk), (BLOCK, BLOCK)
    with desk.k.loop(desk.loop, blocks) as i:
        after = target.buffer.region(i * area, side, slot=target.slot)
        desk.k.vector("vtranspose", after, source.buffer.region(i * area, side, slot=source.slot))


def _blocks_a_unit(desk: Desk) -> int:
    return {2: 1, 4: 8, 1: 4}[desk.source.buffer.itemsize]


def _prepare_words(
    k: KernelBuilder, before: Buffer, after: Buffer, size: int
) -> tuple[Buffer, ...]:
    views = k.view(before, "before_halves", "fp16"), k.view(after, "after_halves", "fp16")
    return *views, k.buffer("halves", "UB", "fp16", 2 * size)


def _turn_words(desk: Desk) -> None:
    """(q, p, (j, h)) -> (q, (j, h), p) -> (j, (q, h), p) -> (j, p, (q, h)), row = 8 p + q.

    Row p, q of column j is two halves h. The first round of blocks brings h in front of p, a copy
    of whole 32-byte blocks brings (q, h) together, the second round puts h last again.
    """
    before, after, halves = desk.scratch
    units = desk.units[0] * desk.units[1]
    first = before.region(slot=desk.source.slot)
    _turn_blocks(desk, halves.region(), first)
    sizes = (units, 8, 8, 2, BLOCK)
    blocks = halves.region(0, sizes, (2048, 32, 256, 16, 1))
    desk.k.copy(before.region(0, sizes, slot=desk.source.slot), blocks)
    _turn_blocks(desk, after.region(slot=desk.target.slot), first)


def _prepare_bytes(
    k: KernelBuilder, before: Buffer, after: Buffer, size: int
) -> tuple[Buffer, ...]:
    return k.buffer("wide", "UB", "fp16", size), k.buffer("blocks", "UB", "fp16", size)


def _turn_bytes(desk: Desk) -> None:
    """To fp16, into blocks, turn, back into rows, to bytes."""
    wide, blocks = desk.scratch
    rows, columns = desk.units[0] * 2, desk.units[1] * 2
    lanes = (rows * columns * 2, 128)
    desk.k.vector("vconv", wide.region(0, lanes), desk.source.region(0, lanes))
    sizes = (rows, columns, BLOCK, BLOCK)
    width = columns * BLOCK
    lines = wide.region(0, sizes, (BLOCK * width, BLOCK, width, 1))
    desk.k.copy(blocks.region(0, sizes), lines)
    _turn_blocks(desk, wide.region(), blocks.region())
    sizes, strip = (desk.units[0], width, 2, BLOCK), width * BLOCK
    pieces = wide.region(0, sizes, (2 * strip, BLOCK, strip, 1))
    desk.k.copy(blocks.region(0, sizes), pieces)
    desk.k.vector("vconv", desk.target.region(0, lanes), blocks.region(0, lanes))


# Write the program of one core of a block transpose: load runs, turn in UB, store runs.
#
# Both moved axes end where they like: the last tile starts earlier, so that it is whole, and what
# it
# shares with its neighbour is not stored again (rows of y) or stored twice alike (columns of y).


TILES = 4
"""Tiles a core should have at least, so that loads, turns and stores overlap."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A transpose of `elements`: outer counters, x's neighbours `column`, y's neighbours `row`.

    With `relu`, every tile goes through vrelu before it is turned.
    """

    dtype: str
    elements: int
    outer: tuple[Dim, ...]
    column: Dim
    row: Dim
    relu: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """The cores' share: counter `along` (outer.., column, row) cut in pieces of `pitch`.

    Core c has `count` steps from (first + c) * pitch on.
    """

    along: int
    pitch: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Strip:
    """Tiles of `units` along one axis, `count` of them from `start`; the first `skip` are done."""

    count: int
    units: int
    start: int
    skip: int = 0


class PlaneWriter:
    """The program of `cores` cores that have equal shares."""

    def __init__(self, chip: Chip, plane: Plane, share: Share, cores: int) -> None:
        self.k, self.plane = KernelBuilder("transpose", chip), plane
        self.turn = turn_of(plane.dtype)
        self.x = self.k.tensor("x", plane.dtype, plane.elements)
        self.y = self.k.tensor("y", plane.dtype, plane.elements)
        core = self.k.param("core", cores)
        dims = [*plane.outer, plane.column, plane.row]
        self.sizes = [d.count for d in dims]
        self.sizes[share.along] = share.count
        dim, place = dims[share.along], core * share.pitch + share.first * share.pitch
        self.start = place * dim.source, place * dim.target
        self.lanes = chip.vector_bytes_per_repeat // max(DTYPE_BYTES[plane.dtype], 2)
        self.tile = self._tile(chip)
        size = math.prod(self.tile) * self.turn.rows * self.turn.columns
        pipes = {"load": ("MTE2", "V"), "store": ("V", "MTE3")}
        self.load, self.store = (
            self.k.queue(name, "UB", plane.dtype, size, src=src, dst=dst)
            for name, (src, dst) in pipes.items()
        )
        self.scratch = self.turn.prepare(self.k, self.load.buffer, self.store.buffer, size)
        self.names = 0

    def _tile(self, chip: Chip) -> tuple[int, int]:
        """Units (along row, along column) of a tile: as square as can be, four tiles a core."""
        turn, area = self.turn, self.turn.rows * self.turn.columns
        bytes_each = 4 * DTYPE_BYTES[self.plane.dtype] + 2 * turn.scratch_items
        most = min(chip.buffers["UB"] // bytes_each, chip.max_repeat * self.lanes) // area
        work = math.prod(self.sizes) // area
        most = max(min(most, work // TILES), 1)
        limits = [self.sizes[-1] // turn.rows, self.sizes[-2] // turn.columns]
        tile = [1, 1]
        while True:
            sides = [tile[0] * turn.rows, tile[1] * turn.columns]
            grow = [i for i in (0, 1) if 2 * tile[i] <= limits[i]]
            if not grow or 2 * tile[0] * tile[1] > most:
                return tile[0], tile[1]
            tile[min(grow, key=lambda i: sides[i])] *= 2

    def program(self) -> Program:
        """Write everything and return the program."""
        self._loops(0, *self.start)
        return self.k.finish()

    def _loops(self, level: int, source: Affine, target: Affine) -> None:
        """Open a loop per outer counter, then cut the plane into strips and tiles."""
        if level < len(self.plane.outer):
            dim = self.plane.outer[level]
            with self.k.loop(f"o{level}", self.sizes[level]) as i:
                self._loops(level + 1, source + i * dim.source, target + i * dim.target)
            return
        row, column = self.plane.row, self.plane.column
        for down in _strips(self.sizes[-1], self.turn.rows, self.tile[0]):
            with self.k.loop(self._name(), down.count) as i:
                b = i * (down.units * self.turn.rows) + down.start
                for right in _strips(self.sizes[-2], self.turn.columns, self.tile[1]):
                    with self.k.loop(self._name(), right.count) as j:
                        a = j * (right.units * self.turn.columns) + right.start
                        place = source + b * row.source + a * column.source
                        goal = target + b * row.target + a * column.target
                        self._turn(place, goal, (down.units, right.units), right.skip)

    def _name(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def _turn(self, source: Affine, target: Affine, units: tuple[int, int], skip: int) -> None:
        """Load a tile, turn it, store all but the first `skip` of its rows of y."""
        row, column, turn = self.plane.row, self.plane.column, self.turn
        tile = [(units[0], turn.rows, 0), (units[1], 0, turn.columns), *turn.order]
        if not turn.order:
            tile = [(units[0] * turn.rows, 1, 0), (units[1] * turn.columns, 0, 1)]
        sizes = [count for count, _, _ in tile]
        strides = [rows * row.source + columns * column.source for _, rows, columns in tile]
        self.k.copy(self.load.alloc().region(0, sizes), self.x.region(source, sizes, strides))
        self.load.enqueue()
        before, after = self.load.dequeue(), self.store.alloc()
        if self.plane.relu:
            repeats = math.prod(units) * turn.rows * turn.columns // self.lanes
            whole = before.region(0, (repeats, self.lanes))
            self.k.vector("vrelu", whole, whole)
        turn.emit(Desk(self.k, before, after, self.scratch, units, self._name()))
        self.load.free()
        self.store.enqueue()
        width = units[1] * turn.columns
        sizes = [width - skip, units[0], turn.rows]
        strides = [turn.rows, width * turn.rows, 1]
        tile_rows = self.store.dequeue().region(skip * turn.rows, sizes, strides)
        goal = self.y.region(
            target + skip * column.target,
            sizes,
            (column.target, turn.rows * row.target, row.target),
        )
        self.k.copy(goal, tile_rows)
        self.store.free()


def _strips(size: int, unit: int, most: int) -> Iterator[_Strip]:
    """Cut `size` elements into tiles of `most` units, one of what units are left, and the end."""
    units, end = divmod(size, unit)
    if units // most:
        yield _Strip(units // most, most, 0)
    if units % most:
        yield _Strip(1, units % most, units // most * most * unit)
    if end:
        yield _Strip(1, 1, size - unit, unit - end)


# Transpose and permute: strided copies, or blocks turned in UB, shared out over all cores.
#
# Two axes matter: the one whose elements are neighbours in x and the one whose elements are
# neighbours in y. If they are the same, runs stay runs and a strided copy is good. If not, a
# strided
# copy moves single elements, 32 bytes on the wires for each. The block method reads runs, turns a
# tile on the vector unit and writes runs.


METHODS = ("auto", "strided", "blocks")


@dataclass(frozen=True, slots=True)
class Permutation:
    """What a permute really does, with axes that move together joined.

    `dims` are counters with both strides, y's innermost last; `kept_run` is the number of elements
    that stay neighbours.
    """

    dims: tuple[Dim, ...]
    kept_run: int

    @property
    def column(self) -> Dim:
        """The counter along which x is contiguous."""
        return min(self.dims, key=lambda d: d.source)

    @property
    def row(self) -> Dim:
        """The counter along which y is contiguous."""
        return self.dims[-1]


def permutation(shape: Sequence[int], perm: Sequence[int]) -> Permutation:
    """Return the joined counters of y = x.transpose(perm). Raises `ShapeError`."""
    if sorted(perm) != list(range(len(shape))) or min(shape, default=1) < 1:
        raise ShapeError(
            f"a permutation of axes 0..{len(shape) - 1} and sizes of 1 or more",
            f"{tuple(perm)} of {tuple(shape)}",
            "name each axis once",
        )
    source, target = row_major(shape), row_major([shape[p] for p in perm])
    steps = zip((shape[p] for p in perm), (source[p] for p in perm), target, strict=True)
    dims = merged([Dim(*step) for step in steps])
    last = dims[-1]
    return Permutation(dims, last.count if last.source == last.target == 1 else 1)


def transpose_launch(
    chip: Chip, shape: Sequence[int], perm: Sequence[int], dtype: str, method: str = "auto"
) -> Launch:
    """y = x.transpose(perm) on all vector cores; tensors x and y, row-major.

    `method`: "strided" copies runs or single elements; "blocks" turns tiles in UB, and needs both
    moved axes to be at least one unit long (16 x 16 for 2 bytes, 128 rows x 8 columns for 4, 32 x
    32 for 1); "auto" takes the one that `simulate` finds faster. Raises `ShapeError`, `InputError`.
    """
    if method not in METHODS:
        raise InputError(f"a method of {', '.join(METHODS)}", repr(method), "choose one")
    plan = permutation(shape, perm)
    turn = turn_of(dtype)
    fits = plan.kept_run == 1 and plan.row.count >= turn.rows and plan.column.count >= turn.columns
    if method == "blocks" and not fits:
        raise ShapeError(
            f"blocks: two axes that change places, {turn.rows} rows and {turn.columns} columns",
            f"{plan.row.count} and {plan.column.count}, runs of {plan.kept_run}",
            'use method="auto"',
        )
    if method == "auto" and fits:
        both = [transpose_launch(chip, shape, perm, dtype, how) for how in ("blocks", "strided")]
        return min(both, key=lambda launch: simulate(launch, chip).cycles)
    if method == "strided" or not fits:
        dims = plan.dims
        sizes, total = [d.count for d in dims], math.prod(shape)
        steps = [d.source for d in dims], [d.target for d in dims]
        lengths = {"source_elements": total, "target_elements": total}
        return copy_launch(chip, dtype, sizes, *steps, **lengths, name="transpose")
    return block_launch(chip, dtype, plan, math.prod(shape))


def block_launch(
    chip: Chip, dtype: str, plan: Permutation, elements: int, *, relu: bool = False
) -> Launch:
    """Cut over the cores an outer counter, y's rows or y's columns: whichever keeps them busiest.

    Rows may end ragged on any core; the last core's columns take the ragged end as well, so
    that a block written twice is written by one core. With `relu` the tiles are rectified too.
    """
    turn, cores = turn_of(dtype), chip.core_count * chip.vector_cores_per_core
    outer = [d for d in plan.dims if d not in (plan.row, plan.column)]
    units = [d.count for d in outer]
    units += [plan.column.count // turn.columns, plan.row.count // turn.rows]
    along = max(range(len(units)), key=lambda i: (_busy(units[i], cores), -i))
    per = -(-units[along] // cores)
    full = units[along] // per
    step = [1] * len(outer) + [turn.columns, turn.rows]
    counts = [d.count for d in (*outer, plan.column, plan.row)]
    plane = Plane(dtype, elements, tuple(outer), plan.column, plan.row, relu)
    left = counts[along] - full * per * step[along]
    if left and left < step[along]:
        full, left = full - 1, left + per * step[along]
    groups = [(0, full, per * step[along]), (full, 1, left)]
    parts = []
    for first, count, size in groups:
        if count and size:
            share = Share(along, per * step[along], first, size)
            program = PlaneWriter(chip, plane, share, count).program()
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in range(count))))
    return Launch("transpose", tuple(parts))


def _busy(units: int, cores: int) -> float:
    """Share of the cores' time that is work when `units` equal pieces are dealt out."""
    return units / (cores * -(-units // cores))
