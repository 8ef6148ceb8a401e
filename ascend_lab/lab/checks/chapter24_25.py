"""Checks of chapters 24 and 25.

24: the end of a split, a merge rule, few buckets, a case that fools a rule.
25: credit of two techniques, operators that no longer matter, a batch, trials shared out.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected at most 3 buckets".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.aoe.gradient import AlphaBeta, Gradient, plan, planning, splits
from ascend_lab.cluster.buckets import checked
from ascend_lab.lab.checks import core as ex

WORSE = 1.5
"""Exercise 24.4 asks for a case in which the rule's end is this many times the best end."""
CLOSE = 1e-9
Floats = Sequence[float]


def toy_rows(ready: Floats, sizes: Floats) -> tuple[Gradient, ...]:
    """Return gradients g0, g1, ... from ready times in seconds and whole sizes in bytes."""
    pairs = zip(ready, sizes, strict=True)
    return tuple(Gradient(f"g{i}", float(r), int(s)) for i, (r, s) in enumerate(pairs))


def ends_at(ready: Floats, sizes: Floats, a: float, b: float, lasts: Any) -> float:
    """Return when the buckets that end at `lasts` have been sent."""
    table = splits.table_of(toy_rows(ready, sizes))
    return splits.end_s(table, AlphaBeta(a, b).many, splits.split_at(list(lasts)))


def best_of(ready: Floats, sizes: Floats, a: float, b: float, most: int | None = None) -> float:
    """Return the earliest end, by trying every split of at most `most` buckets."""
    return min(
        ends_at(ready, sizes, a, b, [last for _, last in split])
        for split in splits.all_splits(len(ready), most)
    )


def _draw(rng: np.random.Generator, count: int) -> ex.Case:
    """Return ready times and sizes of gradients, and the cost a + b size of an all-reduce."""
    ready = np.cumsum(rng.exponential(1.0, count)).tolist()
    sizes = np.maximum(1, rng.lognormal(1.5, 1.5, count)).astype(int).tolist()
    costs = ex.drawn(rng, a=ex.between(0.1, 3.0), b=ex.between(0.02, 0.3))
    return {"ready": ready, "sizes": sizes, **costs}


def merged(ready: Floats, sizes: Floats, a: float, b: float) -> list[int]:
    """Return the buckets' last gradients by the released MG-WFBP rule."""
    split = planning.mg_wfbp(splits.table_of(toy_rows(ready, sizes)), AlphaBeta(a, b))
    return [last for _, last in split]


# -- chapter 25 ------------------------------------------------------------------------------------
Row = tuple[str, int, int, int]
"""An operator: name, how often it occurs, cycles, and cycles that no schedule beats."""


def two_credits(none: float, a: float, b: float, both: float) -> tuple[float, float]:
    """Return for each technique the geometric mean of its gain alone and on top of the other."""
    return math.sqrt(none / a * b / both), math.sqrt(none / b * a / both)


def no_longer_matter(operators: Sequence[Row], least: float) -> list[str]:
    """Return the operators whose perfect tuning would gain the network less than `least`."""
    total = sum(count * cycles for _, count, cycles, _ in operators)
    saved_cycles = {name: count * (cycles - bound) for name, count, cycles, bound in operators}
    return [name for name, saved in saved_cycles.items() if saved / (total - saved) < least]


def best_batch(times: Mapping[int, float], limit: float) -> int | None:
    """Return the batch with most images a second among those within the limit; None if none is."""
    within = [batch for batch, ms in times.items() if ms <= limit]
    return max(within, key=lambda batch: (batch / times[batch], -batch), default=None)


TWO_GRADIENTS = {"ready": [1.0, 2.0], "sizes": [3, 4], "a": 10.0, "b": 1.0}


