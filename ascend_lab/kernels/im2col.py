"""Explicit im2col: write the matrix of windows to GM, then multiply; to compare with load3d.

The matrix lies in GM as the cube reads it, (K1, M1, 16, C0) with K1 = (C1, r, s) and one row per
output pixel: FRACTAL_NZ. Every image row is read once into UB and leaves it once per kernel tap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import Buffer, Kernel, KernelBuilder, Launch, Program, Queue, Tile, c0_of
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm import gemm_launch
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmShape, up
from ascend_lab.kernels.layouts import pack_conv, unpack_gemm
from ascend_lab.kernels.planes import Place, Share, places, plane_launch, rows_per_block


def explicit_gemm(shape: ConvShape) -> GemmShape:
    """Return the product of the second phase: pixels x (c1 r s C0) x output channels."""
    oh, ow = shape.out_hw
    depth = shape.blocks[0] * c0_of(shape.dtype) * shape.taps
    return GemmShape(shape.n * oh * ow, depth, shape.k, shape.dtype, shape.out_dtype)


def explicit_conv(shape: ConvShape, chip: Chip) -> Kernel:
    """Return im2col to GM followed by a matrix product, tensors x -> a, (a, b) -> c.

    b is the weights in FRACTAL_Z; c is (N1, M1, 16, 16) over the pixels of all images. Raises
    `InputError` for groups, `CapacityError` where a row does not fit UB.
    """
    product = gemm_launch(explicit_gemm(shape), chip)
    name = f"explicit_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return Kernel(name, (im2col_launch(shape, chip), product))


def im2col_launch(shape: ConvShape, chip: Chip) -> Launch:
    """Write the im2col matrix `a` of `x` (N, C1, H, W, C0) to GM, on all vector cores."""
    if shape.groups > 1:
        raise InputError(
            "a convolution without groups", f"{shape.groups} groups", "use conv_launch"
        )
    name = f"im2col_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return plane_launch(name, shape, chip, lambda own: _program(shape, chip, own))


def _program(shape: ConvShape, chip: Chip, own: Share) -> Program:
    k, c0 = KernelBuilder("im2col", chip), c0_of(shape.dtype)
    size = rows_per_block(own, _most_rows(shape, chip))
    x = k.tensor("x", shape.dtype, shape.n * shape.blocks[0] * shape.h * shape.w * c0)
    area = explicit_gemm(shape).fractals
    a = k.tensor("a", shape.dtype, area[0] * area[1] * FRACTAL * c0)
    seen = min((size - 1) * shape.strides[0] + shape.reach[0], shape.h)
    rows = k.queue("rows", "UB", shape.dtype, seen * shape.w * c0, src="MTE2", dst="MTE3")
    zeros = _zeros(k, shape, size) if max(shape.pads) else None
    for place in places(k, shape, own, size):
        _block(k, shape, (x, a), rows, zeros, place)
    return k.finish()


def _most_rows(shape: ConvShape, chip: Chip) -> int:
    """Output rows whose image rows fit UB twice, beside the zeros."""
    pixel = c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    step, edge, zeros = shape.strides[0], max(shape.pads[2:]), _zero_pixels(shape, 1)
    rows, room = min(shape.reach[0], shape.h), chip.buffers["UB"]
    fixed = (2 * rows * shape.w + zeros) * pixel
    if fixed > room:
        raise CapacityError(
            f"UB for {rows} image rows of {shape.w} pixels twice, and {zeros} zeros: {fixed} bytes",
            f"{room} bytes on {chip.name}",
            "cut the image into columns or use conv_launch",
        )
    return 1 + (room - fixed) // ((2 * step * shape.w + edge) * pixel)


def _zero_pixels(shape: ConvShape, rows: int) -> int:
    """Pixels of zeros in UB: an output row, or the widest border of a block."""
    return max(shape.out_hw[1], rows * max(shape.pads[2:])) if max(shape.pads) else 0


def _zeros(k: KernelBuilder, shape: ConvShape, rows: int) -> Buffer:
    """Fill a buffer with zeros on V, for MTE3 to copy."""
    lanes = k.chip.vector_bytes_per_repeat // DTYPE_BYTES[shape.dtype]
    repeats = up(_zero_pixels(shape, rows) * c0_of(shape.dtype), lanes)
    zeros = k.buffer("zeros", "UB", shape.dtype, repeats * lanes)
    for first in range(0, repeats, k.chip.max_repeat):
        count = min(k.chip.max_repeat, repeats - first)
        k.vector("vdup", zeros.region(first * lanes, (count, lanes)), scalar=0.0)
    k.set_flag("V", "MTE3", 0)
    k.wait_flag("V", "MTE3", 0)
    return zeros


def _block(
    k: KernelBuilder,
    shape: ConvShape,
    tensors: tuple[Buffer, Buffer],
    rows: Queue,
    zeros: Buffer | None,
    at: Place,
) -> None:
    """Read the image rows of a block once, write them once per tap."""
    block, row = at.block, shape.w * c0_of(shape.dtype)
    held = None
    if block.count:
        plane = (at.image * shape.blocks[0] + at.channel) * (shape.h * row)
        first = at.turn * (block.rows * shape.strides[0]) + block.first
        source = tensors[0].region(plane + first * row, block.count * row)
        k.copy(rows.alloc().region(0, block.count * row), source)
        rows.enqueue()
        held = rows.dequeue()
    for i in range(shape.r):
        for j in range(shape.s):
            _tap(k, shape, tensors[1], held, zeros, at, (i, j))
    if held is not None:
        rows.free()


def _inside(outputs: int, stride: int, zeros: int, size: int, offset: int) -> tuple[int, int]:
    """Return the outputs first .. last-1 for which output * stride + offset - zeros is inside."""
    first = min(max(-(-(zeros - offset) // stride), 0), outputs)
    last = min(max((size - 1 + zeros - offset) // stride + 1, first), outputs)
    return first, last


def _tap(
    k: KernelBuilder,
    shape: ConvShape,
    a: Buffer,
    held: Tile | None,
    zeros: Buffer | None,
    at: Place,
    tap: tuple[int, int],
) -> None:
    """Write one column block of the matrix for the pixels of a block: values inside, else zeros."""
    block, c0, ow, w = at.block, c0_of(shape.dtype), shape.out_hw[1], shape.w
    (sh, sw), offset = shape.strides, (tap[0] * shape.dilations[0], tap[1] * shape.dilations[1])
    low, high = _inside(block.rows, sh, block.before, block.count, offset[0])
    left, right = _inside(ow, sw, shape.pads[2], w, offset[1])
    pixel = at.image * (shape.out_hw[0] * ow) + at.turn * (block.rows * ow) + block.start * ow
    column = at.channel * shape.taps + (tap[0] * shape.s + tap[1])
    start = (column * (explicit_gemm(shape).fractals[0] * FRACTAL) + pixel) * c0
    if low < high and left < right and held is not None:
        source = (low * sh + offset[0] - block.before) * w + left * sw + offset[1] - shape.pads[2]
        sizes, steps = (high - low, right - left, c0), (sh * w * c0, sw * c0, 1)
        to = a.region(start + (low * ow + left) * c0, sizes, (ow * c0, c0, 1))
        k.copy(to, held.region(source * c0, sizes, steps))
    if zeros is None:
        return
    for first, last in ((0, left), (right, ow)):
        if low < high and left < right and first < last:
            sizes2 = (high - low, (last - first) * c0)
            to = a.region(start + (low * ow + first) * c0, sizes2, (ow * c0, 1))
            k.copy(to, zeros.region(0, sizes2))
    empty = [*range(low), *range(high, block.rows)] if left < right else range(block.rows)
    for row in empty:
        k.copy(a.region(start + row * ow * c0, ow * c0), zeros.region(0, ow * c0))


def pack_explicit(
    shape: ConvShape, x: NDArray[Any], weight: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Lay x (n, c, h, w) and weights (k, c, r, s) out under the names of the two phases."""
    packed = pack_conv(shape, x, weight)
    return {"x": packed["x"], "b": packed["weight"]}


def unpack_explicit(shape: ConvShape, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the output of the product as (n, k, oh, ow)."""
    pixels = unpack_gemm(explicit_gemm(shape), tensors)
    return pixels.reshape(shape.n, *shape.out_hw, shape.k).transpose(0, 3, 1, 2)
