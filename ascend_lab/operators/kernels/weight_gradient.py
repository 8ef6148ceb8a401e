"""The gradient of a convolution's weights on the cube.

dW (k, c r s) = grad (k, pixels) x im2col(x) (pixels, c r s). x and the gradient lie in GM as
NC1HWC0 and are loaded to L1 as flat planes of pixels with zeros between the lines (`weight_plan`):
each tap then reads its operand as a shifted view, and load2d transposes the fractals of 16 pixels
by 16 channels on their way to L0. dW is stored as (C1 r s, K1, 16, 16), FRACTAL_Z. If cores divide
the pixels of one result, by images or by bands (ranges of output rows), each writes fp32 partial
sums, which a second phase adds.

`zeros` is a tensor of zeros in GM, from which the padding of the planes is copied: once at the
start, and again at the first and last rows of an image.
"""

from collections.abc import Iterator
from itertools import groupby, product
from typing import NamedTuple

from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.kernels import conv_shape, tiles, weight_plan as plans
from ascend_lab.operators.kernels.weight_plan import (
    Gap,
    WeightPlan,
    grad_plane,
    image_plane,
    tile_blocks,
)

C0 = 16
"""Channels of a block in two-byte formats."""
AREA = isa.FRACTAL * C0
ZEROS = 8192
"""Elements of the tensor of zeros: 512 pixels."""


class Band(NamedTuple):
    """A band (range of output rows) in a loop over bands that are alike.

    It is number `turn` of the loop, whose first band is number `first` of the image. For each phase
    of rows, `rows_inside` are the rows (first, end) of the band that lie inside the image.
    """

    turn: isa.Affine
    first: int
    rows_inside: tuple[tuple[int, int], ...]


Sides = tuple[tiles.Span, tiles.Span]
"""Blocks of output and of input channels of a tile of dW."""


def weight_gradient_launch(
    shape: conv_shape.ConvShape, chip: Chip, plan: WeightPlan | None = None
) -> isa.Launch:
    """Return the launch from x, grad and zeros to y, or to `partial` if the plan splits the pixels.

    `partial` is (splits, C1 r s, K1, 16, 16) in fp32. The shape has one group, or one per channel:
    then K1 is 1, and dW lies on the diagonals. Raises `CapacityError` if no plan fits.
    """
    chosen = plan or plans.weight_plan(shape, chip)
    c_all, m_all = tile_blocks(shape)
    groups, bands = _cuts(shape, chosen)
    grid = {
        "row": tiles.chunks(m_all, chosen.m, chosen.grid[0]),
        "col": tiles.chunks(c_all, chosen.c1, chosen.grid[1]),
        "batch": groups,
    }

    def program(m: isa.Share, c: isa.Share, group: isa.Share, band: isa.Share) -> isa.Program:
        writer = _Writer(shape, chosen, chip, (m, c), len(groups) * len(bands))
        return writer.program(group, band, len(bands))

    return isa.spread(
        f"weights_{shape.k}x{shape.c}x{shape.r}x{shape.s}", grid, program, apart=bands
    )