@ex.against(
    lambda ready, sizes, a, b, lasts: ends_at(ready, sizes, a, b, lasts) - ready[-1],
    edges=[{**TWO_GRADIENTS, "lasts": [1]}, {**TWO_GRADIENTS, "lasts": [0, 1]}],
    rel_tol=CLOSE,
)
def check_ex_24_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(ready, sizes, a, b, lasts)`: the last bucket's end behind the last gradient."""
    count = int(rng.integers(1, 9))
    cuts = [i for i in range(count - 1) if rng.random() < 0.5]
    return {**_draw(rng, count), "lasts": [*cuts, count - 1]}


@ex.against(
    merged,
    edges=[
        ([0.0, 0.9, 1.8], [10, 0, 0], 1.0, 1.0),
        ([0.0, 5.0], [1, 1], 1.0, 1.0),
        ([0.0, 1.0], [1, 1], 1.0, 1.0),
        # The second joins, so the first bucket starts at 0.75 and is sent at 3.75; the last joins.
        ([0.0, 0.75, 2.0, 4.5], [1, 1, 1, 1], 1.0, 1.0),
    ],
)
def check_ex_24_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(ready, sizes, a, b)`: the last gradients of the buckets by the merge rule."""
    return _draw(rng, int(rng.integers(1, 12)))


@dataclass(frozen=True, slots=True)
class Stairs:
    """Seconds of an all-reduce: a startup, a rate, and a jump every so many bytes."""

    a: float
    b: float
    each: int
    jump: float

    def __call__(self, size: Any) -> Any:
        """Return the seconds for a size in bytes, or for many."""
        return self.a + self.b * size + self.jump * (size // self.each)

    many = __call__


def _judge_split(got: Any, case: ex.Case) -> str | None:
    """Judge a split into at most `most` buckets by the time at which the last one is sent."""
    table = splits.table_of(toy_rows(case["ready"], case["sizes"]))
    price = case["cost"].many
    try:
        lasts = [int(last) for last in got]
        checked(splits.split_at(lasts), len(case["ready"]))
    except (TypeError, ValueError, IndexError, errors.AscendLabError):
        return "expected the last gradient of every bucket, in ascending order"
    if len(lasts) > case["most"]:
        return f"expected at most {case['most']} buckets"
    end = splits.end_s(table, price, splits.split_at(lasts))
    best = splits.best_split(table, price, case["most"])[1]
    return f"which ends at {end:.3f}, expected {best:.3f}" if end > best * (1 + CLOSE) else None


def _tuned(rng: ex.Rng, count: int, most: int) -> ex.Case:
    """Draw gradients, a cost that may jump, and a number of buckets."""
    case = _draw(rng, count)
    jump = float(rng.choice([0.0, 2.0]))
    cost = Stairs(case["a"], case["b"], int(rng.integers(5, 40)), jump)
    return {"ready": case["ready"], "sizes": case["sizes"], "cost": cost, "most": most}


THREE_GRADIENTS = {"ready": [0.0, 1.0, 2.0], "sizes": [1, 1, 10], "cost": Stairs(1.0, 1.0, 99, 0.0)}


@ex.judged(
    _judge_split,
    edges=[
        *({**THREE_GRADIENTS, "most": most} for most in (1, 2, 3, 9)),
        {**THREE_GRADIENTS, "cost": Stairs(0.0, 0.1, 2, 9.0), "most": 3},
        _tuned(np.random.default_rng(0), 60, 8),
    ],
    cases=30,
)
def check_ex_24_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(ready, sizes, cost, most)`: last gradients of the best split in `most` buckets."""
    return _tuned(rng, int(rng.integers(1, 11)), int(rng.integers(1, 5)))


@ex.judged(cases=1)
def check_ex_24_4(got: Any, case: ex.Case) -> str | None:
    """Check `fn()`: (ready, sizes, a, b) for which the merge rule ends 1.5 times as late."""
    try:
        ready, sizes, a, b = got
        if any(size != int(size) for size in sizes):
            return "expected sizes in whole bytes"
        rows = toy_rows(ready, sizes)
        cost = AlphaBeta(float(a), float(b))
        best = plan(rows, cost)
    except (TypeError, ValueError, errors.AscendLabError) as error:
        return f"expected ready times, whole sizes, a and b ({error})"
    if any(x > y for x, y in pairwise(ready)):
        return "expected ready times in ascending order"
    ratio = best.gain("mg_wfbp") + 1
    if ratio < WORSE:
        return f"for which the rule ends {ratio:.2f} times as late, expected {WORSE} times"
    return None


