"""Choose the tile sizes of a phase for the default schedule, and divide the tiles over cores.

A phase is the loop nest of a root stage (the tensor that it computes) with the tiles that are
computed inside it; a fold is a reduction. For a softmax of 4,096 rows on 8 cores, each core gets a
share of 512 rows, and computes it in tiles of, say, 64 rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ascend_lab import errors
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.operators.dsl import boxes, primitives_tiles, tensor
from ascend_lab.operators.dsl.auto_fuse import Phase, merge_axes, row_axes
from ascend_lab.operators.dsl.primitives_loops import bind, reorder, rfactor, split, vectorise
from ascend_lab.operators.dsl.schedule import Schedule, complete, moves_only
from ascend_lab.operators.dsl.stages import Leaf, Stage, State

TILES_PER_CORE = 4
"""A core has about this many tiles, so that loads, arithmetic and stores of tiles overlap."""

SMALL_BYTES = 32768
"""Tiles that take less of UB than this are not made smaller only to have several of them."""

LONG_FOLD_BYTES = SMALL_BYTES // 4
"""If a fold reads at least this many bytes per result, its results are dealt to cores one by one.

In whole blocks, 16 results a core in fp16, too few cores would have work.
"""

LINE_BYTES = 512
"""Tiles of folds over rows have at least this much of each row: one line of L2.

