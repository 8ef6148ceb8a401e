"""Planes of up to 4 channels to pixels of 4 channels: what a first convolution reads.

Of 256 pixels of a channel, 16 to a row, `vtranspose` makes columns; their rows go to their channel
of 4 (q, channel, r), pixel 16 r + q. Turned again, 4 columns of all channels are 4 neighbouring
pixels of every row: 16 numbers, one block of 32 bytes.

    (channel, r, q) -> (q, channel, r) -> (r, q, channel)       q: 4 at a time the second time
"""

from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.isa import SMALL_C0, Buffer, KernelBuilder, Launch, Program, Share, Tile, spread
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import chunks, repeat

AREA = FRACTAL * FRACTAL
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels."""
MOST, TILES = 16, 4
"""Blocks of 256 pixels of a tile at most, and tiles that a core should have."""


@dataclass(frozen=True, slots=True)
class SmallImage:
    """Images of up to 4 channels in a 2-byte format, and the pixels of each."""

    images: int
    channels: int
    pixels: int
    dtype: str = "fp16"


def small_image_launch(image: SmallImage, chip: Chip) -> Launch:
    """Return the kernel, x (n, c, pixels) to y (n, pixels, 4), channels that are not there 0.

    Raises `UnsupportedError` for more than 4 channels, fewer than 256 pixels or another format.
    """
    if image.channels > SMALL_C0 or image.pixels < AREA or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("at most 4 channels and at least 256 pixels", got, "convert it so")
    cores = chip.cores_of("vector")
    each = (2 * image.channels + 3 * SMALL_C0) * AREA * DTYPE_BYTES[image.dtype]
    blocks = min(MOST, chip.buffers["UB"] // each, image.pixels // AREA)
    tile = max(1, min(blocks, image.images * image.pixels // AREA // (TILES * cores))) * AREA
    down = min(image.images, cores)
    bands = chunks(up(image.pixels, tile), 1, cores // down)
    images = chunks(image.images, 1, down)

    def program(own: Share, band: Share) -> Program:
        return _program(image, chip, tile, own, band[1:])

    return spread("small_image", {"first": images}, program, apart=bands)


def _program(
    image: SmallImage, chip: Chip, tile: int, own: Share, band: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1 of a core's images.

    The last tile of an image is moved back where it would stand out.
    """
    k = KernelBuilder(f"small_image_{own[0]}x{band[1] - band[0]}", chip)
    c, pixels, dtype = image.channels, image.pixels, image.dtype
    x = k.tensor("x", dtype, image.images * c * pixels)
    y = k.tensor("y", dtype, image.images * pixels * SMALL_C0)
    held = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", dtype, SMALL_C0 * tile, src="V", dst="MTE3")
    turned = k.buffer("turned", "UB", dtype, SMALL_C0 * tile)
    k.each("vdup", SMALL_C0 * tile, (turned, 0), scalar=0.0)
    start = k.param("first", own[2]) * own[1]

    whole = min(band[1], pixels // tile)
    with repeat(k, "image", own[0]) as index:
        plane = start + index
        for count, first in ((whole - band[0], band[0] * tile), (band[1] - whole, pixels - tile)):
            if count < 1:
                continue
            with repeat(k, "tile", count) as number:
                at = number * tile + first
                planes = x.region(plane * (c * pixels) + at, (c, tile), (pixels, 1))
                k.copy(held.alloc().region(0, (c, tile)), planes)
                held.enqueue()
                source, to = held.dequeue(), out.alloc()
                _turn(k, c, (source, turned, to), tile // AREA)
                held.free()
                out.enqueue()
                target = y.region((plane * pixels + at) * SMALL_C0, tile * SMALL_C0)
                k.copy(target, out.dequeue().region(0, tile * SMALL_C0))
                out.free()
    return k.finish()


def _turn(k: KernelBuilder, channels: int, tiles: tuple[Tile, Buffer, Tile], blocks: int) -> None:
    """Write the two rounds for blocks of 256 pixels: `tiles` are planes, lines, pixels."""
    source, turned, to = tiles
    side, apart = (FRACTAL, FRACTAL), (LINE, 1)
    with repeat(k, "block", blocks) as block:
        line = block * (SMALL_C0 * AREA)
        for i in range(channels):
            rows = source.region(block * AREA + i * blocks * AREA, side)
            k.vector("vtranspose", turned.region(line + i * FRACTAL, side, apart), rows)
        for i in range(SMALL_C0):
            columns = turned.region(line + i * AREA, side)
            k.vector("vtranspose", to.region(line + i * FRACTAL, side, apart), columns)
