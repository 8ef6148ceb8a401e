"""Other ways to convolve: what it means in NumPy, im2col through memory, 1x1 as a product.

The explicit matrix of windows lies in GM as the cube reads it, (K1, M1, 16, C0) with K1 = (C1, r,
s) and one row per output pixel: FRACTAL_NZ. Every image row is read once into UB and leaves it once
per kernel tap; that is to compare with load3d. The references are direct sums over kernel taps in
the precision of their operands (fp64 included), whole numbers exactly; they share no code with the
kernels they judge.
"""

from collections.abc import Mapping
from itertools import product

import numpy as np

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels import gemm, gemm_schedule, planes
from ascend_lab.operators.kernels.conv_shape import ConvShape, Pads, Pair
from ascend_lab.operators.kernels.operand_packing import pack_conv, unpack_gemm


def explicit_gemm(shape: ConvShape) -> gemm_schedule.GemmShape:
    """Return the product of the second phase: pixels x (c1 r s C0) x output channels."""
    oh, ow = shape.out_hw
    depth = shape.blocks[0] * isa.c0_of(shape.dtype) * shape.taps
    return gemm_schedule.GemmShape(shape.n * oh * ow, depth, shape.k, shape.dtype, shape.out_dtype)


def explicit_conv(shape: ConvShape, chip: Chip) -> isa.Kernel:
    """Return im2col to GM followed by a matrix product, tensors x -> a, (a, b) -> c.

    b is the weights in FRACTAL_Z; c is (N1, M1, 16, 16) over the pixels of all images. Raises
    `InputError` for groups, `CapacityError` where a row does not fit UB.
    """
    product = gemm.gemm_launch(explicit_gemm(shape), chip)
    name = f"explicit_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return isa.Kernel(name, (im2col_launch(shape, chip), product))


def im2col_launch(shape: ConvShape, chip: Chip) -> isa.Launch:
    """Write the im2col matrix `a` of `x` (N, C1, H, W, C0) to GM, on all vector cores."""
    if shape.groups > 1:
        wanted = "a convolution without groups"
        got = f"{shape.groups} groups"
        raise errors.InputError(wanted, got, "use conv_launch")
    name = f"im2col_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return planes.plane_launch(
        name, planes.image_sizes(shape, chip), lambda own: _program(shape, chip, own)
    )


def _program(shape: ConvShape, chip: Chip, own: planes.PlaneShare) -> isa.Program:
    k = isa.KernelBuilder("im2col", chip)
    c0 = isa.c0_of(shape.dtype)
    (oh, ow) = shape.out_hw
    size = planes.rows_per_block(own, _most_rows(shape, chip))
    row = shape.w * c0
    x = k.tensor("x", shape.dtype, shape.n * shape.blocks[0] * shape.h * row)
    high, deep, _ = explicit_gemm(shape).fractals
    a = k.tensor("a", shape.dtype, high * deep * isa.FRACTAL * c0)
    seen = min((size - 1) * shape.strides[0] + shape.reach[0], shape.h)
    rows = k.queue("rows", "UB", shape.dtype, seen * row, src="MTE2", dst="MTE3")
    zeros = _zeros(k, shape, size) if max(shape.pads) else None
    for channel, image in planes.walk(k, own):
        for block, turn in planes.row_blocks(k, shape, own, size):
            held = None
            if block.count:
                first = turn * (block.rows * shape.strides[0]) + block.first
                plane = (image * shape.blocks[0] + channel) * (shape.h * row)
                source = x.region(plane + first * row, block.count * row)
                k.copy(rows.alloc().region(0, block.count * row), source)
                rows.enqueue()
                held = rows.dequeue()
            pixel = image * (oh * ow) + turn * (block.rows * ow) + block.start * ow
            for tap in product(range(shape.r), range(shape.s)):
                column = channel * shape.taps + (tap[0] * shape.s + tap[1])
                start = (column * (high * isa.FRACTAL) + pixel) * c0
                _tap(k, shape, (a, start), held, zeros, block, tap)
            if held is not None:
                rows.free()
    return k.finish()


