"""Write a formula on a tile as vector instructions, one operation after another.

For y = exp(x) * 2 + x of a row, `vexp` writes to a scratch tile, `vmuls` overwrites it, and `vadd`
writes y. A fold of the result follows (`emit_folds`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.machine.isa import Affine, c0_of
from ascend_lab.operators.dsl.boxes import row_of
from ascend_lab.operators.dsl.emit_folds import (
    COMBINE,
    BoxFold,
    LaneFold,
    blocks_to_elements,
    fold_box,
    fold_lanes,
    neutral_number,
)
from ascend_lab.operators.dsl.emit_vector import Op, Unit, View, apply
from ascend_lab.operators.dsl.stages import Stage
from ascend_lab.operators.dsl.tensor import Call, Expr, Read, leaves

Sizes = Sequence[int]
Views = Mapping[Read, View]


@dataclass(frozen=True, slots=True)
class TileWork:
    """One step of a stage: out[data axes] = its formula, or its fold, over a box of `sizes`.

    `sizes` are those of the data axes, then those of the fold axes. With `add`, `out` holds the
    fold of earlier steps, which is included. If `piece_bytes` is not 0, the formula of a long row
    is computed and folded in pieces of `piece_bytes`, because scratch has no room for a whole row.
    """

    stage: Stage
    sizes: Sizes
    out: View
    views: Views
    add: bool = False
    piece_bytes: int = 0


def compute_tile(unit: Unit, work: TileWork) -> bool:
    """Emit the instructions of a step; return whether the padding of rows in `out` is written, too.

    Rows are computed up to whole blocks if the padding of all operands may be read: 100 numbers in
    fp16 are computed as 112.
    """
    stage = work.stage
    sizes = work.sizes
    out = work.out
    views = work.views
    if not stage.fold:
        filled = whole_row_sizes(sizes, stage.align, (out, *views.values()))
        evaluate(unit, stage.expr, out, views, filled or sizes)
        return filled is not None
    if isinstance(stage.expr, Read):
        source = views[stage.expr]
    elif work.piece_bytes:
        _fold_pieces(unit, work)
        return False
    else:
        filled = whole_row_sizes(sizes, stage.align, tuple(views.values()))
        source = _scratch(unit, stage.expr.dtype, filled or sizes, views)
        evaluate(unit, stage.expr, source, views, filled or sizes)
        source = replace(source, row=sizes[row_of(sizes)] if filled else 0)
    data_rank = len(stage.axes)
    # Two data axes and one fold axis: [2, 0, 1].
    fold_axes_first = [*range(data_rank, len(sizes)), *range(data_rank)]
    box = BoxFold(out, source.take(fold_axes_first), sizes[data_rank:], sizes[:data_rank], work.add)
    fold_box(unit, stage.fold, box)
    if not isinstance(stage.expr, Read):
        unit.give(source.memory)
    return False


def _fold_pieces(unit: Unit, work: TileWork) -> None:
    """Emit out = fold of a formula on one row, where every block of a piece becomes one element.

    A row of 4,096 numbers in fp16, in pieces of 512: each piece leaves 32 numbers, one per block,
    in `block_results`; 8 pieces leave 256 numbers, which are folded at the end.
    """
    dtype = work.stage.expr.dtype
    block = c0_of(dtype)
    lanes = work.sizes[-1]
    width = work.piece_bytes // DTYPE_BYTES[dtype]
    block_count = -(-lanes // block)
    # 1,040 numbers in fp16 are 65 blocks; `block_results` has 80 places, 5 whole blocks.
    places = -(-block_count // block) * block
    block_results = View(unit.take(dtype, places), dtype, 0, (1,))
    piece = View(unit.take(dtype, width), dtype, 0, (1,))
    if places > block_count:
        # Pieces do not fill the last block of results: it is initialised with neutral numbers.
        neutral = Op("vdup", neutral_number(work.stage.fold, dtype))
        apply(unit, neutral, block_results.moved(0, places - block), (), [block])
    full_pieces, tail = divmod(lanes, width)
    if full_pieces:
        with unit.repeat(full_pieces) as number:
            _fold_piece(unit, work, piece, block_results, number, width)
    if tail:
        _fold_piece(unit, work, piece, block_results, full_pieces, tail)
    unit.give(piece.memory)
    _fold_block_results(unit, work, block_results, places)
    unit.give(block_results.memory)


def _fold_piece(
    unit: Unit,
    work: TileWork,
    piece: View,
    block_results: View,
    number: Affine | int,
    elements: int,
) -> None:
    """Emit the formula on piece `number` of a row, and the fold of each of its blocks."""
    stage = work.stage
    lane_axis = len(work.sizes) - 1
    width = work.piece_bytes // DTYPE_BYTES[stage.expr.dtype]
    moved_views = {r: v.moved(lane_axis, number * width) for r, v in work.views.items()}
    operands = [v for v in work.views.values() if v.strides[lane_axis]]
    may_fill = elements < width and all(v.row == work.sizes[-1] for v in operands)
    unit_size = stage.align if may_fill else 1
    computed_sizes = [*work.sizes[:-1], -(-elements // unit_size) * unit_size]
    out = piece.stepping((*(0,) * lane_axis, 1))
    evaluate(unit, stage.expr, out, moved_views, computed_sizes)
    source = replace(piece, row=elements if may_fill else 0)
    blocks_per_piece = work.piece_bytes // BLOCK_BYTES
    target = block_results.moved(0, number * blocks_per_piece)
    blocks_to_elements(unit, stage.fold, LaneFold(target, source, [], elements))


def _fold_block_results(unit: Unit, work: TileWork, block_results: View, places: int) -> None:
    """Emit the fold of the results of all blocks into `out`, with its contents if `work.add`."""
    fold = work.stage.fold
    dtype = work.stage.expr.dtype
    data_axes = len(work.sizes) - 1
    result = work.out
    if work.add:
        result = View(unit.take(dtype, c0_of(dtype)), dtype, 0, (0,) * data_axes)
    total = result.stepping(())
    fold_lanes(unit, fold, LaneFold(total, block_results, [], places))
    if work.add:
        out = work.out.stepping(())
        apply(unit, Op(COMBINE[fold]), out, (out, total), [])
        unit.give(result.memory)


def whole_row_sizes(sizes: Sizes, block: int, views: Sequence[View]) -> list[int] | None:
    """Return the sizes with rows rounded up to blocks; None if an operand has no padding there."""
    row = row_of(sizes)
    filled = -(-sizes[row] // block) * block
    # 100 numbers in fp16 are computed as 112 if each operand's row has 112 places that may be read.
    along = [v for v in views if v.strides[row]]
    if filled == sizes[row] or any(v.row != sizes[row] or v.strides[row] != 1 for v in along):
        return None
    return [filled if d == row else n for d, n in enumerate(sizes)]


def evaluate(unit: Unit, expr: Expr, out: View, views: Views, sizes: Sizes) -> None:
    """Emit out[box] = expr; inner operations go to scratch tiles, reused as soon as possible."""
    if isinstance(expr, Read):
        apply(unit, Op("vcopy"), out, (views[expr],), sizes)
        return
    assert isinstance(expr, Call)
    free_places = [out]
    values: dict[Expr, View] = dict(views.items())
    # Depth first: the scratch of one operand is free again before the next operand is computed.
    for arg in dict.fromkeys(expr.args):
        if arg in values:
            continue
        used = [views[r].strides for r in leaves(arg) if isinstance(r, Read)]
        # exp(s[i]) of a box (i, j) is computed once for each i, and repeated along j.
        arg_sizes = [n if any(s[d] for s in used) else 1 for d, n in enumerate(sizes)]
        # The first operand of the result's format and size is computed where the result will lie.
        in_place = bool(free_places) and arg.dtype == out.dtype and arg_sizes == list(sizes)
        place = free_places.pop() if in_place else _scratch(unit, arg.dtype, arg_sizes, views)
        evaluate(unit, arg, place, views, arg_sizes)
        repeats = zip(arg_sizes, sizes, place.strides, strict=True)
        steps = tuple(0 if n < box_size else step for n, box_size, step in repeats)
        values[arg] = place if in_place else place.stepping(steps)
    apply(unit, Op(expr.op, expr.number, expr.mode), out, [values[a] for a in expr.args], sizes)
    for arg, place in values.items():
        # Operands in memory belong to the caller, and so does the result.
        if not isinstance(arg, Read) and place is not out:
            unit.give(place.memory)


def _scratch(unit: Unit, dtype: str, sizes: Sizes, views: Views) -> View:
    """Return a scratch tile for a box, with its axes in the same order as the operands' axes."""
    # The axis that is contiguous in an operand is contiguous in scratch, or lanes would not match.
    contiguous = [a for a in range(len(sizes)) if any(v.strides[a] == 1 for v in views.values())]
    lane = len(sizes) - 1
    if contiguous:
        lane = max(contiguous, key=lambda a: (sizes[a] > 1, a))
    steps = [max((v.strides[a] for v in views.values()), default=0) for a in range(len(sizes))]
    outer = sorted((a for a in range(len(sizes)) if a != lane), key=lambda a: -steps[a])
    block = c0_of(dtype)
    is_single_row = math.prod(sizes[a] for a in outer) == 1
    # Rows of 100 numbers in fp16 lie 112 apart, so that each begins on a block.
    step = sizes[lane] if is_single_row else -(-sizes[lane] // block) * block
    strides = [1] * len(sizes)
    for axis in reversed(outer):
        strides[axis] = step
        step *= sizes[axis]
    return View(unit.take(dtype, step), dtype, 0, tuple(strides))
