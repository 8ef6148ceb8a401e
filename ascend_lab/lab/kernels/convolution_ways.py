"""Other ways to convolve: im2col through memory, a 1x1 kernel as a product, references in NumPy.

im2col writes the matrix of windows to GM as the cube reads it, (K1, M1, 16, C0) with K1 = (C1, r,
s) and one row per output pixel: FRACTAL_NZ. The image rows under a block of output rows are read
into UB once, and stored once per kernel tap. This way is here to be compared with load3d, which
makes the windows on the way into L0A. The references are direct sums over kernel taps: whole
numbers in int64, fp32 in fp32, other floats in fp64. They share only the geometry (`ConvShape`)
with the kernels that they check.
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
    gemm_phase = gemm.gemm_launch(explicit_gemm(shape), chip)
    name = f"explicit_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return isa.Kernel(name, (im2col_launch(shape, chip), gemm_phase))


def im2col_launch(shape: ConvShape, chip: Chip) -> isa.Launch:
    """Return the launch that writes the im2col matrix `a` of `x` (N, C1, H, W, C0) to GM.

    It runs on all vector cores.
    """
    if shape.groups > 1:
        needed = "a convolution without groups"
        got = f"{shape.groups} groups"
        raise errors.InputError(needed, got, "use conv_launch")
    name = f"im2col_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return planes.plane_launch(
        name, planes.image_sizes(shape, chip), lambda share: _program(shape, chip, share)
    )


def _program(shape: ConvShape, chip: Chip, share: planes.PlaneShare) -> isa.Program:
    """Return the program of cores with a share of the channel planes: row blocks, tap by tap."""
    builder = isa.KernelBuilder("im2col", chip)
    c0 = isa.c0_of(shape.dtype)
    (oh, ow) = shape.out_hw
    block_rows = planes.rows_per_block(share, _most_rows(shape, chip))
    row_elements = shape.w * c0
    x = builder.tensor("x", shape.dtype, shape.n * shape.blocks[0] * shape.h * row_elements)
    row_fractals, column_fractals, _ = explicit_gemm(shape).fractals
    a = builder.tensor("a", shape.dtype, row_fractals * column_fractals * isa.FRACTAL * c0)
    image_rows = min((block_rows - 1) * shape.strides[0] + shape.reach[0], shape.h)
    rows = builder.queue(
        "rows", "UB", shape.dtype, image_rows * row_elements, src="MTE2", dst="MTE3"
    )
    zeros = _zeros(builder, shape, block_rows) if max(shape.pads) else None
    for channel, image in planes.walk(builder, share):
        # `turn` is the index of the loop over equal blocks: the third block of 8 rows with stride 2
        # begins 2 * 16 image rows after the first.
        for block, turn in planes.row_blocks(builder, shape, share, block_rows):
            loaded_rows = None
            if block.count:
                first = turn * (block.rows * shape.strides[0]) + block.first
                plane = (image * shape.blocks[0] + channel) * (shape.h * row_elements)
                source = x.region(plane + first * row_elements, block.count * row_elements)
                builder.copy(rows.alloc().region(0, block.count * row_elements), source)
                rows.enqueue()
                loaded_rows = rows.dequeue()
            pixel = image * (oh * ow) + turn * (block.rows * ow) + block.start * ow
            for row_tap, column_tap in product(range(shape.r), range(shape.s)):
                # Tap (1, 2) of a 3 x 3 kernel in channel block 4: column block 4 * 9 + 5 = 41.
                column = channel * shape.taps + (row_tap * shape.s + column_tap)
                start = (column * (row_fractals * isa.FRACTAL) + pixel) * c0
                _tap(
                    builder,
                    shape,
                    to=(a, start),
                    loaded_rows=loaded_rows,
                    zeros=zeros,
                    block=block,
                    tap=(row_tap, column_tap),
                )
            if loaded_rows is not None:
                rows.free()
    return builder.finish()


def _most_rows(shape: ConvShape, chip: Chip) -> int:
    """Return how many output rows a block has: two slots of their image rows fit UB with zeros."""
    pixel_bytes = isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]
    step = shape.strides[0]
    edge = max(shape.pads[2:])
    zero_pixels = _zero_pixels(shape, 1)
    rows = min(shape.reach[0], shape.h)
    room = chip.buffers["UB"]
    fixed = (2 * rows * shape.w + zero_pixels) * pixel_bytes
    if fixed > room:
        raise errors.CapacityError(
            f"UB for {rows} image rows of {shape.w} pixels twice, and {zero_pixels} zeros: "
            f"{fixed} bytes",
            f"{room} bytes on {chip.name}",
            "cut the image into columns or use conv_launch",
        )
    # Each further output row takes `step` image rows, twice, and `edge` zeros.
    return 1 + (room - fixed) // ((2 * step * shape.w + edge) * pixel_bytes)


def _zero_pixels(shape: ConvShape, rows: int) -> int:
    """Return the pixels of zeros in UB: an output row, or the widest border of a block."""
    if not max(shape.pads):
        return 0
    return max(shape.out_hw[1], rows * max(shape.pads[2:]))


def _zeros(builder: isa.KernelBuilder, shape: ConvShape, rows: int) -> isa.Buffer:
    """Fill a buffer with zeros on V, for MTE3 to copy."""
    lanes = builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[shape.dtype]
    size = isa.ceil_div(_zero_pixels(shape, rows) * isa.c0_of(shape.dtype), lanes) * lanes
    zeros = builder.buffer("zeros", "UB", shape.dtype, size)
    builder.each("vdup", size, (zeros, 0), scalar=0.0)
    builder.set_flag("V", "MTE3", 0)
    builder.wait_flag("V", "MTE3", 0)
    return zeros


def _inside(
    outputs: int, stride: int, padding_before: int, size: int, offset: int
) -> tuple[int, int]:
    """Return the outputs first .. end-1 for which a tap lies on one of `size` pixels.

    It does where 0 <= output * stride + offset - padding_before < size.
    """
    # 7 outputs of 7 pixels, stride 1, padding 1: tap 0 lies inside for outputs 1 .. 6.
    lowest = isa.ceil_div(padding_before - offset, stride)
    highest = (size - 1 + padding_before - offset) // stride
    first = min(max(lowest, 0), outputs)
    end = min(max(highest + 1, first), outputs)
    return first, end


def _tap(
    builder: isa.KernelBuilder,
    shape: ConvShape,
    to: tuple[isa.Buffer, isa.Affine],
    loaded_rows: isa.Tile | None,
    zeros: isa.Buffer | None,
    block: planes.RowBlock,
    tap: tuple[int, int],
) -> None:
    """Write one column block of the matrix for the pixels of a block: values inside, else zeros.

    `to` is the matrix and where the column block starts in it. `loaded_rows` are the image rows in
    UB, None if the block needs only padding.
    """
    c0 = isa.c0_of(shape.dtype)
    ow = shape.out_hw[1]
    w = shape.w
    (a, start) = to
    (sh, sw) = shape.strides
    offset = (tap[0] * shape.dilations[0], tap[1] * shape.dilations[1])
    first_row, end_row = _inside(block.rows, sh, block.before, block.count, offset[0])
    first_column, end_column = _inside(ow, sw, shape.pads[2], w, offset[1])
    has_pixels_inside = first_row < end_row and first_column < end_column
    if has_pixels_inside and loaded_rows is not None:
        source_row = first_row * sh + offset[0] - block.before
        source_column = first_column * sw + offset[1] - shape.pads[2]
        source = source_row * w + source_column
        sizes = (end_row - first_row, end_column - first_column, c0)
        steps = (sh * w * c0, sw * c0, 1)
        target = a.region(start + (first_row * ow + first_column) * c0, sizes, (ow * c0, c0, 1))
        builder.copy(target, loaded_rows.region(source * c0, sizes, steps))
    if zeros is None:
        return
    # Padding to the left and to the right of the pixels inside.
    for first, end in ((0, first_column), (end_column, ow)):
        if has_pixels_inside and first < end:
            sizes_outside = (end_row - first_row, (end - first) * c0)
            target = a.region(start + (first_row * ow + first) * c0, sizes_outside, (ow * c0, 1))
            builder.copy(target, zeros.region(0, sizes_outside))
    # Whole rows of padding, above and below; all rows, if the tap lies on no column of the image.
    rows_outside = list(range(block.rows))
    if first_column < end_column:
        rows_outside = [*range(first_row), *range(end_row, block.rows)]
    for row in rows_outside:
        builder.copy(a.region(start + row * ow * c0, ow * c0), zeros.region(0, ow * c0))


def pack_explicit(shape: ConvShape, x: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Return x (n, c, h, w) and weights (k, c, r, s) packed, with the names of both phases."""
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
    is_pointwise = (shape.r, shape.s, *shape.strides) == (1, 1, 1, 1) and not any(shape.pads)
    return is_pointwise and shape.n == shape.groups == 1 and shape.h * shape.w % isa.FRACTAL == 0


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
Stride = int | Pair
"""Stride or dilation: one number, or (vertical, horizontal)."""
Padding = int | Pair | Pads


