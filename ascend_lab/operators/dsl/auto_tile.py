"""Choose the tile sizes of a phase for the default schedule, and divide the tiles over cores.

A phase is the loop nest of a root stage with the tiles computed inside it; a fold is a reduction.
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
SMALL_BYTES = 32768
"""Tiles that take less of UB than this are not made smaller only to have several of them."""

SHARED_BYTES = SMALL_BYTES // 4
"""Folds of rows this long: sharing results by blocks would idle cores."""

LINE_BYTES = 512
"""Folds over rows keep at least this much of a row together: one line of L2 (PTO cost model)."""

NARROW_BYTES = 64
"""What folds over long columns may keep of a row, if all of a column is then in UB at once."""

Widths = dict[str, int]
"""Elements of a tile per axis."""


class TileSizes(NamedTuple):
    """Elements of a tile along each axis of its root, and elements of each fold axis per step.

    Fold axes are named with their stage, as "sum_1.k".
    """

    widths: Mapping[str, int]
    folds: Mapping[str, int]


def core_count(s: Schedule) -> int:
    """Return the vector cores of the chip."""
    return s.chip.core_count * s.chip.vector_cores_per_core


def core_shares(s: Schedule, phase: Phase, rows: list[str]) -> Widths:
    """Return the elements of each axis that one core takes: whole blocks along the last one."""
    axes = s.state.stage(phase.root).axes
    cores = core_count(s)
    # The last part of a row is shorter and needs another program, so each part gets its own core.
    if s.state.stage(phase.root).last_fold_extent:
        row_shares = {axes[0].name: isa.ceil_div(axes[0].extent, cores // axes[-1].extent)}
        return {a.name: a.extent for a in axes} | row_shares | {axes[-1].name: 1}
    unit = 1 if long_rows(s.state, phase) else block_elements(s.state, phase)
    choice = [a for a in axes if a.name in rows and (a is not axes[-1] or a.extent >= 2 * unit)]

    def share(axis: tensor.Axis, cores: int) -> int:
        return _share(axis.extent, cores, unit if axis is axes[-1] else 1)

    choices = []
    for used in range(1, cores + 1) if choice else ():
        outer_share = share(choice[0], used)
        # 20 rows and 4,096 columns on 32 cores: with one row per core 12 would be idle; with 16
        # cores along columns, 2 stretches of 10 rows, all 32 work.
        cores_left = max(1, cores // isa.ceil_div(choice[0].extent, outer_share))
        inner_share = share(choice[1], cores_left) if len(choice) > 1 else 1
        choices.append((outer_share * inner_share, outer_share, inner_share))
    best = min(choices)[1:] if choices else ()
    chosen = {a.name: n for a, n in zip(choice, best, strict=False)}
    return {a.name: a.extent for a in axes} | chosen


def long_rows(state: State, phase: Phase, least_bytes: int = SHARED_BYTES) -> bool:
    """True if one element of the result needs `least_bytes` or more of one operand."""
    folds = [x for x in map(state.stage, (*phase.tiles, phase.root)) if x.fold]
    sizes = (
        math.prod(a.extent for a in f.reduce) * DTYPE_BYTES[r.dtype] for f in folds for r in f.reads
    )
    return max(sizes, default=0) >= least_bytes


def _share(extent: int, cores: int, unit: int) -> int:
    """Return the elements of an axis for one of `cores`: whole units, in eights if it is long."""
    share = -(-extent // cores)
    if unit > 1:
        unit = 8 * unit if share >= 32 * unit else unit
        share = -(-share // unit) * unit
    return min(share, extent)


def block_elements(state: State, phase: Phase) -> int:
    """Return the elements of a 32-byte block, for all formats of a phase at once."""
    stages = [state.stage(n) for n in phase.names]
    dtypes = {r.dtype for x in stages for r in x.reads}
    dtypes |= {x.dtype for x in stages if x.name not in phase.tiles}
    return math.lcm(*map(isa.c0_of, dtypes))


def even(width: int, share: int, taken_bytes: int, unit: int, tiles: int) -> int:
    """Return a width not above `width` that cuts a share into `tiles` tiles of about one size.

    `taken_bytes` is what a tile of `width` takes of UB; widths are multiples of `unit`.
    """
    # The width at which a tile takes 32 KiB: halving smaller ones only adds instructions.
    small = max(1, SMALL_BYTES * width // max(taken_bytes, 1))
    # A share of 1,000 rows in 4 tiles: 250 each. With tiles of at most 96 there are 11, of 91 rows.
    aimed = min(width, max(small, isa.ceil_div(share, tiles)))
    if aimed >= share:
        return share
    unit = (8 * unit if aimed >= 64 * unit else unit) if width >= unit else 1
    parts = -(-share // aimed)
    part_width = isa.ceil_div(isa.ceil_div(share, parts), unit) * unit
    return min(part_width, max(width // unit * unit, 1), share)


def whole_tiles(extent: int, share: int, width: int) -> int:
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
    unmerged = s = _split_folds(s, phase)
    s = merge_axes(s, phase) if merge else s
    rows = row_axes(s.state, phase)
    # Two slots let loads and arithmetic overlap; if not even narrow tiles fit twice, one slot.
    for depth in (2, 1) if rows or not (phase.tiles or phase.outputs) else ():
        best = largest(s, phase, rows, depth, ub_share, line_bytes)
        if best is not None and not _cuts_blocks(s, phase, best.widths):
            return arrange(s, phase, rows, best, depth, tiles)
    return _apart(unmerged, phase)


def _cuts_blocks(s: Schedule, phase: Phase, widths: Mapping[str, int]) -> bool:
    """True if elementwise tiles leave less than a block for the phase's innermost axis."""
    if phase.outputs or not phase.tiles or any(s.state.stage(n).fold for n in phase.tiles):
        return False
    row_axis = s.state.stage(phase.root).axes[-1]
    return widths[row_axis.name] < min(row_axis.extent, block_elements(s.state, phase))


