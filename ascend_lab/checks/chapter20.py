"""Checks of chapter 20: repair, a crossover of legal tilings, a search that beats random."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.measure import CubeMeasure
from ascend_lab.aoe.cube.table import CubeSpace
from ascend_lab.aoe.drive import Search, drive
from ascend_lab.aoe.search.exhaustive import random_order
from ascend_lab.aoe.space import Point, Space, TableSpace
from ascend_lab.checks.core import (
    DEFAULT_SEED,
    Case,
    CheckResult,
    check_behind_wall,
    check_property,
    raised,
    show,
)
from ascend_lab.checks.process import Tell, Verdict
from ascend_lab.chip import load_chip
from ascend_lab.kernels.gemm_schedule import GemmShape

SEEDS = 30
BUDGET = 150
SIZES = (1, 2, 4, 8, 16, 32)
FORCED = ((3, 16), (4, 64))
"""Options of which one must be chosen for 8: the larger is closer in ratio, then the smaller."""
STUDENT_95 = 2.045
"""97.5 % point of Student's t with 29 degrees of freedom."""


def check_ex_20_1(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(tilings, wanted)`: the legal point that keeps each wanted value it can.

    Decisions are taken in order; where the value is no option, the one of closest ratio is.
    """

    def draw(rng: np.random.Generator) -> Case:
        space = _space(rng)
        return {"tilings": space, "wanted": tuple(int(v) for v in rng.choice(SIZES, 4))}

    return check_property("ex_20_1", fn, _judge_repair, draw, cases=60, seed=seed)


def check_ex_20_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(tilings, mother, father, coins)`: a legal child of two legal parents.

    A decision takes the value of `mother` where its coin is true, else that of `father`; if that is
    no option the value of the other parent, and if neither is, the option closest to the first.
    """

    def draw(rng: np.random.Generator) -> Case:
        space = _space(rng)
        mother, father = space.sample(rng), space.sample(rng)
        coins = tuple(bool(p) for p in rng.integers(0, 2, 4))
        return {"tilings": space, "mother": mother, "father": father, "coins": coins}

    edges = [_forced(row) for row in FORCED]
    return check_property("ex_20_2", fn, _judge_child, draw, edge_cases=edges, cases=60, seed=seed)


def _forced(last: Sequence[int]) -> Case:
    """Return a crossing whose last decision wants 8, when only two other values are options."""
    mother, father = (1, 1, 1, 8), (1, 2, 2, 1)
    rows = [mother, father, *((1, 1, 2, value) for value in last)]
    space = TableSpace(("a", "b", "c", "d"), [list(column) for column in zip(*rows, strict=True)])
    coins = (True, True, False, True)
    return {"tilings": space, "mother": mother, "father": father, "coins": coins}


def _space(rng: np.random.Generator) -> TableSpace:
    """Return a space of four decisions among `SIZES`, with at most 30 legal points."""
    rows = rng.choice(SIZES, size=(30, 4))
    return TableSpace(("a", "b", "c", "d"), [[int(v) for v in column] for column in rows.T])


def _judge_repair(got: Any, case: Case) -> str | None:
    return _follows(got, case["tilings"], [(value,) for value in case["wanted"]])


def _judge_child(got: Any, case: Case) -> str | None:
    pairs = zip(case["mother"], case["father"], case["coins"], strict=True)
    return _follows(got, case["tilings"], [(a, b) if coin else (b, a) for a, b, coin in pairs])


def _follows(got: Any, space: Space, wishes: Sequence[tuple[int, ...]]) -> str | None:
    """Say where a point leaves its wishes, first one before second, nearest one else."""
    if not isinstance(got, tuple) or len(got) != len(wishes):
        return f"expected a tuple of {len(wishes)} values"
    for at, wish in enumerate(wishes):
        options = space.options(got[:at])
        if got[at] not in options:
            return f"expected decision {at} among {options}: {got[at]} is not legal there"
        kept = next((value for value in wish if value in options), None)
        if kept is not None and got[at] != kept:
            return f"expected decision {at} to be {kept}, which is legal there"
        nearest = min(abs(math.log(v / wish[0])) for v in options)
        if kept is None and abs(math.log(got[at] / wish[0])) > nearest + 1e-12:
            return f"expected decision {at} among {options} as close to {wish[0]} as can be"
    return None


@lru_cache(maxsize=1)
def product_costs() -> tuple[CubeSpace, NDArray[np.float64]]:
    """Return the space of a product of 256x256x256 on the 910A, and the bounds of all tilings."""
    measure = CubeMeasure(GemmShape(256, 256, 256), load_chip("Ascend910A"))
    space = measure.space()
    return space, Bounds(measure, space.genes).closed


def regrets(search: Callable[[], Search], seeds: Sequence[int]) -> NDArray[np.float64]:
    """Return log(best found / best of all) after `BUDGET` trials for each seed."""
    space, costs = product_costs()

    def cost(point: Point) -> float:
        return float(costs[space.row(point)])

    best = [drive(search(), space, cost, BUDGET, seed=seed).best.cost for seed in seeds]
    found: NDArray[np.float64] = np.log(np.array(best) / costs.min())
    return found


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of a mean of 30 values, by Student's t."""
    half = STUDENT_95 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


class _NoSearchError(Exception):
    """What a search gave that is no batch of points; says what was expected."""


def _watched(fn: Any) -> Search:
    """Return the same search, which says so when it yields anything but lists of points."""

    def search(
        space: Space, rng: np.random.Generator, start: Sequence[Point] = ()
    ) -> Generator[list[Point], list[float], None]:
        steps = fn(space, rng, start)
        if not hasattr(steps, "send"):
            raise _NoSearchError("expected a generator (use yield)")
        costs = None
        while True:
            try:
                batch = next(steps) if costs is None else steps.send(costs)
            except StopIteration:
                return
            if isinstance(batch, tuple) and not any(isinstance(v, tuple) for v in batch):
                raise _NoSearchError(f"expected a list of points, got the point {batch}")
            if not isinstance(batch, list) or not all(isinstance(p, tuple) for p in batch):
                raise _NoSearchError(f"expected a list of points, got {show(batch)}")
            costs = yield batch

    return search


def check_ex_20_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(tilings, rng, start)`: a search that ends below random order over 30 seeds.

    Both have the same seeds and 150 trials; the 95 % interval of the mean difference of
    log(best / optimum) must lie below zero.
    """
    seeds = [1000 * seed + i for i in range(SEEDS)]
    product_costs()  # kept here: what a check computes ends with it

    def run(tell: Tell) -> Verdict:
        def watched() -> Search:
            tell(SEEDS, "your search")
            return _watched(fn)

        try:
            mine = regrets(watched, seeds)
        except _NoSearchError as error:
            return False, str(error), SEEDS
        except Exception as error:
            return False, f"your search {raised(error)}", SEEDS
        tell(SEEDS, "random order")
        low, high = interval(mine - regrets(lambda: random_order, seeds))
        said = f"best costs relative to random order's, 95 % interval over {SEEDS} seeds: "
        said += f"{math.exp(low):.3f} to {math.exp(high):.3f}"
        return high < 0, said + ("" if high < 0 else ", expected an interval below 1"), SEEDS

    return check_behind_wall("ex_20_3", fn, run, seed)
