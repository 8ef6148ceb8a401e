"""Gather, scatter and one-hot: rows picked at run time, by indices that the scalar unit reads.

Who may write a row? If two cores get updates of the same row, the result depends on who comes last,
or, for sums, one of two updates is lost. Three ways out: one owner per element, memory that adds by
itself (atomic), or indices sorted before (`kernels.grouped`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import InputError, ShapeError, TypeMismatchError
from ascend_lab.isa import Affine, Launch, Part, Program, binding_of
from ascend_lab.isa.program import ATOMIC_FORMATS
from ascend_lab.kernels.indexed_rows import (
    BATCH,
    Feed,
    Table,
    Work,
    batches,
    gather_program,
    l2_steps,
    scatter_program,
    single_program,
)
from ascend_lab.layout.boxes import Box, Dim
from ascend_lab.layout.moves import Job, MoveWriter, item_bytes


def check_indices(indices: NDArray[Any], bound: int, name: str = "index") -> NDArray[np.int32]:
    """Return the indices as int32; raise `InputError` naming the first one outside 0..bound-1."""
    array = np.asarray(indices)
    if array.dtype.kind not in "iu":
        raise TypeMismatchError(f"{name}: whole numbers", str(array.dtype), "cast to int32")
    flat = array.reshape(-1)
    bad = np.flatnonzero((flat < 0) | (flat >= bound))
    if bad.size:
        place = int(bad[0])
        raise InputError(
            f"{name}: every index in 0..{bound - 1}",
            f"{int(flat[place])} at position {place}",
            "indices are not counted from the end",
        )
    return flat.astype(np.int32)


def gather_launch(chip: Chip, rows: int, columns: int, picks: int, dtype: str) -> Launch:
    """y[i, :] = x[index[i], :]: tensors x (rows, columns), index (picks) int32, y (picks, columns).

    The picks are cut over all vector cores, the columns where picks are few. An embedding is this
    with x as its table. A bad index is a `SimulationError` at run time; `check_indices` finds it
    before.
    """
    table = _table(rows, columns, picks, dtype)
    narrow = chip.combined and columns < table.block
    wide = picks < _cores(chip) and columns >= 16 * table.block
    parts = []
    for first, count, size in _column_shares(chip, table) if wide else _pick_shares(chip, picks):
        work = Work(picks, size, 0, first, 0, size) if wide else Work(size, columns, first, 0, size)
        if narrow:
            program = single_program(chip, table, work, count, mode="gather")
        else:
            program = gather_program(chip, table, work, count)
        parts.append(_part(program, count))
    return Launch("gather", tuple(parts))


def scatter_launch(
    chip: Chip,
    rows: int,
    columns: int,
    picks: int,
    dtype: str,
    *,
    mode: str = "update",
    method: str = "owner",
) -> Launch:
    """y[index[i], :] = u[i, :] ("update") or += u[i, :] ("add"); tensors u, index, y.

    Duplicates are defined: an update leaves the last one in the order of i, an add sums them all.
    `method` "owner" cuts the columns over the cores, so each element has one owner, who goes
    through all indices in order. "atomic" (add only, fp32 fp16 int32) cuts the updates instead and
    lets memory add, in no certain order. Raises `InputError`, `ShapeError`, `TypeMismatchError`.
    """
    table = _table(rows, columns, picks, dtype)
    if mode not in ("update", "add") or method not in ("owner", "atomic"):
        raise InputError(
            "mode update or add, method owner or atomic", f"{mode}, {method}", "choose one of each"
        )
    if method == "atomic":
        return _atomic_launch(chip, table, mode)
    parts = []
    if chip.combined and columns < table.block:
        cores = min(columns, _cores(chip))
        for first, count, size in _deal(columns, -(-columns // cores)):
            work = Work(picks, size, 0, first, 0, size)
            parts.append(_part(single_program(chip, table, work, count, mode=mode), count))
        return Launch(f"scatter_{mode}", tuple(parts))
    for first, count, size in _column_shares(chip, table):
        work = Work(picks, size, 0, first, 0, size)
        parts.append(_part(scatter_program(chip, table, work, count, mode=mode), count))
    return Launch(f"scatter_{mode}", tuple(parts))


def _atomic_launch(chip: Chip, table: Table, mode: str) -> Launch:
    if mode != "add" or table.dtype not in ATOMIC_FORMATS:
        raise TypeMismatchError(
            f"atomic: mode add in {', '.join(ATOMIC_FORMATS)}",
            f"{mode} in {table.dtype}",
            'use method="owner"',
        )
    if chip.combined and table.columns % table.block:
        raise ShapeError(
            f"atomic: rows of whole blocks, multiples of {table.block} columns, on {chip.name}",
            str(table.columns),
            'pad the rows or use method="owner"',
        )
    parts = []
    for first, count, size in _pick_shares(chip, table.picks):
        work = Work(size, table.columns, first, 0, size)
        program = scatter_program(chip, table, work, count, mode="add", atomic=True)
        parts.append(_part(program, count))
    return Launch("scatter_add_atomic", tuple(parts))


def _table(rows: int, columns: int, picks: int, dtype: str) -> Table:
    if min(rows, columns, picks) < 1:
        raise ShapeError(
            "rows, columns and indices, one or more of each",
            f"{rows}, {columns}, {picks}",
            "leave the operator out",
        )
    return Table(rows, columns, picks, dtype)


def _cores(chip: Chip) -> int:
    return chip.core_count * chip.vector_cores_per_core


def _pick_shares(chip: Chip, picks: int) -> Sequence[tuple[int, int, int]]:
    """Cut the picks over the cores in whole blocks of 8 indices."""
    per = -(-picks // _cores(chip))
    return _deal(picks, -(-per // 8) * 8 if picks > 8 else picks)


def _column_shares(chip: Chip, table: Table) -> Sequence[tuple[int, int, int]]:
    """Cut the columns over the cores in whole blocks of 32 bytes."""
    units = max(table.columns // table.block, 1)
    return _deal(table.columns, -(-units // _cores(chip)) * table.block, table.block)


def _deal(total: int, per: int, least: int = 1) -> Sequence[tuple[int, int, int]]:
    """Cut `total` in pieces of `per`: (start of the first, how many, size); the last differs.

    A last piece below `least` joins the one before.
    """
    full, rest = divmod(total, per)
    if full and 0 < rest < least:
        full, rest = full - 1, rest + per
    groups = [(0, full, per), (full * per, 1, rest)]
    return [(start, count, size) for start, count, size in groups if count and size]


def _part(program: Program, cores: int) -> Part:
    return Part(program, tuple(binding_of({"core": i}) for i in range(cores)))


# One-hot rows: zeros in bulk, then one element a row, placed by the scalar unit.


def one_hot_launch(chip: Chip, picks: int, classes: int, dtype: str) -> Launch:
    """y[i, j] = 1 where j = index[i], else 0: tensors index (picks) int32, y (picks, classes).

    Rows are cut over all vector cores. Raises `ShapeError` for empty shapes.
    """
    if min(picks, classes) < 1:
        raise ShapeError("indices and classes, one or more", f"{picks}, {classes}", "leave it out")
    cores = chip.core_count * chip.vector_cores_per_core
    step = math.lcm(8, BLOCK_BYTES // item_bytes(dtype)) if picks > 8 else picks
    per = min(-(-picks // (cores * step)) * step, picks)
    full, rest = divmod(picks, per)
    groups = [(0, full, per), (full * per, 1, rest)]
    parts = []
    for first, count, size in groups:
        if count and size:
            program = _program(chip, (picks, classes), dtype, (first, per, size), count)
            parts.append(Part(program, tuple(binding_of({"core": i}) for i in range(count))))
    return Launch("one_hot", tuple(parts))


def _program(
    chip: Chip, shape: tuple[int, int], dtype: str, rows: tuple[int, int, int], cores: int
) -> Program:
    """The program of `cores` cores with rows (first, step from core to core, count)."""
    picks, classes = shape
    start, step, count = rows
    box = Box((Dim(count * classes, 0, 1),), 0, 0)
    job = Job(box, "y")
    writer = MoveWriter("one_hot", chip, dtype, {"y": picks * classes}, [job])
    k = writer.k
    lanes = chip.vector_bytes_per_repeat // item_bytes(dtype)
    one = k.buffer("one", "UB", dtype, lanes)
    k.vector("vdup", one.region(0, (1, lanes)), scalar=1.0)
    feed = Feed.make(k, k.tensor("index", "int32", picks))
    first = k.param("core", cores) * step + start
    writer.emit(job, box.dims, Affine(), first * classes)
    # S must find the zeros written, and the ones in UB.
    k.barrier()
    for at, some in batches(k, "t", count, BATCH):
        feed.open(first + at, some)
        with k.loop("r", some) as r:
            place = writer.gm["y"].region((first + at + r) * classes, 1)
            index = feed.take(r)
            source, steps = one.region(0, 1), l2_steps(chip)
            k.scalar(place, source, index=index, pitch=1, bound=classes, steps=steps)
        feed.close()
    return k.finish()
