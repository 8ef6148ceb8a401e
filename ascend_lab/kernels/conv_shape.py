"""What to convolve and how to tile it: problem, window geometry, legality."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_schedule import (
    ACCUMULATOR,
    FRACTAL,
    GemmSchedule,
    GemmShape,
    check_schedule,
    up,
)


@dataclass(frozen=True, slots=True)
class ConvShape:
    """An NCHW convolution: batch, channels, image, kernel count and size, stride, padding."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int = 1
    pad: int = 0
    dtype: str = "fp16"
    out_dtype: str = ""

    def __post_init__(self) -> None:
        """Check sizes; the default output is what a next layer reads: fp16, or int32 sums."""
        sizes = (self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.stride)
        if min(sizes) < 1 or self.pad < 0 or max(sizes) > 1 << 20:
            raise InputError(
                "sizes and stride from 1 to 1048576, padding of at least 0",
                f"{sizes}, padding {self.pad}",
                "check the order N C H W K R S",
            )
        if self.dtype not in ACCUMULATOR:
            raise InputError("dtype fp16 or int8", self.dtype, "convert the operands")
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", "fp16" if self.dtype == "fp16" else "int32")
        if min(self.out_hw) < 1:
            raise InputError(
                f"a kernel no larger than the padded image {self.h + 2 * self.pad}x"
                f"{self.w + 2 * self.pad}",
                f"{self.r}x{self.s}",
                "add padding",
            )

    @property
    def out_hw(self) -> tuple[int, int]:
        """Output height and width: (size + 2 pad - kernel) // stride + 1."""
        return tuple(  # type: ignore[return-value]
            (size + 2 * self.pad - kernel) // self.stride + 1
            for size, kernel in ((self.h, self.r), (self.w, self.s))
        )

    @property
    def ops(self) -> int:
        """Useful operations, 2 n oh ow k c r s."""
        oh, ow = self.out_hw
        return 2 * self.n * oh * ow * self.k * self.c * self.r * self.s

    @property
    def gemm(self) -> GemmShape:
        """The matrix product it amounts to: m = pixels, k = c*r*s, n = output channels."""
        oh, ow = self.out_hw
        c1 = up(self.c, c0_of(self.dtype))
        depth = c1 * c0_of(self.dtype) * self.r * self.s
        return GemmShape(self.n * oh * ow, depth, self.k, self.dtype, self.out_dtype)


def tiles_per_image(shape: ConvShape, tile: int) -> int:
    """Pixel tiles of `tile` fractals in one image, the last one short."""
    oh, ow = shape.out_hw
    return up(up(oh * ow, FRACTAL), tile)


def c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Channel blocks staged at once: step_k * base_k rounded to whole kernel windows."""
    c0 = c0_of(shape.dtype)
    depth = schedule.base_k // c0 * schedule.step_k
    return min(max(1, depth // (shape.r * shape.s)), up(shape.c, c0))


def max_rows(shape: ConvShape, tile: int) -> int:
    """Most image rows a tile of `tile` fractals of pixels can need."""
    ow = shape.out_hw[1]
    spanned = (tile * FRACTAL + ow - 2) // ow + 1
    return min((spanned - 1) * shape.stride + shape.r, shape.h)


def stage_bytes(shape: ConvShape, schedule: GemmSchedule) -> int:
    """L1 bytes of two stages: image rows and weights."""
    c1, c0 = c1_stage(shape, schedule), c0_of(shape.dtype)
    rows = max_rows(shape, schedule.base_m // FRACTAL)
    image = c1 * rows * shape.w * c0
    weights = c1 * shape.r * shape.s * schedule.base_n * c0
    return 2 * (image + weights) * DTYPE_BYTES[shape.dtype]


def check_conv(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` if the schedule does not fit the chip."""
    check_schedule(shape.gemm, replace(schedule, step_k=1), chip)
    needed = stage_bytes(shape, schedule)
    if needed > chip.buffers["L1"]:
        raise CapacityError(
            f"L1 for two stages of rows and weights: {needed} bytes",
            f"{chip.buffers['L1']} on {chip.name}",
            "use a smaller base_m, base_n or step_k",
        )
