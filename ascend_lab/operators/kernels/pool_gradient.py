"""Gradients of max and average pooling, and of depthwise convolutions' images, in NC1HWC0 fp16.

Gradient of the maximum, tap by tap: hits = (x at the tap == y), part = hits * left, left = left -
part, and part is added to dx at the tap. `left` starts as the gradient: after a window's first hit
it is zero, so that later equal elements get nothing. Gradient of the average: grad, divided by the
number of elements in the window, is added at every tap. The image gradient of a depthwise
convolution is the same, with a weight per tap and channel instead of the division.

dx is computed in blocks of rows; windows that reach into two blocks are computed in both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa import (
    Affine,
    Buffer,
    KernelBuilder,
    Launch,
    Program,
    Queue,
    Region,
    Tile,
    ceil_div,
)
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.planes import (
    C0,
    PIXELS,
    PlaneShare,
    deal_planes,
    plane_launch,
    walk,
)
from ascend_lab.operators.kernels.rows import LEAST
from ascend_lab.operators.kernels.tiles import repeat


@dataclass(frozen=True, slots=True)
class PoolGradient:
    """The gradient to compute: `shape` is the pooling as a convolution with one group per channel.

    `is_maximum` tells max pooling from average pooling. For averages, `factor` is that of the
    gradient, 1 / 9 for 3 x 3 windows; 0 means that it differs between windows: then the tensor
    `rate` (OH, OW, 16) holds the factors. With `has_weights` it is the gradient of a depthwise
    convolution's image: each tap has a weight per channel, (C1, r, s, 16).
    """

    shape: ConvShape
    is_maximum: bool
    factor: float = 1.0
    has_weights: bool = False


@dataclass(frozen=True, slots=True)
class GradientRows:
    """A block of `rows` rows of dx, and the `windows` rows of windows that read them.

    UB holds `ub_rows` rows: those of the block and all others that its windows read. Row 0 of UB
    lies `ub_start` rows from the block's first row, the first window begins `window_start` rows
    from it. Rows `image_start` .. `image_end` - 1 of UB are in the image, the others are padding.
    """

    rows: int
    windows: int
    ub_start: int
    window_start: int
    ub_rows: int
    image_start: int
    image_end: int


def block_of(shape: ConvShape, rows: int, index: int) -> GradientRows:
    """Return what block `index` of `rows` rows of dx needs."""
    stride = shape.strides[0]
    top = shape.pads[0]
    oh = shape.out_hw[0]
    block_start = index * rows
    block_end = min(block_start + rows, shape.h)
    # Window i begins in row i * stride - top; the first window that ends behind row `block_start`
    # is the first one that contains it.
    first_window = max(0, ceil_div(block_start + top - shape.r + 1, stride))
    # Windows up to the last one that begins before the end of the block.
    windows = max(0, min(oh - 1, (block_end - 1 + top) // stride) - first_window + 1)
    window_row = block_start
    ub_end = block_end
    if windows:
        window_row = first_window * stride - top
        ub_end = max(block_end, window_row + (windows - 1) * stride + shape.r)
    ub_row = min(block_start, window_row)
    ub_rows = ub_end - ub_row
    return GradientRows(
        rows=block_end - block_start,
        windows=windows,
        ub_start=ub_row - block_start,
        window_start=window_row - block_start,
        ub_rows=ub_rows,
        image_start=max(-ub_row, 0),
        image_end=min(ub_rows, shape.h - ub_row),
    )


def _largest_block(shape: ConvShape, rows: int) -> tuple[int, int]:
    """Return the most rows in UB, and the most windows, of any block."""
    blocks = [block_of(shape, rows, i) for i in range(ceil_div(shape.h, rows))]
    return max(b.ub_rows for b in blocks), max([1, *(b.windows for b in blocks)])


def line_of(shape: ConvShape) -> int:
    """Return the pixels of a row in UB, which has all that windows read and all of the image."""
    columns = (shape.out_hw[1] - 1) * shape.strides[1] + shape.s
    return max(columns, shape.pads[2] + shape.w)


def _needed(job: PoolGradient, rows: int) -> int:
    """Return the 32-byte blocks of UB that blocks of `rows` rows of dx need."""
    shape = job.shape
    (ub_rows, windows) = _largest_block(shape, rows)
    # How often UB holds an image with its padding, and how often a number per window.
    image_buffers = 2  # slots of dx
    window_buffers = 2  # slots of the gradient
    weight_blocks = 0
    if job.is_maximum:
        image_buffers += 2  # x
        window_buffers += 3  # two slots of y, and the hits
    elif not job.factor:
        window_buffers += 2  # the factors
    if job.has_weights:
        window_buffers += 1  # products
        weight_blocks = 2 * shape.taps
    pixels = windows * shape.out_hw[1]
    return image_buffers * ub_rows * line_of(shape) + window_buffers * pixels + weight_blocks


def rows_of_block(job: PoolGradient, chip: Chip) -> int:
    """Return the most rows of dx that fit UB: all rows, or a multiple of the stride."""
    shape = job.shape
    room = chip.buffers["UB"] // BLOCK_BYTES
    stride = job.shape.strides[0]
    # If blocks are multiples of the stride, their rows meet the same windows in every block.
    sizes = [r for r in range(1, shape.h + 1) if r % stride == 0 or r == shape.h]
    fitting = [r for r in sizes if _needed(job, r) <= room]
    if not fitting:
        raise CapacityError(
            f"UB for {stride} rows of {shape.w} pixels: {_needed(job, min(stride, shape.h))}"
            " blocks of 32 bytes",
            f"{room} on {chip.name}",
            "cut the image into columns",
        )
    return fitting[-1]


def pool_gradient_launch(job: PoolGradient, chip: Chip) -> Launch:
    """Return the kernel from grad (N, C1, OH, OW, 16) to y (N, C1, H, W, 16).

    For a maximum it also reads x (shaped like y) and `top` (like grad), the pooling's input and
    output; for a depthwise convolution `weight` (C1, r, s, 16); for averages of windows of
    different size `rate` (OH, OW, 16). Raises `CapacityError` if one block of rows does not fit UB.
    """
    shape = job.shape
    rows = rows_of_block(job, chip)
    shares = deal_planes(
        (shape.blocks[0], shape.n, ceil_div(shape.h, rows)), chip.cores_of("vector")
    )
    name = f"pool_gradient_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return plane_launch(
        name, shares, lambda share: _GradientWriter.make(job, chip, rows).program(share)
    )


# -- one core -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _PixelsView:
    """Some pixels of a tile as a region: repeats of up to 8 pixels that lie `step` pixels apart."""

    start: Affine
    sizes: tuple[int, ...]
    step: int

    def of(self, tile: Tile) -> Region:
        """Return the region of a tile."""
        return tile.region(self.start, self.sizes, (PIXELS * self.step * C0, self.step * C0, 1))


@dataclass(frozen=True, slots=True)
class _GradientWriter:
    """Writes the programs of the kernel; rows of x and dx lie `line` pixels apart in UB.

    `operand` is the tensor that is read along with the gradient: top (the pooling's output), rate
    or weight; `tiles` hold x, top and hits, or the rates, or weights and products.
    """

    job: PoolGradient
    k: KernelBuilder
    x: Buffer | None
    operand: Buffer | None
    grad: Buffer
    y: Buffer
    grads: Queue
    tiles: tuple[Buffer, ...]
    sums: Queue
    line: int
    rows: int

    @classmethod
    def make(cls, job: PoolGradient, chip: Chip, rows: int) -> "_GradientWriter":
        """Declare tensors, allocate queues for blocks of `rows` rows of dx."""
        shape = job.shape
        line = line_of(job.shape)
        k = KernelBuilder("pool_gradient", chip)
        (c1, _) = shape.blocks
        (oh, ow) = shape.out_hw
        span, windows = _largest_block(shape, rows)
        image = span * line * C0
        pixels = windows * ow * C0
        planes = shape.n * c1 * C0
        hw = shape.h * shape.w
        grads = k.queue("left", "UB", "fp16", pixels, src="MTE2", dst="V")
        # The tensor read along with the gradient shares its slots, so that one flag announces both.
        x: Buffer | None = None
        operand: Buffer | None = None
        tiles: tuple[Buffer, ...] = ()
        if job.is_maximum:
            x = k.tensor("x", "fp16", planes * hw)
            operand = k.tensor("top", "fp16", planes * oh * ow)
            hit = k.buffer("hit", "UB", "fp16", pixels)
            tiles = (grads.join("x_ub", "fp16", image), grads.join("top_ub", "fp16", pixels), hit)
        elif not job.factor:
            operand = k.tensor("rate", "fp16", oh * ow * C0)
            tiles = (grads.join("rate_ub", "fp16", pixels),)
        elif job.has_weights:
            operand = k.tensor("weight", "fp16", c1 * shape.taps * C0)
            products = k.buffer("part", "UB", "fp16", pixels)
            tiles = (grads.join("weight_ub", "fp16", shape.taps * C0), products)
        return cls(
            job=job,
            k=k,
            x=x,
            operand=operand,
            grad=k.tensor("grad", "fp16", planes * oh * ow),
            y=k.tensor("y", "fp16", planes * hw),
            grads=grads,
            tiles=tiles,
            sums=k.queue("dx_ub", "UB", "fp16", image, src="V", dst="MTE3"),
            line=line,
            rows=rows,
        )

    def program(self, share: PlaneShare) -> Program:
        """Return the program, which loops over planes; loads of x do not touch border columns."""
        if self.job.is_maximum:
            for slot in range(2):
                x = Tile(self.tiles[0], slot)
                self.k.each("vdup", x.buffer.elements, (x, 0), scalar=LEAST)
            self.k.barrier()
        for channel, image in walk(self.k, share):
            plane = image * self.job.shape.blocks[0] + channel
            blocks = groupby(range(*share.rows), lambda i: block_of(self.job.shape, self.rows, i))
            for block, run in blocks:
                # Blocks that need the same rows, relative to their first, are one loop.
                members = list(run)
                with repeat(self.k, "rows", len(members)) as turn:
                    self._block(block, (plane, channel), turn + members[0])
        return self.k.finish()

    def _block(self, block: GradientRows, place: tuple[Affine, Affine], index: Affine) -> None:
        """Write one block of rows of one plane; `place` is (plane, its channel block)."""
        k = self.k
        shape = self.job.shape
        row = self.line * C0
        self._load(self.grads.alloc().slot, block, place, index)
        self.grads.enqueue()
        grads = self.grads.dequeue()
        dx = self.sums.alloc()
        if self.job.is_maximum:
            x = Tile(self.tiles[0], grads.slot)
            for first_row, count in (
                (0, block.image_start),
                (block.image_end, block.ub_rows - block.image_end),
            ):
                k.each("vdup", count * row, (x, first_row * row), scalar=LEAST)
        k.each("vdup", block.ub_rows * row, (dx, 0), scalar=0.0)
        if block.windows:
            self._divide(grads, block.windows * shape.out_hw[1] * C0)
            for tap in product(range(shape.r), range(shape.s)):
                self._tap(grads, dx, block, tap)
        self.grads.free()
        self.sums.enqueue()
        result = self.sums.dequeue()
        sizes = (block.rows, shape.w * C0)
        source = result.region((-block.ub_start * self.line + shape.pads[2]) * C0, sizes, (row, 1))
        # dx has the image only: without the rows and columns of padding beside it in UB.
        start = (place[0] * (shape.h * shape.w) + index * (self.rows * shape.w)) * C0
        k.copy(self.y.region(start, sizes), source)
        self.sums.free()

    def _load(
        self, slot: Affine | int, block: GradientRows, place: tuple[Affine, Affine], index: Affine
    ) -> None:
        """Load rows of x between their borders, the windows' gradients, and y, rates or weights."""
        k = self.k
        shape = self.job.shape
        (oh, ow) = self.job.shape.out_hw
        (plane, channel) = place
        if self.x is not None:
            first_row = index * self.rows + (block.ub_start + block.image_start)
            sizes = (block.image_end - block.image_start, shape.w * C0)
            start = (block.image_start * self.line + shape.pads[2]) * C0
            to = Tile(self.tiles[0], slot).region(start, sizes, (self.line * C0, 1))
            first_pixel = plane * (shape.h * shape.w) + first_row * shape.w
            k.copy(to, self.x.region(first_pixel * C0, sizes))
        if not block.windows:
            return
        row = ow * C0
        windows_size = block.windows * row
        windows_before = index * (self.rows // shape.strides[0])
        windows_before += (block.window_start + shape.pads[0]) // shape.strides[0]
        in_plane = windows_before * row
        in_tensor = plane * (oh * row) + in_plane
        grads = Tile(self.grads.buffer, slot).region(0, windows_size)
        k.copy(grads, self.grad.region(in_tensor, windows_size))
        if self.operand is None:
            return
        tile = Tile(self.tiles[1 if self.job.is_maximum else 0], slot)
        if self.job.has_weights:
            weights_size = shape.taps * C0
            source = self.operand.region(channel * weights_size, weights_size)
        elif self.job.is_maximum:
            source = self.operand.region(in_tensor, windows_size)
        else:
            # The factors are the same for all planes.
            source = self.operand.region(in_plane, windows_size)
        k.copy(tile.region(0, source.elements), source)

    def _divide(self, grads: Tile, elements: int) -> None:
        """Divide the gradients of averages by the number of elements of each window."""
        factor = self.job.factor
        place = (grads, 0)
        if self.job.is_maximum or factor == 1.0:
            return
        if factor:
            self.k.each("vmuls", elements, place, place, scalar=factor)
        else:
            self.k.each("vmul", elements, place, place, (Tile(self.tiles[0], grads.slot), 0))

    def _tap(self, grads: Tile, dx: Tile, block: GradientRows, tap: tuple[int, int]) -> None:
        """Add one tap of every window: the gradient, or what remains of it if x is the largest."""
        k = self.k
        shape = self.job.shape
        ow = self.job.shape.out_hw[1]
        # Where the first window's tap lies in UB: its row and column.
        tap_start = ((block.window_start - block.ub_start + tap[0]) * self.line + tap[1]) * C0
        pitch = shape.strides[0] * self.line * C0
        step = shape.strides[1]
        if self.job.is_maximum:
            x, top, hits = (Tile(buffer, grads.slot) for buffer in self.tiles)
            addends = hits
            with repeat(k, "line", block.windows) as line:
                for dense, strided in self._lines(line * (ow * C0), line * pitch + tap_start, step):
                    k.vector("vcmp", dense.of(hits), strided.of(x), dense.of(top), compare="eq")
            for at, sizes in k.runs(block.windows * ow * C0, PIXELS * C0):
                hits_of_run = self.tiles[2].region(at, sizes)
                remaining = grads.region(at, sizes)
                # A hit takes all of the gradient; what remains goes to the next tap.
                k.vector("vmul", hits_of_run, hits_of_run, remaining)
                k.vector("vsub", remaining, remaining, hits_of_run)
        elif self.job.has_weights:
            addends = self._times_weights(grads, block.windows * ow, tap)
        else:
            addends = grads
        with repeat(k, "line", block.windows) as line:
            for dense, strided in self._lines(line * (ow * C0), line * pitch + tap_start, step):
                sums = strided.of(dx)
                k.vector("vadd", sums, sums, dense.of(addends))

    def _times_weights(self, grads: Tile, pixels: int, tap: tuple[int, int]) -> Tile:
        """Return the gradients times the weights of one tap, which has one per channel."""
        weights = Tile(self.tiles[0], grads.slot)
        products = Tile(self.tiles[1], 0)
        for at, shape in self.k.runs(pixels, PIXELS):
            sizes = (*shape, C0)
            # One weight for each of 16 channels, the same for all pixels: strides of 0.
            place = (tap[0] * self.job.shape.s + tap[1]) * C0
            views = (tile.region(at * C0, sizes) for tile in (products, grads))
            self.k.vector("vmul", *views, weights.region(place, sizes, (0, 0, 1)))
        return products

    def _lines(
        self, dense_start: Affine, strided_start: Affine, step: int
    ) -> Iterator[tuple[_PixelsView, _PixelsView]]:
        """Yield pairs of views of a row of windows: pixels side by side, and `step` apart."""
        for at, shape in self.k.runs(self.job.shape.out_hw[1], PIXELS):
            sizes = (*shape, C0)
            dense = _PixelsView(dense_start + at * C0, sizes, 1)
            yield dense, _PixelsView(strided_start + at * step * C0, sizes, step)
