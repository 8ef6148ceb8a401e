"""Tensors and tiles as NumPy arrays that know which index they begin at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.boxes import Box, Range
from ascend_lab.dsl.expr import Read
from ascend_lab.dsl.stages import Stage
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine
from ascend_lab.sim.number_formats import numpy_type

Values = NDArray[Any]


@dataclass(slots=True)
class Held:
    """The elements `start`, `start + 1`, ... of every dimension of a tensor."""

    name: str
    values: Values
    start: tuple[int, ...]

    def part(self, stage: Stage, box: Box) -> Values:
        """Return the view of what a box of its own stage covers."""
        places = []
        for axis, first in zip(stage.axes, self.start, strict=True):
            low = box[axis.name].start.const - first
            places.append(slice(low, low + box[axis.name].count))
        return self.values[tuple(places)]

    def read(self, read: Read, box: Mapping[str, Range]) -> Values:
        """Return what a read gives over a box: one dimension per axis, 1 where it is constant."""
        values = self.values.reshape(read.view) if read.view else self.values
        start = (0,) * len(read.view) if read.view else self.start
        index = [_places(a, first, box) for a, first in zip(read.index, start, strict=True)]
        for place, size in zip(index, values.shape, strict=True):
            if place.min() < 0 or place.max() >= size:
                raise ScheduleError(
                    f"{self.name}: {size} elements that its reader needs",
                    f"indices {place.min()}..{place.max()} of the tile",
                    "attach it where its reader needs no more than that",
                )
        picked: Values = values[tuple(index)]
        return picked


def held(memory: Mapping[str, Held], name: str) -> Held:
    """Return what is alive under a name; raise `ScheduleError` if nothing computed it yet."""
    if name not in memory:
        raise ScheduleError(
            f"{name} computed before it is read", "nothing", "attach it further out"
        )
    return memory[name]


def _places(index: Affine, first: int, box: Mapping[str, Range]) -> Values:
    names = list(box)
    place = np.full((1,) * len(names), index.const - first)
    for name, factor in index.terms:
        shape = [1] * len(names)
        shape[names.index(name)] = box[name].count
        here = box[name].start.const + np.arange(box[name].count)
        place = place + factor * here.reshape(shape)
    return place


def poisoned(stage: Stage, box: Box) -> Held:
    """Return a tile for a box of a stage, full of NaN or of the smallest whole number."""
    kind = numpy_type(stage.dtype)
    poison = np.iinfo(kind).min if np.dtype(kind).kind in "iu" else np.nan
    ranges = [box[a.name] for a in stage.axes]
    values = np.full([r.count for r in ranges], poison, kind)
    return Held(stage.name, values, tuple(r.start.const for r in ranges))


def padded(name: str, values: Values, unit: int) -> Held:
    """Return a tensor with zeros up to a multiple of `unit` in its last two dimensions."""
    widths = [(0, 0)] * (values.ndim - 2) + [(0, -n % unit) for n in values.shape[-2:]]
    return Held(name, np.pad(values, widths) if unit > 1 else values, (0,) * values.ndim)


def restored(values: Values, shape: Sequence[int]) -> Values:
    """Return a result in the shape of its tensor: fused axes apart, padding of fractals gone."""
    if values.size == math.prod(shape):
        return values.reshape(tuple(shape))
    return values[tuple(slice(0, n) for n in shape)]
