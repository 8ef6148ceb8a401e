"""Every search on spaces small enough to know all about."""

import math

import numpy as np
import pytest
import search_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import SEARCHES, BranchAndBound, Genetic, Mcts, search_named, tree_of
from ascend_lab.aoe.search.genetic import Surrogate, scaled
from ascend_lab.aoe.space import TableSpace
from ascend_lab.errors import InputError

SPACES = {"table": cases.table(), "aliases": cases.Triangle()}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("name", SEARCHES)
def test_the_full_budget_finds_the_optimum_and_ends(name, space):
    for seed in range(3):
        trace = drive(SEARCHES[name], space, cases.cost, 1000, seed=seed)
        tried = [space.key(t.point) for t in trace.trials]
        assert trace.end == "exhausted"
        assert len(set(tried)) == len(tried) and set(tried) == cases.keys(space)
        assert trace.best.cost == cases.optimum(space)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_space_that_cannot_be_counted_is_searched_to_the_budget(name):
    space = cases.Triangle(counted=False)
    trace = drive(SEARCHES[name], space, cases.cost, 25, seed=1)
    tried = [space.key(t.point) for t in trace.trials]
    assert len(set(tried)) == len(tried) == 25 and trace.end == "budget"


@pytest.mark.parametrize("budget", [1, 7, 20])
@pytest.mark.parametrize("name", SEARCHES)
def test_the_budget_counts_candidates(name, budget):
    trace = drive(SEARCHES[name], SPACES["table"], cases.cost, budget, seed=2)
    assert len(trace.trials) == budget and trace.end == "budget"
    assert [t.number for t in trace.trials] == list(range(budget))


@pytest.mark.parametrize("name", SEARCHES)
def test_a_seed_fixes_the_trace_and_another_changes_it(name):
    space = SPACES["table"]
    first, again, other = (drive(SEARCHES[name], space, cases.cost, 20, seed=s) for s in (5, 5, 6))
    assert first == again
    if name not in ("exhaustive", "branch-and-bound"):
        assert first.trials != other.trials


@pytest.mark.parametrize("name", SEARCHES)
def test_the_points_to_start_with_come_first_and_are_made_legal(name):
    space, start = SPACES["table"], [(4, 3, "y"), (2, 3, "z"), (4, 3, "y")]
    trace = drive(SEARCHES[name], space, cases.cost, 6, start=start)
    legal = [t.point for t in trace.trials][:2]
    assert legal[0] == (4, 3, "y") and legal[1][0] == 2 and legal[1] != (2, 3, "z")


@pytest.mark.parametrize("name", SEARCHES)
def test_failures_cost_a_trial_and_mislead_no_search(name):
    space = SPACES["table"]
    trace = drive(SEARCHES[name], space, cases.failing, 1000, seed=3)
    good = [p for p in space.points() if p[0] not in (4, 8)]
    assert trace.best.cost == min(map(cases.cost, good))
    assert len(trace.failures) == space.size - len(good)
    nothing = drive(SEARCHES[name], space, cases.nothing_runs, 1000, seed=3)
    assert len(nothing.failures) == space.size and nothing.end == "exhausted"


@pytest.mark.parametrize("name", SEARCHES)
def test_costs_that_are_all_equal_or_zero_or_no_numbers(name):
    space = SPACES["table"]
    for measure in (lambda p: 0.0, lambda p: 7.0, cases.not_a_number):
        trace = drive(SEARCHES[name], space, measure, 1000, seed=1)
        assert len(trace.trials) == space.size and math.isfinite(trace.best.cost)


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_small_table_is_searched_to_its_end(data):
    points = data.draw(
        st.lists(st.tuples(*[st.integers(0, 3)] * 3), unique=True, min_size=1, max_size=12)
    )
    costs = {p: data.draw(st.sampled_from([1.0, 2.0, 5.0, math.inf])) for p in points}
    space = TableSpace(("a", "b", "c"), list(zip(*points, strict=True)))
    for search in SEARCHES.values():
        trace = drive(search, space, costs.__getitem__, 50)
        assert {t.point: t.cost for t in trace.trials} == costs


def test_names_of_searches():
    assert search_named("GA") is SEARCHES["genetic"]
    assert search_named("iterated_local_search") is SEARCHES["iterated-local"]
    with pytest.raises(InputError, match="exhaustive, random"):
        search_named("gradient")


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_branch_and_bound_proves_the_optimum_without_trying_all(space):
    search = BranchAndBound(cases.bound)
    trace = drive(search, space, cases.cost, 1000)
    assert trace.end == "exhausted" and search.proven
    assert trace.best.cost == cases.optimum(space) == search.lower_bound
    assert len(trace.trials) < len(cases.keys(space))


