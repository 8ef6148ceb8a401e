"""Operators in a row in one kernel: what the second wants to own decides what may stay on chip."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, InputError, ShapeError
from ascend_lab.isa import Affine, Kernel, KernelBuilder, Launch, Program, Share, Tile, spread
from ascend_lab.isa.program import renamed
from ascend_lab.kernels.flash_shape import FlashShape, FlashTiling, default_tiling, tile_bytes
from ascend_lab.kernels.indexed_rows import Feed
from ascend_lab.kernels.transpose import block_launch, permutation, transpose_launch
from ascend_lab.kernels.vector import elementwise_launch
from ascend_lab.layout.moves import item_bytes
from ascend_lab.ops.attention import DTYPE, flash_kernel
from ascend_lab.ops.expressions import compile as compile_operator
from ascend_lab.sim import simulate_kernel

BLOCK, HALF, AREA = 16, 8, 256
"""Side of a block, the points of it that one repeat of 256 bytes covers, its elements."""
CHANNELS = 64
"""Channels of a tile: loads have runs of 128 bytes, and points enough fit for long stores."""
TILES = 2
"""Tiles a core should have at least, so that loads and stores overlap; more make short rows."""


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
    perm, elements = (0, 2, 1), math.prod(shape)
    if split == "outer":
        launch = block_launch(chip, dtype, permutation(shape, perm), elements, relu=True)
        return Kernel("relu_transpose", (launch,))
    most = 1 << (chip.buffers["UB"] // (4 * item_bytes(dtype))).bit_length() - 1
    tile = math.gcd(elements // chip.cores_of("vector"), most)
    relu = elementwise_launch(chip, elements, op="vrelu", tile=tile, dtype=dtype)
    turn = transpose_launch(chip, shape, perm, dtype)
    phases = renamed(relu, {"x1": "x", "y": "h"}), renamed(turn, {"x": "h"})
    return Kernel("relu_transpose", phases)


# -- maximum, transpose and scatter ---------------------------------------------------------------
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
    """Return the kernel y[index[c], p] = max over g of x[p, g, c]: tensors x, index, y; fp16.

    x is (points, group, channels), y (rows, points), both row-major, index has an int32 per
    channel. A core owns points all the way: it loads a tile of them, some channels at a time, V
    takes the maximum over the group and leaves it in blocks of 16 x 16, turns the blocks, and MTE3
    stores each channel's points in the row of y that its index names. Rows of y that no index names
    stay as they are; of equal indices the last channel wins. Raises `CapacityError` if 16 points do
    not fit UB.
    """
    units = sizes.points // BLOCK
    per = -(-units // chip.cores_of("vector"))
    shares = [min(per, units - start) for start in range(0, units, per)]
    grid = {"core": shares}
    return spread("turn_scatter", grid, lambda own: _Writer(chip, sizes, own).program())


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


class _Writer:
    """The program of cores that own equally many units of 16 points."""

    def __init__(self, chip: Chip, sizes: Points, own: Share) -> None:
        k = self.k = KernelBuilder("turn_scatter", chip)
        self.sizes, self.own, self.units = sizes, own[0], tile_units(chip, sizes, own[0])
        self.start = k.param("core", own[2]) * (own[1] * BLOCK)
        points, most = self.units * BLOCK, min(CHANNELS, sizes.channels)
        self.x = k.tensor("x", "fp16", sizes.points * sizes.group * sizes.channels)
        index = k.tensor("index", "int32", sizes.channels)
        self.y = k.tensor("y", "fp16", sizes.rows * sizes.points)
        # all indices at once: MTE2 would wait with a second batch for the stores of the first
        self.feed = Feed.make(k, index, "MTE3", most=sizes.channels)
        tile = points * sizes.group * most
        self.load = k.queue("tile", "UB", "fp16", tile, src="MTE2", dst="V")
        self.most = k.buffer("most", "UB", "fp16", points * most)
        self.store = k.queue("turned", "UB", "fp16", points * most, src="V", dst="MTE3")

    def program(self) -> Program:
        """Walk the channels, and the points in tiles of as many units as fit."""
        count, rest = divmod(self.own, self.units)
        self.feed.open(0, self.sizes.channels)
        for low in range(0, self.sizes.channels, CHANNELS):
            channels = low, min(CHANNELS, self.sizes.channels - low)
            with self.k.loop(f"i{low}", count) as i:
                at = self.start + i * (self.units * BLOCK)
                self._move(at, self.units, channels, f"a{low}")
            if rest:
                at = self.start + count * self.units * BLOCK
                self._move(at, rest, channels, f"b{low}")
        self.feed.close()
        return self.k.finish()

    def _move(self, at: Affine, units: int, channels: tuple[int, int], name: str) -> None:
        """Load a tile of points and channels (first, count), reduce, turn and store it."""
        k, group, pitch, (low, wide) = self.k, self.sizes.group, self.sizes.channels, channels
        start, shape = at * (group * pitch) + low, (units * BLOCK * group, wide)
        source = self.x.region(start, shape, (pitch, 1))
        k.copy(self.load.alloc().region(0, source.sizes), source)
        self.load.enqueue()
        self._reduce(self.load.dequeue(), units, wide)
        self.load.free()
        turned, side = self.store.alloc(), (BLOCK, BLOCK)
        with k.loop(f"{name}_block", wide // BLOCK * units) as j:
            k.vector("vtranspose", turned.region(j * AREA, side), self.most.region(j * AREA, side))
        self.store.enqueue()
        turned = self.store.dequeue()
        for block in range(wide // BLOCK):
            with k.loop(f"{name}_row{block}", BLOCK) as r:
                place = r * BLOCK + block * units * AREA
                row = turned.region(place, (units, BLOCK), (AREA, 1))
                target = self.y.region(at, (units, BLOCK))
                pick = self.feed.take(r + (low + block * BLOCK))
                k.copy_row(target, row, pick, self.sizes.points, self.sizes.rows)
        self.store.free()

    def _reduce(self, loaded: Tile, units: int, wide: int) -> None:
        """Leave the maximum over the group as blocks (channel block, point block, 16, 16)."""
        group, shape = self.sizes.group, (2 * units, HALF, BLOCK)
        steps = (HALF * group * wide, group * wide, 1)
        for block in range(wide // BLOCK):
            out = self.most.region(block * units * AREA, shape)
            parts = [loaded.region(g * wide + block * BLOCK, shape, steps) for g in range(group)]
            self.k.vector("vmax", out, parts[0], parts[min(1, group - 1)])
            for part in parts[2:]:
                self.k.vector("vmax", out, out, part)


# What attention costs: the FlashAttention kernel against three kernels that store the scores.
@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Cost of one attention on a chip, counted from the programs of all cores.

    `gm_bytes` cross between the cores and L2 or device memory, `memory_bytes` the device memory's
    own interface, where no phase finds in L2 what another left; `ub_bytes` is what the kernel keeps
    in UB (None where it is no single launch).
    """

    gm_bytes: int
    memory_bytes: int
    cycles: int
    ub_bytes: int | None = None


