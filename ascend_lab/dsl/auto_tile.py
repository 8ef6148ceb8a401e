"""Which part of a phase each core takes, and how evenly its tiles are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.dsl.auto_fuse import Phase, merge_axes, row_axes
from ascend_lab.dsl.boxes import ub_bytes
from ascend_lab.dsl.nests import complete, moves_only
from ascend_lab.dsl.primitives_loops import bind, reorder, rfactor, split, vectorise
from ascend_lab.dsl.primitives_tiles import compute_at, double_buffer, inline
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.stages import Stage, State
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import c0_of
from ascend_lab.kernels.gemm_schedule import up

TILES_PER_CORE = 4
SMALL_BYTES = 32768
"""Tiles that take less of UB than this are not made smaller only to have several of them."""

Widths = dict[str, int]
"""Elements of a tile per axis."""


def core_count(s: Schedule) -> int:
    """Return the vector cores of the chip."""
    return s.chip.core_count * s.chip.vector_cores_per_core


def core_shares(s: Schedule, phase: Phase, rows: list[str]) -> Widths:
    """Return the elements of each axis that one core takes: whole blocks along the last one."""
    root = s.state.stage(phase.root)
    shares = {a.name: a.extent for a in root.axes}
    unit = block_elements(s.state, phase)
    last = root.axes[-1].name
    if long_rows(s.state, phase):
        unit = 1
    choice = [a for a in root.axes if a.name in rows and (a.name != last or a.extent >= 2 * unit)]
    if not choice:
        return shares
    one, two = choice[0], choice[1] if len(choice) > 1 else None
    best = (math.inf, one.extent, 0)
    for cores in range(1, core_count(s) + 1):
        first = _share(one.extent, cores, unit if one.name == last else 1)
        second = 1
        if two is not None:
            rest = max(1, core_count(s) // -(-one.extent // first))
            second = _share(two.extent, rest, unit if two.name == last else 1)
        best = min(best, (first * second, first, second))
    shares[one.name] = int(best[1])
    if two is not None:
        shares[two.name] = best[2]
    return shares


def long_rows(state: State, phase: Phase) -> bool:
    """True if one element of the result needs so many that sharing by blocks would idle cores."""
    folds = [state.stage(n) for n in (*phase.tiles, phase.root) if state.stage(n).fold]
    sizes = [
        math.prod(a.extent for a in f.reduce) * DTYPE_BYTES[r.dtype] for f in folds for r in f.reads
    ]
    return max(sizes, default=0) >= SMALL_BYTES // 4


def _share(extent: int, cores: int, unit: int) -> int:
    """Return what one of `cores` takes of an axis: whole units, eight where it is long."""
    share = -(-extent // cores)
    if unit > 1:
        unit = 8 * unit if share >= 32 * unit else unit
        share = -(-share // unit) * unit
    return min(share, extent)


def block_elements(state: State, phase: Phase) -> int:
    """Return the elements of a 32-byte block, for all formats of a phase at once."""
    return math.lcm(*(c0_of(d) for d in phase_formats(state, phase)))


def phase_formats(state: State, phase: Phase) -> set[str]:
    """Return the number formats a phase reads and writes."""
    names = (phase.root, *phase.outputs)
    found = {r.dtype for n in (*names, *phase.tiles) for r in state.stage(n).reads}
    return found | {state.stage(n).dtype for n in names}


def even(width: int, share: int, taken_bytes: int, unit: int, tiles: int) -> int:
    """Return a width not above `width` that cuts a share into `tiles` tiles of about one size.

    `taken_bytes` is what a tile of `width` takes of UB; widths are multiples of `unit`.
    """
    small = max(1, SMALL_BYTES * width // max(taken_bytes, 1))
    wanted = min(width, max(small, up(share, tiles)))
    if wanted >= share:
        return share
    unit = (8 * unit if wanted >= 64 * unit else unit) if width >= unit else 1
    parts = -(-share // wanted)
    each = up(up(share, parts), unit) * unit
    return min(each, max(width // unit * unit, 1), share)


def whole_tiles(extent: int, share: int, width: int) -> int:
    """Return the share filled up to whole tiles, if that costs no core its work."""
    filled = min(up(share, width) * width, extent)
    return filled if up(extent, filled) == up(extent, share) else share


# How large the tiles of a phase are, and which core computes which.


LINE_BYTES = 512
"""Folds over rows keep at least this much of a row together: one line of L2 (PTO cost model)."""


def schedule_phase(s: Schedule, phase: Phase, *, merge: bool = True) -> Schedule:
    """Schedule one nest: merge axes, choose tile sizes, share them over cores, fuse its tiles."""
    if moves_only(s.state, s.state.stage(phase.root)) and not phase.tiles:
        return s  # a strided copy has a kernel of its own
    s, phase = _split_folds(s, phase)
    before = s
    if merge:
        s = merge_axes(s, phase)
    rows = row_axes(s.state, phase)
    best = largest(s, phase, rows) if rows or not (phase.tiles or phase.outputs) else None
    if best is None or _cuts_blocks(s, phase, best[0]):
        return _apart(before, phase)
    return arrange(s, phase, rows, *best)


def _cuts_blocks(s: Schedule, phase: Phase, widths: Widths) -> bool:
    """True if elementwise tiles leave the phase less than a block of its innermost axis."""
    if phase.outputs or not phase.tiles or any(s.state.stage(n).fold for n in phase.tiles):
        return False
    last = s.state.stage(phase.root).axes[-1]
    return widths[last.name] < min(last.extent, block_elements(s.state, phase))


def _apart(s: Schedule, phase: Phase) -> Schedule:
    """Where not even one row fits: folds become phases, elementwise values are computed again."""
    if not phase.tiles and not phase.outputs:
        raise ScheduleError(
            f"a tile of {phase.root} that fits in UB",
            f"{s.chip.buffers['UB']} bytes on {s.chip.name}",
            "reshape the tensor so that an axis can be split",
        )
    roots = []
    for name in phase.tiles:
        stage = s.state.stage(name)
        if stage.fold:
            roots.append(name)
        else:
            s = inline(s, name)
    for name in (*roots, *phase.outputs, phase.root):
        s = schedule_phase(s, Phase(name))
    return s


def _split_folds(s: Schedule, phase: Phase) -> tuple[Schedule, Phase]:
    """Cut long folds that leave most cores idle into one partial fold per core."""
    for name in (*phase.tiles, phase.root):
        stage = s.state.stage(name)
        axis = _axis_for_cores(s, stage) if stage.fold else ""
        if not axis or len(phase.tiles) > 1:
            continue
        extent = next(a.extent for a in stage.reduce if a.name == axis)
        s = split(s, name, axis, extent // _parts(s, extent))
        s = rfactor(s, name, f"{axis}_o")
        s = schedule_phase(s, Phase(f"{name}_rf"))
    return s, phase


def _parts(s: Schedule, extent: int) -> int:
    """Return the largest number of cores that divides an axis."""
    return max(d for d in range(1, core_count(s) + 1) if extent % d == 0)


def _axis_for_cores(s: Schedule, stage: Stage) -> str:
    """Return the fold axis to cut for the cores, or nothing where that does not pay."""
    units = math.prod(stage.shape)
    if any(a.name == "p" for a in (*stage.axes, *stage.reduce)):
        return ""
    itemsize = DTYPE_BYTES[stage.expr.dtype]
    size = math.prod(a.extent for a in stage.reduce) * units
    if _keeps_lanes(stage):
        units = max(1, units * itemsize // LINE_BYTES)
    if 2 * units > core_count(s) or size * itemsize < 4 * SMALL_BYTES:
        return ""
    axis = max(stage.reduce, key=lambda a: a.extent)
    parts = _parts(s, axis.extent)
    return axis.name if parts >= 2 * units and axis.extent // parts > 1 else ""


def largest(s: Schedule, phase: Phase, rows: list[str]) -> tuple[Widths, Widths] | None:
    """Return the widest tile that fits, and the widths of folds; None if none does."""
    stages = [s.state.stage(n) for n in (*phase.tiles, phase.root)]
    root, extents = stages[-1], core_shares(s, phase, rows)
    folds = {f"{x.name}.{a.name}": a.extent for x in stages if x.fold for a in x.reduce}
    last = root.axes[-1].name
    least = {n: 1 if n in rows else extents[n] for n in extents}
    if last in rows and any(x.fold and _keeps_lanes(x) for x in stages):
        least[last] = min(LINE_BYTES // DTYPE_BYTES[root.dtype], extents[last])

    def both(sizes: Widths) -> tuple[Widths, Widths]:
        return {n: sizes[n] for n in extents}, {n: sizes[n] for n in folds}

    def fits(sizes: Widths) -> bool:
        return tile_bytes(s, phase, *both(sizes)) <= s.chip.buffers["UB"]

    for cut in (False, True) if folds else (False,):
        sizes = least | (dict.fromkeys(folds, 1) if cut else folds)
        if not fits(sizes):
            continue
        for name in reversed(list(folds)) if cut else ():
            sizes[name] = _widest(fits, sizes, name, folds[name], 1)
        for name in reversed(rows):
            sizes[name] = _widest(fits, sizes, name, extents[name], sizes[name])
            if sizes[name] < extents[name]:
                break
        return both(sizes)
    return None


def _keeps_lanes(stage: Stage) -> bool:
    """True if neighbours along the last axis are neighbours in what the stage reads."""
    axis = stage.axes[-1].name
    return any(dict(r.index[-1].terms).get(axis) == 1 for r in stage.reads if r.index)


def _widest(fits: Callable[[Widths], bool], sizes: Widths, name: str, extent: int, low: int) -> int:
    """Return the largest size of one axis, up to `extent`, that fits; by bisection, from `low`."""
    if fits(sizes | {name: extent}):
        return extent
    high = extent
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes | {name: middle}) else (low, middle)
    return low


def tile_bytes(
    s: Schedule, phase: Phase, widths: Mapping[str, int], folds: Mapping[str, int]
) -> int:
    """Return the bytes of UB that tiles of these widths take."""
    trial = arrange(s, phase, list(widths), widths, folds, plain=True)
    return ub_bytes(complete(trial.state, phase.root), phase.root, s.chip)


def arrange(
    s: Schedule,
    phase: Phase,
    rows: list[str],
    widths: Mapping[str, int],
    folds: Mapping[str, int],
    plain: bool = False,
) -> Schedule:
    """Apply the steps for tiles of `widths`: shares of cores, loops, whole tiles inside."""
    name = phase.root
    s, bound, loops, tiles = _cut_axes(s, phase, rows, widths, folds, plain)
    s, inner, rest = fold_loops(s, name, folds)
    s = reorder(s, name, *bound, *loops, *inner, *tiles, *rest)
    for loop in bound:
        s = bind(s, name, loop)
    s = vectorise(s, name, tiles[0])
    host = [*bound, *loops]
    if phase.tiles or phase.outputs:
        s = attach_tiles(s, phase, host, folds)
    for each in (name, *phase.outputs):
        s = double_buffer(s, each)
    return s


def _cut_axes(
    s: Schedule,
    phase: Phase,
    rows: list[str],
    widths: Mapping[str, int],
    folds: Mapping[str, int],
    plain: bool,
) -> tuple[Schedule, list[str], list[str], list[str]]:
    """Split the axes of the root; return the loops over cores, over tiles, and inside tiles.

    `plain`: into tiles of exactly `widths`, on one core.
    """
    root, name = s.state.stage(phase.root), phase.root
    shares = {a.name: a.extent for a in root.axes} if plain else core_shares(s, phase, rows)
    unit = block_elements(s.state, phase)
    taken = 0 if plain else tile_bytes(s, phase, widths, folds)
    bound: list[str] = []
    loops: list[str] = []
    tiles: list[str] = []
    left = TILES_PER_CORE
    for axis in root.axes:
        width, share, leaf = widths[axis.name], shares[axis.name], axis.name
        width = min(width, share)
        if not plain and axis.name in rows:
            width = even(width, share, taken, unit if axis is root.axes[-1] else 1, left)
            share = whole_tiles(axis.extent, share, width)
            left = up(left, up(share, width))
        if share < axis.extent:
            s = split(s, name, leaf, share)
            bound.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        if width < share or (width == 1 and axis.name in rows):
            s = split(s, name, leaf, width)
            loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        tiles.append(leaf)
    return s, bound, loops, tiles


def fold_loops(
    s: Schedule, name: str, folds: Mapping[str, int]
) -> tuple[Schedule, list[str], list[str]]:
    """Split the fold axes of a stage that are walked in parts; return loops and tile loops."""
    loops, tiles = [], []
    for axis in s.state.stage(name).reduce:
        width, leaf = folds.get(f"{name}.{axis.name}", axis.extent), axis.name
        if width < axis.extent:
            s = split(s, name, leaf, width)
            loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        tiles.append(leaf)
    return s, loops, tiles


def attach_tiles(
    s: Schedule, phase: Phase, host: list[str], folds: Mapping[str, int], depth: int = 2
) -> Schedule:
    """Compute tiles and further outputs in the innermost loop of the root."""
    if not host:
        leaf = s.state.stage(phase.root).loops[0].name
        s = replace_vector(s, phase.root, leaf)
        host = [f"{leaf}_o"]
    for name in reversed(phase.outputs):
        s = compute_at(s, name, phase.root, host[-1])
    for name in reversed(phase.tiles):
        s, loops, tiles = fold_loops(s, name, folds)
        if loops:
            data = [a.name for a in s.state.stage(name).axes]
            s = reorder(s, name, *loops, *data, *tiles)
            s = vectorise(s, name, data[0])
        s = double_buffer(s, name, depth)
        s = compute_at(s, name, phase.root, host[-1])
    return s


def replace_vector(s: Schedule, name: str, leaf: str) -> Schedule:
    """Open a loop of one step around a nest that has none, for tiles to hang on."""
    state = s.state
    s = replace(s, state=state.put(replace(state.stage(name), vector_at="")))
    steps_before = tuple(x for x in s.steps if x.primitive != "vectorise" or x.arguments[0] != name)
    s = replace(s, steps=steps_before)
    extent = s.state.stage(name).loop(leaf).extent
    s = split(s, name, leaf, extent)
    return vectorise(s, name, f"{leaf}_i")
