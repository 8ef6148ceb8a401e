"""Steps between tensor layouts: slice, all-to-all, all-gather; executed on one array per device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import LayoutError
from ascend_lab.parallel.redistribution.layout import Layout

Kind = Literal["slice", "all_to_all", "all_gather"]
Cost = Callable[[str, int, float], float]
"""(operation, devices in a group, bytes) -> seconds.

Bytes are those a device holds: of the result for an all-gather, of the input otherwise.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step along a device axis, and the layouts before and after it.

    `slice` cuts dimension `dim` further, `all_gather` joins its parts again; `all_to_all` joins
    `dim` and cuts `to_dim` (-1 otherwise). The axis is always the last that cuts a dimension.
    """

    kind: Kind
    axis: int
    dim: int
    to_dim: int
    before: Layout
    after: Layout

    @property
    def group_size(self) -> int:
        """Devices that exchange data with each other."""
        return self.before.extent(self.axis)

    def received_bytes(self, item_bytes: int) -> float:
        """Return the bytes every device receives."""
        held = self.before.slice_elements * item_bytes
        others = self.group_size - 1
        share = {"slice": 0.0, "all_to_all": others / self.group_size, "all_gather": others}
        return held * share[self.kind]

    def time_s(self, item_bytes: int, cost: Cost) -> float:
        """Return the seconds a cost model gives; a slice moves nothing and counts as free."""
        if self.kind == "slice" or self.group_size == 1:
            return 0.0
        held = self.after if self.kind == "all_gather" else self.before
        return cost(self.kind, self.group_size, float(held.slice_elements * item_bytes))

    def __str__(self) -> str:
        """Return it in words: all_gather(dim 0, axis 1)."""
        dims = f"dim {self.dim}" + (f" -> {self.to_dim}" if self.kind == "all_to_all" else "")
        return f"{self.kind}({dims}, axis {self.axis})"


def step(before: Layout, kind: Kind, dim: int, axis: int = -1, to_dim: int = -1) -> Step:
    """Return a step from a layout; LayoutError if it cannot be done there.

    `axis` is needed for a slice; the others use the last axis that cuts `dim`.
    """
    maps = [list(own) for own in before.tensor_map]
    if kind != "slice":
        if not maps[dim]:
            raise LayoutError(f"a dimension {dim} that is cut", str(before.tensor_map))
        axis = maps[dim].pop()
    if kind != "all_gather":
        maps[dim if kind == "slice" else to_dim].append(axis)
    after = replace(before, tensor_map=tuple(map(tuple, maps)))
    return Step(kind, axis, dim, to_dim, before, after)


def steps_from(before: Layout) -> Iterator[Step]:
    """Yield every step that can be done from a layout."""
    used = {axis for dim in before.tensor_map for axis in dim}
    free = [axis for axis in range(len(before.device_matrix)) if axis not in used]
    sizes = before.slice_shape
    for dim, own in enumerate(before.tensor_map):
        for axis in free:
            if sizes[dim] % before.extent(axis) == 0:
                yield step(before, "slice", dim, axis)
        if own:
            yield step(before, "all_gather", dim)
            for other, size in enumerate(sizes):
                if other != dim and size % before.extent(own[-1]) == 0:
                    yield step(before, "all_to_all", dim, to_dim=other)


def execute(steps: Sequence[Step], arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return what every device holds after the steps, from what each holds before them."""
    current = list(arrays)
    for one in steps:
        groups = [one.before.group(device, one.axis) for device in range(len(current))]
        current = [_received(one, device, groups[device], current) for device in range(len(groups))]
    return current


def _received(
    one: Step, device: int, group: tuple[int, ...], arrays: Sequence[NDArray[Any]]
) -> NDArray[Any]:
    place = group.index(device)
    if one.kind == "slice":
        return np.split(arrays[device], len(group), axis=one.dim)[place]
    if one.kind == "all_gather":
        return np.concatenate([arrays[peer] for peer in group], axis=one.dim)
    parts = [np.split(arrays[peer], len(group), axis=one.to_dim)[place] for peer in group]
    return np.concatenate(parts, axis=one.dim)
