"""Service times of a network: its own time on a chip, batch by batch, and the line through them.

    tau(b) ~ mean_s + per_item_s * b

Sizes between those that are timed get what lies between; each instance has a chip to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph.compile import Road, front_stages
from ascend_lab.graph.models import load_model
from ascend_lab.graph.tiled import simulate_within


@dataclass(frozen=True, slots=True)
class Line:
    """The line closest to points, and the largest distance from it as a share of the point."""

    mean_s: float
    per_item_s: float
    worst_error: float


def affine(points: dict[int, float]) -> Line:
    """Return the line through seconds by size, by least squares of the relative errors.

    Neither of its numbers is negative. Raises `InputError` without points.
    """
    if not points:
        raise InputError("a time to fit a line to", "none", "time a size")
    b, seconds = np.array(list(points), float), np.array(list(points.values()))
    if len(points) == 1:
        return Line(float(seconds[0]), 0.0, 0.0)
    ways = [np.linalg.lstsq(np.stack([1 / seconds, b / seconds], 1), np.ones_like(b), rcond=None)]
    t0, a = ways[0][0]
    if t0 < 0 or a < 0:  # on the edge: through the origin, or flat
        one = (b if t0 < 0 else np.ones_like(b)) / seconds
        best = float(one.sum() / (one @ one))
        t0, a = (0.0, best) if t0 < 0 else (best, 0.0)
    errors = np.abs((t0 + a * b) / seconds - 1)
    return Line(float(t0), float(a), float(errors.max()))


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to time: 1, 2, 4, ... and the largest."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if most == 1 else [*sizes, most]


def network_seconds(
    model: str, chip: Chip | str, most: int, dtype: str = "fp16"
) -> tuple[tuple[float, ...], dict[int, float]]:
    """Return the seconds of batches 1 to `most` of a file or zoo:NAME, and those timed.

    Raises as `load_model` and `front_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    road = Road(dtype=dtype)
    timed: dict[int, float] = {}
    for size in batch_sizes(most):
        graph = load_model(model, batch=size).graph
        timed[size] = simulate_within(front_stages(graph, chip, road), chip, None, road)[0].time_s
    every = np.interp(np.arange(1, most + 1), list(timed), list(timed.values()))
    return tuple(every.tolist()), timed
