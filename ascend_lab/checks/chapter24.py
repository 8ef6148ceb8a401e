"""Checks of chapter 24: the end of a split, a merge rule, few buckets, a case that fools a rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ascend_lab.aoe.gradient import AlphaBeta, Gradient, plan
from ascend_lab.aoe.gradient.baselines import mg_wfbp
from ascend_lab.aoe.gradient.exact import all_splits, end_s
from ascend_lab.aoe.gradient.rows import check_split, split_at, table_of
from ascend_lab.checks.core import (
    DEFAULT_SEED,
    Case,
    CheckResult,
    check_against,
    check_property,
)
from ascend_lab.errors import AscendLabError

WORSE = 1.5
"""What exercise 4 asks for: the rule's end / the best end."""
CLOSE = 1e-9


def rows_of(ready: Sequence[float], sizes: Sequence[float]) -> tuple[Gradient, ...]:
    """Return gradients from ready times and whole sizes."""
    pairs = zip(ready, sizes, strict=True)
    return tuple(Gradient(f"g{i}", float(r), int(s)) for i, (r, s) in enumerate(pairs))


def ends_at(
    ready: Sequence[float], sizes: Sequence[float], a: float, b: float, lasts: Any
) -> float:
    """Return when the buckets that end at `lasts` have been sent."""
    price = AlphaBeta(a, b).many
    return end_s(table_of(rows_of(ready, sizes)), price, split_at(list(lasts)))


def tail_of(
    ready: Sequence[float], sizes: Sequence[float], a: float, b: float, lasts: Any
) -> float:
    """Return how long after the last gradient the last bucket has been sent."""
    return ends_at(ready, sizes, a, b, lasts) - ready[-1]


def best_of(
    ready: Sequence[float], sizes: Sequence[float], a: float, b: float, most: int | None = None
) -> float:
    """Return the earliest end, by trying every split of at most `most` buckets."""
    return min(
        ends_at(ready, sizes, a, b, [last for _, last in split])
        for split in all_splits(len(ready), most)
    )


def _draw(rng: np.random.Generator, count: int) -> Case:
    gaps = rng.exponential(1.0, count)
    sizes = np.maximum(1, rng.lognormal(1.5, 1.5, count)).astype(int)
    return {
        "ready": [float(r) for r in np.cumsum(gaps)],
        "sizes": [int(s) for s in sizes],
        "a": float(rng.uniform(0.1, 3.0)),
        "b": float(rng.uniform(0.02, 0.3)),
    }


def check_ex_24_1(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(ready, sizes, a, b, lasts)`: the last bucket's end behind the last gradient."""

    def draw(rng: np.random.Generator) -> Case:
        count = int(rng.integers(1, 9))
        cuts = [i for i in range(count - 1) if rng.random() < 0.5]
        return {**_draw(rng, count), "lasts": [*cuts, count - 1]}

    edge = {"ready": [1.0, 2.0], "sizes": [3, 4], "a": 10.0, "b": 1.0}
    edges = [{**edge, "lasts": [1]}, {**edge, "lasts": [0, 1]}]
    return check_against("ex_24_1", fn, tail_of, draw, rel_tol=CLOSE, edge_cases=edges, seed=seed)


def check_ex_24_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(ready, sizes, a, b)`: the last gradients of the buckets by the merge rule."""

    def draw(rng: np.random.Generator) -> Case:
        return _draw(rng, int(rng.integers(1, 12)))

    edges = [
        {"ready": [0.0, 0.9, 1.8], "sizes": [10, 0, 0], "a": 1.0, "b": 1.0},
        {"ready": [0.0, 5.0], "sizes": [1, 1], "a": 1.0, "b": 1.0},
    ]
    return check_against("ex_24_2", fn, merged, draw, edge_cases=edges, seed=seed)


def merged(ready: Sequence[float], sizes: Sequence[float], a: float, b: float) -> list[int]:
    """Return the buckets' last gradients by the released MG-WFBP rule."""
    split = mg_wfbp(table_of(rows_of(ready, sizes)), AlphaBeta(a, b))
    return [last for _, last in split]


def check_ex_24_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(ready, sizes, a, b, most)`: last gradients of the best split in `most` buckets.

    Compared with every split of up to 12 gradients; any split of the earliest end passes.
    """

    def draw(rng: np.random.Generator) -> Case:
        case = _draw(rng, int(rng.integers(1, 11)))
        return {**case, "most": int(rng.integers(1, 5))}

    def judge(got: Any, case: Case) -> str | None:
        given = case["ready"], case["sizes"], case["a"], case["b"]
        try:
            lasts = [int(last) for last in got]
            check_split(split_at(lasts), len(case["ready"]))
        except (TypeError, ValueError, IndexError, AscendLabError):
            return "expected the last gradient of every bucket, in ascending order"
        if len(lasts) > case["most"]:
            return f"expected at most {case['most']} buckets"
        end, best = ends_at(*given, lasts), best_of(*given, case["most"])
        if end > best * (1 + CLOSE):
            return f"which ends at {end:.3f}, expected {best:.3f}"
        return None

    edge = {"ready": [0.0, 1.0, 2.0], "sizes": [1, 1, 10], "a": 1.0, "b": 1.0}
    edges = [{**edge, "most": 1}, {**edge, "most": 3}]
    return check_property("ex_24_3", fn, judge, draw, edge_cases=edges, cases=30, seed=seed)


def check_ex_24_4(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn()`: (ready, sizes, a, b) for which the merge rule ends 1.5 times as late."""

    def judge(got: Any, case: Case) -> str | None:
        try:
            ready, sizes, a, b = got
            if any(size != int(size) for size in sizes):
                return "expected sizes in whole bytes"
            rows, cost = rows_of(ready, sizes), AlphaBeta(float(a), float(b))
            best = plan(rows, cost)
        except (TypeError, ValueError, AscendLabError) as error:
            return f"expected ready times, whole sizes, a and b ({error})"
        if any(x > y for x, y in pairwise(ready)):
            return "expected ready times in ascending order"
        times = best.gain("mg_wfbp") + 1
        if times < WORSE:
            return f"for which the rule ends {times:.2f} times as late, expected {WORSE} times"
        return None

    def draw(rng: np.random.Generator) -> Case:
        return {}

    return check_property("ex_24_4", fn, judge, draw, cases=1, seed=seed)
