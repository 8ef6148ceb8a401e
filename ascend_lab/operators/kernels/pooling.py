"""Max pooling of NC1HWC0 fp16 images on the vector unit, and gradients of max and average pooling.

A window of r x s is folded in two steps: the largest of s neighbours in every row of the image, for
as many columns as the output has, then the largest of r such rows. Rows are shared by windows that
overlap: 3 x 3 with a stride of 2 takes 6 comparisons for each result instead of 8.

Gradient of the maximum, tap by tap: hit = (x at the tap == y), part = hit * left, left = left -
part, and part is added to dx at the tap. `left` starts as the gradient: after a window's first hit
it is zero, so that later equal elements get nothing. Gradient of the average: grad, divided by the
number of elements in the window, is added at every tap. The image gradient of a depthwise
convolution is the same, with a weight per tap and channel instead of the division. dx is computed
in blocks of rows; windows that reach into two blocks are computed in both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from ascend_lab.operators.kernels import conv_shape, planes as images
from ascend_lab.operators.kernels.planes import C0, PIXELS, Own, RowBlock, dealt, plane_launch
from ascend_lab.operators.kernels.rows import (
    LEAST,
    Grid,
    RowWriter,
    fold_largest,
    largest_lines,
    most_rows,
)
from ascend_lab.operators.kernels.tiles import repeat


def max_pool_launch(shape: conv_shape.ConvShape, chip: Chip) -> Launch:
    """Return the launch from x (N, C1, H, W, C0) to the maxima y, on all vector cores.

    `shape` gives the windows in the form of a depthwise convolution in fp16. Raises `CapacityError`
    if one output row does not fit UB.
    """
    shape = _stacked(shape)
    lines = largest_lines(shape)
    rows_that_fit = most_rows(shape, chip, lines)

    def program(share: Own) -> Program:
        rows = images.rows_per_block(share, rows_that_fit)
        return _Largest("max_pool", shape, chip, lines, rows, LEAST).program(share)

    return plane_launch(f"max_pool_{shape.n}x{shape.c}", images.image_sizes(shape, chip), program)


def row_fits(shape: conv_shape.ConvShape, chip: Chip) -> bool:
    """Tell whether UB has room for an output row, so that `max_pool_launch` has a kernel."""
    shape = _stacked(shape)
    try:
        most_rows(shape, chip, largest_lines(shape))
    except CapacityError:
        return False
    return True


def _stacked(shape: conv_shape.ConvShape) -> conv_shape.ConvShape:
    """Return all planes as one image if no window would reach from one plane into the next."""
    (top, bottom, *_) = shape.pads
    planes = shape.n * shape.blocks[0]
    # Windows that touch but do not overlap, in whole rows: 2 x 2 with stride 2 on 56 rows.
    if shape.r != shape.strides[0] or shape.h % shape.r or top or bottom:
        return shape
    return replace(shape, n=1, c=C0, k=C0, groups=C0, h=planes * shape.h)


class _Largest(RowWriter):
    """Folds rows, then columns; a window of one row or column takes one step."""

    def compute(self, x: Tile, results: Tile, block: RowBlock) -> None:
        """Find the largest number of each window."""
        shape = self.shape
        lines = self.lines
        grid = lines.grid(shape, block.rows)
        if not lines.folded:
            taps = [i * lines.line + j for i in range(shape.r) for j in range(shape.s)]
            fold_largest(self.k, grid, taps, x, results)
            return
        # First the largest of s neighbours in each row, then of r such rows.
        fold_largest(self.k, grid, list(range(shape.s)), x, self.beside)
        pitch = lines.pitch
        down = shape.strides[0] * lines.pitch
        columns = Grid(block.rows, lines.width, down, pitch, 1)
        taps = [i * pitch for i in range(shape.r)]
        fold_largest(self.k, columns, taps, self.beside, results)


@dataclass(frozen=True, slots=True)
class PoolGradient:
    """The gradient to compute: `shape` is the pooling as a convolution with one group per channel.

    `maximum` tells max pooling from average pooling. For averages, `share` is the factor of the
    gradient, 0 if it differs between windows: then the tensor `rate` (OH, OW, 16) holds the
    factors. With `weighted` it is the gradient of a depthwise convolution's image: each tap has a
    weight per channel, (C1, r, s, 16).
    """

    shape: conv_shape.ConvShape
    maximum: bool
    share: float = 1.0
    weighted: bool = False


@dataclass(frozen=True, slots=True)
class GradientRows:
    """`rows` rows of dx and the `windows` that read them; all row numbers count from `base`.

    Relative to the block's first row of dx: `base` is the first row in UB, `window` the first
    window's first row; `first` .. `end`-1 of `span` rows in UB are in the image.
    """

    rows: int
    windows: int
    base: int
    window: int
    span: int
    first: int
    end: int


def block_of(shape: conv_shape.ConvShape, rows: int, index: int) -> GradientRows:
    """Return what block `index` of `rows` rows of dx needs."""
    stride = shape.strides[0]
    top = shape.pads[0]
    oh = shape.out_hw[0]
    start = index * rows
    end = min(start + rows, shape.h)
    # Window i begins in row i * stride - top; the first window that ends behind row `start` is the
    # first one that contains it.
    first_window = max(0, ceil_div(start + top - shape.r + 1, stride))
    # Windows up to the last one that begins before the end of the block.
    windows = max(0, min(oh - 1, (end - 1 + top) // stride) - first_window + 1)
    window = first_window * stride - top if windows else start
    base = min(start, window)
    span = max(end, window + (windows - 1) * stride + shape.r if windows else end) - base
    first_row = max(-base, 0)
    end_row = min(span, shape.h - base)
    return GradientRows(
        end - start, windows, base - start, window - start, span, first_row, end_row
    )


def _largest(shape: conv_shape.ConvShape, rows: int) -> tuple[int, int]:
    """Return the most rows in UB, and the most windows, of any block."""
    blocks = [block_of(shape, rows, i) for i in range(ceil_div(shape.h, rows))]
    return max(b.span for b in blocks), max([1, *(b.windows for b in blocks)])


def line_of(shape: conv_shape.ConvShape) -> int:
    """Return the pixels of a row in UB, which has all that windows read and all of the image."""
    columns = (shape.out_hw[1] - 1) * shape.strides[1] + shape.s
    return max(columns, shape.pads[2] + shape.w)


def _needed(job: PoolGradient, rows: int) -> int:
    """Return the 32-byte blocks of UB: two slots of dx, of grad and, for a maximum, of x and y."""
    shape = job.shape
    (span, windows) = _largest(job.shape, rows)
    # 2 slots of dx, and of x; 2 slots of the gradient, and of y, and the hits.
    planes, runs = (4, 5) if job.maximum else (2, 2 if job.share else 4)
    # Weights of a channel block, one block of 32 bytes a tap, in two slots.
    weights = 2 * shape.taps if job.weighted else 0
    pixels = windows * shape.out_hw[1]
    return planes * span * line_of(shape) + (runs + job.weighted) * pixels + weights


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
    shares = dealt((shape.blocks[0], shape.n, ceil_div(shape.h, rows)), chip.cores_of("vector"))
    name = f"pool_gradient_{shape.n}x{shape.c}x{shape.h}x{shape.w}"
    return plane_launch(
        name, shares, lambda share: _GradientWriter.make(job, chip, rows).program(share)
    )


# -- one core -------------------------------------------------------------------------------------
View = Callable[[Tile], Region]


@dataclass(frozen=True, slots=True)
class _GradientWriter:
    """Writes the programs of the kernel; rows of x and dx lie `line` pixels apart in UB.

    `beside` is the tensor that is read along with the gradient: top, rate or weight; `tiles` hold
    x, top and hits, or the rates, or weights and products.
    """

    job: PoolGradient
    k: KernelBuilder
    x: Buffer | None
    beside: Buffer | None
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
        span, windows = _largest(shape, rows)
        image = span * line * C0
        pixels = windows * ow * C0
        planes = shape.n * c1 * C0
        hw = shape.h * shape.w
        grads = k.queue("left", "UB", "fp16", pixels, src="MTE2", dst="V")
        # The tensor read along with the gradient shares its slots, so that one flag announces both.
        x = beside = None
        tiles: tuple[Buffer, ...] = ()
        if job.maximum:
            x = k.tensor("x", "fp16", planes * hw)
            beside = k.tensor("top", "fp16", planes * oh * ow)
            hit = k.buffer("hit", "UB", "fp16", pixels)
            tiles = (grads.join("x_ub", "fp16", image), grads.join("top_ub", "fp16", pixels), hit)
        elif not job.share:
            beside = k.tensor("rate", "fp16", oh * ow * C0)
            tiles = (grads.join("rate_ub", "fp16", pixels),)
        elif job.weighted:
            beside = k.tensor("weight", "fp16", c1 * shape.taps * C0)
            products = k.buffer("part", "UB", "fp16", pixels)
            tiles = (grads.join("weight_ub", "fp16", shape.taps * C0), products)
        grad = k.tensor("grad", "fp16", planes * oh * ow)
        y = k.tensor("y", "fp16", planes * hw)
        sums = k.queue("dx_ub", "UB", "fp16", image, src="V", dst="MTE3")
        return cls(job, k, x, beside, grad, y, grads, tiles, sums, line, rows)

    def program(self, share: Own) -> Program:
        """Return the program, which loops over planes; loads of x do not touch border columns."""
        if self.job.maximum:
            for slot in range(2):
                x = Tile(self.tiles[0], slot)
                self.k.each("vdup", x.buffer.elements, (x, 0), scalar=LEAST)
            self.k.barrier()
        for channel, image in images.walk(self.k, share):
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
        if self.job.maximum:
            x = Tile(self.tiles[0], grads.slot)
            for first_row, count in ((0, block.first), (block.end, block.span - block.end)):
                k.each("vdup", count * row, (x, first_row * row), scalar=LEAST)
        k.each("vdup", block.span * row, (dx, 0), scalar=0.0)
        if block.windows:
            self._divide(grads, block.windows * shape.out_hw[1] * C0)
            for tap in product(range(shape.r), range(shape.s)):
                self._tap(grads, dx, block, tap)
        self.grads.free()
        self.sums.enqueue()
        result = self.sums.dequeue()
        sizes = (block.rows, shape.w * C0)
        source = result.region((-block.base * self.line + shape.pads[2]) * C0, sizes, (row, 1))
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
            row = index * self.rows + (block.base + block.first)
            sizes = (block.end - block.first, shape.w * C0)
            start = (block.first * self.line + shape.pads[2]) * C0
            to = Tile(self.tiles[0], slot).region(start, sizes, (self.line * C0, 1))
            k.copy(to, self.x.region((plane * (shape.h * shape.w) + row * shape.w) * C0, sizes))
        if not block.windows:
            return
        size = block.windows * ow * C0
        first_window = index * (self.rows // shape.strides[0])
        first_window = (first_window + (block.window + shape.pads[0]) // shape.strides[0]) * (
            ow * C0
        )
        at = plane * (oh * ow * C0) + first_window
        k.copy(Tile(self.grads.buffer, slot).region(0, size), self.grad.region(at, size))
        if self.beside is None:
            return
        tile = Tile(self.tiles[1 if self.job.maximum else 0], slot)
        if self.job.weighted:
            size = shape.taps * C0
            at = channel * size
        elif not self.job.maximum:
            at = first_window
        k.copy(tile.region(0, size), self.beside.region(at, size))

    def _divide(self, grads: Tile, elements: int) -> None:
        """Divide the gradients of averages by the number of elements of each window."""
        share = self.job.share
        place = (grads, 0)
        if self.job.maximum or share == 1.0:
            return
        if share:
            self.k.each("vmuls", elements, place, place, scalar=share)
        else:
            self.k.each("vmul", elements, place, place, (Tile(self.tiles[0], grads.slot), 0))

    def _tap(self, grads: Tile, dx: Tile, block: GradientRows, tap: tuple[int, int]) -> None:
        """Add one tap of every window: the gradient, or what remains of it if x is the largest."""
        k = self.k
        shape = self.job.shape
        ow = self.job.shape.out_hw[1]
        # Where the first window's tap lies in UB: its row and column.
        tap_start = ((block.window - block.base + tap[0]) * self.line + tap[1]) * C0
        pitch = shape.strides[0] * self.line * C0
        step = shape.strides[1]
        addends = grads
        if self.job.maximum:
            x, top, addends = (Tile(buffer, grads.slot) for buffer in self.tiles)
            with repeat(k, "line", block.windows) as line:
                for dense, strided in self._lines(line * (ow * C0), line * pitch + tap_start, step):
                    k.vector("vcmp", dense(addends), strided(x), dense(top), compare="eq")
            for at, sizes in k.runs(block.windows * ow * C0, PIXELS * C0):
                hits = self.tiles[2].region(at, sizes)
                remaining = grads.region(at, sizes)
                # A hit takes all of the gradient; what remains goes to the next tap.
                k.vector("vmul", hits, hits, remaining)
                k.vector("vsub", remaining, remaining, hits)
        if self.job.weighted:
            addends = self._weighted(grads, block.windows * ow, tap)
        with repeat(k, "line", block.windows) as line:
            for dense, strided in self._lines(line * (ow * C0), line * pitch + tap_start, step):
                k.vector("vadd", strided(dx), strided(dx), dense(addends))

    def _weighted(self, grads: Tile, pixels: int, tap: tuple[int, int]) -> Tile:
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
    ) -> Iterator[tuple[View, View]]:
        """Yield pairs of views of a row of windows: pixels side by side, and `step` apart."""
        for at, shape in self.k.runs(self.job.shape.out_hw[1], PIXELS):
            sizes = (*shape, C0)

            def view(start: Affine, step: int, sizes: tuple[int, ...] = sizes) -> View:
                # A repeat takes 8 pixels, `step` pixels apart.
                strides = (PIXELS * step * C0, step * C0, 1)
                return lambda tile: tile.region(start, sizes, strides)

            yield view(dense_start + at * C0, 1), view(strided_start + at * step * C0, step)