def conv2d_reference(
    x: Values,
    weight: Values,
    stride: Stride = 1,
    pad: Padding = 0,
    dilation: Stride = 1,
    groups: int = 1,
) -> Values:
    """y[n,k,i,j] = sum over c,r,s of x[n,c,i*sh+r*dh-top,j*sw+s*dw-left] * weight[k,c,r,s].

    x is (n, c, h, w), weight (k, c/groups, r, s), the result (n, k, oh, ow) in float64 for floats
    (float32 stays), int64 for whole numbers. Raises `InputError` for channels that do not fit.
    """
    x = _widened(x)
    weight = _widened(weight)
    if weight.shape[1] * groups != x.shape[1]:
        needed = f"x (n, c, h, w) and weight (k, c/{groups}, r, s)"
        got = f"{x.shape} and {weight.shape}"
        raise errors.InputError(needed, got, "check the channels and the groups")
    (r, s) = weight.shape[2:]
    (k, c) = weight.shape[:2]
    windows = _windows(x, (r, s), stride, pad, dilation)
    grouped_windows = windows.reshape(len(x), groups, c, *windows.shape[2:])
    y: Values = np.einsum(
        "ngchwrs,gkcrs->ngkhw", grouped_windows, weight.reshape(groups, -1, c, r, s)
    )
    return y.reshape(len(x), k, *y.shape[3:])


