"""Checks of chapter 18: a pixel's colour, a pixel of NV12, cards, four taps a lane, placement."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.lab.checks import core as ex
from ascend_lab.media import STANDARDS, csc_of

Values = NDArray[Any]
Edge = tuple[int, int, float]
"""Who writes, who reads, and what a copy between two engines costs."""
MOST_OPERATORS = 12


# -- references -----------------------------------------------------------------------------------
def colour(pixel: Sequence[int], rows: Sequence[Sequence[int]], bias: Sequence[int]) -> list[int]:
    """Return a pixel in another colour space: floor shift by 8, limited to 0..255."""
    centred = [p - b for p, b in zip(pixel, bias, strict=True)]
    sums = (sum(m * c for m, c in zip(row, centred, strict=True)) for row in rows)
    return [min(max(s >> 8, 0), 255) for s in sums]


def nv12_pixel(frame: Sequence[int], width: int, height: int, x: int, y: int) -> list[int]:
    """Return Y, U and V of a pixel of a flat NV12 frame."""
    pair = width * height + y // 2 * width + x // 2 * 2
    return [frame[y * width + x], frame[pair], frame[pair + 1]]


def cards(stations: Sequence[tuple[int, float]], rate: float) -> int:
    """Return the cards for a rate: the most that any station (servers, seconds) asks for."""
    return max(math.ceil(rate * seconds / servers) for servers, seconds in stations)


def four_taps(weights: Values) -> Values:
    """Return weights (k, c, r, s) as (k, 16, r, ceil(s / 4)): lane 4 d + c is column 4 q + d."""
    k, c, rows, columns = weights.shape
    turns = -(-columns // 4)
    found = np.zeros((k, 16, rows, turns), weights.dtype)
    for q, d in itertools.product(range(turns), range(4)):
        if 4 * q + d < columns:
            found[:, 4 * d : 4 * d + c, :, q] = weights[:, :, :, 4 * q + d]
    return found


def placed_cost(
    times: Sequence[tuple[float, float]], edges: Sequence[Edge], places: Sequence[int]
) -> float:
    """Return what a placement costs: each operator on its engine, and the copies between."""
    own = sum(pair[place] for pair, place in zip(times, places, strict=True))
    return own + sum(cost for i, j, cost in edges if places[i] != places[j])


def best_cost(times: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> float:
    """Return the least cost of all placements on two engines, by trying every one."""
    every = itertools.product((0, 1), repeat=len(times))
    return min(placed_cost(times, edges, places) for places in every)


# -- checks ---------------------------------------------------------------------------------------
_NARROW = csc_of("601 narrow", "RGB")


@ex.against(
    colour,
    edges=ex.rows(
        "pixel rows bias",
        ((81, 90, 240), _NARROW.matrix, _NARROW.in_bias),
        ((16, 128, 127), _NARROW.matrix, _NARROW.in_bias),
        ((255, 255, 255), _NARROW.matrix, _NARROW.in_bias),
    ),
)
def check_ex_18_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(pixel, rows, bias)`: the pixel behind AIPP's colour conversion."""
    csc = csc_of(STANDARDS[int(rng.integers(len(STANDARDS)))], "RGB")
    pixel = tuple(int(v) for v in rng.integers(0, 256, 3))
    return {"pixel": pixel, "rows": csc.matrix, "bias": csc.in_bias}


@ex.against(nv12_pixel)
def check_ex_18_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(frame, width, height, x, y)`: Y, U, V of a pixel of a flat NV12 frame."""
    width, height = (2 * int(n) for n in rng.integers(1, 5, 2))
    frame = [int(v) for v in rng.integers(0, 256, width * height * 3 // 2)]
    x, y = int(rng.integers(width)), int(rng.integers(height))
    return {"frame": frame, "width": width, "height": height, "x": x, "y": y}


@ex.against(
    cards,
    edges=ex.rows(
        "stations rate", ([(2, 1 / 128), (1, 0.001)], 3000.0), ([(1, 0.5), (4, 1.0)], 4.0)
    ),
)
def check_ex_18_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(stations, rate)`: cards, where a station is (servers, seconds a picture)."""
    count = int(rng.integers(1, 5))
    stations = [(int(rng.integers(1, 5)), float(rng.uniform(1e-4, 0.02))) for _ in range(count)]
    return {"stations": stations, "rate": float(rng.uniform(50, 4000))}


@ex.against(four_taps, cases=20)
def check_ex_18_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(weights)`: (k, c, r, s) as (k, 16, r, ceil(s / 4)), zeros where nothing is."""
    sizes = [int(rng.integers(1, most)) for most in (4, 5, 4, 10)]
    return {"weights": rng.standard_normal(sizes).astype(np.float32)}


def _judge_18_5(got: Any, case: ex.Case) -> str | None:
    times, edges = case["times"], case["edges"]
    try:
        places = [int(place) for place in got]
    except (TypeError, ValueError):
        return "expected a list of 0 and 1"
    if len(places) != len(times) or set(places) - {0, 1}:
        return f"expected {len(times)} numbers, each 0 or 1"
    cost, least = placed_cost(times, edges, places), best_cost(times, edges)
    return None if cost <= least * (1 + 1e-9) else f"which costs {cost:.3f}, expected {least:.3f}"


_SWITCH = {"times": [(1.0, 9.0), (3.0, 2.0), (1.0, 9.0)], "edges": [(0, 1, 1.0), (1, 2, 1.0)]}


_TWICE = {**_SWITCH, "edges": [(0, 1, 0.3), (1, 2, 0.3), (0, 1, 0.3), (2, 1, 0.3)]}

_BACK = {
    "times": [(2.0, 3.0), (0.0, 2.0), (0.0, 3.0), (2.0, 0.0), (2.0, 1.0)],
    "edges": [(0, 3, 1.0), (0, 4, 2.0), (1, 3, 2.0), (2, 3, 1.0)],
}
"""A flow without a way back is not the largest here."""


@ex.judged(_judge_18_5, edges=[_SWITCH, _TWICE, _BACK], cases=20)
def check_ex_18_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, edges)`: the engine, 0 or 1, of each operator, at the least cost.

    `times[i]` are seconds on engine 0 and on engine 1; an edge (i, j, cost) is paid where its ends
    are on different engines. Compared with every placement of up to 12 operators.
    """
    count = int(rng.integers(2, MOST_OPERATORS + 1))
    times = [(float(a), float(b)) for a, b in rng.exponential(1.0, (count, 2))]
    edges = [
        (i, j, float(rng.exponential(0.7)))
        for i, j in itertools.combinations(range(count), 2)
        if j == i + 1 or rng.random() < 0.2
    ]
    return {"times": times, "edges": edges}