def _most_rows(shape: ConvShape, chip: Chip) -> int:
    """Output rows whose image rows fit UB twice, beside the zeros."""
    pixel = isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    step = shape.strides[0]
    edge = max(shape.pads[2:])
    zeros = _zero_pixels(shape, 1)
    rows = min(shape.reach[0], shape.h)
    room = chip.buffers["UB"]
    fixed = (2 * rows * shape.w + zeros) * pixel
    if fixed > room:
        raise errors.CapacityError(
            f"UB for {rows} image rows of {shape.w} pixels twice, and {zeros} zeros: {fixed} bytes",
            f"{room} bytes on {chip.name}",
            "cut the image into columns or use conv_launch",
        )
    return 1 + (room - fixed) // ((2 * step * shape.w + edge) * pixel)


def _zero_pixels(shape: ConvShape, rows: int) -> int:
    """Pixels of zeros in UB: an output row, or the widest border of a block."""
    return max(shape.out_hw[1], rows * max(shape.pads[2:])) if max(shape.pads) else 0


def _zeros(k: isa.KernelBuilder, shape: ConvShape, rows: int) -> isa.Buffer:
    """Fill a buffer with zeros on V, for MTE3 to copy."""
    lanes = k.chip.vector_bytes_per_repeat // DTYPE_BYTES[shape.dtype]
    size = isa.ceil_div(_zero_pixels(shape, rows) * isa.c0_of(shape.dtype), lanes) * lanes
    zeros = k.buffer("zeros", "UB", shape.dtype, size)
    k.each("vdup", size, (zeros, 0), scalar=0.0)
    k.set_flag("V", "MTE3", 0)
    k.wait_flag("V", "MTE3", 0)
    return zeros