def _widened(values: Values) -> Values:
    """Return numbers in the precision of sums: whole ones in int64, floats in float64.

    float32 stays.
    """
    if values.dtype == np.float32:
        return values
    return values.astype(np.int64 if values.dtype.kind in "iub" else np.float64)


def _windows(x: Values, kernel: Pair, stride: Stride, pad: Padding, dilation: Stride) -> Values:
    """Return what lies under every tap of every window of x: (n, c, oh, ow, r, s)."""
    (n, c, h, w) = x.shape
    (r, s) = kernel
    shape = ConvShape(n=n, c=c, h=h, w=w, k=1, r=r, s=s, stride=stride, pad=pad, dilation=dilation)
    (sh, sw) = shape.strides
    (row_dilation, column_dilation) = shape.dilations
    padded = np.pad(x, ((0, 0), (0, 0), shape.pads[:2], shape.pads[2:]))
    dense_windows: Values = np.lib.stride_tricks.sliding_window_view(padded, shape.reach, (2, 3))
    return dense_windows[:, :, ::sh, ::sw, ::row_dilation, ::column_dilation]


def im2col_reference(
    x: Values, kernel: Pair, stride: Stride = 1, pad: Padding = 0, dilation: Stride = 1
) -> Values:
    """Return the im2col matrix (n*oh*ow, c*r*s) of x (n, c, h, w): a row holds a window.

    Its columns are ordered (c, r, s), so `weight.reshape(k, -1).T` is the other factor.
    """
    windows = _windows(x, kernel, stride, pad, dilation).transpose(0, 2, 3, 1, 4, 5)
    return windows.reshape(-1, x.shape[1] * kernel[0] * kernel[1])
