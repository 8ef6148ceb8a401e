"""Group norm, then SiLU, on the vector unit: a core has whole groups, and reads each group twice.

For the E = channels x pixels numbers x of a group, with scale a and bias b of each channel:

    m = sum(x) / E,   v = sum(x x) / E - m^2,   s = a / sqrt(v + epsilon),   t = b - m s
    y = x s + t,      z = y / (1 + e^-y)

The first reading adds up blocks of 8 numbers, and of their squares, in fp32. The second, which
finds what L2 still holds, computes z. A channel's s and t lie in UB as blocks of 8 equal numbers,
which an instruction reads again and again: no tensor of factors is as long as the images.

Source of the division into groups, of both sums and of fp32: CANN toolkit 8.1, Ascend C operator
GroupNormSilu (group_norm_silu_b16.h, group_norm_silu_b32.h).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Affine, Buffer, KernelBuilder, Queue, Region, Tile
from ascend_lab.operators.kernels.tiles import chunks, repeat, segments

LANES = 64
"""Numbers of fp32 in a repeat."""
BLOCK = 8
"""Numbers of fp32 in a block of 32 bytes."""
TILE = 96 * LANES
"""Numbers of a tile: in fp32 two slots each way and two scratch tiles take 144 of UB's 192 KiB."""
BLOCK_SUMS = TILE // BLOCK + LANES
"""Sums of the blocks of a tile, and behind them numbers that fill no block."""
CHANNELS = 256
"""Channels whose factors s and t lie in UB at once: one block of 32 bytes each."""

Place = tuple[Buffer | Tile, Affine | int]
"""Where a run of numbers begins."""


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """Sizes of the images (images, groups, channels of a group, pixels), and the epsilon."""

    images: int
    groups: int
    channels: int
    pixels: int
    dtype: str
    epsilon: float = 1e-5

    @property
    def size(self) -> int:
        """How many numbers a group has."""
        return self.channels * self.pixels


