"""The default schedule, found by fixed rules instead of a search.

A stage is one tensor with its loops, a fold a reduction (sum, max, ...), a nest the loops in which
one or several stages are computed, and a phase a nest that runs by itself, before or after others.

1. Fuse: elementwise stages are computed inside the stages that read them; folds and values that are
   used twice become tiles in UB, if a tile of whole rows fits; other stages get their own phase.
2. Join neighbouring axes that are contiguous in all tensors of a phase.
3. Divide the outermost axes over all cores, in pieces of whole 32-byte blocks.
4. Take the largest tile that fits twice (double buffers), but leave every core several tiles, so
   that loads, arithmetic and stores overlap.

If the vector unit cannot compute a fused nest (operands across the lanes, rows that cannot be
aligned), simpler ways are tried: without joined axes, then with one phase per stage, then with
operands that are first copied into the order in which they are read. A matrix product follows the
tiling rule of `kernels`, written as primitives.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ascend_lab.errors import AscendLabError, CapacityError, ProgramError, ScheduleError
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators.dsl import auto_tile, boxes, primitives_tiles, tensor
from ascend_lab.operators.dsl.auto_fuse import Phase, fuse_stages, merge_axes, row_axes, weight
from ascend_lab.operators.dsl.lower import lower_stage
from ascend_lab.operators.dsl.primitives_loops import bind, reorder, rfactor, split, tensorize
from ascend_lab.operators.dsl.schedule import Schedule, complete, create_schedule, loop_count
from ascend_lab.operators.dsl.stages import Stage
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, default_schedule

CLEARLY = 0.98
"""A schedule replaces the usual one if its cycles are below this share of the usual one's.

