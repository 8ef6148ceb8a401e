"""Write the program of one core of a block transpose: load runs, turn in UB, store runs.

Both moved axes end where they like: the last tile starts earlier, so that it is whole, and what it
shares with its neighbour is not stored again (rows of y) or stored twice alike (columns of y).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.isa import Affine, KernelBuilder, Program
from ascend_lab.kernels.turns import Desk, turn_of
from ascend_lab.layout.boxes import Dim

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
