"""Write the phases that are not vector loops: matrix products, and hand-written kernels.

A product copies fractals GM -> L1 -> L0, multiplies by mmad, and copies sums out of L0C. Layouts,
in fractals of 16 x C0, are A (K1, M1, 16, C0), B (K1, N1, 16, C0) and C (N1, M1, 16, 16), the same
in GM, L1 and L0, except that L0A holds (M1, K1, 16, C0).

Transpose, concat, pad, gather, scatter, conv2d and layout conversion have hand-written kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.errors import ScheduleError
from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import kernels
from ascend_lab.operators.dsl import boxes, fractals
from ascend_lab.operators.dsl.stages import Fixed, Stage, State, copied_element
from ascend_lab.operators.dsl.tiles import OpenTile, Tiles
from ascend_lab.operators.kernels import ConvShape, conv, transpose

AREA_C = isa.FRACTAL * isa.FRACTAL


def instructions(tiles: Tiles, stage: Stage, box: boxes.Box, folds: list[isa.Affine]) -> None:
    """Write the instructions of one stage of a matrix product."""
    if stage.is_cube:
        _multiply(tiles, stage, box, folds)
        return
    ranges = [box[a.name] for a in stage.axes]
    if stage.scope == "L1":
        _load_l1(tiles, stage, ranges)
    elif stage.scope in ("L0A", "L0B"):
        _load_l0(tiles, stage, ranges)
    else:
        _drain(tiles, stage, ranges)


def _in_units(index: isa.Affine, unit: int) -> isa.Affine:
    """Return index / unit; the index must step in whole units."""
    # m = 64 i + 32 in units of 16 is 4 i + 2; a step of 24 would begin inside a fractal.
    values = (index.const, *(c for _, c in index.terms))
    if any(v % unit for v in values):
        raise ScheduleError(f"cube tiles in steps of {unit}", str(index), "split by a multiple")
    return isa.Affine(index.const // unit, tuple((v, c // unit) for v, c in index.terms))


def _fractal(
    matrix: fractals.Matrix, tile: OpenTile, ranges: Sequence[boxes.Range]
) -> tuple[isa.Affine, int]:
    """Return the fractal of a tile or tensor where a box begins, and the fractals of a column."""
    major = matrix.major
    minor = matrix.minor
    starts = [r.start - start for r, start in zip(ranges, tile.starts, strict=True)]
    pitch = -(-tile.sizes[minor] // matrix.minor_unit)
    # Row-major over the batch axes, each entry with all fractals of its matrix.
    batch_start = isa.Affine()
    for dim in matrix.batch:
        batch_start = batch_start * tile.sizes[dim] + starts[dim]
    batch_start = batch_start * (pitch * -(-tile.sizes[major] // matrix.major_unit))
    # 64 rows are 4 fractals a column: row 32 of the third column begins at 2 * 4 + 2 = 10
    at = _in_units(starts[major], matrix.major_unit) * pitch + _in_units(
        starts[minor], matrix.minor_unit
    )
    return at + batch_start, pitch


def _sizes(matrix: fractals.Matrix, ranges: Sequence[boxes.Range]) -> tuple[int, int]:
    """Return the columns and rows of fractals in a box."""
    # A box of 64 x 128 in fp16 has 8 columns of 4 fractals.
    columns = ranges[matrix.major].count // matrix.major_unit
    return columns, ranges[matrix.minor].count // matrix.minor_unit


def _load_l1(tiles: Tiles, stage: Stage, ranges: Sequence[boxes.Range]) -> None:
    """Write the copy GM -> L1: one burst per column of fractals."""
    matrix = fractals.matrix_of(
        fractals.product_of(tiles.state, stage), fractals.role_of(tiles.state, stage)
    )
    source = tiles.tile_of(stage.sources[0])
    area = matrix.area
    start, pitch = _fractal(matrix, source, ranges)
    columns, rows = _sizes(matrix, ranges)
    # The fractals of one column lie behind each other: one burst brings `rows` of them.
    region = source.memory.region(start * area, (columns, rows * area), (pitch * area, 1))
    tiles.builder.copy(tiles.open_tiles[stage.name].memory.region(0, region.sizes), region)


def _load_l0(tiles: Tiles, stage: Stage, ranges: Sequence[boxes.Range]) -> None:
    """Write the copy L1 -> L0A or L0B: one load2d per row or column of fractals."""
    role = fractals.role_of(tiles.state, stage)
    matrix = fractals.matrix_of(fractals.product_of(tiles.state, stage), role)
    tile_in_l1 = tiles.open_tiles[stage.sources[0]]
    area = matrix.area
    start, pitch = _fractal(matrix, tile_in_l1, ranges)
    columns, rows = _sizes(matrix, ranges)
    load2d = tiles.builder.load2d
    unit = tiles.unit
    dst = tiles.open_tiles[stage.name].memory
    src = tile_in_l1.memory
    if role == "B":
        with unit.repeat(columns) as i:
            target = dst.region(i * (rows * area), (rows, area))
            load2d(target, src.region((start + i * pitch) * area, (rows, area)))
    # The shorter side is the loop: 4 x 16 fractals are 4 instructions of 16 fractals each.
    elif columns <= rows:
        with unit.repeat(columns) as i:
            target = dst.region(i * area, (rows, area), (columns * area, 1))
            load2d(target, src.region((start + i * pitch) * area, (rows, area)))
    else:
        # a row of the tile: one fractal from each column, `pitch` fractals apart
        with unit.repeat(rows) as i:
            target = dst.region(i * (columns * area), (columns, area))
            load2d(target, src.region((start + i) * area, (columns, area), (pitch * area, 1)))


def _multiply(tiles: Tiles, stage: Stage, box: boxes.Box, folds: list[isa.Affine]) -> None:
    """Write one mmad; it adds to C except in the first step of all loops over k."""
    if stage.scope != "L0C" or not stage.tensorized:
        got = f"one in {stage.scope}"
        remedy = "cache_write it to L0C, cache_read its operands to L1, L0A and L0B, tensorize it"
        raise ScheduleError(f"{stage.name}: a sum of products in L0C, tensorized", got, remedy)
    for read, scope in zip(stage.reads, ("L0A", "L0B"), strict=True):
        if tiles.state.find(read.source).scope != scope:
            needed = f"{stage.name}: operand {read.source} in {scope}"
            got = tiles.state.find(read.source).scope
            raise ScheduleError(needed, got, f'cache_read it to "L1", then to "{scope}"')
    c0 = isa.c0_of(stage.reads[0].dtype)
    matrix = fractals.matrix_of(stage, "C")
    sums_tile = tiles.open_tiles[stage.name]
    ranges = [box[a.name] for a in stage.axes]
    start, pitch = _fractal(matrix, sums_tile, ranges)
    n, m = _sizes(matrix, ranges)
    k = box["k"].count // c0
    a, b = (tiles.open_tiles[r.source].memory for r in stage.reads)
    # C lies in L0C as columns of fractals: n outermost, then m, then 16 x 16 numbers.
    steps = (pitch * AREA_C, AREA_C, isa.FRACTAL, 1)
    tiles.builder.mmad(
        sums_tile.memory.region(start * AREA_C, (n, m, isa.FRACTAL, isa.FRACTAL), steps),
        a.region(0, (m, k, isa.FRACTAL, c0)),
        b.region(0, (k, n, isa.FRACTAL, c0)),
        # The sum of the loop indices is 0 only in the first step of all of them.
        accumulate=sum(folds, isa.Affine()),
    )


def _drain(tiles: Tiles, stage: Stage, ranges: Sequence[boxes.Range]) -> None:
    """Write the copy L0C -> UB, L0C -> GM (by the fix pipe) or UB -> GM, by columns of fractals."""
    read = fractals.plain_read(stage.expr)
    assert read is not None
    matrix = fractals.matrix_of(fractals.product_of(tiles.state, stage), "C")
    source_tile = tiles.open_tiles[read.source]
    columns, rows = _sizes(matrix, ranges)
    sizes = (columns, rows * AREA_C)
    start, pitch = _fractal(matrix, source_tile, ranges)
    source = source_tile.memory.region(start * AREA_C, sizes, (pitch * AREA_C, 1))
    if stage.scope == "UB":
        target = tiles.open_tiles[stage.name].memory.region(0, sizes)
        tiles.builder.copy(target, source, relu=fractals.has_relu(stage.expr))
        return
    tensor = tiles.tile_of(stage.name)
    start_in_gm, pitch_in_gm = _fractal(matrix, tensor, ranges)
    target = tensor.memory.region(start_in_gm * AREA_C, sizes, (pitch_in_gm * AREA_C, 1))
    # Chips with a fix pipe write sums from L0C to GM themselves; others go through UB.
    if tiles.state.find(read.source).scope == "L0C":
        tiles.builder.fixpipe(target, source, relu=fractals.has_relu(stage.expr))
    else:
        tiles.builder.copy(target, source)


# -- kernels written by hand -----------------------------------------------------------------------
Attrs = Mapping[str, Any]
NamedLaunches = list[tuple[isa.Launch, dict[str, str]]]
"""Launches, each with the names its tensors get in the program; y is the stage's own."""


