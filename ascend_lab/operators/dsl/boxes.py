"""Compute which box (part) of each tensor one step of a loop nest needs, and the UB its tiles take.

A nest is the loops of one stage and of the stages computed inside them. With y[i] = x[i] + x[i + 2]
in steps of 32 elements, the step that begins at i needs 34 elements of x, x[i .. i + 33].
"""

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
    """The indices start .. start + count - 1 of one axis; `start` may depend on enclosing loops."""

    start: Affine
    count: int


Box = dict[str, Range]
"""The range of each axis of a stage, by the axis's name."""

ZERO = Affine()
ONCE = Range(ZERO, 1)
NO_STEPS: Mapping[str, int] = MappingProxyType({})

SHIFT_BYTES = 1024
"""Scratch for shifting the end of a ragged row: 32 elements, a 32-byte block each."""


def whole_box(stage: Stage) -> Box:
    """Return the box of a complete stage."""
    return {a.name: Range(ZERO, a.extent) for a in (*stage.axes, *stage.reduce)}


def index_range(index: Affine, box: Mapping[str, Range]) -> Range:
    """Return the range an index expression covers while its axes run through a box.

    For i in 0..3 and j in 0..7, 8 i + j covers 1 + 8 * 3 + 1 * 7 = 32 indices.
    """
    if len(index.terms) == 1 and not index.const and index.terms[0][1] == 1:
        return box[index.terms[0][0]]
    # The range covers start .. start + count - 1 even if the index jumps: 2 i for i in 0..3 covers
    # 7.
    start = Affine(index.const)
    count = 1
    for name, coefficient in index.terms:
        span = box[name]
        if coefficient < 0:
            raise ScheduleError("indices that grow with their axes", str(index), "turn the axis")
        start = start + span.start * coefficient
        count += coefficient * (span.count - 1)
    return Range(start, count)


def join_ranges(a: Range, b: Range) -> Range:
    """Return the smallest range that holds both; their starts must differ by a constant."""
    if a.start.terms != b.start.terms:
        needed_tiles = "tiles that move together"
        raise ScheduleError(needed_tiles, f"{a.start} and {b.start}", "compute them apart")
    # Reads of x[i] and x[i + 2] in a step of 32: ranges i .. i + 31 and i + 2 .. i + 33, joined 34.
    low = min(a.start.const, b.start.const)
    high = max(a.start.const + a.count, b.start.const + b.count)
    return Range(Affine(low, a.start.terms), high - low)


def needed_box(
    state: State, stage: Stage, active: Mapping[str, Box], boxes: dict[str, Box] | None = None
) -> Box:
    """Return the box of `stage` that its readers need, given the boxes of the active stages.

    A stage is active if the step is inside its loops. A reader that is not active runs later in the
    same step, with all its own loops; `boxes` stores the boxes of such readers, since one of them
    may be reached over several others.
    """
    if stage.output and stage.attach:
        host = state.stage(stage.attach[0])
        ranges = _output_ranges(stage, host, active[host.name])
    else:
        ranges = _read_ranges(state, stage, active, {} if boxes is None else boxes)
    if stage.repeats:  # each row is one block of equal numbers, whatever its readers read
        ranges[-1] = Range(ZERO, stage.align)
    axis_ranges = {a.name: r for a, r in zip(stage.axes, ranges, strict=True)}
    is_last = bool(stage.last_fold_extent) and ranges[-1] == Range(Affine(stage.shape[-1] - 1), 1)
    extents = {a.name: stage.last_fold_extent if is_last else a.extent for a in stage.reduce}
    return axis_ranges | {name: Range(ZERO, extent) for name, extent in extents.items()}


def _output_ranges(stage: Stage, host: Stage, box: Box) -> list[Range]:
    """Return the ranges of an output for a box of the stage in whose loops it is computed.

    An axis that has size 1 in the output, but not in that stage, is not cut.
    """
    pairs = zip(stage.axes, host.axes, strict=True)
    return [
        box[host_axis.name] if axis.extent == host_axis.extent else ONCE
        for axis, host_axis in pairs
    ]


