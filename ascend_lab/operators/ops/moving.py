"""Operators that move data without computing: transpose, reshape, expand, slice, pad, concat.

For example, `transpose` of a tensor (2, 3, 5) with perm (0, 2, 1) has the shape (2, 5, 3).
"""

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ascend_lab.errors import ShapeError
from ascend_lab.limits import shown
from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators import dsl as te
from ascend_lab.operators.kernels import rearrange, transpose
from ascend_lab.operators.ops import formats as forms, slicing
from ascend_lab.operators.ops.formats import (
    Shape,
    TypeRule,
    axis_of,
    elements,
    exact,
    is_whole,
    span,
)
from ascend_lab.operators.ops.gradients import Site, scatter_gradient
from ascend_lab.operators.ops.operator import REQUIRED, Call, Example, Grads, Template, define
from ascend_lab.operators.ops.slicing import (
    Adjust,
    AxisRule,
    Range,
    Ranges,
    SliceRules,
    Source,
    Window,
)

MOVABLE_FORMATS = tuple(d for d in DTYPE_BYTES if d != "uint8")
_EXACT = exact()


# -- transpose ------------------------------------------------------------------------------------
def _axis_order(perm: Any, shape: Shape) -> tuple[int, ...]:
    """Return the permutation counted from 0; None reverses the axes."""
    if perm is None:
        return tuple(range(len(shape)))[::-1]
    # perm (1, 2, 0) of shape (2, 3, 4) gives (3, 4, 2); the gradient goes back by argsort, (2, 0,
    # 1).
    order = tuple(axis_of("perm", p, shape) for p in perm)
    if sorted(order) != list(range(len(shape))):
        needed = f"perm: each of the {len(shape)} axes of {shape} once"
        raise ShapeError(needed, str(tuple(perm)), "correct perm")
    return order


define(
    "transpose",
    ("x",),
    lambda x, *, perm: x.transpose(_axis_order(perm, x.shape)),
    lambda x, *, perm: te.transpose(x, _axis_order(perm, x.shape)),
    "axis d of y is axis perm[d] of x (default: axes reversed)",
    attrs={"perm": None},
    shape_rule=lambda x, *, perm: tuple(x[p] for p in _axis_order(perm, x)),
    types=TypeRule(MOVABLE_FORMATS),
    slicing=lambda shapes, *, perm: slicing.axis_rules(
        "Transpose", [(Source(0, p),) for p in _axis_order(perm, shapes[0])]
    ),
    backward=lambda s: (
        s.net.transpose(
            s.g, perm=tuple(np.argsort(_axis_order(s.attrs["perm"], s.shape())).tolist())
        ),
    ),
    template=Template(
        lambda call, chip: transpose.transpose_launch(
            chip, call.shapes[0], _axis_order(call.attrs["perm"], call.shapes[0]), call.dtypes[0]
        ),
    ),
    traits=("moves",),
    tolerances=_EXACT,
    examples=(
        Example(((1,),)),
        Example(((16, 16),)),
        Example(((17, 33),), {"perm": (1, 0)}),
        Example(((2, 3, 5),), {"perm": (0, 2, 1)}),
        Example(((2, 3, 16),), {"perm": (1, 0, 2)}),
        Example(((2, 3, 4, 5),), {"perm": (-1, 0, 2, 1)}),
        Example(((31, 129),)),
    ),
)


# -- reshape --------------------------------------------------------------------------------------
def _target_shape(x: Shape, *, shape: Any) -> Shape:
    """Return the new shape, in which 0 keeps a size and -1 stands for the rest (ONNX Reshape)."""
    # x (2, 3, 17) to (0, -1): 0 keeps the 2, -1 takes 3 * 17 = 51.
    sizes = [x[i] if n == 0 and i < len(x) else int(n) for i, n in enumerate(shape)]
    if sizes.count(-1) > 1 or any(n < -1 for n in sizes):
        needed = "shape: sizes, 0 to keep one, at most one -1"
        raise ShapeError(needed, str(tuple(shape)), "correct it")
    if -1 in sizes:
        known_elements = -elements(tuple(sizes))  # the product has the factor -1
        if known_elements == 0 or elements(x) % known_elements:
            needed = f"shape: sizes that divide the {elements(x)} elements of {x}"
            raise ShapeError(needed, str(tuple(shape)), "choose others")
        sizes[sizes.index(-1)] = elements(x) // known_elements
    if elements(tuple(sizes)) != elements(x):
        needed = f"shape: {elements(x)} elements, as in {x}"
        got = f"{elements(tuple(sizes))} in {tuple(sizes)}"
        raise ShapeError(needed, got, "keep the number of elements")
    return tuple(sizes)


