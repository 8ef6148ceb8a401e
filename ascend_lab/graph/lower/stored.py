"""How operands lie in memory beside a tensor in some layout, and constants packed that way.

In a layout every logical axis is cut into pieces. An operand that broadcasts along an axis has one
element there, so all its pieces of that axis have length 1: NumPy's rule holds for the stored
shapes as it does for the logical ones, and elementwise work needs no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ascend_lab.graph.ir import TensorType, Values
from ascend_lab.layout import AddressMap, pack


def maps_between(one: TensorType, two: TensorType) -> tuple[AddressMap, AddressMap]:
    """Return the maps of two layouts of one tensor, as of plain arrays.

    Here an axis is known by its place: channels of an image may be a batch of matrices.
    """
    first, second = (replace(kind.map, format="ND") for kind in (one, two))
    return first, second


def packed(kind: TensorType, array: Values) -> Values:
    """Return a logical array as it lies in memory, flat."""
    if kind.layout == "ND":
        return np.ascontiguousarray(array).reshape(-1)
    return pack(kind.map, array).reshape(-1)


def beside(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of an operand of logical `shape` beside a tensor of type `main`."""
    sizes = _aligned(shape, main)
    return tuple(p.count if sizes[p.axis] == main.shape[p.axis] else 1 for p in main.map.pieces)


def pack_beside(array: Values, main: TensorType) -> Values:
    """Return an operand's elements in the order of `beside`; padding is zero."""
    layout = main.map
    sizes = _aligned(array.shape, main)
    array = array.reshape(sizes)
    pads, split, place = [], [], []
    for axis, size in enumerate(sizes):
        own = layout.of_axis(axis)
        counts = [p.count if size == main.shape[axis] else 1 for p in own]
        whole = int(np.prod(counts))
        pads.append((0, whole - size))
        place += [layout.pieces.index(p) for p in own]
        split += counts
    cut = np.pad(array, pads).reshape(split)
    return np.ascontiguousarray(cut.transpose(np.argsort(place)))


def _aligned(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    return (1,) * (len(main.shape) - len(shape)) + tuple(shape)
