"""Default schedules of rows that are too long for tiles of whole ones, or too few for all cores."""

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from ascend_lab.dsl.auto_fuse import Phase, merge_axes, row_axes, weight
from ascend_lab.dsl.auto_tile import Widths, arrange, core_count, schedule_phase
from ascend_lab.dsl.boxes import ub_bytes
from ascend_lab.dsl.primitives_folds import unchain
from ascend_lab.dsl.primitives_loops import rfactor, split
from ascend_lab.dsl.primitives_tiles import cache_read, compute_at, duplicate, hoist, inline
from ascend_lab.dsl.schedule import Schedule, complete, loop_count
from ascend_lab.dsl.stages import Stage
from ascend_lab.dsl.tensor import Axis
from ascend_lab.errors import ScheduleError
from ascend_lab.kernels.gemm_schedule import up

PARTS = (32768, 24576, 16384, 12288, 8192, 6144, 4096, 2048)
"""Elements of a row that goes through UB in parts, the widest first."""
BLOCKS = 128
"""Parts of rows are multiples of so many elements."""
START = 16 * BLOCKS
"""Elements of which the arithmetic takes as long as what stands around a part of a row."""


def stream_phase(
    s: Schedule, phase: Phase, *, keep: bool = False, share: float = 1.0, depth: int = 2
) -> Schedule:
    """Schedule a nest of rows too wide for slots of whole ones: each goes through UB in parts.

    Values used twice are whole rows, and stay; what is loaded for them, for folds and for the
    result is walked in parts of one width, `depth` slots each. Operands that several of them need
    are loaded again, or stay too (`keep`).
    """
    whole, given = merge_axes(s, phase), phase
    s, phase = _kept(whole, phase) if keep else (whole, phase)
    before = {x.name for x in s.state.stages}
    s = hoist(s, phase.root)  # once, what the result's parts of a row share
    shared = (x.name for x in s.state.stages if x.name not in before)
    phase = replace(phase, tiles=(*phase.tiles, *shared))
    rows, root = row_axes(s.state, phase), s.state.stage(phase.root)
    last = root.axes[-1]
    if not given.tiles or phase.outputs or not rows or last.name in rows:
        raise ScheduleError("rows that tiles of them all need whole", str(rows), "take tiles")
    stages = [x for x in map(s.state.stage, phase.tiles) if _is_wide(x, last) and x.scope == "GM"]
    wide = [x for x in stages if {i.name for i in s.state.inputs} & set(x.sources)]
    long = [f"{x.name}.{(*x.axes, *x.reduce)[-1].name}" for x in wide]

    def steps(width: int) -> tuple[Widths, Widths]:
        return {a.name: 1 for a in root.axes} | {last.name: width}, dict.fromkeys(long, width)

    def fits(width: int) -> bool:
        trial = arrange(s, phase, rows, *steps(width), depth, plain=True)
        nest = complete(trial.state, phase.root)
        return ub_bytes(nest, phase.root, s.chip) <= share * s.chip.buffers["UB"]

    parts = [*(w for w in PARTS if w < last.extent), 0]
    best = parts[bisect_left(parts, True, key=lambda w: w == 0 or fits(w))]
    again = min((x for x in stages if not x.fold), key=lambda x: weight(x.expr), default=None)
    if not best and again is not None:
        rest = Phase(given.root, tuple(n for n in given.tiles if n != again.name))
        return stream_phase(inline(whole, again.name), rest, keep=keep, share=share, depth=depth)
    if not best:
        raise ScheduleError(f"parts of {phase.root} that fit in UB", str(PARTS), "cut its rows")
    even = up(last.extent, up(last.extent, best))
    return arrange(s, phase, rows, *steps(up(even, BLOCKS) * BLOCKS), depth)


def _kept(s: Schedule, phase: Phase) -> tuple[Schedule, Phase]:
    """Let inputs that the tiles of a phase read be tiles of it too, with a slot each."""
    tiles = list(phase.tiles)
    for source in [i.name for i in s.state.inputs]:
        readers = [r.name for r in s.state.readers(source) if r.name in phase.names]
        if set(readers) & set(phase.tiles):
            s = cache_read(s, source, "UB", *readers)
            tiles.insert(0, s.state.stage(readers[0]).reads[0].source)
    return s, replace(phase, tiles=tuple(tiles))