The number is from the cost model of the PTO library.
"""

NARROW_BYTES = 64
"""The same for tiles that are narrow so that all of a long column is in UB at once."""

Widths = dict[str, int]
"""Elements of a tile per axis."""


class TileSizes(NamedTuple):
    """Elements of a tile along each axis of its root, and elements of each fold axis per step.

    Fold axes are named with their stage, as "sum_1.k".
    """

    widths: Mapping[str, int]
    folds: Mapping[str, int]


def vector_core_count(s: Schedule) -> int:
    """Return the vector cores of the chip."""
    return s.chip.core_count * s.chip.vector_cores_per_core


def core_shares(s: Schedule, phase: Phase, rows: list[str]) -> Widths:
    """Return the elements of each axis that one core takes: whole blocks along the last one."""
    axes = s.state.stage(phase.root).axes
    cores = vector_core_count(s)
    # The last part of a row is shorter and needs another program, so each part gets its own core.
    if s.state.stage(phase.root).last_fold_extent:
        row_shares = {axes[0].name: isa.ceil_div(axes[0].extent, cores // axes[-1].extent)}
        return {a.name: a.extent for a in axes} | row_shares | {axes[-1].name: 1}
    unit = 1 if long_rows(s.state, phase) else block_elements(s.state, phase)
    cut_axes = [a for a in axes if a.name in rows and (a is not axes[-1] or a.extent >= 2 * unit)]

    def share(axis: tensor.Axis, among: int) -> int:
        return _core_share(axis.extent, among, unit if axis is axes[-1] else 1)

    candidates = []
    core_counts = range(1, cores + 1) if cut_axes else range(0)
    for used in core_counts:
        outer_share = share(cut_axes[0], used)
        # 20 rows and 4,096 columns on 32 cores: with one row per core 12 would be idle; with 16
        # cores along columns, 2 stretches of 10 rows, all 32 work.
        remaining_cores = max(1, cores // isa.ceil_div(cut_axes[0].extent, outer_share))
        inner_share = share(cut_axes[1], remaining_cores) if len(cut_axes) > 1 else 1
        candidates.append((outer_share * inner_share, outer_share, inner_share))
    best = min(candidates)[1:] if candidates else ()
    best_shares = {a.name: n for a, n in zip(cut_axes, best, strict=False)}
    return {a.name: a.extent for a in axes} | best_shares


def long_rows(state: State, phase: Phase, least_bytes: int = LONG_FOLD_BYTES) -> bool:
    """True if one element of the result needs `least_bytes` or more of one operand."""
    folds = [x for x in map(state.stage, (*phase.tiles, phase.root)) if x.fold]
    longest = 0
    for fold in folds:
        folded_elements = math.prod(a.extent for a in fold.reduce)
        item_bytes = max((DTYPE_BYTES[read.dtype] for read in fold.reads), default=0)
        longest = max(longest, folded_elements * item_bytes)
    return longest >= least_bytes


def _core_share(extent: int, cores: int, unit: int) -> int:
    """Return the elements of an axis for one of `cores`: whole units, in eights if it is long."""
    share = isa.ceil_div(extent, cores)
    if unit > 1:
        step = 8 * unit if share >= 32 * unit else unit
        share = isa.ceil_div(share, step) * step
    return min(share, extent)


def block_elements(state: State, phase: Phase) -> int:
    """Return the elements of a 32-byte block, for all formats of a phase at once."""
    stages = [state.stage(n) for n in phase.names]
    dtypes = {r.dtype for x in stages for r in x.reads}
    dtypes |= {x.dtype for x in stages if x.name not in phase.tiles}
    return math.lcm(*map(isa.c0_of, dtypes))


def even_width(width: int, share: int, taken_bytes: int, unit: int, tiles: int) -> int:
    """Return a width not above `width` that cuts a share into about `tiles` tiles of one size.

    There are more tiles if these would be wider than `width`, and fewer if they would be small.
    `taken_bytes` is what a tile of `width` takes of UB; widths are multiples of `unit`.
    """
    # The width at which a tile takes 32 KiB: halving smaller ones only adds instructions.
    small_width = max(1, SMALL_BYTES * width // max(taken_bytes, 1))
    # A share of 1,000 rows in 4 tiles: 250 each. With tiles of at most 96 there are 11, of 91 rows.
    aimed_width = min(width, max(small_width, isa.ceil_div(share, tiles)))
    if aimed_width >= share:
        return share
    step = unit if width >= unit else 1
    if width >= unit and aimed_width >= 64 * unit:
        step = 8 * unit
    parts = isa.ceil_div(share, aimed_width)
    part_width = isa.ceil_div(isa.ceil_div(share, parts), step) * step
    return min(part_width, max(width // step * step, 1), share)


def share_in_whole_tiles(extent: int, share: int, width: int) -> int:
    """Return the share rounded up to whole tiles, if no core loses its work by that."""
    # Shares of 125 in tiles of 32 become 128: 1,000 rows are 8 shares in both cases, and only the
    # last tile of all is ragged.
    filled = min(isa.ceil_div(share, width) * width, extent)
    return filled if isa.ceil_div(extent, filled) == isa.ceil_div(extent, share) else share


def schedule_phase(
    s: Schedule,
    phase: Phase,
    *,
    merge: bool = True,
    ub_share: float = 1.0,
    tiles: int = TILES_PER_CORE,
    line_bytes: int = LINE_BYTES,
) -> Schedule:
    """Schedule one nest: merge axes, choose tile sizes, divide tiles over cores, fuse stages.

    Tiles take at most `ub_share` of UB; a core has `tiles` tiles, if that does not make them small.
    Folds over rows keep at least `line_bytes` of a row together.
    """
    if moves_only(s.state, s.state.stage(phase.root)) and not phase.tiles:
        return s  # a strided copy has a hand-written kernel
    unmerged = _split_folds(s, phase)
    s = merge_axes(unmerged, phase) if merge else unmerged
    rows = row_axes(s.state, phase)
    # Two slots let loads and arithmetic overlap; if not even narrow tiles fit twice, one slot.
    can_be_cut = bool(rows) or not (phase.tiles or phase.outputs)
    slot_counts = (2, 1) if can_be_cut else ()
    for depth in slot_counts:
        best = largest(s, phase, rows, depth, ub_share, line_bytes)
        if best is not None and not _cuts_blocks(s, phase, best.widths):
            return arrange(s, phase, rows, best, depth, tiles)
    return _split_phase(unmerged, phase)


def _cuts_blocks(s: Schedule, phase: Phase, widths: Mapping[str, int]) -> bool:
    """True if elementwise tiles leave less than a block for the phase's innermost axis."""
    if phase.outputs or not phase.tiles or any(s.state.stage(n).fold for n in phase.tiles):
        return False
    row_axis = s.state.stage(phase.root).axes[-1]
    return widths[row_axis.name] < min(row_axis.extent, block_elements(s.state, phase))


def _split_phase(s: Schedule, phase: Phase) -> Schedule:
    """Split a phase of which not one row fits: folds become phases, other values are recomputed."""
    if not phase.tiles and not phase.outputs:
        needed = f"a tile of {phase.root} that fits in UB"
        got = f"{s.chip.buffers['UB']} bytes on {s.chip.name}"
        raise errors.ScheduleError(needed, got, "reshape the tensor so that an axis can be split")
    recomputed = [n for n in phase.tiles if not s.state.stage(n).fold]
    for name in recomputed:
        s = primitives_tiles.inline(s, name)
    for name in phase.names:
        if name not in recomputed:
            s = schedule_phase(s, Phase(name))
    return s