def _apart(s: Schedule, phase: Phase) -> Schedule:
    """Split a phase of which not one row fits: folds become phases, other values are recomputed."""
    if not phase.tiles and not phase.outputs:
        needed = f"a tile of {phase.root} that fits in UB"
        got = f"{s.chip.buffers['UB']} bytes on {s.chip.name}"
        raise errors.ScheduleError(needed, got, "reshape the tensor so that an axis can be split")
    again = [n for n in phase.tiles if not s.state.stage(n).fold]
    for name in again:
        s = primitives_tiles.inline(s, name)
    for name in phase.names:
        s = s if name in again else schedule_phase(s, Phase(name))
    return s


def _split_folds(s: Schedule, phase: Phase) -> Schedule:
    """Cut long folds that leave most cores idle into one partial fold per core."""
    for name in (*phase.tiles, phase.root) if len(phase.tiles) < 2 else ():
        stage = s.state.stage(name)
        axis = max(stage.reduce, key=lambda a: a.extent, default=None)
        width = _part_for_cores(s, stage, axis.extent) if axis else 0
        if axis and width:
            s = rfactor(split(s, name, axis.name, width), name, f"{axis.name}_o")
            s = schedule_phase(s, Phase(f"{name}_rf"))
    return s


def _part_for_cores(s: Schedule, stage: Stage, extent: int) -> int:
    """Return the elements of a fold axis that one core folds, or 0 if cutting it does not pay."""
    units = math.prod(stage.shape)
    itemsize = DTYPE_BYTES[stage.expr.dtype]
    size = math.prod(a.extent for a in stage.reduce) * units
    if keeps_lanes(stage):
        units = max(1, units * itemsize // LINE_BYTES)
    # Equal parts only: 4,096 elements on 20 cores are 16 parts of 256.
    parts = max(d for d in range(1, core_count(s) + 1) if extent % d == 0)
    cut = any(a.name == "p" for a in (*stage.axes, *stage.reduce))
    if cut or 2 * units > core_count(s) or size * itemsize < 4 * SMALL_BYTES:
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

    def both(sizes: Widths) -> TileSizes:
        return TileSizes({n: sizes[n] for n in extents}, {n: sizes[n] for n in folds})

    def fits(sizes: Widths) -> bool:
        return tile_bytes(s, phase, *both(sizes), depth) <= ub_share * s.chip.buffers["UB"]

    # Whole fold axes first: a fold in steps needs a partial result between them.
    for cut in (False, True) if folds else (False,):
        sizes = smallest | (dict.fromkeys(folds, 1) if cut else folds)
        if not fits(sizes):
            continue
        for name in reversed(list(folds)) if cut else ():
            sizes[name] = _whole(_widest(fits, sizes, name, folds[name], 1), folds[name])
        for name in reversed(rows):
            sizes[name] = _widest(fits, sizes, name, extents[name], sizes[name])
            if sizes[name] < extents[name]:
                break
        return both(sizes)
    return None


def keeps_lanes(stage: Stage) -> bool:
    """True if the fold's source is contiguous along an axis that stays: no fold across lanes."""
    folded = {a.name for a in stage.reduce}
    lane = stage.axes[-1].name
    sources = [r for r in stage.reads if folded & {n for i in r.index for n, _ in i.terms}]
    return any(dict(r.index[-1].terms).get(lane) == 1 for r in sources)


def _whole(width: int, extent: int) -> int:
    """Return the width of parts of a fold: about equal ones, of whole repeats or blocks."""
    parts = isa.ceil_div(extent, width)
    unit = next((n for n in (128, 32) if width >= 2 * n), 1)
    return min(
        width - width % unit if parts > 1 else width,
        isa.ceil_div(isa.ceil_div(extent, parts), unit) * unit,
    )


def _widest(fits: Callable[[Widths], bool], sizes: Widths, name: str, extent: int, low: int) -> int:
    """Return the largest size of one axis, up to `extent`, that fits; by bisection, from `low`."""
    if fits(sizes | {name: extent}):
        return extent
    high = extent
    # Close enough: within 6 % of the widest that fits, as each trial lays out a nest.
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes | {name: middle}) else (low, middle)
    return low


