"""Operators that cut and join tensors: slice, pad, concat, split."""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Launch
from ascend_lab.kernels.rearrange import concat_launch, pad_launch, slice_launch, split_launch
from ascend_lab.limits import shown
from ascend_lab.ops.formats import NOT_NAN, Shape, TypeRule, axis_of, exact, is_whole, span
from ascend_lab.ops.gradients import Site, added
from ascend_lab.ops.moving import ANY
from ascend_lab.ops.operator import REQUIRED, Call, Example, Grads, Template, define
from ascend_lab.ops.slicing import (
    AxisRule,
    Range,
    Ranges,
    SliceRules,
    Source,
    Window,
    axis_rules,
    every_input,
)

_EXACT = exact()


# -- slice ----------------------------------------------------------------------------------------
def _steps(x: Shape, begin: Any, end: Any, step: Any) -> list[tuple[int, int, int]]:
    """Return (first, size, step) per axis; negative bounds count back, bounds beyond are cut."""
    steps = (1,) * len(x) if step is None else tuple(step)
    if not len(begin) == len(end) == len(steps) == len(x):
        needed = f"begin, end and step for each of the {len(x)} axes of {x}"
        got = f"{tuple(begin)}, {tuple(end)}, {steps}"
        raise ShapeError(needed, got, "give one number per axis")
    if not all(map(is_whole, steps)) or min(steps, default=1) < 1:
        raise ShapeError("whole steps of at least 1", shown(steps), "gather reverses an axis")
    out = []
    for size, b, e, s in zip(x, begin, end, steps, strict=True):
        low, high, _ = slice(b, e).indices(size)
        if low >= high:
            needed = f"begin before end within 0 .. {size}"
            raise ShapeError(needed, f"{b} .. {e}", "mend the bounds")
        out.append((low, -(-(high - low) // s), s))
    return out


def _taken(x: Shape, **attrs: Any) -> tuple[slice, ...]:
    return tuple(slice(b, b + (n - 1) * s + 1, s) for b, n, s in _steps(x, **attrs))


def _slice(x: te.Tensor, **attrs: Any) -> te.Tensor:
    parts = _taken(x.shape, **attrs)
    return te.slice(x, [p.start for p in parts], [p.stop for p in parts], [p.step for p in parts])


def _slice_kernel(call: Call, chip: Chip) -> Launch:
    parts = _taken(call.shapes[0], **call.attrs)
    begin, end, step = zip(*((p.start, p.stop, p.step) for p in parts), strict=True)
    return slice_launch(chip, call.shapes[0], begin, end, call.dtypes[0], step=step)


def _slice_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    parts = _taken(shapes[0], **attrs)
    axes = tuple(
        AxisRule(i, "halo", (Source(0, i, Window(-p.start, p.start, p.step)),), (i,))
        for i, p in enumerate(parts)
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        low, high = ranges[0][axis]
        begin = tuple(0 if i == axis else p.start for i, p in enumerate(parts))
        end = tuple(high - low if i == axis else p.stop for i, p in enumerate(parts))
        return {"begin": begin, "end": end}

    return SliceRules("SlidingWindow", axes, adjust=adjust)


def _slice_slope(s: Site) -> Grads:
    """Return the gradient with zeros around it; where the slice skips, added into zeros."""
    shape = s.shape()
    steps = s.attrs["step"] or (1,) * len(shape)
    ranges = zip(s.attrs["begin"], s.attrs["end"], shape, strict=True)
    bounds = [slice(b, e).indices(n)[:2] for b, e, n in ranges]
    grad = s.g
    for axis, step in enumerate(steps):
        if step > 1:
            places = np.arange(*bounds[axis], step, dtype=np.int32)
            grad = added(s, grad, s.net.constant(places, name="places"), axis, shape[axis])
            bounds[axis] = (0, shape[axis])
    pads = tuple((low, n - high) for (low, high), n in zip(bounds, shape, strict=True))
    return (s.net.pad(grad, pads=pads) if any(map(any, pads)) else grad,)


define(
    "slice", ("x",), lambda x, **attrs: x[_taken(x.shape, **attrs)], _slice,
    "x[begin:end:step] on every axis; negative bounds count from the end",
    attrs={"begin": REQUIRED, "end": REQUIRED, "step": None},
    shape_rule=lambda x, **attrs: tuple(n for _, n, _ in _steps(x, **attrs)), types=TypeRule(ANY),
    slicing=_slice_slices, backward=_slice_slope,
    template=Template(_slice_kernel), traits=("moves",), tolerances=_EXACT,
    examples=(
        Example(((1,),), {"begin": (0,), "end": (1,)}),
        Example(((33,),), {"begin": (1,), "end": (-1,)}),
        Example(((7, 32),), {"begin": (0, 16), "end": (7, 32)}),
        Example(((9, 31),), {"begin": (1, 2), "end": (9, 30), "step": (3, 2)}),
        Example(((3, 4, 17),), {"begin": (0, -3, 0), "end": (3, 99, 17)}),
    ),
)  # fmt: skip


# -- pad ------------------------------------------------------------------------------------------
def _padded(x: Shape, *, pads: Any, value: float) -> Shape:
    if len(pads) != len(x) or any(len(p) != 2 or min(p) < 0 for p in pads):
        needed = f"pads: (before, after) >= 0 for each of the {len(x)} axes of {x}"
        raise ShapeError(needed, str(tuple(pads)), "use slice to cut")
    return tuple(n + sum(p) for n, p in zip(x, pads, strict=True))


def _pad_slices(shapes: tuple[Shape, ...], *, pads: Any, value: float) -> SliceRules:
    x = shapes[0]
    axes = tuple(
        AxisRule(i, "halo" if sum(p) else "free", (Source(0, i, Window(p[0], -p[0])),), (i,))
        for i, p in enumerate(pads)
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        low, high = (n - pads[axis][0] for n in piece)
        own = max(0, -low), max(0, high - x[axis])
        return {"pads": tuple(own if i == axis else p for i, p in enumerate(pads))}

    return SliceRules("SlidingWindow", axes, adjust=adjust)


def _pad_slope(s: Site) -> Grads:
    begin = tuple(before for before, _ in s.attrs["pads"])
    end = tuple(b + n for b, n in zip(begin, s.shape(), strict=True))
    return (s.net.slice(s.g, begin=begin, end=end),)


define(
    "pad", ("x",), lambda x, *, pads, value: np.pad(x, pads, constant_values=value),
    lambda x, *, pads, value: te.pad(x, pads, value),
    "x with (before, after) elements of one value added along each axis",
    attrs={"pads": REQUIRED, "value": 0}, ranges={"value": NOT_NAN},
    shape_rule=_padded, types=TypeRule(ANY), slicing=_pad_slices, backward=_pad_slope,
    template=Template(
        lambda call, chip: pad_launch(
            chip, call.shapes[0], call.attrs["pads"], call.dtypes[0], value=call.attrs["value"]
        ),
    ),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"pads": ((0, 0),)}), Example(((17,),), {"pads": ((3, 12),), "value": 1}),
        Example(((3, 16),), {"pads": ((1, 0), (0, 16))}),
        Example(((2, 3, 5),), {"pads": ((0, 0), (1, 2), (3, 3)), "value": -1}),
    ),
)  # fmt: skip


# -- concat and split ------------------------------------------------------------------------------
def _concat_shape(*shapes: Shape, axis: int) -> Shape:
    first = shapes[0]
    at = axis_of("concat", axis, first)
    for other in shapes[1:]:
        if (other[:at], other[at + 1 :]) != (first[:at], first[at + 1 :]):
            needed = f"inputs equal but for axis {at}"
            raise ShapeError(needed, f"{first} and {other}", "reshape or pad one")
    return (*first[:at], sum(s[at] for s in shapes), *first[at + 1 :])


def _concat_slices(shapes: tuple[Shape, ...], *, axis: int) -> SliceRules:
    at, rank = axis_of("concat", axis, shapes[0]), len(shapes[0])
    why = "its pieces come from different inputs"
    sources = [why if i == at else every_input(i, len(shapes)) for i in range(rank)]
    return axis_rules("Segment", sources)


def _concat_slopes(s: Site) -> Grads:
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    sizes = tuple(s.shape(i)[axis] for i in range(len(s.inputs)))
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = (span(s.out_kind().shape, axis, *ends) for ends in bounds)
    return [s.net.slice(s.g, begin=begin, end=end) for begin, end in parts]


define(
    "concat", ("x",), lambda *x, axis: np.concatenate(x, axis),
    lambda *x, axis: te.concat(list(x), axis),
    "the inputs one behind the other along an axis",
    attrs={"axis": 0}, variadic=True,
    shape_rule=_concat_shape, types=TypeRule(ANY), slicing=_concat_slices, backward=_concat_slopes,
    template=Template(
        lambda call, chip: concat_launch(chip, call.shapes, call.attrs["axis"], call.dtypes[0]),
        reads=(),
    ),
    traits=("moves",), tolerances=_EXACT,
    examples=(
        Example(((1,),)), Example(((7,), (16,), (1,))), Example(((3, 17), (3, 16)), {"axis": 1}),
        Example(((2, 5, 4), (1, 5, 4)), {"axis": -3}), Example(((16, 32), (16, 32)), {"axis": 1}),
    ),
)  # fmt: skip


def _split_sizes(x: Shape, sizes: Any, axis: int) -> tuple[int, ...]:
    """Return the piece sizes: as given, or a number of equal pieces."""
    at = axis_of("split", axis, x)
    if is_whole(sizes):
        sizes = (x[at] // sizes,) * sizes if 0 < sizes <= x[at] else ()
    if min(sizes, default=0) < 1 or sum(sizes) != x[at]:
        needed = f"sizes >= 1 that add up to {x[at]}, axis {at} of {x}"
        raise ShapeError(needed, str(sizes), "give the sizes, or a number that divides the axis")
    return tuple(sizes)


def _split_shapes(x: Shape, *, sizes: Any, axis: int) -> tuple[Shape, ...]:
    at = axis_of("split", axis, x)
    return tuple((*x[:at], n, *x[at + 1 :]) for n in _split_sizes(x, sizes, axis))


def _split(x: te.Tensor, *, sizes: Any, axis: int) -> tuple[te.Tensor, ...]:
    at, given = axis_of("split", axis, x.shape), _split_sizes(x.shape, sizes, axis)
    bounds = pairwise(accumulate(given, initial=0))
    return tuple(te.slice(x, *span(x.shape, at, *ends)) for ends in bounds)


def _split_kernel(call: Call, chip: Chip) -> Launch:
    x, sizes = call.shapes[0], _split_sizes(call.shapes[0], **call.attrs)
    return split_launch(chip, x, sizes, call.attrs["axis"], call.dtypes[0])


def _split_slices(shapes: tuple[Shape, ...], *, sizes: Any, axis: int) -> SliceRules:
    x, why = shapes[0], "its pieces go to different outputs"
    at, count = axis_of("split", axis, x), len(_split_sizes(x, sizes, axis))
    sources = [why if i == at else every_input(i) for i in range(len(x))]
    return axis_rules("Segment", sources, outputs=count)


def _split_slope(s: Site) -> Grads:
    kinds = [s.out_kind(i) for i in range(len(s.grads))]
    parts = [
        s.net.number(0.0, kind.shape, kind.dtype) if grad is None else grad
        for grad, kind in zip(s.grads, kinds, strict=True)
    ]
    return (s.net.concat(*parts, axis=s.attrs["axis"]) if len(parts) > 1 else parts[0],)


define(
    "split", ("x",),
    lambda x, *, sizes, axis: tuple(
        np.split(x, list(accumulate(_split_sizes(x.shape, sizes, axis)))[:-1], axis)
    ),
    _split,
    "x cut along an axis into pieces of given sizes, or into a number of equal pieces",
    attrs={"sizes": REQUIRED, "axis": 0},
    shape_rule=_split_shapes, types=TypeRule(ANY), slicing=_split_slices, backward=_split_slope,
    template=Template(_split_kernel), traits=("moves",), tolerances=_EXACT,
    examples=(
        Example(((1,),), {"sizes": 1}), Example(((24,),), {"sizes": (7, 16, 1)}),
        Example(((3, 32),), {"sizes": 2, "axis": 1}),
        Example(((5, 3, 4),), {"sizes": (2, 3), "axis": -3}),
    ),
)  # fmt: skip
