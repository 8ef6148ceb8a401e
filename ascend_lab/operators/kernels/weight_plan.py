"""Plan the weight gradient of a convolution: planes of pixels in L1, tiles of the result, cores.

The product is (k, pixels) x (pixels, c r s). A core keeps in L0C a tile of m blocks of output
channels by c1 blocks of input channels, for all taps, and loops over its pixels in stages: whole
images, or bands of rows of one image. If cores divide the pixels, each writes partial sums.

In L1 every tap is a shifted view of flat pixels. Along one axis, output o and tap i read
x[o stride + i dilation - pad]. The axis is split into phases by the remainder
p = (i dilation) mod stride. In phase p entry a is x[a stride + p - pad], and the tap reads entry
o + (i dilation) div stride: a shift, whatever the stride. Entries beyond the image are zeros. The
zeros at the end of a line also serve as those at the start of the next line.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.kernels.conv_shape import ConvShape, Pair

SIDES = (1, 2, 3, 4, 6, 7, 8, 12, 14, 16)
"""Blocks of channels of a tile that are tried."""
PHASE_CYCLES = 1000
"""About how many cycles a second phase costs before it moves a byte (assumed)."""


# -- planes of pixels -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Phase:
    """Entries low .. high-1 of a phase lie in the image, the first of them at pixel `first`."""

    low: int
    high: int
    first: int

    def inside(self, start: int, count: int) -> tuple[int, int]:
        """Return the range of `count` entries from `start` on that lies in the image."""
        first_inside = min(max(self.low - start, 0), count)
        return first_inside, max(min(self.high - start, count), first_inside)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: outputs, phases, and for each tap its phase and shift.

    `pitch` is the distance of lines in entries; `reach` is the largest shift.
    """

    outputs: int
    stride: int
    phases: tuple[Phase, ...]
    taps: tuple[tuple[int, int], ...]
    pitch: int
    reach: int


@lru_cache(maxsize=256)
def axes_of(shape: ConvShape) -> tuple[Axis, Axis]:
    """Return the rows and the columns of a convolution."""
    return _axis(shape, 0), _axis(shape, 1)


