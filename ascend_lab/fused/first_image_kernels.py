"""Images for first layers, made of planes of halves.

Int8 in NC1HWC0: a block of 16 pixels of up to 16 channels is transposed by the vector unit, so that
the channels of a pixel lie side by side; the other half of its 32 bytes is 0. Cores share the
images, and where there are fewer of those, their pixels.

Halves in NC1HWC0: the same, but each pixel is its 16 channels, and nothing is converted.

Planes of up to 4 channels become pixels of 4, what a first convolution reads. Of 256 pixels of a
channel, 16 to a row, `vtranspose` makes columns; their rows go to their channel of 4 (q, channel,
r), pixel 16 r + q. Turned again, 4 columns of all channels are 4 neighbouring pixels of every row:
16 numbers, one block of 32 bytes. Bytes are made of them at the end.

    (channel, r, q) -> (q, channel, r) -> (r, q, channel)       q: 4 at a time the second time
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.errors import UnsupportedError
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
    c = image.channels
    blocks = tile // FRACTAL
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
            sizes = (c, blocks, FRACTAL)
            spread = (FRACTAL, AREA, 1)
            start = (first + index) * (c * image.pixels) + at
            planes = x.region(start, sizes, (image.pixels, FRACTAL, 1))
            k.copy(held.alloc().region(0, sizes, spread), planes)
            held.enqueue()
            _steps(k, image, steps, held.dequeue(), blocks)
            held.free()
            to = out.alloc()
            _turn(k, steps, turned, to, blocks)
            out.enqueue()
            done = (number * tile - at) * PAIR
            place = ((first + index) * image.pixels + at) * PAIR
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


# -- halves of few channels ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FewChannels:
    """Images of 2 to 16 channels in a 2-byte format, and the pixels of each."""

    images: int
    channels: int
    pixels: int
    dtype: str = "fp16"


def few_channels_launch(image: FewChannels, chip: Chip) -> isa.Launch:
    """Return the kernel, x (n, c, pixels) to y (n, pixels, 16), channels that are not there 0.

    Raises `UnsupportedError` for more than 16 channels or one (15 of 16 planes that are turned
    would be empty), fewer than 16 pixels or another format.
    """
    fits = 2 <= image.channels <= FRACTAL <= image.pixels
    if not fits or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("2 to 16 channels and at least 16 pixels", got, "convert it so")
    cores = chip.cores_of("vector")
    pixel_bytes = FRACTAL * DTYPE_BYTES[image.dtype]
    room = chip.buffers["UB"] // (4 * pixel_bytes)  # two queues of two slots each
    share = up(image.images * image.pixels, TILES * cores)  # a core's pixels in a few tiles
    most = min(MOST, room, share, image.pixels)
    tile = max(FRACTAL, most // FRACTAL * FRACTAL)
    tiles = up(image.pixels, tile)
    split = min(up(cores, image.images), tiles)
    images = chunks(image.images, 1, cores // split or 1)

    def program(own: Share, tiles: Share) -> Program:
        return _few_channels_program(image, chip, tile, own, tiles[1:])

    return spread("few_channels", {"core": images}, program, apart=chunks(tiles, 1, split))


def _few_channels_program(
    image: FewChannels, chip: Chip, tile: int, own: Share, tiles: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1, of `tile` pixels, of a core's images.

    The last tile of an image is moved back where it would stand out; what is done is not stored.
    """
    c = image.channels
    pixels = image.pixels
    blocks = tile // FRACTAL
    k = KernelBuilder(f"few_channels_{own[0]}x{tiles[1] - tiles[0]}", chip)
    x = k.tensor("x", image.dtype, image.images * c * pixels)
    y = k.tensor("y", image.dtype, image.images * pixels * FRACTAL)
    held = k.queue("x_ub", "UB", image.dtype, tile * FRACTAL, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", image.dtype, tile * FRACTAL, src="V", dst="MTE3")
    for slot in range(held.buffer.slots if c < FRACTAL else 0):  # planes that no channel fills
        k.each("vdup", (FRACTAL - c) * tile, (isa.Tile(held.buffer, slot), c * tile), scalar=0.0)
    first = k.param("core", own[2]) * own[1]

    whole = min(tiles[1], pixels // tile)
    done = -pixels % tile
    with repeat(k, "image", own[0]) as index:
        plane = first + index
        sides = (whole - tiles[0], tiles[0] * tile, 0), (tiles[1] - whole, pixels - tile, done)
        for count, begin, skip in (side for side in sides if side[0] > 0):
            with repeat(k, "tile", count) as number:
                at = number * tile + begin
                planes = x.region(plane * (c * pixels) + at, (c, tile), (pixels, 1))
                k.copy(held.alloc().region(0, (c, tile)), planes)
                held.enqueue()
                channels = held.dequeue().region(0, (blocks, FRACTAL, FRACTAL), (FRACTAL, tile, 1))
                k.vector("vtranspose", out.alloc().region(0, (blocks, FRACTAL, FRACTAL)), channels)
                held.free()
                out.enqueue()
                start = (plane * pixels + at + skip) * FRACTAL
                left = (tile - skip) * FRACTAL
                k.copy(y.region(start, left), out.dequeue().region(skip * FRACTAL, left))
                out.free()
    return k.finish()


Memory = isa.Tile | Buffer
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels."""
MOST_BLOCKS = 16
TILES = 4
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
    c = image.channels
    pixels = image.pixels
    dtype = image.dtype
    bytes_out = image.stored == "int8"
    x = k.tensor("x", dtype, image.images * c * pixels)
    y = k.tensor("y", image.stored, image.images * pixels * SMALL_C0)
    held = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", image.stored, SMALL_C0 * tile, src="V", dst="MTE3")
    sizes = {"turned": SMALL_C0} | ({"steps": c, "halves": SMALL_C0} if bytes_out else {})
    turned, *steps = (k.buffer(name, "UB", dtype, n * tile) for name, n in sizes.items())
    k.each("vdup", SMALL_C0 * tile, (turned, 0), scalar=0.0)
    begin = k.param("first", own[2]) * own[1]

    whole = min(band[1], pixels // tile)
    done = -pixels % tile // image.block * image.block
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
                start = (plane * pixels + at + skip) * SMALL_C0
                left = (tile - skip) * SMALL_C0
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
    (source, turned, to) = tiles
    (steps, halves) = buffers
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
    side = (blocks, FRACTAL, FRACTAL)
    rows = (AREA, FRACTAL, 1)
    lines = (SMALL_C0 * AREA, LINE, 1)
    for i in range(channels):
        plane = source.region(i * blocks * AREA, side, rows)
        k.vector("vtranspose", turned.region(i * FRACTAL, side, lines), plane)
    for i in range(SMALL_C0):
        columns = turned.region(i * AREA, side, (SMALL_C0 * AREA, *rows[1:]))
        k.vector("vtranspose", to.region(i * FRACTAL, side, lines), columns)
