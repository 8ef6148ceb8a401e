"""Slice rules: how an operator's output may be cut, and which input parts a piece needs.

The classes are those graph compilers tell apart (Elemwise, ElemwiseBroadcast, Broadcast,
SlidingWindow, SlidingWindowDeconv, CubeMatmul, Reduce, Transpose, Scatter, Segment). A rule is
data: `cut` turns it into the input ranges of one piece, whoever cuts - cores, L2, or devices.
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
"""For each input: the half-open range taken of each axis that is cut."""
Adjust = Callable[[int, Range, Ranges], Mapping[str, Any]]
"""(output axis, output range, input ranges) -> attributes that differ for the piece."""


@dataclass(frozen=True, slots=True)
class Window:
    """Output o reads inputs o*stride - before ... o*stride + after, every `dilation`-th.

    With `inverse` the roles turn (transposed convolution): input i feeds outputs
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
            first = min(-(-(low - self.after) // self.stride), starts)
            return first, (high - 1 + self.before) // self.stride + 1
        return low * self.stride - self.before, (high - 1) * self.stride + self.after + 1


@dataclass(frozen=True, slots=True)
class Source:
    """Axis `axis` of input `input` follows the output axis: `grain` entries per output grain."""

    input: int
    axis: int
    window: Window = Window()
    grain: int = 1


@dataclass(frozen=True, slots=True)
class AxisRule:
    """How one axis of output 0 may be split.

    `free`: any pieces. `halo`: pieces read overlapping inputs. `reduce`: each element depends on
    the whole axis, so a split needs a reduction across cores first. `indices`: run-time numbers
    decide what is touched. `whole`: pieces cannot simply be joined. Pieces hold whole `grain`s.
    `joins` is the axis of every output along which pieces are joined.
    """

    axis: int
    kind: Kind
    sources: tuple[Source, ...] = ()
    joins: tuple[int, ...] = (0,)
    grain: int = 1
    reason: str = ""

    @property
    def splits(self) -> bool:
        """Tell whether pieces computed alone can be joined."""
        return self.kind in ("free", "halo")


@dataclass(frozen=True, slots=True)
class Reduction:
    """Input axes that may be split together if the partial outputs are combined."""

    sources: tuple[tuple[int, int], ...]
    combine: Literal["sum", "max", "min", "prod"]


@dataclass(frozen=True, slots=True)
class SliceRules:
    """The slice class of an operator at given shapes, and one rule per axis of output 0."""

    pattern: Pattern
    axes: tuple[AxisRule, ...]
    reductions: tuple[Reduction, ...] = ()
    adjust: Adjust | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """One piece of the work: what to take of each input, and the attributes to run it with."""

    ranges: Ranges
    attrs: Mapping[str, Any]


def cut(
    rules: SliceRules, shapes: Shapes, attrs: Mapping[str, Any], axis: int, piece: Range
) -> Cut:
    """Return what outputs piece[0] .. piece[1]-1 of `axis` need.

    Raises `ShapeError` if the axis must not be split, the piece is no whole number of grains, or
    it reads padding only.
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
        scaled = low // rule.grain * source.grain, high // rule.grain * source.grain
        first, last = source.window.needs(*scaled)
        size = shapes[source.input][source.axis]
        if source.window.inverse:  # outputs no input reaches are zero: any neighbour will do
            first = min(first, size - 1)
            last = max(last, 1)
        if last <= 0 or first >= size:
            needed = f"a piece that reads some of the {size} entries of axis {source.axis}"
            got = f"{piece}, which reads {first} .. {last - 1}: only padding"
            raise ShapeError(needed, got, "use larger pieces")
        ranges[source.input][source.axis] = max(first, 0), min(last, size)
    changed = rules.adjust(axis, piece, ranges) if rules.adjust else {}
    return Cut(ranges, {**attrs, **changed})


def take(arrays: Sequence[np.ndarray], ranges: Ranges) -> list[np.ndarray]:
    """Return the part of each array that `ranges` asks for."""
    parts = []
    for array, wanted in zip(arrays, ranges, strict=True):
        index = [slice(*wanted[i]) if i in wanted else slice(None) for i in range(array.ndim)]
        parts.append(array[tuple(index)])
    return parts


def following(shapes: Shapes, out: Shape) -> list[tuple[Source, ...]]:
    """Return for each output axis the input axes that follow it under broadcasting."""
    leads = [len(out) - len(shape) for shape in shapes]
    return [
        tuple(
            Source(i, axis - lead)
            for i, (shape, lead) in enumerate(zip(shapes, leads, strict=True))
            if axis >= lead and shape[axis - lead] == out[axis]
        )
        for axis in range(len(out))
    ]


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
    """Return a rule per axis: free along its sources or, where a reason stands, of that kind."""
    axes = tuple(
        AxisRule(i, kind, joins=(i,) * outputs, reason=found)
        if isinstance(found, str)
        else AxisRule(i, "free", found, (i,) * outputs)
        for i, found in enumerate(sources)
    )
    return SliceRules(pattern, axes, adjust=adjust)


def elementwise_rules(
    shapes: Shapes, out: Shape, *, outputs: int = 1, whole: Mapping[int, str] | None = None
) -> SliceRules:
    """Every axis is free but those of `whole`, which need a reduction (axis -> reason)."""
    kept = whole or {}
    same = all(shape == out for shape in shapes)
    pattern: Pattern = "Reduce" if kept else "Elemwise" if same else "ElemwiseBroadcast"
    sources = [kept.get(i, found) for i, found in enumerate(following(shapes, out))]
    return axis_rules(pattern, sources, kind="reduce", outputs=outputs)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def combine(reduction: Reduction, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the whole output from the partial outputs of a split reduction axis."""
    result: np.ndarray = _COMBINE[reduction.combine].reduce(np.stack(parts), axis=0)
    return result
