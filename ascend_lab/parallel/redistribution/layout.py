"""Tensor layouts: which slice of a tensor each device holds.

As in MindSpore, devices stand in a matrix and a map says which of its axes cut each dimension of
the tensor. Axes of the matrix are numbered from the right: of (4, 2), axis 0 has 2 devices and axis
1 has 4. Device numbers are row-major. Devices that differ only along an axis the map does not
name hold the same slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import LayoutError

Values = NDArray[np.generic]
Map = tuple[tuple[int, ...], ...]
WHOLE = -1
"""In a tensor map: this dimension is not cut."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Device matrix, the axes that cut each dimension (major first), and the whole shape.

    Raises LayoutError for an axis that does not exist or is used twice, and for a dimension that
    does not divide evenly.
    """

    device_matrix: tuple[int, ...]
    tensor_map: Map
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that every device gets an equal slice."""
        axes = [axis for dim in self.tensor_map for axis in dim]
        if len(self.tensor_map) != len(self.shape):
            raise LayoutError(
                f"a tensor map of {len(self.shape)} dimensions", f"{len(self.tensor_map)} in it"
            )
        if any(not 0 <= axis < len(self.device_matrix) for axis in axes):
            raise LayoutError(
                f"axes 0 to {len(self.device_matrix) - 1} of device matrix {self.device_matrix}",
                str(self.tensor_map),
            )
        if len(set(axes)) < len(axes):
            raise LayoutError("each device axis at most once", str(self.tensor_map))
        for dim, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if size % parts:
                raise LayoutError(f"dimension {dim} in {parts} equal parts", f"size {size}")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.device_matrix)

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut."""
        return tuple(math.prod(map(self.extent, dim)) for dim in self.tensor_map)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of what one device holds."""
        return tuple(n // parts for n, parts in zip(self.shape, self.parts, strict=True))

    @property
    def slice_elements(self) -> int:
        """Elements one device holds."""
        return math.prod(self.slice_shape)

    def extent(self, axis: int) -> int:
        """Return the number of devices along an axis."""
        return self.device_matrix[-1 - axis]

    def coordinate(self, device: int, axis: int) -> int:
        """Return the place of a device along an axis."""
        return (
            device
            // math.prod(self.device_matrix[len(self.device_matrix) - axis :])
            % (self.extent(axis))
        )

    def group(self, device: int, axis: int) -> tuple[int, ...]:
        """Return the devices that differ from `device` only along an axis, in order."""
        step = math.prod(self.device_matrix[len(self.device_matrix) - axis :])
        first = device - self.coordinate(device, axis) * step
        return tuple(first + place * step for place in range(self.extent(axis)))

    def slices(self, device: int) -> tuple[slice, ...]:
        """Return the part of each dimension that a device holds."""
        found = []
        for dim, size in zip(self.tensor_map, self.slice_shape, strict=True):
            place = 0
            for axis in dim:
                place = place * self.extent(axis) + self.coordinate(device, axis)
            found.append(slice(place * size, (place + 1) * size))
        return tuple(found)

    def distribute(self, array: Values) -> list[Values]:
        """Return what every device holds of a whole array; LayoutError for another shape."""
        if array.shape != self.shape:
            raise LayoutError(f"an array of shape {self.shape}", str(array.shape))
        return [array[self.slices(device)] for device in range(self.devices)]


def layout(
    device_matrix: Sequence[int], tensor_map: Sequence[int | Sequence[int]], shape: Sequence[int]
) -> Layout:
    """Return a layout from MindSpore's notation: one axis per dimension, -1 where it is whole.

    A sequence instead of an axis cuts the dimension by several, the major one first.
    """

    def axes(entry: int | Sequence[int]) -> tuple[int, ...]:
        if isinstance(entry, int):
            return () if entry == WHOLE else (entry,)
        return tuple(entry)

    return Layout(tuple(device_matrix), tuple(map(axes, tensor_map)), tuple(shape))


def all_layouts(device_matrix: Sequence[int], shape: Sequence[int]) -> Iterator[Layout]:
    """Yield every layout of a shape on a device matrix, orders of axes in a dimension included."""
    axes = range(len(device_matrix))
    for homes in product((WHOLE, *range(len(shape))), repeat=len(device_matrix)):
        per_dim = [[a for a in axes if homes[a] == dim] for dim in range(len(shape))]
        for orders in product(*(permutations(own) for own in per_dim)):
            try:
                yield Layout(tuple(device_matrix), orders, tuple(shape))
            except LayoutError:
                continue


def unified(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Return both layouts on one device matrix, axes split where only the other has them split.

    LayoutError if the shapes or device counts differ, or no common matrix exists.
    """
    if source.shape != target.shape or source.devices != target.devices:
        raise LayoutError(
            f"a target of shape {source.shape} on {source.devices} devices",
            f"{target.shape} on {target.devices}",
        )
    steps = sorted({*_strides(source), *_strides(target)})
    if any(b % a for a, b in pairwise(steps)):
        raise LayoutError(
            "device matrices with a common refinement",
            f"{source.device_matrix} and {target.device_matrix}",
            "use matrices whose axes divide each other",
        )
    return _refined(source, steps), _refined(target, steps)


def _strides(own: Layout) -> list[int]:
    """Return the distances between neighbours along axes 0, 1, ..., and the device count."""
    count = len(own.device_matrix)
    return [math.prod(own.device_matrix[count - axis :]) for axis in range(count + 1)]


def _refined(own: Layout, steps: list[int]) -> Layout:
    """Return a layout with its axes split at all of `steps`."""
    matrix = tuple(b // a for a, b in pairwise(steps))[::-1]
    strides = _strides(own)

    def pieces(axis: int) -> list[int]:
        low, high = strides[axis], strides[axis + 1]
        return [i for i in reversed(range(len(matrix))) if low <= steps[i] < high]

    maps = tuple(tuple(p for axis in dim for p in pieces(axis)) for dim in own.tensor_map)
    return Layout(matrix, maps, own.shape)
