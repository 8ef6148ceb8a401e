"""Streams, memory bandwidth and noise: the event simulation, and the search on it."""

import numpy as np
import pytest
from gradient_cases import costs, profiles, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.gradient import AlphaBeta, Scenario, end_of, evaluate, improve, plan
from ascend_lab.aoe.gradient.scenario import scorer
from ascend_lab.aoe.gradient.splits import all_splits, brute_force, table_of
from ascend_lab.errors import InputError

ONE = AlphaBeta(1.0, 1.0)


@given(profiles(), costs())
@settings(max_examples=60, deadline=None)
def test_undisturbed_it_is_what_the_plan_minimises(rows, cost):
    scenario = Scenario(cost)
    for split in list(all_splits(len(rows)))[:8]:
        assert evaluate(split, rows, scenario) == pytest.approx(end_of(split, rows, cost))


@given(profiles(), costs(), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_free_sharing_never_hurts_and_losses_never_help(rows, cost, streams, slowdown):
    split = tuple((i, i) for i in range(len(rows)))
    alone = evaluate(split, rows, Scenario(cost))
    free = evaluate(split, rows, Scenario(cost, streams=streams, sharing=0.0))
    assert free <= alone * (1 + 1e-9)
    slowed = evaluate(split, rows, Scenario(cost, slowdown=slowdown))
    assert slowed >= alone * (1 - 1e-9)


def test_two_streams_share_the_link_and_overlap_their_startups() -> None:
    rows, split = rows_of([0, 0], [10, 10]), ((0, 0), (1, 1))
    assert evaluate(split, rows, Scenario(ONE)) == 22.0
    assert evaluate(split, rows, Scenario(ONE, streams=2)) == pytest.approx(21.0)
    half = evaluate(split, rows, Scenario(ONE, streams=2, sharing=0.5))
    assert half == pytest.approx(1 + 1.5 * 10)  # as measured: alpha + 1.5 beta n, both of them


def test_a_stream_more_than_there_are_buckets_waits_for_gradients() -> None:
    rows, split = rows_of([0, 5], [10, 10]), ((0, 0), (1, 1))
    # 1 startup, 5 bytes alone, then 5 + 5 shared while the second starts up and follows
    assert evaluate(split, rows, Scenario(ONE, streams=2)) == pytest.approx(21.0)


def test_backward_is_slowed_while_something_is_sent() -> None:
    rows, split = rows_of([0, 10], [4, 0]), ((0, 0), (1, 1))
    # 5 s of sending slow backward to half its pace: 2.5 s are lost
    assert evaluate(split, rows, Scenario(ONE, slowdown=1.0)) == pytest.approx(12.5 + 1)
    assert evaluate(((0, 1),), rows, Scenario(ONE, slowdown=1.0)) == pytest.approx(15.0)


def test_noise_is_drawn_from_the_seed_and_has_mean_one() -> None:
    rows = rows_of(np.arange(1.0, 400.0).tolist(), [0] * 399)
    split, still = ((0, 398),), Scenario(AlphaBeta(0.0, 0.0))
    noisy = Scenario(AlphaBeta(0.0, 0.0), noise=0.3, samples=20, seed=1)
    assert evaluate(split, rows, still) == 399.0
    assert evaluate(split, rows, noisy) == evaluate(split, rows, noisy)
    assert evaluate(split, rows, noisy) != 399.0
    assert evaluate(split, rows, noisy) == pytest.approx(399.0, rel=0.02)


scenarios = st.builds(
    Scenario,
    costs(),
    streams=st.integers(1, 3),
    sharing=st.floats(0, 1),
    slowdown=st.floats(0, 0.5),
    noise=st.sampled_from([0.0, 0.2]),
    samples=st.just(3),
)


@given(profiles(most=7), scenarios, st.one_of(st.none(), st.integers(1, 4)))
@settings(max_examples=40, deadline=None)
def test_the_search_is_never_worse_than_the_plan_nor_better_than_all(rows, scenario, most):
    found = improve(rows, scenario, max_segments=most, budget=200)
    planned = evaluate(plan(rows, scenario.cost, most).segments, rows, scenario)
    _, best = brute_force(table_of(rows), scorer(table_of(rows), scenario), most)
    assert best <= found.end_s * (1 + 1e-12)
    assert found.end_s <= found.start_s == planned
    assert found.end_s == evaluate(found.segments, rows, scenario)
    assert most is None or len(found.segments) <= most
    assert found.tried <= 200


def test_the_search_finds_the_best_of_small_cases() -> None:
    rng, gaps, gained = np.random.default_rng(0), [], 0
    for _ in range(8):
        ready, sizes = np.cumsum(rng.exponential(1, 9)), rng.lognormal(1, 1.5, 9).astype(int)
        rows = rows_of(ready.tolist(), sizes.tolist())
        scenario = Scenario(AlphaBeta(1.0, 0.2), streams=2, sharing=0.5, slowdown=0.3)
        found = improve(rows, scenario, budget=80)
        _, best = brute_force(table_of(rows), scorer(table_of(rows), scenario))
        gaps.append(found.end_s / best - 1)
        gained += found.gain > 0.01
    assert max(gaps) < 0.01
    assert gained >= 2  # the plan for one stream is not the best for two


def test_the_search_keeps_formats_apart_and_its_budget() -> None:
    rows = rows_of([0, 1, 2, 3], [5] * 4, ["fp16", "fp16", "fp32", "fp32"])
    found = improve(rows, Scenario(ONE, streams=2), budget=3)
    assert found.tried <= 3
    assert all(rows[first].dtype == rows[last].dtype for first, last in found.segments)
    again = improve(rows, Scenario(ONE, streams=2), budget=50)
    assert again == improve(rows, Scenario(ONE, streams=2), budget=50)


BAD = {
    "streams": lambda: Scenario(ONE, streams=0),
    "samples": lambda: Scenario(ONE, samples=0),
    "sharing": lambda: Scenario(ONE, sharing=-0.1),
    "slowdown": lambda: Scenario(ONE, slowdown=float("nan")),
    "noise": lambda: Scenario(ONE, noise=float("inf")),
    "budget": lambda: improve(rows_of([0], [1]), Scenario(ONE), budget=0),
    "split": lambda: evaluate([[0, 1]], rows_of([0], [1]), Scenario(ONE)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_means_nothing_is_refused(case: str) -> None:
    with pytest.raises(InputError):
        BAD[case]()