def _axis(shape: ConvShape, i: int) -> Axis:
    """Return the rows (i = 0) or the columns (i = 1) of a convolution."""
    outputs = shape.out_hw[i]
    size = (shape.h, shape.w)[i]
    kernel = (shape.r, shape.s)[i]
    stride = shape.strides[i]
    dilation = shape.dilations[i]
    pad = shape.pads[2 * i]
    # Stride 2, kernel 3: taps 0, 1, 2 have remainders 0, 1, 0, so 2 phases; tap 2 is tap 0 shifted
    # by 1.
    residues = sorted({i * dilation % stride for i in range(kernel)})
    taps = tuple(
        (residues.index(i * dilation % stride), i * dilation // stride) for i in range(kernel)
    )
    reach = max(shift for _, shift in taps)
    phases = []
    pitch = outputs
    entries = outputs + reach
    for p in residues:
        first_entry = min(max(isa.ceil_div(pad - p, stride), 0), entries)
        end_entry = max(min(isa.ceil_div(size + pad - p, stride), entries), first_entry)
        phases.append(Phase(first_entry, end_entry, first_entry * stride + p - pad))
        # Zeros at the end of a line serve the next line's start: the longer of the two counts.
        pitch = max(pitch, end_entry, entries - first_entry)
    return Axis(outputs, stride, tuple(phases), taps, pitch, reach)


@dataclass(frozen=True, slots=True)
class Gap:
    """`counts[0]` x `counts[1]` runs of `length` pixels, `steps` pixels apart, from `start` on."""

    start: int
    counts: tuple[int, int]
    steps: tuple[int, int]
    length: int


@dataclass(frozen=True, slots=True)
class Plane:
    """A flat plane of `pixels` pixels with one rectangle per image, `image_pitch` pixels apart.

    A rectangle is rows[0] .. rows[1]-1 (of `pitch` pixels) by columns[0] .. columns[1]-1.
    """

    pixels: int
    images: int
    image_pitch: int
    pitch: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def first(self) -> int:
        """First pixel of the first rectangle."""
        return self.rows[0] * self.pitch + self.columns[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of a rectangle."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def gaps(self) -> list[Gap]:
        """Return the runs of pixels that no rectangle covers."""
        count, width = self.sizes
        if not count or not width:
            return [Gap(0, (1, 1), (0, 0), self.pixels)]
        rectangle_end = self.first + (count - 1) * self.pitch + width
        # From the end of an image's rectangle to the beginning of the next one.
        between = self.image_pitch - (rectangle_end - self.first)
        end = rectangle_end + (self.images - 1) * self.image_pitch
        steps = (self.image_pitch, self.pitch)
        gaps = [
            Gap(0, (1, 1), (0, 0), self.first),
            Gap(self.first + width, (self.images, count - 1), steps, self.pitch - width),
            Gap(rectangle_end, (self.images - 1, 1), steps, between),
            Gap(end, (1, 1), (0, 0), self.pixels - end),
        ]
        return [g for g in gaps if g.length > 0 and min(g.counts) > 0]


@dataclass(frozen=True, slots=True)
class Stage:
    """The pixels that are in L1 at once: `images` whole images, or `rows` output rows of one."""

    images: int
    rows: int


def fractals_of(shape: ConvShape, stage: Stage) -> int:
    """Return the fractals of 16 flat pixels of a stage."""
    rows, columns = axes_of(shape)
    return isa.ceil_div(((stage.images - 1) * rows.pitch + stage.rows) * columns.pitch, isa.FRACTAL)


def grad_plane(shape: ConvShape, stage: Stage) -> Plane:
    """Return how a channel block of the gradient lies in a stage."""
    rows, columns = axes_of(shape)
    pixels = fractals_of(shape, stage) * isa.FRACTAL
    pitch = columns.pitch
    sides = (0, stage.rows), (0, columns.outputs)
    return Plane(pixels, stage.images, rows.pitch * pitch, pitch, *sides)


def image_pixels(shape: ConvShape, stage: Stage) -> int:
    """Return the pixels of a block of one phase of x in a stage: all that shifted views read."""
    rows, columns = axes_of(shape)
    return fractals_of(shape, stage) * isa.FRACTAL + rows.reach * columns.pitch + columns.reach


def image_plane(
    shape: ConvShape, stage: Stage, phase: tuple[int, int], inside: tuple[int, int]
) -> Plane:
    """Return how a channel block of one phase of x lies in a stage; `inside`: its rows."""
    rows, columns = axes_of(shape)
    p = columns.phases[phase[1]]
    pitch = columns.pitch
    sides = inside, (p.low, p.high)
    return Plane(image_pixels(shape, stage), stage.images, rows.pitch * pitch, pitch, *sides)


# -- plans ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A tile of `m` by `c1` channel blocks; each step multiplies `depth` fractals of pixels.

    `grid` counts cores along output channels, input channels, images and rows.
    """

    m: int
    c1: int
    depth: int
    stage: Stage
    grid: tuple[int, int, int, int]

    @property
    def splits(self) -> int:
        """How many cores share the pixels of one result."""
        return self.grid[2] * self.grid[3]


def tile_blocks(shape: ConvShape) -> Pair:
    """Return how many blocks of input and of output channels the result has.

    With one group per channel, 16 channels of x are multiplied only by the same 16 channels of the
    gradient: the result is one block high, and only its diagonals are used.
    """
    return (shape.blocks[0], 1) if shape.groups > 1 else shape.blocks


def weight_plan(shape: ConvShape, chip: Chip) -> WeightPlan:
    """Return the plan with the least estimated time; raise `CapacityError` if none fits."""
    least_cycles = math.inf
    best_plan = None
    for tile in _tiles(shape, chip):
        cycles, plan = _best_grid(shape, chip, tile, least_cycles)
        if cycles < least_cycles:
            least_cycles = cycles
            best_plan = plan
    if best_plan is None:
        needed = max(1024 * shape.taps, 2 * _slot_bytes(shape, Stage(1, 1), 1, 1))
        raise errors.CapacityError(
            f"sums of {shape.taps} taps in L0C, and a row of pixels twice in L1: {needed} bytes",
            f"{chip.buffers['L0C']} and {chip.buffers['L1']} on {chip.name}",
            "use a smaller kernel, or narrower images",
        )
    return best_plan


def has_plan(shape: ConvShape, chip: Chip) -> bool:
    """Tell whether any plan fits the chip."""
    return next(_tiles(shape, chip), None) is not None


def _pixel_bytes(shape: ConvShape) -> int:
    """Return the bytes of a pixel of one channel block."""
    return isa.c0_of(shape.dtype) * DTYPE_BYTES[shape.dtype]


def _slot_bytes(shape: ConvShape, stage: Stage, m: int, c1: int) -> int:
    """Return the bytes of L1 that one slot of x and one of the gradient take."""
    rows, columns = axes_of(shape)
    # x has a plane for each phase of rows and of columns, the gradient one.
    x = len(rows.phases) * len(columns.phases) * c1 * image_pixels(shape, stage)
    return (x + m * grad_plane(shape, stage).pixels) * _pixel_bytes(shape)


def _tiles(shape: ConvShape, chip: Chip) -> Iterator[WeightPlan]:
    """Yield the tiles and stages that fit, on one core."""
    c_all, m_all = tile_blocks(shape)
    oh = shape.out_hw[0]
    stages = [Stage(i, oh) for i in range(1, shape.n + 1) if shape.n % i == 0]
    # 56 rows: bands of 1, 2, 4, 7, 8, 14 and 28 rows, too.
    stages += [Stage(1, r) for r in range(1, oh) if oh % r == 0]
    slot_fractals = min(chip.buffers["L0A"], chip.buffers["L0B"]) // (
        2 * isa.FRACTAL * _pixel_bytes(shape)
    )
    sum_bytes = isa.FRACTAL * isa.FRACTAL * DTYPE_BYTES[isa.ACCUMULATOR[shape.dtype]] * shape.taps
    max_blocks = (m_all, c_all if shape.groups == 1 else 1)
    sides_m = sorted({min(side, max_blocks[0]) for side in SIDES})
    sides_c = sorted({min(side, max_blocks[1]) for side in SIDES})
    for m, c1 in product(sides_m, sides_c):
        # Sums of a tile: 1024 bytes for each fractal and tap.
        if m * c1 * sum_bytes > chip.buffers["L0C"]:
            continue
        if m < m_all and c1 < c_all and 4 * m * c1 * sum_bytes < chip.buffers["L0C"]:
            continue  # a larger tile reads less
        for stage in stages:
            if 2 * _slot_bytes(shape, stage, m, c1) <= chip.buffers["L1"]:
                # Two slots take half of L0 each; beyond 16 fractals nothing is gained.
                depth = min(slot_fractals // m, 16, fractals_of(shape, stage))
                yield WeightPlan(m, c1, depth, stage, (1, 1, 1, 1))


def _sides(shape: ConvShape, tile: WeightPlan) -> tuple[int, int, int, int]:
    """Return what a grid divides: tiles of output and input channels, groups of images, bands."""
    (c_all, m_all) = tile_blocks(shape)
    stage = tile.stage
    tiles = isa.ceil_div(m_all, tile.m), isa.ceil_div(c_all, tile.c1)
    return *tiles, shape.n // stage.images, shape.out_hw[0] // stage.rows


def _grids(cores: int, sides: tuple[int, int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield grids of cores along the four `sides`; rows and columns divide the number of cores."""
    sizes = [d for d in range(1, cores + 1) if cores % d == 0]
    *tiles, groups, bands = sides
    for rows, columns in product(sizes, sizes):
        if rows <= tiles[0] and columns <= tiles[1] and rows * columns <= cores:
            pixel_cores = cores // (rows * columns)
            image_cores = min(pixel_cores, groups)
            # All cores on images, or fewer, so that bands of rows keep the others busy.
            fewer_images = (d for d in sizes if d < image_cores and d * bands >= pixel_cores)
            for images in (image_cores, *fewer_images):
                yield rows, columns, images, min(bands, pixel_cores // images)


def _cube_cycles(shape: ConvShape, chip: Chip, tile: WeightPlan) -> int:
    """Return the cycles of the cube or MTE1 in a stage, whichever is longer."""
    n = tile.c1 * shape.taps
    size = fractals_of(shape, tile.stage)
    steps = isa.ceil_div(size, tile.depth)
    across = isa.ceil_div(n, columns_per_step(chip, tile))
    # Each mmad has start-up cycles; a product of two fractals takes one cycle.
    cube = steps * across * (chip.cube_head_cycles + 4) + tile.m * n * size
    mte1 = steps * (n + tile.m) * chip.path("L1", "L0B").startup_cycles
    return max(cube, mte1 + size * (2 * n + tile.m) + steps * across * 4)


def _best_grid(
    shape: ConvShape, chip: Chip, tile: WeightPlan, least_cycles: float
) -> tuple[float, WeightPlan]:
    """Return the least time of a tile on any grid, and the plan.

    A time is an estimate for the busiest core: the longest of cube, MTE1 and MTE2 in each stage,
    and stores. No grid can divide cube and MTE1 better than evenly: if even that time exceeds
    `least_cycles`, the search stops.
    """
    cube_cycles = _cube_cycles(shape, chip, tile)
    sides = _sides(shape, tile)
    (c_all, m_all) = tile_blocks(shape)
    if isa.ceil_div(math.prod(sides), chip.core_count) * cube_cycles >= least_cycles:
        return least_cycles, tile
    # 1024 bytes of fp32 for each fractal, about 64 bytes a cycle.
    stores = tile.m * tile.c1 * shape.taps * 1024 / 64
    loaded_bytes = _stage_pixels(shape, tile) * _pixel_bytes(shape)
    oh, ow = shape.out_hw
    pixels = shape.n * (c_all * shape.h * shape.w + shape.blocks[1] * oh * ow)
    path = chip.path("GM", "L1").rate_bytes_per_cycle
    least_yet = least_cycles
    best = tile
    for grid in _grids(chip.core_count, sides):
        # The busiest core's share along output channels, input channels, images and bands.
        m_tiles, c_tiles, groups, bands = map(isa.ceil_div, sides, grid)
        tiles = m_tiles * c_tiles
        turns = groups * bands
        cores = math.prod(grid)
        miss_share = min(1.0, pixels * _pixel_bytes(shape) / (cores * tiles * turns * loaded_bytes))
        # Cores share the rates of L2 and of memory.
        l2 = min(path, chip.shared_rate_bytes_per_cycle("L2", cores))
        memory = min(l2, chip.shared_rate_bytes_per_cycle("memory", cores))
        mte2 = loaded_bytes * (miss_share / memory + (1 - miss_share) / l2) + 100
        total = tiles * (turns * max(cube_cycles, mte2) + stores) + mte2
        # A second phase reads every partial sum and writes the total.
        splits = grid[2] * grid[3]
        if splits > 1:
            total += PHASE_CYCLES + splits * c_all * shape.taps * m_all * 1024 / (40 * cores)
        if total < least_yet:
            least_yet = total
            best = replace(tile, grid=grid)
    return least_yet, best


def columns_per_step(chip: Chip, plan: WeightPlan) -> int:
    """Return the columns of fractals (one tap of a channel block each) in one slot of L0B."""
    return max(1, chip.buffers["L0B"] // (2 * 512 * plan.depth))


def _stage_pixels(shape: ConvShape, plan: WeightPlan) -> int:
    """Return the pixels of 16 channels that a stage loads."""
    rows, columns = axes_of(shape)
    width = sum(p.high - p.low for p in columns.phases)
    height = sum(min(p.high - p.low, plan.stage.rows + rows.reach) for p in rows.phases)
    pixels_per_image = plan.c1 * width * height + plan.m * plan.stage.rows * columns.outputs
    return plan.stage.images * pixels_per_image
