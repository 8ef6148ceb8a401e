"""The default schedule, found by fixed rules instead of a search.

A softmax of 4,096 rows gets one loop nest, in tiles of as many rows as fit twice in the buffer UB,
the rows divided over all cores. A stage is one tensor with its loops, a fold a reduction (sum, max,
...), a nest the loops in which one or several stages are computed, and a phase a nest that runs by
itself, before or after others.

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

WINNING_RATIO = 0.98
"""Another schedule replaces the usual one only if it takes less than this share of its cycles.

A phase is timed alone, with an empty L2. A gain of less than 2 % may vanish in a whole program,
where L2 holds operands or other phases come before.
"""

UB_SHARES = (1.0, 0.95, 0.85, 0.7)
"""Shares of UB for tiles, tried one after another until scratch fits beside the tiles."""


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
    """Return the schedule that is quickest in simulation: the usual one, or an alternative."""
    trials = [_first_that_lowers(s, phase)]
    for scheduler in _alternatives(s, phase, parts):
        # From all of UB downwards: the first share whose program can be written is taken.
        for ub_share in UB_SHARES:
            with suppress(ScheduleError, ProgramError):
                trial = scheduler(s, phase, ub_share=ub_share)
                _launches(trial, s, phase)
                trials.append(trial)
                break
    if all(trial == trials[0] for trial in trials):
        return trials[0]
    cycles = [_cycles(trial, s, phase) for trial in trials]
    best = cycles.index(min(cycles))
    # The usual schedule, which the book explains, is kept unless another one is clearly quicker.
    return trials[best if cycles[best] < WINNING_RATIO * cycles[0] else 0]


def _alternatives(s: Schedule, phase: Phase, parts: bool) -> list[Callable[..., Schedule]]:
    """Return the schedulers of a phase that are worth timing against the usual one.

    `parts` allows long rows to be loaded in parts or to be divided over cores.
    """
    schedulers: list[Callable[..., Schedule]] = []
    folds = [stage for stage in map(s.state.stage, phase.tiles) if stage.fold]
    if folds:
        schedulers.append(partial(auto_tile.schedule_phase, tiles=2))
    has_long_rows = auto_tile.long_rows(s.state, phase, auto_tile.SMALL_BYTES)
    if has_long_rows:
        schedulers.append(_quarter_tiles)
    # A sum over rows adds whole rows element by element: nothing is added within a row.
    if any(map(auto_tile.keeps_lanes, folds)):
        # Narrow strips of whole columns are loaded once, parts of wide rows again for each fold.
        schedulers.append(partial(auto_tile.schedule_phase, line_bytes=auto_tile.NARROW_BYTES))
    if has_long_rows and parts and phase.tiles:
        schedulers.append(stream_phase)
        schedulers += [partial(stream_phase, keep=True, depth=depth) for depth in (2, 4)]
        schedulers.append(_rows_over_cores)
    return schedulers


def _rows_over_cores(s: Schedule, phase: Phase, *, ub_share: float) -> Schedule:
    """Divide long rows over cores, with the quickest number of tiles for each of the nests."""
    s, nests, folds = share_rows(s, phase)
    for nest in nests:
        by_cycles: dict[int, Schedule] = {}
        for tiles in (1, 2, 8, 4):
            with suppress(ScheduleError, ProgramError):
                trial = with_folds(s, nest, folds, ub_share, tiles)
                by_cycles[_cycles(trial, s, nest)] = trial
        if not by_cycles:
            raise ScheduleError(f"tiles of {nest.root} that fit", "none", "take whole rows")
        s = by_cycles[min(by_cycles)]
    return s


def _quarter_tiles(s: Schedule, phase: Phase, *, ub_share: float) -> Schedule:
    """Cut long rows into tiles of a quarter of UB, so that the first tile is loaded sooner."""
    return auto_tile.schedule_phase(s, phase, ub_share=ub_share / 4)


def _launches(scheduled: Schedule, earlier: Schedule, phase: Phase) -> list[isa.Launch]:
    """Return the launches of those nests of `scheduled` that came from `phase` of `earlier`."""
    untouched = {x.name for x in earlier.state.stages} - set(phase.names)
    names = [x.name for x in scheduled.state.stages if x.name not in untouched]
    return [launch for name in names for launch in lower_stage(scheduled, name)]


def _cycles(scheduled: Schedule, earlier: Schedule, phase: Phase) -> int:
    """Return the cycles of the launches of `_launches`, with a barrier behind each of them."""
    launches = _launches(scheduled, earlier, phase)
    launch_cycles = (sim.simulate(launch, scheduled.chip).cycles for launch in launches)
    return sum(launch_cycles) + len(launches) * scheduled.chip.all_cores_cycles


def _first_that_lowers(s: Schedule, phase: Phase) -> Schedule:
    """Return the first schedule, from the usual to the simplest, that the chip can run."""
    fallback = _phase_per_stage if len(phase.names) > 1 else _with_copied_operands
    schedulers: list[Callable[[Schedule, Phase], Schedule]] = []
    for merge in (True, False):
        schedulers += [
            partial(auto_tile.schedule_phase, merge=merge, ub_share=ub_share)
            for ub_share in UB_SHARES
        ]
    failures: list[AscendLabError] = []
    for scheduler in (*schedulers, fallback):
        # A schedule that failed for lack of room is tried with tiles of a smaller share of UB.
        has_smaller_tiles = isinstance(scheduler, partial) and scheduler.keywords["ub_share"] < 1
        if has_smaller_tiles and not isinstance(failures[-1], CapacityError):
            continue  # smaller tiles would not help
        try:
            trial = scheduler(s, phase)
            _launches(trial, s, phase)
            return trial
        except (ScheduleError, ProgramError) as error:
            failures.append(error)
    raise failures[0]


def _phase_per_stage(s: Schedule, phase: Phase) -> Schedule:
    """Schedule every stage of a phase as a separate phase."""
    for name in phase.names:
        s = _first_that_lowers(s, Phase(name))
    return s


def _with_copied_operands(s: Schedule, phase: Phase) -> Schedule:
    """Copy every operand into the order in which the stage reads it, then schedule the stage."""
    for number in range(len(s.state.stage(phase.root).reads)):
        s = primitives_tiles.materialise(s, phase.root, number)
    return auto_tile.schedule_phase(s, phase)


# -- matrix products ------------------------------------------------------------------------------
def schedule_product(s: Schedule, name: str, tiling: GemmSchedule | None = None) -> Schedule:
    """Schedule the matrix product `name` with a tiling, by default that with the best estimate."""
    stage = s.state.stage(name)
    a, b = (read.source for read in stage.reads)
    sizes = {x.name: x.extent for x in (*stage.axes, *stage.reduce)}
    batch = [x.name for x in stage.axes if x.name not in ("m", "n")]
    shape = GemmShape(sizes["m"], sizes["k"], sizes["n"], s.state.find(a).dtype, stage.dtype)
    batch_size = math.prod(sizes[axis] for axis in batch)
    tiling_used = tiling or default_schedule(shape, share_of(s.chip, batch_size))
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
    s = _outer_loops(s, name, sizes, tiling_used, batch)
    s = primitives_tiles.compute_at(s, sums, name, "n_i_o")
    if s.chip.combined:
        s = _through_ub(s, name, drained, rows, columns)
    depth = min(tiling_used.base_k * tiling_used.step_k, sizes["k"])
    s = split(split(s, sums, "k", depth), sums, "k_i", min(tiling_used.base_k, depth))
    # for k_o (a piece in L1): for k_i_o (a tile in L0): mmad over m, n, k_i_i.
    s = reorder(s, sums, *batch, "k_o", "k_i_o", "m", "n", "k_i_i")
    for level, loop in enumerate(("k_o", "k_i_o")):
        for tile in (a_tiles[level], b_tiles[level]):
            s = primitives_tiles.compute_at(s, tile, sums, loop)
    s = tensorize(s, sums, "m")
    for tile in (*a_tiles, *b_tiles):
        s = primitives_tiles.double_buffer(s, tile)
    # Two tiles of 4-byte sums: while one is copied out of L0C, the cube adds to the other.
    fits_twice = 2 * 4 * rows * columns <= s.chip.buffers["L0C"]
    return primitives_tiles.double_buffer(s, sums) if fits_twice else s


def share_of(chip: Chip, batch: int) -> Chip:
    """Return a chip with the cores, and the share of memory rates, of one product of a batch."""
    all_cores = chip.core_count

    def relative_time(cores: int) -> float:
        """Return the time of the whole batch if each product runs on so many cores."""
        rounds = isa.ceil_div(batch, all_cores // cores)
        return rounds / cores

    # 12 products on 32 cores take 1 round with 2 cores each (16 products at a time), or 2 rounds of
    # half the length with 4 cores each; of equal times, the one with fewer cores is taken.
    cores = min(range(1, all_cores + 1), key=relative_time) if batch > 1 else all_cores
    l2, memory = (
        replace(m, rate_bytes_per_s=m.rate_bytes_per_s * (cores / all_cores))
        for m in (chip.l2, chip.device_memory)
    )
    return replace(chip, core_count=cores, l2=l2, device_memory=memory)


def _operand(s: Schedule, name: str, scope: str, reader: str) -> tuple[Schedule, str, str]:
    """Read an operand through L1 and L0; return the schedule and the names of both tiles."""
    number = 0 if scope == "L0A" else 1
    s = primitives_tiles.cache_read(s, name, "L1", reader)
    staged = s.state.stage(reader).reads[number].source
    s = primitives_tiles.cache_read(s, staged, scope, reader)
    return s, staged, s.state.stage(reader).reads[number].source


def _outer_loops(
    s: Schedule, name: str, sizes: dict[str, int], tiling: GemmSchedule, batch: list[str]
) -> Schedule:
    """Split m and n over a grid of cores and into tiles of L0, a batch over the remaining cores."""
    tiles_and_cores = (
        ("m", tiling.base_m, tiling.grid_rows),
        ("n", tiling.base_n, tiling.grid_cols),
    )
    for axis, tile_size, cores in tiles_and_cores:
        side = min(tile_size, sizes[axis])
        # 1,000 rows in tiles of 128 are 8 tiles: on 4 cores, 2 tiles or 256 rows each.
        tiles_per_core = isa.ceil_div(isa.ceil_div(sizes[axis], side), cores)
        core_elements = min(tiles_per_core * side, sizes[axis])
        s = split(s, name, axis, core_elements)
        s = split(s, name, f"{axis}_i", min(side, core_elements))
    inner = ("m_i_o", "n_i_o", "m_i_i", "n_i_i")
    s = reorder(s, name, *batch, "m_o", "n_o", *inner)
    cores_left = s.chip.core_count // (tiling.grid_rows * tiling.grid_cols)
    for axis in batch:
        core_elements = isa.ceil_div(sizes[axis], max(min(cores_left, sizes[axis]), 1))
        s = split(s, name, axis, core_elements)
        cores_left //= isa.ceil_div(sizes[axis], core_elements)
    bound = [*(f"{axis}_o" for axis in batch), "m_o", "n_o"]
    s = reorder(s, name, *bound, *(f"{axis}_i" for axis in batch), *inner)
    for loop in bound:
        s = bind(s, name, loop)
    return s


def _through_ub(s: Schedule, name: str, drained: str, rows: int, columns: int) -> Schedule:
    """Copy sums out of L0C through UB, in pieces of as many fractal columns as fit twice in UB.

    A fractal column is 16 elements wide: for 128 rows in fp16 it takes 4 KiB.
    """
    column_bytes = rows * isa.FRACTAL * DTYPE_BYTES[s.state.stage(name).dtype]
    fitting_columns = s.chip.buffers["UB"] // (2 * column_bytes)
    piece_columns = max(1, min(columns // isa.FRACTAL, fitting_columns))
    loop = "n_i_o"
    if piece_columns * isa.FRACTAL < columns:
        s = split(s, name, "n_i_i", piece_columns * isa.FRACTAL)
        s = reorder(s, name, "n_i_i_o", "m_i_i", "n_i_i_i")
        loop = "n_i_i_o"
    s = primitives_tiles.compute_at(s, drained, name, loop)
    return primitives_tiles.double_buffer(s, drained)


# -- rows that are too long for tiles of whole ones, or too few for all cores ---------------------
PART_LENGTHS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 2048)
"""Lengths, in elements, of the parts in which a long row goes through UB, the longest first."""
PART_UNIT = 128
"""The length of a part of a row is a multiple of this many elements."""
PART_OVERHEAD = 16 * PART_UNIT
"""Overhead of a part of a row, as the number of elements whose arithmetic takes as long."""


def stream_phase(
    s: Schedule, phase: Phase, *, keep: bool = False, ub_share: float = 1.0, depth: int = 2
) -> Schedule:
    """Schedule a nest whose rows are too wide for two slots in UB: each row is loaded in parts.

    Values that are used twice are kept as whole rows. Operands of these values, of folds and of the
    result are loaded in parts of one width, with `depth` slots each. An operand that several of
    them need is loaded again each time, or with `keep` is kept as a whole row, too.
    """
    merged = merge_axes(s, phase)
    streamed, nest = _with_row_tiles(merged, phase, keep)
    rows = row_axes(streamed.state, nest)
    root = streamed.state.stage(nest.root)
    row_axis = root.axes[-1]
    if not phase.tiles or phase.outputs or not rows or row_axis.name in rows:
        raise ScheduleError("rows that tiles of them all need whole", str(rows), "take tiles")
    tiles = map(streamed.state.stage, nest.tiles)
    row_tiles = [x for x in tiles if _spans_row(x, row_axis) and x.scope == "GM"]
    input_names = {i.name for i in streamed.state.inputs}
    reading_tiles = [x for x in row_tiles if input_names & set(x.sources)]
    part_axes = [f"{x.name}.{(*x.axes, *x.reduce)[-1].name}" for x in reading_tiles]

    def tile_sizes(width: int) -> auto_tile.TileSizes:
        widths = {a.name: 1 for a in root.axes} | {row_axis.name: width}
        return auto_tile.TileSizes(widths, dict.fromkeys(part_axes, width))

    def fits(width: int) -> bool:
        trial = auto_tile.arrange(streamed, nest, rows, tile_sizes(width), depth, tiles=None)
        completed = complete(trial.state, nest.root)
        needed_bytes = boxes.ub_bytes(completed, nest.root, s.chip)
        return needed_bytes <= ub_share * s.chip.buffers["UB"]

    width = _widest_part(row_axis.extent, fits)
    if width:
        return auto_tile.arrange(streamed, nest, rows, tile_sizes(width), depth)
    # Not even the narrowest parts fit: one value fewer is kept as a whole row.
    fewer_row_tiles, smaller_phase = _without_cheapest(merged, phase, row_tiles)
    return stream_phase(fewer_row_tiles, smaller_phase, keep=keep, ub_share=ub_share, depth=depth)


def _with_row_tiles(s: Schedule, phase: Phase, keep: bool) -> tuple[Schedule, Phase]:
    """Add tiles that serve all parts of a row: values computed once a row, and inputs with `keep`.

    In y[i, j] = a[i, j] / t[i], 1 / t[i] is computed once for all parts of row i.
    """
    kept, nest = _keep_inputs(s, phase) if keep else (s, phase)
    names_before = {x.name for x in kept.state.stages}
    hoisted = primitives_tiles.hoist(kept, nest.root)
    new_names = (x.name for x in hoisted.state.stages if x.name not in names_before)
    return hoisted, replace(nest, tiles=(*nest.tiles, *new_names))


def _without_cheapest(
    s: Schedule, phase: Phase, row_tiles: Sequence[Stage]
) -> tuple[Schedule, Phase]:
    """Recompute the cheapest value of `row_tiles` wherever it is read, instead of keeping it."""
    values = [x for x in row_tiles if not x.fold]
    recomputed = min(values, key=lambda x: weight(x.expr), default=None)
    if recomputed is None:
        raise ScheduleError(
            f"parts of {phase.root} that fit in UB", str(PART_LENGTHS), "cut its rows"
        )
    smaller_phase = Phase(phase.root, tuple(n for n in phase.tiles if n != recomputed.name))
    return primitives_tiles.inline(s, recomputed.name), smaller_phase


def _widest_part(row_elements: int, fits: Callable[[int], bool]) -> int:
    """Return the length of the parts of a row, all about equal; 0 if none of `PART_LENGTHS` fits.

    A row of 50,000 elements, of which 16,384 fit at a time, goes in 4 parts of 12,544.
    """
    # Bisection needs "fits" to be monotone: 0 stands for the end of the list and always fits.
    widths = [*(w for w in PART_LENGTHS if w < row_elements), 0]
    widest = widths[bisect_left(widths, True, key=lambda w: w == 0 or fits(w))]
    if not widest:
        return 0
    even_width = isa.ceil_div(row_elements, isa.ceil_div(row_elements, widest))
    return isa.ceil_div(even_width, PART_UNIT) * PART_UNIT


def _keep_inputs(s: Schedule, phase: Phase) -> tuple[Schedule, Phase]:
    """Make inputs that the tiles of a phase read tiles of the phase, too, with one slot each."""
    tiles = list(phase.tiles)
    for source in [i.name for i in s.state.inputs]:
        readers = [r.name for r in s.state.readers(source) if r.name in phase.names]
        if set(readers) & set(phase.tiles):
            s = primitives_tiles.cache_read(s, source, "UB", *readers)
            tiles.insert(0, s.state.stage(readers[0]).reads[0].source)
    return s, replace(phase, tiles=tuple(tiles))


def _spans_row(stage: Stage, row_axis: tensor.Axis) -> bool:
    """True for a stage whose innermost axis is as long as `row_axis`."""
    return (*stage.axes, *stage.reduce)[-1].extent == row_axis.extent


# -- few rows --------------------------------------------------------------------------------------
def share_rows(s: Schedule, phase: Phase) -> tuple[Schedule, list[Phase], set[str]]:
    """Split a nest of few long rows into several nests, in which each core folds a part of a row.

    After each fold the next nest begins by folding the parts of all cores; elementwise values are
    computed again. Return the schedule, the nests, and the folds that every core of a nest computes
    for itself (see `with_folds`). Softmax of 4 rows on 32 cores: a core folds an eighth of a row,
    and the eight results of a row are folded again.
    """
    folds = [n for n in phase.tiles if s.state.stage(n).fold]
    if not folds or phase.outputs:
        raise ScheduleError("tiles that fold rows", str(phase.tiles), "take tiles")
    for name in phase.tiles:
        s = s if name in folds else primitives_tiles.inline(s, name)
    untouched = {x.name for x in s.state.stages} - set(folds)
    s, parts = _fold_in_parts(s, folds)
    nests: list[Phase] = []
    for earlier, name in pairwise(("", *folds)):
        names_before = {x.name for x in s.state.stages}
        outputs = tuple[str, ...]()
        with suppress(ScheduleError):
            # Parts of a second fold that do not need the first fold's result join its nest.
            if earlier and not nests[-1].outputs:
                s = primitives_tiles.unchain(s, name, parts[name], earlier, parts[earlier])
                outputs = (nests.pop().root,)
        s = primitives_tiles.hoist(s, parts[name])
        new_stages = [s.state.stage(x.name) for x in s.state.stages if x.name not in names_before]
        folded = {*folds, *(x.name for x in new_stages if x.fold)}
        tiles = (x.name for x in new_stages if x.name not in folded and not folded & set(x.sources))
        nests.append(Phase(parts[name], tuple(tiles), outputs))
    s = primitives_tiles.hoist(s, phase.root)
    nests.append(Phase(phase.root))
    untouched |= {n for nest in nests for n in nest.names}
    return s, nests, {x.name for x in s.state.stages} - untouched


def _fold_in_parts(s: Schedule, folds: Sequence[str]) -> tuple[Schedule, dict[str, str]]:
    """Let each of the folds be done in parts; return the stage of the parts of each fold, too."""
    parts = dict[str, str]()
    for name in folds:
        axis = s.state.stage(name).reduce[-1]
        rows = s.state.stage(name).axes[0].extent
        length = _part_length(axis.extent, rows, auto_tile.vector_core_count(s))
        if length >= axis.extent:
            raise ScheduleError(f"{name}: a part for every core", str(axis.extent), "take tiles")
        s = rfactor(split(s, name, axis.name, length), name, f"{axis.name}_o", inner=True)
        parts[name] = s.state.stage(name).sources[0]
    return s, parts


def _part_length(extent: int, rows: int, cores: int) -> int:
    """Return the length of parts of a row that gives the busiest core the least work.

    It is a multiple of 128: 4,096 elements in 3 parts are 1,408, 1,408 and 1,280.
    """

    def rounded_length(parts: int) -> int:
        return isa.ceil_div(isa.ceil_div(extent, parts), PART_UNIT) * PART_UNIT

    def busiest_core_work(length: int) -> int:
        cores_per_part = cores // isa.ceil_div(extent, length)
        return isa.ceil_div(rows, cores_per_part) * (length + PART_OVERHEAD)

    lengths = map(rounded_length, range(2, cores + 1))
    return min(lengths, key=lambda length: (busiest_core_work(length), length), default=extent)


def with_folds(s: Schedule, phase: Phase, folds: set[str], ub_share: float, tiles: int) -> Schedule:
    """Schedule a nest in `tiles` tiles per core, with `folds` computed inside it on every core."""
    s, inner_folds = _with_inner_folds(s, phase, folds)
    s = auto_tile.schedule_phase(s, phase, ub_share=ub_share, tiles=tiles)
    root = s.state.stage(phase.root)
    loops = root.bound or [x.name for x in root.loops[: loop_count(s.state, root)]] or [""]
    for fold in inner_folds:
        s = primitives_tiles.compute_at(s, fold, phase.root, loops[-1])
    return s


def _with_inner_folds(s: Schedule, phase: Phase, folds: set[str]) -> tuple[Schedule, Sequence[str]]:
    """Give a nest a copy of each fold that it reads, with inputs of the fold in UB.

    Return the names of the copies, too: a fold that no other nest reads needs no copy.
    """
    inside = set(phase.names)
    inner_folds = list[str]()
    for name in [x.name for x in reversed(s.state.stages) if x.name in folds]:
        readers = {r.name for r in s.state.readers(name)}
        if not readers & inside:
            continue
        names_before = {x.name for x in s.state.stages}
        if readers - inside:
            s = primitives_tiles.duplicate(s, name, max(readers & inside))
        inner_folds += [x.name for x in s.state.stages if x.name not in names_before] or [name]
        inside.add(inner_folds[-1])
        sources = s.state.stage(inner_folds[-1]).sources
        for source in [i.name for i in s.state.inputs if i.name in sources]:
            s = primitives_tiles.cache_read(s, source, "UB", inner_folds[-1])
    return s, inner_folds
