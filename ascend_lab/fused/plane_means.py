"""The mean of each channel of an image, found by the cube as a product with ones.

    otherwise      the vector unit casts to fp32 and adds, 64 numbers in 4 cycles
    here           sums (1, 16 channels) = ones (1, pixels) @ x (pixels, 16 channels)
    saved          the cube sums 16 pixels of 16 channels per cycle, about 16 times as many

A plane is one channel block of one image, a matrix with a row of 16 channels per pixel. 15 of the
cube's 16 rows repeat the first one, which costs nothing: loading takes longer anyway. The ones stay
in L0A; planes are transposed on their way to L0B, and padded with zeros to whole fractals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import (
    FRACTAL,
    Affine,
    Kernel,
    KernelBuilder,
    Launch,
    Program,
    Share,
    as_kernel,
    ceil_div,
    spread,
)
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.kernels.epilogue_emit import Finish, Sizes, drain, new_finish
from ascend_lab.operators.kernels.planes import C0
from ascend_lab.operators.kernels.tiles import Area, Span, chunks, repeat, segments, sum_queue
from ascend_lab.operators.ops import formats
from ascend_lab.operators.ops.expressions import NARROW
from ascend_lab.operators.ops.operator import Call, Template

AREA = FRACTAL * FRACTAL
LOAD_FRACTALS = 64
"""Fractals of a load, and of a product, at most."""


@dataclass(frozen=True, slots=True)
class PlaneMeans:
    """The job: `planes` planes of `pixels` x 16 channels in a 2-byte format of the cube."""

    planes: int
    pixels: int
    dtype: str = "fp16"

    @property
    def fractals(self) -> int:
        """Fractals of a plane."""
        return ceil_div(self.pixels, FRACTAL)


def ones_and_zeros(dtype: DTypeLike) -> NDArray[Any]:
    """Return the tensor `ones`: a fractal of ones, then one of zeros."""
    return np.repeat(np.array([1, 0], dtype), AREA)


def plane_means_launch(job: PlaneMeans, chip: Chip) -> Launch:
    """Return the kernel from x and `ones` (see `ones_and_zeros`) to y (planes, 16)."""
    sizes = chunks(job.planes, 1, chip.core_count)
    return spread("plane_means", {"core": sizes}, lambda share: _Writer(job, chip, share).program())


class _Writer:
    """Writes the program of the cores that own equally many planes."""

    def __init__(self, job: PlaneMeans, chip: Chip, share: Share) -> None:
        """Allocate everything."""
        self.job = job
        self.share = share
        self.k = KernelBuilder("plane_means", chip)
        k = self.k
        dtype = job.dtype
        self.group = min(share[0], FRACTAL)
        # L0A holds the ones once; L0B has two slots for planes, L1 has four.
        room = min(chip.buffers["L0A"], chip.buffers["L0B"] // 2, chip.buffers["L1"] // 8)
        max_fractals = min(LOAD_FRACTALS, room // (2 * AREA))
        self.planes_per_load = min(max(1, max_fractals // job.fractals), self.group)
        self.depth = min(max_fractals, job.fractals)
        size = self.planes_per_load * self.depth * AREA
        self.x = k.tensor("x", dtype, job.planes * job.pixels * FRACTAL)
        self.ones = k.tensor("ones", dtype, 2 * AREA)
        self.y = k.tensor("y", dtype, job.planes * FRACTAL)
        self.loaded = k.queue("x_l1", "L1", dtype, size, src="MTE2", dst="MTE1", depth=4)
        self.right = k.queue("x_l0", "L0B", dtype, size, src="MTE1", dst="M")
        self.ones_l1 = k.buffer("ones_l1", "L1", dtype, AREA)
        self.ones_l0 = k.buffer("ones_l0", "L0A", dtype, self.depth * AREA)
        self.sums = sum_queue(k, "sums", "fp32", 1, self.group)
        # The mean is the fp32 sum times 1 / pixels, rounded once.
        steps = (Step("vmuls", ("sums",), 1.0 / job.pixels), Step("vconv", (0,), None, dtype))
        finish = new_finish(k, Epilogue((), steps, dtype), "fp32", Sizes(1, self.group, 1, 1, 0))
        assert finish is not None
        self.finish: Finish = finish

    def program(self) -> Program:
        """Return the program that sums the planes of a core, 16 at a time."""
        k = self.k
        (count, pitch, cores) = self.share
        first_plane = k.param("core", cores) * pitch
        k.copy(self.ones_l1.region(0, AREA), self.ones.region(0, AREA))
        k.barrier()
        # A stride of 0 repeats the fractal of ones in L0A.
        repeated = (self.depth, AREA)
        k.load2d(self.ones_l0.region(0, repeated), self.ones_l1.region(0, repeated, (0, 1)))
        k.barrier()
        for start, planes in segments(k, "group", count, self.group):
            self._group(first_plane + start, planes)
        return k.finish()

    def _group(self, first_plane: Affine, planes: int) -> None:
        """Sum up to 16 planes from `first_plane` on, and store their means."""
        sums = self.sums.alloc()
        for at in range(0, planes, self.planes_per_load):
            indices = range(min(self.planes_per_load, planes - at))
            for start, depth in self._parts():
                self._feed(first_plane + at, len(indices), start, depth)
                tile = self.right.dequeue()
                # 16 equal rows of ones: every row of the result has the sums, and one is stored.
                a = self.ones_l0.region(0, (1, depth, FRACTAL, FRACTAL))
                for i in indices:
                    b = tile.region(i * depth * AREA, (depth, 1, FRACTAL, FRACTAL))
                    c = sums.region((at + i) * AREA, (1, 1, FRACTAL, FRACTAL))
                    self.k.mmad(c, a, b, accumulate=start)
                self.right.free()
        self.sums.enqueue()
        # A plane's mean is stored like a plane of one pixel.
        area = Area(
            base=first_plane * FRACTAL,
            pieces=((0, Affine(), 1),),
            blocks=planes,
            plane=1,
            step=1,
            fractals=1,
            pixels=1,
        )
        drain(self.finish, self.sums, ((self.y, area),), Affine(), None)

    def _parts(self) -> Iterator[Span]:
        """Yield (first fractal, fractals) for each part of a plane that is loaded at once."""
        full_parts = self.job.pixels // FRACTAL // self.depth
        if self.job.fractals == self.depth:
            yield Affine(), self.depth
            return
        # A plane of 196 pixels is 13 fractals; in parts of 8 it is 8 fractals and 5 fractals.
        with repeat(self.k, "part", full_parts) as part:
            yield part * self.depth, self.depth
        if remainder := self.job.fractals - full_parts * self.depth:
            yield Affine(full_parts * self.depth), remainder

    def _feed(self, first_plane: Affine, planes: int, start: Affine, depth: int) -> None:
        """Load `depth` fractals of each plane to L0B, transposed, zeros behind the last pixel."""
        k = self.k
        pixels = self.job.pixels
        pixels_left = pixels if start.terms else pixels - start.const * FRACTAL
        # Elements of the part that are pixels; zeros fill the last fractal.
        run = min(depth * FRACTAL, pixels_left) * FRACTAL
        # A plane of 196 pixels ends 12 pixels before its 13th fractal does.
        missing = max(depth * FRACTAL - pixels_left, 0)
        tile = self.loaded.alloc()
        line = depth * AREA
        source = (first_plane * pixels + start * FRACTAL) * FRACTAL
        window = self.x.region(source, (planes, run), (pixels * FRACTAL, 1))
        k.copy(tile.region(0, (planes, run), (line, 1)), window)
        if missing:
            zeros = self.ones.region(AREA, (planes, missing * FRACTAL), (0, 1))
            k.copy(tile.region(run, zeros.sizes, (line, 1)), zeros)
        self.loaded.enqueue()
        loaded = self.loaded.dequeue()
        right = self.right.alloc()
        sizes = (planes * depth, FRACTAL, FRACTAL)
        # Each fractal is transposed on its way: the cube wants (pixels, channels) by columns.
        k.load2d(right.region(0, sizes), loaded.region(0, sizes, (AREA, 1, FRACTAL)))
        self.loaded.free()
        self.right.enqueue()


# -- the template ----------------------------------------------------------------------------------
def _applies(call: Call, chip: Chip) -> bool:
    """Tell whether the cube adds the pixels: it supports the format, and most cores get a plane.

    There are n * c1 planes; the cube is used from a quarter of the number of cores on.
    """
    (n, c, h, w) = call.shapes[0]
    dtype = call.dtypes[0]
    fills_most_cores = 4 * n * ceil_div(c, C0) >= chip.core_count and h * w > 1
    return fills_most_cores and dtype in chip.cube and dtype in NARROW


def _kernel(call: Call, chip: Chip) -> Kernel:
    """Return the kernel of a call."""
    n, c, h, w = call.shapes[0]
    job = PlaneMeans(n * ceil_div(c, C0), h * w, call.dtypes[0])
    return as_kernel(plane_means_launch(job, chip))


def _extra(call: Call) -> dict[str, Any]:
    return {"ones": ones_and_zeros(formats.numpy_type(call.dtypes[0]))}


TEMPLATES = [
    (
        "global_avg_pool",
        Template(_kernel, ("x",), "NC1HWC0", "NC1HWC0", extra=_extra, applies=_applies),
    )
]