def handwritten(state: State, stage: Fixed, chip: Chip) -> tuple[isa.Launch, ...]:
    """Return the launches of a stage that has a hand-written kernel."""
    maker = _MAKERS.get(stage.kind)
    if maker is None:
        kinds = ", ".join(_MAKERS)
        needed = f"a hand-written kernel for {stage.kind} ({kinds})"
        raise ScheduleError(needed, "none", "use ops.compile")
    launches = maker(state, stage, dict(stage.attrs), chip)
    return tuple(isa.renamed(launch, {"y": stage.name} | names) for launch, names in launches)


def _transpose(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    launch = transpose.transpose_launch(chip, stage.shapes[0], attrs["perm"], stage.dtype)
    return [(launch, {"x": stage.sources[0]})]


def _concat(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    launch = kernels.concat_launch(chip, stage.shapes, attrs["axis"], stage.dtype, name=stage.name)
    return [(launch, {f"x{n}": name for n, name in enumerate(stage.sources)})]


def _pad(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    shape = stage.shapes[0]
    value = attrs["value"]
    launch = kernels.pad_launch(chip, shape, attrs["widths"], stage.dtype, value=value)
    return [(replace(launch, name=stage.name), {"x": stage.sources[0]})]


def _gather(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    table, index = stage.sources
    table_shape, index_shape = stage.shapes
    if attrs["axis"] != 0:
        raise ScheduleError("gather along axis 0", str(attrs["axis"]), "transpose first")
    columns = math.prod(table_shape[1:])
    index_count = math.prod(index_shape)
    table_sizes = table_shape[0], columns, index_count, stage.dtype
    launch = kernels.gather_launch(chip, *table_sizes, from_end=attrs["from_end"])
    return [(launch, {"x": table, "index": index})]


def _scatter(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    start, index, updates = stage.sources
    rows = stage.shape[0]
    columns = math.prod(stage.shape[1:])
    index_count = math.prod(stage.shapes[1])
    mode = attrs["mode"]
    copy = layout.copy_launch(chip, stage.dtype, (rows * columns,), (1,), (1,), name="copy")
    table_sizes = rows, columns, index_count, stage.dtype
    launch = kernels.scatter_launch(chip, *table_sizes, mode=mode, method="auto")
    return [(copy, {"x": start}), (launch, {"u": updates, "index": index})]


def _convert(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    flat = layout.address_map("ND", stage.shape, stage.dtype)
    stored = fractals.matrix_map(stage.shape, attrs["matrix"], stage.dtype)
    maps = (flat, stored) if stage.kind == "to_fractal" else (stored, flat)
    return [(layout.maps_launch(*maps, chip, stage.name), {"x": stage.sources[0]})]


def _conv2d(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> NamedLaunches:
    """Convert image and weights to the cube's layouts, convolve, convert the result to NCHW."""
    if attrs["groups"] != 1:
        needed = "conv2d of one group"
        raise ScheduleError(needed, str(attrs["groups"]), 'use ops.compile("conv2d")')
    x, weight = (state.find(name) for name in stage.sources)
    (n, c, h, w), (k, _, r, s) = stage.shapes
    shape = ConvShape(
        n=n,
        c=c,
        h=h,
        w=w,
        k=k,
        r=r,
        s=s,
        stride=attrs["stride"],
        pad=attrs["pad"],
        dtype=x.dtype,
        out_dtype=stage.dtype,
        dilation=attrs["dilation"],
    )
    flat = layout.address_map("ND", (n, k, math.prod(shape.out_hw)), stage.dtype)
    columns = fractals.matrix_map(
        flat.shape, fractals.Matrix(1, 2, isa.FRACTAL, isa.FRACTAL, (0,)), stage.dtype
    )
    names = {"x": f"{stage.name}_x", "weight": f"{stage.name}_w", "y": f"{stage.name}_y"}
    into = layout.conversion_launch(stage.shapes[0], x.dtype, "NCHW", "NC1HWC0", chip)
    weights = layout.conversion_launch(stage.shapes[1], weight.dtype, "NCHW", "FRACTAL_Z", chip)
    return [
        (into, {"x": x.name, "y": names["x"]}),
        (weights, {"x": weight.name, "y": names["weight"]}),
        (conv.conv_launch(shape, chip), names),
        (layout.maps_launch(columns, flat, chip, stage.name), {"x": names["y"]}),
    ]


_MAKERS: Mapping[str, Callable[[State, Fixed, Attrs, Chip], NamedLaunches]] = {
    "transpose": _transpose,
    "concat": _concat,
    "pad": _pad,
    "gather": _gather,
    "scatter": _scatter,
    "conv2d": _conv2d,
    "to_fractal": _convert,
    "from_fractal": _convert,
}


def copied(state: State, stage: Stage, chip: Chip) -> isa.Launch:
    """Return the launch of a stage that only moves elements from one GM tensor to another."""
    read = copied_element(stage.expr)
    assert read is not None
    shape = read.view or state.find(read.source).shape
    pairs = list(zip(read.index, layout.row_major(shape), strict=True))
    strides = dict.fromkeys((a.name for a in stage.axes), 0)
    for name, step in ((n, factor * step) for index, step in pairs for n, factor in index.terms):
        strides[name] += step
    offset = sum(index.const * step for index, step in pairs)
    source = layout.View(read.source, tuple(strides.values()), offset)
    move = layout.Move(stage.shape, layout.View(stage.name, layout.row_major(stage.shape)), source)
    tensors = {stage.name: math.prod(stage.shape), read.source: math.prod(shape)}
    return layout.moves_launch(chip, stage.dtype, tensors, [move], name=stage.name)