def _read_ranges(
    state: State, stage: Stage, active: Mapping[str, Box], boxes: dict[str, Box]
) -> list[Range]:
    """Return the range of each axis of a stage that holds what all its readers read."""
    ranges: list[Range] | None = None
    for reader in state.readers(stage.name):
        assert isinstance(reader, Stage)
        box = active.get(reader.name)
        if box is None:
            if reader.name not in boxes:
                boxes[reader.name] = whole_box(reader) | needed_box(state, reader, active, boxes)
            box = boxes[reader.name]
        for read in reader.reads:
            if read.source != stage.name:
                continue
            if read.view:
                expected = f"{reader.name} to read {stage.name} in its own shape {stage.shape}"
                raise ScheduleError(
                    expected, f"under shape {read.view}", f"keep {stage.name} in GM"
                )
            indexed = [index_range(i, box) for i in read.index]
            ranges = indexed if ranges is None else list(map(join_ranges, ranges, indexed))
    if ranges is None:
        raise ScheduleError(f"a reader of {stage.name}", "none", "drop it")
    return ranges


# -- bytes of UB, before a program is written -----------------------------------------------------
def first_boxes(state: State, root: str) -> dict[str, Box]:
    """Return the box each stage of a phase works on in the first step of every loop around it."""
    return _boxes(state, root, NO_STEPS)[1]


def _boxes(
    state: State, root: str, steps: Mapping[str, int]
) -> tuple[dict[str, Box], dict[str, Box]]:
    """Return two boxes of each stage: what its tile holds, and the first step (`first_boxes`).

    A loop over single elements is treated as if it had steps of `steps["stage.axis"]` elements, so
    that one nest serves for all tile widths.
    """
    members = list(reversed(schedule.members(state, root)))
    tile_boxes: dict[str, Box] = {}

    def tile_box(name: str) -> Box:
        """Return the box of a stage's tile; recursive, as an output may precede its host."""
        if name not in tile_boxes:
            stage = state.stage(name)
            if name == root:
                tile_boxes[name] = whole_box(stage)
            else:
                tile_boxes[name] = needed_box(state, stage, active_boxes(stage.attach))
        return tile_boxes[name]

    def step_box(name: str, count: int) -> Box:
        """Return the box of one step of the innermost of the outer `count` loops of a stage."""
        box = dict(tile_box(name))
        for leaf in state.stage(name).loops[:count]:
            axis_range = box[leaf.root]
            step_width = leaf.width
            if step_width == 1:
                step_width = steps.get(f"{name}.{leaf.root}", 1)
            box[leaf.root] = Range(axis_range.start, min(axis_range.count, step_width))
        return box

    def active_boxes(attach: tuple[str, str] | None) -> dict[str, Box]:
        """Return the box of each stage whose loops enclose a tile that is computed at `attach`."""
        outer_boxes = dict[str, Box]()
        while attach is not None:
            host = state.stage(attach[0])
            count = host.position(attach[1]) + 1 if attach[1] else len(host.bound)
            outer_boxes[host.name] = step_box(host.name, count)
            attach = host.attach
        return outer_boxes

    boxes = {name: tile_box(name) for name in members}
    loops = {name: schedule.loop_count(state, state.stage(name)) for name in members}
    return boxes, {name: step_box(name, loops[name]) for name in members}


def tile_sizes(state: State, stage: Stage, active: Mapping[str, Box]) -> tuple[int, ...]:
    """Return the sizes of a stage's tile: all that its readers need at a time."""
    other_boxes = {n: b for n, b in active.items() if n != stage.name}
    box = needed_box(state, stage, other_boxes)
    return tuple(box[a.name].count for a in stage.axes)


