"""Instructions of a matrix product: fractals GM -> L1 -> L0, mmad, and the way out of L0C.

Layouts, in fractals of 16 x C0: A (K1, M1, 16, C0), B (K1, N1, 16, C0), C (N1, M1, 16, 16), the
same in GM, L1 and L0 except that L0A holds (M1, K1, 16, C0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_lab.dsl.boxes import Box, Range
from ascend_lab.dsl.emit_vector import apply
from ascend_lab.dsl.matrices import (
    Matrix,
    has_relu,
    matrix_of,
    plain_read,
    product_of,
    role_of,
    stored_elements,
)
from ascend_lab.dsl.stages import FRACTAL, Fixed, Input, Stage
from ascend_lab.dsl.unit import Op
from ascend_lab.dsl.views import Memory, View
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, Buffer, Region, c0_of

if TYPE_CHECKING:
    from ascend_lab.dsl.nest import Nest

AREA_C = FRACTAL * FRACTAL


def _per(index: Affine, unit: int) -> Affine:
    """Return index / unit; the index must step in whole units."""
    values = (index.const, *(c for _, c in index.terms))
    if any(v % unit for v in values):
        raise ScheduleError(f"cube tiles in steps of {unit}", str(index), "split by a multiple")
    return Affine(index.const // unit, tuple((v, c // unit) for v, c in index.terms))


def _ranges(stage: Stage, box: Box) -> list[Range]:
    return [box[a.name] for a in stage.axes]


def instructions(nest: Nest, stage: Stage, box: Box, folds: list[Affine]) -> None:
    """Write the instructions of one stage of a matrix product."""
    if stage.is_cube:
        _multiply(nest, stage, box, folds)
    elif stage.scope == "L1":
        _load_l1(nest, stage, box)
    elif stage.scope in ("L0A", "L0B"):
        _load_l0(nest, stage, box)
    else:
        _drain(nest, stage, box)


def _load_l1(nest: Nest, stage: Stage, box: Box) -> None:
    """GM -> L1: one burst per fractal column."""
    role = role_of(nest.state, stage)
    matrix = matrix_of(product_of(nest.state, stage), role)
    source = nest.state.find(stage.sources[0])
    ranges = _ranges(stage, box)
    major, minor = ranges[matrix.major], ranges[matrix.minor]
    pitch = -(-source.shape[matrix.minor] // matrix.minor_unit)
    at = _per(major.start, matrix.major_unit) * pitch + _per(minor.start, matrix.minor_unit)
    start = (at + _batch(source, matrix, ranges)) * matrix.area
    columns, rows = major.count // matrix.major_unit, minor.count // matrix.minor_unit
    region = nest.gm(source.name).region(
        start, (columns, rows * matrix.area), (pitch * matrix.area, 1)
    )
    nest.builder.copy(nest.tiles.held[stage.name].memory.region(0, region.sizes), region)


def _batch(source: Stage | Input | Fixed, matrix: Matrix, ranges: list[Range]) -> Affine:
    """Return the fractals in front of the matrix of the batch."""
    each = (
        stored_elements(
            source.shape,
            Matrix(matrix.major, matrix.minor, matrix.major_unit, matrix.minor_unit, ()),
        )
        // matrix.area
    )
    out = Affine()
    for dim in matrix.batch:
        out = out * source.shape[dim] + ranges[dim].start
    return out * each


def _load_l0(nest: Nest, stage: Stage, box: Box) -> None:
    """L1 -> L0A or L0B: one load2d per row or column of fractals."""
    role = role_of(nest.state, stage)
    matrix = matrix_of(product_of(nest.state, stage), role)
    held = nest.tiles.held[stage.sources[0]]
    ranges = _ranges(stage, box)
    rows = ranges[matrix.minor].count // matrix.minor_unit
    depth = ranges[matrix.major].count // matrix.major_unit
    pitch = held.sizes[matrix.minor] // matrix.minor_unit
    start = _per(ranges[matrix.major].start - held.starts[matrix.major], matrix.major_unit) * pitch
    start = start + _per(ranges[matrix.minor].start - held.starts[matrix.minor], matrix.minor_unit)
    area, k, unit = matrix.area, nest.builder, nest.unit
    dst, src = nest.tiles.held[stage.name].memory, held.memory
    if role == "B":
        with unit.repeat(depth) as i:
            to = dst.region(i * (rows * area), (rows, area))
            k.load2d(to, src.region((start + i * pitch) * area, (rows, area)))
    elif depth <= rows:
        with unit.repeat(depth) as i:
            to = dst.region(i * area, (rows, area), (depth * area, 1))
            k.load2d(to, src.region((start + i * pitch) * area, (rows, area)))
    else:
        with unit.repeat(rows) as i:
            to = dst.region(i * (depth * area), (depth, area))
            k.load2d(to, src.region((start + i) * area, (depth, area), (pitch * area, 1)))


def _multiply(nest: Nest, stage: Stage, box: Box, folds: list[Affine]) -> None:
    """One mmad; it adds to C except in the first step of all loops over k."""
    if stage.scope != "L0C" or not stage.tensorized:
        raise ScheduleError(
            f"{stage.name}: a sum of products in L0C, tensorized",
            f"one in {stage.scope}",
            "cache_write it to L0C, cache_read its operands to L1, L0A and L0B, tensorize it",
        )
    for read, scope in zip(stage.reads, ("L0A", "L0B"), strict=True):
        if nest.tiles.scope_of(read.source) != scope:
            raise ScheduleError(
                f"{stage.name}: operand {read.source} in {scope}",
                nest.tiles.scope_of(read.source),
                f'cache_read it to "L1", then to "{scope}"',
            )
    c0 = c0_of(stage.reads[0].dtype)
    m, n = box["m"].count // FRACTAL, box["n"].count // FRACTAL
    k = box["k"].count // c0
    a, b = (nest.tiles.held[r.source] for r in stage.reads)
    own = nest.tiles.held[stage.name]
    names = [x.name for x in stage.axes]
    top = own.sizes[names.index("m")] // FRACTAL
    at = _per(box["n"].start - own.starts[names.index("n")], FRACTAL) * top
    at = at + _per(box["m"].start - own.starts[names.index("m")], FRACTAL)
    nest.builder.mmad(
        own.memory.region(
            at * AREA_C, (n, m, FRACTAL, FRACTAL), (top * AREA_C, AREA_C, FRACTAL, 1)
        ),
        a.memory.region(0, (m, k, FRACTAL, c0)),
        b.memory.region(0, (k, n, FRACTAL, c0)),
        accumulate=sum(folds, Affine()),
    )


def _drain(nest: Nest, stage: Stage, box: Box) -> None:
    """L0C -> UB, L0C -> GM through the fix pipe, or UB -> GM, as columns of fractals."""
    read = plain_read(stage.expr)
    assert read is not None
    cube = product_of(nest.state, stage)
    matrix = matrix_of(cube, "C")
    held = nest.tiles.held[read.source]
    ranges = _ranges(stage, box)
    rows, columns = ranges[matrix.minor].count // FRACTAL, ranges[matrix.major].count // FRACTAL
    pitch = held.sizes[matrix.minor] // FRACTAL
    at = _per(ranges[matrix.major].start - held.starts[matrix.major], FRACTAL) * pitch
    at = at + _per(ranges[matrix.minor].start - held.starts[matrix.minor], FRACTAL)
    source = held.memory.region(at * AREA_C, (columns, rows * AREA_C), (pitch * AREA_C, 1))
    k = nest.builder
    if stage.scope == "UB":
        out = nest.tiles.held[stage.name].memory
        k.copy(out.region(0, source.sizes), source)
        if has_relu(stage.expr):
            _relu(nest, out, rows * columns * AREA_C, stage.dtype)
        return
    target = _gm_columns(nest, stage, matrix, ranges, (columns, rows))
    if nest.tiles.scope_of(read.source) == "L0C":
        k.fixpipe(target, source, relu=has_relu(stage.expr))
    else:
        k.copy(target, source)


def _gm_columns(
    nest: Nest, stage: Stage, matrix: Matrix, ranges: list[Range], sizes: tuple[int, int]
) -> Region:
    height = -(-stage.shape[matrix.minor] // FRACTAL)
    place = _per(ranges[matrix.major].start, FRACTAL) * height
    place = place + _per(ranges[matrix.minor].start, FRACTAL)
    place = place + _batch(stage, matrix, ranges)
    tensor: Buffer = nest.gm(stage.name)
    return tensor.region(place * AREA_C, (sizes[0], sizes[1] * AREA_C), (height * AREA_C, 1))


def _relu(nest: Nest, tile: Memory, elements: int, dtype: str) -> None:
    view = View(tile, dtype, 0, (1,))
    apply(nest.unit, Op("vrelu"), view, (view,), (elements,))
