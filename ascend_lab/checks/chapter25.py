"""Checks of chapter 25: credit of two techniques, operators that no longer matter, a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ascend_lab.checks.core import DEFAULT_SEED, Case, CheckResult, check_against

Row = tuple[str, int, int, int]
"""An operator: name, how often it occurs, cycles, and cycles that no schedule beats."""


def check_ex_25_1(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(none, a, b, both)`: the factors credited to a and b, from four times."""

    def draw(rng: np.random.Generator) -> Case:
        none = float(rng.uniform(10, 1000))
        a, b = (none / float(f) for f in rng.uniform(0.8, 5, 2))
        return {"none": none, "a": a, "b": b, "both": none / float(rng.uniform(1, 12))}

    edges = [
        {"none": 8.0, "a": 4.0, "b": 2.0, "both": 1.0},
        {"none": 8.0, "a": 2.0, "b": 2.0, "both": 2.0},
    ]
    return check_against(
        "ex_25_1", fn, two_credits, draw, rel_tol=1e-9, edge_cases=edges, seed=seed
    )


def two_credits(none: float, a: float, b: float, both: float) -> tuple[float, float]:
    """Return the geometric mean of what each one gains first, and behind the other."""
    return math.sqrt(none / a * b / both), math.sqrt(none / b * a / both)


def check_ex_25_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(operators, least)`: names of those whose perfect tuning gains less than `least`.

    `operators` are rows (name, count, cycles, bound); a gain is (before - after) / after of the
    whole network, if that operator alone reached its bound.
    """

    def draw(rng: np.random.Generator) -> Case:
        rows = []
        for i in range(int(rng.integers(2, 12))):
            cycles = int(rng.integers(100, 100_000))
            bound = int(cycles * rng.uniform(0.3, 1.0))
            rows.append((f"op{i}", int(rng.integers(1, 20)), cycles, bound))
        return {"operators": rows, "least": float(rng.choice([0.001, 0.01, 0.1]))}

    edges = [
        {"operators": [("a", 1, 1000, 500), ("b", 1, 1000, 1000)], "least": 0.01},
        {"operators": [("a", 10, 100, 50), ("b", 1, 1000, 500)], "least": 0.3},
        {"operators": [("a", 1, 1000, 910), ("b", 9, 100, 100)], "least": 0.0485},
    ]
    return check_against("ex_25_2", fn, no_longer_matter, draw, edge_cases=edges, seed=seed)


def no_longer_matter(operators: Sequence[Row], least: float) -> list[str]:
    """Return the operators whose perfect tuning would gain the network less than `least`."""
    total = sum(count * cycles for _, count, cycles, _ in operators)
    found = []
    for name, count, cycles, bound in operators:
        saved = count * (cycles - bound)
        if saved / (total - saved) < least:
            found.append(name)
    return found


def check_ex_25_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(times, limit)`: the batch of the highest rate within a limit of latency, or None.

    `times` maps batches to milliseconds; of equal rates the smaller batch.
    """

    def draw(rng: np.random.Generator) -> Case:
        batches = sorted({int(b) for b in rng.integers(1, 65, 6)})
        times = {b: float(rng.uniform(0.5, 2) * (5 + b)) for b in batches}
        return {"times": times, "limit": float(rng.uniform(3, 90))}

    edges = [
        {"times": {1: 10.0, 2: 20.0}, "limit": 50.0},
        {"times": {1: 10.0, 8: 50.0, 16: 120.0}, "limit": 200.0},
        {"times": {4: 10.0}, "limit": 10.0},
        {"times": {4: 10.0}, "limit": 9.0},
    ]
    return check_against("ex_25_3", fn, best_batch, draw, edge_cases=edges, seed=seed)


def best_batch(times: Mapping[int, float], limit: float) -> int | None:
    """Return the batch with most images a second among those within the limit; None if none is."""
    within = [batch for batch, ms in times.items() if ms <= limit]
    return max(within, key=lambda batch: (batch / times[batch], -batch), default=None)