class _Group(NamedTuple):
    """Axes of x and of the output of a reshape that hold the same elements: (b, s) and (b s)."""

    x_axes: range
    out_axes: range


def _axis_groups(x: Shape, out_shape: Shape) -> list[_Group]:
    """Return the groups of axes with equal products into which a reshape splits.

    (b, s, k) -> (b s, k) has the groups (b, s) -> (b s) and (k) -> (k). (6, 35) -> (7, 30) is one
    group.
    """
    groups: list[_Group] = []
    x_start = out_start = 0
    while x_start < len(x) and out_start < len(out_shape):
        x_end = x_start + 1
        out_end = out_start + 1
        # extend the side with the smaller product until both products are equal
        while True:
            x_elements = math.prod(x[x_start:x_end])
            out_elements = math.prod(out_shape[out_start:out_end])
            if x_elements == out_elements:
                break
            if x_elements > out_elements:
                out_end += 1
            else:
                x_end += 1
            if x_end > len(x) or out_end > len(out_shape):
                return groups
        groups.append(_Group(range(x_start, x_end), range(out_start, out_end)))
        x_start = x_end
        out_start = out_end
    return groups


class _ReshapeCut(NamedTuple):
    """How one axis of the output is cut: together with an axis of x, in whole grains of both."""

    x_axis: int
    x_grain: int
    out_grain: int


def _reshape_cuts(x: Shape, out_shape: Shape) -> dict[int, _ReshapeCut]:
    """Return, by axis of the output, how a reshape can be cut.

    The outermost axis of a group can be cut. (2, 3, 17) -> (6, 17): axis 0 of the output in grains
    of 3, each of which is one entry of axis 0 of x.
    """
    cuts: dict[int, _ReshapeCut] = {}
    for group in _axis_groups(x, out_shape):
        x_axis = _outermost(x, group.x_axes)
        out_axis = _outermost(out_shape, group.out_axes)
        x_inner = math.prod(x[x_axis + 1 : group.x_axes.stop])
        out_inner = math.prod(out_shape[out_axis + 1 : group.out_axes.stop])
        common = math.lcm(x_inner, out_inner)
        x_grain = common // x_inner if common else 1
        out_grain = common // out_inner if common else 1
        cuts[out_axis] = _ReshapeCut(x_axis, x_grain, out_grain)
    return cuts


def _outermost(shape: Shape, axes: range) -> int:
    """Return the first of some axes with more than one entry; the last one if there is none."""
    # leading axes of size 1 cannot be cut
    return next((axis for axis in axes if shape[axis] != 1), axes[-1])


def _adjust_shape(out_shape: Shape) -> Adjust:
    """Return the function that adapts the attribute `shape` to a piece."""

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        return {
            "shape": tuple(piece[1] - piece[0] if i == axis else n for i, n in enumerate(out_shape))
        }

    return adjust


def _reshape_slices(shapes: tuple[Shape, ...], *, shape: Any) -> SliceRules:
    x = shapes[0]
    out_shape = _target_shape(shapes[0], shape=shape)
    cuts = _reshape_cuts(x, out_shape) if elements(x) else {}
    axes = []
    for axis, size in enumerate(out_shape):
        # A grain beyond the size cannot be cut: the axis is whole.
        cut = cuts.get(axis, _ReshapeCut(0, 1, size + 1))
        grain = cut.out_grain
        if grain < size or grain == size == 1:
            source = Source(0, cut.x_axis, grain=cut.x_grain)
            rule = AxisRule(axis, "free", (source,), (axis,), grain)
        else:
            reason = "its elements lie in several input axes"
            rule = AxisRule(axis, "whole", reason=reason, joins=(axis,))
        axes.append(rule)
    return SliceRules("Transpose", tuple(axes), adjust=_adjust_shape(out_shape))