def group_norm_launch(shape: GroupNorm, chip: Chip) -> isa.Launch:
    """Return the launch on tensors x, scale and bias (per channel) and y.

    Images and groups are divided over cores so that the busiest core has as few groups as possible.
    Raises `PathError` for chips on which a core has both a cube and a vector unit.
    """
    cores = chip.cores_of("vector")

    # 2 images of 32 groups on 48 cores: 32 cores with one group of both images each take as long
    # as 24 cores for each image, which have up to 2 groups.
    def groups_of_busiest(image_cores: int) -> int:
        group_cores = min(shape.groups, cores // image_cores)
        return isa.ceil_div(shape.images, image_cores) * isa.ceil_div(shape.groups, group_cores)

    image_cores = min(range(1, min(shape.images, cores) + 1), key=groups_of_busiest)
    axes = {
        "image": chunks(shape.images, 1, image_cores),
        "group": chunks(shape.groups, 1, cores // image_cores),
    }
    return isa.spread("group_norm", axes, lambda *shares: _Writer(shape, chip).program(*shares))


class _Writer:
    """Writes the program of cores with equal shares."""

    def __init__(self, shape: GroupNorm, chip: Chip) -> None:
        """Declare tensors, allocate queues and tiles."""
        self.shape = shape
        k = self.k = KernelBuilder("group_norm", chip)
        numbers = shape.images * shape.groups * shape.size
        all_channels = shape.groups * shape.channels
        self.x = k.tensor("x", shape.dtype, numbers)
        self.factors = [k.tensor(name, shape.dtype, all_channels) for name in ("scale", "bias")]
        self.y = k.tensor("y", shape.dtype, numbers)
        self.loaded = k.queue("x_ub", "UB", shape.dtype, TILE, src="MTE2", dst="V")
        self.out = k.queue("y_ub", "UB", shape.dtype, TILE, src="V", dst="MTE3")
        self.loaded_factors = k.queue(
            "scale_ub", "UB", shape.dtype, CHANNELS, src="MTE2", dst="V", depth=1
        )
        self.loaded_factors.join("bias_ub", shape.dtype, CHANNELS)
        self.wide = k.buffer("wide", "UB", "fp32", TILE)
        self.scratch = k.buffer("other", "UB", "fp32", TILE)
        self.sums = [k.buffer(name, "UB", "fp32", BLOCK_SUMS) for name in ("sums", "squares")]
        self.block_sums = k.buffer("part", "UB", "fp32", TILE // BLOCK)
        # Of a group: m, sum(x x) / E and 1 / sqrt(v + epsilon), each in lane 0 of a block.
        self.mean, self.mean_square, self.inverse_deviation = (
            k.buffer(name, "UB", "fp32", BLOCK) for name in ("mean", "square", "rate")
        )
        # Blocks filled with the group's m, and with 1 / sqrt(v + epsilon).
        self.mean_block = k.buffer("means", "UB", "fp32", BLOCK)
        self.inverse_block = k.buffer("rates", "UB", "fp32", BLOCK)
        # s and t, one number per channel, then a block of equal numbers per channel.
        self.slope = k.buffer("slope", "UB", "fp32", CHANNELS)
        self.shift = k.buffer("shift", "UB", "fp32", CHANNELS)
        self.slopes = k.buffer("slopes", "UB", "fp32", CHANNELS * BLOCK)
        self.shifts = k.buffer("shifts", "UB", "fp32", CHANNELS * BLOCK)

    def program(self, images: isa.Share, groups: isa.Share) -> isa.Program:
        """Return the program, which does the groups of a core one after the other."""
        k = self.k
        first_image = k.param("image", images[2]) * images[1]
        first_group = k.param("group", groups[2]) * groups[1]
        with repeat(k, "i", images[0]) as i, repeat(k, "g", groups[0]) as g:
            group = first_group + g
            start = ((first_image + i) * self.shape.groups + group) * self.shape.size
            self._statistics(start)
            for channel, count in segments(k, "some", self.shape.channels, CHANNELS):
                self._factors(group * self.shape.channels + channel, count)
                self._channels(start + channel * self.shape.pixels, count)
        return k.finish()

    # -- moves ------------------------------------------------------------------------------------
    def _load(self, queue: Queue, parts: list[tuple[Buffer, Region]]) -> None:
        """Load regions to the buffers of a queue's slot."""
        slot = queue.alloc().slot
        for buffer, source in parts:
            target = Tile(buffer, slot).region(0, source.elements)
            self.k.copy(target, source, pad=_is_ragged(source))
        queue.enqueue()

    def _tiles(self, name: str, start: Affine, count: int) -> Iterator[tuple[Affine, int, Tile]]:
        """Yield (first, numbers, tile) for a run of x: each tile is loaded, and freed after use."""
        for at, size in segments(self.k, name, count, TILE):
            self._load(self.loaded, [(self.loaded.buffer, self.x.region(start + at, size))])
            yield start + at, size, self.loaded.dequeue()
            self.loaded.free()

    def _widened(self, tile: Tile | Buffer, target: Buffer, size: int) -> Place:
        """Return `size` numbers in fp32, cast to `target` if they are in a narrower format."""
        if self.shape.dtype == "fp32":
            return tile, 0
        self.k.each("vconv", size, (target, 0), (tile, 0))
        return target, 0

    # -- first reading ----------------------------------------------------------------------------
    def _statistics(self, start: Affine) -> None:
        """Write a group's mean and 1 / sqrt(variance + epsilon), each to all lanes of a block."""
        k = self.k
        squares = (self.scratch, 0)
        for buffer in self.sums:
            k.each("vdup", BLOCK_SUMS, (buffer, 0), scalar=0.0)
        for _, size, tile in self._tiles("sum", start, self.shape.size):
            x = self._widened(tile, self.wide, size)
            k.each("vmul", size, squares, x, x)
            for sums, (terms, _) in zip(self.sums, (x, squares), strict=True):
                self._add_up(sums, terms, size)
        # v = sum(x x) / E - m^2, then 1 / sqrt(v + epsilon)
        mean = (self.mean, 0)
        mean_square = (self.mean_square, 0)
        inverse = (self.inverse_deviation, 0)
        for sums, total in zip(self.sums, (self.mean, self.mean_square), strict=True):
            # vcadd adds up a repeat of 64 lanes: first to one sum per repeat, then to a single sum.
            rows = BLOCK_SUMS // LANES
            k.vector("vcadd", self.block_sums.region(0, rows), sums.region(0, (rows, LANES)))
            k.vector("vcadd", total.region(0, 1), self.block_sums.region(0, (1, rows)))
            k.each("vmuls", 1, (total, 0), (total, 0), scalar=1.0 / self.shape.size)
        k.each("vmul", 1, inverse, mean, mean)
        k.each("vsub", 1, inverse, mean_square, inverse)
        k.each("vmaxs", 1, inverse, inverse, scalar=0.0)  # rounding may leave less than 0
        k.each("vadds", 1, inverse, inverse, scalar=self.shape.epsilon)
        k.each("vrsqrt", 1, inverse, inverse)
        self._spread(self.mean_block, self.mean, 1)
        self._spread(self.inverse_block, self.inverse_deviation, 1)

    def _add_up(self, sums: Buffer, terms: Buffer | Tile, size: int) -> None:
        """Add the sum of each block of `terms` to `sums`, then the terms that fill no block."""
        k = self.k
        # vcgadd adds up blocks of 8 numbers; fewer at the end are added lane by lane.
        in_blocks = size // BLOCK * BLOCK
        for at, shape in k.runs(in_blocks, LANES):
            blocks = shape[0] * shape[1] // BLOCK
            k.vector("vcgadd", self.block_sums.region(at // BLOCK, blocks), terms.region(at, shape))
        k.each("vadd", in_blocks // BLOCK, (sums, 0), (sums, 0), (self.block_sums, 0))
        behind = (sums, TILE // BLOCK)
        k.each("vadd", size - in_blocks, behind, behind, (terms, in_blocks))

    def _spread(self, blocks: Buffer, numbers: Buffer, count: int) -> None:
        """Emit, for each of `count` numbers, a block filled with this number."""
        self.k.vector("vbrcb", blocks.region(0, (count, BLOCK)), numbers.region(0, count))

    # -- second reading ---------------------------------------------------------------------------
    def _factors(self, channel: Affine, count: int) -> None:
        """Write s and t of `count` channels, each to a block of equal numbers."""
        k = self.k
        slope = (self.slope, 0)
        shift = (self.shift, 0)
        buffers = (self.loaded_factors.buffer, *self.loaded_factors.members)
        sources = [tensor.region(channel, count) for tensor in self.factors]
        self._load(self.loaded_factors, list(zip(buffers, sources, strict=True)))
        slot = self.loaded_factors.dequeue().slot
        scale, bias = (Tile(buffer, slot) for buffer in buffers)
        # s = a / sqrt(v + epsilon), t = b - m s, for every channel
        a = self._widened(scale, self.slope, count)
        self._by_block("vmul", count, slope, a, (self.inverse_block, 0))
        b = self._widened(bias, self.scratch, count)
        self._by_block("vmul", count, shift, slope, (self.mean_block, 0))
        k.each("vsub", count, shift, b, shift)
        self.loaded_factors.free()
        self._spread(self.slopes, self.slope, count)
        self._spread(self.shifts, self.shift, count)

    def _channels(self, start: Affine, count: int) -> None:
        """Write z of `count` channels whose factors lie in UB.

        Short channels share a tile if each begins at a block; only the multiplication by s and the
        addition of t are then done channel by channel.
        """
        pixels = self.shape.pixels
        # 96 * 64 = 6144 numbers: 24 channels of 256 pixels in one tile.
        together = TILE // pixels if pixels % BLOCK == 0 else 1
        if together <= 1:
            with repeat(self.k, "channel", count) as c:
                self._run(start + c * pixels, pixels, 1, c)
            return
        for first_channel, tile_channels in segments(self.k, "channel", count, together):
            self._run(
                start + first_channel * pixels, tile_channels * pixels, tile_channels, first_channel
            )

    def _run(self, start: Affine, size: int, channels: int, first_channel: Affine) -> None:
        """Write z of a run of numbers: part of one channel, or several whole channels."""
        k = self.k
        y = (self.wide, 0)
        denominator = (self.scratch, 0)
        for at, count, tile in self._tiles("tile", start, size):
            x, _ = self._widened(tile, self.wide, count)
            numbers_per_channel = count // channels
            with repeat(k, "one", channels) as channel:
                place = channel * numbers_per_channel
                factors = (first_channel + channel) * BLOCK
                to = (self.wide, place)
                self._by_block("vmul", numbers_per_channel, to, (x, place), (self.slopes, factors))
                self._by_block("vadd", numbers_per_channel, to, to, (self.shifts, factors))
            # z = y / (1 + e^-y)
            k.each("vmuls", count, denominator, y, scalar=-1.0)
            k.each("vexp", count, denominator, denominator)
            k.each("vadds", count, denominator, denominator, scalar=1.0)
            out: Place = (self.out.alloc(), 0)
            if self.shape.dtype == "fp32":
                k.each("vdiv", count, out, y, denominator)
            else:
                k.each("vdiv", count, y, y, denominator)
                k.each("vconv", count, out, y)
            self.out.enqueue()
            target = self.y.region(at, count)
            k.copy(target, self.out.dequeue().region(0, count), pad=_is_ragged(target))
            self.out.free()

    def _by_block(self, op: str, count: int, target: Place, source: Place, block: Place) -> None:
        """Emit an operation on a run of numbers and the one number that fills `block`."""
        # 100 numbers: 1 repeat of 64, 4 blocks of 8, and 4 more.
        full_repeats, remainder = divmod(count, LANES)
        blocks, last_numbers = divmod(remainder, BLOCK)
        done = 0
        for sizes in ((full_repeats, BLOCK, BLOCK), (1, blocks, BLOCK), (1, 1, last_numbers)):
            elements = sizes[0] * sizes[1] * sizes[2]
            if elements:
                runs = [memory.region(at + done, sizes) for memory, at in (target, source)]
                repeated = block[0].region(block[1], sizes, (0, 0, 1))
                self.k.vector(op, *runs, repeated)
            done += elements


def _is_ragged(region: Region) -> bool:
    """Tell whether a run of neighbours ends within a block of 32 bytes."""
    return region.elements * DTYPE_BYTES[region.buffer.dtype] % BLOCK_BYTES != 0
