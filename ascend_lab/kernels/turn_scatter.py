"""Maximum, transpose and scatter in one kernel: every core keeps its points all the way.

    y[index[c], p] = max over g of x[p, g, c]

x is (points, group, channels), y (rows, points), both row-major. A core owns points. It loads a
tile of them, V takes the maximum over the group and leaves it in blocks of 16 x 16, turns the
blocks, and MTE3 stores each channel's points in the row of y that its index names.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, ShapeError
from ascend_lab.isa import Affine, KernelBuilder, Launch, Part, Program, Tile, binding_of
from ascend_lab.kernels.index_feed import BATCH, Feed

BLOCK = 16
AREA = BLOCK * BLOCK
HALF = BLOCK // 2
"""Points of a block that one repeat of 256 bytes covers."""
TILES = 2
"""Tiles a core should have at least, so that loads and stores overlap; more make short rows."""


@dataclass(frozen=True, slots=True)
class Points:
    """The sizes: x is (points, group, channels), y (rows, points), in fp16."""

    points: int
    group: int
    channels: int
    rows: int

    def __post_init__(self) -> None:
        """Check that blocks of 16 x 16 fill the tensors and the indices one batch."""
        whole = self.points % BLOCK == self.channels % BLOCK == 0
        if not whole or min(self.points, self.group, self.rows) < 1 or self.channels > BATCH:
            raise ShapeError(
                f"points and channels in blocks of {BLOCK}, at most {BATCH} channels",
                f"{self.points} and {self.channels}, group {self.group}, rows {self.rows}",
                "pad the tensor",
            )
        if self.channels < BLOCK:
            raise ShapeError(f"{BLOCK} channels or more", str(self.channels), "pad the tensor")


def turn_scatter_launch(chip: Chip, sizes: Points) -> Launch:
    """Return the kernel: tensors x, index (int32, one per channel), y; fp16.

    Rows of y that no index names stay as they are; of equal indices the last channel wins. Raises
    `CapacityError` if 16 points do not fit UB.
    """
    cores = chip.core_count * chip.vector_cores_per_core
    units = sizes.points // BLOCK
    per = -(-units // cores)
    full, rest = divmod(units, per)
    parts = []
    for first, count, own in ((0, full, per), (full * per, 1, rest)):
        if own:
            program = _Writer(chip, sizes, own, count).program(first, per)
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in range(count))))
    return Launch("turn_scatter", tuple(parts))


def tile_units(chip: Chip, sizes: Points, own: int) -> int:
    """Return how many times 16 points a tile of a core with `own` such units has.

    UB holds two slots of x's tile and of the turned one, the maximum, and the indices.
    """
    per_unit = 2 * BLOCK * sizes.channels * (2 * sizes.group + 3)
    most = (chip.buffers["UB"] - 4 * sizes.channels) // per_unit
    if most < 1:
        raise CapacityError(
            f"{per_unit} bytes of UB for {BLOCK} points",
            f"{chip.buffers['UB']} on {chip.name}",
            "use smaller groups or fewer channels",
        )
    return min(most, max(own // TILES, 1), chip.max_repeat // 2)


class _Writer:
    """The program of the cores that own `own` units of 16 points each."""

    def __init__(self, chip: Chip, sizes: Points, own: int, cores: int) -> None:
        self.k, self.sizes, self.own = KernelBuilder("turn_scatter", chip), sizes, own
        self.units = tile_units(chip, sizes, own)
        self.core = self.k.param("core", cores)
        width, points = sizes.group * sizes.channels, self.units * BLOCK
        self.x = self.k.tensor("x", "fp16", sizes.points * width)
        index = self.k.tensor("index", "int32", sizes.channels)
        self.y = self.k.tensor("y", "fp16", sizes.rows * sizes.points)
        self.feed = Feed.make(self.k, index, "MTE3")
        self.load = self.k.queue("tile", "UB", "fp16", points * width, src="MTE2", dst="V")
        self.most = self.k.buffer("most", "UB", "fp16", points * sizes.channels)
        self.store = self.k.queue(
            "turned", "UB", "fp16", points * sizes.channels, src="V", dst="MTE3"
        )

    def program(self, first: int, pitch: int) -> Program:
        """Return the program; core c starts `pitch` units behind core c - 1."""
        start = (self.core * pitch + first) * BLOCK
        self.feed.open(0, self.sizes.channels)
        count, rest = divmod(self.own, self.units)
        with self.k.loop("i", count) as i:
            self._tile(start + i * (self.units * BLOCK), self.units, "a")
        if rest:
            self._tile(start + count * self.units * BLOCK, rest, "b")
        self.feed.close()
        return self.k.finish()

    def _tile(self, at: Affine, units: int, name: str) -> None:
        """Load `units` x 16 points from `at` on, reduce, turn, store them."""
        k, channels = self.k, self.sizes.channels
        width, points = self.sizes.group * channels, units * BLOCK
        k.copy(
            self.load.alloc().region(0, points * width), self.x.region(at * width, points * width)
        )
        self.load.enqueue()
        self._reduce(self.load.dequeue(), units)
        self.load.free()
        turned = self.store.alloc()
        with k.loop(f"{name}_block", channels // BLOCK * units) as j:
            side = (BLOCK, BLOCK)
            k.vector("vtranspose", turned.region(j * AREA, side), self.most.region(j * AREA, side))
        self.store.enqueue()
        turned = self.store.dequeue()
        for block in range(channels // BLOCK):
            with k.loop(f"{name}_row{block}", BLOCK) as r:
                place = r * BLOCK + block * units * AREA
                pieces = turned.region(place, (units, BLOCK), (AREA, 1))
                k.copy_row(
                    self.y.region(at, (units, BLOCK)), pieces, self.feed.take(r + block * BLOCK),
                    self.sizes.points, self.sizes.rows,
                )  # fmt: skip
        self.store.free()

    def _reduce(self, tile: Tile, units: int) -> None:
        """Leave the maximum over the group as blocks (channel block, point block, 16, 16)."""
        channels, shape = self.sizes.channels, (2 * units, HALF, BLOCK)
        width = self.sizes.group * channels
        strides = (HALF * width, width, 1)
        for block in range(channels // BLOCK):
            out = self.most.region(block * units * AREA, shape)
            parts = [
                tile.region(g * channels + block * BLOCK, shape, strides)
                for g in range(self.sizes.group)
            ]
            self.k.vector("vmax", out, parts[0], parts[min(1, len(parts) - 1)])
            for part in parts[2:]:
                self.k.vector("vmax", out, out, part)
