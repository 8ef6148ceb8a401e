"""Kernels that convert a network's input image from planes to pixels with their channels together.

An RGB image comes as three planes, R R R ... G G G ... B B B ...; the cube wants the channels of a
pixel side by side, padded with zeros to a block of 32 bytes:

    otherwise      a copy that picks single numbers of 2 bytes; for int8 also a quantising kernel
    here           GM -> runs of planes -> UB, transposed 16 x 16 by `vtranspose` -> GM
    saved          copies move whole blocks of 32 bytes, 16 numbers, at once; for int8 one kernel
                   start, and writing and reading the quantised planes

Three kernels, one for each form of the result:

- int8 in NC1HWC0: 16 pixels of up to 16 channels are scaled, transposed and converted; the other
  half of the 32 bytes of a pixel is 0.
- 2-byte numbers in NC1HWC0: the same without the conversion; a pixel is 16 channels.
- pixels of 4 channels (or 4 bytes), as a small first convolution reads them. Here 16 numbers of a
  block are 4 neighbouring pixels, which takes two transpositions:

    (channel, r, q) -> (q, channel, r) -> (r, q, channel)        pixel 16 r + q of 256

  The first turns each channel's 16 x 16 pixels; its rows go to places with 4 channels for each q.
  The second turns four of these q at a time: 4 pixels x 4 channels are one block.

The images are divided over the cores; with fewer images than cores, also the pixels of an image.
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
    ceil_div,
    spread,
)
from ascend_lab.operators.kernels.tiles import chunks, repeat

AREA = FRACTAL * FRACTAL
"""Elements that one `vtranspose` turns, 16 x 16."""
PAIR = 2 * FRACTAL
"""Bytes of a pixel of int8 in NC1HWC0, of which 16 channels fill half."""
TILE_PIXELS = 1024
"""Pixels of a tile, at most: six tiles of 1024 x 32 bytes are 192 KB, all of UB on 910B."""


@dataclass(frozen=True, slots=True)
class ByteImage:
    """Images of fp16 planes to be quantised: q = round(x * scale) + offset."""

    images: int
    channels: int
    pixels: int
    scale: float
    offset: int


def byte_image_launch(image: ByteImage, chip: Chip) -> isa.Launch:
    """Return the kernel from x (n, c, pixels) in fp16 to y (n, pixels, 32) in int8.

    Raises `UnsupportedError` for more than 16 channels or fewer than 16 pixels.
    """
    if image.channels > FRACTAL or image.pixels < FRACTAL:
        got = f"{image.channels} channels, {image.pixels} pixels"
        raise UnsupportedError("at most 16 channels, at least 16 pixels", got, "convert it apart")
    tile_that_fits = chip.buffers["UB"] // (6 * PAIR) // FRACTAL * FRACTAL
    tile = min(TILE_PIXELS, tile_that_fits, image.pixels // FRACTAL * FRACTAL)
    tiles = ceil_div(image.pixels, tile)
    # 3 images on 8 cores: three cores for each image, one core with nothing to do
    cores_per_image = min(ceil_div(chip.core_count, image.images), tiles)
    images = chunks(image.images, 1, chip.core_count // cores_per_image or 1)

    def program(image_share: Share, tile_share: Share) -> Program:
        return _program(image, chip, tile, image_share, tile_share[1:])

    return spread("byte_image", {"core": images}, program, apart=chunks(tiles, 1, cores_per_image))


def _program(
    image: ByteImage, chip: Chip, tile: int, image_share: Share, tiles: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1, of `tile` pixels, of a core's images.

    The last tile of an image begins early enough to be full, so that it overlaps the tile before;
    what that one has stored is skipped. 40 pixels in tiles of 16: pixels 0, 16, and 24, of which
    the first 8 are skipped.
    """
    c = image.channels
    blocks = tile // FRACTAL
    k = KernelBuilder(f"image_{image_share[0]}x{tiles[1] - tiles[0]}", chip)
    x = k.tensor("x", "fp16", image.images * c * image.pixels)
    y = k.tensor("y", "int8", image.images * image.pixels * PAIR)
    planes_in = k.queue("x_ub", "UB", "fp16", tile * FRACTAL, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", "int8", tile * PAIR, src="V", dst="MTE3")
    steps = k.buffer("steps", "UB", "fp16", tile * FRACTAL)
    turned = k.buffer("turned", "UB", "fp16", tile * FRACTAL)
    # channels that the image lacks stay 0: no later instruction writes them
    k.each("vdup", tile * FRACTAL, (steps, 0), scalar=0.0)
    # the half of each pixel that no channel fills stays 0 in both slots, whatever tile is in them
    for slot in range(out.buffer.slots):
        k.each("vdup", tile * PAIR, (isa.Tile(out.buffer, slot), 0), scalar=0.0)
    first_image = k.param("core", image_share[2]) * image_share[1]
    with k.loop("image", image_share[0]) as index:
        for number in range(*tiles):
            # the last tile begins early enough to be full
            first_pixel = min(number * tile, image.pixels - tile)
            # 16 pixels of every channel come to a 16 x 16 block: channels are its rows
            sizes = (c, blocks, FRACTAL)
            blocks_apart = (FRACTAL, AREA, 1)
            start = (first_image + index) * (c * image.pixels) + first_pixel
            planes = x.region(start, sizes, (image.pixels, FRACTAL, 1))
            k.copy(planes_in.alloc().region(0, sizes, blocks_apart), planes)
            planes_in.enqueue()
            _steps(k, image, steps, planes_in.dequeue(), blocks)
            planes_in.free()
            pixels_out = out.alloc()
            _turn(k, steps, turned, pixels_out, blocks)
            out.enqueue()
            skipped = (number * tile - first_pixel) * PAIR
            place = ((first_image + index) * image.pixels + first_pixel) * PAIR
            stored_size = tile * PAIR - skipped
            k.copy(
                y.region(place + skipped, stored_size), out.dequeue().region(skipped, stored_size)
            )
            out.free()
    return k.finish()


def _steps(
    k: KernelBuilder, image: ByteImage, steps: Buffer, planes_in: isa.Tile, blocks: int
) -> None:
    """Multiply by the scale and add the offset, in fp16: numbers in steps of the int8 grid."""
    # one repeat does a block's 3 x 16 numbers; the 13 missing channels of 16 are skipped
    lanes = min(image.channels * FRACTAL, k.chip.vector_bytes_per_repeat // 2)
    for start in range(0, image.channels * FRACTAL, lanes):
        width = min(lanes, image.channels * FRACTAL - start)
        for first_block in range(0, blocks, k.chip.max_repeat):
            sizes = (min(k.chip.max_repeat, blocks - first_block), width)
            target, source = (
                m.region(first_block * AREA + start, sizes, (AREA, 1)) for m in (steps, planes_in)
            )
            k.vector("vmuls", target, source, scalar=image.scale)
            if image.offset:
                k.vector("vadds", target, target, scalar=float(image.offset))


def _turn(
    k: KernelBuilder, steps: Buffer, turned: Buffer, pixels_out: isa.Tile, blocks: int
) -> None:
    """Transpose so that the channels of each pixel lie side by side, and convert them to int8."""
    with k.loop("block", blocks) as block:
        area = (block * AREA, (FRACTAL, FRACTAL))
        k.vector("vtranspose", turned.region(*area), steps.region(*area))
    # a block of 256 numbers is 2 repeats of 128 fp16 numbers
    blocks_per_vconv = k.chip.max_repeat // 2
    for first_block in range(0, blocks, blocks_per_vconv):
        lanes = (2 * min(blocks_per_vconv, blocks - first_block), 8, FRACTAL)
        half = pixels_out.region(first_block * FRACTAL * PAIR, lanes, (8 * PAIR, PAIR, 1))
        k.vector("vconv", half, turned.region(first_block * AREA, lanes))


# -- 2-byte images of few channels -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FewChannels:
    """Images of 2 to 16 channels in a 2-byte format, and the pixels of each."""

    images: int
    channels: int
    pixels: int
    dtype: str = "fp16"


def few_channels_launch(image: FewChannels, chip: Chip) -> isa.Launch:
    """Return the kernel from x (n, c, pixels) to y (n, pixels, 16), with missing channels 0.

    Raises `UnsupportedError` for more than 16 channels, for a single one (15 of the 16 planes that
    are transposed would be empty), for fewer than 16 pixels, or for another format.
    """
    fits = 2 <= image.channels <= FRACTAL <= image.pixels
    if not fits or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("2 to 16 channels and at least 16 pixels", got, "convert it so")
    # tiles of at least 16 pixels; about TILES tiles per core, so that copies and work overlap
    cores = chip.cores_of("vector")
    pixel_bytes = FRACTAL * DTYPE_BYTES[image.dtype]
    tile_that_fits = chip.buffers["UB"] // (4 * pixel_bytes)  # two queues of two slots each
    core_pixels = ceil_div(
        image.images * image.pixels, TILES * cores
    )  # a core's pixels in a few tiles
    wanted_pixels = min(TILE_PIXELS, tile_that_fits, core_pixels, image.pixels)
    tile = max(FRACTAL, wanted_pixels // FRACTAL * FRACTAL)
    tiles = ceil_div(image.pixels, tile)
    cores_per_image = min(ceil_div(cores, image.images), tiles)
    images = chunks(image.images, 1, cores // cores_per_image or 1)

    def program(image_share: Share, tile_share: Share) -> Program:
        return _few_channels_program(image, chip, tile, image_share, tile_share[1:])

    return spread(
        "few_channels", {"core": images}, program, apart=chunks(tiles, 1, cores_per_image)
    )


def _few_channels_program(
    job: FewChannels, chip: Chip, tile: int, image_share: Share, tiles: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1, of `tile` pixels, of a core's images.

    The last tile of an image begins early enough to be full, so that it overlaps the tile before;
    what that one has stored is skipped. 40 pixels in tiles of 16: pixels 0, 16, and 24, of which
    the first 8 are skipped.
    """
    c = job.channels
    pixels = job.pixels
    blocks = tile // FRACTAL
    k = KernelBuilder(f"few_channels_{image_share[0]}x{tiles[1] - tiles[0]}", chip)
    x = k.tensor("x", job.dtype, job.images * c * pixels)
    y = k.tensor("y", job.dtype, job.images * pixels * FRACTAL)
    planes_in = k.queue("x_ub", "UB", job.dtype, tile * FRACTAL, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", job.dtype, tile * FRACTAL, src="V", dst="MTE3")
    for slot in range(planes_in.buffer.slots if c < FRACTAL else 0):  # planes that no channel fills
        k.each(
            "vdup", (FRACTAL - c) * tile, (isa.Tile(planes_in.buffer, slot), c * tile), scalar=0.0
        )
    first_image = k.param("core", image_share[2]) * image_share[1]

    # tiles of their own pixels, then the last one that overlaps: (count, first pixel, skipped)
    full_tiles = min(tiles[1], pixels // tile)
    overlap = -pixels % tile
    with repeat(k, "image", image_share[0]) as index:
        image = first_image + index
        runs = (
            (full_tiles - tiles[0], tiles[0] * tile, 0),
            (tiles[1] - full_tiles, pixels - tile, overlap),
        )
        for count, begin, skip in (run for run in runs if run[0] > 0):
            with repeat(k, "tile", count) as number:
                first_pixel = number * tile + begin
                planes = x.region(image * (c * pixels) + first_pixel, (c, tile), (pixels, 1))
                k.copy(planes_in.alloc().region(0, (c, tile)), planes)
                planes_in.enqueue()
                channels = planes_in.dequeue().region(
                    0, (blocks, FRACTAL, FRACTAL), (FRACTAL, tile, 1)
                )
                k.vector("vtranspose", out.alloc().region(0, (blocks, FRACTAL, FRACTAL)), channels)
                planes_in.free()
                out.enqueue()
                start = (image * pixels + first_pixel + skip) * FRACTAL
                stored_size = (tile - skip) * FRACTAL
                k.copy(
                    y.region(start, stored_size), out.dequeue().region(skip * FRACTAL, stored_size)
                )
                out.free()
    return k.finish()


Memory = isa.Tile | Buffer
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels of 4 channels."""
TILE_BLOCKS = 16
"""Blocks of 256 pixels of a tile, at most."""
TILES = 4
"""Tiles that a core should have, so that copies in, vector work and copies out overlap."""


@dataclass(frozen=True, slots=True)
class SmallImage:
    """Images of up to 4 channels in a 2-byte format, and the pixels of each.

    If `out_dtype` is int8 a result is round(x * scale) + offset.
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
        """Pixels of a block of 32 bytes of the result: 4 of fp16, 8 of int8."""
        return BLOCK_BYTES // (SMALL_C0 * DTYPE_BYTES[self.stored])


def small_image_launch(image: SmallImage, chip: Chip) -> isa.Launch:
    """Return the kernel from x (n, c, pixels) to y (n, pixels, 4), with missing channels 0.

    Raises `UnsupportedError` for more than 4 channels, fewer than 256 pixels or another format.
    """
    if image.channels > SMALL_C0 or image.pixels < AREA or DTYPE_BYTES[image.dtype] != 2:
        got = f"{image.channels} channels, {image.pixels} pixels in {image.dtype}"
        raise UnsupportedError("at most 4 channels and at least 256 pixels", got, "convert it so")
    cores = chip.cores_of("vector")
    planes = (3 if image.stored == "int8" else 2) * image.channels
    # UB per block of 256 pixels: two slots of planes and of results, and `turned` between them
    block_bytes = (planes + 3 * SMALL_C0) * AREA * DTYPE_BYTES[image.dtype]
    blocks = min(TILE_BLOCKS, chip.buffers["UB"] // block_bytes, image.pixels // AREA)
    tile = max(1, min(blocks, image.images * image.pixels // AREA // (TILES * cores))) * AREA
    cores_over_images = min(image.images, cores)
    bands = chunks(ceil_div(image.pixels, tile), 1, cores // cores_over_images)
    if image.pixels % image.block and bands[-1] == 1:  # tiles that share a block are one core's
        bands[-2:] = [sum(bands[-2:])]
    images = chunks(image.images, 1, cores_over_images)

    def program(image_share: Share, band: Share) -> Program:
        return _small_program(image, chip, tile, image_share, band[1:])

    return spread("small_image", {"first": images}, program, apart=bands)


def _small_program(
    job: SmallImage, chip: Chip, tile: int, image_share: Share, band: tuple[int, int]
) -> Program:
    """Return the program for tiles first .. end - 1 of a core's images.

    The last tile begins early enough to be full, and stores only the blocks that are new.
    """
    k = KernelBuilder(f"small_image_{image_share[0]}x{band[1] - band[0]}", chip)
    c = job.channels
    pixels = job.pixels
    dtype = job.dtype
    bytes_out = job.stored == "int8"
    x = k.tensor("x", dtype, job.images * c * pixels)
    y = k.tensor("y", job.stored, job.images * pixels * SMALL_C0)
    planes_in = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", job.stored, SMALL_C0 * tile, src="V", dst="MTE3")
    sizes = {"turned": SMALL_C0} | ({"steps": c, "halves": SMALL_C0} if bytes_out else {})
    turned, *steps = (k.buffer(name, "UB", dtype, n * tile) for name, n in sizes.items())
    # with 3 channels the fourth line of each pixel stays 0
    k.each("vdup", SMALL_C0 * tile, (turned, 0), scalar=0.0)
    first_image = k.param("first", image_share[2]) * image_share[1]

    # tiles of their own pixels, then the last one that overlaps: (count, first pixel, skipped)
    full_tiles = min(band[1], pixels // tile)
    overlap = -pixels % tile // job.block * job.block
    with repeat(k, "image", image_share[0]) as index:
        image = first_image + index
        runs = (
            (full_tiles - band[0], band[0] * tile, 0),
            (band[1] - full_tiles, pixels - tile, overlap),
        )
        for count, begin, skip in (run for run in runs if run[0] > 0):
            with repeat(k, "tile", count) as number:
                first_pixel = number * tile + begin
                planes = x.region(image * (c * pixels) + first_pixel, (c, tile), (pixels, 1))
                k.copy(planes_in.alloc().region(0, (c, tile)), planes)
                planes_in.enqueue()
                tiles = planes_in.dequeue(), turned, out.alloc()
                if steps:
                    _turn_bytes(k, job, tiles, steps, tile // AREA)
                else:
                    _turn_planes(k, c, tiles, tile // AREA)
                planes_in.free()
                out.enqueue()
                start = (image * pixels + first_pixel + skip) * SMALL_C0
                stored_size = (tile - skip) * SMALL_C0
                k.copy(
                    y.region(start, stored_size), out.dequeue().region(skip * SMALL_C0, stored_size)
                )
                out.free()
    return k.finish()


def _turn_bytes(
    k: KernelBuilder,
    image: SmallImage,
    tiles: tuple[isa.Tile, Buffer, isa.Tile],
    buffers: Sequence[Buffer],
    blocks: int,
) -> None:
    """Scale numbers in fp16, transpose planes to pixels, and convert these to int8."""
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
    """Write the two transpositions of blocks of 256 pixels; `tiles` are planes, lines, pixels."""
    source, turned, to = tiles
    side = (blocks, FRACTAL, FRACTAL)
    rows = (AREA, FRACTAL, 1)
    lines = (SMALL_C0 * AREA, LINE, 1)
    # row q of a turned plane goes to line (q, channel): 4 channels x 16 numbers for every q
    for channel in range(channels):
        plane = source.region(channel * blocks * AREA, side, rows)
        k.vector("vtranspose", turned.region(channel * FRACTAL, side, lines), plane)
    # four q with their four channels are the 16 rows of the second transposition
    for q_group in range(SMALL_C0):
        columns = turned.region(q_group * AREA, side, (SMALL_C0 * AREA, *rows[1:]))
        k.vector("vtranspose", to.region(q_group * FRACTAL, side, lines), columns)
