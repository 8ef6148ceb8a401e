"""Service times of a network: its own time on a chip, batch by batch, and the line through them.

    tau(b) ~ mean_s + per_item_s * b

Sizes between those that are timed get what lies between; each instance has a chip to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return the line closest to seconds by size; raises as `fit`."""
    (mean_s, per_item_s), worst = fit([(1, b) for b in points], list(points.values()))
    return Line(mean_s, per_item_s, worst)


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return what each column of the rows costs, nothing below 0, and the largest relative error.

    Least squares of the relative errors, on the best of all faces of the region. Raises
    `InputError` without rows.
    """
    if not rows:
        raise InputError("a time to fit to", "none", "time a size")
    scaled = np.array(rows, float) / np.array(seconds)[:, None]
    width, least = scaled.shape[1], np.inf
    best = np.zeros(width)
    for face in range(1, 2**width):
        used = [k for k in range(width) if face >> k & 1]
        part = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        error = float(((scaled[:, used] @ part - 1) ** 2).sum())
        if (part >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(width), error
            best[used] = part
    return best.tolist(), float(np.abs(scaled @ best - 1).max())


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
