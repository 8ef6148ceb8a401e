"""Checks of chapter 18a: what a placement costs, the best one, and streams of frames.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "which costs 3.000, expected 2.000".
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ascend_lab.lab.checks import core as ex

Times = Sequence[tuple[float, float]]
"""For each operator its time on the device (0) and on the host (1)."""
Edge = tuple[int, int, float]
"""Who writes, who reads, and what a copy between the two sides costs."""
MAX_OPERATORS = 12


# -- 18a.1: what a placement costs -----------------------------------------------------------------
def placed_cost(times: Times, edges: Sequence[Edge], places: Sequence[int]) -> float:
    """Return what a placement costs: each operator on its side, and the copies between."""
    operator_times = sum(pair[place] for pair, place in zip(times, places, strict=True))
    copy_times = sum(cost for i, j, cost in edges if places[i] != places[j])
    return operator_times + copy_times


def _drawn(rng: ex.Rng, most: int) -> ex.Case:
    """Return times and edges of a graph of at most so many operators."""
    count = int(rng.integers(2, most + 1))
    times = [(float(a), float(b)) for a, b in rng.exponential(1.0, (count, 2))]
    edges = [
        (i, j, float(rng.exponential(0.7)))
        for i, j in itertools.combinations(range(count), 2)
        if j == i + 1 or rng.random() < 0.2
    ]
    return {"times": times, "edges": edges}


@ex.against(
    placed_cost,
    edges=[
        ([(2.0, 9.0), (6.0, 1.0), (1.0, 5.0)], [(0, 1, 1.0), (1, 2, 1.0)], [0, 1, 0]),
        ([(1.0, 2.0), (3.0, 4.0)], [(0, 1, 8.0), (0, 1, 8.0)], [1, 0]),
        ([(1.0, 2.0), (3.0, 4.0)], [(0, 1, 8.0)], [1, 1]),
    ],
    rel_tol=1e-9,
)
def check_ex_18a_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, edges, places)`: seconds of the operators, and of the copies."""
    case = _drawn(rng, MAX_OPERATORS)
    return {**case, "places": rng.integers(0, 2, len(case["times"])).tolist()}


# -- 18a.2: a chain --------------------------------------------------------------------------------
def chain_cost(times: Times, copies: Sequence[float]) -> float:
    """Return the least cost of a chain of operators, by the best way to end on each side."""
    device, host = times[0]
    for (on_device, on_host), copy in zip(times[1:], copies, strict=True):
        device, host = (
            min(device, host + copy) + on_device,
            min(host, device + copy) + on_host,
        )
    return min(device, host)


