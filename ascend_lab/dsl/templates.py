"""Phases with hand-written kernels: transpose, concat, pad, gather, scatter, layout conversion."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ascend_lab.chip import Chip
from ascend_lab.dsl.fractals import Matrix, matrix_map
from ascend_lab.dsl.stages import FRACTAL, Fixed, Stage, State, bare
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Launch
from ascend_lab.isa.program import renamed
from ascend_lab.kernels.conv import conv_launch
from ascend_lab.kernels.conv_shape import ConvShape
from ascend_lab.kernels.gather_scatter import gather_launch, scatter_launch
from ascend_lab.kernels.rearrange import concat_launch, pad_launch
from ascend_lab.kernels.transpose import transpose_launch
from ascend_lab.layout import address_map, conversion_launch
from ascend_lab.layout.moves import Move, copy_launch, maps_launch, moves_launch, row_major
from ascend_lab.layout.moves import View as KernelView

Attrs = Mapping[str, Any]
Made = list[tuple[Launch, dict[str, str]]]
"""Launches, each with the names its tensors get in the program; y is the stage's own."""


def handwritten(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    """Return the launches of a stage that has a kernel of its own."""
    maker = _MAKERS.get(stage.kind)
    if maker is None:
        known = ", ".join(_MAKERS)
        raise ScheduleError(
            f"a hand-written kernel for {stage.kind} ({known})", "none", "use ops.compile"
        )
    made = maker(state, stage, dict(stage.attrs), chip)
    return tuple(renamed(launch, {"y": stage.name} | names) for launch, names in made)


def _transpose(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    launch = transpose_launch(chip, stage.shapes[0], attrs["perm"], stage.dtype)
    return [(launch, {"x": stage.sources[0]})]


def _concat(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    launch = concat_launch(chip, stage.shapes, attrs["axis"], stage.dtype, name=stage.name)
    return [(launch, {f"x{n}": name for n, name in enumerate(stage.sources)})]


def _pad(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    shape, value = stage.shapes[0], attrs["value"]
    launch = pad_launch(chip, shape, attrs["widths"], stage.dtype, value=value)
    return [(replace(launch, name=stage.name), {"x": stage.sources[0]})]


def _gather(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    (table, index), (whole, picked) = stage.sources, stage.shapes
    if attrs["axis"] != 0:
        raise ScheduleError("gather along axis 0", str(attrs["axis"]), "transpose first")
    columns, picks = math.prod(whole[1:]), math.prod(picked)
    launch = gather_launch(chip, whole[0], columns, picks, stage.dtype)
    return [(launch, {"x": table, "index": index})]


def _scatter(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    start, index, updates = stage.sources
    rows, columns = stage.shape[0], math.prod(stage.shape[1:])
    picks, mode = math.prod(stage.shapes[1]), attrs["mode"]
    copy = copy_launch(chip, stage.dtype, (rows * columns,), (1,), (1,), name="copy")
    launch = scatter_launch(chip, rows, columns, picks, stage.dtype, mode=mode)
    return [(copy, {"x": start}), (launch, {"u": updates, "index": index})]


def _convert(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    flat = address_map("ND", stage.shape, stage.dtype)
    stored = matrix_map(stage.shape, attrs["matrix"], stage.dtype)
    maps = (flat, stored) if stage.kind == "to_fractal" else (stored, flat)
    return [(maps_launch(*maps, chip, stage.name), {"x": stage.sources[0]})]


def _conv2d(state: State, stage: Fixed, attrs: Attrs, chip: Chip) -> Made:
    """Image and weights to the cube's layouts, the convolution, its result back to NCHW."""
    if attrs["groups"] != 1:
        raise ScheduleError(
            "conv2d of one group", str(attrs["groups"]), 'use ops.compile("conv2d")'
        )
    x, weight = (state.find(name) for name in stage.sources)
    (n, c, h, w), (k, _, r, s) = stage.shapes
    steps = (attrs["stride"], attrs["pad"])
    shape = ConvShape(n, c, h, w, k, r, s, *steps, x.dtype, stage.dtype, attrs["dilation"])
    flat = address_map("ND", (n, k, math.prod(shape.out_hw)), stage.dtype)
    columns = matrix_map(flat.shape, Matrix(1, 2, FRACTAL, FRACTAL, (0,)), stage.dtype)
    names = {"x": f"{stage.name}_x", "weight": f"{stage.name}_w", "y": f"{stage.name}_y"}
    into = conversion_launch(stage.shapes[0], x.dtype, "NCHW", "NC1HWC0", chip)
    weights = conversion_launch(stage.shapes[1], weight.dtype, "NCHW", "FRACTAL_Z", chip)
    return [
        (into, {"x": x.name, "y": names["x"]}),
        (weights, {"x": weight.name, "y": names["weight"]}),
        (conv_launch(shape, chip), names),
        (maps_launch(columns, flat, chip, stage.name), {"x": names["y"]}),
    ]


_MAKERS: Mapping[str, Callable[[State, Fixed, Attrs, Chip], Made]] = {
    "transpose": _transpose,
    "concat": _concat,
    "pad": _pad,
    "gather": _gather,
    "scatter": _scatter,
    "conv2d": _conv2d,
    "to_fractal": _convert,
    "from_fractal": _convert,
}


def copied(state: State, stage: Stage, chip: Chip) -> Launch:
    """Return the launch of a stage that only moves elements from one GM tensor to another."""
    read = bare(stage.expr)
    assert read is not None
    shape = read.view or state.find(read.source).shape
    pairs = list(zip(read.index, row_major(shape), strict=True))
    strides = dict.fromkeys((a.name for a in stage.axes), 0)
    for name, step in ((n, factor * step) for index, step in pairs for n, factor in index.terms):
        strides[name] += step
    offset = sum(index.const * step for index, step in pairs)
    source = KernelView(read.source, tuple(strides.values()), offset)
    move = Move(stage.shape, KernelView(stage.name, row_major(stage.shape)), source)
    tensors = {stage.name: math.prod(stage.shape), read.source: math.prod(shape)}
    return moves_launch(chip, stage.dtype, tensors, [move], name=stage.name)
