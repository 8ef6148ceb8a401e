"""What a slicing is, as data: regions of a graph, the axis each is cut along, sizes and order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph import Graph, TensorType
from ascend_lab.ops.slicing import Range

AXES = ("batch", "channel", "height", "width", "sequence")
ORDERS = ("depth", "zigzag")
HALOS = ("recompute", "store")


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive nodes `first` .. `last` of a graph, computed in slices along an axis.

    `parts` are the slices' sizes in entries of the smallest result: 7 images as (4, 3). `order`:
    "depth" takes each slice through the whole region, "zigzag" each layer through all slices, every
    other layer backwards. `halo`: rows that two slices need are computed twice ("recompute") or
    kept ("store").
    """

    first: str
    last: str
    axis: str
    parts: tuple[int, ...]
    order: str = "depth"
    halo: str = "recompute"

    def __post_init__(self) -> None:
        """Raise `InputError` for an unknown axis, order or halo, or sizes below 1."""
        given = ((self.axis, AXES), (self.order, ORDERS), (self.halo, HALOS))
        for word, known in given:
            if word not in known:
                raise InputError(f"one of {', '.join(known)}", repr(word), "choose one")
        if not self.parts or min(self.parts) < 1:
            raise InputError("sizes of at least 1", str(self.parts), "state each slice's size")

    def spans(self, size: int) -> list[Range]:
        """Return the ranges of an axis, cut in proportion; `InputError` for an empty slice."""
        scale = -(-size // sum(self.parts))
        ends = [min(end * scale, size) for end in accumulate(self.parts)]
        found = list(pairwise([0, *ends[:-1], size]))
        if any(low >= high for low, high in found):
            raise InputError(f"slices of {size} entries", str(self.parts), "use fewer or smaller")
        return found

    def __str__(self) -> str:
        """Return one line."""
        sizes = "+".join(map(str, self.parts))
        halo = "" if self.axis == "batch" else f", halo {self.halo}"
        return f"{self.first} .. {self.last}: {self.axis} {sizes}, {self.order}{halo}"


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Regions in the order of the graph, no two overlapping; what is in none stays whole."""

    regions: tuple[Region, ...] = ()

    def plain(self) -> list[dict[str, Any]]:
        """Return the plan as plain data, ready for JSON."""
        return [{**asdict(region), "parts": list(region.parts)} for region in self.regions]

    @classmethod
    def of(cls, data: Iterable[Mapping[str, Any]]) -> SlicePlan:
        """Return the plan of plain data, as `plain` wrote it."""
        return cls(tuple(Region(**{**one, "parts": tuple(one["parts"])}) for one in data))

    def ranges(self, graph: Graph) -> list[tuple[int, int, Region]]:
        """Return first and last position of every region; `InputError` out of order."""
        place = {node.name: i for i, node in enumerate(graph.nodes)}
        found, end = [], -1
        for region in self.regions:
            if missing := [n for n in (region.first, region.last) if n not in place]:
                raise InputError(f"nodes of {graph.name}", missing[0], "name nodes of this graph")
            low, high = place[region.first], place[region.last]
            if not end < low <= high:
                needed = f"regions in order, each behind node {end}"
                raise InputError(needed, f"{region.first} .. {region.last}: {low} .. {high}")
            found.append((low, high, region))
            end = high
        return found

    def __str__(self) -> str:
        """Return one line a region."""
        return "\n".join(map(str, self.regions)) or "whole"


def axis_number(axis: str, kind: TensorType, name: str) -> int:
    """Return which axis of a tensor a word means; raise `InputError` if it has none."""
    rank = len(kind.shape)
    places = {"batch": 0, "sequence": rank - 2, "channel": 1 if rank == 4 else rank - 1}
    if rank == 4:
        places |= {"height": 2, "width": 3}
    number = places.get(axis, -1)
    if not 0 <= number < rank:
        raise InputError(f"{name} with an axis {axis}", str(kind), "end the region before it")
    return number
