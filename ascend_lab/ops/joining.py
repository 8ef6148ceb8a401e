"""Operators that take tensors apart and put them together: concat and split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.errors import ShapeError
from ascend_lab.kernels.rearrange import concat_launch, split_launch
from ascend_lab.ops.attributes import is_whole
from ascend_lab.ops.formats import TypeRule, exact
from ascend_lab.ops.gradients import Site
from ascend_lab.ops.moving import ANY
from ascend_lab.ops.operator import REQUIRED, Example, Grads, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import Shape, axis_of
from ascend_lab.ops.slicing import AxisRule, SliceRules, Source
from ascend_lab.ops.template import plain

Values = NDArray[Any]
_EXACT = exact()


# -- concat and split -----------------------------------------------------------------------------
def _concat_shape(*shapes: Shape, axis: int) -> Shape:
    first = shapes[0]
    at = axis_of("concat", axis, first)
    for other in shapes[1:]:
        same = len(other) == len(first) and all(
            x == y for i, (x, y) in enumerate(zip(first, other, strict=True)) if i != at
        )
        if not same:
            raise ShapeError(
                f"inputs equal but for axis {at}", f"{first} and {other}", "reshape or pad one"
            )
    return (*first[:at], sum(s[at] for s in shapes), *first[at + 1 :])


def _bounds(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes))[:-1]


def _concat_slices(shapes: tuple[Shape, ...], *, axis: int) -> SliceRules:
    at = axis_of("concat", axis, shapes[0])
    why = "its pieces come from different inputs"
    return SliceRules(
        "Segment",
        tuple(
            AxisRule(i, "whole", reason=why, joins=(i,))
            if i == at
            else AxisRule(i, "free", tuple(Source(n, i) for n in range(len(shapes))), (i,))
            for i in range(len(shapes[0]))
        ),
    )


def _concat_slopes(s: Site) -> Grads:
    axis = axis_of("axis", s.attrs["axis"], s.shape())
    sizes = tuple(s.shape(i)[axis] for i in range(len(s.inputs)))
    found: list[Any | None] = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        shape = s.out_kind().shape
        begin = tuple(end - size if i == axis else 0 for i in range(len(shape)))
        stop = tuple(end if i == axis else n for i, n in enumerate(shape))
        found.append(s.net.slice(s.g, begin=begin, end=stop))
    return found


register(
    Operator(
        "concat",
        ("x",),
        lambda *x, axis: np.concatenate(x, axis),
        lambda *x, axis: te.concat(list(x), axis),
        "the inputs one behind the other along an axis",
        attrs={"axis": 0},
        variadic=True,
        shape_rule=_concat_shape,
        types=TypeRule(ANY),
        slicing=_concat_slices,
        backward=_concat_slopes,
        template=plain(
            lambda call, chip: concat_launch(chip, call.shapes, call.attrs["axis"], call.dtypes[0]),
            feed=(),
        ),
        examples=(
            Example(((1,),)),
            Example(((7,), (16,), (1,))),
            Example(((3, 17), (3, 16)), {"axis": 1}),
            Example(((2, 5, 4), (1, 5, 4)), {"axis": -3}),
            Example(((16, 32), (16, 32)), {"axis": 1}),
        ),
        tolerances=_EXACT,
    )
)


def _split_sizes(x: Shape, sizes: Any, axis: int) -> tuple[int, ...]:
    """Return the piece sizes: as given, or a number of equal pieces."""
    at = axis_of("split", axis, x)
    if is_whole(sizes):
        sizes = (x[at] // sizes,) * sizes if 0 < sizes <= x[at] else ()
    if min(sizes, default=0) < 1 or sum(sizes) != x[at]:
        raise ShapeError(
            f"sizes >= 1 that add up to {x[at]}, axis {at} of {x}",
            str(sizes),
            "give the sizes, or a number that divides the axis",
        )
    return tuple(sizes)


def _split_shapes(x: Shape, *, sizes: Any, axis: int) -> tuple[Shape, ...]:
    at = axis_of("split", axis, x)
    return tuple((*x[:at], n, *x[at + 1 :]) for n in _split_sizes(x, sizes, axis))


def _split(x: te.Tensor, *, sizes: Any, axis: int) -> tuple[te.Tensor, ...]:
    at, start, out = axis_of("split", axis, x.shape), 0, []
    for size in _split_sizes(x.shape, sizes, axis):
        begin = tuple(start if i == at else 0 for i in range(len(x.shape)))
        end = tuple(start + size if i == at else n for i, n in enumerate(x.shape))
        out.append(te.slice(x, begin, end))
        start += size
    return tuple(out)


def _split_slices(shapes: tuple[Shape, ...], *, sizes: Any, axis: int) -> SliceRules:
    x = shapes[0]
    at, count = axis_of("split", axis, x), len(_split_sizes(x, sizes, axis))
    why = "its pieces go to different outputs"
    return SliceRules(
        "Segment",
        tuple(
            AxisRule(i, "whole", reason=why, joins=(i,) * count)
            if i == at
            else AxisRule(i, "free", (Source(0, i),), (i,) * count)
            for i in range(len(x))
        ),
    )


def _split_slope(s: Site) -> Grads:
    kinds = [s.out_kind(i) for i in range(len(s.grads))]
    parts = [
        s.net.number(0.0, kind.shape, kind.dtype) if grad is None else grad
        for grad, kind in zip(s.grads, kinds, strict=True)
    ]
    return (s.net.concat(*parts, axis=s.attrs["axis"]) if len(parts) > 1 else parts[0],)


register(
    Operator(
        "split",
        ("x",),
        lambda x, *, sizes, axis: tuple(
            np.split(x, _bounds(_split_sizes(x.shape, sizes, axis)), axis)
        ),
        _split,
        "x cut along an axis into pieces of given sizes, or into a number of equal pieces",
        attrs={"sizes": REQUIRED, "axis": 0},
        shape_rule=_split_shapes,
        types=TypeRule(ANY),
        slicing=_split_slices,
        backward=_split_slope,
        template=plain(
            lambda call, chip: split_launch(
                chip,
                call.shapes[0],
                _split_sizes(call.shapes[0], **call.attrs),
                call.attrs["axis"],
                call.dtypes[0],
            )
        ),
        examples=(
            Example(((1,),), {"sizes": 1}),
            Example(((24,),), {"sizes": (7, 16, 1)}),
            Example(((3, 32),), {"sizes": 2, "axis": 1}),
            Example(((5, 3, 4),), {"sizes": (2, 3), "axis": -3}),
        ),
        tolerances=_EXACT,
    )
)
