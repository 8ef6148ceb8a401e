"""Checks of chapter 21: number of slices, rows of a halo, the cheapest chain, beating the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from ascend_lab.aoe.subgraph import Region, SlicePlan, prepared
from ascend_lab.aoe.subgraph.tune import plan_time
from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Graph, GraphBuilder
from ascend_lab.lab.checks import core as ex

Costs = Mapping[tuple[int, int], float]
"""Cost of units first .. stop-1 as one segment."""
UNITS = 6
EYES_CHIP = "Ascend310P3"


def _fit(rows: int, halo: int, row_bytes: int, weights: int, capacity: int) -> ex.Case:
    given = rows, halo, row_bytes, weights, capacity
    return dict(zip(("rows", "halo", "row_bytes", "weights", "capacity"), given, strict=True))


def least_slices(rows: int, halo: int, row_bytes: int, weights: int, capacity: int) -> int:
    """Return the number of slices by trying all."""
    for n in range(1, rows + 1):
        if weights + min(rows, -(-rows // n) + halo) * row_bytes <= capacity:
            return n
    return 0


def chain_rows(layers: Sequence[tuple[int, int]], rows: int) -> list[int]:
    """Return the rows each tensor of a chain needs, the input first."""
    found = [rows]
    for window, stride in reversed(layers):
        found.insert(0, (found[0] - 1) * stride + window)
    return found


def every_chain(count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut a chain: tuples of cut points with 0 and `count`."""
    for size in range(count):
        for inner in combinations(range(1, count), size):
            yield (0, *inner, count)


def chain_cost(cuts: Sequence[int], cost: Costs) -> float:
    """Return the sum of the costs of the segments between cut points."""
    return sum(cost[a, b] for a, b in pairwise(cuts))


def _judge_chain(got: Any, case: ex.Case) -> str | None:
    count, cost = case["count"], case["cost"]
    if not isinstance(got, list | tuple) or not set(every_chain(count)) & {tuple(got)}:
        return f"expected cut points from 0 to {count}, each larger than the one before"
    best = min(chain_cost(cuts, cost) for cuts in every_chain(count))
    found = chain_cost(got, cost)
    return None if found == best else f"which costs {found:g}, expected a chain that costs {best:g}"


def check_ex_21_4(fn: Any, *, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Check `fn()`: regions under which the chapter's network beats the tuner's plan.

    The function returns a list of `Region`s of `eyes()`, prepared for the Ascend310P3.
    """
    graph, limit_s = _opponent()

    def judge(got: Any, case: ex.Case) -> str | None:
        if not isinstance(got, list | tuple) or not all(isinstance(r, Region) for r in got):
            return "expected a list of regions"
        try:
            time_s = plan_time(graph, SlicePlan(tuple(got)), load_chip(EYES_CHIP))
        except AscendLabError as error:
            return f"expected regions that can be sliced: {error}"
        told = f"{time_s * 1e6:.1f} µs, expected less than {limit_s * 1e6:.1f}"
        return None if time_s < limit_s else f"which take {told}"

    return ex.check_property("ex_21_4", fn, judge, lambda rng: {}, cases=1, seed=seed)


def eyes() -> Graph:
    """Return the chapter's network: four 3x3 convolutions of 16 channels on 7 images, a pooling."""
    net = GraphBuilder("eyes", "fp16")
    x, channels = net.input("x", (7, 3, 224, 224)), 3
    for i in range(4):
        drawn = np.random.default_rng(i).integers(-1, 2, (16, channels, 3, 3))
        weight = net.constant(drawn.astype(np.float16))
        x = net.conv2d(x, weight, pad=1, name=f"conv{i + 1}")
        x, channels = net.clip(x, low=-3.0, high=3.0, name=f"clip{i + 1}"), 16
    net.output(net.max_pool2d(x, kernel=4, stride=4, name="pool"))
    return net.build()


@lru_cache(maxsize=1)
def _opponent() -> tuple[Graph, float]:
    """Return the prepared network, and the seconds of the tuner's plan: 4 + 3 images."""
    chip = load_chip(EYES_CHIP)
    graph = prepared(eyes(), chip)
    names = [node.name for node in graph.nodes]
    plan = SlicePlan((Region(names[0], names[-1], "batch", (4, 3)),))
    return graph, plan_time(graph, plan, chip)


@ex.against(
    least_slices,
    edges=[
        _fit(16, 0, 10, 0, 160),
        _fit(16, 4, 10, 0, 159),
        _fit(7, 0, 10, 5, 45),
        _fit(8, 4, 10, 0, 40),
        _fit(8, 0, 10, 5, 10),
    ],
)
def check_ex_21_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(rows, halo, row_bytes, weights, capacity)`: the least number of slices that fits.

    A slice of n has at most ceil(rows / n) rows and needs `halo` more, but never more than all;
    `row_bytes` are alive for each row, beside the weights. 0 if single rows do not fit.
    """
    rows, row_bytes = int(rng.integers(1, 60)), int(rng.integers(1, 50))
    weights = int(rng.integers(0, 200))
    room = weights + int(rng.integers(0, 2 * rows * row_bytes))
    return _fit(rows, int(rng.integers(0, 7)), row_bytes, weights, room)


@ex.against(chain_rows, edges=ex.rows("layers rows", ([(1, 1)], 3), ([(3, 1), (4, 4)], 14)))
def check_ex_21_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(layers, rows)`: rows of the input and of every result for `rows` of the last.

    `layers` are pairs (window, stride), the first layer first; padding is not counted.
    """
    count = int(rng.integers(1, 6))
    layers = [(int(rng.integers(1, 8)), int(rng.integers(1, 4))) for _ in range(count)]
    return {"layers": layers, "rows": int(rng.integers(1, 30))}


@ex.judged(
    _judge_chain,
    edges=ex.rows(
        "count cost",
        (1, {(0, 1): 4.0}),
        (UNITS, {(i, j): float(100 - (j - i) ** 2) for i, j in combinations(range(UNITS + 1), 2)}),
    ),
    cases=60,
)
def check_ex_21_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(count, cost)`: cut points 0 .. count that add up to the least cost.

    `cost[i, j]` is the cost of units i .. j-1 together; all 32 chains of six units are tried.
    """
    ends = combinations(range(UNITS + 1), 2)
    return {"count": UNITS, "cost": {e: float(rng.integers(1, 60)) for e in ends}}
