"""One-hot rows: zeros in bulk, then one element a row, placed by the scalar unit."""

from __future__ import annotations

import math

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Affine, Launch, Part, Program, binding_of
from ascend_lab.kernels.index_feed import BATCH, Feed, batches, l2_steps
from ascend_lab.kernels.move_writer import Job, MoveWriter, item_bytes
from ascend_lab.layout.boxes import Box, Dim


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
    job = Job(box, Dim(0, 0, 0), "y", "")
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
