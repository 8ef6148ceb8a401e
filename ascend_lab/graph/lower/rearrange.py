"""Chains of moves as one: conversions, reshapes and transposes are digits changing places.

An address is a sum of digits times strides. A layout gives every axis its digits, a reshape reads
all digits in a row and groups them anew, a transpose permutes axes. So a whole chain is one list of
(count, stride in the source, stride in the target), and one strided copy does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.dsl.handwritten import renamed
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import TensorType
from ascend_lab.graph.lower.piece import Lowered, Piece
from ascend_lab.isa import Kernel
from ascend_lab.layout import AddressMap
from ascend_lab.layout.launch import maps_launch
from ascend_lab.layout.maps import Piece as Digits

MOVES = ("trans_data", "reshape", "transpose")


@dataclass(frozen=True, slots=True)
class Digit:
    """`count` values of an index, `stride` elements apart in the source."""

    count: int
    stride: int


Axes = list[list[Digit]]


def lower_moves(piece: Piece, chip: Chip) -> Lowered:
    """Return the program of a chain of moves.

    Raises `UnsupportedError` where a layout pads, or a reshape cuts through a digit.
    """
    graph, (x,), (y,) = piece.graph, piece.graph.inputs, piece.graph.outputs
    axes = [[Digit(p.count, p.stride) for p in own] for own in _of_axes(piece.type(x))]
    for node in graph.nodes:
        shape = piece.type(node.output).shape
        if node.op == "transpose":
            perm = node.attr("perm") or tuple(reversed(range(len(axes))))
            axes = [axes[i] for i in perm]
        elif node.op == "reshape":
            axes = grouped([d for axis in axes for d in axis], shape)
    sources: list[Digit] = []
    targets: list[int] = []
    for axis, own in zip(axes, _of_axes(piece.type(y)), strict=True):
        counts = [p.count for p in own]
        for digits, target in zip(grouped(axis, counts), own, strict=True):
            sources += digits
            targets += _strides(digits, target.stride)
    maps = (
        _map([(d.count, d.stride) for d in sources], piece.type(x)),
        _map([(d.count, t) for d, t in zip(sources, targets, strict=True)], piece.type(y)),
    )
    launch = maps_launch(*maps, chip, "rearrange")
    return Lowered(Kernel("rearrange", (renamed(launch, {"x": x, "y": y}),)))


def _of_axes(kind: TensorType) -> list[tuple[Digits, ...]]:
    """Return the pieces of each axis, largest step first; refuse layouts that pad."""
    layout = kind.map
    if layout.padding_bytes:
        raise UnsupportedError("whole blocks", str(kind), "convert it on its own")
    return [layout.of_axis(i) for i in range(len(layout.shape))]


def grouped(digits: Sequence[Digit], sizes: Sequence[int]) -> Axes:
    """Return digits, in order, cut into groups of the given sizes.

    Raises `UnsupportedError` where a boundary falls inside a digit that it does not divide.
    """
    left = [d for d in digits if d.count > 1]
    axes: Axes = []
    for size in sizes:
        own: list[Digit] = []
        need = size
        while need > 1:
            digit = left.pop(0)
            take = math.gcd(need, digit.count)
            if take == 1 or (take < digit.count and take < need):
                raise UnsupportedError("digits that divide the axes", str(sizes), "move apart")
            if take < digit.count:
                left.insert(0, Digit(digit.count // take, digit.stride))
                digit = Digit(take, digit.stride * (digit.count // take))
            own.append(digit)
            need //= digit.count
        axes.append(own)
    return axes


def _strides(digits: Sequence[Digit], last: int) -> list[int]:
    """Return the target strides of digits that together count steps of `last`."""
    found: list[int] = []
    for digit in reversed(digits):
        found.append(last)
        last *= digit.count
    return found[::-1]


def _map(digits: Sequence[tuple[int, int]], kind: TensorType) -> AddressMap:
    """Return the map of an array whose axes are the digits."""
    order = sorted(range(len(digits)), key=lambda i: -digits[i][1])
    pieces = tuple(Digits(i, 1, *digits[i]) for i in order)
    shape = tuple(count for count, _ in digits)
    names = tuple(f"D{i}" for i in range(len(digits)))
    return AddressMap("ND", names, shape, kind.dtype, pieces, tuple(p.count for p in pieces))
