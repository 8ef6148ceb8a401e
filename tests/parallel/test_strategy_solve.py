"""Strategies: exact answers equal brute force, heuristics are allowed and never beat them."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from strategy_cases import BENCHMARK, DATA, EXAMPLE, best, problems

from ascend_lab.errors import ClusterError, UnsupportedError
from ascend_lab.parallel.strategy import (
    FORBIDDEN,
    Edge,
    Node,
    Problem,
    evaluate,
    greedy,
    read_problem,
    solve,
)
from ascend_lab.parallel.strategy.local import descend, landscape, search
from ascend_lab.parallel.strategy.problem import Reduced, reduce_problem

EMPTY = Problem("empty", (), (), 0)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_exact_equals_brute_force(problem: Problem) -> None:
    optimum = best(problem)
    if math.isinf(optimum):
        with pytest.raises(ClusterError):
            solve(problem, method="exact")
        return
    found = solve(problem, method="exact")
    again = evaluate(problem, found.strategies)
    assert found.proven and again.feasible
    assert (found.cost, found.lower_bound, found.cost) == (again.cost, optimum, optimum)
    assert found.peak_usage == again.peak_usage


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_heuristic_is_allowed_and_never_better_than_the_optimum(problem: Problem) -> None:
    optimum = best(problem)
    try:
        found = solve(problem, method="heuristic")
    except ClusterError:
        return
    assert evaluate(problem, found.strategies).feasible
    assert found.lower_bound <= optimum <= found.cost
    assert not found.proven or found.cost == optimum


@settings(max_examples=60, deadline=None)
@given(problems())
def test_reduction_keeps_the_optimum(problem: Problem) -> None:
    try:
        small = reduce_problem(problem)
    except ClusterError:
        assert math.isinf(best(problem))
        return
    assert set(small.costs) | {node for node, *_ in small.folded} == set(range(len(problem.nodes)))
    assert all(len(small.links[u]) == len({*small.links[u]} - {u}) for u in small.links)
    if not small.costs:  # everything folded: what is restored is optimal
        assert evaluate(problem, small.restore({})).cost == best(problem)


@cache
def benchmark() -> tuple[Problem, Reduced]:
    problem = read_problem(BENCHMARK)
    return problem, reduce_problem(problem)


def test_the_example_has_its_published_optimum() -> None:
    problem = read_problem(EXAMPLE)
    found = solve(problem)
    assert (found.cost, found.strategies, found.proven) == (445, (0, 0, 2, 1, 0), True)
    assert (found.peak_usage, found.usage_limit) == (50, 50)
    free = solve(replace(problem, usage_limit=None))
    assert (free.cost, free.proven) == (415, True)
    assert evaluate(problem, free.strategies).peak_usage > 50


def test_benchmark_b_is_solved_to_the_proven_optimum() -> None:
    problem, _ = benchmark()
    reference = json.loads((DATA / "reference_optimum_B.json").read_text("utf-8"))
    known = evaluate(problem, reference["solution"])
    assert (known.cost, known.feasible) == (532_843, True)
    found = solve(problem, method="exact")
    assert (found.cost, found.lower_bound, found.proven) == (532_843, 532_843, True)
    assert evaluate(problem, found.strategies).feasible


def test_heuristics_on_benchmark_b() -> None:
    problem, small = benchmark()
    few = search(small, sweeps=20)
    assert few == search(small, sweeps=20), "the same seed gives the same answer"
    assert few is not None
    told = evaluate(problem, small.restore(few))
    assert told.feasible and 532_843 <= told.cost < 100 * 532_843
    first = evaluate(problem, greedy(problem))
    assert not first.feasible and first.forbidden > 0


def test_no_time_still_gives_an_allowed_answer_and_a_bound() -> None:
    problem, _ = benchmark()
    found = solve(problem, time_limit_s=0.0)
    assert evaluate(problem, found.strategies).feasible
    assert not found.proven and found.lower_bound <= 532_843 <= found.cost
    assert found.gap > 0


def test_descent_stays_within_memory() -> None:
    # two nodes of which either may take the cheap, large strategy, but not both
    node = Node(0, 1, (5, 0), (1, 3))
    problem = Problem("pair", (node, node), (), 4)
    small = reduce_problem(problem)
    land = landscape(small, tuple(small.costs))
    end = descend(land, dict.fromkeys(small.costs, 0))
    assert sorted(end.values()) == [0, 1]
    assert solve(problem).cost == 5


def test_nodes_that_do_not_overlap_do_not_share_memory() -> None:
    early, late = Node(0, 2, (5, 0), (1, 3)), Node(2, 4, (5, 0), (1, 3))
    assert solve(Problem("turns", (early, late), (), 4)).cost == 0
    assert solve(Problem("never", (Node(3, 3, (1, 0), (0, 99)),), (), 4)).cost == 0


def test_problems_without_an_answer_are_refused() -> None:
    node = Node(0, 1, (1, 2), (5, 9))
    with pytest.raises(ClusterError, match="usage limit"):
        solve(Problem("large", (node,), (), 4))
    banned = Node(0, 1, (FORBIDDEN,), (0,))
    with pytest.raises(ClusterError, match="forbidden"):
        solve(Problem("banned", (banned,), (), None))
    # a triangle in which any two can agree, but never all three, and memory asks for it
    pair = Node(0, 1, (0, 0), (0, 1))
    differ = (FORBIDDEN, 0, 0, FORBIDDEN)
    edges = tuple(Edge(u, v, differ) for u, v in ((0, 1), (1, 2), (0, 2)))
    with pytest.raises(ClusterError):
        solve(Problem("triangle", (pair,) * 3, edges, 2), method="exact")


def test_an_empty_problem_costs_nothing() -> None:
    for method in ("exact", "heuristic"):
        found = solve(EMPTY, method=method)
        assert (found.cost, found.strategies, found.proven) == (0, (), True)


def test_without_scipy_the_heuristic_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_lab.parallel.strategy.exact.find_spec", lambda name: None)
    found = solve(read_problem(EXAMPLE))
    assert (found.cost, found.method) == (445, "messages")
    with pytest.raises(UnsupportedError, match="exact"):
        solve(read_problem(EXAMPLE), method="exact")
