"""How one nest is laid out: the numbers, what they take of a core, and which are worth trying."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ascend_lab import dsl as steps
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.dsl.auto_fuse import Phase
from ascend_lab.dsl.auto_tile import attach_tiles, fold_loops
from ascend_lab.dsl.boxes import ub_bytes
from ascend_lab.dsl.schedule import Schedule, complete
from ascend_lab.dsl.stages import Stage, State
from ascend_lab.kernels.gemm_schedule import up


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of a nest.

    `cuts`: (axis, elements a core takes, elements of a tile); `folds`: (stage.axis, width) of the
    folds walked in parts; `depth`: slots of every tile that is loaded or stored; `guard`: the axis
    whose last tile is moved back so that it is whole, or nothing.
    """

    cuts: tuple[tuple[str, int, int], ...]
    folds: tuple[tuple[str, int], ...] = ()
    depth: int = 2
    guard: str = ""

    def sizes(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Return what the bytes grow with: widths of axes and folds of `extents`, and slots."""
        folds = {**extents, **dict(self.folds)}
        return (*(width for _, _, width in self.cuts), *folds.values(), self.depth)


@dataclass(frozen=True, slots=True)
class Nest:
    """Stages computed in one nest, and the axes of its root that may be cut."""

    phase: Phase
    rows: tuple[str, ...]


def lay(s: Schedule, nest: Nest, layout: Layout) -> Schedule:
    """Return the schedule with one more nest laid out; `ScheduleError` for impossible numbers."""
    phase, bound, loops, tiles = nest.phase, [], [], []
    name = phase.root
    extents = {a.name: a.extent for a in s.state.stage(name).axes}
    for axis, share, width in layout.cuts:
        leaf = axis
        if share < extents[axis]:
            s = steps.split(s, name, leaf, share)
            bound.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        if width < share or (width == 1 and axis in nest.rows):
            tail = "guard" if axis == layout.guard else "cut"
            s = steps.split(s, name, leaf, width, tail=tail)
            loops.append(f"{leaf}_o")
            leaf = f"{leaf}_i"
        tiles.append(leaf)
    folds = dict(layout.folds)
    s, inner, rest = fold_loops(s, name, folds)
    s = steps.reorder(s, name, *bound, *loops, *inner, *tiles, *rest)
    for loop in bound:
        s = steps.bind(s, name, loop)
    s = steps.vectorise(s, name, tiles[0])
    if phase.tiles or phase.outputs:
        s = attach_tiles(s, phase, [*bound, *loops], folds, layout.depth)
    for each in (name, *phase.outputs):
        s = steps.double_buffer(s, each, layout.depth)
    return s


def read_layout(state: State, phase: Phase) -> Layout:
    """Return the numbers of a nest that is laid out already: the inverse of `lay`."""
    root = state.stage(phase.root)
    cuts = []
    for axis in root.axes:
        outer = [x for x in root.loops if x.root == axis.name]
        share = next((x.width for x in outer if x.name in root.bound), axis.extent)
        # the last loop over parts of an axis says the width of a tile
        widths = [x.width for x in outer[:-1] if x.name not in root.bound]
        cuts.append((axis.name, share, min([share, *widths[-1:]])))
    folds = []
    for stage in (state.stage(n) for n in (*phase.tiles, phase.root)):
        for fold in stage.reduce if stage.fold else ():
            leaves = [x for x in stage.loops if x.root == fold.name]
            if len(leaves) > 1:
                folds.append((f"{stage.name}.{fold.name}", leaves[0].width))
    return Layout(tuple(cuts), tuple(folds), root.depth)


# -- what a nest takes of a core before its program is written -------------------------------------


def nest_needs(laid: State, root: str, chip: Chip) -> tuple[int, int, int]:
    """Return bytes of UB with one slot a tile, bytes of every further slot, and queues."""
    done, sizes = complete(laid, root), []
    for depth in (1, 2):
        stages = (replace(s, depth=depth) if isinstance(s, Stage) else s for s in done.stages)
        sizes.append(ub_bytes(replace(done, stages=tuple(stages)), root, chip))
    return sizes[0], sizes[1] - sizes[0], queues(done)


def along_lanes(stage: Stage) -> bool:
    """True if a fold walks its source along the axis that lies contiguously."""
    last = stage.reduce[-1].name
    return any(dict(r.index[-1].terms).get(last) == 1 for r in stage.reads if r.index)


def queues(done: State) -> int:
    """Return the most queues of a completed nest between two pipes: one a place that is filled."""
    found: dict[tuple[bool, bool], set[object]] = {}
    for stage in done.stages:
        if isinstance(stage, Stage) and stage.scope == "UB":
            source = done.find(stage.sources[0]) if stage.sources else None
            loaded = stage.is_copy and getattr(source, "scope", "GM") == "GM"
            stored = any(getattr(r, "scope", "GM") == "GM" for r in done.readers(stage.name))
            if loaded or stored:
                found.setdefault((loaded, stored), set()).add(stage.attach)
    return max(map(len, found.values()), default=0)


# -- ladders of numbers worth trying ---------------------------------------------------------------

TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tiles a share is cut into: each number about a half above the one before."""
FINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The same where a nest has one axis to cut: each number about a sixth above the one before."""
WIDTHS = 8
"""Widths of a tile, at most; twice as many where a nest has one axis to cut."""
OUTERS = (1, 2, 4, 8, 16)


def result_bytes(stage: Stage) -> int:
    """Return the bytes of the result of a stage, or of what it folds if that is more."""
    read = max((DTYPE_BYTES[r.dtype] for r in stage.reads), default=1)
    own = math.prod(stage.shape) * DTYPE_BYTES[stage.dtype]
    return max(own, math.prod(stage.shape) * math.prod(a.extent for a in stage.reduce) * read)


def share_ladder(extent: int, cores: int, unit: int, least: int) -> list[int]:
    """Return what one core may take of an axis in multiples of `unit`, for most cores first.

    For all `cores`, three quarters, a half, a quarter and so on, but not fewer than `least`; and
    the most that get equal shares.
    """
    blocks = up(extent, unit)
    halves = {cores >> n for n in range(cores.bit_length())} | {3 * cores // 4}
    counts = {n for n in halves if n >= least}
    counts |= {max((d for d in range(1, min(cores, blocks) + 1) if blocks % d == 0), default=0)}
    found = {min(up(blocks, n) * unit, extent) for n in counts if 1 < n <= cores}
    long = {up(s, 8 * unit) * 8 * unit for s in found if unit > 1 and s >= 32 * unit}
    return sorted(s for s in found | long if s < extent)


def width_ladder(
    share: int, unit: int, repeat: int, fine: bool, good: Callable[[int], bool]
) -> list[int]:
    """Return widths of tiles below a share, the widest that fits first."""
    least = min(unit, share)
    if least >= share or not good(least):
        return []
    low, high = 1, up(share, unit)
    while low < high:  # the least number of tiles that fit, by bisection
        middle = (low + high) // 2
        fits = good(min(share, up(up(share, middle), unit) * unit))
        low, high = (low, middle) if fits else (middle + 1, high)
    first = low
    found: dict[int, None] = {}
    ladder = FINE if fine else TILES
    for tiles in (first, *(max(first, n) for n in ladder), *(n * first for n in ladder)):
        width = aligned(up(share, tiles), unit, repeat)
        if width < share and (tiles > first or good(width)):
            found[width] = None
    found = found or {least: None}
    return sorted(found, reverse=True)[: 2 * WIDTHS if fine else WIDTHS]


def aligned(width: int, unit: int, repeat: int) -> int:
    """Return a width filled up to whole blocks, or to whole repeats where that adds little."""
    step = repeat if width >= 8 * repeat else unit
    return up(width, step) * step


def outer_ladder(share: int, good: Callable[[int], bool]) -> list[int]:
    """Return widths along the next axis outside: rows that share one tile."""
    found = [1]
    for width in (*OUTERS[1:], share):
        if found[-1] < width <= share and good(width):
            found.append(width)
    return found


def fold_ladder(extents: Mapping[str, int], unit: int) -> tuple[int, ...]:
    """Return how many elements folds may take at a time: all, half, ..., in whole blocks."""
    part = largest_fold(extents)
    found = [part]
    while part > min(unit, 2):
        half = up(part, 2)
        part = up(half, unit) * unit if half >= unit else half
        if part == found[-1]:
            break
        found.append(part)
        if part <= unit:
            break
    return tuple(found)


def largest_fold(extents: Mapping[str, int]) -> int:
    """Return the elements of the largest fold, all its axes together; 1 without folds."""
    found: dict[str, int] = {}
    for name, extent in extents.items():
        stage = name.split(".")[0]
        found[stage] = found.get(stage, 1) * extent
    return max(found.values(), default=1)


def fold_widths(extents: Mapping[str, int], elements: int) -> tuple[tuple[str, int], ...]:
    """Return the widths of folds that take `elements` at a time, inner axes filled first."""
    found: list[tuple[str, int]] = []
    left: dict[str, int] = {}
    for name, extent in reversed(list(extents.items())):
        stage = name.split(".")[0]
        now = left.get(stage, elements)
        if now < extent:
            found.append((name, max(now, 1)))
        left[stage] = now // extent
    return tuple(reversed(found))
