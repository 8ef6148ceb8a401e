"""Whether a tiled convolution fits the chip: what L1 must hold, and when rows are cut to strips."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TypeVar

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.conv_shape import ConvShape, bundles_of
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, check_schedule, up
from ascend_lab.kernels.gemm_tilings import Array

Sizes = TypeVar("Sizes", int, Array)


def c1_stage(shape: ConvShape, schedule: GemmSchedule) -> int:
    """Channel blocks staged at once: step_k * base_k rounded to whole kernel windows."""
    depth = schedule.base_k // c0_of(shape.dtype) * schedule.step_k
    return min(max(1, depth // shape.taps), bundles_of(shape).c1)


def window_sides(shape: ConvShape, tile: int, *, strip: bool) -> tuple[int, int]:
    """Most image rows and columns a tile of `tile` fractals of pixels can need."""
    oh, ow = shape.out_hw
    if strip:
        spanned, across = 1, min(tile * FRACTAL, ow)
    else:
        latest = ow - gcd(tile * FRACTAL, ow)  # tiles start at multiples of their size
        spanned, across = min((latest + tile * FRACTAL - 1) // ow + 1, oh), ow
    return side_of(shape, 0, spanned), side_of(shape, 1, across)


def side_of(shape: ConvShape, axis: int, outputs: Sizes) -> Sizes:
    """Most image rows (axis 0) or columns that `outputs` neighbouring outputs can need."""
    size, step = (shape.h, shape.w)[axis], shape.strides[axis]
    beyond = (shape.out_hw[axis] - 1) * step - shape.pads[2 * axis] >= size
    least = max(shape.reach[axis], step if beyond else 1)
    needed: Sizes = np.minimum((outputs - 1) * step + least, size)
    return needed if isinstance(outputs, np.ndarray) else int(needed)


def stage_bytes(shape: ConvShape, schedule: GemmSchedule, *, strip: bool = False) -> int:
    """L1 bytes of the slots: windows of the image and weights."""
    c1, c0 = c1_stage(shape, schedule), c0_of(shape.dtype)
    rows, columns = window_sides(shape, schedule.base_m // FRACTAL, strip=strip)
    weights = c1 * shape.taps * up(schedule.base_n, FRACTAL) * FRACTAL * c0
    slots = schedule.a_l1_slots * c1 * rows * columns * c0 + schedule.b_l1_slots * weights
    return slots * DTYPE_BYTES[shape.dtype]


def takes_strips(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> bool:
    """Return whether pixel tiles are pieces of one row: rows three tiles long, or too long for L1.

    A flat tile loads whole rows; where it covers a small part of a row, most of that is not its.
    A schedule that names the window decides.
    """
    if schedule.window:
        return schedule.window == "strip"
    long_rows = shape.out_hw[1] >= 2 * schedule.base_m
    return long_rows or stage_bytes(shape, schedule) > chip.buffers["L1"]


def check_conv(shape: ConvShape, schedule: GemmSchedule, chip: Chip) -> None:
    """Raise `InputError` or `CapacityError` if the schedule does not fit the chip."""
    if schedule.keep or schedule.bypass:
        raise InputError(
            "keep and bypass of '' for a convolution",
            f"{schedule.keep!r} and {schedule.bypass!r}",
            "what fits one stage stays in L1 by itself: raise step_k",
        )
    check_schedule(shape.gemm, replace(schedule, step_k=min(schedule.step_k, 1)), chip)
    needed = stage_bytes(shape, schedule, strip=takes_strips(shape, schedule, chip))
    if needed > chip.buffers["L1"]:
        slots = (schedule.a_l1_slots, schedule.b_l1_slots)
        what = "two stages of rows and weights"
        if slots != (2, 2):
            what = "{} slots of rows and {} of weights".format(*slots)
        raise CapacityError(
            f"L1 for {what}: {needed} bytes",
            f"{chip.buffers['L1']} on {chip.name}",
            "use a smaller base_m, base_n or step_k",
        )