define(
    "reshape",
    ("x",),
    lambda x, *, shape: x.reshape(_target_shape(x.shape, shape=shape)),
    lambda x, *, shape: te.reshape(x, _target_shape(x.shape, shape=shape)),
    "the same elements in row-major order; 0 keeps a size, one size may be -1",
    attrs={"shape": REQUIRED},
    shape_rule=_target_shape,
    types=TypeRule(MOVABLE_FORMATS),
    slicing=_reshape_slices,
    backward=lambda s: (s.net.shaped(s.g, s.shape()),),
    template=Template(
        lambda call, chip: rearrange.reshape_launch(
            chip, call.shapes[0], call.outputs[0], call.dtypes[0]
        ),
    ),
    traits=("moves", "renames"),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"shape": (1, 1)}),
        Example(((6, 35),), {"shape": (7, 30)}),
        Example(((2, 3, 17),), {"shape": (0, -1)}),
        Example(((129,),), {"shape": (3, 43)}),
    ),
)


# -- expand ---------------------------------------------------------------------------------------
def _expand_slices(shapes: tuple[Shape, ...], *, shape: Any) -> SliceRules:
    out_shape = forms.broadcast_shape("expand", shapes[0], tuple(shape))
    return slicing.axis_rules(
        "Broadcast", slicing.following(shapes, out_shape), adjust=_adjust_shape(out_shape)
    )


def _expand_kernel(call: Call, chip: Chip) -> isa.Launch:
    """Return a copy kernel; the source has step 0 along repeated axes, so it is read again."""
    x = call.shapes[0]
    out_shape = call.outputs[0]
    # (3, 1) to (3, 33): steps (1, 0), so each element is read 33 times.
    aligned = (1,) * (len(out_shape) - len(x)) + x
    dtype = call.dtypes[0]
    steps = [
        0 if n == 1 else step for n, step in zip(aligned, layout.row_major(aligned), strict=True)
    ]
    views = out_shape, steps, layout.row_major(out_shape)
    return layout.copy_launch(chip, dtype, *views, source_elements=elements(x), name="expand")


define(
    "expand",
    ("x",),
    lambda x, *, shape: np.broadcast_to(x, forms.broadcast_shape("", x.shape, tuple(shape))),
    lambda x, *, shape: te.broadcast(x, forms.broadcast_shape("", x.shape, tuple(shape))),
    "x repeated to a shape by the broadcasting rule",
    attrs={"shape": REQUIRED},
    shape_rule=lambda x, *, shape: forms.broadcast_shape("x and shape", x, tuple(shape)),
    types=TypeRule(("fp16", "fp32", "bf16", "int32")),
    slicing=_expand_slices,
    backward=lambda s: (s.net.summed_to(s.g, s.shape()),),
    template=Template(_expand_kernel),
    traits=("moves",),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"shape": (17,)}),
        Example(((3, 1),), {"shape": (3, 33)}),
        Example(((5,),), {"shape": (4, 5)}),
        Example(((2, 1, 16),), {"shape": (2, 7, 16)}),
    ),
)


