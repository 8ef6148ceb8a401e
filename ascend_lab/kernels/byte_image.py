"""An image in halves and planes, quantised, as int8 in NC1HWC0: what a first int8 layer reads.

A block of 16 pixels of up to 16 channels is transposed by the vector unit, so that the channels of
a pixel lie side by side; the other half of its 32 bytes is 0. Cores share the images, and where
there are fewer of those, their pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.isa import Buffer, KernelBuilder, Launch, Part, Program, Tile, binding_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, up

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


def byte_image_launch(image: ByteImage, chip: Chip) -> Launch:
    """Return the kernel; raise `UnsupportedError` for more than 16 channels or fewer pixels."""
    if image.channels > FRACTAL or image.pixels < FRACTAL:
        got = f"{image.channels} channels, {image.pixels} pixels"
        raise UnsupportedError("at most 16 channels, at least 16 pixels", got, "convert it apart")
    room = chip.buffers["UB"] // (6 * PAIR) // FRACTAL * FRACTAL
    tile = min(MOST, room, image.pixels // FRACTAL * FRACTAL)
    tiles = up(image.pixels, tile)
    split = min(up(chip.core_count, image.images), tiles)
    each, share = up(image.images, chip.core_count // split or 1), up(tiles, split)
    parts = []
    for first in range(0, tiles, share):
        span = (first, min(first + share, tiles))
        for own in dict.fromkeys((each, image.images % each or each)):
            cores = [i for i in range(up(image.images, each))
                     if min(each, image.images - i * each) == own]  # fmt: skip
            program = _program(image, chip, (tile, *span), (own, each, cores[-1] + 1))
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in cores)))
    return Launch("byte_image", tuple(parts))


def _program(
    image: ByteImage, chip: Chip, tiles: tuple[int, int, int], own: tuple[int, int, int]
) -> Program:
    """Return the program for tiles (pixels, first, end) of images (own, apart, cores).

    The last tile of an image is moved back where it would stand out.
    """
    tile, c, blocks = tiles[0], image.channels, tiles[0] // FRACTAL
    k = KernelBuilder(f"image_{own[0]}x{tiles[2] - tiles[1]}", chip)
    x = k.tensor("x", "fp16", image.images * c * image.pixels)
    y = k.tensor("y", "int8", image.images * image.pixels * PAIR)
    held = k.queue("x_ub", "UB", "fp16", tile * FRACTAL, src="MTE2", dst="V")
    out = k.queue("y_ub", "UB", "int8", tile * PAIR, src="V", dst="MTE3")
    steps = k.buffer("steps", "UB", "fp16", tile * FRACTAL)
    turned = k.buffer("turned", "UB", "fp16", tile * FRACTAL)
    k.each("vdup", tile * FRACTAL, (steps, 0), scalar=0.0)
    for slot in range(out.buffer.slots):  # the half of each pixel that no channel fills
        k.each("vdup", tile * PAIR, (Tile(out.buffer, slot), 0), scalar=0.0)
    first = k.param("core", own[2]) * own[1]
    with k.loop("image", own[0]) as index:
        for number in range(*tiles[1:]):
            at = min(number * tile, image.pixels - tile)
            sizes, spread = (c, blocks, FRACTAL), (FRACTAL, AREA, 1)
            start = (first + index) * (c * image.pixels) + at
            planes = x.region(start, sizes, (image.pixels, FRACTAL, 1))
            k.copy(held.alloc().region(0, sizes, spread), planes)
            held.enqueue()
            _steps(k, image, steps, held.dequeue(), blocks)
            held.free()
            with k.loop("block", blocks) as block:
                area = (block * AREA, (FRACTAL, FRACTAL))
                k.vector("vtranspose", turned.region(*area), steps.region(*area))
            to = out.alloc()
            for done in range(0, blocks, 100):
                some = min(100, blocks - done)
                lanes = (2 * some, 8, FRACTAL)
                half = to.region(done * FRACTAL * PAIR, lanes, (8 * PAIR, PAIR, 1))
                k.vector("vconv", half, turned.region(done * AREA, lanes))
            out.enqueue()
            place = ((first + index) * image.pixels + at) * PAIR
            k.copy(y.region(place, tile * PAIR), out.dequeue().region(0, tile * PAIR))
            out.free()
    return k.finish()


def _steps(k: KernelBuilder, image: ByteImage, steps: Buffer, held: Tile, blocks: int) -> None:
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