def ub_bytes(state: State, root: str, chip: Chip, steps: Mapping[str, int] = NO_STEPS) -> int:
    """Return the bytes of UB that a completed phase needs: slots of all tiles, and scratch.

    Tiles that are loaded or stored have `depth` slots throughout. Tiles that only the vector unit
    touches count as scratch from where they are computed to their last reader, and only the peak of
    scratch matters. A loop over single elements is treated as in `_boxes`, by `steps`.
    """
    tile_boxes, step_boxes = _boxes(state, root, steps)
    order = [state.stage(name) for name in reversed(tile_boxes)]
    slots_bytes = 0
    scratch_peak = SHIFT_BYTES if chip.combined else 0
    live_bytes = dict[str, int]()
    for position, stage in enumerate(order):
        if stage.scope != "UB":
            continue
        name = stage.name
        tile_shape = tuple(tile_boxes[name][a.name].count for a in stage.axes)
        _, elements = row_steps(stage, tile_shape)
        readers = state.readers(name)
        # A tile that a copy fills or empties while the vector unit works needs its own slots during
        # the whole nest.
        is_loaded = stage.is_copy and state.find(stage.sources[0]).scope == "GM"
        slot_bytes = -(-elements * DTYPE_BYTES[stage.dtype] // BLOCK_BYTES) * BLOCK_BYTES
        if is_loaded or any(r.scope == "GM" for r in readers):
            slots_bytes += slot_bytes * stage.depth
        else:
            live_bytes.pop(overwrites(state, stage), None)
            live_bytes[name] = slot_bytes
        if not stage.is_copy:
            scratch_bytes = _scratch_bytes(state, stage, step_boxes[name], chip)
            scratch_peak = max(scratch_peak, sum(live_bytes.values()) + scratch_bytes)
        # A tile without a later reader is free: its bytes may hold the next one.
        sources_later = {s for later in order[position + 1 :] for s in later.sources}
        live_bytes = {n: size for n, size in live_bytes.items() if n in sources_later}
    return slots_bytes + scratch_peak


def _scratch_bytes(state: State, stage: Stage, box: Box, chip: Chip) -> int:
    """Return an upper bound of the scratch bytes that one evaluation of a stage needs at once."""
    axes = (*stage.axes, *stage.reduce)
    sizes = [box[a.name].count for a in axes]
    row_count = math.prod(sizes) // max(*sizes, 1)
    scratch_bytes = _side_by_side_bytes(stage, box, chip)
    computed_sizes = sizes
    if stage.fold:
        piece_bytes = row_piece_bytes(state, stage, sizes, chip)
        if piece_bytes:
            computed_sizes = [*sizes[:-1], piece_bytes // DTYPE_BYTES[stage.expr.dtype]]
        scratch_bytes += _fold_bytes(stage, sizes, piece_bytes, chip)
    lane_axis = [a.name for a in axes if a.extent > 1][-1:]
    # A fold of whole rows combines them in place, with no block per row.
    may_spread = bool(lane_axis) and not (stage.fold and _folds_rows(stage))
    if may_spread and any(lane_axis[0] not in names for names in _axes_used(stage)):
        # An operand with one element per row is spread over a block (vbrcb) for each row.
        scratch_bytes += 2 * BLOCK_BYTES * row_count
    return scratch_bytes + _peak_bytes(stage.expr, computed_sizes, stage.dtype, stage.align)


def _fold_bytes(stage: Stage, sizes: Sequence[int], piece_bytes: int, chip: Chip) -> int:
    """Return the scratch bytes of a fold: what it folds, results of blocks, and partial sums.

    `piece_bytes` is the length of the pieces in which a long row is folded (`row_piece_bytes`).
    """
    formula_bytes = _padded_bytes(stage.expr, sizes, stage.align)
    folds_rows = _folds_rows(stage)
    # A fold of whole rows combines them in place, with no block per row.
    row_count = 0 if folds_rows else math.prod(sizes) // max(*sizes, 1)
    fold_bytes = 0
    if not folds_rows:
        # Folding blocks of 8 leaves 1/8, then 1/64, ...: 1/7 in all; more if rows are padded.
        divisor = 7 if piece_bytes or row_count < sizes[-1] else 6
        fold_bytes += formula_bytes // divisor + 4 * BLOCK_BYTES * (row_count + 1)
    if not _folds_lanes(stage):
        fold_bytes += (row_count + 32) * chip.vector_bytes_per_repeat + formula_bytes // 2
    # Elements of a tile are folded where they are; a formula is first computed into scratch.
    if isinstance(stage.expr, tensor.Read):
        return fold_bytes
    return fold_bytes + (piece_bytes or formula_bytes)


def row_piece_bytes(state: State, stage: Stage, sizes: Sequence[int], chip: Chip) -> int:
    """Return how many bytes of one long row are computed and folded at a time, 0 for the whole row.

    The formula of a whole row may not fit in UB as scratch beside the row. About a seventh of UB,
    in steps of 16 KiB (16 KiB of 192 KiB), leaves room for its inner operations. Pieces are about
    equal, so that they are up to a quarter shorter or half longer than this limit.
    """
    limit_bytes = max(chip.buffers["UB"] // 7 // 16384 * 16384, 4096)
    row_bytes = sizes[-1] * DTYPE_BYTES[stage.expr.dtype]
    is_one_row = math.prod(sizes) == sizes[-1]
    if not stage.reduce or row_bytes <= limit_bytes or not is_one_row:
        return 0
    # The blocks of a piece are folded by `vcgadd` or `vcgmax`, which exist for these folds and
    # formats only. A fold of elements as they are needs no scratch for a formula.
    has_group_fold = stage.fold in ("sum", "max") and stage.expr.dtype in ("fp16", "fp32")
    if not has_group_fold or isinstance(stage.expr, tensor.Read):
        return 0
    fold_axis = stage.reduce[-1].name
    folded_sources = [r.source for r in stage.reads if dict(r.index[-1].terms).get(fold_axis) == 1]
    read_once = [n for n in folded_sources if len(state.readers(n)) < 2]
    has_loaded_row = any(getattr(state.find(n), "is_copy", True) for n in read_once)
    if has_loaded_row or not folded_sources:
        return 0
    # 65,536 numbers in fp32 are 256 KiB: the row comes in 16 pieces of 16 KiB.
    piece_count = max(1, (row_bytes + limit_bytes // 2) // limit_bytes)
    return -(-row_bytes // (512 * piece_count)) * 512


def _folds_lanes(stage: Stage) -> bool:
    """True if every folded operand is folded along its contiguous elements, by groups of blocks."""
    folded = {a.name for a in stage.reduce}
    used_axes = zip(stage.reads, _axes_used(stage), strict=True)
    folds_only_lanes = all(
        {n for n, _ in r.index[-1].terms} <= folded for r, names in used_axes if names & folded
    )
    return folds_only_lanes and len(folded) == 1 and stage.fold in ("sum", "max")


def _folds_rows(stage: Stage) -> bool:
    """True if no operand is folded along its contiguous elements: whole rows are combined."""
    folded = {a.name for a in stage.reduce}
    return all(folded.isdisjoint(n for n, _ in r.index[-1].terms) for r in stage.reads)


def _axes_used(stage: Stage) -> list[set[str]]:
    """Return the axes that each operand uses."""
    return [read.axis_names for read in stage.reads]


def _side_by_side_bytes(stage: Stage, box: Box, chip: Chip) -> int:
    """Return the bytes in which two operands that repeat short rows are copied side by side.

    A row of 32 elements in fp16, 64 bytes, is copied four times to fill a repeat of 256 bytes.
    """
    axes = [a.name for a in stage.axes if box[a.name].count > 1]
    if len(axes) < 2:
        return 0
    *outer, row_axis, lane_axis = axes
    repeat_bytes = chip.vector_bytes_per_repeat
    # Rows of a repeat or more fill instructions by themselves.
    if box[lane_axis].count * DTYPE_BYTES[stage.dtype] >= repeat_bytes:
        return 0
    # None of the operands is one row for all rows: nothing is copied side by side.
    if not any(lane_axis in names and row_axis not in names for names in _axes_used(stage)):
        return 0
    return 2 * repeat_bytes * math.prod(box[name].count for name in outer)


def _padded_bytes(expr: tensor.Expr, sizes: Sequence[int], align: int) -> int:
    """Return the bytes of a tile for an expression, its longest axis rounded up to blocks."""
    block = max(c0_of(expr.dtype), align)
    # (64, 100) in fp16: 64 rows of 112 elements, 14,336 bytes.
    longest = max(*sizes, 1)
    rows = math.prod(sizes) // longest
    return rows * -(-longest // block) * block * DTYPE_BYTES[expr.dtype]


def _peak_bytes(expr: tensor.Expr, sizes: Sequence[int], out: str, align: int) -> int:
    """Return the most scratch alive at once while an expression is evaluated into a tile.

    The first operand of the result's format `out` is computed in the result's own tile. For
    exp(a) * log(b) that is exp(a), and log(b) needs scratch.
    """
    if not isinstance(expr, tensor.Call):
        return 0
    live_bytes = 0
    peak_bytes = 0
    result_is_free = True
    for arg in dict.fromkeys(expr.args):
        if isinstance(arg, tensor.Read):
            continue
        in_result = result_is_free and arg.dtype == out
        result_is_free = result_is_free and not in_result
        operand_bytes = 0 if in_result else _padded_bytes(arg, sizes, align)
        inner_bytes = _peak_bytes(arg, sizes, arg.dtype, align)
        peak_bytes = max(peak_bytes, live_bytes + operand_bytes + inner_bytes)
        live_bytes += operand_bytes
    return max(peak_bytes, live_bytes)


def row_steps(stage: Stage, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the strides and elements of a tile in UB; rows begin at blocks or `align` elements."""
    unit = max(c0_of(stage.dtype), stage.align)
    return emit_vector.block_steps(sizes, unit, always=stage.align > 1)


def row_of(sizes: Sequence[int]) -> int:
    """Return the axis of a tile along which its rows lie: the last with several elements."""
    return max((d for d, n in enumerate(sizes) if n > 1), default=len(sizes) - 1)
