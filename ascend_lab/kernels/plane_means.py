"""Means over the pixels of each channel, on the cube: a product with a matrix of ones.

In NC1HWC0 a plane (one channel block of one image) is a matrix, a row of 16 channels per pixel. The
cube sums its rows, 16 pixels a cycle, while the vector unit needs casts and additions in fp32:

    sums (1, 16 channels) = ones (1, pixels) @ x (pixels, 16 channels)     for each plane

15 of 16 rows of the cube repeat the first: memory is slower still. The ones stay in L0A, planes are
turned on their way to L0B, ragged ones end in zeros that are loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ascend_lab.chip import Chip
from ascend_lab.isa import Affine, KernelBuilder, Launch, Program, Share, spread
from ascend_lab.kernels.epilogue import Epilogue, Step
from ascend_lab.kernels.epilogue_emit import Finish, Sizes, drain, new_finish
from ascend_lab.kernels.gemm_schedule import FRACTAL, up
from ascend_lab.kernels.tiles import Area, Span, chunks, repeat, segments, sum_queue

AREA = FRACTAL * FRACTAL
LOADED = 64
"""Fractals of a load, and of a product, at most."""


@dataclass(frozen=True, slots=True)
class PlaneMeans:
    """`planes` of `pixels` x 16 channels in a 2-byte format that the cube multiplies."""

    planes: int
    pixels: int
    dtype: str = "fp16"

    @property
    def fractals(self) -> int:
        """Fractals of a plane."""
        return up(self.pixels, FRACTAL)


def ones_and_zeros(dtype: DTypeLike) -> NDArray[Any]:
    """Return the tensor `ones`: a fractal of ones, then one of zeros."""
    return np.repeat(np.array([1, 0], dtype), AREA)


def plane_means_launch(job: PlaneMeans, chip: Chip) -> Launch:
    """Return the kernel: x and ones (`ones_and_zeros`) to y (planes, 16), planes over cores."""
    sizes = chunks(job.planes, 1, chip.core_count)
    return spread("plane_means", {"core": sizes}, lambda own: _Writer(job, chip, own).program())


class _Writer:
    """The program of cores that own equally many planes."""

    def __init__(self, job: PlaneMeans, chip: Chip, own: Share) -> None:
        """Allocate everything."""
        self.job, self.own, self.k = job, own, KernelBuilder("plane_means", chip)
        k, dtype = self.k, job.dtype
        self.group = min(own[0], FRACTAL)
        room = min(chip.buffers["L0A"], chip.buffers["L0B"] // 2, chip.buffers["L1"] // 8)
        most = min(LOADED, room // (2 * AREA))
        self.together = min(max(1, most // job.fractals), self.group)
        self.depth = min(most, job.fractals)
        size = self.together * self.depth * AREA
        self.x = k.tensor("x", dtype, job.planes * job.pixels * FRACTAL)
        self.ones = k.tensor("ones", dtype, 2 * AREA)
        self.y = k.tensor("y", dtype, job.planes * FRACTAL)
        self.loaded = k.queue("x_l1", "L1", dtype, size, src="MTE2", dst="MTE1", depth=4)
        self.fed = k.queue("x_l0", "L0B", dtype, size, src="MTE1", dst="M")
        self.rows = k.buffer("ones_l1", "L1", dtype, AREA)
        self.left = k.buffer("ones_l0", "L0A", dtype, self.depth * AREA)
        self.sums = sum_queue(k, "sums", "fp32", 1, self.group)
        steps = (Step("vmuls", ("sums",), 1.0 / job.pixels), Step("vconv", (0,), None, dtype))
        finish = new_finish(k, Epilogue((), steps, dtype), "fp32", Sizes(1, self.group, 1, 1, 0))
        assert finish is not None
        self.finish: Finish = finish

    def program(self) -> Program:
        """Sum the planes of a core, 16 at a time."""
        k, (count, pitch, cores) = self.k, self.own
        first = k.param("core", cores) * pitch
        k.copy(self.rows.region(0, AREA), self.ones.region(0, AREA))
        k.barrier()
        again = (self.depth, AREA)
        k.load2d(self.left.region(0, again), self.rows.region(0, again, (0, 1)))
        k.barrier()
        for start, planes in segments(k, "group", count, self.group):
            self._group(first + start, planes)
        return k.finish()

    def _group(self, first: Affine, planes: int) -> None:
        """Sum up to 16 planes from `first` on, and store their means."""
        sums = self.sums.alloc()
        for at in range(0, planes, self.together):
            some = range(min(self.together, planes - at))
            for start, depth in self._parts():
                self._feed(first + at, len(some), start, depth)
                tile = self.fed.dequeue()
                a = self.left.region(0, (1, depth, FRACTAL, FRACTAL))
                for i in some:
                    b = tile.region(i * depth * AREA, (depth, 1, FRACTAL, FRACTAL))
                    c = sums.region((at + i) * AREA, (1, 1, FRACTAL, FRACTAL))
                    self.k.mmad(c, a, b, accumulate=start)
                self.fed.free()
        self.sums.enqueue()
        area = Area(first * FRACTAL, ((0, Affine(), 1),), planes, 1, 1, 1, 1)
        drain(self.finish, self.sums, self.y, area, Affine(), None)

    def _parts(self) -> Iterator[Span]:
        """Yield (first fractal, fractals) of what is loaded of a plane at once."""
        whole = self.job.pixels // FRACTAL // self.depth
        if self.job.fractals == self.depth:
            yield Affine(), self.depth
            return
        with repeat(self.k, "part", whole) as part:
            yield part * self.depth, self.depth
        if rest := self.job.fractals - whole * self.depth:
            yield Affine(whole * self.depth), rest

    def _feed(self, first: Affine, planes: int, start: Affine, depth: int) -> None:
        """Bring a part of some planes to L0B, turned; behind ragged ones come zeros."""
        k, pixels = self.k, self.job.pixels
        left = pixels if start.terms else pixels - start.const * FRACTAL
        run, missing = min(depth * FRACTAL, left) * FRACTAL, max(depth * FRACTAL - left, 0)
        tile, line = self.loaded.alloc(), depth * AREA
        source = (first * pixels + start * FRACTAL) * FRACTAL
        window = self.x.region(source, (planes, run), (pixels * FRACTAL, 1))
        k.copy(tile.region(0, (planes, run), (line, 1)), window)
        if missing:
            zeros = self.ones.region(AREA, (planes, missing * FRACTAL), (0, 1))
            k.copy(tile.region(run, zeros.sizes, (line, 1)), zeros)
        self.loaded.enqueue()
        before, after = self.loaded.dequeue(), self.fed.alloc()
        whole = (planes * depth, FRACTAL, FRACTAL)
        k.load2d(after.region(0, whole), before.region(0, whole, (AREA, 1, FRACTAL)))
        self.loaded.free()
        self.fed.enqueue()
