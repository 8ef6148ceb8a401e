"""Describes how tensors are cut over devices, and finds the steps from one layout to another.

As in MindSpore, the devices form a matrix (of any rank), and a tensor map says which axes of the
matrix cut each dimension of the tensor. Axes of the matrix are numbered from the right: of (4, 2),
axis 0 has 2 devices and axis 1 has 4. Device numbers are row-major. Devices that differ only along
an axis that is not in the map hold the same slice.

A step slices, exchanges (all-to-all) or gathers along one axis. The greedy rule (mindspore,
redistribution_operator_infer.cc): first cut what can be cut without moving data, else exchange an
axis between two dimensions, else gather a dimension that the target does not cut; if none of these
applies, gather the first dimension that is wrong. The rule never considers sizes. The exact search
is Dijkstra's algorithm over all layouts that these steps reach.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, permutations, product
from typing import Literal, NamedTuple

import numpy as np

from ascend_lab.errors import LayoutError

__all__ = [
    "Comparison",
    "Cost",
    "Layout",
    "Step",
    "all_layouts",
    "cheapest",
    "compare",
    "execute",
    "greedy",
    "price",
    "redistribute",
    "step",
    "steps_from",
]
Values = np.ndarray
Map = tuple[tuple[int, ...], ...]
Kind = Literal["slice", "all_to_all", "all_gather"]
Cost = Callable[[str, int, float], float]
"""(operation, devices in a group, bytes) -> seconds.