def tile_bytes(
    s: Schedule, phase: Phase, widths: Mapping[str, int], folds: Mapping[str, int], depth: int = 2
) -> int:
    """Return the bytes of UB that tiles of these widths take."""
    name = phase.root
    root = s.state.stage(phase.root)
    extents = {f"{x}.{a.name}": a.extent for x in phase.names for a in s.state.stage(x).reduce}
    # The loops and tiles depend on which axes are cut, not on the widths, so the nest is cached.
    parts = frozenset(n for n, width in folds.items() if width < extents[n])
    cut = any(widths[a.name] < max(a.extent, 2) for a in root.axes)
    nest = _completed(s, phase, cut, parts, depth)
    steps = {f"{name}.{n}": width for n, width in widths.items()} | dict(folds)
    local = nest.stage(name).sources[0]  # where a fold is computed, whose root is then a copy
    steps |= {f"{local}.{a.name}": folds[f"{name}.{a.name}"] for a in root.reduce}
    return boxes.ub_bytes(nest, name, s.chip, steps)


@lru_cache(maxsize=16)
def _completed(s: Schedule, phase: Phase, cut: bool, parts: frozenset[str], depth: int) -> State:
    """Return the completed nest with loops over single elements of all axes, or with none (`cut`).

    The tiles of a nest depend only on this and on the `parts` of folds, not on widths.
    """
    root = s.state.stage(phase.root)
    stages = map(s.state.stage, phase.names)
    widths = {a.name: 1 if cut else a.extent for a in root.axes}
    folds = {f"{x.name}.{a.name}": a.extent for x in stages for a in x.reduce}
    folds |= dict.fromkeys(parts, 1)
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
    bound = list[str]()
    loops = list[str]()
    inside = list[str]()
    leaves = list[str]()
    for axis in root.axes:
        share = shares[axis.name]
        width = widths[axis.name]
        leaf = axis.name
        if share < axis.extent:
            s, leaf = _cut(s, name, leaf, share, bound)
        if width < share or (width == 1 and axis.name in rows):
            s, leaf = _cut(s, name, leaf, width, loops if axis.name in rows else inside)
        leaves.append(leaf)
    s, inner, fold_leaves = fold_loops(s, name, root.reduce, folds)
    s = reorder(s, name, *bound, *loops, *inside, *inner, *leaves, *fold_leaves)
    for loop in bound:
        s = bind(s, name, loop)
    s = vectorise(s, name, leaves[0])
    if phase.tiles or phase.outputs:
        s = attach_tiles(s, phase, [*bound, *loops], folds, depth)
    for output_name in (name, *phase.outputs):
        s = primitives_tiles.double_buffer(s, output_name, depth)
    return s


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
    tiles_left = tiles
    for axis in root.axes:
        share = shares[axis.name]
        width = min(sizes.widths[axis.name], share)
        if axis.name in rows:
            width = even(width, share, taken_bytes, _run(root, axis, unit), tiles_left)
            shares[axis.name] = whole_tiles(axis.extent, share, width)
            tiles_left = isa.ceil_div(tiles_left, isa.ceil_div(shares[axis.name], width))
        widths[axis.name] = width
    return shares, widths


