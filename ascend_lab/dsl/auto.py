"""The default schedule of a matrix product: the tiling rule of `kernels`, written as primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.dsl.auto_fuse import Phase, fuse_stages
from ascend_lab.dsl.auto_tile import schedule_phase
from ascend_lab.dsl.lower import lower_stage
from ascend_lab.dsl.primitives_loops import bind, reorder, split, tensorize
from ascend_lab.dsl.primitives_tiles import (
    cache_read,
    cache_write,
    compute_at,
    double_buffer,
    materialise,
)
from ascend_lab.dsl.schedule import Schedule, create_schedule
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import AscendLabError, ProgramError, ScheduleError
from ascend_lab.kernels.default_schedules import default_schedule
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape, up


def schedule_product(s: Schedule, name: str, tiling: GemmSchedule | None = None) -> Schedule:
    """Schedule the matrix product `name` with a tiling (default: the best by closed-form rule)."""
    stage = s.state.stage(name)
    a, b = (r.source for r in stage.reads)
    sizes = {x.name: x.extent for x in (*stage.axes, *stage.reduce)}
    batch = [x for x in stage.axes if x.name not in ("m", "n")]
    count = 1
    for axis in batch:
        count *= axis.extent
    shape = GemmShape(sizes["m"], sizes["k"], sizes["n"], s.state.find(a).dtype, stage.dtype)
    tiling = tiling or default_schedule(shape, share_of(s.chip, count))
    drained = name
    if s.chip.combined:
        s = cache_write(s, name, "UB")
        drained = f"{name}_ub"
    s = cache_write(s, drained, "L0C")
    sums = f"{drained}_l0c"
    left = _operand(s, a, "L0A", sums)
    right = _operand(left[0], b, "L0B", sums)
    s = _outer(right[0], name, sizes, tiling, [x.name for x in batch])
    s = compute_at(s, sums, name, "n_i_o")
    if s.chip.combined:
        s = _through_ub(s, name, drained, tiling, sizes)
    return _inner(s, sums, sizes, tiling, left[1:], right[1:])


def share_of(chip: Chip, batch: int) -> Chip:
    """Return the cores, and the share of the memories, that one product of a batch has."""
    whole = chip.core_count
    cores = (
        min(range(1, whole + 1), key=lambda g: (up(batch, whole // g) / g, g))
        if batch > 1
        else whole
    )
    share = cores / chip.core_count
    l2 = replace(chip.l2, rate_bytes_per_s=chip.l2.rate_bytes_per_s * share)
    rate = chip.device_memory.rate_bytes_per_s * share
    memory = replace(chip.device_memory, rate_bytes_per_s=rate)
    return replace(chip, core_count=cores, l2=l2, device_memory=memory)


def _operand(s: Schedule, name: str, scope: str, reader: str) -> tuple[Schedule, str, str]:
    s = cache_read(s, name, "L1", reader)
    staged = s.state.stage(reader).reads[0 if scope == "L0A" else 1].source
    s = cache_read(s, staged, scope, reader)
    return s, staged, s.state.stage(reader).reads[0 if scope == "L0A" else 1].source


def _outer(
    s: Schedule, name: str, sizes: dict[str, int], t: GemmSchedule, batch: list[str]
) -> Schedule:
    """Split m and n over a grid of cores and into tiles of L0."""
    for axis, tile, cores in (("m", t.base_m, t.grid_rows), ("n", t.base_n, t.grid_cols)):
        side = min(tile, sizes[axis])
        share = min(up(up(sizes[axis], side), cores) * side, sizes[axis])
        s = split(s, name, axis, share)
        s = split(s, name, f"{axis}_i", min(side, share))
    order = [*batch, "m_o", "n_o", "m_i_o", "n_i_o", "m_i_i", "n_i_i"]
    s = reorder(s, name, *order)
    left = s.chip.core_count // (t.grid_rows * t.grid_cols)
    for axis in batch:
        extent = s.state.stage(name).loop(axis).extent
        share = -(-extent // max(min(left, extent), 1))
        s = split(s, name, axis, share)
        left //= -(-extent // share)
    outer = [f"{axis}_o" for axis in batch]
    s = reorder(s, name, *outer, "m_o", "n_o", *(f"{axis}_i" for axis in batch), *order[-4:])
    for loop in (*outer, "m_o", "n_o"):
        s = bind(s, name, loop)
    return s


def _through_ub(
    s: Schedule, name: str, drained: str, t: GemmSchedule, sizes: dict[str, int]
) -> Schedule:
    """Drain L0C by as many fractal columns as fit twice in UB."""
    dtype = s.state.stage(name).dtype
    rows, columns = min(t.base_m, sizes["m"]), min(t.base_n, sizes["n"])
    column = rows * FRACTAL * DTYPE_BYTES[dtype]
    count = max(1, min(columns // FRACTAL, s.chip.buffers["UB"] // (2 * column)))
    loop = "n_i_o"
    if count * FRACTAL < columns:
        s = split(s, name, "n_i_i", count * FRACTAL)
        s = reorder(s, name, "n_i_i_o", "m_i_i", "n_i_i_i")
        loop = "n_i_i_o"
    s = compute_at(s, drained, name, loop)
    return double_buffer(s, drained)


def _inner(
    s: Schedule,
    sums: str,
    sizes: dict[str, int],
    t: GemmSchedule,
    left: tuple[str, str],
    right: tuple[str, str],
) -> Schedule:
    """Stage k in L1 and in L0, two slots everywhere they fit."""
    stage = min(t.base_k * t.step_k, sizes["k"])
    s = split(s, sums, "k", stage)
    s = split(s, sums, "k_i", min(t.base_k, stage))
    batch = [x.name for x in s.state.stage(sums).axes if x.name not in ("m", "n")]
    s = reorder(s, sums, *batch, "k_o", "k_i_o", "m", "n", "k_i_i")
    for tile in (left[0], right[0]):
        s = compute_at(s, tile, sums, "k_o")
    for tile in (left[1], right[1]):
        s = compute_at(s, tile, sums, "k_i_o")
    s = tensorize(s, sums, "m")
    for tile in (*left, *right):
        s = double_buffer(s, tile)
    area = min(t.base_m, sizes["m"]) * min(t.base_n, sizes["n"]) * 4
    return double_buffer(s, sums) if 2 * area <= s.chip.buffers["L0C"] else s


# The default schedule: the rule a good engineer would write down, without a search.
#
# 1. Fuse: elementwise stages disappear into their readers, folds and values used twice become
# tiles
#    of their reader, if a tile of whole rows fits in UB; otherwise a stage gets a phase of its
# own.
# 2. Make one axis of neighbours that are contiguous in everything a phase touches.
# 3. Share the outermost axes over all cores, in pieces of whole 32-byte blocks.
# 4. Take the largest tile that fits twice (double buffers), but leave every core several tiles,
# so
#    that loads, arithmetic and stores overlap.
#
# Where the vector unit cannot walk a fused nest (operands across the lanes, rows that cannot
# align),
# the next simpler way is taken: axes apart, then stages apart, then operands copied into order
# first.


Way = Callable[[Schedule, Phase], Schedule]


def auto_schedule(
    outputs: Tensor | Sequence[Tensor], chip: Chip | str, tiling: GemmSchedule | None = None
) -> Schedule:
    """Return the default schedule of one or several outputs on a chip.

    Products are tiled by the best tiling in closed form, or by the one given.
    """
    schedule, phases = fuse_stages(create_schedule(outputs, chip))
    for phase in phases:
        if schedule.state.stage(phase.root).is_cube:
            schedule = schedule_product(schedule, phase.root, tiling)
        else:
            schedule = _first_that_lowers(schedule, phase)
    return schedule


def _first_that_lowers(s: Schedule, phase: Phase) -> Schedule:
    """Return the schedule of the first way whose programs can be written for the chip."""
    failure: AscendLabError | None = None
    ways: tuple[Way, ...] = (_fused, _axes_apart, _stages_apart)
    for way in ways if phase.tiles or phase.outputs else (_fused, _axes_apart, _in_order):
        try:
            done = way(s, phase)
            known = {x.name for x in s.state.stages} - {phase.root, *phase.tiles, *phase.outputs}
            for stage in done.state.stages:
                if stage.name not in known:
                    lower_stage(done, stage.name)
            return done
        except (ScheduleError, ProgramError) as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _fused(s: Schedule, phase: Phase) -> Schedule:
    return schedule_phase(s, phase)


def _axes_apart(s: Schedule, phase: Phase) -> Schedule:
    return schedule_phase(s, phase, merge=False)


def _stages_apart(s: Schedule, phase: Phase) -> Schedule:
    """Give every stage a phase of its own."""
    for name in (*phase.tiles, *phase.outputs, phase.root):
        s = _first_that_lowers(s, Phase(name))
    return s


def _in_order(s: Schedule, phase: Phase) -> Schedule:
    """Copy every operand into the order in which the stage walks it, then schedule the stage."""
    reads = s.state.stage(phase.root).reads
    for number in range(len(reads)):
        s = materialise(s, phase.root, number)
    return schedule_phase(s, phase)
