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

from dataclasses import dataclass
from typing import NamedTuple

from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    SMALL_C0,
    Affine,
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
TILES = 4
"""Tiles that a core should have, so that copies in, vector work and copies out overlap."""
LINE = SMALL_C0 * FRACTAL
"""Elements of 16 pixels of 4 channels."""
TILE_BLOCKS = 16
"""Blocks of 256 pixels of a tile, at most."""
Memory = isa.Tile | Buffer


class _TileRun(NamedTuple):
    """`tiles` tiles from pixel `first_pixel` on; the first `skipped` pixels of each are stored."""

    tiles: int
    first_pixel: int
    skipped: int


def _tile_runs(tiles: tuple[int, int], tile: int, pixels: int, skipped: int) -> list[_TileRun]:
    """Return tiles first .. end - 1 of an image: full ones, then the one that overlaps another.

    The last tile of an image begins early enough to be full, so that it overlaps the tile before.
    40 pixels in tiles of 16: pixels 0, 16, and 24, of which the first 8 are `skipped`.
    """
    first, end = tiles
    full_end = min(end, pixels // tile)
    full_tiles = _TileRun(full_end - first, first * tile, 0)
    overlapping_tile = _TileRun(end - full_end, pixels - tile, skipped)
    return [run for run in (full_tiles, overlapping_tile) if run.tiles > 0]


# -- int8 images of up to 16 channels --------------------------------------------------------------


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
        return _ByteImageWriter(image, chip, tile, image_share, tile_share[1:]).program()

    return spread("byte_image", {"core": images}, program, apart=chunks(tiles, 1, cores_per_image))


class _ByteImageWriter:
    """Writes the program for tiles first .. end - 1, of `tile` pixels, of a core's images."""

    def __init__(
        self, image: ByteImage, chip: Chip, tile: int, image_share: Share, tiles: tuple[int, int]
    ) -> None:
        """Declare the tensors; allocate queues and buffers."""
        self.image = image
        self.tile = tile
        self.image_share = image_share
        self.tiles = tiles
        k = KernelBuilder(f"image_{image_share[0]}x{tiles[1] - tiles[0]}", chip)
        self.k = k
        self.x = k.tensor("x", "fp16", image.images * image.channels * image.pixels)
        self.y = k.tensor("y", "int8", image.images * image.pixels * PAIR)
        size = tile * FRACTAL
        self.planes_in = k.queue("x_ub", "UB", "fp16", size, src="MTE2", dst="V")
        self.out = k.queue("y_ub", "UB", "int8", tile * PAIR, src="V", dst="MTE3")
        self.steps = k.buffer("steps", "UB", "fp16", size)
        self.turned = k.buffer("turned", "UB", "fp16", size)

    def program(self) -> Program:
        """Return the program."""
        k = self.k
        # channels that the image lacks stay 0: no later instruction writes them
        k.each("vdup", self.tile * FRACTAL, (self.steps, 0), scalar=0.0)
        # the half of each pixel that no channel fills stays 0 in both slots, whatever tile is in
        # them
        for slot in range(self.out.buffer.slots):
            k.each("vdup", self.tile * PAIR, (isa.Tile(self.out.buffer, slot), 0), scalar=0.0)
        first_image = k.param("core", self.image_share[2]) * self.image_share[1]
        with k.loop("image", self.image_share[0]) as index:
            for number in range(*self.tiles):
                self._tile(first_image + index, number)
        return k.finish()

    def _tile(self, image: Affine, number: int) -> None:
        """Load, quantise and store tile `number` of an image.

        The last tile begins early enough to be full; what the tile before has stored is skipped.
        40 pixels in tiles of 16: pixels 0, 16, and 24, of which the first 8 are skipped.
        """
        k = self.k
        pixels = self.image.pixels
        channels = self.image.channels
        blocks = self.tile // FRACTAL
        first_pixel = min(number * self.tile, pixels - self.tile)
        # 16 pixels of every channel come to a 16 x 16 block: channels are its rows
        sizes = (channels, blocks, FRACTAL)
        start = image * (channels * pixels) + first_pixel
        planes = self.x.region(start, sizes, (pixels, FRACTAL, 1))
        k.copy(self.planes_in.alloc().region(0, sizes, (FRACTAL, AREA, 1)), planes)
        self.planes_in.enqueue()
        _steps(k, self.image, self.steps, self.planes_in.dequeue(), blocks)
        self.planes_in.free()
        _turn(k, self.steps, self.turned, self.out.alloc(), blocks)
        self.out.enqueue()
        skipped = (number * self.tile - first_pixel) * PAIR
        place = (image * pixels + first_pixel) * PAIR
        stored_size = self.tile * PAIR - skipped
        stored = self.out.dequeue().region(skipped, stored_size)
        k.copy(self.y.region(place + skipped, stored_size), stored)
        self.out.free()


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
            place = first_block * AREA + start
            target = steps.region(place, sizes, (AREA, 1))
            source = planes_in.region(place, sizes, (AREA, 1))
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
    # a core's pixels in a few tiles
    useful_tile = ceil_div(image.images * image.pixels, TILES * cores)
    largest_tile = min(TILE_PIXELS, tile_that_fits, useful_tile, image.pixels)
    tile = max(FRACTAL, largest_tile // FRACTAL * FRACTAL)
    tiles = ceil_div(image.pixels, tile)
    cores_per_image = min(ceil_div(cores, image.images), tiles)
    images = chunks(image.images, 1, cores // cores_per_image or 1)

    def program(image_share: Share, tile_share: Share) -> Program:
        return _FewChannelsWriter(image, chip, tile, image_share, tile_share[1:]).program()

    return spread(
        "few_channels", {"core": images}, program, apart=chunks(tiles, 1, cores_per_image)
    )


class _FewChannelsWriter:
    """Writes the program for tiles first .. end - 1, of `tile` pixels, of a core's images."""

    def __init__(
        self, image: FewChannels, chip: Chip, tile: int, image_share: Share, tiles: tuple[int, int]
    ) -> None:
        """Declare the tensors; allocate queues."""
        self.image = image
        self.tile = tile
        self.image_share = image_share
        self.tiles = tiles
        k = KernelBuilder(f"few_channels_{image_share[0]}x{tiles[1] - tiles[0]}", chip)
        self.k = k
        self.x = k.tensor("x", image.dtype, image.images * image.channels * image.pixels)
        self.y = k.tensor("y", image.dtype, image.images * image.pixels * FRACTAL)
        size = tile * FRACTAL
        self.planes_in = k.queue("x_ub", "UB", image.dtype, size, src="MTE2", dst="V")
        self.out = k.queue("y_ub", "UB", image.dtype, size, src="V", dst="MTE3")

    def program(self) -> Program:
        """Return the program."""
        k = self.k
        pixels = self.image.pixels
        missing_planes = FRACTAL - self.image.channels
        if missing_planes:
            # planes that no channel fills stay 0
            place = self.image.channels * self.tile
            for slot in range(self.planes_in.buffer.slots):
                tile = isa.Tile(self.planes_in.buffer, slot)
                k.each("vdup", missing_planes * self.tile, (tile, place), scalar=0.0)
        first_image = k.param("core", self.image_share[2]) * self.image_share[1]
        runs = _tile_runs(self.tiles, self.tile, pixels, -pixels % self.tile)
        with repeat(k, "image", self.image_share[0]) as index:
            for run in runs:
                with repeat(k, "tile", run.tiles) as number:
                    first_pixel = number * self.tile + run.first_pixel
                    self._tile(first_image + index, first_pixel, run.skipped)
        return k.finish()

    def _tile(self, image: Affine, first_pixel: Affine, skipped: int) -> None:
        """Load a tile, transpose it, and store it without its first `skipped` pixels."""
        k = self.k
        pixels = self.image.pixels
        channels = self.image.channels
        start = image * (channels * pixels) + first_pixel
        sizes = (channels, self.tile)
        planes = self.x.region(start, sizes, (pixels, 1))
        k.copy(self.planes_in.alloc().region(0, sizes), planes)
        self.planes_in.enqueue()
        squares = (self.tile // FRACTAL, FRACTAL, FRACTAL)
        rows = self.planes_in.dequeue().region(0, squares, (FRACTAL, self.tile, 1))
        k.vector("vtranspose", self.out.alloc().region(0, squares), rows)
        self.planes_in.free()
        self.out.enqueue()
        place = (image * pixels + first_pixel + skipped) * FRACTAL
        stored_size = (self.tile - skipped) * FRACTAL
        stored = self.out.dequeue().region(skipped * FRACTAL, stored_size)
        k.copy(self.y.region(place, stored_size), stored)
        self.out.free()


# -- 2-byte or int8 images of 4 channels -----------------------------------------------------------
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
    useful_blocks = image.images * image.pixels // AREA // (TILES * cores)
    tile = max(1, min(blocks, useful_blocks)) * AREA
    cores_over_images = min(image.images, cores)
    tile_shares = chunks(ceil_div(image.pixels, tile), 1, cores // cores_over_images)
    if image.pixels % image.block and tile_shares[-1] == 1:
        # tiles that share a block are one core's
        tile_shares[-2:] = [sum(tile_shares[-2:])]
    images = chunks(image.images, 1, cores_over_images)

    def program(image_share: Share, tile_share: Share) -> Program:
        return _SmallImageWriter(image, chip, tile, image_share, tile_share[1:]).program()

    return spread("small_image", {"first": images}, program, apart=tile_shares)


class _SmallImageWriter:
    """Writes the program for tiles first .. end - 1, of `tile` pixels, of a core's images.

    The last tile of an image stores only the blocks of 32 bytes that the tile before has not.
    """

    def __init__(
        self, image: SmallImage, chip: Chip, tile: int, image_share: Share, tiles: tuple[int, int]
    ) -> None:
        """Declare the tensors; allocate queues and buffers."""
        self.image = image
        self.tile = tile
        self.image_share = image_share
        self.tiles = tiles
        k = KernelBuilder(f"small_image_{image_share[0]}x{tiles[1] - tiles[0]}", chip)
        self.k = k
        c = image.channels
        dtype = image.dtype
        self.x = k.tensor("x", dtype, image.images * c * image.pixels)
        self.y = k.tensor("y", image.stored, image.images * image.pixels * SMALL_C0)
        self.planes_in = k.queue("x_ub", "UB", dtype, c * tile, src="MTE2", dst="V")
        self.out = k.queue("y_ub", "UB", image.stored, SMALL_C0 * tile, src="V", dst="MTE3")
        self.turned = k.buffer("turned", "UB", dtype, SMALL_C0 * tile)
        # for int8: scaled planes, and pixels in fp16 before they are converted
        self.steps: tuple[Buffer, Buffer] | None = None
        if image.stored == "int8":
            self.steps = (
                k.buffer("steps", "UB", dtype, c * tile),
                k.buffer("halves", "UB", dtype, SMALL_C0 * tile),
            )

    def program(self) -> Program:
        """Return the program."""
        k = self.k
        pixels = self.image.pixels
        # with 3 channels the fourth line of each pixel stays 0
        k.each("vdup", SMALL_C0 * self.tile, (self.turned, 0), scalar=0.0)
        first_image = k.param("first", self.image_share[2]) * self.image_share[1]
        overlap = -pixels % self.tile
        skipped = overlap // self.image.block * self.image.block
        runs = _tile_runs(self.tiles, self.tile, pixels, skipped)
        with repeat(k, "image", self.image_share[0]) as index:
            for run in runs:
                with repeat(k, "tile", run.tiles) as number:
                    first_pixel = number * self.tile + run.first_pixel
                    self._tile(first_image + index, first_pixel, run.skipped)
        return k.finish()

    def _tile(self, image: Affine, first_pixel: Affine, skipped: int) -> None:
        """Load a tile, transpose it, and store it without its first `skipped` pixels."""
        k = self.k
        pixels = self.image.pixels
        channels = self.image.channels
        blocks = self.tile // AREA
        sizes = (channels, self.tile)
        planes = self.x.region(image * (channels * pixels) + first_pixel, sizes, (pixels, 1))
        k.copy(self.planes_in.alloc().region(0, sizes), planes)
        self.planes_in.enqueue()
        tiles = self.planes_in.dequeue(), self.turned, self.out.alloc()
        if self.steps:
            _turn_bytes(k, self.image, tiles, self.steps, blocks)
        else:
            _turn_planes(k, channels, tiles, blocks)
        self.planes_in.free()
        self.out.enqueue()
        place = (image * pixels + first_pixel + skipped) * SMALL_C0
        stored_size = (self.tile - skipped) * SMALL_C0
        stored = self.out.dequeue().region(skipped * SMALL_C0, stored_size)
        k.copy(self.y.region(place, stored_size), stored)
        self.out.free()


def _turn_bytes(
    k: KernelBuilder,
    image: SmallImage,
    tiles: tuple[isa.Tile, Buffer, isa.Tile],
    buffers: tuple[Buffer, Buffer],
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
