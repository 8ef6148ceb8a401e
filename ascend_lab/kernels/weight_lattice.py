"""Where images lie in L1 for the weight gradient: every tap a shifted view of flat pixels.

One axis at a time. Output o and tap i meet at x[o stride + i dilation - pad]. Split by the
remainder p = (i dilation) mod stride into phases; in phase p entry a is x[a stride + p - pad], and
the tap reads entry o + (i dilation) div stride: a shift, whatever the stride. Entries beyond the
image are zeros. Neighbouring lines share them where one's zeros at the end can be the next one's
at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gemm_schedule import up


@dataclass(frozen=True, slots=True)
class Phase:
    """Entries low .. high-1 of a phase lie in the image, the first of them at pixel `first`."""

    low: int
    high: int
    first: int

    def inside(self, start: int, count: int) -> tuple[int, int]:
        """Return which of `count` entries from `start` on lie in the image, from `start`."""
        low = min(max(self.low - start, 0), count)
        return low, max(min(self.high - start, count), low)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: outputs, phases, and for each tap its phase and shift.

    `pitch` entries from line to line of whole axes; `reach` is the largest shift.
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
    sizes, kernel = (shape.h, shape.w), (shape.r, shape.s)
    top, _, left, _ = shape.pads
    rows, columns = (
        _axis(shape.out_hw[i], sizes[i], kernel[i], shape.strides[i], shape.dilations[i], pad)
        for i, pad in enumerate((top, left))
    )
    return rows, columns


def _axis(outputs: int, size: int, kernel: int, stride: int, dilation: int, pad: int) -> Axis:
    residues = sorted({i * dilation % stride for i in range(kernel)})
    taps = tuple(
        (residues.index(i * dilation % stride), i * dilation // stride) for i in range(kernel)
    )
    reach = max(shift for _, shift in taps)
    phases, pitch, seen = [], outputs, outputs + reach
    for p in residues:
        low = min(max(up(pad - p, stride), 0), seen)
        high = max(min(up(size + pad - p, stride), seen), low)
        phases.append(Phase(low, high, low * stride + p - pad))
        pitch = max(pitch, high, seen - low)
    return Axis(outputs, stride, tuple(phases), taps, pitch, reach)


@dataclass(frozen=True, slots=True)
class Gap:
    """`counts[0]` times `counts[1]` runs of `length` pixels, `steps` apart, from `start` on."""

    start: int
    counts: tuple[int, int]
    steps: tuple[int, int]
    length: int


@dataclass(frozen=True, slots=True)
class Plane:
    """Rectangles of a flat plane of `pixels`: `images` of them, `image_pitch` apart.

    Each is rows rows[0] .. rows[1]-1 of `pitch` pixels, columns columns[0] .. columns[1]-1.
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
        last = self.first + (count - 1) * self.pitch + width
        between = self.image_pitch - (last - self.first)
        end = last + (self.images - 1) * self.image_pitch
        steps = (self.image_pitch, self.pitch)
        found = [
            Gap(0, (1, 1), (0, 0), self.first),
            Gap(self.first + width, (self.images, count - 1), steps, self.pitch - width),
            Gap(last, (self.images - 1, 1), steps, between),
            Gap(end, (1, 1), (0, 0), self.pixels - end),
        ]
        return [g for g in found if g.length > 0 and min(g.counts) > 0]
