"""Phases with hand-written kernels: transpose, concat, pad, gather, scatter, layout conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.dsl.fractals import matrix_map
from ascend_lab.dsl.stages import Fixed, Stage, State, bare
from ascend_lab.dsl.tensor import Read
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

Maker = Callable[[State, Fixed, Chip], tuple[Launch, ...]]


def handwritten(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    """Return the launches of a stage that has a kernel of its own."""
    maker = _MAKERS.get(stage.kind)
    if maker is None:
        raise ScheduleError(
            f"a hand-written kernel for {stage.kind} ({', '.join(_MAKERS)})",
            "none",
            "use ops.compile",
        )
    return maker(state, stage, chip)


def _transpose(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    shape = stage.shapes[0]
    launch = transpose_launch(chip, shape, dict(stage.attrs)["perm"], stage.dtype)
    return (renamed(launch, {"x": stage.sources[0], "y": stage.name}),)


def _concat(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    axis = dict(stage.attrs)["axis"]
    launch = concat_launch(chip, stage.shapes, axis, stage.dtype, name=stage.name)
    sources = {f"x{n}": name for n, name in enumerate(stage.sources)}
    return (renamed(launch, {"y": stage.name, **sources}),)


def _pad(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    attrs, shape = dict(stage.attrs), stage.shapes[0]
    launch = pad_launch(chip, shape, attrs["widths"], stage.dtype, value=attrs["value"])
    launch = renamed(launch, {"x": stage.sources[0], "y": stage.name})
    return (replace(launch, name=stage.name),)


def _gather(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    (table, index), (whole, picked) = stage.sources, stage.shapes
    if dict(stage.attrs)["axis"] != 0:
        raise ScheduleError(
            "gather along axis 0", str(dict(stage.attrs)["axis"]), "transpose first"
        )
    columns, picks = math.prod(whole[1:]), math.prod(picked)
    launch = gather_launch(chip, whole[0], columns, picks, stage.dtype)
    return (renamed(launch, {"x": table, "index": index, "y": stage.name}),)


def _scatter(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    start, index, updates = stage.sources
    rows, columns = stage.shape[0], math.prod(stage.shape[1:])
    total = math.prod(stage.shape)
    copy = copy_launch(chip, stage.dtype, (total,), (1,), (1,), name="copy")
    picks = math.prod(stage.shapes[1])
    mode = dict(stage.attrs)["mode"]
    launch = scatter_launch(chip, rows, columns, picks, stage.dtype, mode=mode)
    return (
        renamed(copy, {"x": start, "y": stage.name}),
        renamed(launch, {"u": updates, "index": index, "y": stage.name}),
    )


def _convert(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    flat = address_map("ND", stage.shape, stage.dtype)
    stored = matrix_map(stage.shape, dict(stage.attrs)["matrix"], stage.dtype)
    maps = (flat, stored) if stage.kind == "to_fractal" else (stored, flat)
    launch = maps_launch(*maps, chip, stage.name)
    return (renamed(launch, {"x": stage.sources[0], "y": stage.name}),)


def _conv2d(state: State, stage: Fixed, chip: Chip) -> tuple[Launch, ...]:
    """Image and weights to the cube's layouts, the convolution, its result back to NCHW."""
    attrs = dict(stage.attrs)
    if attrs["groups"] != 1:
        raise ScheduleError(
            "conv2d of one group", str(attrs["groups"]), 'use ops.compile("conv2d")'
        )
    x, weight = (state.find(name) for name in stage.sources)
    (n, c, h, w), (k, _, r, s) = stage.shapes
    steps = (attrs["stride"], attrs["pad"])
    shape = ConvShape(n, c, h, w, k, r, s, *steps, x.dtype, stage.dtype, attrs["dilation"])
    names = {"x": f"{stage.name}_x", "weight": f"{stage.name}_w", "y": f"{stage.name}_y"}
    oh, ow = shape.out_hw
    rows = address_map("FRACTAL_NZ", (n, oh * ow, k), stage.dtype, c0=16)
    order = (0, 2, 1)
    pieces = tuple(replace(p, axis=order[p.axis]) for p in rows.pieces)
    columns = replace(rows, shape=(n, k, oh * ow), pieces=pieces)
    flat = address_map("ND", (n, k, oh * ow), stage.dtype)
    into = conversion_launch(stage.shapes[0], x.dtype, "NCHW", "NC1HWC0", chip)
    weights = conversion_launch(stage.shapes[1], weight.dtype, "NCHW", "FRACTAL_Z", chip)
    out = maps_launch(columns, flat, chip, stage.name)
    return (
        renamed(into, {"x": x.name, "y": names["x"]}),
        renamed(weights, {"x": weight.name, "y": names["weight"]}),
        renamed(conv_launch(shape, chip), names),
        renamed(out, {"x": names["y"], "y": stage.name}),
    )


_MAKERS: Mapping[str, Maker] = {
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
    read = bare(stage.expr) or stage.expr
    assert isinstance(read, Read)
    shape = read.view or state.find(read.source).shape
    strides, offset = dict.fromkeys((a.name for a in stage.axes), 0), 0
    for index, step in zip(read.index, row_major(shape), strict=True):
        offset += index.const * step
        for name, coefficient in index.terms:
            strides[name] += coefficient * step
    source = KernelView(read.source, tuple(strides.values()), offset)
    move = Move(stage.shape, KernelView(stage.name, row_major(stage.shape)), source)
    tensors = {stage.name: math.prod(stage.shape), read.source: math.prod(shape)}
    return moves_launch(chip, stage.dtype, tensors, [move], name=stage.name)