def _run(root: Stage, axis: tensor.Axis, unit: int) -> int:
    """Return the elements of an axis that fill a block, or four blocks if its rows are short."""
    rows, remainder = divmod(4 * unit, root.axes[-1].extent)
    rows = rows if axis in root.axes[-2:-1] and rows and not remainder else 1
    return unit if axis is root.axes[-1] else rows


def _cut(s: Schedule, name: str, leaf: str, width: int, outer: list[str]) -> tuple[Schedule, str]:
    """Split a loop, note its outer part, and return the schedule and the inner part."""
    outer.append(f"{leaf}_o")
    return split(s, name, leaf, width), f"{leaf}_i"


def fold_loops(
    s: Schedule, name: str, axes: Sequence[tensor.Axis], folds: Mapping[str, int]
) -> tuple[Schedule, list[str], list[str]]:
    """Split the axes of a stage that are done in parts; return outer loops and loops in tiles."""
    loops: list[str] = []
    tiles: list[str] = []
    for axis in axes:
        width = folds.get(f"{name}.{axis.name}", axis.extent)
        leaf = axis.name
        if width < axis.extent:
            s, leaf = _cut(s, name, leaf, width, loops)
        tiles.append(leaf)
    return s, loops, tiles


def attach_tiles(
    s: Schedule, phase: Phase, host: list[str], folds: Mapping[str, int], depth: int = 2
) -> Schedule:
    """Compute tiles and further outputs in the innermost loop of the root."""
    if not host:
        leaf = s.state.stage(phase.root).loops[0]
        s = _opened(s, phase.root, leaf)
        host = [f"{leaf.name}_o"]
    for name in reversed(phase.outputs):
        s = primitives_tiles.compute_at(s, name, phase.root, host[-1])
    for name in reversed(phase.tiles):
        stage = s.state.stage(name)
        s, loops, tiles = fold_loops(s, name, (*stage.axes, *stage.reduce), folds)
        if loops:
            s = vectorise(reorder(s, name, *loops, *tiles), name, tiles[0])
        s = primitives_tiles.double_buffer(s, name, depth if stage.scope == "GM" else 1)
        s = primitives_tiles.compute_at(s, name, phase.root, host[-1])
    return s


def _opened(s: Schedule, name: str, leaf: Leaf) -> Schedule:
    """Add a loop of one step around a nest without loops, to which tiles can be attached."""
    state = s.state.put(replace(s.state.stage(name), vector_at=""))
    steps = tuple(x for x in s.steps if x.primitive != "vectorise" or x.arguments[0] != name)
    s = split(replace(s, state=state, steps=steps), name, leaf.name, leaf.extent)
    return vectorise(s, name, f"{leaf.name}_i")