@ex.against(two_credits, edges=[(8.0, 4.0, 2.0, 1.0), (8.0, 2.0, 2.0, 2.0)], rel_tol=1e-9)
def check_ex_25_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(none, a, b, both)`: the factors credited to a and b, from four times."""
    none = float(rng.uniform(10, 1000))
    a, b = (none / float(f) for f in rng.uniform(0.8, 5, 2))
    return {"none": none, "a": a, "b": b, "both": none / float(rng.uniform(1, 12))}


@ex.against(
    no_longer_matter,
    edges=[
        ([("a", 1, 1000, 500), ("b", 1, 1000, 1000)], 0.01),
        ([("a", 10, 100, 50), ("b", 1, 1000, 500)], 0.3),
        ([("a", 1, 1000, 910), ("b", 9, 100, 100)], 0.0485),
        ([("a", 1, 100, 50), ("b", 1, 50, 50)], 0.5),
    ],
)
def check_ex_25_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(operators, least)`: names of those whose perfect tuning gains less than `least`."""
    rows = []
    for i in range(int(rng.integers(2, 12))):
        cycles = int(rng.integers(100, 100_000))
        bound = int(cycles * rng.uniform(0.3, 1.0))
        rows.append((f"op{i}", int(rng.integers(1, 20)), cycles, bound))
    return {"operators": rows, "least": float(rng.choice([0.001, 0.01, 0.1]))}


@ex.against(
    best_batch,
    edges=[
        ({1: 10.0, 2: 20.0}, 50.0),
        ({2: 20.0, 1: 10.0}, 50.0),
        ({1: 10.0, 8: 50.0, 16: 120.0}, 200.0),
        ({4: 10.0}, 10.0),
        ({4: 10.0}, 9.0),
    ],
)
def check_ex_25_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, limit)`: the batch of the highest rate within a limit of time, or None."""
    batches = sorted({int(b) for b in rng.integers(1, 65, 6)})
    times = {b: float(rng.uniform(0.5, 2) * (5 + b)) for b in batches}
    return {"times": times, "limit": float(rng.uniform(3, 90))}


Network = tuple[list[tuple[int, float, float]], list[list[float]]]
"""Operators as (count, cycles, bound), and the fewest cycles of each after 0, 1, ... trials."""
TRIALS = 6
"""Trials that a budget has for each operator."""
CLOSED = 0.9
"""The share of the distance between an even split and the best that an answer has to close."""


def _tuned_network(rng: ex.Rng) -> Network:
    """Return operators whose fewest cycles fall, ever more slowly, with the trials."""
    operators = []
    curves = []
    curve: dict[str, Any] = {
        "bound": ex.between(5, 500),
        "spread": (0, 0.05, 0.3, 1),
        "rate": ex.between(0.5, 0.95),
    }
    for _ in range(int(rng.integers(4, 13))):
        bound, spread, rate = ex.drawn(rng, **curve).values()
        reach = bound * rng.choice([1.0, 1.05, 1.3])
        fewest = reach * (1 + spread * rate ** np.arange(TRIALS * 12 + 1))
        operators.append((int(rng.integers(1, 25)), float(fewest[0]), float(bound)))
        curves.append(fewest.tolist())
    return operators, curves


def _with_measure(fn: Any) -> Any:
    """Return a function that gives `fn` a measurement, and returns the trials of each operator."""

    def spent(networks: Sequence[Network]) -> list[list[int]]:
        trials_of_networks = []
        for operators, curves in networks:
            trials = [0] * len(operators)
            budget = TRIALS * len(operators)

            def measure(i: int, trials: list[int] = trials, budget: int = budget) -> float:
                if sum(trials) == budget:
                    raise IndexError(f"{budget} trials are spent")
                trials[i] += 1
                return curves[i][trials[i]]  # noqa: B023

            fn(list(operators), measure, budget)
            trials_of_networks.append(trials)
        return trials_of_networks

    return spent


def _hindsight(network: Network, most: int) -> float:
    """Return the least sum by any split: gains shrink, so the largest are taken one by one."""
    operators, curves = network
    gains = []
    for (count, _, _), curve in zip(operators, curves, strict=True):
        gains += [count * (cycles - next_cycles) for cycles, next_cycles in pairwise(curve)]
    largest_gains = sorted(gains, reverse=True)[:most]
    return sum(count * cycles for count, cycles, _ in operators) - sum(largest_gains)


@ex.judged(
    cases=3, wrap=_with_measure, networks=lambda rng: [_tuned_network(rng) for _ in range(20)]
)
def check_ex_25_4(got: Any, case: ex.Case) -> str | None:
    """Check `fn(operators, measure, trials)`: trials shared out nearly as well as in hindsight."""
    even_distance = 0.0
    distance = 0.0
    for network, trials in zip(case["networks"], got, strict=True):
        best = _hindsight(network, TRIALS * len(trials))
        even_distance += _total_cycles(network, [TRIALS] * len(trials)) / best - 1
        distance += _total_cycles(network, trials) / best - 1
    closed = 1 - distance / even_distance
    if closed < CLOSED:
        return f"which closes {math.floor(1000 * closed) / 10}% of the distance, expected 90%"
    return None


def _total_cycles(network: Network, trials: Sequence[int]) -> float:
    """Return the cycles of a network after so many trials of each operator."""
    operators, curves = network
    rows = zip(operators, curves, trials, strict=True)
    return sum(count * curve[n] for (count, _, _), curve, n in rows)