def _is_wide(stage: Stage, axis: Axis) -> bool:
    """True for a tile whose innermost axis is as long as one of its readers."""
    return (*stage.axes, *stage.reduce)[-1].extent == axis.extent


# -- few rows --------------------------------------------------------------------------------------


def share_rows(s: Schedule, phase: Phase) -> tuple[Schedule, list[Phase], set[str]]:
    """Return a nest of few long rows as several: a core folds parts of rows, fold after fold.

    The next fold, and the result, begin with the parts of all cores; values are computed again.
    Return the nests, and the folds that each of their cores does for itself (`with_folds`).
    """
    folds = [n for n in phase.tiles if s.state.stage(n).fold]
    if not folds or phase.outputs:
        raise ScheduleError("tiles that fold rows", str(phase.tiles), "take tiles")
    for name in phase.tiles:
        s = s if name in folds else inline(s, name)
    known, parts = {x.name for x in s.state.stages} - set(folds), dict[str, str]()
    for name in folds:
        axis = s.state.stage(name).reduce[-1]
        width = _part(axis.extent, s.state.stage(name).axes[0].extent, core_count(s))
        if width >= axis.extent:
            raise ScheduleError(f"{name}: a part for every core", str(axis.extent), "take tiles")
        s = rfactor(split(s, name, axis.name, width), name, f"{axis.name}_o", inner=True)
        parts[name] = s.state.stage(name).sources[0]
    nests: list[Phase] = []
    for first, name in pairwise(("", *folds)):
        before, outputs = {x.name for x in s.state.stages}, tuple[str, ...]()
        with suppress(ScheduleError):
            if first and not nests[-1].outputs:
                s = unchain(s, name, parts[name], first, parts[first])
                outputs = (nests.pop().root,)
        s = hoist(s, parts[name])
        new = [s.state.stage(x.name) for x in s.state.stages if x.name not in before]
        these = {*folds, *(x.name for x in new if x.fold)}
        tiles = (x.name for x in new if x.name not in these and not these & set(x.sources))
        nests.append(Phase(parts[name], tuple(tiles), outputs))
    s, nests = hoist(s, phase.root), [*nests, Phase(phase.root)]
    known |= {n for nest in nests for n in nest.names}
    return s, nests, {x.name for x in s.state.stages} - known


def _part(extent: int, rows: int, cores: int) -> int:
    """Return the part of a row that gives the busiest core least; what starts a part counts too."""
    widths = (up(up(extent, parts), BLOCKS) * BLOCKS for parts in range(2, cores + 1))
    busy = ((up(rows, cores // up(extent, w)) * (w + START), w) for w in widths)
    return min(busy, default=(0, extent))[1]


def with_folds(s: Schedule, phase: Phase, folds: set[str], share: float, tiles: int) -> Schedule:
    """Schedule a nest in so many tiles a core, and those of these folds that it needs inside it."""
    inside, own = set(phase.names), list[str]()
    for name in [x.name for x in reversed(s.state.stages) if x.name in folds]:
        readers = {r.name for r in s.state.readers(name)}
        if readers & inside:
            before = {x.name for x in s.state.stages}
            s = duplicate(s, name, max(readers & inside)) if readers - inside else s
            own += [x.name for x in s.state.stages if x.name not in before] or [name]
            inside.add(own[-1])
            sources = s.state.stage(own[-1]).sources
            for source in [i.name for i in s.state.inputs if i.name in sources]:
                s = cache_read(s, source, "UB", own[-1])
    s = schedule_phase(s, phase, share=share, tiles=tiles)
    root = s.state.stage(phase.root)
    loops = root.bound or [x.name for x in root.loops[: loop_count(s.state, root)]] or [""]
    for tile in own:
        s = compute_at(s, tile, phase.root, loops[-1])
    return s
