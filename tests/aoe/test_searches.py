"""Searches: spaces, proposals and the bench."""

import json
import math
import sys
from inspect import ismodule
from pathlib import Path

import numpy as np
import pytest
import search_cases as cases
from hypothesis import given, settings, strategies as st

from ascend_lab import aoe
from ascend_lab.aoe import TableSpace, drive
from ascend_lab.aoe.drive import Rules
from ascend_lab.aoe.search import SEARCHES, BranchAndBound, Mcts, search_named, tree_of
from ascend_lab.aoe.search.points import Annealing
from ascend_lab.aoe.search.surrogate import Surrogate, scaled
from ascend_lab.aoe.space import completed, crossed, mutated, neighbours, random_completion
from ascend_lab.errors import InputError
from bench import search as bench
from bench.peers import Peer, PeerSkippedError
from bench.search import _TALK

TABLES = st.lists(
    st.tuples(st.integers(-3, 9), st.sampled_from(["x", "y"]), st.sampled_from([1, 2, 4, 16])),
    min_size=1,
    max_size=20,
)


def space_of(points):
    return TableSpace(("a", "b", "c"), list(zip(*points, strict=True)))


@settings(max_examples=100)
@given(TABLES)
def test_options_lead_to_all_points_and_to_no_others(points):
    space = space_of(points)
    found = [()]
    for _ in space.names:
        found = [(*prefix, value) for prefix in found for value in space.options(prefix)]
    assert found == sorted(set(points)) == list(space.points())
    assert space.size == len(found)
    assert [space.point(space.row(point)) for point in found] == found


@settings(max_examples=100)
@given(TABLES, st.integers(0, 2**32 - 1))
def test_moves_are_legal_and_do_what_they_say(points, seed):
    space = space_of(points)
    rng = np.random.default_rng(seed)
    legal = set(points)
    one = space.sample(rng)
    two = space.sample(rng)
    assert {one, crossed(space, one, two, rng), random_completion(space, one[:1], rng)} <= legal
    assert random_completion(space, one[:2], rng)[:2] == one[:2]
    changed = mutated(space, one, rng)
    assert changed in legal and (changed != one or len(legal) == 1)
    near = neighbours(space, one)
    assert set(near) <= legal and one not in near
    assert {p for p in legal if sum(a != b for a, b in zip(p, one, strict=True)) == 1} <= set(near)
    assert crossed(space, one, one, rng) == one == completed(space, one)
    assert completed(space, two, one[:1])[0] == one[0]


def test_tables_that_cannot_be():
    for names, columns in ((("a",), []), ((), []), (("a", "b"), [(1,), (1, 2)]), (("a",), [()])):
        with pytest.raises(InputError, match="a column of equal length"):
            TableSpace(names, columns)
    space = cases.table()
    for point in ((2, 3, "z"), (2, 3), (5, 3, "x"), (2, 1, "w")):
        with pytest.raises(InputError, match="a point of the space"):
            space.row(point)


def test_the_facade_gives_every_word_and_no_module():
    for word in aoe.__all__:
        found = getattr(aoe, word)
        assert not ismodule(found), word
    with pytest.raises(AttributeError, match="nothing"):
        _ = aoe.nothing


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


@pytest.mark.parametrize("budget", [1, 7, 20])
@pytest.mark.parametrize("space", [SPACES["table"], cases.Triangle(counted=False)])
@pytest.mark.parametrize("name", SEARCHES)
def test_the_budget_counts_candidates(name, space, budget):
    """Also of a space that cannot be counted."""
    trace = drive(SEARCHES[name], space, cases.cost, budget, seed=2)
    assert len({space.key(t.point) for t in trace.trials}) == budget and trace.end == "budget"
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
    space = SPACES["table"]
    start = [(4, 3, "y"), (2, 3, "z"), (4, 3, "y")]
    trace = drive(SEARCHES[name], space, cases.cost, 6, rules=Rules(start=start))
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
@settings(max_examples=15)
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
    space = SPACES["aliases"]
    search = BranchAndBound(cases.bound)
    needed = len(drive(search, space, cases.cost, 1000).trials)
    for budget in range(1, needed):
        trace = drive(search, space, cases.cost, budget)
        assert trace.end == "budget" and not search.proven
        assert search.lower_bound <= cases.optimum(space)


@pytest.mark.parametrize("budget", [8, 27])
def test_the_tree_counts_visits_and_keeps_least_costs(budget):
    space = SPACES["table"]
    search = Mcts()
    trace = drive(search, space, cases.cost, budget, seed=1)
    tree = tree_of(search.root)
    tried = {t.point: t.cost for t in trace.trials}
    assert search.root.visits == len(tried) and search.root.best == min(tried.values())
    for prefix, node in tree.items():
        below = [c for p, c in tried.items() if p[: len(prefix)] == prefix]
        assert node.visits == len(below) and node.best == min(below)
        every = sum(p[: len(prefix)] == prefix for p in space.points())
        assert node.closed == (len(below) == every)
    assert set(tree_of(search.root, 1)) == {p for p in tree if len(p) <= 1}