def _inside(outputs: int, stride: int, zeros: int, size: int, offset: int) -> tuple[int, int]:
    """Return the outputs first .. last-1 for which output * stride + offset - zeros is inside."""
    first = min(max(-(-(zeros - offset) // stride), 0), outputs)
    last = min(max((size - 1 + zeros - offset) // stride + 1, first), outputs)
    return first, last


def _tap(
    k: isa.KernelBuilder,
    shape: ConvShape,
    to: tuple[isa.Buffer, isa.Affine],
    held: isa.Tile | None,
    zeros: isa.Buffer | None,
    block: planes.RowBlock,
    tap: tuple[int, int],
) -> None:
    """Write one column block of the matrix for the pixels of a block: values inside, else zeros."""
    c0 = isa.c0_of(shape.dtype)
    ow = shape.out_hw[1]
    w = shape.w
    (a, start) = to
    (sh, sw) = shape.strides
    offset = (tap[0] * shape.dilations[0], tap[1] * shape.dilations[1])
    low, high = _inside(block.rows, sh, block.before, block.count, offset[0])
    left, right = _inside(ow, sw, shape.pads[2], w, offset[1])
    some = low < high and left < right
    if some and held is not None:
        source = (low * sh + offset[0] - block.before) * w + left * sw + offset[1] - shape.pads[2]
        sizes = (high - low, right - left, c0)
        steps = (sh * w * c0, sw * c0, 1)
        there = a.region(start + (low * ow + left) * c0, sizes, (ow * c0, c0, 1))
        k.copy(there, held.region(source * c0, sizes, steps))
    if zeros is None:
        return
    for first, last in ((0, left), (right, ow)):
        if some and first < last:
            width = (high - low, (last - first) * c0)
            there = a.region(start + (low * ow + first) * c0, width, (ow * c0, 1))
            k.copy(there, zeros.region(0, width))
    empty = [*range(low), *range(high, block.rows)] if left < right else range(block.rows)
    for row in empty:
        k.copy(a.region(start + row * ow * c0, ow * c0), zeros.region(0, ow * c0))


def pack_explicit(shape: ConvShape, x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Lay x (n, c, h, w) and weights (k, c, r, s) out under the names of the two phases."""
    packed = pack_conv(shape, x, weight)
    return {"x": packed["x"], "b": packed["weight"]}


def unpack_explicit(shape: ConvShape, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the output of the product as (n, k, oh, ow)."""
    pixels = unpack_gemm(explicit_gemm(shape), tensors)
    return pixels.reshape(shape.n, *shape.out_hw, shape.k).transpose(0, 3, 1, 2)


# -- a 1x1 convolution as a product: the image is the im2col matrix ------------------------------
def is_plain_product(shape: ConvShape) -> bool:
    """Return whether x (N, C1, H, W, C0) is, byte by byte, a left operand of the cube.

    It is for 1x1 kernels with stride 1, no pads and no groups, one image, and H * W a multiple of
    16: then (C1, H W, C0) = (K1, M1, 16, C0).
    """
    one = (shape.r, shape.s, *shape.strides) == (1, 1, 1, 1) and not any(shape.pads)
    return one and shape.n == shape.groups == 1 and shape.h * shape.w % isa.FRACTAL == 0


def pointwise_launch(shape: ConvShape, chip: Chip) -> isa.Launch:
    """Return the product a (pixels x channels) @ b; raise `InputError` if im2col is not free."""
    if not is_plain_product(shape):
        raise errors.InputError(
            "one image, a 1x1 kernel, stride 1, no pads, no groups and H*W a multiple of 16",
            f"{shape.n} images, kernel {shape.r}x{shape.s}, stride {shape.stride}, "
            f"pad {shape.pad}, {shape.groups} groups, H*W = {shape.h * shape.w}",
            "use conv_launch",
        )
    # explicit_gemm of a 1x1 kernel: pixels x (whole blocks of) input channels x output channels
    return gemm.gemm_launch(explicit_gemm(shape), chip)


def pack_pointwise(shape: ConvShape, x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of a convolution under the names of a product: nothing is moved."""
    packed = pack_conv(shape, x, weight)
    return {"a": packed["x"], "b": packed["weight"]}


# -- references -----------------------------------------------------------------------------------
Values = np.ndarray
Steps = int | Pair
Edges = int | Pair | Pads


def conv2d_reference(
    x: Values,
    weight: Values,
    stride: Steps = 1,
    pad: Edges = 0,
    dilation: Steps = 1,
    groups: int = 1,
) -> Values:
    """y[n,k,i,j] = sum over c,r,s of x[n,c,i*sh+r*dh-top,j*sw+s*dw-left] * weight[k,c,r,s].

    x is (n, c, h, w), weight (k, c/groups, r, s), the result (n, k, oh, ow) in float64 for floats
    (float32 stays), int64 for whole numbers. Raises `InputError` for channels that do not fit.
    """
    x, weight = (
        v if v.dtype == np.float32 else v.astype(np.int64 if v.dtype.kind in "iub" else np.float64)
        for v in (x, weight)
    )
    if weight.shape[1] * groups != x.shape[1]:
        needed = f"x (n, c, h, w) and weight (k, c/{groups}, r, s)"
        got = f"{x.shape} and {weight.shape}"
        raise errors.InputError(needed, got, "check the channels and the groups")
    (r, s) = weight.shape[2:]
    (k, c) = weight.shape[:2]
    seen = _windows(x, (r, s), stride, pad, dilation)
    split = seen.reshape(len(x), groups, c, *seen.shape[2:])
    y: Values = np.einsum("ngchwrs,gkcrs->ngkhw", split, weight.reshape(groups, -1, c, r, s))
    return y.reshape(len(x), k, *y.shape[3:])


def _windows(x: Values, kernel: Pair, stride: Steps, pad: Edges, dilation: Steps) -> Values:
    """Return what lies under every tap of every window of x: (n, c, oh, ow, r, s)."""
    (n, c, h, w) = x.shape
    (r, s) = kernel
    shape = ConvShape(n, c, h, w, 1, r, s, stride, pad, dilation=dilation)
    (sh, sw) = shape.strides
    (down, right) = shape.dilations
    x = np.pad(x, ((0, 0), (0, 0), shape.pads[:2], shape.pads[2:]))
    every: Values = np.lib.stride_tricks.sliding_window_view(x, shape.reach, (2, 3))
    return every[:, :, ::sh, ::sw, ::down, ::right]


def im2col_reference(
    x: Values, kernel: Pair, stride: Steps = 1, pad: Edges = 0, dilation: Steps = 1
) -> Values:
    """Return the im2col matrix (n*oh*ow, c*r*s) of x (n, c, h, w): a row holds a window.

    Its columns are ordered (c, r, s), so `weight.reshape(k, -1).T` is the other factor.
    """
    seen = _windows(x, kernel, stride, pad, dilation).transpose(0, 2, 3, 1, 4, 5)
    return seen.reshape(-1, x.shape[1] * kernel[0] * kernel[1])
