"""Images for first layers, made of planes of halves, and bytes pooled.

Int8 in NC1HWC0: a block of 16 pixels of up to 16 channels is transposed by the vector unit, so that
the channels of a pixel lie side by side; the other half of its 32 bytes is 0. Cores share the
images, and where there are fewer of those, their pixels.

Pooling takes the largest of each window. The vector unit compares halves, so bytes are converted: a
block of image rows at once, before rows are folded. Columns are folded 16 channels at a time: eight
pixels of 32 bytes a repeat, whatever lies between them. Cores share the planes, and where there are
fewer of those, their rows.

Planes of up to 4 channels become pixels of 4, what a first convolution reads. Of 256 pixels of a
channel, 16 to a row, `vtranspose` makes columns; their rows go to their channel of 4 (q, channel,
r), pixel 16 r + q. Turned again, 4 columns of all channels are 4 neighbouring pixels of every row:
16 numbers, one block of 32 bytes. Bytes are made of them at the end.

    (channel, r, q) -> (q, channel, r) -> (r, q, channel)       q: 4 at a time the second time
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    SMALL_C0,
    Buffer,
    KernelBuilder,
    Program,
    Share,
    spread,
    up,
)
from ascend_lab.operators.kernels.tiles import chunks, repeat

AREA = FRACTAL * FRACTAL
PAIR = 2 * FRACTAL
MOST = 1024
"""Pixels at a time: six tiles of so many times 32 bytes are most of UB."""


@dataclass(frozen=True, slots=True)
class ByteImage:
    """Images, channels and pixels; q = round(x scale) + offset."""

    images: int
    channels: int
    pixels: int
    scale: float
    offset: int


def byte_image_launch(image: ByteImage, chip: Chip) -> isa.Launch:
    """Return the kernel; raise `UnsupportedError` for more than 16 channels or fewer pixels."""
    if image.channels > FRACTAL or image.pixels < FRACTAL:
        got = f"{image.channels} channels, {image.pixels} pixels"
        raise UnsupportedError("at most 16 channels, at least 16 pixels", got, "convert it apart")
    room = chip.buffers["UB"] // (6 * PAIR) // FRACTAL * FRACTAL
    tile = min(MOST, room, image.pixels // FRACTAL * FRACTAL)
    tiles = up(image.pixels, tile)
    split = min(up(chip.core_count, image.images), tiles)
    images = chunks(image.images, 1, chip.core_count // split or 1)

    def program(own: Share, tiles: Share) -> Program:
        return _program(image, chip, tile, own, tiles[1:])

    return spread("byte_image", {"core": images}, program, apart=chunks(tiles, 1, split))


def _program(
    image: ByteImage, chip: Chip, tile: int, own: Share, tiles: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1, of `tile` pixels, of a core's images.

    The last tile of an image is moved back where it would stand out; what is done is not stored.
    """
    c, blocks = image.channels, tile // FRACTAL
    k = KernelBuilder(f"image_{own[0]}x{tiles[1] - tiles[0]}", chip)
    x = k.tensor("x", "fp16", image.images * c * image.pixels)
    y = k.tensor("y", "int8", image.images * image.pixels * PAIR)
    held = k.queue("x_ub", "UB", "fp16", tile * FRACTAL, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", "int8", tile * PAIR, src="V", dst="MTE3")
    steps = k.buffer("steps", "UB", "fp16", tile * FRACTAL)
    turned = k.buffer("turned", "UB", "fp16", tile * FRACTAL)
    k.each("vdup", tile * FRACTAL, (steps, 0), scalar=0.0)
    for slot in range(out.buffer.slots):  # the half of each pixel that no channel fills
        k.each("vdup", tile * PAIR, (isa.Tile(out.buffer, slot), 0), scalar=0.0)
    first = k.param("core", own[2]) * own[1]
    with k.loop("image", own[0]) as index:
        for number in range(*tiles):
            at = min(number * tile, image.pixels - tile)
            sizes, spread = (c, blocks, FRACTAL), (FRACTAL, AREA, 1)
            start = (first + index) * (c * image.pixels) + at
            planes = x.region(start, sizes, (image.pixels, FRACTAL, 1))
            k.copy(held.alloc().region(0, sizes, spread), planes)
            held.enqueue()
            _steps(k, image, steps, held.dequeue(), blocks)
            held.free()
            to = out.alloc()
            _turn(k, steps, turned, to, blocks)
            out.enqueue()
            done, place = (number * tile - at) * PAIR, ((first + index) * image.pixels + at) * PAIR
            left = tile * PAIR - done
            k.copy(y.region(place + done, left), out.dequeue().region(done, left))
            out.free()
    return k.finish()


def _steps(k: KernelBuilder, image: ByteImage, steps: Buffer, held: isa.Tile, blocks: int) -> None:
    """Bring the channels of all blocks to steps of the scale."""
    lanes = min(image.channels * FRACTAL, k.chip.vector_bytes_per_repeat // 2)
    for start in range(0, image.channels * FRACTAL, lanes):
        width = min(lanes, image.channels * FRACTAL - start)
        for done in range(0, blocks, k.chip.max_repeat):
            sizes = (min(k.chip.max_repeat, blocks - done), width)
            to, source = (m.region(done * AREA + start, sizes, (AREA, 1)) for m in (steps, held))
            k.vector("vmuls", to, source, scalar=image.scale)
            if image.offset:
                k.vector("vadds", to, to, scalar=float(image.offset))


def _turn(k: KernelBuilder, steps: Buffer, turned: Buffer, to: isa.Tile, blocks: int) -> None:
    """Put the channels of each pixel side by side, and convert them."""
    with k.loop("block", blocks) as block:
        area = (block * AREA, (FRACTAL, FRACTAL))
        k.vector("vtranspose", turned.region(*area), steps.region(*area))
    most = k.chip.max_repeat // 2
    for done in range(0, blocks, most):
        lanes = (2 * min(most, blocks - done), 8, FRACTAL)
        half = to.region(done * FRACTAL * PAIR, lanes, (8 * PAIR, PAIR, 1))
        k.vector("vconv", half, turned.region(done * AREA, lanes))


# -- pooling ---------------------------------------------------------------------------------------
LOWEST = -128.0
BLOCKS = 8
"""Blocks of 32 bytes in a repeat."""
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BytePool:
    """What to pool: planes of 32 channels, their size, kernel, stride, pads, outputs a plane."""

    planes: int
    size: Pair
    kernel: Pair
    stride: Pair
    pads: tuple[Pair, Pair]
    out: Pair

    @property
    def wide(self) -> int:
        """Columns of an image row with its padding."""
        return self.size[1] + sum(self.pads[1])

    def rows(self, first: int, count: int) -> Pair:
        """Return the image rows (first, count) that some output rows need."""
        low = first * self.stride[0] - self.pads[0][0]
        high = low + (count - 1) * self.stride[0] + self.kernel[0]
        low, high = max(low, 0), min(high, self.size[0])
        return low, high - low

    def bytes_for(self, count: int) -> int:
        """Return the bytes of UB for so many output rows at a time, two slots of each queue."""
        rows = min((count - 1) * self.stride[0] + self.kernel[0], self.size[0])
        image, out = rows * self.size[1], count * self.out[1]
        return PAIR * (4 * image + 4 * out + 2 * self.wide)


def byte_pool_launch(pool: BytePool, chip: Chip) -> isa.Launch:
    """Return the kernel; raise `CapacityError` if one output row does not fit UB."""
    fits = [n for n in range(1, pool.out[0] + 1) if pool.bytes_for(n) <= chip.buffers["UB"]]
    if not fits:
        needed = f"{pool.bytes_for(1)} bytes of UB for the windows of a row"
        raise CapacityError(needed, str(chip.buffers["UB"]), "pool a narrower image")
    down = min(up(chip.core_count, pool.planes), pool.out[0])
    planes = chunks(pool.planes, 1, min(pool.planes, chip.core_count // down or 1))

    def program(own: Share, rows: Share) -> Program:
        return _pool_program(pool, chip, rows[1:], own, max(fits))

    return spread("byte_pool", {"core": planes}, program, apart=chunks(pool.out[0], 1, down))


def _pool_program(pool: BytePool, chip: Chip, span: Pair, planes: Share, most: int) -> Program:
    """Return the program of cores with `planes` and output rows first .. end - 1."""
    (h, w), (oh, ow) = pool.size, pool.out
    k = KernelBuilder(f"pool_{planes[0]}x{span[1] - span[0]}", chip)
    x = k.tensor("x", "int8", pool.planes * h * w * PAIR)
    y = k.tensor("y", "int8", pool.planes * oh * ow * PAIR)
    rows = max(pool.rows(at, min(most, span[1] - at))[1] for at in range(*span, most))
    held = k.queue("x_ub", "UB", "int8", rows * w * PAIR, src="MTE2", dst="V")
    count = min(most, span[1] - span[0])
    out = k.queue("y_ub", "UB", "int8", count * ow * PAIR, src="V", dst="MTE3")
    image = k.buffer("image", "UB", "fp16", rows * w * PAIR)
    row = k.buffer("row", "UB", "fp16", pool.wide * PAIR)
    best = k.buffer("best", "UB", "fp16", count * ow * PAIR)
    k.each("vdup", pool.wide * PAIR, (row, 0), scalar=LOWEST)
    first = k.param("core", planes[2]) * planes[1]
    with k.loop("plane", planes[0]) as index:
        plane = first + index
        for at in range(*span, most):
            some = min(most, span[1] - at)
            low, high = pool.rows(at, some)
            size = high * w * PAIR
            k.copy(held.alloc().region(0, size), x.region((plane * h + low) * (w * PAIR), size))
            held.enqueue()
            k.each("vconv", size, (image, 0), (held.dequeue(), 0))
            held.free()
            for i in range(some):
                _row(k, pool, (image, row, best), (at + i, low, low + high), i * ow * PAIR)
            k.each("vconv", some * ow * PAIR, (out.alloc(), 0), (best, 0))
            out.enqueue()
            to = y.region((plane * oh + at) * (ow * PAIR), some * ow * PAIR)
            k.copy(to, out.dequeue().region(0, some * ow * PAIR))
            out.free()
    return k.finish()


def _row(
    k: KernelBuilder,
    pool: BytePool,
    buffers: tuple[Buffer, Buffer, Buffer],
    place: tuple[int, int, int],
    to: int,
) -> None:
    """Fold image rows, then columns, into the output row `place` (row, first held, end held)."""
    (image, row, best), (at, low, end), w = buffers, place, pool.size[1]
    top = at * pool.stride[0] - pool.pads[0][0]
    taps = range(max(top, low), min(top + pool.kernel[0], end))
    sources = [(image, (tap - low) * w * PAIR) for tap in taps]
    own = (row, pool.pads[1][0] * PAIR)
    if len(sources) == 1:
        k.each("vcopy", w * PAIR, own, sources[0])
    else:
        k.each("vmax", w * PAIR, own, *sources[:2])
    for source in sources[2:]:
        k.each("vmax", w * PAIR, own, own, source)
    for half in range(2):
        _columns(k, pool, row, best, (half * FRACTAL, to + half * FRACTAL))


def _columns(k: KernelBuilder, pool: BytePool, row: Buffer, best: Buffer, starts: Pair) -> None:
    """Fold the columns of 16 channels: `starts` are their places in both buffers."""
    step, done = pool.stride[1] * PAIR, 0
    while done < pool.out[1]:
        left = pool.out[1] - done
        repeats, blocks = (min(left // BLOCKS, k.chip.max_repeat), BLOCKS)
        repeats, blocks = (repeats, blocks) if repeats else (1, left)
        sizes = (repeats, blocks, FRACTAL)
        to = best.region(starts[1] + done * PAIR, sizes, (blocks * PAIR, PAIR, 1))
        taps = [
            row.region(
                isa.Affine(starts[0] + done * step + s * PAIR), sizes, (blocks * step, step, 1)
            )
            for s in range(pool.kernel[1])
        ]
        if len(taps) == 1:
            k.vector("vcopy", to, taps[0])
        else:
            k.vector("vmax", to, *taps[:2])
        for tap in taps[2:]:
            k.vector("vmax", to, to, tap)
        done += repeats * blocks


Memory = isa.Tile | Buffer
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels."""
MOST_BLOCKS, TILES = 16, 4
"""Blocks of 256 pixels of a tile at most, and tiles that a core should have."""


@dataclass(frozen=True, slots=True)
class SmallImage:
    """Images of up to 4 channels in a 2-byte format, and the pixels of each.

    In int8 a result is round(x scale) + offset.
    """

    images: int
    channels: int
    pixels: int
    dtype: str = "fp16"
    out_dtype: str = ""
    scale: float = 1.0
    offset: int = 0

    @property
    def stored(self) -> str:
        """Format of the result."""
        return self.out_dtype or self.dtype

    @property
    def block(self) -> int:
        """Pixels of a block of 32 bytes of the result."""
        return BLOCK_BYTES // (SMALL_C0 * DTYPE_BYTES[self.stored])


def small_image_launch(image: SmallImage, chip: Chip) -> isa.Launch:
    """Return the kernel, x (n, c, pixels) to y (n, pixels, 4), channels that are not there 0.

    Raises `UnsupportedError` for more than 4 channels, fewer than 256 pixels or another format.
    """
    if image.channels > SMALL_C0 or image.pixels < AREA or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("at most 4 channels and at least 256 pixels", got, "convert it so")
    cores = chip.cores_of("vector")
    planes = (3 if image.stored == "int8" else 2) * image.channels
    each = (planes + 3 * SMALL_C0) * AREA * DTYPE_BYTES[image.dtype]
    blocks = min(MOST_BLOCKS, chip.buffers["UB"] // each, image.pixels // AREA)
    tile = max(1, min(blocks, image.images * image.pixels // AREA // (TILES * cores))) * AREA
    down = min(image.images, cores)
    bands = chunks(up(image.pixels, tile), 1, cores // down)
    if image.pixels % image.block and bands[-1] == 1:  # tiles that share a block are one core's
        bands[-2:] = [sum(bands[-2:])]
    images = chunks(image.images, 1, down)

    def program(own: Share, band: Share) -> Program:
        return _small_program(image, chip, tile, own, band[1:])

    return spread("small_image", {"first": images}, program, apart=bands)


def _small_program(
    image: SmallImage, chip: Chip, tile: int, own: Share, band: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1 of a core's images.

    The last tile of an image is moved back where it would stand out; blocks done are not stored.
    """
    k = KernelBuilder(f"small_image_{own[0]}x{band[1] - band[0]}", chip)
    c, pixels, dtype, bytes_out = image.channels, image.pixels, image.dtype, image.stored == "int8"
    x = k.tensor("x", dtype, image.images * c * pixels)
    y = k.tensor("y", image.stored, image.images * pixels * SMALL_C0)
    held = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", image.stored, SMALL_C0 * tile, src="V", dst="MTE3")
    sizes = {"turned": SMALL_C0} | ({"steps": c, "halves": SMALL_C0} if bytes_out else {})
    turned, *steps = (k.buffer(name, "UB", dtype, n * tile) for name, n in sizes.items())
    k.each("vdup", SMALL_C0 * tile, (turned, 0), scalar=0.0)
    begin = k.param("first", own[2]) * own[1]

    whole, done = min(band[1], pixels // tile), -pixels % tile // image.block * image.block
    with repeat(k, "image", own[0]) as index:
        plane = begin + index
        sides = (whole - band[0], band[0] * tile, 0), (band[1] - whole, pixels - tile, done)
        for count, first, skip in (side for side in sides if side[0] > 0):
            with repeat(k, "tile", count) as number:
                at = number * tile + first
                planes = x.region(plane * (c * pixels) + at, (c, tile), (pixels, 1))
                k.copy(held.alloc().region(0, (c, tile)), planes)
                held.enqueue()
                tiles = held.dequeue(), turned, out.alloc()
                if steps:
                    _turn_bytes(k, image, tiles, steps, tile // AREA)
                else:
                    _turn_planes(k, c, tiles, tile // AREA)
                held.free()
                out.enqueue()
                start, left = (plane * pixels + at + skip) * SMALL_C0, (tile - skip) * SMALL_C0
                k.copy(y.region(start, left), out.dequeue().region(skip * SMALL_C0, left))
                out.free()
    return k.finish()


def _turn_bytes(
    k: KernelBuilder,
    image: SmallImage,
    tiles: tuple[isa.Tile, Buffer, isa.Tile],
    buffers: Sequence[Buffer],
    blocks: int,
) -> None:
    """Bring numbers to steps of the scale, turn them, and make bytes of them."""
    (source, turned, to), (steps, halves) = tiles, buffers
    count = image.channels * blocks * AREA
    k.each("vmuls", count, (steps, 0), (source, 0), scalar=image.scale)
    if image.offset:
        k.each("vadds", count, (steps, 0), (steps, 0), scalar=float(image.offset))
    _turn_planes(k, image.channels, (steps, turned, halves), blocks)
    k.each("vconv", SMALL_C0 * blocks * AREA, (to, 0), (halves, 0))


def _turn_planes(
    k: KernelBuilder, channels: int, tiles: tuple[Memory, Buffer, Memory], blocks: int
) -> None:
    """Write the two rounds for blocks of 256 pixels: `tiles` are planes, lines, pixels."""
    source, turned, to = tiles
    side, rows, lines = (blocks, FRACTAL, FRACTAL), (AREA, FRACTAL, 1), (SMALL_C0 * AREA, LINE, 1)
    for i in range(channels):
        plane = source.region(i * blocks * AREA, side, rows)
        k.vector("vtranspose", turned.region(i * FRACTAL, side, lines), plane)
    for i in range(SMALL_C0):
        columns = turned.region(i * AREA, side, (SMALL_C0 * AREA, *rows[1:]))
        k.vector("vtranspose", to.region(i * FRACTAL, side, lines), columns)