def test_the_model_grown_in_steps_is_the_model_learned_at_once():
    space = SPACES["table"]
    points = list(space.points())
    costs = [cases.cost(p) for p in points]
    at_once = Surrogate()
    in_steps = Surrogate()
    at_once.learn(points[:20], costs[:20])
    for first in range(0, 20, 3):
        in_steps.learn(points[first : min(first + 3, 20)], costs[first : min(first + 3, 20)])
    for one, two in zip(at_once.predict(points), in_steps.predict(points), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-9)
    mean, doubt = at_once.predict(points)
    np.testing.assert_allclose(mean[:20], scaled(costs[:20]), atol=0.2)
    assert doubt[:20].max() < doubt[20:].min()


SPACE = cases.table()
CASE = ("small", SPACE, np.array([cases.cost(point) for point in SPACE.points()]))
PLAYER = """
def run(seed):
    sizes = about["sizes"]
    for i in range(seed, 10**6):
        ask([i % sizes[0], i // sizes[0] % sizes[1], i // sizes[0] // sizes[1] % sizes[2]])
runs(run)
"""
QUITTER = "def run(seed):\n    ask([0, 0, 0])\nruns(run)\n"
STUCK = "def run(seed):\n    while True:\n        ask([0, 0, 0])\nruns(run)\n"


def run_program(program, budget, seeds=(0, 1)):
    peer = Peer("Player", (), 0, "", _TALK + program)
    return bench.run_peer(CASE, peer, Path(sys.executable), budget, seeds)


def test_a_peer_is_charged_for_new_legal_points_only():
    found = run_program(PLAYER, 1000)
    assert found.curves.shape == (2, 1000) and (found.curves[:, SPACE.size :] == 1).all()
    assert (np.diff(found.curves) <= 0).all() and found.curves[0, 0] > 1
    few = run_program(PLAYER, 5)
    assert few.curves.shape == (2, 5) and (few.curves == found.curves[:, :5]).all()


@pytest.mark.parametrize("program", [QUITTER, STUCK])
def test_a_peer_that_gives_up_or_repeats_itself_stays_where_it_is(program):
    found = run_program(program, 6)
    first = cases.cost(SPACE.point(0)) / cases.optimum(SPACE)
    assert (found.curves == first).all() and found.curves.shape == (2, 6)


def test_a_peer_that_dies_is_reported():
    with pytest.raises(RuntimeError, match="Player on small ended before its time"):
        run_program("sys.exit(3)", 5)


def test_curves_of_ours_and_the_table():
    results = [
        bench.run_ours(CASE, name, SEARCHES[name], 100, range(3)) for name in ("random", "mcts")
    ]
    for found in results:
        assert found.mean(100) == found.at(500).max() == 1.0 and found.mean(1) > 1.0
    text = bench.table(results, 100)
    assert text.splitlines()[0].split() == ["geometric", "mean", "after", "50", "100"]
    assert {row.split()[0] for row in text.splitlines()[1:]} == {"random", "mcts"}


def test_the_report_skips_peers_that_cannot_be_installed(tmp_path, capsys, monkeypatch):
    def none(peer, folder):
        raise PeerSkippedError(f"{peer.name} cannot be installed here")

    monkeypatch.setattr(bench, "environment", none)
    monkeypatch.setattr(bench, "NAMES", ("random", "genetic"))
    assert bench.report([CASE], 20, 2, json_file=str(tmp_path / "r.json")) == 0
    printed = capsys.readouterr().out
    assert "skipped: Optuna" in printed and "skipped: KernelTuner" in printed
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [r["search"] for r in rows] == ["random", "genetic", *bench.PLAIN]
    assert all(len(r["mean"]) == 20 for r in rows)


def test_annealing_takes_a_step_up_less_and_less():
    chance = Annealing()._acceptance
    assert chance(2.0, 3.0, 0) == pytest.approx(math.exp(-1))  # half more, at 0.5
    assert chance(2.0, 4.0, 0) < chance(2.0, 3.0, 0) < chance(2.0, 2.0, 0) == 1
    assert chance(2.0, 3.0, 400) < chance(2.0, 3.0, 0) == chance(2.0, 3.0, 500)


def test_the_model_forgets_when_there_are_too_many_trials(monkeypatch):
    monkeypatch.setattr("ascend_lab.aoe.search.surrogate.MAX_MODEL_TRIALS", 20)
    space = SPACES["table"]
    points = list(space.points())
    model = Surrogate()
    for first in range(0, len(points), 9):
        model.learn(points[first : first + 9], [cases.cost(p) for p in points[first : first + 9]])
    assert len(model.points) <= 20 and min(model.costs) == cases.optimum(space)
    assert np.isfinite(model.predict(points)).all()