def flash_traffic(
    shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None
) -> AttentionTraffic:
    """Return the cost of the FlashAttention kernel; raises as `flash_kernel`."""
    tiling = default_tiling(shape, chip) if chip.combined and tiling is None else tiling
    line = simulate_kernel(flash_kernel(shape, chip, tiling), chip)
    used = tile_bytes(shape, tiling)["UB"] if tiling and chip.combined else None
    return AttentionTraffic(_gm(line.path_bytes), line.memory_bytes, line.cycles, used)


def separate_kernels(shape: FlashShape, chip: Chip) -> tuple[Kernel, ...]:
    """Return the kernels of attention as three operators: scores, softmax, weighted sum."""
    n, t = shape.rows, shape.keys
    q, k, v = (shape.batch, n, shape.depth), (shape.batch, t, shape.depth), (t, shape.width)
    scores, both = (shape.batch, n, t), (DTYPE, DTYPE)
    masks = {"": [], "rows": [(shape.batch, 1, t)], "full": [scores]}[shape.mask]
    name = "masked_softmax" if masks else "softmax"
    return (
        compile_operator("attention_scores", [q, k], both, chip, scale=shape.scale),
        compile_operator(name, [scores, *masks], both[: 1 + len(masks)], chip),
        compile_operator("attention_context", [scores, (shape.batch, *v)], both, chip),
    )


def separate_traffic(shape: FlashShape, chip: Chip) -> AttentionTraffic:
    """Return the cost of attention as three operators, whose scores pass through GM."""
    lines = [simulate_kernel(kernel, chip) for kernel in separate_kernels(shape, chip)]
    return AttentionTraffic(
        sum(_gm(line.path_bytes) for line in lines),
        sum(line.memory_bytes for line in lines),
        sum(line.cycles for line in lines),
    )


def _gm(path_bytes: Mapping[tuple[str, str], int]) -> int:
    return sum(size for path, size in path_bytes.items() if "GM" in path)
