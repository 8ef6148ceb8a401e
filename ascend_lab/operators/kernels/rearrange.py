"""Operators that only move data: strided moves, and rows picked by indices at run time.

Slice, concat, split, pad and reshape are lists of strided moves. Gather, scatter and one-hot pick
rows by indices that the scalar unit S reads.

If two cores update the same row, the result depends on which core comes last; for sums, one of two
updates may be lost. There are three solutions: only one core writes an element (its owner), memory
adds by itself (atomic), or indices are sorted beforehand (see chapter 12).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError, ShapeError, TypeMismatchError
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa.operands import ATOMIC_FORMATS
from ascend_lab.machine.layout.maps import Box, Dim
from ascend_lab.operators.kernels import indexed_rows


def slice_launch(
    chip: Chip,
    shape: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    dtype: str,
    *,
    step: Sequence[int] | None = None,
) -> isa.Launch:
    """Return the launch of y = x[begin:end:step], with one begin, end and step per axis.

    `begin` and `end` count from the start of an axis: 0 <= begin < n, and end may be -1 for a
    negative step. Raises `ShapeError` for positions outside `shape` or an empty result.
    """
    steps = tuple(step) if step is not None else (1,) * len(shape)
    if not len(shape) == len(begin) == len(end) == len(steps) or 0 in steps:
        raise ShapeError(
            f"begin, end and step, not 0, for the {len(shape)} axes of {tuple(shape)}",
            f"{tuple(begin)}, {tuple(end)}, {steps}",
            "give one of each per axis",
        )
    ranges = [range(b, e, s) for b, e, s in zip(begin, end, steps, strict=True)]
    for axis, (n, positions) in enumerate(zip(shape, ranges, strict=True)):
        if (
            not positions
            or min(positions[0], positions[-1]) < 0
            or max(positions[0], positions[-1]) >= n
        ):
            needed = f"positions 0..{n - 1} on axis {axis}, at least one"
            got = str(positions)
            raise ShapeError(needed, got, "check begin and end")
    strides = layout.row_major(shape)
    sizes = tuple(len(r) for r in ranges)
    return layout.copy_launch(
        chip,
        dtype,
        sizes,
        [s * t for s, t in zip(strides, steps, strict=True)],
        layout.row_major(sizes),
        source_offset=sum(b * s for b, s in zip(begin, strides, strict=True)),
        source_elements=math.prod(shape),
        target_elements=math.prod(sizes),
        name="slice",
    )


def concat_launch(
    chip: Chip, shapes: Sequence[Sequence[int]], axis: int, dtype: str, *, name: str = "concat"
) -> isa.Launch:
    """Return the launch of y = concatenate(x0, x1, ...) along `axis`.

    Raises `ShapeError` unless the shapes agree on all other axes.
    """
    joint_shape, moves = _pieces(shapes, axis, split=False)
    tensors = {f"x{i}": math.prod(s) for i, s in enumerate(shapes)} | {"y": math.prod(joint_shape)}
    return layout.moves_launch(chip, dtype, tensors, moves, name=name)


def split_launch(
    chip: Chip, shape: Sequence[int], parts: Sequence[int], axis: int, dtype: str
) -> isa.Launch:
    """Return the launch that cuts x along `axis` into y0, y1, ... of sizes `parts`.

    Raises `ShapeError` if the sizes do not add up.
    """
    cut_axis = axis_of(shape, axis)
    if sum(parts) != shape[cut_axis] or min(parts, default=0) < 1:
        needed = f"parts of 1 or more that sum to {shape[cut_axis]}"
        raise ShapeError(needed, str(tuple(parts)), "check axis")
    shapes = [[*shape[:cut_axis], n, *shape[cut_axis + 1 :]] for n in parts]
    _, moves = _pieces(shapes, cut_axis, split=True)
    tensors = {"x": math.prod(shape)} | {f"y{i}": math.prod(s) for i, s in enumerate(shapes)}
    return layout.moves_launch(chip, dtype, tensors, moves, name="split")


def _pieces(
    shapes: Sequence[Sequence[int]], axis: int, *, split: bool
) -> tuple[tuple[int, ...], list[layout.Move]]:
    """Return the shape of all pieces together, and one move per piece to or from it."""
    if not shapes:
        raise ShapeError("at least one tensor to join", "none", "pass the shapes")
    joined = axis_of(shapes[0], axis)
    other_sizes = [(*s[:joined], *s[joined + 1 :]) for s in shapes]
    if len({len(s) for s in shapes}) > 1 or len(set(other_sizes)) > 1:
        needed = f"shapes equal on all axes but {joined}"
        got = ", ".join(str(tuple(s)) for s in shapes)
        raise ShapeError(needed, got, "reshape or pad them first")
    joint_size = sum(s[joined] for s in shapes)
    joint_shape = (*shapes[0][:joined], joint_size, *shapes[0][joined + 1 :])
    strides = layout.row_major(joint_shape)
    start = 0
    moves = []
    for i, shape in enumerate(shapes):
        # Piece i of axis 1 of (4, 10): start 3 is element 3 of each row, rows stay 10 elements
        # apart.
        joint = layout.View("x" if split else "y", strides, start * strides[joined])
        piece = layout.View(f"y{i}" if split else f"x{i}", layout.row_major(shape))
        source, target = (joint, piece) if split else (piece, joint)
        moves.append(layout.Move(tuple(shape), target, source))
        start += shape[joined]
    return joint_shape, moves


def pad_launch(
    chip: Chip,
    shape: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dtype: str,
    *,
    value: float = 0.0,
) -> isa.Launch:
    """Return the launch of y = x with (before, after) elements of `value` added on every axis.

    Raises `ShapeError` if `pads` do not fit the shape.
    """
    if len(pads) != len(shape) or any(len(p) != 2 or min(p) < 0 for p in pads):
        needed = f"(before, after) >= 0 for each axis of {tuple(shape)}"
        got = str(tuple(pads))
        raise ShapeError(needed, got, "correct it")
    sizes = tuple(n + lo + hi for n, (lo, hi) in zip(shape, pads, strict=True))
    strides = layout.row_major(sizes)
    # The place of x[0, 0, ...] in y: 1 row above and 2 columns on the left of rows of 12 are 14
    # elements.
    inner_start = sum(lo * s for (lo, _), s in zip(pads, strides, strict=True))
    body = layout.Move(
        tuple(shape),
        layout.View("y", strides, inner_start),
        layout.View("x", layout.row_major(shape)),
    )
    moves = [body] if math.prod(shape) else []
    for axis, (n, (lo, hi)) in enumerate(zip(shape, pads, strict=True)):
        # The padding of earlier axes is written already: begin inside it.
        corner = sum(pads[a][0] * strides[a] for a in range(axis))
        for thickness, start in ((lo, 0), (hi, lo + n)):
            frame = (*shape[:axis], thickness, *sizes[axis + 1 :])
            view = layout.View("y", strides, corner + start * strides[axis])
            moves.append(layout.Move(frame, view, value=value))
    tensors = {"x": math.prod(shape), "y": math.prod(sizes)}
    return layout.moves_launch(chip, dtype, tensors, moves, name="pad")


def reshape_launch(chip: Chip, shape: Sequence[int], to: Sequence[int], dtype: str) -> isa.Launch:
    """Return the launch of y = x.reshape(to), one contiguous copy.

    Raises `ShapeError` if the number of elements differs.
    """
    elements = math.prod(shape)
    if math.prod(to) != elements:
        needed = f"a shape of {elements} elements, as {tuple(shape)}"
        got = str(tuple(to))
        raise ShapeError(needed, got, "check the sizes")
    return layout.copy_launch(chip, dtype, (elements,), (1,), (1,), name="reshape")


def axis_of(shape: Sequence[int], axis: int) -> int:
    """Return `axis` counted from 0; raise `ShapeError` outside -rank .. rank-1."""
    rank = len(shape)
    if not -rank <= axis < rank:
        needed = f"an axis in {-rank}..{rank - 1} of {tuple(shape)}"
        got = str(axis)
        raise ShapeError(needed, got, "check the rank")
    return axis % rank


# -- rows by indices -------------------------------------------------------------------------------
def check_indices(indices: NDArray[Any], bound: int, name: str = "index") -> NDArray[np.int32]:
    """Return the indices as int32; raise `InputError` naming the first one outside 0..bound-1."""
    array = np.asarray(indices)
    if array.dtype.kind not in "iu":
        raise TypeMismatchError(f"{name}: whole numbers", str(array.dtype), "cast to int32")
    flat = array.reshape(-1)
    outside = np.flatnonzero((flat < 0) | (flat >= bound))
    if outside.size:
        position = int(outside[0])
        needed = f"{name}: every index in 0..{bound - 1}"
        got = f"{int(flat[position])} at position {position}"
        raise InputError(needed, got, "indices are not counted from the end")
    return flat.astype(np.int32)


def gather_launch(
    chip: Chip, rows: int, columns: int, picks: int, dtype: str, *, from_end: bool = False
) -> isa.Launch:
    """Return the launch of y[i, :] = x[index[i], :].

    Tensors are x (rows, columns), index (picks) in int32 and y (picks, columns). The picks are
    divided over all vector cores or, if there are few, the columns. An embedding is a gather from
    its table x. With `from_end` an index below 0 counts from the end of the table.

    An index outside the table raises `SimulationError` at run time; `check_indices` finds it
    beforehand.
    """
    table = replace(_table(rows, columns, picks, dtype), from_end=from_end)
    # 4 picks on 32 cores would leave 28 idle: cut the columns, if each core gets enough of them.
    cuts_columns = picks < chip.cores_of("vector") and columns >= 16 * table.block

    def program(share: isa.Share) -> isa.Program:
        core_share = (
            indexed_rows.CoreShare((picks, 0, 0), share)
            if cuts_columns
            else indexed_rows.CoreShare(share, (columns, 0, 0))
        )
        if chip.combined and columns < table.block:
            return indexed_rows.single_program(chip, table, core_share, mode="gather")
        return indexed_rows.gather_program(chip, table, core_share)

    shares = _column_shares(chip, table) if cuts_columns else _pick_shares(chip, picks)
    return isa.spread("gather", {"core": shares}, program)


def scatter_launch(
    chip: Chip,
    rows: int,
    columns: int,
    picks: int,
    dtype: str,
    *,
    mode: str = "update",
    method: str = "owner",
) -> isa.Launch:
    """Return the launch of y[index[i], :] = u[i, :] ("update") or += u[i, :] ("add").

    For equal indices the result is defined: "update" keeps the last one in the order of i, "add"
    sums them all. `method` "owner" divides the columns over the cores, so that each element has one
    owner, which processes all indices in order. "atomic" (only "add" in fp32, fp16 or int32)
    divides the updates instead, and memory adds them in no defined order. "auto" takes the method
    that is faster in simulation. Raises `InputError`, `ShapeError` or `TypeMismatchError` for wrong
    arguments.
    """
    table = _table(rows, columns, picks, dtype)
    if mode not in ("update", "add") or method not in ("owner", "atomic", "auto"):
        needed = "mode update or add, method owner, atomic or auto"
        got = f"{mode}, {method}"
        raise InputError(needed, got, "choose one of each")
    if method == "atomic":
        return _atomic_launch(chip, table, mode)
    owner = _owner_launch(chip, table, mode)
    if method == "owner" or not _memory_adds(chip, table, mode):
        return owner
    atomic = _atomic_launch(chip, table, mode)
    return min(atomic, owner, key=lambda launch: sim.simulate(launch, chip).cycles)


def _owner_launch(chip: Chip, table: indexed_rows.Table, mode: str) -> isa.Launch:
    """Return the launch in which cores divide the columns, and each processes all indices."""
    columns = table.columns
    picks = table.index_count
    # Rows shorter than 32 bytes cannot be copied on these chips: S moves elements.
    narrow = chip.combined and columns < table.block
    write = indexed_rows.single_program if narrow else indexed_rows.scatter_program
    largest_share = -(-columns // min(columns, chip.cores_of("vector")))
    shares = _cut(columns, largest_share) if narrow else _column_shares(chip, table)
    name = f"scatter_{mode}"
    all_picks = (picks, 0, 0)
    return isa.spread(
        name,
        {"core": shares},
        lambda c: write(chip, table, indexed_rows.CoreShare(all_picks, c), mode=mode),
    )


def _memory_adds(chip: Chip, table: indexed_rows.Table, mode: str) -> bool:
    """Tell whether memory can add the updates, given the mode, the format and the ends of rows."""
    ragged = table.columns % table.block != 0
    return mode == "add" and table.dtype in ATOMIC_FORMATS and not (chip.combined and ragged)


def _atomic_launch(chip: Chip, table: indexed_rows.Table, mode: str) -> isa.Launch:
    """Return the launch in which cores divide the updates, or columns if that busies more cores."""
    if mode != "add" or table.dtype not in ATOMIC_FORMATS:
        needed = f"atomic: mode add in {', '.join(ATOMIC_FORMATS)}"
        got = f"{mode} in {table.dtype}"
        raise TypeMismatchError(needed, got, 'use method="owner"')
    if chip.combined and table.columns % table.block:
        needed = f"atomic: rows of whole blocks, multiples of {table.block} columns, on {chip.name}"
        raise ShapeError(needed, str(table.columns), 'pad the rows or use method="owner"')

    by_picks = _pick_shares(chip, table.index_count)
    by_columns = _column_shares(chip, table)
    # Dividing the picks needs fewer copies, so columns are divided only if that busies more than
    # twice as many cores.
    cuts_columns = len(by_columns) > 2 * len(by_picks)

    def program(share: isa.Share) -> isa.Program:
        core_share = (
            indexed_rows.CoreShare((table.index_count, 0, 0), share)
            if cuts_columns
            else indexed_rows.CoreShare(share, (table.columns, 0, 0))
        )
        return indexed_rows.scatter_program(chip, table, core_share, mode="add", atomic=True)

    shares = by_columns if cuts_columns else by_picks
    return isa.spread("scatter_add_atomic", {"core": shares}, program)


def _table(rows: int, columns: int, picks: int, dtype: str) -> indexed_rows.Table:
    """Return the table; raise `ShapeError` for an empty axis."""
    if min(rows, columns, picks) < 1:
        needed = "rows, columns and indices, one or more of each"
        raise ShapeError(needed, f"{rows}, {columns}, {picks}", "leave the operator out")
    return indexed_rows.Table(rows, columns, picks, dtype)


def _pick_shares(chip: Chip, picks: int) -> list[int]:
    """Return the picks of each core, in whole blocks of 8 indices."""
    # Indices come in blocks of 32 bytes: 8 of int32.
    core_picks = -(-picks // chip.cores_of("vector"))
    return _cut(picks, -(-core_picks // 8) * 8 if picks > 8 else picks)


def _column_shares(chip: Chip, table: indexed_rows.Table) -> list[int]:
    """Return the columns of each core, in blocks of 32 bytes; the last core also gets what remains.

    A remainder of less than a block cannot be a share of its own.
    """
    blocks = max(table.columns // table.block, 1)
    core_columns = -(-blocks // chip.cores_of("vector")) * table.block
    shares = _cut(table.columns, core_columns)
    if len(shares) > 1 and shares[-1] < table.block:
        # 100 columns in blocks of 16 on 4 cores: 32, 32, 32 and 4, which join: 32, 32, 36.
        shares[-2:] = [sum(shares[-2:])]
    return shares


def _cut(total: int, size: int) -> list[int]:
    """Return the sizes of pieces of `total`: all `size`, except that the last may be smaller."""
    return [min(size, total - start) for start in range(0, total, size)]


def one_hot_launch(chip: Chip, picks: int, classes: int, dtype: str) -> isa.Launch:
    """Return the launch of y[i, j] = 1 where j = index[i], else 0.

    Tensors are index (picks) in int32 and y (picks, classes). Zeros are written in bulk, then the
    scalar unit S writes one element per row. Rows are divided over all vector cores. Raises
    `ShapeError` for empty shapes.
    """
    if min(picks, classes) < 1:
        raise ShapeError("indices and classes, one or more", f"{picks}, {classes}", "leave it out")
    cores = chip.cores_of("vector")
    # Whole blocks of 8 indices, and whole blocks of the classes' format.
    rows_in_blocks = math.lcm(8, BLOCK_BYTES // layout.item_bytes(dtype))
    unit = rows_in_blocks if picks > 8 else picks
    shares = _cut(picks, min(-(-picks // (cores * unit)) * unit, picks))
    shape = picks, classes
    return isa.spread(
        "one_hot", {"core": shares}, lambda share: _one_hot(chip, shape, dtype, share)
    )


def _one_hot(chip: Chip, shape: tuple[int, int], dtype: str, share: isa.Share) -> isa.Program:
    """Return the program for a core's share of the rows: zeros first, then a one in every row."""
    picks, classes = shape
    count, pitch, cores = share
    job = layout.Job(Box((Dim(count * classes, 0, 1),), 0, 0), "y")
    writer = layout.MoveWriter("one_hot", chip, dtype, {"y": picks * classes}, [job])
    k = writer.builder
    steps = indexed_rows.l2_trip_steps(chip)
    # One repeat of ones: S copies the first.
    lanes = chip.vector_bytes_per_repeat // layout.item_bytes(dtype)
    ones = k.buffer("one", "UB", dtype, lanes)
    k.each("vdup", lanes, (ones, 0), scalar=1.0)
    feed = indexed_rows.IndexFeed.make(k, k.tensor("index", "int32", picks))
    first_pick = k.param("core", cores) * pitch
    writer.emit(job, job.box.dims, isa.Affine(), first_pick * classes)
    # S must wait until the zeros are written and the ones are in UB.
    k.barrier()
    for at, batch_picks in indexed_rows.batches(k, "t", count, indexed_rows.BATCH):
        feed.open(first_pick + at, batch_picks)
        with k.loop("r", batch_picks) as r:
            place = writer.gm["y"].region((first_pick + at + r) * classes, 1)
            row = feed.index_region(r)
            k.scalar(place, ones.region(0, 1), index=row, pitch=1, bound=classes, steps=steps)
        feed.close()
    return k.finish()