The bytes are those of a device's array: the result of an all-gather, the input otherwise.
"""


# -- layouts --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor layout: device matrix, the axes that cut each dimension, and the whole shape.

    The axes of a dimension are listed with the outermost cut first. Raises LayoutError for an axis
    that does not exist or is used twice, and for a dimension that does not divide evenly.
    """

    device_matrix: tuple[int, ...]
    tensor_map: Map
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that every device gets an equal slice."""
        axes = [axis for dim in self.tensor_map for axis in dim]
        if len(self.tensor_map) != len(self.shape):
            needed = f"a tensor map of {len(self.shape)} dimensions"
            raise LayoutError(needed, f"{len(self.tensor_map)} in it")
        if any(not 0 <= axis < len(self.device_matrix) for axis in axes):
            needed = (
                f"axes 0 to {len(self.device_matrix) - 1} of device matrix {self.device_matrix}"
            )
            raise LayoutError(needed, str(self.tensor_map))
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
        """The number of parts of each dimension."""
        return tuple(math.prod(map(self.extent, dim)) for dim in self.tensor_map)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of the slice that one device holds."""
        return tuple(n // parts for n, parts in zip(self.shape, self.parts, strict=True))

    @property
    def slice_elements(self) -> int:
        """The number of elements that one device holds."""
        return math.prod(self.slice_shape)

    def extent(self, axis: int) -> int:
        """Return the number of devices along an axis."""
        # Matrix (4, 2): axis 0 has 2 devices, axis 1 has 4.
        return self.device_matrix[-1 - axis]

    def stride(self, axis: int) -> int:
        """Return the difference of the device numbers of two neighbours along an axis."""
        # Matrix (4, 2): neighbours along axis 0 are 1 apart, along axis 1 they are 2 apart.
        return math.prod(self.device_matrix[len(self.device_matrix) - axis :])

    def coordinate(self, device: int, axis: int) -> int:
        """Return the position of a device along an axis."""
        return device // self.stride(axis) % self.extent(axis)

    def group(self, device: int, axis: int) -> tuple[int, ...]:
        """Return the devices that differ from `device` only along an axis, in order."""
        # Matrix (4, 2), device 5: coordinate 1 on axis 0 and 2 on axis 1; its groups are (4, 5)
        # along axis 0 and (1, 3, 5, 7) along axis 1.
        first_device = device - self.coordinate(device, axis) * self.stride(axis)
        stride = self.stride(axis)
        return tuple(first_device + i * stride for i in range(self.extent(axis)))

    def slices(self, device: int) -> tuple[slice, ...]:
        """Return the range of each dimension that a device holds."""
        slices = []
        for dim, size in zip(self.tensor_map, self.slice_shape, strict=True):
            number = 0
            # A dimension cut by axes (1, 0) of matrix (4, 2): device 5 holds part 2 * 2 + 1 = 5 of
            # 8.
            for axis in dim:
                number = number * self.extent(axis) + self.coordinate(device, axis)
            slices.append(slice(number * size, (number + 1) * size))
        return tuple(slices)


def all_layouts(device_matrix: Sequence[int], shape: Sequence[int]) -> Iterator[Layout]:
    """Yield every layout of a shape on a device matrix, with axes of a dimension in every order."""
    axes = range(len(device_matrix))
    # Matrix (2, 2), two dimensions: each axis cuts no dimension (-1), dimension 0 or 1. In 2 of
    # these 9 choices both axes cut the same dimension, in two possible orders: 11 layouts.
    for dim_of_axis in product((-1, *range(len(shape))), repeat=len(device_matrix)):
        axes_of_dim = [[a for a in axes if dim_of_axis[a] == dim] for dim in range(len(shape))]
        orders_of_dim = [permutations(dim_axes) for dim_axes in axes_of_dim]
        for tensor_map in product(*orders_of_dim):
            try:
                yield Layout(tuple(device_matrix), tensor_map, tuple(shape))
            except LayoutError:
                continue


# -- steps ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Step:
    """One step along a device axis, and the layouts before and after it.

    `slice` cuts dimension `dim` further, `all_gather` joins its parts again; `all_to_all` joins
    `dim` and cuts `to_dim` (-1 for the other two). The axis is always the innermost cut of its
    dimension.
    """

    kind: Kind
    axis: int
    dim: int
    to_dim: int
    before: Layout
    after: Layout

    @property
    def group_size(self) -> int:
        """The number of devices that exchange data with each other."""
        return self.before.extent(self.axis)

    def received_bytes(self, item_bytes: int) -> float:
        """Return the bytes that every device receives."""
        slice_bytes = self.before.slice_elements * item_bytes
        peers = self.group_size - 1
        # Of 4 devices each receives three quarters of a slice in an all-to-all, 3 slices in an
        # all-gather.
        share = {"slice": 0.0, "all_to_all": peers / self.group_size, "all_gather": peers}
        return slice_bytes * share[self.kind]

    def time_s(self, item_bytes: int, cost: Cost) -> float:
        """Return the seconds by a cost model; a slice step moves no data and takes no time."""
        if self.kind == "slice" or self.group_size == 1:
            return 0.0
        layout = self.after if self.kind == "all_gather" else self.before
        return cost(self.kind, self.group_size, float(layout.slice_elements * item_bytes))

    def __str__(self) -> str:
        """Return the step in words: all_gather(dim 0, axis 1)."""
        dims = f"dim {self.dim}" + (f" -> {self.to_dim}" if self.kind == "all_to_all" else "")
        return f"{self.kind}({dims}, axis {self.axis})"


def step(before: Layout, kind: Kind, dim: int, axis: int = -1, to_dim: int = -1) -> Step:
    """Return a step from a layout; raise LayoutError if the layout does not allow it.

    `axis` is needed for a slice; the others use the last axis that cuts `dim`.
    """
    maps = [list(axes) for axes in before.tensor_map]
    if kind != "slice":
        if not maps[dim]:
            raise LayoutError(f"a dimension {dim} that is cut", str(before.tensor_map))
        axis = maps[dim].pop()
    if kind != "all_gather":
        maps[dim if kind == "slice" else to_dim].append(axis)
    after = replace(before, tensor_map=tuple(map(tuple, maps)))
    return Step(kind, axis, dim, to_dim, before, after)


def steps_from(before: Layout) -> Iterator[Step]:
    """Yield every step that a layout allows."""
    used = {axis for dim in before.tensor_map for axis in dim}
    free = [axis for axis in range(len(before.device_matrix)) if axis not in used]
    sizes = before.slice_shape
    for dim, axes in enumerate(before.tensor_map):
        for axis in free:
            if sizes[dim] % before.extent(axis) == 0:
                yield step(before, "slice", dim, axis)
        if axes:
            yield step(before, "all_gather", dim)
            for other_dim, size in enumerate(sizes):
                if other_dim != dim and size % before.extent(axes[-1]) == 0:
                    yield step(before, "all_to_all", dim, to_dim=other_dim)


def execute(steps: Sequence[Step], arrays: Sequence[Values]) -> list[Values]:
    """Return the array of every device after the steps, given the arrays before them."""
    current = list(arrays)
    for transition in steps:
        current = [_received(transition, device, current) for device in range(len(current))]
    return current


def _received(transition: Step, device: int, arrays: Sequence[Values]) -> Values:
    """Return the array of a device after a step, given the arrays of all devices before it."""
    group = transition.before.group(device, transition.axis)
    position = transition.before.coordinate(device, transition.axis)
    if transition.kind == "slice":
        return np.split(arrays[device], len(group), axis=transition.dim)[position]
    parts = [arrays[peer] for peer in group]
    if transition.kind == "all_to_all":
        parts = [np.split(part, len(group), axis=transition.to_dim)[position] for part in parts]
    return np.concatenate(parts, axis=transition.dim)


# -- from layout to layout ------------------------------------------------------------------------
Price = Callable[[Step], float]


class Path(NamedTuple):
    """A sequence of steps from a source, and its total price."""

    total: float
    steps: tuple[Step, ...]


def price(item_bytes: int, cost: Cost | None = None) -> Price:
    """Return a function that prices a step: in seconds by `cost`, or else in bytes received."""
    if cost is None:
        return lambda transition: transition.received_bytes(item_bytes)
    return lambda transition: transition.time_s(item_bytes, cost)


def redistribute(
    source: Layout, target: Layout, item_bytes: int = 2, cost: Cost | None = None
) -> tuple[Step, ...]:
    """Return the cheapest steps from source to target: in seconds by `cost`, else in bytes.

    Of equally cheap sequences it is a shortest one. Raises LayoutError if the layouts have
    different shapes or device matrices.
    """
    _comparable(source, target)
    return cheapest(source, price(item_bytes, cost))[target.tensor_map].steps


def _comparable(source: Layout, target: Layout) -> None:
    if (source.shape, source.device_matrix) != (target.shape, target.device_matrix):
        needed = f"a target of shape {source.shape} on devices {source.device_matrix}"
        raise LayoutError(needed, f"{target.shape} on {target.device_matrix}")


def cheapest(source: Layout, cost: Price) -> dict[Map, Path]:
    """Return the cheapest path from a layout to every layout of its matrix, by tensor map."""
    paths: dict[Map, Path] = {}
    ticket = count()
    # Ordered by total, then by number of steps; the ticket decides ties, since layouts do not
    # compare.
    queue: list[tuple[float, int, int, Layout, tuple[Step, ...]]] = [(0.0, 0, -1, source, ())]
    while queue:
        total, length, _, layout, path = heapq.heappop(queue)
        if layout.tensor_map in paths:
            continue
        paths[layout.tensor_map] = Path(total, path)
        for transition in steps_from(layout):
            after = transition.after
            if after.tensor_map not in paths:
                next_total = total + cost(transition)
                item = (next_total, length + 1, next(ticket), after, (*path, transition))
                heapq.heappush(queue, item)
    return paths


def greedy(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps of the greedy rule; raises as `redistribute`."""
    _comparable(source, target)
    steps = list[Step]()
    layout = source
    while layout.tensor_map != target.tensor_map:
        steps.append(_next(layout, target))
        layout = steps[-1].after
    return tuple(steps)


def _next(current: Layout, target: Layout) -> Step:
    """Return the next step of the greedy rule."""
    used = {axis for dim in current.tensor_map for axis in dim}
    target_axes = {axis for dim in target.tensor_map for axis in dim}
    pairs = list(enumerate(zip(current.tensor_map, target.tensor_map, strict=True)))
    # Map ((1,), ()) with the goal ((1, 0), ()): dimension 0 is a prefix of its goal and needs axis
    # 0. If axis 0 cuts nothing, a slice does it; if it is the last cut of dimension 1, an all-
    # to-all; otherwise some dimension must be gathered first.
    growing = {
        dim: goal[len(axes)]
        for dim, (axes, goal) in pairs
        if len(axes) < len(goal) and goal[: len(axes)] == axes
    }
    for dim, axis in growing.items():
        if axis not in used:
            return step(current, "slice", dim, axis)
    for dim, axis in growing.items():
        for other_dim, (axes, _) in pairs:
            if axes and axes[-1] == axis:
                return step(current, "all_to_all", other_dim, to_dim=dim)
    wrong = [dim for dim, (axes, goal) in pairs if axes and goal[: len(axes)] != axes]
    if not wrong:
        raise LayoutError("a step towards the target", f"{current.tensor_map}: none")
    unwanted = [dim for dim in wrong if current.tensor_map[dim][-1] not in target_axes]
    return step(current, "all_gather", (unwanted or wrong)[0])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The greedy rule compared with the optimum over all ordered pairs of layouts of one tensor.

    `worse` counts the pairs for which greedy costs more. `excess` is (total greedy cost) / (total
    optimal cost) - 1. `worst` is the largest ratio of any pair, and `example` a pair with that
    ratio.
    """

    pairs: int
    worse: int
    excess: float
    worst: float
    example: tuple[Layout, Layout] | None


def compare(
    device_matrix: Sequence[int],
    shape: Sequence[int],
    item_bytes: int = 2,
    cost: Cost | None = None,
) -> Comparison:
    """Compare both searches on all pairs of layouts of a tensor; slow for large matrices."""
    price_of_step = price(item_bytes, cost)
    layouts = list(all_layouts([size for size in device_matrix if size > 1], shape))
    worse = 0
    worst = 1.0
    example = None
    greedy_total = 0.0
    optimal_total = 0.0
    for source in layouts:
        paths = cheapest(source, price_of_step)
        for target in layouts:
            optimum = paths[target.tensor_map].total
            greedy_price = sum(map(price_of_step, greedy(source, target)))
            greedy_total = greedy_total + greedy_price
            optimal_total = optimal_total + optimum
            # 1e-9: sums of the same prices in another order may differ in the last bits
            if greedy_price > optimum * (1 + 1e-9):
                worse += 1
            if optimum and greedy_price / optimum > max(worst, 1 + 1e-9):
                worst = greedy_price / optimum
                example = (source, target)
    excess = greedy_total / optimal_total - 1 if optimal_total else 0.0
    return Comparison(len(layouts) ** 2, worse, excess, worst, example)
