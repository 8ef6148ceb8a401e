"""A formula on a tile by vector instructions: one operation after another, then its fold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascend_lab import errors
from ascend_lab.machine import layout
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.machine.isa import Affine, c0_of
from ascend_lab.operators.dsl.boxes import row_of
from ascend_lab.operators.dsl.emit_vector import (
    Op,
    Unit,
    View,
    apply,
    block_steps,
    coalesce,
    with_dims,
)
from ascend_lab.operators.dsl.stages import Stage
from ascend_lab.operators.dsl.tensor import Call, Expr, Read, leaves

COMBINE = {"sum": "vadd", "max": "vmax", "min": "vmin", "prod": "vmul"}
ACROSS = {"sum": "vcadd", "max": "vcmax", "min": "vcmin"}
GROUPS = {"sum": "vcgadd", "max": "vcgmax"}
"""Folds of each 32-byte block of a repeat."""
SHORT = 8
"""Slices of fewer repeats are combined half with half: one by one they mostly start up."""
Sizes = Sequence[int]
Views = Mapping[Read, View]


def compute_tile(
    unit: Unit, stage: Stage, sizes: Sizes, out: View, views: Views, add: bool, piece: int = 0
) -> bool:
    """Emit out[data axes] = formula, or its fold, of `sizes`; `add`: fold into what out holds.

    Rows are computed up to whole blocks where all operands hold something there; true if out then
    does.
    """
    kept = sizes[: len(stage.axes)]
    folds = sizes[len(stage.axes) :]
    if not stage.fold:
        full = filled_up(sizes, stage.align, (out, *views.values()))
        evaluate(unit, stage.expr, out, views, full or sizes)
        return full is not None
    if isinstance(stage.expr, Read):
        source = views[stage.expr]
    elif piece:
        _fold_pieces(unit, stage, out, views, sizes, piece, add)
        return False
    else:
        full = filled_up(sizes, stage.align, tuple(views.values()))
        source = _scratch(unit, stage.expr.dtype, full or sizes, views)
        evaluate(unit, stage.expr, source, views, full or sizes)
        source = replace(source, row=sizes[row_of(sizes)] if full else 0)
    folds_first = source.take([*range(len(kept), len(sizes)), *range(len(kept))])
    fold_box(unit, stage.fold, out, folds_first, folds, kept, add)
    if not isinstance(stage.expr, Read):
        unit.give(source.memory)
    return False


def _fold_pieces(
    unit: Unit, stage: Stage, out: View, views: Views, sizes: Sizes, size: int, add: bool
) -> None:
    """Emit out = fold of a formula on one row: every block of a piece becomes one element."""
    dtype = stage.expr.dtype
    lanes = sizes[-1]
    axis = len(sizes) - 1
    block = c0_of(stage.expr.dtype)
    width = size // DTYPE_BYTES[dtype]
    each = size // BLOCK_BYTES
    count = -(-lanes // block)
    kept = -(-count // block) * block
    lines, piece = (View(unit.take(dtype, n), dtype, 0, (1,)) for n in (kept, width))
    if kept > count:
        apply(
            unit, Op("vdup", start_of(stage.fold, dtype)), lines.moved(0, kept - block), (), [block]
        )

    def emit(number: Affine | int, elements: int) -> None:
        own = {r: v.moved(axis, number * width) for r, v in views.items()}
        operands = [v for v in views.values() if v.strides[axis]]
        full = elements < width and all(v.row == lanes for v in operands)
        unit_size = stage.align if full else 1
        filled = [*sizes[:-1], -(-elements // unit_size) * unit_size]
        evaluate(unit, stage.expr, piece.stepping((*(0,) * axis, 1)), own, filled)
        source = replace(piece, row=elements if full else 0)
        _groups(unit, stage.fold, lines.moved(0, number * each), source, [], elements)

    if lanes >= width:
        with unit.repeat(lanes // width) as number:
            emit(number, width)
    if lanes % width:
        emit(lanes // width, lanes % width)
    unit.give(piece.memory)
    partial = View(unit.take(dtype, block), dtype, 0, (0,) * axis) if add else out
    total = partial.stepping(())
    fold_lanes(unit, stage.fold, total, lines, [], kept)
    if add:
        apply(unit, Op(COMBINE[stage.fold]), out.stepping(()), (out.stepping(()), total), [])
        unit.give(partial.memory)
    unit.give(lines.memory)


def filled_up(sizes: Sizes, block: int, views: Sequence[View]) -> list[int] | None:
    """Return the sizes with rows up to whole blocks, None if an operand may hold nothing there."""
    row = row_of(sizes)
    full = -(-sizes[row] // block) * block
    along = [v for v in views if v.strides[row]]
    if full == sizes[row] or any(v.row != sizes[row] or v.strides[row] != 1 for v in along):
        return None
    return [full if d == row else n for d, n in enumerate(sizes)]


def evaluate(unit: Unit, expr: Expr, out: View, views: Views, sizes: Sizes) -> None:
    """Emit out[box] = expr; inner operations go to scratch tiles, reused as soon as possible."""
    if isinstance(expr, Read):
        apply(unit, Op("vcopy"), out, (views[expr],), sizes)
        return
    assert isinstance(expr, Call)
    spare = [out]
    known: dict[Expr, View] = dict(views.items())
    for arg in dict.fromkeys(expr.args):
        if arg in known:
            continue
        used = [views[r].strides for r in leaves(arg) if isinstance(r, Read)]
        own = [n if any(s[d] for s in used) else 1 for d, n in enumerate(sizes)]
        here = bool(spare) and arg.dtype == out.dtype and own == list(sizes)
        place = spare.pop() if here else _scratch(unit, arg.dtype, own, views)
        evaluate(unit, arg, place, views, own)
        repeats = zip(own, sizes, place.strides, strict=True)
        steps = tuple(0 if mine < whole else step for mine, whole, step in repeats)
        known[arg] = place if here else place.stepping(steps)
    apply(unit, Op(expr.op, expr.number, expr.mode), out, [known[a] for a in expr.args], sizes)
    for arg, place in known.items():
        if not isinstance(arg, Read) and place is not out:
            unit.give(place.memory)


def _scratch(unit: Unit, dtype: str, sizes: Sizes, views: Views) -> View:
    """Return a scratch tile for a box; its axes are in the order of the operands'."""
    lanes = [a for a in range(len(sizes)) if any(v.strides[a] == 1 for v in views.values())]
    last = max(lanes, key=lambda a: (sizes[a] > 1, a)) if lanes else len(sizes) - 1
    steps = [max((v.strides[a] for v in views.values()), default=0) for a in range(len(sizes))]
    outer = sorted((a for a in range(len(sizes)) if a != last), key=lambda a: -steps[a])
    block = c0_of(dtype)
    single = math.prod(sizes[a] for a in outer) == 1
    step = sizes[last] if single else -(-sizes[last] // block) * block
    strides = [1] * len(sizes)
    for axis in reversed(outer):
        strides[axis] = step
        step *= sizes[axis]
    return View(unit.take(dtype, step), dtype, 0, tuple(strides))


# -- folds of a box: sum, max, min, prod over some of its axes ------------------------------------
def start_of(fold: str, dtype: str) -> float:
    """Return the number a fold starts from: 0, 1, or the format's least or largest."""
    whole = {"int32": 2147483647.0, "int8": 127.0, "uint8": 255.0}
    top = whole.get(dtype, math.inf)
    return {"sum": 0.0, "prod": 1.0, "max": -top, "min": top}[fold]


def fold_box(
    unit: Unit, fold: str, dst: View, src: View, folds: Sizes, kept: Sizes, add: bool
) -> None:
    """Emit dst[kept] = fold of src[folds, kept] over its first axes; `add`: folded into dst.

    The axis along which src is contiguous is folded across lanes, the others row by row.
    """
    live = [d for d, n in enumerate(folds) if n > 1]
    own = range(len(folds), len(folds) + len(kept))
    lane = next((d for d in live if src.strides[d] == 1), None)
    rest = [d for d in live if d != lane]
    outer = [folds[d] for d in rest]
    if lane is None:
        _fold_rows(unit, fold, dst, src.take([*rest, *own]), outer, kept, add)
        return
    source = src.take([*rest, *own, lane])
    if not rest and not add:
        fold_lanes(unit, fold, dst, source, kept, folds[lane])
        return
    inner = math.prod(kept)
    block = c0_of(src.dtype)
    pitch = inner if inner == 1 else -(-inner // block) * block
    steps = (*(s * pitch for s in layout.row_major(outer)), *layout.row_major(kept))
    partial = View(unit.take(src.dtype, pitch * math.prod(outer)), src.dtype, 0, steps)
    fold_lanes(unit, fold, partial, source, [*outer, *kept], folds[lane])
    fold_box(unit, fold, dst, partial, outer, kept, add)
    unit.give(partial.memory)


def _fold_rows(
    unit: Unit, fold: str, dst: View, src: View, folds: Sizes, kept: Sizes, add: bool
) -> None:
    """Combine the slices of src one after another into dst."""
    if folds and 1 not in src.strides[len(folds) :] and max(kept, default=1) > 1:
        needed = "a fold with contiguous elements along a kept axis, or along the folded one"
        raise errors.ScheduleError(needed, f"steps {src.strides}", "transpose the tensor first")
    op = Op(COMBINE[fold])
    if not folds and not add:
        apply(unit, Op("vcopy"), dst, (src,), kept)
        return
    size_bytes = math.prod(kept) * DTYPE_BYTES[src.dtype]
    short = size_bytes < SHORT * unit.builder.chip.vector_bytes_per_repeat
    if len(folds) == 1 and short and folds[0] >= 4:  # a slice an instruction would mostly start up
        _halving(unit, op, dst, src, folds[0], kept, add)
        return
    order = sorted(range(len(folds)), key=lambda d: folds[d])
    slices = src.take([*order, *range(len(folds), len(src.strides))])
    _slices(unit, op, dst, slices, [folds[d] for d in order], kept, fresh=not add)


def _halving(unit: Unit, op: Op, dst: View, src: View, count: int, kept: Sizes, add: bool) -> None:
    """Combine the second half of the slices with the first, again and again, in scratch."""
    half = count // 2
    block = c0_of(src.dtype)
    steps, elements = block_steps(kept, block) if kept else ((), 1)
    pitch = -(-elements // block) * block
    rows = View(unit.take(src.dtype, half * pitch), src.dtype, 0, (pitch, *steps))
    first = rows.inner()
    apply(unit, op, rows, (src, src.moved(0, half)), [half, *kept])
    if count % 2:
        apply(unit, op, first, (first, src.moved(0, count - 1).inner()), kept)
    while half > 1:
        count = half
        half = half // 2
        apply(unit, op, rows, (rows, rows.moved(0, half)), [half, *kept])
        if count % 2:
            apply(unit, op, first, (first, rows.moved(0, count - 1).inner()), kept)
    if add:
        apply(unit, op, dst, (dst, first), kept)
    else:
        apply(unit, Op("vcopy"), dst, (first,), kept)
    unit.give(rows.memory)


def _slices(
    unit: Unit, op: Op, dst: View, src: View, folds: Sizes, kept: Sizes, fresh: bool
) -> None:
    """Combine all slices into dst; `fresh`: dst holds nothing yet, two begin it."""
    if not folds:
        apply(unit, op, dst, (dst, src), kept)
        return
    start = 0
    if fresh and len(folds) > 1:
        _slices(unit, op, dst, src.inner(), folds[1:], kept, fresh=True)
        start = 1
    elif fresh:
        apply(unit, op, dst, (src.inner(), src.moved(0, 1).inner()), kept)
        start = 2
    if folds[0] > start:
        with unit.repeat(folds[0] - start) as index:
            inner = src.moved(0, index + start).inner()
            _slices(unit, op, dst, inner, folds[1:], kept, fresh=False)


# -- folds along the lanes: the contiguous elements of each row become one element ----------------
def fold_lanes(unit: Unit, fold: str, dst: View, src: View, rows: Sizes, lanes: int) -> None:
    """dst[rows] = fold of src[rows, lanes] along the contiguous lanes."""
    width = unit.builder.chip.vector_bytes_per_repeat // DTYPE_BYTES[src.dtype]
    if fold == "prod":
        _product_across(unit, dst, src, rows, lanes)
    elif fold in GROUPS and src.dtype in ("fp16", "fp32"):
        _by_groups(unit, fold, dst, src, rows, lanes)
    elif lanes > width:
        narrow = _lines(unit, src.dtype, rows, width)
        _narrow(unit, Op(COMBINE[fold]), narrow, src, rows, lanes, width)
        _repeats(unit, ACROSS[fold], dst, narrow, rows, width)
        unit.give(narrow.memory)
    else:
        _repeats(unit, ACROSS[fold], dst, src, rows, lanes)


def _lines(unit: Unit, dtype: str, rows: Sizes, width: int) -> View:
    """Return scratch for rows of `width` lanes, one behind the other."""
    tile = unit.take(dtype, math.prod(rows) * width)
    return View(tile, dtype, 0, (*(s * width for s in layout.row_major(rows)), 1))


def _by_groups(unit: Unit, fold: str, dst: View, src: View, rows: Sizes, lanes: int) -> None:
    """Let every block become one element, and again, until a row is one block; then its element.

    `vcgadd` takes a cycle a repeat where `vadd` takes two. Rows of few blocks are first folded
    block on block, eight rows a repeat.
    """
    block = c0_of(src.dtype)
    made = list[View]()
    while lanes > block:
        blocks = -(-lanes // block)
        if _few_blocks(unit, COMBINE[fold], math.prod(rows), blocks):
            kept = block
            lines = _lines(unit, src.dtype, rows, block)
            _narrow(unit, Op(COMBINE[fold]), lines, src, rows, lanes, block)
        else:
            kept = -(-blocks // block) * block
            lines = _lines(unit, src.dtype, rows, kept)
            if kept > blocks:
                last = lines.moved(len(rows), kept - block)
                apply(unit, Op("vdup", start_of(fold, src.dtype)), last, (), [*rows, block])
            _groups(unit, fold, lines, src, rows, lanes)
        made.append(lines)
        src = lines
        lanes = kept
    _last_blocks(unit, fold, dst, src, rows, lanes)
    for lines in made:
        unit.give(lines.memory)


def _few_blocks(unit: Unit, op: str, rows: int, blocks: int) -> bool:
    """True if rows are folded block on block in fewer cycles than each block by itself."""
    chip = unit.builder.chip
    cost = chip.vector_costs[op]
    group = chip.vector_costs["vcgadd"]
    each = chip.vector_bytes_per_repeat // BLOCK_BYTES
    down = (blocks - 1) * (cost.head_cycles + cost.slope_cycles * -(-rows // each))
    return down < -(-blocks // each) * (group.head_cycles + group.slope_cycles * rows)


def _groups(unit: Unit, fold: str, dst: View, src: View, rows: Sizes, lanes: int) -> None:
    """dst[rows, block number] = fold of each block of src[rows, lanes]; the last may be shorter."""
    block = c0_of(src.dtype)
    place = len(rows)
    each = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES
    blocks, rest = divmod(lanes, block)
    masked = bool(rest) and src.row == lanes
    full = blocks // each
    if full:
        runs = [v.stepping((*v.strides[:-1], n)) for v, n in ((dst, each), (src, each * block))]
        runs = [View(v.memory, v.dtype, v.offset, (*v.strides, 1)) for v in runs]
        _repeats(unit, GROUPS[fold], runs[0], runs[1], [*rows, full], each * block)
    tail = blocks - full * each + masked
    if tail:
        start = full * each
        ends = (dst.moved(place, start), src.moved(place, start * block))
        mask = (1 << (tail * block - block + rest)) - 1 if masked else None
        _repeats(unit, GROUPS[fold], *ends, rows, tail * block, mask)
    if rest and not masked:
        ends = (dst.moved(place, blocks), src.moved(place, blocks * block))
        _repeats(unit, ACROSS[fold], *ends, rows, rest)


def _last_blocks(unit: Unit, fold: str, dst: View, src: View, rows: Sizes, lanes: int) -> None:
    """dst[rows] = fold of src[rows, lanes], at most a block each; eight rows a repeat."""
    block = c0_of(src.dtype)
    each = unit.builder.chip.vector_bytes_per_repeat // BLOCK_BYTES
    dims = coalesce(rows, (dst, src.stepping(src.strides[:-1]))) or [(1, (1, block))]
    (count, (step, pitch)) = dims[-1]
    outer = dims[:-1]
    if lanes < block and src.row != lanes:
        _repeats(unit, ACROSS[fold], dst, src, rows, lanes)
        return
    one = (1 << lanes) - 1
    if step != 1 or pitch % block or count < each:
        _repeats(unit, GROUPS[fold], dst, src, rows, block, one if lanes < block else None)
        return
    whole = count - count % each
    sizes = [n for n, _ in outer]
    views = with_dims((dst, src), dims)
    for at, repeats, blocks in ((0, whole // each, each), (whole, 1, count % each)):
        mask = sum(one << i * block for i in range(blocks)) if lanes < block else None
        strides = (pitch * blocks, pitch, 1)
        if not blocks:
            continue
        for out, row in unit.over(sizes, [v.moved(len(sizes), at) for v in views]):
            for start, part in unit.parts(repeats, unit.builder.chip.max_repeat):
                to = out.memory.region(out.offset + start * blocks, (part, blocks))
                first = row.offset + start * (pitch * blocks)
                what = row.memory.region(first, (part, blocks, block), strides)
                unit.builder.vector(GROUPS[fold], to, what, mask=mask)


def _product_across(unit: Unit, dst: View, src: View, rows: Sizes, lanes: int) -> None:
    """dst[rows] = product along the lanes, for which there is no instruction.

    Chunks of a block are multiplied; then every lane of the block is spread over a block of its own
    and these blocks are multiplied; a one-lane maximum writes the results.
    """
    op = Op("vmul")
    block = c0_of(src.dtype)
    lines = _lines(unit, src.dtype, rows, block)
    kept = min(lanes, block)
    if lanes > block:
        _narrow(unit, op, lines, src, rows, lanes, block)
    else:
        apply(unit, Op("vcopy"), lines, (src,), [*rows, lanes])
    spread = View(unit.take(src.dtype, block * block), src.dtype, 0, (block, 1))
    with unit.repeat(math.prod(rows)) as row:
        out = View(lines.memory, src.dtype, row * block, (1,))
        to = spread.memory.region(0, (kept, block))
        unit.builder.vector("vbrcb", to, lines.memory.region(out.offset, kept))
        if kept > 1:
            apply(unit, op, out, (spread.inner(), spread.moved(0, 1).inner()), [block])
        if kept > 2:
            with unit.repeat(kept - 2) as index:
                apply(unit, op, out, (out, spread.moved(0, index + 2).inner()), [block])
    _repeats(unit, "vcmax", dst, lines, rows, 1)
    unit.give(spread.memory)
    unit.give(lines.memory)


def _narrow(unit: Unit, op: Op, dst: View, src: View, rows: Sizes, lanes: int, width: int) -> None:
    """dst[rows, width] = the chunks of `width` lanes of src combined."""
    last = len(rows)
    whole = lanes // width
    start = min(whole, 2)
    if whole > 1:
        apply(unit, op, dst, (src, src.moved(last, width)), [*rows, width])
    else:
        apply(unit, Op("vcopy"), dst, (src,), [*rows, width])
    if whole > start:
        with unit.repeat(whole - start) as index:
            chunk = src.moved(last, index * width + start * width)
            apply(unit, op, dst, (dst, chunk), [*rows, width])
    if lanes % width:
        chunk = src.moved(last, lanes - lanes % width)
        apply(unit, op, dst, (dst, chunk), [*rows, lanes % width])


def _repeats(
    unit: Unit, op: str, dst: View, src: View, rows: Sizes, lanes: int, mask: int | None = None
) -> None:
    """One cross-lane instruction per up to 255 rows of at most one repeat each."""
    results = lanes // c0_of(src.dtype) if op in GROUPS.values() else 1
    axes = range(len(rows))
    dims = coalesce(rows, (dst.take(axes), src.take(axes))) or [(1, (1, 0))]
    dims.sort(key=lambda d: d[0])
    *outer, count = (n for n, _ in dims)
    for out, row in unit.over(outer, with_dims((dst, src), dims)):
        step = out.strides[0]
        pitch = row.strides[0]
        for at, part in unit.parts(count, unit.builder.chip.max_repeat):
            to = out.memory.region(out.offset + at * step, (part, results), (step, 1))
            what = row.memory.region(row.offset + at * pitch, (part, lanes), (pitch, 1))
            unit.builder.vector(op, to, what, mask=mask)