def _cuts(shape: conv_shape.ConvShape, plan: WeightPlan) -> tuple[list[int], list[int]]:
    """Return how the cores divide groups of images and bands of rows."""
    groups = tiles.chunks(shape.n // plan.stage.images, 1, plan.grid[2])
    return groups, tiles.chunks(shape.out_hw[0] // plan.stage.rows, 1, plan.grid[3])


def splits_of(shape: conv_shape.ConvShape, plan: WeightPlan) -> int:
    """Return how many partial sums the cores write."""
    groups, bands = _cuts(shape, plan)
    return len(groups) * len(bands)


class _Writer:
    """Writes the program of cores with equal shares; a slot of L1 has `blocks` blocks of x."""

    def __init__(
        self,
        shape: conv_shape.ConvShape,
        plan: WeightPlan,
        chip: Chip,
        shares: tuple[isa.Share, isa.Share],
        splits: int,
    ) -> None:
        """Allocate tensors and queues."""
        dtype = shape.dtype
        m = min(plan.m, shares[0][0])
        c = min(plan.c1, shares[1][0])
        sums = isa.ACCUMULATOR[dtype]
        k = self.k = isa.KernelBuilder(f"weights_{shares[0][0]}x{shares[1][0]}", chip)
        self.shape = shape
        self.plan = plan
        self.shares = shares
        self.blocks = c
        self.rows, self.columns = plans.axes_of(shape)
        self.phases = list(product(range(len(self.rows.phases)), range(len(self.columns.phases))))
        self.pixels = plans.image_pixels(shape, plan.stage)
        # Stride 2 has 2 x 2 phases: each is a separate plane for every channel block.
        x_slot = len(self.phases) * c * self.pixels * C0
        grad_slot = m * grad_plane(shape, plan.stage).pixels * C0
        step = self.step = plans.columns_per_step(chip, plan)
        self.result_dtype = shape.out_dtype if splits == 1 else sums
        self._declare_tensors(splits)
        self.l1 = (
            k.queue("x_l1", "L1", dtype, x_slot, src="MTE2", dst="MTE1"),
            k.queue("g_l1", "L1", dtype, grad_slot, src="MTE2", dst="MTE1"),
        )
        self.l0 = (
            k.queue("g_l0", "L0A", dtype, m * plan.depth * AREA, src="MTE1", dst="M"),
            k.queue("x_l0", "L0B", dtype, step * plan.depth * AREA, src="MTE1", dst="M"),
        )
        self.acc = tiles.sum_queue(k, "y_l0", sums, m, c * shape.taps)
        self.out = (
            tiles.out_queue(k, self.result_dtype, m, c * shape.taps) if chip.combined else None
        )

    def _declare_tensors(self, splits: int) -> None:
        """Declare the images, the gradient, zeros, and the result or `splits` partial sums."""
        k = self.k
        shape = self.shape
        dtype = shape.dtype
        (c_all, m_all) = shape.blocks
        (oh, ow) = shape.out_hw
        column_blocks, row_blocks = tile_blocks(shape)
        self.x = k.tensor("x", dtype, shape.n * c_all * shape.h * shape.w * C0)
        self.grad = k.tensor("grad", dtype, shape.n * m_all * oh * ow * C0)
        self.zeros = k.tensor("zeros", dtype, ZEROS)
        # One split: the sums are the result. Several: partial sums in fp32.
        name = "y" if splits == 1 else "partial"
        elements = splits * column_blocks * shape.taps * row_blocks * AREA
        self.sums = k.tensor(name, self.result_dtype, elements)

    def program(self, groups: isa.Share, band: isa.Share, bands: int) -> isa.Program:
        """Return the program: sum each tile of dW in L0C over a band's pixels, and store it."""
        k = self.k
        plan = self.plan
        taps = self.shape.taps
        (c_all, m_all) = tile_blocks(self.shape)
        m_base, c_base = (
            k.param(name, share[2]) * share[1]
            for name, share in zip(("row", "col"), self.shares, strict=True)
        )
        batch = k.param("batch", groups[2])
        self._clear()
        split = batch * bands + band[0]
        for m_at, m in tiles.segments(k, "m", self.shares[0][0], plan.m):
            for c_at, c in tiles.segments(k, "c", self.shares[1][0], plan.c1):
                sides = (m_base + m_at, m), (c_base + c_at, c)
                # One group per channel: 16 channels of the gradient meet the same 16 of x.
                operand_sides = sides if self.shape.groups == 1 else (sides[1], sides[1])
                total = self.acc.alloc()
                with tiles.repeat(k, "group", groups[0]) as group:
                    for at, done in self._bands(band[1:]):
                        self._load_stage(operand_sides, batch * groups[1] + group, at)
                        self._reduce((m, c), total, group + done)
                self.acc.enqueue()
                # Partial sums lie one behind another; in each a column of dW is (c1, tap).
                column = split * (c_all * taps) + (c_base + c_at) * taps
                rows = m * isa.FRACTAL
                area = tiles.Area(
                    base=column * (m_all * AREA),
                    pieces=((0, (m_base + m_at) * isa.FRACTAL, rows),),
                    blocks=c * taps,
                    plane=m_all * isa.FRACTAL,
                    step=1,
                    fractals=m,
                    pixels=rows,
                )
                tiles.store_area(k, self.acc, self.out, self.sums, area)
        return k.finish()

    def _bands(self, band_range: tuple[int, int]) -> Iterator[tuple[Band, isa.Affine]]:
        """Yield a core's bands, equal ones in a loop, and the number of bands before each."""
        size = self.plan.stage.rows
        count = size + self.rows.reach

        def inside(band: int) -> tuple[tuple[int, int], ...]:
            return tuple(phase.inside(band * size, count) for phase in self.rows.phases)

        for rows_inside, run in groupby(range(*band_range), inside):
            # Bands with equally many rows inside the image are one loop.
            members = list(run)
            with tiles.repeat(self.k, "band", len(members)) as turn:
                bands_before = turn + (members[0] - band_range[0])
                yield Band(turn, members[0], rows_inside), bands_before

    # -- L1 ---------------------------------------------------------------------------------------
    def _clear(self) -> None:
        """Write zeros between the lines of all slots, which loads do not overwrite."""
        shape = self.shape
        stage = self.plan.stage
        plane = grad_plane(shape, stage)
        for slot in range(2):
            x, grad = (isa.Tile(queue.buffer, slot) for queue in self.l1)
            for number, phase in enumerate(self.phases):
                # Rows of zeros above and below stay where a stage is a whole image; else each load
                # writes its own.
                if stage.rows == shape.out_hw[0]:
                    row_phase = self.rows.phases[phase[0]]
                    inside = (row_phase.low, row_phase.high)
                else:
                    inside = (0, stage.rows + self.rows.reach)
                for gap in image_plane(shape, stage, phase, inside).gaps():
                    start = number * self.blocks * self.pixels
                    self._zero(x, start, (self.blocks, self.pixels), gap)
            planes = grad.buffer.elements // (plane.pixels * C0)
            for gap in plane.gaps():
                self._zero(grad, 0, (planes, plane.pixels), gap)

    def _zero(self, tile: isa.Tile, start: int, planes: tuple[int, int], gap: Gap) -> None:
        """Copy zeros to a gap of each of (count, pitch) planes."""
        # A gap of 600 pixels takes 2 copies of the 512 zeros.
        max_pixels = ZEROS // C0
        for gap_pixel in range(0, gap.length, max_pixels):
            run = min(max_pixels, gap.length - gap_pixel) * C0
            sizes = (planes[0], *gap.counts, run)
            strides = (planes[1] * C0, gap.steps[0] * C0, gap.steps[1] * C0, 1)
            target = tile.region((start + gap.start + gap_pixel) * C0, sizes, strides)
            self.k.copy(target, self.zeros.region(0, sizes, (0, 0, 0, 1)))

    def _load_stage(self, sides: Sides, group: isa.Affine, band: Band) -> None:
        """Load the pixels of a stage to L1: those of the gradient, and each phase of x."""
        shape = self.shape
        stage = self.plan.stage
        ((m_at, m), channels) = sides
        x, grad = (queue.alloc() for queue in self.l1)
        image = group * stage.images
        for number, phase in enumerate(self.phases):
            start = number * self.blocks * self.pixels
            self._load_phase(x, start, phase, image, channels, band)
        self.l1[0].enqueue()
        plane = grad_plane(shape, stage)
        (oh, ow) = shape.out_hw
        row = (band.turn + band.first) * stage.rows
        # The gradient lies as (image, block, row, column, 16).
        at = ((image * shape.blocks[1] + m_at) * oh + row) * (ow * C0)
        sizes = (m, stage.images, stage.rows, ow * C0)
        strides_in_memory = (oh * ow * C0, shape.blocks[1] * oh * ow * C0, ow * C0, 1)
        strides_in_l1 = (plane.pixels * C0, plane.image_pitch * C0, plane.pitch * C0, 1)
        self.k.copy(
            grad.region(0, sizes, strides_in_l1), self.grad.region(at, sizes, strides_in_memory)
        )
        self.l1[1].enqueue()

    def _load_phase(
        self,
        tile: isa.Tile,
        start: int,
        phase: tuple[int, int],
        image: isa.Affine,
        channels: tiles.Span,
        band: Band,
    ) -> None:
        """Load one phase of x: its rows inside the image, and zeros for those outside."""
        shape = self.shape
        stage = self.plan.stage
        rows = self.rows
        columns = self.columns
        row_phase = rows.phases[phase[0]]
        column_phase = columns.phases[phase[1]]
        inside = band.rows_inside[phase[0]]
        (c_at, c) = channels
        pixels = self.pixels
        plane = image_plane(shape, stage, phase, inside)
        if stage.rows < shape.out_hw[0]:
            top = inside[0] * plane.pitch
            end = inside[1] * plane.pitch
            end_of_stage = (stage.rows + rows.reach) * plane.pitch
            for gap_start, length in ((0, top), (end, min(end_of_stage, pixels) - end)):
                if length > 0 and (gap_start or inside[0]):
                    self._zero(tile, start, (c, pixels), Gap(gap_start, (1, 1), (0, 0), length))
        (height, width) = plane.sizes
        hw = shape.h * shape.w
        # The phase may lie completely in the padding, whose zeros are already written.
        if not height or not width:
            return
        # The first entry of the phase that the stage reads, inside the image.
        entry = band.first * stage.rows + inside[0] - row_phase.low
        row = band.turn * (stage.rows * rows.stride) + row_phase.first + entry * rows.stride
        first_pixel = row * shape.w + column_phase.first
        at = ((image * shape.blocks[0] + c_at) * hw + first_pixel) * C0
        sizes = (c, stage.images, height, width, C0)
        steps = (rows.stride * shape.w * C0, columns.stride * C0, 1)
        strides_in_memory = (hw * C0, shape.blocks[0] * hw * C0, *steps)
        strides_in_l1 = (pixels * C0, plane.image_pitch * C0, plane.pitch * C0, C0, 1)
        target = tile.region((start + plane.first) * C0, sizes, strides_in_l1)
        self.k.copy(target, self.x.region(at, sizes, strides_in_memory))

    # -- L0 ---------------------------------------------------------------------------------------
    def _reduce(self, sizes: tuple[int, int], total: isa.Tile, done: isa.Affine) -> None:
        """Add the products of the pixels in L1 to the sums, or begin the sums if `done` is 0."""
        k = self.k
        plan = self.plan
        (m, c) = sizes
        (grad_l0, image_l0) = self.l0
        x, grad = (queue.dequeue() for queue in self.l1)
        views = list(self._views(c))
        pixels = grad_plane(self.shape, plan.stage).pixels
        for at, depth in tiles.segments(
            k, "k", plans.fractals_of(self.shape, plan.stage), plan.depth
        ):
            grad_tile = grad_l0.alloc()
            with tiles.repeat(k, "block", m) as block:
                to = grad_tile.region(block * (depth * AREA), (depth, isa.FRACTAL, C0))
                k.load2d(to, _transposed(grad, block * pixels + at * isa.FRACTAL, depth))
            grad_l0.enqueue()
            a = grad_l0.dequeue().region(0, (m, depth, isa.FRACTAL, C0))
            # 9 taps of 2 channel blocks are 18 columns of dW; a slot of L0B holds `step` of them.
            for first_view in range(0, len(views), self.step):
                step_views = views[first_view : first_view + self.step]
                image_tile = image_l0.alloc()
                for number, view in enumerate(step_views):
                    steps = (len(step_views) * AREA, C0, 1)
                    column = image_tile.region(number * AREA, (depth, isa.FRACTAL, C0), steps)
                    k.load2d(column, _transposed(x, at * isa.FRACTAL + view, depth))
                image_l0.enqueue()
                b = image_l0.dequeue().region(0, (depth, len(step_views), isa.FRACTAL, C0))
                sums = total.region(
                    first_view * (m * AREA), (len(step_views), m, isa.FRACTAL, isa.FRACTAL)
                )
                k.mmad(sums, a, b, accumulate=done + at)
                image_l0.free()
            grad_l0.free()
        for queue in self.l1:
            queue.free()

    def _views(self, c: int) -> Iterator[int]:
        """Yield the first pixel in L1 for each column (c1, r, s) of dW: a block, a tap's shift."""
        rows = self.rows
        columns = self.columns
        for block in range(c):
            for (p, down), (q, right) in product(rows.taps, columns.taps):
                # Planes of L1: phase of rows, phase of columns, channel block.
                plane = (p * len(columns.phases) + q) * self.blocks + block
                yield plane * self.pixels + down * columns.pitch + right


def _transposed(tile: isa.Tile, pixel: isa.Affine, depth: int) -> isa.Region:
    """Return fractals of 16 pixels each with channels as rows: load2d transposes them."""
    return tile.region(pixel * C0, (depth, isa.FRACTAL, C0), (AREA, 1, C0))
