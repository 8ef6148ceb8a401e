"""Slice rules: which axes of an operator's output may be split, and which inputs a piece needs.

For example, rows 4 .. 7 of a 3 x 3 convolution with pad 1 need rows 3 .. 8 of the image. The
patterns and their names are those of CANN's graph compiler (Elemwise, ElemwiseBroadcast, Broadcast,
SlidingWindow, SlidingWindowDeconv, CubeMatmul, Reduce, Scatter, Segment); Transpose is added
here. A rule is data, and `cut` turns it into the input ranges of one piece. The same rules are
used for splitting over cores, over blocks that fit into L2, and over devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ascend_lab.errors import ShapeError
from ascend_lab.operators.ops.formats import Shape, Shapes

Kind = Literal["free", "halo", "reduce", "indices", "whole"]
Pattern = Literal[
    "Elemwise",
    "ElemwiseBroadcast",
    "Broadcast",
    "SlidingWindow",
    "SlidingWindowDeconv",
    "CubeMatmul",
    "Reduce",
    "Transpose",
    "Scatter",
    "Segment",
]
Range = tuple[int, int]
Ranges = tuple[dict[int, Range], ...]
"""For each input: axis -> half-open range, for the axes that are cut."""
Adjust = Callable[[int, Range, Ranges], Mapping[str, Any]]
"""(output axis, output range, input ranges) -> the attributes that change for the piece."""


@dataclass(frozen=True, slots=True)
class Window:
    """Output o reads inputs o*stride - before ... o*stride + after, every `dilation`-th.

    With `inverse` (transposed convolution) the roles are exchanged: input i contributes to outputs
    i*stride - before ... i*stride + after.
    """

    before: int = 0
    after: int = 0
    stride: int = 1
    dilation: int = 1
    inverse: bool = False

    def needs(self, low: int, high: int) -> Range:
        """Return the inputs that outputs low .. high-1 need; may reach outside the tensor."""
        if self.inverse:
            # the first piece must start at or before `low`, even if nothing reaches `low` itself
            starts = (low + self.before) // self.stride
            first_input = min(-(-(low - self.after) // self.stride), starts)
            return first_input, (high - 1 + self.before) // self.stride + 1
        # a 3-wide window with pad 1 and stride 2: outputs 4..7 need inputs 7..15, so (7, 16)
        return low * self.stride - self.before, (high - 1) * self.stride + self.after + 1


@dataclass(frozen=True, slots=True)
class Source:
    """Axis `axis` of input `input` is cut together with the output axis.

    `grain` of its entries belong to one grain of the output.
    """

    input: int
    axis: int
    window: Window = Window()
    grain: int = 1


@dataclass(frozen=True, slots=True)
class AxisRule:
    """The rule for splitting one axis of output 0.

    A rule is `free`: any pieces; `halo`: pieces read overlapping inputs; `reduce`: each element
    depends on the whole axis, so a split needs a reduction across cores first; `indices`: values
    known only at run time determine the accesses; `whole`: pieces cannot simply be joined. Pieces
    are multiples of `grain`. `joins` is, for every output, the axis along which pieces are joined.
    """

    axis: int
    kind: Kind
    sources: tuple[Source, ...] = ()
    joins: tuple[int, ...] = (0,)
    grain: int = 1
    reason: str = ""

    @property
    def splits(self) -> bool:
        """Whether pieces that are computed separately can be joined."""
        return self.kind in ("free", "halo")


@dataclass(frozen=True, slots=True)
class Reduction:
    """Input axes that can be split together if the partial outputs are combined."""

    sources: tuple[tuple[int, int], ...]
    combine: Literal["sum", "max", "min", "prod"]


@dataclass(frozen=True, slots=True)
class SliceRules:
    """The pattern of an operator at given shapes, with one rule for each axis of output 0."""

    pattern: Pattern
    axes: tuple[AxisRule, ...]
    reductions: tuple[Reduction, ...] = ()
    adjust: Adjust | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """One piece of the work: the range of each input, and the attributes to run it with."""

    ranges: Ranges
    attrs: Mapping[str, Any]


def cut(
    rules: SliceRules, shapes: Shapes, attrs: Mapping[str, Any], axis: int, piece: Range
) -> Cut:
    """Return the inputs that outputs piece[0] .. piece[1]-1 of `axis` need.

    Raises `ShapeError` if the axis must not be split, if the piece is not a whole number of grains,
    or if it reads nothing but padding.
    """
    rule = rules.axes[axis]
    if not rule.splits:
        needed = f"an output axis of a {rules.pattern} operator that may be split"
        got = f"axis {axis}: {rule.kind} ({rule.reason})"
        raise ShapeError(needed, got, "split another axis, or combine partial results")
    low, high = piece
    if low % rule.grain or high % rule.grain or low >= high:
        needed = f"a piece of axis {axis} in whole grains of {rule.grain}"
        raise ShapeError(needed, str(piece), "round it")
    ranges: Ranges = tuple({} for _ in shapes)
    for source in rule.sources:
        # grouped convolution with 8 output and 4 input channels a group: outputs 8..16 read 4..8
        source_range = low // rule.grain * source.grain, high // rule.grain * source.grain
        first_input, end_input = source.window.needs(*source_range)
        size = shapes[source.input][source.axis]
        # an inverse window may leave outputs that no input reaches; they are zero, and the piece
        # takes the nearest input only so that its range is not empty
        if source.window.inverse:
            first_input = min(first_input, size - 1)
            end_input = max(end_input, 1)
        if end_input <= 0 or first_input >= size:
            needed = f"a piece that reads some of the {size} entries of axis {source.axis}"
            got = f"{piece}, which reads {first_input} .. {end_input - 1}: only padding"
            raise ShapeError(needed, got, "use larger pieces")
        # inputs -1 .. 7 of 6: entry -1 and those from 6 on are padding, and 0 .. 5 are taken
        ranges[source.input][source.axis] = max(first_input, 0), min(end_input, size)
    changed_attrs = rules.adjust(axis, piece, ranges) if rules.adjust else {}
    return Cut(ranges, {**attrs, **changed_attrs})


def take(arrays: Sequence[np.ndarray], ranges: Ranges) -> list[np.ndarray]:
    """Return the ranges of arrays, each cut along the axes in `ranges`."""
    parts = []
    for array, axis_ranges in zip(arrays, ranges, strict=True):
        # Ranges {1: (2, 4)} of an array of 3 axes: [:, 2:4, :].
        index = [
            slice(*axis_ranges[i]) if i in axis_ranges else slice(None) for i in range(array.ndim)
        ]
        parts.append(array[tuple(index)])
    return parts


def following(shapes: Shapes, out: Shape) -> list[tuple[Source, ...]]:
    """Return for each output axis the input axes that are split with it under broadcasting.

    For shapes (4, 1) and (3, 4, 5), output axis 1 is followed by both inputs, axis 2 by the second.
    """
    # NumPy aligns shapes at the right: a shape of 2 axes begins at axis 1 of an output of 3
    leads = [len(out) - len(shape) for shape in shapes]
    sources_of_axes = []
    for axis, out_size in enumerate(out):
        sources = []
        for i, (shape, lead) in enumerate(zip(shapes, leads, strict=True)):
            if axis >= lead and shape[axis - lead] == out_size:
                sources.append(Source(i, axis - lead))
        sources_of_axes.append(tuple(sources))
    return sources_of_axes


def every_input(axis: int, count: int = 1) -> tuple[Source, ...]:
    """Return the same axis of each of `count` inputs."""
    return tuple(Source(i, axis) for i in range(count))


def axis_rules(
    pattern: Pattern,
    sources: Sequence[tuple[Source, ...] | str],
    *,
    kind: Kind = "whole",
    outputs: int = 1,
    adjust: Adjust | None = None,
) -> SliceRules:
    """Return one rule per axis.

    An entry of `sources` that is a tuple makes the axis free; one that is a string makes it of
    `kind`, with the string as the reason.
    """
    axes = []
    for axis, source_or_reason in enumerate(sources):
        joins = (axis,) * outputs
        if isinstance(source_or_reason, str):
            axes.append(AxisRule(axis, kind, joins=joins, reason=source_or_reason))
        else:
            axes.append(AxisRule(axis, "free", source_or_reason, joins))
    return SliceRules(pattern, tuple(axes), adjust=adjust)


def elementwise_rules(
    shapes: Shapes, out: Shape, *, outputs: int = 1, reduced: Mapping[int, str] | None = None
) -> SliceRules:
    """Return rules in which all axes are free except those in `reduced` (axis -> reason)."""
    reduced_axes = reduced or {}
    pattern: Pattern
    if reduced_axes:
        pattern = "Reduce"
    elif all(shape == out for shape in shapes):
        pattern = "Elemwise"
    else:
        pattern = "ElemwiseBroadcast"
    sources = [
        reduced_axes.get(i, axis_sources) for i, axis_sources in enumerate(following(shapes, out))
    ]
    return axis_rules(pattern, sources, kind="reduce", outputs=outputs)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def combine(reduction: Reduction, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the whole output from the partial outputs of a split reduction axis."""
    # x (5, 33) summed over axis 1, cut at column 16: two outputs of 5 numbers, added.
    result: np.ndarray = _COMBINE[reduction.combine].reduce(np.stack(parts), axis=0)
    return result