Both are timed alone. A gain below 2 % may be lost where L2 holds operands or other phases come
before.
"""

SHARES = (1.0, 0.95, 0.85, 0.7)
"""Parts of UB that tiles are chosen for, one after another, until scratch fits beside them."""


def auto_schedule(
    outputs: tensor.Tensor | Sequence[tensor.Tensor],
    chip: Chip | str,
    tiling: GemmSchedule | None = None,
    *,
    parts: bool = True,
) -> Schedule:
    """Return the default schedule of one or several outputs on a chip.

    Products get the tiling with the best estimate, or `tiling` if it is given. Long rows are loaded
    to UB in parts, or divided over cores, if that is quicker, unless `parts` is False.
    """
    schedule, phases = fuse_stages(create_schedule(outputs, chip))
    for phase in phases:
        if schedule.state.stage(phase.root).is_cube:
            schedule = schedule_product(schedule, phase.root, tiling)
        else:
            schedule = _quickest(schedule, phase, parts)
    return schedule


def _quickest(s: Schedule, phase: Phase, parts: bool) -> Schedule:
    """Return the schedule that is quickest in simulation: the usual one, or one for long rows."""
    trials = [_first_that_lowers(s, phase)]
    long = auto_tile.long_rows(s.state, phase, auto_tile.SMALL_BYTES)
    schedulers: list[Callable[..., Schedule]] = [_quarter] * long
    folds = [x for x in map(s.state.stage, phase.tiles) if x.fold]
    if folds:
        schedulers.insert(0, partial(auto_tile.schedule_phase, tiles=2))
    # Column sums read whole rows, whose lanes stay apart.
    if any(map(auto_tile.keeps_lanes, folds)):
        # Narrow strips of whole columns, loaded once, instead of parts of wide ones again and again
        schedulers.append(partial(auto_tile.schedule_phase, line_bytes=auto_tile.NARROW_BYTES))
    if long and parts and phase.tiles:
        with_operands = (partial(stream_phase, keep=True, depth=n) for n in (2, 4))
        schedulers += [stream_phase, *with_operands, _shared]
    for scheduler in schedulers:
        # From all of UB downwards: the first share whose program can be written is taken.
        for share in SHARES:
            with suppress(ScheduleError, ProgramError):
                trial = scheduler(s, phase, share=share)
                _launches(trial, s, phase)
                trials.append(trial)
                break
    if all(trial == trials[0] for trial in trials):
        return trials[0]
    cycles = [_cycles(trial, s, phase) for trial in trials]
    best = cycles.index(min(cycles))
    # The usual schedule, which the book explains, is kept unless another one is clearly quicker.
    return trials[best if cycles[best] < CLEARLY * cycles[0] else 0]


def _shared(s: Schedule, phase: Phase, *, share: float) -> Schedule:
    """Divide long rows over cores, with the quickest number of tiles for each of the nests."""
    s, nests, folds = share_rows(s, phase)
    for nest in nests:
        by_cycles: dict[int, Schedule] = {}
        for tiles in (1, 2, 8, 4):
            with suppress(ScheduleError, ProgramError):
                trial = with_folds(s, nest, folds, share, tiles)
                by_cycles[_cycles(trial, s, nest)] = trial
        if not by_cycles:
            raise ScheduleError(f"tiles of {nest.root} that fit", "none", "take whole rows")
        s = by_cycles[min(by_cycles)]
    return s


def _quarter(s: Schedule, phase: Phase, *, share: float) -> Schedule:
    """Cut long rows into tiles of a quarter of UB, so that the first tile is loaded sooner."""
    return auto_tile.schedule_phase(s, phase, share=share / 4)


def _launches(scheduled: Schedule, earlier: Schedule, phase: Phase) -> list[isa.Launch]:
    """Return the launches of those nests of `scheduled` that came from `phase` of `earlier`."""
    untouched = {x.name for x in earlier.state.stages} - set(phase.names)
    names = [x.name for x in scheduled.state.stages if x.name not in untouched]
    return [launch for name in names for launch in lower_stage(scheduled, name)]


def _cycles(scheduled: Schedule, earlier: Schedule, phase: Phase) -> int:
    """Return the cycles of these launches, with a barrier behind each of them."""
    launches = _launches(scheduled, earlier, phase)
    launch_cycles = (sim.simulate(launch, scheduled.chip).cycles for launch in launches)
    return sum(launch_cycles) + len(launches) * scheduled.chip.all_cores_cycles


def _first_that_lowers(s: Schedule, phase: Phase) -> Schedule:
    """Return the first schedule, from the usual to the simplest, that the chip can run."""
    fallback = _stages_apart if len(phase.names) > 1 else _in_order
    schedulers: list[Callable[[Schedule, Phase], Schedule]] = []
    for merge in (True, False):
        schedulers += [
            partial(auto_tile.schedule_phase, merge=merge, share=share) for share in SHARES
        ]
    failures: list[AscendLabError] = []
    for scheduler in (*schedulers, fallback):
        # A schedule that failed for lack of room is tried with tiles of a smaller share of UB.
        smaller = isinstance(scheduler, partial) and scheduler.keywords["share"] < 1
        if smaller and not isinstance(failures[-1], CapacityError):
            continue  # smaller tiles would not help
        try:
            trial = scheduler(s, phase)
            _launches(trial, s, phase)
            return trial
        except (ScheduleError, ProgramError) as error:
            failures.append(error)
    raise failures[0]


def _stages_apart(s: Schedule, phase: Phase) -> Schedule:
    """Schedule every stage of a phase as a separate phase."""
    for name in phase.names:
        s = _first_that_lowers(s, Phase(name))
    return s


def _in_order(s: Schedule, phase: Phase) -> Schedule:
    """Copy every operand into the order in which the stage reads it, then schedule the stage."""
    for number in range(len(s.state.stage(phase.root).reads)):
        s = primitives_tiles.materialise(s, phase.root, number)
    return auto_tile.schedule_phase(s, phase)


# -- matrix products ------------------------------------------------------------------------------
def schedule_product(s: Schedule, name: str, tiling: GemmSchedule | None = None) -> Schedule:
    """Schedule the matrix product `name` with a tiling, by default that with the best estimate."""
    stage = s.state.stage(name)
    a, b = (r.source for r in stage.reads)
    sizes = {x.name: x.extent for x in (*stage.axes, *stage.reduce)}
    batch = [x.name for x in stage.axes if x.name not in ("m", "n")]
    shape = GemmShape(sizes["m"], sizes["k"], sizes["n"], s.state.find(a).dtype, stage.dtype)
    tiling_used = tiling or default_schedule(
        shape, share_of(s.chip, math.prod(sizes[x] for x in batch))
    )
    rows = min(tiling_used.base_m, sizes["m"])
    columns = min(tiling_used.base_n, sizes["n"])
    drained = name
    if s.chip.combined:
        s = primitives_tiles.cache_write(s, name, "UB")
        drained = f"{name}_ub"
    s = primitives_tiles.cache_write(s, drained, "L0C")
    sums = f"{drained}_l0c"
    s, *a_tiles = _operand(s, a, "L0A", sums)
    s, *b_tiles = _operand(s, b, "L0B", sums)
    s = _outer(s, name, sizes, tiling_used, batch)
    s = primitives_tiles.compute_at(s, sums, name, "n_i_o")
    if s.chip.combined:
        s = _through_ub(s, name, drained, rows, columns)
    depth = min(tiling_used.base_k * tiling_used.step_k, sizes["k"])
    s = split(split(s, sums, "k", depth), sums, "k_i", min(tiling_used.base_k, depth))
    # for k_o (a stage in L1): for k_i_o (a tile in L0): mmad over m, n, k_i_i.
    s = reorder(s, sums, *batch, "k_o", "k_i_o", "m", "n", "k_i_i")
    for level, loop in enumerate(("k_o", "k_i_o")):
        for tile in (a_tiles[level], b_tiles[level]):
            s = primitives_tiles.compute_at(s, tile, sums, loop)
    s = tensorize(s, sums, "m")
    for tile in (*a_tiles, *b_tiles):
        s = primitives_tiles.double_buffer(s, tile)
    # Two tiles of 4-byte sums: while one is copied out of L0C, the cube adds to the other.
    twice = 2 * 4 * rows * columns <= s.chip.buffers["L0C"]
    return primitives_tiles.double_buffer(s, sums) if twice else s


def share_of(chip: Chip, batch: int) -> Chip:
    """Return a chip with the cores, and the share of memory rates, of one product of a batch."""
    cores = all_cores = chip.core_count
    if batch > 1:
        # g cores a product: the batch takes up(batch, cores // g) rounds, each 1 / g of the work.
        # 12 products on 32 cores take 1 round with g = 2, or 2 rounds half as long with g = 4.
        cores = min(
            range(1, all_cores + 1), key=lambda g: (isa.ceil_div(batch, all_cores // g) / g, g)
        )
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s * (cores / all_cores))
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
        share = min(isa.ceil_div(isa.ceil_div(sizes[axis], side), cores) * side, sizes[axis])
        s = split(s, name, axis, share)
        s = split(s, name, f"{axis}_i", min(side, share))
    inner = ("m_i_o", "n_i_o", "m_i_i", "n_i_i")
    s = reorder(s, name, *batch, "m_o", "n_o", *inner)
    cores_left = s.chip.core_count // (t.grid_rows * t.grid_cols)
    for axis in batch:
        share = isa.ceil_div(sizes[axis], max(min(cores_left, sizes[axis]), 1))
        s = split(s, name, axis, share)
        cores_left //= isa.ceil_div(sizes[axis], share)
    bound = [*(f"{axis}_o" for axis in batch), "m_o", "n_o"]
    s = reorder(s, name, *bound, *(f"{axis}_i" for axis in batch), *inner)
    for loop in bound:
        s = bind(s, name, loop)
    return s


def _through_ub(s: Schedule, name: str, drained: str, rows: int, columns: int) -> Schedule:
    """Copy sums out of L0C through UB, in pieces of as many fractal columns as fit twice in UB."""
    column = rows * isa.FRACTAL * DTYPE_BYTES[s.state.stage(name).dtype]
    count = max(1, min(columns // isa.FRACTAL, s.chip.buffers["UB"] // (2 * column)))
    loop = "n_i_o"
    if count * isa.FRACTAL < columns:
        s = split(s, name, "n_i_i", count * isa.FRACTAL)
        s = reorder(s, name, "n_i_i_o", "m_i_i", "n_i_i_i")
        loop = "n_i_i_o"
    s = primitives_tiles.compute_at(s, drained, name, loop)
    return primitives_tiles.double_buffer(s, drained)


# -- rows that are too long for tiles of whole ones, or too few for all cores ---------------------
PARTS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 2048)
"""Elements of a row that goes through UB in parts, the widest first."""
BLOCKS = 128
"""Parts of rows are multiples of so many elements."""
START = 16 * BLOCKS
"""Every part of a row costs a fixed time, that of the arithmetic of this many elements."""


def stream_phase(
    s: Schedule, phase: Phase, *, keep: bool = False, share: float = 1.0, depth: int = 2
) -> Schedule:
    """Schedule a nest whose rows are too wide for two slots in UB: each row is loaded in parts.

    Values that are used twice are kept as whole rows. Operands of these values, of folds and of the
    result are loaded in parts of one width, with `depth` slots each. An operand that several of
    them need is loaded again each time, or with `keep` is kept as a whole row, too.
    """
    merged = merge_axes(s, phase)
    original = phase
    s, phase = _kept(merged, phase) if keep else (merged, phase)
    names_before = {x.name for x in s.state.stages}
    s = primitives_tiles.hoist(s, phase.root)  # computed once for all parts of a row
    shared = (x.name for x in s.state.stages if x.name not in names_before)
    phase = replace(phase, tiles=(*phase.tiles, *shared))
    rows = row_axes(s.state, phase)
    root = s.state.stage(phase.root)
    row_axis = root.axes[-1]
    if not original.tiles or phase.outputs or not rows or row_axis.name in rows:
        raise ScheduleError("rows that tiles of them all need whole", str(rows), "take tiles")
    stages = [
        x for x in map(s.state.stage, phase.tiles) if _is_wide(x, row_axis) and x.scope == "GM"
    ]
    wide = [x for x in stages if {i.name for i in s.state.inputs} & set(x.sources)]
    long = [f"{x.name}.{(*x.axes, *x.reduce)[-1].name}" for x in wide]

    def sizes(width: int) -> auto_tile.TileSizes:
        widths = {a.name: 1 for a in root.axes} | {row_axis.name: width}
        return auto_tile.TileSizes(widths, dict.fromkeys(long, width))

    def fits(width: int) -> bool:
        trial = auto_tile.arrange(s, phase, rows, sizes(width), depth, tiles=None)
        nest = complete(trial.state, phase.root)
        return boxes.ub_bytes(nest, phase.root, s.chip) <= share * s.chip.buffers["UB"]

    width = _widest_part(row_axis.extent, fits)
    if width:
        return auto_tile.arrange(s, phase, rows, sizes(width), depth)
    # If not even the narrowest parts fit, the cheapest value kept as a whole row is recomputed.
    recomputed = min((x for x in stages if not x.fold), key=lambda x: weight(x.expr), default=None)
    if recomputed is None:
        raise ScheduleError(f"parts of {phase.root} that fit in UB", str(PARTS), "cut its rows")
    fewer_tiles = Phase(original.root, tuple(n for n in original.tiles if n != recomputed.name))
    s = primitives_tiles.inline(merged, recomputed.name)
    return stream_phase(s, fewer_tiles, keep=keep, share=share, depth=depth)


def _widest_part(row_elements: int, fits: Callable[[int], bool]) -> int:
    """Return the width of the parts of a row, all about equal, or 0 if no width of `PARTS` fits.

    A row of 50,000 elements, of which 16,384 fit at a time, goes in 4 parts of 12,544.
    """
    # Bisection needs "fits" to be monotone: 0 stands for the end of the list and always fits.
    widths = [*(w for w in PARTS if w < row_elements), 0]
    widest = widths[bisect_left(widths, True, key=lambda w: w == 0 or fits(w))]
    if not widest:
        return 0
    even_width = isa.ceil_div(row_elements, isa.ceil_div(row_elements, widest))
    return isa.ceil_div(even_width, BLOCKS) * BLOCKS


def _kept(s: Schedule, phase: Phase) -> tuple[Schedule, Phase]:
    """Make inputs that the tiles of a phase read tiles of the phase, too, with one slot each."""
    tiles = list(phase.tiles)
    for source in [i.name for i in s.state.inputs]:
        readers = [r.name for r in s.state.readers(source) if r.name in phase.names]
        if set(readers) & set(phase.tiles):
            s = primitives_tiles.cache_read(s, source, "UB", *readers)
            tiles.insert(0, s.state.stage(readers[0]).reads[0].source)
    return s, replace(phase, tiles=tuple(tiles))


def _is_wide(stage: Stage, axis: tensor.Axis) -> bool:
    """True for a tile whose innermost axis is as long as `axis`."""
    return (*stage.axes, *stage.reduce)[-1].extent == axis.extent


# -- few rows --------------------------------------------------------------------------------------
def share_rows(s: Schedule, phase: Phase) -> tuple[Schedule, list[Phase], set[str]]:
    """Split a nest of few long rows into several nests, in which each core folds a part of a row.

    After each fold the next nest begins by folding the parts of all cores; elementwise values are
    computed again. Return the schedule, the nests, and the folds that every core of a nest computes
    for itself (see `with_folds`).
    """
    # Softmax of 4 rows on 32 cores: a core folds an eighth of a row, and the parts are folded
    # again.
    folds = [n for n in phase.tiles if s.state.stage(n).fold]
    if not folds or phase.outputs:
        raise ScheduleError("tiles that fold rows", str(phase.tiles), "take tiles")
    for name in phase.tiles:
        s = s if name in folds else primitives_tiles.inline(s, name)
    untouched = {x.name for x in s.state.stages} - set(folds)
    parts = dict[str, str]()
    for name in folds:
        axis = s.state.stage(name).reduce[-1]
        width = _part(axis.extent, s.state.stage(name).axes[0].extent, auto_tile.core_count(s))
        if width >= axis.extent:
            raise ScheduleError(f"{name}: a part for every core", str(axis.extent), "take tiles")
        s = rfactor(split(s, name, axis.name, width), name, f"{axis.name}_o", inner=True)
        parts[name] = s.state.stage(name).sources[0]
    nests: list[Phase] = []
    for earlier, name in pairwise(("", *folds)):
        names_before = {x.name for x in s.state.stages}
        outputs = tuple[str, ...]()
        with suppress(ScheduleError):
            if earlier and not nests[-1].outputs:
                s = primitives_tiles.unchain(s, name, parts[name], earlier, parts[earlier])
                outputs = (nests.pop().root,)
        s = primitives_tiles.hoist(s, parts[name])
        new_stages = [s.state.stage(x.name) for x in s.state.stages if x.name not in names_before]
        folded = {*folds, *(x.name for x in new_stages if x.fold)}
        tiles = (x.name for x in new_stages if x.name not in folded and not folded & set(x.sources))
        nests.append(Phase(parts[name], tuple(tiles), outputs))
    s = primitives_tiles.hoist(s, phase.root)
    nests = [*nests, Phase(phase.root)]
    untouched |= {n for nest in nests for n in nest.names}
    return s, nests, {x.name for x in s.state.stages} - untouched


def _part(extent: int, rows: int, cores: int) -> int:
    """Return the length of parts of a row that gives the busiest core the least work."""
    # Parts in whole blocks of 128: 4,096 elements in 3 parts are 1,408, 1,408 and 1,280.
    widths = (
        isa.ceil_div(isa.ceil_div(extent, parts), BLOCKS) * BLOCKS for parts in range(2, cores + 1)
    )
    busy = ((isa.ceil_div(rows, cores // isa.ceil_div(extent, w)) * (w + START), w) for w in widths)
    return min(busy, default=(0, extent))[1]


def with_folds(s: Schedule, phase: Phase, folds: set[str], share: float, tiles: int) -> Schedule:
    """Schedule a nest in `tiles` tiles per core, with `folds` computed inside it on every core."""
    inside = set(phase.names)
    own_folds = list[str]()
    for name in [x.name for x in reversed(s.state.stages) if x.name in folds]:
        readers = {r.name for r in s.state.readers(name)}
        if readers & inside:
            names_before = {x.name for x in s.state.stages}
            if readers - inside:
                s = primitives_tiles.duplicate(s, name, max(readers & inside))
            own_folds += [x.name for x in s.state.stages if x.name not in names_before] or [name]
            inside.add(own_folds[-1])
            sources = s.state.stage(own_folds[-1]).sources
            for source in [i.name for i in s.state.inputs if i.name in sources]:
                s = primitives_tiles.cache_read(s, source, "UB", own_folds[-1])
    s = auto_tile.schedule_phase(s, phase, share=share, tiles=tiles)
    root = s.state.stage(phase.root)
    loops = root.bound or [x.name for x in root.loops[: loop_count(s.state, root)]] or [""]
    for tile in own_folds:
        s = primitives_tiles.compute_at(s, tile, phase.root, loops[-1])
    return s
