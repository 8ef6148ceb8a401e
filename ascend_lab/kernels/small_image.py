"""Planes of up to 4 channels to pixels of 4 channels: what a first convolution reads.

Of 256 pixels of a channel, 16 to a row, `vtranspose` makes columns; their rows go to their channel
of 4 (q, channel, r), pixel 16 r + q. Turned again, 4 columns of all channels are 4 neighbouring
pixels of every row: 16 numbers, one block of 32 bytes. Bytes are made of them at the end.

    (channel, r, q) -> (q, channel, r) -> (r, q, channel)       q: 4 at a time the second time
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.isa import SMALL_C0, Buffer, KernelBuilder, Launch, Program, Share, Tile, spread
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import chunks, repeat

Memory = Tile | Buffer
AREA = FRACTAL * FRACTAL
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels."""
MOST, TILES = 16, 4
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


def small_image_launch(image: SmallImage, chip: Chip) -> Launch:
    """Return the kernel, x (n, c, pixels) to y (n, pixels, 4), channels that are not there 0.

    Raises `UnsupportedError` for more than 4 channels, fewer than 256 pixels or another format.
    """
    if image.channels > SMALL_C0 or image.pixels < AREA or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("at most 4 channels and at least 256 pixels", got, "convert it so")
    cores = chip.cores_of("vector")
    planes = (3 if image.stored == "int8" else 2) * image.channels
    each = (planes + 3 * SMALL_C0) * AREA * DTYPE_BYTES[image.dtype]
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
    c, pixels, dtype, bytes_out = image.channels, image.pixels, image.dtype, image.stored == "int8"
    x = k.tensor("x", dtype, image.images * c * pixels)
    y = k.tensor("y", image.stored, image.images * pixels * SMALL_C0)
    held = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", image.stored, SMALL_C0 * tile, src="V", dst="MTE3")
    sizes = {"turned": SMALL_C0} | ({"steps": c, "halves": SMALL_C0} if bytes_out else {})
    turned, *steps = (k.buffer(name, "UB", dtype, n * tile) for name, n in sizes.items())
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
                tiles = held.dequeue(), turned, out.alloc()
                if steps:
                    _turn_bytes(k, image, tiles, steps, tile // AREA)
                else:
                    _turn(k, c, tiles, tile // AREA)
                held.free()
                out.enqueue()
                target = y.region((plane * pixels + at) * SMALL_C0, tile * SMALL_C0)
                k.copy(target, out.dequeue().region(0, tile * SMALL_C0))
                out.free()
    return k.finish()


def _turn_bytes(
    k: KernelBuilder,
    image: SmallImage,
    tiles: tuple[Tile, Buffer, Tile],
    buffers: Sequence[Buffer],
    blocks: int,
) -> None:
    """Bring numbers to steps of the scale, turn them, and make bytes of them."""
    (source, turned, to), (steps, halves) = tiles, buffers
    count = image.channels * blocks * AREA
    k.each("vmuls", count, (steps, 0), (source, 0), scalar=image.scale)
    if image.offset:
        k.each("vadds", count, (steps, 0), (steps, 0), scalar=float(image.offset))
    _turn(k, image.channels, (steps, turned, halves), blocks)
    k.each("vconv", SMALL_C0 * blocks * AREA, (to, 0), (halves, 0))


def _turn(
    k: KernelBuilder, channels: int, tiles: tuple[Memory, Buffer, Memory], blocks: int
) -> None:
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