@ex.against(
    chain_cost,
    edges=[
        ([(2.0, 9.0), (6.0, 1.0), (1.0, 5.0)], [1.0, 1.0]),
        ([(2.0, 1.0)], []),
        # all on the host, although the first alone is quicker on the device
        ([(1.0, 2.0), (9.0, 1.0), (9.0, 1.0)], [4.0, 4.0]),
        # a slower step on the host, so that the chain need not come back
        ([(9.0, 1.0), (1.0, 2.0), (9.0, 1.0)], [1.0, 1.0]),
        ([(1.0, 3.0)] * 100, [0.5] * 99),
    ],
    rel_tol=1e-9,
)
def check_ex_18a_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, copies)`: the least cost of a chain of operators."""
    count = int(rng.integers(1, 150))
    times = [(float(a), float(b)) for a, b in rng.exponential(1.0, (count, 2))]
    return {"times": times, "copies": rng.exponential(0.8, count - 1).tolist()}


# -- 18a.3: frames on streams ----------------------------------------------------------------------
def streams_s(frames: int, streams: int, in_s: float, kernel_s: float, out_s: float) -> float:
    """Return when the last frame is copied out: frame f goes to stream f mod streams."""
    done = list[float]()
    in_free = kernel_free = out_free = 0.0
    for frame in range(frames):
        stream_free = done[frame - streams] if frame >= streams else 0.0
        in_free = max(in_free, stream_free) + in_s
        kernel_free = max(kernel_free, in_free) + kernel_s
        out_free = max(out_free, kernel_free) + out_s
        done.append(out_free)
    return done[-1]


@ex.against(
    streams_s,
    edges=[
        (3, 3, 1.0, 2.0, 1.0),
        (3, 1, 1.0, 2.0, 1.0),
        (8, 2, 2.0, 2.0, 2.0),
        (1, 4, 1.0, 1.0, 1.0),
        (5, 2, 0.0, 1.0, 4.0),
    ],
    rel_tol=1e-9,
)
def check_ex_18a_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(frames, streams, in_s, kernel_s, out_s)`: when all frames are out."""
    in_s, kernel_s, out_s = (float(s) for s in rng.uniform(0.1, 3, 3))
    return {
        **ex.drawn(rng, frames=range(1, 40), streams=range(1, 6)),
        "in_s": in_s,
        "kernel_s": kernel_s,
        "out_s": out_s,
    }


# -- 18a.4: the best placement ---------------------------------------------------------------------
def best_cost(times: Times, edges: Sequence[Edge]) -> float:
    """Return the least cost of all placements on two sides, by trying every one."""
    placements = itertools.product((0, 1), repeat=len(times))
    return min(placed_cost(times, edges, places) for places in placements)


def _judge_placement(got: Any, case: ex.Case) -> str | None:
    """Judge a side for each operator by what the placement costs."""
    times = case["times"]
    edges = case["edges"]
    try:
        places = [int(place) for place in got]
    except (TypeError, ValueError):
        return "expected a list of 0 and 1"
    if len(places) != len(times) or set(places) - {0, 1}:
        return f"expected {len(times)} numbers, each 0 or 1"
    cost = placed_cost(times, edges, places)
    least = best_cost(times, edges)
    return None if cost <= least * (1 + 1e-9) else f"which costs {cost:.3f}, expected {least:.3f}"


_SWITCH = {"times": [(1.0, 9.0), (3.0, 2.0), (1.0, 9.0)], "edges": [(0, 1, 1.0), (1, 2, 1.0)]}
_TWICE = {**_SWITCH, "edges": [(0, 1, 0.3), (1, 2, 0.3), (0, 1, 0.3), (2, 1, 0.3)]}
_BACK = {
    "times": [(2.0, 3.0), (0.0, 2.0), (0.0, 3.0), (2.0, 0.0), (2.0, 1.0)],
    "edges": [(0, 3, 1.0), (0, 4, 2.0), (1, 3, 2.0), (2, 3, 1.0)],
}
"""A flow without a way back is not the largest here."""
_TOGETHER = {
    "times": [(0.0, 9.0), (4.0, 3.0), (4.0, 3.0), (4.0, 3.0), (0.0, 9.0)],
    "edges": [(0, 1, 1.0), (1, 2, 9.0), (2, 3, 9.0), (3, 4, 1.0)],
}
"""Three operators gain by a move together; none of them gains alone."""

_TWO_GROUPS = {
    "times": [(6.0, 3.0)] * 2 + [(1.0, 1.5)] * 4 + [(3.0, 6.0)] * 2 + [(1.5, 1.0)] * 4,
    "edges": [(i, i + 1, 9.0) for i in range(11) if i != 5],
}
"""Six operators belong on the host and six on the device; to move three at once does not help."""


_ALONE = {"times": [(3.0, 1.0)], "edges": []}


@ex.judged(
    _judge_placement, edges=[_SWITCH, _TWICE, _BACK, _TOGETHER, _TWO_GROUPS, _ALONE], cases=20
)
def check_ex_18a_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, edges)`: the side, 0 or 1, of each operator, at the least cost."""
    return _drawn(rng, MAX_OPERATORS)