# -- slice ----------------------------------------------------------------------------------------
def _axis_slices(x: Shape, begin: Any, end: Any, step: Any) -> tuple[slice, ...]:
    """Return the slice of each axis: negative bounds count from the end, others are clipped.

    The end is moved to directly after the last taken element: 0:10:4 becomes 0:9:4.
    """
    steps = (1,) * len(x) if step is None else tuple(step)
    if not len(begin) == len(end) == len(steps) == len(x):
        needed = f"begin, end and step for each of the {len(x)} axes of {x}"
        got = f"{tuple(begin)}, {tuple(end)}, {steps}"
        raise ShapeError(needed, got, "give one number per axis")
    if not all(map(is_whole, steps)) or min(steps, default=1) < 1:
        raise ShapeError("whole steps of at least 1", shown(steps), "gather reverses an axis")
    slices = []
    for size, b, e, s in zip(x, begin, end, steps, strict=True):
        low, high, _ = slice(b, e).indices(size)
        if low >= high:
            needed = f"begin before end within 0 .. {size}"
            raise ShapeError(needed, f"{b} .. {e}", "correct the bounds")
        slices.append(slice(low, high - (high - low - 1) % s, s))
    return tuple(slices)


def _slice(x: te.Tensor, **attrs: Any) -> te.Tensor:
    parts = _axis_slices(x.shape, **attrs)
    return te.slice(x, [p.start for p in parts], [p.stop for p in parts], [p.step for p in parts])


def _slice_kernel(call: Call, chip: Chip) -> isa.Launch:
    parts = _axis_slices(call.shapes[0], **call.attrs)
    begin, end, step = zip(*((p.start, p.stop, p.step) for p in parts), strict=True)
    return rearrange.slice_launch(chip, call.shapes[0], begin, end, call.dtypes[0], step=step)


def _slice_slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    parts = _axis_slices(shapes[0], **attrs)
    axes = tuple(
        # output o reads the one input o * step + start: a window of one element, shifted
        AxisRule(i, "halo", (Source(0, i, Window(-p.start, p.start, p.step)),), (i,))
        for i, p in enumerate(parts)
    )

    def adjust(axis: int, piece: Range, ranges: Ranges) -> dict[str, Any]:
        low, high = ranges[0][axis]
        # The piece's input begins with the first element that is taken: on the cut axis it is 0.
        begin = tuple(0 if i == axis else p.start for i, p in enumerate(parts))
        end = tuple(high - low if i == axis else p.stop for i, p in enumerate(parts))
        return {"begin": begin, "end": end}

    return SliceRules("SlidingWindow", axes, adjust=adjust)


def _slice_slope(s: Site) -> Grads:
    """Return the gradient padded with zeros to the input's shape; axes with a step are scattered.

    A slice 0:9:4 takes elements 0, 4 and 8: their gradients are added to zeros at these positions.
    """
    shape = s.shape()
    grad = s.g
    steps = s.attrs["step"] or (1,) * len(shape)
    ranges = zip(s.attrs["begin"], s.attrs["end"], shape, strict=True)
    bounds = [slice(b, e).indices(n)[:2] for b, e, n in ranges]
    for axis, step in enumerate(steps):
        if step > 1:
            positions = np.arange(*bounds[axis], step, dtype=np.int32)
            grad = scatter_gradient(
                s, grad, s.net.constant(positions, name="places"), axis, shape[axis]
            )
            bounds[axis] = (0, shape[axis])
    pads = tuple((low, n - high) for (low, high), n in zip(bounds, shape, strict=True))
    return (s.net.pad(grad, pads=pads) if any(map(any, pads)) else grad,)


define(
    "slice",
    ("x",),
    lambda x, **attrs: x[_axis_slices(x.shape, **attrs)],
    _slice,
    "x[begin:end:step] on every axis; negative bounds count from the end",
    attrs={"begin": REQUIRED, "end": REQUIRED, "step": None},
    shape_rule=lambda x, **attrs: tuple(
        len(range(p.start, p.stop, p.step)) for p in _axis_slices(x, **attrs)
    ),
    types=TypeRule(MOVABLE_FORMATS),
    slicing=_slice_slices,
    backward=_slice_slope,
    template=Template(_slice_kernel),
    traits=("moves",),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"begin": (0,), "end": (1,)}),
        Example(((33,),), {"begin": (1,), "end": (-1,)}),
        Example(((7, 32),), {"begin": (0, 16), "end": (7, 32)}),
        Example(((9, 31),), {"begin": (1, 2), "end": (9, 30), "step": (3, 2)}),
        Example(((3, 4, 17),), {"begin": (0, -3, 0), "end": (3, 99, 17)}),
    ),
)


