"""Arrays from one layout to another in NumPy: one mechanism for every pair.

A map says how to reshape and permute; a conversion undoes one map and applies the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import LayoutError
from ascend_lab.layout.boxes import check_pair
from ascend_lab.layout.maps import AddressMap

Values = NDArray[Any]


def pack(layout: AddressMap, array: Values) -> Values:
    """Store an array of the logical shape: fill up with zeros, cut the axes, permute the pieces.

    Returns an array of `layout.storage_shape`. Raises `LayoutError` for another shape or an
    element size that is not the layout's.
    """
    _check_item(layout, array)
    if array.shape != layout.shape:
        raise LayoutError(
            f"{layout.format}: an array of the logical shape {layout.shape}",
            str(array.shape),
            f"bring its axes into the order {' '.join(layout.axes)}",
        )
    if layout.padded_shape != layout.shape:
        wide = np.zeros(layout.padded_shape, array.dtype)
        wide[tuple(slice(n) for n in layout.shape)] = array
        array = wide
    cut = array.reshape([p.count for a in range(len(layout.shape)) for p in layout.of_axis(a)])
    return np.ascontiguousarray(cut.transpose(_order(layout))).reshape(layout.storage_shape)


def unpack(layout: AddressMap, stored: Values) -> Values:
    """Return the array of the logical shape from its storage: `pack` backwards, padding dropped.

    `stored` may have the storage shape, one axis per piece, or be flat. Raises `LayoutError`.
    """
    _check_item(layout, stored)
    if stored.shape not in (layout.storage_shape, layout.piece_shape, (layout.elements,)):
        raise LayoutError(
            f"{layout.format} {layout.shape} in {layout.dtype}: stored as {layout.storage_shape}",
            str(stored.shape),
            "reshape it, or correct the layout",
        )
    cut = stored.reshape(layout.piece_shape).transpose(np.argsort(_order(layout)))
    array = cut.reshape(layout.padded_shape)[tuple(slice(n) for n in layout.shape)]
    return np.ascontiguousarray(array)


def convert(stored: Values, source: AddressMap, target: AddressMap) -> Values:
    """Return what is stored in layout `source` in layout `target`; padding becomes zero.

    Raises `LayoutError` for maps of different arrays or a wrong storage shape.
    """
    check_pair(source, target)
    return pack(target, unpack(source, stored))


def _order(layout: AddressMap) -> list[int]:
    """Return, for every piece, its place when the pieces stand in the order of logical axes."""
    logical = [p for a in range(len(layout.shape)) for p in layout.of_axis(a)]
    return [logical.index(piece) for piece in layout.pieces]


def _check_item(layout: AddressMap, array: Values) -> None:
    if array.dtype.itemsize != DTYPE_BYTES[layout.dtype]:
        raise LayoutError(
            f"{layout.format}: elements of {DTYPE_BYTES[layout.dtype]} bytes ({layout.dtype})",
            f"{array.dtype.itemsize} ({array.dtype})",
            "C0 depends on the size: cast the array or change the layout's dtype",
        )
