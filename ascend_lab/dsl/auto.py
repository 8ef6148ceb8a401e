"""The default schedule: the rule a good engineer would write down, without a search.

1. Fuse: elementwise stages disappear into their readers, folds and values used twice become tiles
   of their reader, if a tile of whole rows fits in UB; otherwise a stage gets a phase of its own.
2. Make one axis of neighbours that are contiguous in everything a phase touches.
3. Share the outermost axes over all cores, in pieces of whole 32-byte blocks.
4. Take the largest tile that fits twice (double buffers), but leave every core several tiles, so
   that loads, arithmetic and stores overlap.

Where the vector unit cannot walk a fused nest (operands across the lanes, rows that cannot align),
the next simpler way is taken: axes apart, then stages apart, then operands copied into order first.
A matrix product follows the tiling rule of `kernels`, written as primitives.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.dsl import primitives_tiles
from ascend_lab.dsl.auto_fuse import Phase, fuse_stages
from ascend_lab.dsl.auto_rows import share_rows, stream_phase, with_folds
from ascend_lab.dsl.auto_tile import SMALL_BYTES, long_rows, schedule_phase
from ascend_lab.dsl.lower import lower_stage
from ascend_lab.dsl.primitives_loops import bind, reorder, split, tensorize
from ascend_lab.dsl.schedule import Schedule, create_schedule
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import AscendLabError, CapacityError, ProgramError, ScheduleError
from ascend_lab.isa import Launch
from ascend_lab.kernels.default_schedules import default_schedule
from ascend_lab.kernels.gemm_schedule import FRACTAL, GemmSchedule, GemmShape, up
from ascend_lab.sim import simulate

CLEARLY = 0.98
"""How much quicker alone is quicker too where L2 holds operands, or other phases come before."""

SHARES = (1.0, 0.95, 0.85, 0.7)
"""Parts of UB that tiles are chosen for, one after another, until scratch fits beside them."""


def auto_schedule(
    outputs: Tensor | Sequence[Tensor],
    chip: Chip | str,
    tiling: GemmSchedule | None = None,
    *,
    parts: bool = True,
) -> Schedule:
    """Return the default schedule of one or several outputs on a chip.

    Products are tiled by the best tiling in closed form, or by the one given. Long rows go through
    UB in parts, or are shared by the cores, where that is quicker, unless `parts` is False.
    """
    schedule, phases = fuse_stages(create_schedule(outputs, chip))
    for phase in phases:
        if schedule.state.stage(phase.root).is_cube:
            schedule = schedule_product(schedule, phase.root, tiling)
        else:
            schedule = _quickest(schedule, phase, parts)
    return schedule


def _quickest(s: Schedule, phase: Phase, parts: bool) -> Schedule:
    """Return what the simulator finds quickest: the usual way, or one for long rows."""
    found = [_first_that_lowers(s, phase)]
    long = long_rows(s.state, phase, SMALL_BYTES)
    ways: list[Callable[..., Schedule]] = [_quarter] * long
    if any(s.state.stage(n).fold for n in phase.tiles):
        ways.insert(0, partial(schedule_phase, tiles=2))
    if long and parts and phase.tiles:
        kept = (partial(stream_phase, keep=True, depth=n) for n in (2, 4))
        ways += [stream_phase, *kept, _shared]
    for way in ways:
        for share in SHARES:
            with suppress(ScheduleError, ProgramError):
                trial = way(s, phase, share=share)
                _launches(trial, s, phase)
                found.append(trial)
                break
    if all(trial == found[0] for trial in found):
        return found[0]
    cycles = [_cycles(trial, s, phase) for trial in found]
    best = cycles.index(min(cycles))
    return found[best if cycles[best] < CLEARLY * cycles[0] else 0]


def _shared(s: Schedule, phase: Phase, *, share: float) -> Schedule:
    """Let cores share long rows, each of the nests in the number of tiles that is quickest."""
    s, nests, folds = share_rows(s, phase)
    for nest in nests:
        found: dict[int, Schedule] = {}
        for tiles in (1, 2, 8, 4):
            with suppress(ScheduleError, ProgramError):
                trial = with_folds(s, nest, folds, share, tiles)
                found[_cycles(trial, s, nest)] = trial
        if not found:
            raise ScheduleError(f"tiles of {nest.root} that fit", "none", "take whole rows")
        s = found[min(found)]
    return s


def _quarter(s: Schedule, phase: Phase, *, share: float) -> Schedule:
    """Cut long rows into tiles of a quarter of UB, so that the first is there sooner."""
    return schedule_phase(s, phase, share=share / 4)


def _launches(done: Schedule, before: Schedule, phase: Phase) -> list[Launch]:
    """Return the launches of the nests that a way made of a phase."""
    known = {x.name for x in before.state.stages} - set(phase.names)
    names = [x.name for x in done.state.stages if x.name not in known]
    return [launch for name in names for launch in lower_stage(done, name)]


def _cycles(done: Schedule, before: Schedule, phase: Phase) -> int:
    """Return the cycles of what a way made of a phase, a barrier behind every launch."""
    launches = _launches(done, before, phase)
    each = (simulate(launch, done.chip).cycles for launch in launches)
    return sum(each) + len(launches) * done.chip.all_cores_cycles


def _first_that_lowers(s: Schedule, phase: Phase) -> Schedule:
    """Return the schedule of the first way whose programs can be written for the chip."""
    last = _stages_apart if len(phase.names) > 1 else _in_order
    ways: list[Callable[[Schedule, Phase], Schedule]] = []
    for merge in (True, False):
        ways += [partial(schedule_phase, merge=merge, share=share) for share in SHARES]
    failures: list[AscendLabError] = []
    for way in (*ways, last):
        smaller = isinstance(way, partial) and way.keywords["share"] < 1
        if smaller and not isinstance(failures[-1], CapacityError):
            continue  # smaller tiles would not help
        try:
            done = way(s, phase)
            _launches(done, s, phase)
            return done
        except (ScheduleError, ProgramError) as error:
            failures.append(error)
    raise failures[0]


def _stages_apart(s: Schedule, phase: Phase) -> Schedule:
    """Give every stage a phase of its own."""
    for name in phase.names:
        s = _first_that_lowers(s, Phase(name))
    return s


def _in_order(s: Schedule, phase: Phase) -> Schedule:
    """Copy every operand into the order in which the stage walks it, then schedule the stage."""
    for number in range(len(s.state.stage(phase.root).reads)):
        s = primitives_tiles.materialise(s, phase.root, number)
    return schedule_phase(s, phase)


# -- matrix products ------------------------------------------------------------------------------


def schedule_product(s: Schedule, name: str, tiling: GemmSchedule | None = None) -> Schedule:
    """Schedule the matrix product `name` with a tiling (default: the best by closed-form rule)."""
    stage = s.state.stage(name)
    a, b = (r.source for r in stage.reads)
    sizes = {x.name: x.extent for x in (*stage.axes, *stage.reduce)}
    batch = [x.name for x in stage.axes if x.name not in ("m", "n")]
    shape = GemmShape(sizes["m"], sizes["k"], sizes["n"], s.state.find(a).dtype, stage.dtype)
    t = tiling or default_schedule(shape, share_of(s.chip, math.prod(sizes[x] for x in batch)))
    rows, columns = min(t.base_m, sizes["m"]), min(t.base_n, sizes["n"])
    drained = name
    if s.chip.combined:
        s, drained = primitives_tiles.cache_write(s, name, "UB"), f"{name}_ub"
    s, sums = primitives_tiles.cache_write(s, drained, "L0C"), f"{drained}_l0c"
    s, *left = _operand(s, a, "L0A", sums)
    s, *right = _operand(s, b, "L0B", sums)
    s = _outer(s, name, sizes, t, batch)
    s = primitives_tiles.compute_at(s, sums, name, "n_i_o")
    if s.chip.combined:
        s = _through_ub(s, name, drained, rows, columns)
    depth = min(t.base_k * t.step_k, sizes["k"])
    s = split(split(s, sums, "k", depth), sums, "k_i", min(t.base_k, depth))
    s = reorder(s, sums, *batch, "k_o", "k_i_o", "m", "n", "k_i_i")
    for level, loop in enumerate(("k_o", "k_i_o")):
        for tile in (left[level], right[level]):
            s = primitives_tiles.compute_at(s, tile, sums, loop)
    s = tensorize(s, sums, "m")
    for tile in (*left, *right):
        s = primitives_tiles.double_buffer(s, tile)
    twice = 2 * 4 * rows * columns <= s.chip.buffers["L0C"]
    return primitives_tiles.double_buffer(s, sums) if twice else s


def share_of(chip: Chip, batch: int) -> Chip:
    """Return the cores, and the share of the memories, that one product of a batch has."""
    cores = whole = chip.core_count
    if batch > 1:
        cores = min(range(1, whole + 1), key=lambda g: (up(batch, whole // g) / g, g))
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s * (cores / whole))
        for m in (chip.l2, chip.device_memory)
    )
    return replace(chip, core_count=cores, l2=l2, device_memory=memory)


def _operand(s: Schedule, name: str, scope: str, reader: str) -> tuple[Schedule, str, str]:
    """Read an operand through L1 and L0; return the names of both tiles."""
    number = 0 if scope == "L0A" else 1
    s = primitives_tiles.cache_read(s, name, "L1", reader)
    staged = s.state.stage(reader).reads[number].source
    s = primitives_tiles.cache_read(s, staged, scope, reader)
    return s, staged, s.state.stage(reader).reads[number].source


def _outer(
    s: Schedule, name: str, sizes: dict[str, int], t: GemmSchedule, batch: list[str]
) -> Schedule:
    """Split m and n over a grid of cores and into tiles of L0, a batch over the cores left."""
    for axis, tile, cores in (("m", t.base_m, t.grid_rows), ("n", t.base_n, t.grid_cols)):
        side = min(tile, sizes[axis])
        share = min(up(up(sizes[axis], side), cores) * side, sizes[axis])
        s = split(s, name, axis, share)
        s = split(s, name, f"{axis}_i", min(side, share))
    inner = ("m_i_o", "n_i_o", "m_i_i", "n_i_i")
    s = reorder(s, name, *batch, "m_o", "n_o", *inner)
    left = s.chip.core_count // (t.grid_rows * t.grid_cols)
    for axis in batch:
        share = up(sizes[axis], max(min(left, sizes[axis]), 1))
        s = split(s, name, axis, share)
        left //= up(sizes[axis], share)
    bound = [*(f"{axis}_o" for axis in batch), "m_o", "n_o"]
    s = reorder(s, name, *bound, *(f"{axis}_i" for axis in batch), *inner)
    for loop in bound:
        s = bind(s, name, loop)
    return s


def _through_ub(s: Schedule, name: str, drained: str, rows: int, columns: int) -> Schedule:
    """Drain L0C by as many fractal columns as fit twice in UB."""
    column = rows * FRACTAL * DTYPE_BYTES[s.state.stage(name).dtype]
    count = max(1, min(columns // FRACTAL, s.chip.buffers["UB"] // (2 * column)))
    loop = "n_i_o"
    if count * FRACTAL < columns:
        s = split(s, name, "n_i_i", count * FRACTAL)
        s = reorder(s, name, "n_i_i_o", "m_i_i", "n_i_i_i")
        loop = "n_i_i_o"
    return primitives_tiles.double_buffer(
        primitives_tiles.compute_at(s, drained, name, loop), drained
    )