# -- pad ------------------------------------------------------------------------------------------
def _padded_shape(x: Shape, *, pads: Any, value: float) -> Shape:
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
        # the piece in coordinates of x: what lies below 0 or beyond the size is padding
        low, high = (n - pads[axis][0] for n in piece)
        # 17 entries padded (3, 12): outputs 0 .. 15 are entries -3 .. 12, so (3, 0) is padding.
        piece_pads = max(0, -low), max(0, high - x[axis])
        return {"pads": tuple(piece_pads if i == axis else p for i, p in enumerate(pads))}

    return SliceRules("SlidingWindow", axes, adjust=adjust)


def _pad_gradient(s: Site) -> Grads:
    begin = tuple(pad_before for pad_before, _ in s.attrs["pads"])
    end = tuple(b + n for b, n in zip(begin, s.shape(), strict=True))
    return (s.net.slice(s.g, begin=begin, end=end),)


define(
    "pad",
    ("x",),
    lambda x, *, pads, value: np.pad(x, pads, constant_values=value),
    lambda x, *, pads, value: te.pad(x, pads, value),
    "x with (before, after) elements of one value added along each axis",
    attrs={"pads": REQUIRED, "value": 0},
    ranges={"value": forms.NOT_NAN},
    shape_rule=_padded_shape,
    types=TypeRule(MOVABLE_FORMATS),
    slicing=_pad_slices,
    backward=_pad_gradient,
    template=Template(
        lambda call, chip: rearrange.pad_launch(
            chip, call.shapes[0], call.attrs["pads"], call.dtypes[0], value=call.attrs["value"]
        ),
    ),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"pads": ((0, 0),)}),
        Example(((17,),), {"pads": ((3, 12),), "value": 1}),
        Example(((3, 16),), {"pads": ((1, 0), (0, 16))}),
        Example(((2, 3, 5),), {"pads": ((0, 0), (1, 2), (3, 3)), "value": -1}),
    ),
)


# -- concat and split ------------------------------------------------------------------------------
def _concat_shape(*shapes: Shape, axis: int) -> Shape:
    first_shape = shapes[0]
    # (3, 17) and (3, 16) on axis 1: (3, 33).
    joined_axis = axis_of("concat", axis, first_shape)
    for shape in shapes[1:]:
        if (shape[:joined_axis], shape[joined_axis + 1 :]) != (
            first_shape[:joined_axis],
            first_shape[joined_axis + 1 :],
        ):
            needed = f"inputs equal but for axis {joined_axis}"
            raise ShapeError(needed, f"{first_shape} and {shape}", "reshape or pad one")
    return (
        *first_shape[:joined_axis],
        sum(s[joined_axis] for s in shapes),
        *first_shape[joined_axis + 1 :],
    )


def _segment_rules(
    x: Shape, axis: int, reason: str, inputs: int = 1, outputs: int = 1
) -> SliceRules:
    """Return rules in which all axes are free except the one of a concat or split."""
    cut_axis = axis_of("axis", axis, x)
    sources = [reason if i == cut_axis else slicing.every_input(i, inputs) for i in range(len(x))]
    return slicing.axis_rules("Segment", sources, outputs=outputs)


def _concat_slopes(s: Site) -> Grads:
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    sizes = (s.shape(i)[axis] for i in range(len(s.inputs)))
    # Sizes 3 and 5: (0, 3) and (3, 8).
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = (span(s.out_kind().shape, axis, *ends) for ends in bounds)
    return [s.net.slice(s.g, begin=begin, end=end) for begin, end in parts]


