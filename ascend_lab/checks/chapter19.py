"""Checks of chapter 19: minimum-time backup, a pruning rule that is safe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ascend_lab.aoe.space import Point, Space
from ascend_lab.aoe.vector import VectorMeasure
from ascend_lab.checks.core import DEFAULT_SEED, Case, CheckResult, check_against, check_property
from ascend_lab.chip import load_chip
from ascend_lab.dsl import placeholder, vrelu

SHAPES = ((3, 200), (12, 512), (5, 96), (7, 112), (2, 600), (9, 80), (6, 1000), (4, 300))
"""Sizes of elementwise operators whose spaces the pruning rule is proved on."""
REMOVED = 0.75
"""Share of the schedules that the rule has to remove."""
Tree = dict[Point, tuple[int, float]]
"""Prefix -> (visits, least cost below)."""


def check_ex_19_2(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(tree, point, cost)`: the tree after one more trial, backed up by the minimum.

    The tree is a dictionary from prefixes to (visits, least cost below); prefixes that are new
    enter with one visit.
    """
    first: Case = {"tree": {}, "point": ("A", 1), "cost": 9.0}
    worse: Case = {"tree": {(): (1, 5.0), ("A",): (1, 5.0)}, "point": ("A",), "cost": 7.0}
    return check_against(
        "ex_19_2", fn, _backed_up, _draw_tree, edge_cases=[first, worse], seed=seed
    )


def _backed_up(tree: Tree, point: Point, cost: float) -> Tree:
    grown = dict(tree)
    for depth in range(len(point) + 1):
        visits, best = grown.get(point[:depth], (0, math.inf))
        grown[point[:depth]] = (visits + 1, min(best, cost))
    return grown


def _draw_tree(rng: np.random.Generator) -> Case:
    def point() -> Point:
        return ("ABC"[rng.integers(3)], *(int(v) for v in rng.integers(1, 3, 2)))

    tree: Tree = {}
    for _ in range(int(rng.integers(1, 6))):
        tree = _backed_up(tree, point(), float(rng.integers(10, 99)))
    return {"tree": tree, "point": point(), "cost": float(rng.integers(10, 99))}


def check_ex_19_3(fn: Any, *, seed: int = DEFAULT_SEED) -> CheckResult:
    """Check `fn(name, options)`: the values of a decision worth keeping.

    On elementwise operators of the Toy chip, all schedules are enumerated: a best one must stay,
    and at least three quarters of the schedules must go.
    """

    def kept(shape: tuple[int, int]) -> list[Point]:
        return pruned(small_space(shape)[0], fn)

    for shape in SHAPES:
        small_space(shape)  # kept here: what a check computes ends with it
    cases: list[Case] = [{"shape": shape} for shape in SHAPES]
    tested = kept if callable(fn) else fn
    found = check_property(
        "ex_19_3", tested, _judge_kept, lambda _: {}, edge_cases=cases, cases=0, seed=seed
    )
    return replace(found, subject=fn)


def pruned(space: Space, keep: Any) -> list[Point]:
    """Return the points that a rule leaves; values it makes up are no options and stay out."""
    points: list[Point] = [()]
    for name in space.names:
        found = []
        for prefix in points:
            options = space.options(prefix)
            left = tuple(keep(name, options))
            found += [(*prefix, value) for value in options if value in left]
        points = found
    return points


@lru_cache(maxsize=len(SHAPES))
def small_space(shape: tuple[int, int]) -> tuple[Space, dict[Point, float]]:
    """Return the space of relu on the Toy chip, and the cycles of all its schedules."""
    x = placeholder(shape, "fp16", "x")
    measure = VectorMeasure((vrelu(x),), load_chip("Toy"))
    space = measure.space()
    return space, {point: measure(point) for point in space.points()}


def _judge_kept(got: Sequence[Point], case: Case) -> str | None:
    _, costs = small_space(case["shape"])
    if not got:
        return "expected some schedules to stay"
    best, least = min(costs[p] for p in got), min(costs.values())
    if best > least:
        return f"expected a schedule of {least:,.0f} cycles to stay: the best left has {best:,.0f}"
    if len(got) > (1 - REMOVED) * len(costs):
        return f"expected at most a quarter of the {len(costs)} schedules to stay, {len(got)} do"
    return None
