"""Two convolutions in a row as one problem: what each does, how they are divided, bands of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ascend_lab.chip import Chip
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.conv_windows import tiles_per_image, window_of
from ascend_lab.kernels.epilogue import SUMS as IN
from ascend_lab.kernels.epilogue import Epilogue, Step, check_epilogue
from ascend_lab.kernels.gemm_schedule import FRACTAL, up

SUMS = "fp32"
Job = tuple[ConvShape, Epilogue | None]
PLAIN = Epilogue((), (Step("vconv", (IN,), None, "fp16"),), "fp16")
"""What is done to sums where nothing else is: they are rounded."""


@dataclass(frozen=True, slots=True)
class Tandem:
    """Both convolutions, and what is done to the sums of each."""

    point: ConvShape
    depth: ConvShape
    after_point: Epilogue | None = None
    after_depth: Epilogue | None = None

    @property
    def halves(self) -> tuple[Job, Job]:
        """Each convolution with its epilogue."""
        return (self.point, self.after_point), (self.depth, self.after_depth)


@dataclass(frozen=True, slots=True)
class TandemSchedule:
    """How a tandem is divided.

    `grid`: cores over channel blocks, images and output rows. A core takes its rows in `bands`, and
    `blocks` channel blocks at once; `tile` is fractals of output pixels. What stays, `stay`, is
    "rows" of an image or "weights" of channel blocks.
    """

    grid: tuple[int, int, int]
    bands: int
    blocks: int
    tile: int
    stay: str


def check_tandem(tandem: Tandem, chip: Chip) -> None:
    """Raise `UnsupportedError` for other convolutions, and chips without a way back to L1."""
    point, depth = tandem.point, tandem.depth
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
    }
    for what, fits in needed.items():
        if not fits:
            raise UnsupportedError(f"for a tandem {what}", f"{point}, {depth}", "use two kernels")
    for epilogue in afters:
        check_epilogue(epilogue, chip, SUMS)


def check_division(tandem: Tandem, chip: Chip, schedule: TandemSchedule) -> None:
    """Raise `InputError` for a schedule that divides a tandem into nothing, or over more cores."""
    shape, s = tandem.depth, schedule
    most = (shape.blocks[1], shape.n, shape.out_hw[0])
    whole = all(type(n) is int for n in (*s.grid, s.bands, s.blocks, s.tile)) and len(s.grid) == 3
    fits = whole and all(1 <= g <= m for g, m in zip(s.grid, most, strict=True))
    if not fits or math.prod(s.grid) > chip.core_count:
        needed = f"a grid of at most {most} (channel blocks, images, rows), {chip.core_count} cores"
        raise InputError(needed, str(s.grid), "divide less")
    if min(s.bands, s.blocks, s.tile) < 1 or s.stay not in ("rows", "weights"):
        needed = "at least 1 band, block and fractal; 'rows' or 'weights' that stay"
        raise InputError(needed, f"{s.bands}, {s.blocks}, {s.tile}, {s.stay!r}", "mend it")


@dataclass(frozen=True, slots=True)
class Band:
    """Output rows from `low` on, as if the image were what these see of it, from `first` on.

    `tile`: fractals of pixels of a tile in between, of which there are no more than behind.
    """

    low: int
    first: int
    depth: ConvShape
    tile: int

    @property
    def pixels(self) -> int:
        """Pixels of a plane between the two."""
        return self.depth.h * self.depth.w


def bands_of(tandem: Tandem, rows: tuple[int, int], schedule: TandemSchedule) -> list[Band]:
    """Return rows low .. high-1 in bands; raise `UnsupportedError` if one sees no image."""
    (low, high), shape, ow = rows, tandem.depth, tandem.depth.out_hw[1]
    each, found = up(high - low, schedule.bands), []
    for at in range(low, high, each):
        seen = window_of(shape, at * ow, (min(at + each, high) - at) * ow).rows
        if seen.skipped:
            raise UnsupportedError("rows of the image", f"rows {at} see none", "two kernels")
        depth = replace(shape, n=1, h=seen.count, pad=(seen.before, seen.after, *shape.pads[2:]))
        turns = tiles_per_image(depth, schedule.tile)
        found.append(Band(at, seen.first, depth, up(up(seen.count * shape.w, FRACTAL), turns)))
    return found
