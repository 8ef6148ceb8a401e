"""Every search on spaces small enough to know all about."""

from __future__ import annotations

import math

import pytest
import search_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import SEARCHES, branch_and_bound, search_named
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
@settings(max_examples=30, deadline=None)
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
    search = branch_and_bound(cases.bound)
    trace = drive(search, space, cases.cost, 1000)
    assert trace.end == "exhausted" and search.proven
    assert trace.best.cost == cases.optimum(space) == search.lower_bound
    assert len(trace.trials) < len(cases.keys(space))


def test_branch_and_bound_that_is_cut_short_gives_a_bound_but_no_proof():
    space, search = SPACES["aliases"], branch_and_bound(cases.bound)
    needed = len(drive(search, space, cases.cost, 1000).trials)
    for budget in range(1, needed):
        trace = drive(search, space, cases.cost, budget)
        assert trace.end == "budget" and not search.proven
        assert search.lower_bound <= cases.optimum(space)
