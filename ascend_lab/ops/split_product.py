"""Products by the kernel written by hand, K shared out where that is quicker, and their default.

A small product has fewer tiles of C than the chip has cores, or every core reads much of A and B
for its few tiles. Then grids of cores take a part of K each: the cube's phase stores partial sums,
a phase of the vector unit adds them and does what follows. The default times what the closed form
thinks best, and takes the quickest.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import AscendLabError, CapacityError
from ascend_lab.isa import Buffer, Kernel, as_kernel, c0_of
from ascend_lab.kernels import GemmSchedule, GemmShape, gemm_launch
from ascend_lab.kernels.epilogue import Epilogue
from ascend_lab.kernels.gemm import parts_of
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL
from ascend_lab.kernels.timed_schedules import promising
from ascend_lab.ops.expressions import narrow
from ascend_lab.sim import DeviceMemory, simulate_kernel

Finish = Callable[[te.Tensor], te.Tensor]
"""From whole sums (N1, M1, 16, 16) in the accumulator's format to what is stored."""
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Shares of K that are tried."""
ABOVE = 1.25
"""A product so many times above its bound may gain from a division of K."""
LEAST = 8
"""Fractals of K that a share has at least."""
ADDING = 500
"""Cycles before the first sums are added, and behind the last, about."""
DEPTHS = ((5, 1), (5, 2), (6, 3), (3, 3))
"""K tiles in fractals, and how many a stage has, that are tried for the quickest tile of C: no
closed form says well what the first load and the last drain cost."""
TIMED = 3
"""Divisions of K that are timed."""


def product_kernel(
    shape: GemmShape,
    chip: Chip,
    schedule: GemmSchedule,
    epilogue: Epilogue | None = None,
    finish: Finish | None = None,
) -> Kernel:
    """Return the kernel of a product, its output "c": one phase, or two where K is divided.

    What follows is `epilogue` in one phase, in two `finish`, by default the output's format only.
    Raises as `gemm_launch`.
    """
    if schedule.split_k == 1:
        return as_kernel(gemm_launch(shape, chip, schedule, epilogue))
    launch, (m1, _, n1) = gemm_launch(shape, chip, schedule), shape.fractals
    parts, last = parts_of(shape, schedule), finish or partial(narrow, dtype=shape.out_dtype)
    stored = (parts, n1, m1, FRACTAL, FRACTAL)
    sums = te.reduce_sum(te.placeholder(stored, ACCUMULATOR[shape.dtype], "partial"), 0)
    added = te.lower(te.auto_schedule(te.renamed(last(sums), "c"), chip))
    return Kernel(launch.name, (launch, *added.phases))


def default_product(
    shape: GemmShape,
    chip: Chip,
    epilogue: Epilogue | None = None,
    finish: Finish | None = None,
    warm: frozenset[str] = frozenset(),
) -> GemmSchedule:
    """Return the quickest schedule of those that look best, on an L2 that holds tensors `warm`.

    Without a `finish` for an epilogue K is not divided. Raises as `default_schedule`.
    """

    def cycles(schedule: GemmSchedule) -> int:
        return warm_cycles(product_kernel(shape, chip, schedule, epilogue, finish), chip, warm)

    found = promising(shape, chip, epilogue, warm)
    timed = {s: cycles(s) for _, s in found}
    best = min(timed, key=timed.__getitem__)
    for fractals, step in DEPTHS:
        one = replace(best, base_k=fractals * c0_of(shape.dtype), step_k=step)
        with suppress(CapacityError):
            timed[one] = cycles(one)
    body = min(timed.values()) - round(chip.launch_overhead_s * chip.clock_hz)
    low = body <= ABOVE * least_cycles(shape, chip, warm)
    if not low and (epilogue is None or finish is not None):
        for schedule in divided(shape, chip, found[0][0], warm):
            try:
                timed[schedule] = cycles(schedule)
            except AscendLabError:  # the sums or what follows have no schedule: K stays whole
                break
    return min(timed, key=timed.__getitem__)


def _share(chip: Chip, parts: int) -> Chip:
    """Return what one of `parts` grids has of the cores and of the memories."""
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s / parts)
        for m in (chip.l2, chip.device_memory)
    )
    return replace(chip, core_count=chip.core_count // parts, l2=l2, device_memory=memory)


def divided(
    shape: GemmShape, chip: Chip, below: float, warm: frozenset[str] = frozenset()
) -> list[GemmSchedule]:
    """Return the `TIMED` schedules with K divided that look best, of those estimated `below`."""
    m1, k1, n1 = shape.fractals
    loads = chip.path("GM", "UB").rate_bytes_per_cycle * chip.cores_of("vector")
    adding, found = m1 * n1 * FRACTAL * FRACTAL * 4 / loads, []
    for parts in SPLITS:
        if parts <= min(chip.core_count, k1 // LEAST):
            part = replace(shape, k=-(-shape.k // parts), out_dtype=ACCUMULATOR[shape.dtype])
            cycles, own = promising(part, _share(chip, parts), None, warm, 1)[0]
            found.append((cycles + parts * adding + ADDING, replace(own, split_k=parts)))
    found.sort(key=lambda pair: pair[0])
    return [schedule for cycles, schedule in found[:TIMED] if cycles < below]


def least_cycles(shape: GemmShape, chip: Chip, warm: Collection[str] = ()) -> float:
    """Return cycles no schedule goes below: the cubes' peak, and memory for what L2 lacks."""
    sizes = {"a": shape.m * shape.k, "b": shape.k * shape.n}
    cold = sum(size for name, size in sizes.items() if name not in warm)
    memory = cold * DTYPE_BYTES[shape.dtype] / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    macs = shape.ops // 2
    return max(macs / (chip.macs_per_cycle(shape.dtype) * chip.core_count), memory)


def warm_cycles(kernel: Kernel, chip: Chip, warm: Collection[str]) -> int:
    """Return the cycles of a kernel, launch included, on an L2 that has read the `warm` tensors."""
    tensors = kernel.tensors
    held = {b.name for b in tensors if not {b.name, base_name(b)}.isdisjoint(warm)}
    return simulate_kernel(kernel, chip, DeviceMemory.holding(chip, tensors, held)).total_cycles


def base_name(buffer: Buffer) -> str:
    """Return the name a tensor has in its piece: kernels may store it in several forms."""
    return buffer.name.partition(".")[0]
