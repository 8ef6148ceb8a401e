"""Maximum, transpose and scatter in one kernel: every core keeps its points all the way.

    y[index[c], p] = max over g of x[p, g, c]

x is (points, group, channels), y (rows, points), both row-major. A core owns points. It loads a
tile of them, some channels at a time, V takes the maximum over the group and leaves it in blocks of
16 x 16, turns the blocks, and MTE3 stores each channel's points in the row of y that its index
names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, InputError, ShapeError
from ascend_lab.isa import (
    Affine,
    Kernel,
    KernelBuilder,
    Launch,
    Loop,
    Node,
    Part,
    Program,
    Region,
    binding_of,
)
from ascend_lab.isa import (
    Tile as Slot,
)
from ascend_lab.kernels.indexed_rows import Feed
from ascend_lab.kernels.transpose import block_launch, permutation, transpose_launch
from ascend_lab.kernels.vector import elementwise_launch
from ascend_lab.layout.moves import item_bytes

BLOCK = 16
AREA = BLOCK * BLOCK
HALF = BLOCK // 2
"""Points of a block that one repeat of 256 bytes covers."""
CHANNELS = 64
"""Channels of a tile: loads have runs of 128 bytes, and points enough fit for long stores."""
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
        """Check that blocks of 16 x 16 fill the tensors."""
        blocks = self.points % BLOCK == self.channels % BLOCK == 0
        if not blocks or min(self.points, self.group, self.channels, self.rows) < 1:
            got = f"{self.points} and {self.channels}, group {self.group}, rows {self.rows}"
            raise ShapeError(f"points and channels in blocks of {BLOCK}", got, "pad the tensor")


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
    channels = min(CHANNELS, sizes.channels)
    per_unit = 2 * BLOCK * channels * (2 * sizes.group + 3)
    most = (chip.buffers["UB"] - 4 * sizes.channels) // per_unit
    if most < 1:
        needed = f"{per_unit} bytes of UB for {BLOCK} points"
        got = f"{chip.buffers['UB']} on {chip.name}"
        raise CapacityError(needed, got, "use smaller groups or fewer channels")
    across = -(-sizes.channels // channels)
    return min(most, max(own // -(-TILES // across), 1), chip.max_repeat // 2)


@dataclass(frozen=True, slots=True)
class _Tile:
    """`units` x 16 points from `at` on, `channels` of them from `low` on."""

    at: Affine
    units: int
    low: int
    channels: int


class _Writer:
    """The program of the cores that own `own` units of 16 points each."""

    def __init__(self, chip: Chip, sizes: Points, own: int, cores: int) -> None:
        self.k, self.sizes, self.own = KernelBuilder("turn_scatter", chip), sizes, own
        self.units = tile_units(chip, sizes, own)
        self.core = self.k.param("core", cores)
        points, most = self.units * BLOCK, min(CHANNELS, sizes.channels)
        self.x = self.k.tensor("x", "fp16", sizes.points * sizes.group * sizes.channels)
        index = self.k.tensor("index", "int32", sizes.channels)
        self.y = self.k.tensor("y", "fp16", sizes.rows * sizes.points)
        # all indices at once: MTE2 would wait with a second batch for the stores of the first
        self.feed = Feed.make(self.k, index, "MTE3", most=sizes.channels)
        tile = points * sizes.group * most
        self.load = self.k.queue("tile", "UB", "fp16", tile, src="MTE2", dst="V")
        self.most = self.k.buffer("most", "UB", "fp16", points * most)
        self.store = self.k.queue("turned", "UB", "fp16", points * most, src="V", dst="MTE3")

    def program(self, first: int, pitch: int) -> Program:
        """Return the program; core c starts `pitch` units behind core c - 1."""
        start = (self.core * pitch + first) * BLOCK
        count, rest = divmod(self.own, self.units)
        self.feed.open(0, self.sizes.channels)
        for low in range(0, self.sizes.channels, CHANNELS):
            wide = min(CHANNELS, self.sizes.channels - low)
            with self.k.loop(f"i{low}", count) as i:
                tile = _Tile(start + i * (self.units * BLOCK), self.units, low, wide)
                self._move(tile, f"a{low}")
            if rest:
                tile = _Tile(start + count * self.units * BLOCK, rest, low, wide)
                self._move(tile, f"b{low}")
        self.feed.close()
        return self.k.finish()

    def _move(self, tile: _Tile, name: str) -> None:
        """Load a tile, reduce, turn and store it."""
        k, group, pitch = self.k, self.sizes.group, self.sizes.channels
        points, blocks = tile.units * BLOCK, tile.channels // BLOCK
        source = self.x.region(
            tile.at * (group * pitch) + tile.low,
            (points * group, tile.channels),
            (pitch, 1),
        )
        k.copy(self.load.alloc().region(0, source.sizes), source)
        self.load.enqueue()
        self._reduce(self.load.dequeue(), tile)
        self.load.free()
        turned = self.store.alloc()
        with k.loop(f"{name}_block", blocks * tile.units) as j:
            side = (BLOCK, BLOCK)
            k.vector("vtranspose", turned.region(j * AREA, side), self.most.region(j * AREA, side))
        self.store.enqueue()
        turned = self.store.dequeue()
        for block in range(blocks):
            with k.loop(f"{name}_row{block}", BLOCK) as r:
                shape = (tile.units, BLOCK)
                place = r * BLOCK + block * tile.units * AREA
                row = turned.region(place, shape, (AREA, 1))
                target, pick = (
                    self.y.region(tile.at, shape),
                    self.feed.take(r + (tile.low + block * BLOCK)),
                )
                k.copy_row(target, row, pick, self.sizes.points, self.sizes.rows)
        self.store.free()

    def _reduce(self, loaded: Slot, tile: _Tile) -> None:
        """Leave the maximum over the group as blocks (channel block, point block, 16, 16)."""
        group, shape = self.sizes.group, (2 * tile.units, HALF, BLOCK)
        width = group * tile.channels
        for block in range(tile.channels // BLOCK):
            out = self.most.region(block * tile.units * AREA, shape)
            parts = [
                loaded.region(g * tile.channels + block * BLOCK, shape, (HALF * width, width, 1))
                for g in range(group)
            ]
            self.k.vector("vmax", out, parts[0], parts[min(1, group - 1)])
            for part in parts[2:]:
                self.k.vector("vmax", out, out, part)


# Two operators in a row: what the second wants to own decides whether data may stay on chip.


def relu_transpose_kernel(chip: Chip, shape: Sequence[int], dtype: str, split: str) -> Kernel:
    """y[b] = relu(x[b]).T for x (B, M, N): tensors x and y, and h between two phases.

    `split` "outer": each core owns whole matrices, both operators run on its tiles in UB. "moved":
    each core owns rows of x for the ReLU and rows of y afterwards, so everything passes through the
    GM tensor h and all cores wait for each other; B * M * N must then be whole vector repeats per
    core. Raises `InputError`, `ShapeError`.
    """
    if split not in ("outer", "moved"):
        raise InputError("split outer or moved", repr(split), "choose one")
    if len(shape) != 3:
        raise ShapeError("a shape (B, M, N)", str(tuple(shape)), "use B = 1 for one matrix")
    perm = (0, 2, 1)
    if split == "outer":
        plan = permutation(shape, perm)
        launch = block_launch(chip, dtype, plan, math.prod(shape), relu=True)
        return Kernel("relu_transpose", (launch,))
    cores = chip.core_count * chip.vector_cores_per_core
    most = 1 << (chip.buffers["UB"] // (4 * item_bytes(dtype))).bit_length() - 1
    tile = math.gcd(math.prod(shape) // cores, most)
    relu = elementwise_launch(chip, math.prod(shape), op="vrelu", tile=tile, dtype=dtype)
    turn = transpose_launch(chip, shape, perm, dtype)
    phases = renamed(relu, {"x1": "x", "y": "h"}), renamed(turn, {"x": "h"})
    return Kernel("relu_transpose", phases)


def renamed(launch: Launch, names: Mapping[str, str]) -> Launch:
    """Return the launch with GM tensors renamed, to join it with others on the same tensors."""

    def turn(region: Region) -> Region:
        name = names.get(region.buffer.name)
        if region.space != "GM" or name is None:
            return region
        return replace(region, buffer=replace(region.buffer, name=name))

    def visit(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                out.append(replace(node, body=visit(node.body)))
            else:
                dst = None if node.dst is None else turn(node.dst)
                out.append(replace(node, dst=dst, srcs=tuple(turn(s) for s in node.srcs)))
        return tuple(out)

    parts = []
    for part in launch.parts:
        program = part.program
        buffers = tuple(dict.fromkeys(turn(b.region()).buffer for b in program.buffers))
        body = visit(program.body)
        parts.append(replace(part, program=replace(program, buffers=buffers, body=body)))
    return replace(launch, parts=tuple(parts))
