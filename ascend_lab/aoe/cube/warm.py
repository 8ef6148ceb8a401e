"""Warm starts: points a model thinks well of, not all alike."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.measure import CubeMeasure
from ascend_lab.aoe.cube.table import CubeSpace, same_rows
from ascend_lab.aoe.space import Point

CANDIDATES = 512
"""Points of least closed form that are walked through to be ranked."""


def warm_start(
    space: CubeSpace,
    measure: CubeMeasure,
    count: int,
    model: Literal["closed", "walk"] = "closed",
) -> tuple[Point, ...]:
    """Return `count` points of least estimated time, each with a grid or a tile of its own.

    The estimates are the certified bounds: closed forms, or of the best of these a walk. Fewer
    grids and tiles than `count` give fewer points.
    """
    bounds = Bounds(measure, space.genes)
    rows = np.argsort(bounds.closed, kind="stable")
    if model == "walk":
        best = rows[: max(CANDIDATES, count)]
        rows = best[np.argsort(bounds.walked(best), kind="stable")]
    names = [n for n in ("rows", "cols", "window", "m", "n") if n in space.genes]
    _, _, kind = same_rows([space.genes[name][rows] for name in names])
    _, first = np.unique(kind, return_index=True)
    return tuple(space.point(int(rows[i])) for i in np.sort(first)[:count])
