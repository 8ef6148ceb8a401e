"""Two convolutions in a row as one problem: what each does, how they are divided, one on a core."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import FRACTAL, Affine, Buffer, KernelBuilder, Queue, Region, Tile, up
from ascend_lab.operators.kernels import conv_shape, epilogue_emit, tiles
from ascend_lab.operators.kernels.conv_tiles import WindowFeed
from ascend_lab.operators.kernels.conv_windows import Window, tiles_per_image, window_of
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, check_epilogue
from ascend_lab.operators.kernels.epilogue_plan import CubeBias
from ascend_lab.operators.kernels.tiles import ResidentFeed, Sums, accumulate, sums_region

SUMS = "fp32"
Job = tuple[conv_shape.ConvShape, Epilogue | None]


@dataclass(frozen=True, slots=True)
class Tandem:
    """Both convolutions, and what is done to the sums of each.

    With `means` the mean of each channel is written, too.
    """

    point: conv_shape.ConvShape
    depth: conv_shape.ConvShape
    after_point: Epilogue | None = None
    after_depth: Epilogue | None = None
    means: bool = False

    @property
    def halves(self) -> tuple[Job, Job]:
        """Each convolution with its epilogue."""
        return (self.point, self.after_point), (self.depth, self.after_depth)

    def of(self, images: int) -> Tandem:
        """Return it with so many images as one, whose rows take turns."""
        n = self.depth.n // images
        point, depth = (replace(s, n=n, mixed=images) for s in (self.point, self.depth))
        return replace(self, point=point, depth=depth)


@dataclass(frozen=True, slots=True)
class TandemSchedule:
    """How a tandem is divided.

    `grid`: cores over channel blocks, images and output rows. A core takes its rows in `bands`, and
    `blocks` channel blocks at once; `tile` is fractals of output pixels. What stays, `stay`, is
    "rows" of an image or "weights" of channel blocks. So many `images` are one: tiles of 16 pixels
    go on in the next, and there is less to begin.
    """

    grid: tuple[int, int, int]
    bands: int
    blocks: int
    tile: int
    stay: str
    images: int = 1


def check_tandem(tandem: Tandem, chip: Chip) -> None:
    """Raise `UnsupportedError` for other convolutions, and chips without a way back to L1."""
    point = tandem.point
    depth = tandem.depth
    lone = (point.r, point.s, point.stride, point.pad, point.groups, point.stored, point.lanes)
    afters = [epilogue for _, epilogue in tandem.halves if epilogue]
    kinds = {point.dtype, point.out_dtype, depth.dtype, depth.out_dtype}
    kinds |= {epilogue.out_dtype for epilogue in afters}
    first = tandem.after_point
    single = (depth.groups, depth.c, depth.k, min(depth.pads) >= 0) == (*(point.k,) * 3, True)
    needed = {
        f"cores that bring sums through UB to L1, not {chip.name}": chip.combined,
        "a 1x1 convolution with a stride of 1": lone == (1, 1, 1, 0, 1, (0, 1), 0),
        "one convolution, nothing beside it": point.beside is None,
        "each channel it writes read alone": single,
        "images as it writes them": (depth.n, depth.h, depth.w) == (point.n, *point.out_hw),
        "fp16 all the way": kinds == {"fp16"},
        "no operand per element in between": not (first and first.of_kind("tile")),
        "flags for six slots of the cube, for means": chip.event_ids >= 6 or not tandem.means,
    }
    for what, fits in needed.items():
        if not fits:
            raise UnsupportedError(f"for a tandem {what}", f"{point}, {depth}", "use two kernels")
    for epilogue in afters:
        check_epilogue(epilogue, chip, SUMS)


def check_division(tandem: Tandem, chip: Chip, schedule: TandemSchedule) -> None:
    """Raise `InputError` for a schedule that divides a tandem into nothing, or over more cores."""
    shape = tandem.depth
    s = schedule
    sizes = (*s.grid, s.bands, s.blocks, s.tile, s.images)
    whole = all(type(n) is int for n in sizes) and len(s.grid) == 3
    if not whole or s.images not in ways_of(shape):
        needed = f"{', '.join(map(str, ways_of(shape)))} images as one"
        raise InputError(needed, str(s.images), "take one at a time")
    most = (shape.blocks[1], shape.n // s.images, shape.out_hw[0])
    fits = whole and all(1 <= g <= m for g, m in zip(s.grid, most, strict=True))
    if tandem.means and s.grid[2:] != (1,):
        raise InputError("all rows of an image on a core, for means", str(s.grid), "divide images")
    if not fits or math.prod(s.grid) > chip.core_count:
        needed = f"a grid of at most {most} (channel blocks, images, rows), {chip.core_count} cores"
        raise InputError(needed, str(s.grid), "divide less")
    if min(s.bands, s.blocks, s.tile) < 1 or s.stay not in ("rows", "weights"):
        needed = "at least 1 band, block and fractal; 'rows' or 'weights' that stay"
        raise InputError(needed, f"{s.bands}, {s.blocks}, {s.tile}, {s.stay!r}", "mend it")


def ways_of(shape: conv_shape.ConvShape) -> tuple[int, ...]:
    """Return how many images may be one: to the cube windows are dilated so many times."""
    least = max(shape.dilations[0], *shape.pads[:2])
    most = conv_shape.MOST_SPREAD // least if shape.strides[0] == 1 else 1
    return tuple(m for m in range(1, min(shape.n, most) + 1) if shape.n % m == 0)


@dataclass(frozen=True, slots=True)
class Band:
    """Output rows from `low` on, as if the image were what these see of it, from `first` on.

    Of several images as one these are rows of each. `tile`: fractals of pixels of a tile in
    between, of which there are no more than behind.
    """

    low: int
    first: int
    depth: conv_shape.ConvShape
    tile: int

    @property
    def pixels(self) -> int:
        """Pixels of a plane between the two."""
        return self.depth.h * self.depth.w * self.depth.mixed


def bands_of(tandem: Tandem, rows: tuple[int, int], schedule: TandemSchedule) -> list[Band]:
    """Return rows low .. high-1 in bands; raise `UnsupportedError` if one sees no image."""
    (low, high) = rows
    shape = tandem.depth
    one = replace(shape, mixed=1)
    each = up(high - low, schedule.bands)
    ow = shape.out_hw[1]
    found = []
    for at in range(low, high, each):
        seen = window_of(one, at * ow, (min(at + each, high) - at) * ow).rows
        if seen.skipped:
            raise UnsupportedError("rows of the image", f"rows {at} see none", "two kernels")
        depth = replace(shape, n=1, h=seen.count, pad=(seen.before, seen.after, *shape.pads[2:]))
        turns = tiles_per_image(depth, schedule.tile)
        pixels = seen.count * shape.w * shape.mixed
        found.append(Band(at, seen.first, depth, up(up(pixels, FRACTAL), turns)))
    return found


# -- one of the two on a core ---------------------------------------------------------------------
AREA = FRACTAL * FRACTAL


class Half:
    """One of the two convolutions on a core: weights, bias, its way out of L0C."""

    def __init__(
        self,
        k: KernelBuilder,
        job: Job,
        own: tuple[int, int],
        tile: int,
        stored: int,
        shares: int,
    ) -> None:
        """Allocate; `own` are channel blocks of the core, and those of them that go together.

        The second half reads each block alone, and takes one of two `shares` of what is left of UB
        at most.
        """
        (shape, epilogue) = job
        (count, blocks) = own
        self.k = k
        self.shape = shape
        self.count = count
        self.blocks = blocks
        self.near: Queue
        self.single = shares > 1
        self.prefix = "depth_" if self.single else ""
        self.deep = shape.taps * (1 if self.single else shape.blocks[0])
        self.weight = k.tensor(f"{self.prefix}weight", "fp16", self.deep * shape.blocks[1] * AREA)
        bias = epilogue.bias if epilogue else ""
        self.fractals = (self.deep + bool(bias)) * blocks
        self.bias = CubeBias.make(k, bias, shape, 1 if self.single else count) if bias else None
        whole = (count, shape.blocks[1], stored)
        taken = k.used_bytes("UB")
        sizes = epilogue_emit.Sizes(tile, blocks, *whole, self.prefix, shares, taken)
        finish = epilogue_emit.new_finish(k, epilogue or PLAIN, SUMS, sizes)
        assert finish is not None
        self.finish = finish

    def load_bias(self, col: Affine) -> None:
        """Bring the bias of the core's blocks, which begin at `col`, to L1."""
        if self.bias and self.single:
            self.bias.load(self.count, False, col, Affine())
        elif self.bias:
            self.bias.load(1, False, Affine(), col)

    def weights(self, first: Affine) -> Region:
        """Return the weights of the blocks from `first` on."""
        start = first * AREA
        size = self.blocks * AREA
        n1 = self.shape.blocks[1]
        if self.single:
            return self.weight.region(start * self.deep, (1, self.deep * size))
        return self.weight.region(start, (self.deep, size), (n1 * AREA, 1))

    def add(
        self,
        acc: Queue,
        feed: tuple[Queue, Buffer | None],
        window: Window,
        view: Region,
        near: Tile,
    ) -> None:
        """Sum up a tile of all blocks of a unit; `feed`: what L0A takes, and ones for the bias."""
        (left, ones) = feed
        k = self.k
        m = window.fractals
        count = self.blocks
        c = acc.alloc()
        loads = up(self.deep, left.buffer.elements // (m * AREA))
        tile_depth = up(self.deep, loads)  # all as deep, about
        wide, units = (1, 1) if self.single else (count, self.shape.blocks[0])
        with tiles.repeat(k, "block", count if self.single else 1) as j:
            one = replace(view, offset=view.offset + j * view.strides[0])
            x = WindowFeed(k, left, m, self.shape, window, one)
            weights = ResidentFeed(near, wide, j * (self.deep * AREA))
            sums = Sums(sums_region(c, m, wide, j * (m * AREA)))
            accumulate(k, sums, x, weights, units * self.shape.taps, tile_depth)
        if self.bias and ones:
            a = ones.region(0, (m, 1, FRACTAL, FRACTAL))
            b = near.region(self.deep * count * AREA, (1, count, FRACTAL, FRACTAL))
            k.mmad(c.region(0, (count, m, FRACTAL, FRACTAL)), a, b, accumulate=1)
        acc.enqueue()