def _split_folds(s: Schedule, phase: Phase) -> Schedule:
    """Cut long folds that leave most cores idle into one partial fold per core."""
    if len(phase.tiles) > 1:
        return s
    for name in (*phase.tiles, phase.root):
        stage = s.state.stage(name)
        axis = max(stage.reduce, key=lambda a: a.extent, default=None)
        width = _part_for_cores(s, stage, axis.extent) if axis else 0
        if axis and width:
            s = rfactor(split(s, name, axis.name, width), name, f"{axis.name}_o")
            s = schedule_phase(s, Phase(f"{name}_rf"))
    return s


def _part_for_cores(s: Schedule, stage: Stage, extent: int) -> int:
    """Return the elements of a fold axis that one core folds, or 0 if cutting it does not pay."""
    itemsize = DTYPE_BYTES[stage.expr.dtype]
    results = math.prod(stage.shape)
    folded_bytes = math.prod(a.extent for a in stage.reduce) * results * itemsize
    # What can be dealt to cores without cutting the fold: results, or lines of results.
    units = max(1, results * itemsize // LINE_BYTES) if keeps_lanes(stage) else results
    # Equal parts only: 4,096 elements on 20 cores are 16 parts of 256.
    parts = max(d for d in range(1, vector_core_count(s) + 1) if extent % d == 0)
    # "p" is the axis of parts that `rfactor` has made: this fold is cut already.
    is_cut = any(a.name == "p" for a in (*stage.axes, *stage.reduce))
    if is_cut or 2 * units > vector_core_count(s) or folded_bytes < 4 * SMALL_BYTES:
        return 0
    return extent // parts if parts >= 2 * units and extent > parts else 0


def largest(
    s: Schedule,
    phase: Phase,
    rows: list[str],
    depth: int = 2,
    ub_share: float = 1.0,
    line_bytes: int = LINE_BYTES,
) -> TileSizes | None:
    """Return the sizes of the widest tile of `depth` slots that fits; None if none does."""
    stages = [s.state.stage(n) for n in (*phase.tiles, phase.root)]
    root = stages[-1]
    extents = core_shares(s, phase, rows)
    folds = {f"{x.name}.{a.name}": a.extent for x in stages if x.fold for a in x.reduce}
    row_axis = root.axes[-1].name
    smallest = {n: 1 if n in rows else extents[n] for n in extents}
    if row_axis in rows and any(x.fold and keeps_lanes(x) for x in stages):
        smallest[row_axis] = min(line_bytes // DTYPE_BYTES[root.dtype], extents[row_axis])

    def tile_sizes(sizes: Widths) -> TileSizes:
        return TileSizes({n: sizes[n] for n in extents}, {n: sizes[n] for n in folds})

    def fits(sizes: Widths) -> bool:
        needed_bytes = tile_bytes(s, phase, *tile_sizes(sizes), depth)
        return needed_bytes <= ub_share * s.chip.buffers["UB"]

    # Whole fold axes first: a fold in steps needs a partial result between them.
    ways_to_fold = (False, True) if folds else (False,)
    for cuts_folds in ways_to_fold:
        sizes = smallest | (dict.fromkeys(folds, 1) if cuts_folds else folds)
        if not fits(sizes):
            continue
        if cuts_folds:
            for name in reversed(list(folds)):
                widest = _widest(fits, sizes, name, folds[name], 1)
                sizes[name] = _even_part(widest, folds[name])
        for name in reversed(rows):
            sizes[name] = _widest(fits, sizes, name, extents[name], sizes[name])
            if sizes[name] < extents[name]:
                break
        return tile_sizes(sizes)
    return None


def keeps_lanes(stage: Stage) -> bool:
    """True if the fold's source is contiguous along an axis that stays: no fold across lanes."""
    folded = {a.name for a in stage.reduce}
    lane = stage.axes[-1].name
    sources = [r for r in stage.reads if folded & r.axis_names]
    return any(dict(r.index[-1].terms).get(lane) == 1 for r in sources)


def _even_part(width: int, extent: int) -> int:
    """Return the width of parts of a fold: about equal ones, of whole repeats or blocks."""
    parts = isa.ceil_div(extent, width)
    unit = next((n for n in (128, 32) if width >= 2 * n), 1)
    # 1,000 elements of which 600 fit: two parts, of 512 and 488.
    part_width = isa.ceil_div(isa.ceil_div(extent, parts), unit) * unit
    largest_width = width - width % unit if parts > 1 else width
    return min(largest_width, part_width)


def _widest(fits: Callable[[Widths], bool], sizes: Widths, name: str, extent: int, low: int) -> int:
    """Return the largest size of one axis, up to `extent`, that fits; by bisection, from `low`."""
    if fits(sizes | {name: extent}):
        return extent
    high = extent
    # Close enough: within 6 % of the widest that fits, as each trial lays out a nest.
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(sizes | {name: middle}):
            low = middle
        else:
            high = middle
    return low


def tile_bytes(
    s: Schedule, phase: Phase, widths: Mapping[str, int], folds: Mapping[str, int], depth: int = 2
) -> int:
    """Return the bytes of UB that tiles of these widths take."""
    name = phase.root
    root = s.state.stage(phase.root)
    extents = {f"{x}.{a.name}": a.extent for x in phase.names for a in s.state.stage(x).reduce}
    # The loops and tiles depend on which axes are cut, not on the widths, so the nest is cached.
    cut_folds = frozenset(n for n, width in folds.items() if width < extents[n])
    is_cut = any(widths[a.name] < max(a.extent, 2) for a in root.axes)
    nest = _completed(s, phase, is_cut, cut_folds, depth)
    steps = {f"{name}.{n}": width for n, width in widths.items()} | dict(folds)
    # A root that is a fold becomes a copy of a tile, and the tile is where the fold is computed.
    computed = nest.stage(name).sources[0]
    steps |= {f"{computed}.{a.name}": folds[f"{name}.{a.name}"] for a in root.reduce}
    return boxes.ub_bytes(nest, name, s.chip, steps)


@lru_cache(maxsize=16)
def _completed(
    s: Schedule, phase: Phase, is_cut: bool, cut_folds: frozenset[str], depth: int
) -> State:
    """Return the completed nest of a phase, whose tiles are the same for all widths.

    If `is_cut`, all axes of the root are loops over single elements; the fold axes `cut_folds` are
    so in any case. `boxes.ub_bytes` then takes such a loop as one of any width.
    """
    root = s.state.stage(phase.root)
    stages = map(s.state.stage, phase.names)
    widths = {a.name: 1 if is_cut else a.extent for a in root.axes}
    folds = {f"{x.name}.{a.name}": a.extent for x in stages for a in x.reduce}
    folds |= dict.fromkeys(cut_folds, 1)
    trial = arrange(s, phase, list(widths), TileSizes(widths, folds), depth, tiles=None)
    return complete(trial.state, phase.root)


def arrange(
    s: Schedule,
    phase: Phase,
    rows: list[str],
    sizes: TileSizes,
    depth: int = 2,
    tiles: int | None = TILES_PER_CORE,
) -> Schedule:
    """Apply the schedule steps for tiles of some sizes: shares of cores, loops, tiles inside.

    A core gets about `tiles` tiles of equal widths. With `tiles` None the tiles have exactly these
    widths and are all on one core. For 4,096 x 512 numbers on 8 cores, in tiles of 64 rows:

        for i_o in 8 (one core each): for i_i_o in 8: load, compute and store 64 x 512 numbers
    """
    folds = sizes.folds
    root = s.state.stage(phase.root)
    name = phase.root
    shares = {a.name: a.extent for a in root.axes}
    widths = {a.name: min(sizes.widths[a.name], a.extent) for a in root.axes}
    if tiles is not None:
        shares, widths = _evened(s, phase, rows, sizes, depth, tiles)
    s, loops = _cut_axes(s, name, rows, shares, widths)
    s, fold_steps, fold_axes = fold_loops(s, name, root.reduce, folds)
    outer_loops = (*loops.of_cores, *loops.of_rows, *loops.of_other_axes)
    s = reorder(s, name, *outer_loops, *fold_steps, *loops.in_tile, *fold_axes)
    for loop in loops.of_cores:
        s = bind(s, name, loop)
    s = vectorise(s, name, loops.in_tile[0])
    if phase.tiles or phase.outputs:
        s = attach_tiles(s, phase, [*loops.of_cores, *loops.of_rows], folds, depth)
    for output_name in (name, *phase.outputs):
        s = primitives_tiles.double_buffer(s, output_name, depth)
    return s


class _Loops(NamedTuple):
    """The loops of a nest: over cores, over tiles along the row axes and others, within a tile."""

    of_cores: list[str]
    of_rows: list[str]
    of_other_axes: list[str]
    in_tile: list[str]


def _cut_axes(
    s: Schedule, name: str, rows: list[str], shares: Widths, widths: Widths
) -> tuple[Schedule, _Loops]:
    """Split each axis of a stage into shares of cores, and these into tiles."""
    loops = _Loops([], [], [], [])
    for axis in s.state.stage(name).axes:
        share = shares[axis.name]
        width = widths[axis.name]
        inner_loop = axis.name
        if share < axis.extent:
            s, inner_loop = _cut(s, name, inner_loop, share, loops.of_cores)
        if width < share or (width == 1 and axis.name in rows):
            tile_loops = loops.of_rows if axis.name in rows else loops.of_other_axes
            s, inner_loop = _cut(s, name, inner_loop, width, tile_loops)
        loops.in_tile.append(inner_loop)
    return s, loops


def _evened(
    s: Schedule, phase: Phase, rows: list[str], sizes: TileSizes, depth: int, tiles: int
) -> tuple[Widths, Widths]:
    """Return the elements of each axis for a core, and for a tile of it: tiles of about one size.

    A core with 1,000 rows, 96 of which fit in a tile, gets 11 tiles of 91 rows.
    """
    root = s.state.stage(phase.root)
    shares = core_shares(s, phase, rows)
    unit = block_elements(s.state, phase)
    has_single_rows = max(sizes.widths[n] for n in rows) == 1  # nothing to even out
    taken_bytes = 0
    if not has_single_rows:
        taken_bytes = tile_bytes(s, phase, sizes.widths, sizes.folds, depth)
    widths = Widths()
    remaining_tiles = tiles
    for axis in root.axes:
        share = shares[axis.name]
        width = min(sizes.widths[axis.name], share)
        if axis.name in rows:
            width_unit = _width_unit(root, axis, unit)
            width = even_width(width, share, taken_bytes, width_unit, remaining_tiles)
            shares[axis.name] = share_in_whole_tiles(axis.extent, share, width)
            tiles_of_axis = isa.ceil_div(shares[axis.name], width)
            remaining_tiles = isa.ceil_div(remaining_tiles, tiles_of_axis)
        widths[axis.name] = width
    return shares, widths


def _width_unit(root: Stage, axis: tensor.Axis, unit: int) -> int:
    """Return the number of elements of an axis of which a tile's width is a multiple.

    Along the last axis it is a block. Along the axis before it, it is the number of rows that fill
    four blocks, if rows are so short that several do: 16 rows of 4 numbers in fp16.
    """
    if axis is root.axes[-1]:
        return unit
    if axis not in root.axes[-2:-1]:
        return 1
    rows, remainder = divmod(4 * unit, root.axes[-1].extent)
    return rows if rows and not remainder else 1


def _cut(s: Schedule, name: str, loop: str, width: int, outer: list[str]) -> tuple[Schedule, str]:
    """Split a loop, add its outer part to `outer`; return the schedule and the inner part."""
    outer.append(f"{loop}_o")
    return split(s, name, loop, width), f"{loop}_i"


def fold_loops(
    s: Schedule, name: str, axes: Sequence[tensor.Axis], folds: Mapping[str, int]
) -> tuple[Schedule, list[str], list[str]]:
    """Split the axes of a stage that are done in parts; return outer loops and loops in tiles."""
    loops: list[str] = []
    loops_in_tile: list[str] = []
    for axis in axes:
        width = folds.get(f"{name}.{axis.name}", axis.extent)
        inner_loop = axis.name
        if width < axis.extent:
            s, inner_loop = _cut(s, name, inner_loop, width, loops)
        loops_in_tile.append(inner_loop)
    return s, loops, loops_in_tile


def attach_tiles(
    s: Schedule, phase: Phase, host_loops: list[str], folds: Mapping[str, int], depth: int = 2
) -> Schedule:
    """Compute tiles and further outputs in the innermost loop of the root."""
    if not host_loops:
        outermost = s.state.stage(phase.root).loops[0]
        s = _with_outer_loop(s, phase.root, outermost)
        host_loops = [f"{outermost.name}_o"]
    for name in reversed(phase.outputs):
        s = primitives_tiles.compute_at(s, name, phase.root, host_loops[-1])
    for name in reversed(phase.tiles):
        stage = s.state.stage(name)
        s, loops, loops_in_tile = fold_loops(s, name, (*stage.axes, *stage.reduce), folds)
        if loops:
            s = vectorise(reorder(s, name, *loops, *loops_in_tile), name, loops_in_tile[0])
        s = primitives_tiles.double_buffer(s, name, depth if stage.scope == "GM" else 1)
        s = primitives_tiles.compute_at(s, name, phase.root, host_loops[-1])
    return s


def _with_outer_loop(s: Schedule, name: str, outermost: Leaf) -> Schedule:
    """Add a loop of one step around a nest without loops, to which tiles can be attached."""
    state = s.state.put(replace(s.state.stage(name), vector_at=""))
    steps = tuple(x for x in s.steps if x.primitive != "vectorise" or x.arguments[0] != name)
    s = split(replace(s, state=state, steps=steps), name, outermost.name, outermost.extent)
    return vectorise(s, name, f"{outermost.name}_i")
