"""Where the pixels of a convolution go in GM."""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.isa import Affine
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import Area
from ascend_lab.kernels.windows import Window, rows_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Where output pixels go in a plane of `plane` pixels: start + row * row_pitch + column * step.

    A plain convolution fills its plane; one phase of a transposed convolution fills every step-th
    pixel of every other row.
    """

    start: int
    row_pitch: int
    step: int
    plane: int
    weight: str = "weight"
    """Name of the tensor of weights: several launches of one kernel need several."""


def plain_placement(shape: ConvShape) -> Placement:
    """Return the placement that writes rows one after another, padded to 16 pixels at the end."""
    oh, ow = shape.out_hw
    return Placement(0, ow, 1, up(oh * ow, FRACTAL) * FRACTAL)


def dense_placement(shape: ConvShape) -> Placement:
    """Return the placement that fills planes of OH * OW pixels: NC1HWC0, what a next layer reads.

    Blocks are of 16 channels whatever the format: int8 layers, which read blocks of 32, cannot
    follow each other this way.
    """
    oh, ow = shape.out_hw
    return Placement(0, ow, 1, oh * ow)


def area_of(
    shape: ConvShape, place: Placement, plane: Affine, row: Affine, tile: tuple[int, int, Window]
) -> Area:
    """Return where a tile of output pixels goes.

    `plane` is the first pixel of its first block's plane, `row` counts output rows in front;
    `tile` is (first pixel, output blocks, window).
    """
    (pixel, blocks, window), ow = tile, shape.out_hw[1]
    rows = rows_of(pixel, window.pixels, ow)
    if (place.row_pitch, place.step) == (ow, 1):
        rows = [(0, pixel, window.pixels)]
    pieces = []
    for done, first, length in rows:
        to = plane + place.start + (row + first // ow) * place.row_pitch + first % ow * place.step
        pieces.append((done, to * FRACTAL, length))
    step, size = place.step * FRACTAL, place.plane * FRACTAL
    return Area(tuple(pieces), blocks, size, step, window.fractals, window.pixels)