define(
    "concat",
    ("x",),
    lambda *x, axis: np.concatenate(x, axis),
    lambda *x, axis: te.concat(list(x), axis),
    "the inputs one behind the other along an axis",
    attrs={"axis": 0},
    variadic=True,
    shape_rule=_concat_shape,
    types=TypeRule(MOVABLE_FORMATS),
    backward=_concat_slopes,
    slicing=lambda shapes, *, axis: _segment_rules(
        shapes[0], axis, "its pieces come from different inputs", len(shapes)
    ),
    template=Template(
        lambda call, chip: rearrange.concat_launch(
            chip, call.shapes, call.attrs["axis"], call.dtypes[0]
        ),
        reads=(),
    ),
    traits=("moves",),
    tolerances=_EXACT,
    examples=(
        Example(((1,),)),
        Example(((7,), (16,), (1,))),
        Example(((3, 17), (3, 16)), {"axis": 1}),
        Example(((2, 5, 4), (1, 5, 4)), {"axis": -3}),
        Example(((16, 32), (16, 32)), {"axis": 1}),
    ),
)


def _split_sizes(x: Shape, sizes: Any, axis: int) -> tuple[int, ...]:
    """Return the sizes of pieces, which are given, or follow from a number of equal pieces."""
    split_axis = axis_of("split", axis, x)
    if is_whole(sizes):
        # 32 columns in 2 pieces: (16, 16); 33 would not add up, and is refused below.
        sizes = (x[split_axis] // sizes,) * sizes if 0 < sizes <= x[split_axis] else ()
    if min(sizes, default=0) < 1 or sum(sizes) != x[split_axis]:
        needed = f"sizes >= 1 that add up to {x[split_axis]}, axis {split_axis} of {x}"
        raise ShapeError(needed, str(sizes), "give the sizes, or a number that divides the axis")
    return tuple(sizes)


def _split_shapes(x: Shape, *, sizes: Any, axis: int) -> tuple[Shape, ...]:
    split_axis = axis_of("split", axis, x)
    return tuple((*x[:split_axis], n, *x[split_axis + 1 :]) for n in _split_sizes(x, sizes, axis))


def _split(x: te.Tensor, *, sizes: Any, axis: int) -> tuple[te.Tensor, ...]:
    split_axis = axis_of("split", axis, x.shape)
    # Sizes 7, 16 and 1 end at 7, 23 and 24.
    bounds = accumulate(_split_sizes(x.shape, sizes, axis))
    return tuple(te.slice(x, *span(x.shape, split_axis, *ends)) for ends in pairwise((0, *bounds)))


def _split_slices(shapes: tuple[Shape, ...], *, sizes: Any, axis: int) -> SliceRules:
    count = len(_split_sizes(shapes[0], sizes, axis))
    return _segment_rules(shapes[0], axis, "its pieces go to different outputs", outputs=count)


def _split_slope(s: Site) -> Grads:
    parts = [
        # A piece that no loss reads has the gradient 0.
        s.net.number(0.0, s.out_kind(i).shape, s.out_kind(i).dtype) if grad is None else grad
        for i, grad in enumerate(s.grads)
    ]
    return (s.net.concat(*parts, axis=s.attrs["axis"]) if len(parts) > 1 else parts[0],)


define(
    "split",
    ("x",),
    lambda x, *, sizes, axis: tuple(
        np.split(x, list(accumulate(_split_sizes(x.shape, sizes, axis)))[:-1], axis)
    ),
    _split,
    "x cut along an axis into pieces of given sizes, or into a number of equal pieces",
    attrs={"sizes": REQUIRED, "axis": 0},
    shape_rule=_split_shapes,
    types=TypeRule(MOVABLE_FORMATS),
    slicing=_split_slices,
    backward=_split_slope,
    template=Template(
        lambda call, chip: rearrange.split_launch(
            chip,
            call.shapes[0],
            _split_sizes(call.shapes[0], **call.attrs),
            call.attrs["axis"],
            call.dtypes[0],
        ),
    ),
    traits=("moves",),
    tolerances=_EXACT,
    examples=(
        Example(((1,),), {"sizes": 1}),
        Example(((24,),), {"sizes": (7, 16, 1)}),
        Example(((3, 32),), {"sizes": 2, "axis": 1}),
        Example(((5, 3, 4),), {"sizes": (2, 3), "axis": -3}),
    ),
)