def test_branch_and_bound_that_is_cut_short_gives_a_bound_but_no_proof():
    space, search = SPACES["aliases"], BranchAndBound(cases.bound)
    needed = len(drive(search, space, cases.cost, 1000).trials)
    for budget in range(1, needed):
        trace = drive(search, space, cases.cost, budget)
        assert trace.end == "budget" and not search.proven
        assert search.lower_bound <= cases.optimum(space)


@pytest.mark.parametrize("budget", [8, 27])
def test_the_tree_counts_visits_and_keeps_least_costs(budget):
    space, search = SPACES["table"], Mcts()
    trace = drive(search, space, cases.cost, budget, seed=1)
    tree = tree_of(search.root)
    tried = {t.point: t.cost for t in trace.trials}
    assert search.root.visits == len(tried) and search.root.best == min(tried.values())
    for prefix, node in tree.items():
        below = [c for p, c in tried.items() if p[: len(prefix)] == prefix]
        assert node.visits == len(below) and node.best == min(below)
        assert node.closed == (
            len(below) == sum(p[: len(prefix)] == prefix for p in space.points())
        )
    assert set(tree_of(search.root, 1)) == {p for p in tree if len(p) <= 1}


def test_a_prior_decides_what_is_tried_first():
    def prior(prefix, options):
        return [1.0 if value in (8, 3, "z") else 1e-9 for value in options]

    first = [
        drive(Mcts(batch=1, completions=1, prior=prior), SPACES["table"], cases.cost, 2, seed=s)
        for s in range(20)
    ]
    assert sum(t.trials[1].point[0] == 8 or t.trials[0].point[0] == 8 for t in first) == 20


def test_the_generations_are_logged():
    search = Genetic()
    trace = drive(search, SPACES["table"], cases.cost, 27, seed=0)
    assert [(b.point, b.cost) for b in search.log] == [(t.point, t.cost) for t in trace.trials]
    assert [b.generation for b in search.log[:16]] == [0] * 16
    assert {b.generation for b in search.log} == {0, 1, 2}
    assert {b.origin for b in search.log[:16]} == {"random"}
    assert {b.origin for b in search.log[16:]} <= {"random", "neighbour", "crossed", "mutated"}


def test_the_model_grown_in_steps_is_the_model_learned_at_once():
    space = SPACES["table"]
    points = list(space.points())
    costs = [cases.cost(p) for p in points]
    at_once, in_steps = Surrogate(), Surrogate()
    at_once.learn(points[:20], costs[:20])
    for first in range(0, 20, 3):
        in_steps.learn(points[first : min(first + 3, 20)], costs[first : min(first + 3, 20)])
    for one, two in zip(at_once.predict(points), in_steps.predict(points), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-9)
    mean, doubt = at_once.predict(points)
    np.testing.assert_allclose(mean[:20], scaled(costs[:20]), atol=0.2)
    assert doubt[:20].max() < doubt[20:].min()


def test_the_model_forgets_when_there_are_too_many_trials(monkeypatch):
    monkeypatch.setattr("ascend_lab.aoe.search.genetic.MOST", 20)
    space = SPACES["table"]
    points = list(space.points())
    model = Surrogate()
    for first in range(0, len(points), 9):
        model.learn(points[first : first + 9], [cases.cost(p) for p in points[first : first + 9]])
    assert len(model.points) <= 20 and min(model.costs) == cases.optimum(space)
    assert np.isfinite(model.predict(points)).all()


def test_the_model_is_worth_its_place_where_costs_have_a_shape():
    rng = np.random.default_rng(5)
    columns = [rng.choice(sizes, 4000) for sizes in ([1, 2, 4, 8, 16, 32, 64],) * 6]
    space = TableSpace(tuple("abcdef"), columns)

    def cost(point):
        logs = np.log2(point)
        return float(
            1 + (logs - [3, 1, 4, 1, 5, 2]) @ (logs - [3, 1, 4, 1, 5, 2]) + logs[0] * logs[1]
        )

    best = {
        screened: np.mean(
            [drive(Genetic(screened=screened), space, cost, 80, seed=s).best.cost for s in range(6)]
        )
        for screened in (True, False)
    }
    assert best[True] < best[False]
