"""Which part of a tensor a step of a nest needs, and how much of UB the tiles of a nest take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Affine, c0_of
from ascend_lab.operators.dsl import emit_vector, schedule, tensor
from ascend_lab.operators.dsl.stages import Stage, State, overwrites


@dataclass(frozen=True, slots=True)
class Range:
    """Indices start .. start + size - 1; the start may depend on loops around."""

    start: Affine
    count: int


Box = dict[str, Range]
"""A range per axis name of a stage."""

ZERO = Affine()
ONCE = Range(ZERO, 1)
NO_STEPS: Mapping[str, int] = MappingProxyType({})

SHIFT_BYTES = 1024
"""Scratch for the end of a ragged row: 32 elements, a block each."""


def whole(stage: Stage) -> Box:
    """Return the box of a complete stage."""
    return {a.name: Range(ZERO, a.extent) for a in (*stage.axes, *stage.reduce)}


def index_range(index: Affine, box: Mapping[str, Range]) -> Range:
    """Return the range an index expression covers while its axes run through a box."""
    if len(index.terms) == 1 and not index.const and index.terms[0][1] == 1:
        return box[index.terms[0][0]]
    start = Affine(index.const)
    size = 1
    for name, coefficient in index.terms:
        part = box[name]
        if coefficient < 0:
            raise ScheduleError("indices that grow with their axes", str(index), "turn the axis")
        start = start + part.start * coefficient
        size += coefficient * (part.count - 1)
    return Range(start, size)


def join(one: Range, two: Range) -> Range:
    """Return the smallest range that holds both; their starts must differ by a constant."""
    if one.start.terms != two.start.terms:
        wanted = "tiles that move together"
        raise ScheduleError(wanted, f"{one.start} and {two.start}", "compute them apart")
    low = min(one.start.const, two.start.const)
    high = max(one.start.const + one.count, two.start.const + two.count)
    return Range(Affine(low, one.start.terms), high - low)


def needed(
    state: State, stage: Stage, active: Mapping[str, Box], known: dict[str, Box] | None = None
) -> Box:
    """Return the box of `stage` that its readers need, given the boxes of the active stages.

    Readers that are not active yet run later inside the same step, with all their own loops;
    `known` holds what was found for them, since many ways may lead there.
    """
    known = {} if known is None else known
    host = state.stage(stage.attach[0]) if stage.output and stage.attach else None
    ranges = _beside(stage, host, active[host.name]) if host else None
    for reader in () if host else state.readers(stage.name):
        assert isinstance(reader, Stage)
        box = active.get(reader.name)
        if box is None:
            if reader.name not in known:
                known[reader.name] = whole(reader) | needed(state, reader, active, known)
            box = known[reader.name]
        for read in reader.reads:
            if read.source != stage.name:
                continue
            if read.view:
                wanted = f"{reader.name} to read {stage.name} in its own shape {stage.shape}"
                raise ScheduleError(wanted, f"under shape {read.view}", f"keep {stage.name} in GM")
            found = [index_range(i, box) for i in read.index]
            ranges = found if ranges is None else list(map(join, ranges, found))
    if ranges is None:
        raise ScheduleError(f"a reader of {stage.name}", "none", "drop it")
    if stage.repeats:
        ranges[-1] = Range(ZERO, stage.align)
    data = {a.name: r for a, r in zip(stage.axes, ranges, strict=True)}
    ends = bool(stage.last_fold_extent) and ranges[-1] == Range(Affine(stage.shape[-1] - 1), 1)
    extents = {a.name: stage.last_fold_extent if ends else a.extent for a in stage.reduce}
    return data | {name: Range(ZERO, extent) for name, extent in extents.items()}


def _beside(stage: Stage, host: Stage, box: Box) -> list[Range]:
    """Return the part of an output that stands for a part of its host; axes of size 1 are whole."""
    pairs = zip(stage.axes, host.axes, strict=True)
    return [box[its.name] if own.extent == its.extent else ONCE for own, its in pairs]


# -- bytes of UB, before a program is written -----------------------------------------------------
def first_boxes(state: State, root: str) -> dict[str, Box]:
    """Return the box each stage of a phase works on in the first step of every loop around it."""
    return _boxes(state, root, NO_STEPS)[1]


def _boxes(
    state: State, root: str, steps: Mapping[str, int]
) -> tuple[dict[str, Box], dict[str, Box]]:
    """Return what the readers of each stage need of it at a time, and its `first_boxes`.

    Loops over single elements take as many as `steps` says for "stage.axis".
    """
    members = list(reversed(schedule.members(state, root)))
    kept: dict[str, Box] = {}

    def keep(name: str) -> Box:
        """Return what a stage keeps. An output may stand in front of the one that hosts it."""
        if name not in kept:
            stage = state.stage(name)
            is_root = name == root
            kept[name] = whole(stage) if is_root else needed(state, stage, around(stage.attach))
        return kept[name]

    def inside(name: str, count: int) -> Box:
        box = dict(keep(name))
        for leaf in state.stage(name).loops[:count]:
            part = box[leaf.root]
            width = leaf.width
            width = steps.get(f"{name}.{leaf.root}", 1) if width == 1 else width
            box[leaf.root] = Range(part.start, min(part.count, width))
        return box

    def around(place: tuple[str, str] | None) -> dict[str, Box]:
        found = dict[str, Box]()
        while place is not None:
            host = state.stage(place[0])
            count = host.position(place[1]) + 1 if place[1] else len(host.bound)
            found[host.name] = inside(host.name, count)
            place = host.attach
        return found

    boxes = {name: keep(name) for name in members}
    loops = {name: schedule.loop_count(state, state.stage(name)) for name in members}
    return boxes, {name: inside(name, loops[name]) for name in members}


def tile_sizes(state: State, stage: Stage, active: Mapping[str, Box]) -> tuple[int, ...]:
    """Return the sizes of the tile a stage keeps: all of what its readers need at a time."""
    others = {n: b for n, b in active.items() if n != stage.name}
    box = needed(state, stage, others)
    return tuple(box[a.name].count for a in stage.axes)


def ub_bytes(state: State, root: str, chip: Chip, steps: Mapping[str, int] = NO_STEPS) -> int:
    """Return the bytes of UB a completed phase needs: slots of all tiles, and scratch.

    What only the vector unit touches takes part in the scratch while somebody will read it.
    Loops over single elements take as many as `steps` says for "stage.axis".
    """
    kept, active = _boxes(state, root, steps)
    order = [state.stage(name) for name in reversed(kept)]
    total = 0
    most = SHIFT_BYTES if chip.combined else 0
    alive = dict[str, int]()
    for place, stage in enumerate(order):
        if stage.scope != "UB":
            continue
        name = stage.name
        _, elements = row_steps(stage, tuple(kept[name][a.name].count for a in stage.axes))
        readers = state.readers(name)
        loaded = stage.is_copy and state.find(stage.sources[0]).scope == "GM"
        each = -(-elements * DTYPE_BYTES[stage.dtype] // BLOCK_BYTES) * BLOCK_BYTES
        if loaded or any(r.scope == "GM" for r in readers):
            total += each * stage.depth
        else:
            alive.pop(overwrites(state, stage), None)
            alive[name] = each
        if not stage.is_copy:
            most = max(most, sum(alive.values()) + _scratch_bytes(state, stage, active[name], chip))
        left = {s for later in order[place + 1 :] for s in later.sources}
        alive = {n: size for n, size in alive.items() if n in left}
    return total + most


def _scratch_bytes(state: State, stage: Stage, box: Box, chip: Chip) -> int:
    """Bytes of scratch for one evaluation, an upper bound: all tiles at the peak."""
    axes = (*stage.axes, *stage.reduce)
    sizes = [box[a.name].count for a in axes]
    rows = math.prod(sizes) // max(*sizes, 1)
    spare = _side_by_side(stage, box, chip)
    if stage.fold:
        own = _tile(stage.expr, sizes, stage.align)
        piece = in_pieces(state, stage, sizes, chip)
        if _folds_rows(stage):
            rows = 0
        else:
            spare += own // (7 if piece or rows < sizes[-1] else 6) + 4 * BLOCK_BYTES * (rows + 1)
        if not _folds_lanes(stage):
            spare += (rows + 32) * chip.vector_bytes_per_repeat + own // 2
        if piece:
            sizes[-1] = piece // DTYPE_BYTES[stage.expr.dtype]
            own = piece
        spare += 0 if isinstance(stage.expr, tensor.Read) else own
    last = [a.name for a in axes if a.extent > 1][-1:]
    if last and any(last[0] not in names for names in _used(stage)):  # spread over blocks
        spare += 2 * BLOCK_BYTES * rows
    return spare + _peak(stage.expr, sizes, stage.dtype, stage.align)


def in_pieces(state: State, stage: Stage, sizes: Sequence[int], chip: Chip) -> int:
    """Return the bytes of one long row that are computed before they are folded, 0: all of it."""
    piece = max(chip.buffers["UB"] // 7 // 16384 * 16384, 4096)
    size = sizes[-1] * DTYPE_BYTES[stage.expr.dtype]
    wide = bool(stage.reduce) and size > piece
    last = stage.reduce[-1].name if wide else ""
    along = [r.source for r in stage.reads if dict(r.index[-1].terms).get(last) == 1]
    groups = stage.fold in ("sum", "max") and stage.expr.dtype in ("fp16", "fp32")
    once = [n for n in along if len(state.readers(n)) < 2]
    loaded = any(getattr(state.find(n), "is_copy", True) for n in once)
    groups = groups and not isinstance(stage.expr, tensor.Read) and not loaded
    parts = max(1, (size + piece // 2) // piece)  # about equal ones
    piece = -(-size // (512 * parts)) * 512
    return piece * (wide and groups and math.prod(sizes) == sizes[-1] and bool(along))


def _folds_lanes(stage: Stage) -> bool:
    """True if every operand is folded along its contiguous elements only, by groups of blocks."""
    folded = {a.name for a in stage.reduce}
    used = zip(stage.reads, _used(stage), strict=True)
    inner = all({n for n, _ in r.index[-1].terms} <= folded for r, own in used if own & folded)
    return inner and len(folded) == 1 and stage.fold in ("sum", "max")


def _folds_rows(stage: Stage) -> bool:
    """True if no operand is folded along its contiguous elements: row is combined with row."""
    folded = {a.name for a in stage.reduce}
    return all(folded.isdisjoint(n for n, _ in r.index[-1].terms) for r in stage.reads)


def _used(stage: Stage) -> list[set[str]]:
    """Return the axes that each operand uses."""
    return [{name for i in r.index for name, _ in i.terms} for r in stage.reads]


def _side_by_side(stage: Stage, box: Box, chip: Chip) -> int:
    """Bytes in which two operands that repeat short rows are copied side by side."""
    long = [a.name for a in stage.axes if box[a.name].count > 1]
    if len(long) < 2:
        return 0
    *outer, rows, last = long
    lanes = chip.vector_bytes_per_repeat
    if box[last].count * DTYPE_BYTES[stage.dtype] >= lanes:
        return 0
    if not any(last in names and rows not in names for names in _used(stage)):
        return 0
    return 2 * lanes * math.prod(box[name].count for name in outer)


def _tile(expr: tensor.Expr, sizes: Sequence[int], align: int) -> int:
    """Bytes of a tile for an expression, its longest axis in whole blocks."""
    block = max(c0_of(expr.dtype), align)
    longest = max(*sizes, 1)
    rows = math.prod(sizes) // longest
    return rows * -(-longest // block) * block * DTYPE_BYTES[expr.dtype]


def _peak(expr: tensor.Expr, sizes: Sequence[int], out: str, align: int) -> int:
    """Most scratch alive at once while an expression is evaluated into a tile of format `out`."""
    alive = peak = 0
    spare = True
    for arg in dict.fromkeys(expr.args) if isinstance(expr, tensor.Call) else ():
        if isinstance(arg, tensor.Read):
            continue
        here = spare and arg.dtype == out
        spare = spare and not here
        own = 0 if here else _tile(arg, sizes, align)
        peak = max(peak, alive + own + _peak(arg, sizes, arg.dtype, align))
        alive += own
    return max(peak, alive)


def row_steps(stage: Stage, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Steps and size of a tile in UB: rows begin at 32-byte blocks (or `align` elements)."""
    unit = max(c0_of(stage.dtype), stage.align)
    return emit_vector.block_steps(sizes, unit, always=stage.align > 1)


def row_of(sizes: Sequence[int]) -> int:
    """Return the axis of a tile along which its rows lie: the last with several elements."""
    return max((d for d, n in enumerate(sizes) if n > 1), default=len(sizes) - 1)
