"""The best split of gradients: equal to trying all, never worse than what others use."""

import math

import numpy as np
import pytest
from gradient_cases import costs, profiles, rows_of, waiting_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.gradient import (
    BASELINES,
    AlphaBeta,
    Gradient,
    Piecewise,
    bound,
    end_of,
    gradients_of,
    plan,
    sampled,
)
from ascend_lab.aoe.gradient.planning import MIB, baseline, best_cap, by_cap, legal
from ascend_lab.aoe.gradient.splits import (
    all_splits,
    best_split,
    brute_force,
    end_s,
    out_of_order,
    price_of,
    split_at,
    table_of,
)
from ascend_lab.cluster.choice import checked
from ascend_lab.errors import InputError

limits = st.one_of(st.none(), st.integers(1, 5))


@given(profiles(), costs(), limits)
@settings(max_examples=60, deadline=None)
def test_the_plan_is_as_good_as_the_best_of_all_splits(rows, cost, most):
    found = plan(rows, cost, most)
    table, price = table_of(rows), price_of(cost)
    _, end = brute_force(table, lambda split: end_s(table, price, split), most)
    assert found.end_s == pytest.approx(end, rel=1e-12)
    assert found.optimal
    assert end_of(found.segments, rows, cost) == found.end_s
    assert most is None or len(found.segments) <= most


@given(profiles(formats=2), costs(), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_formats_and_sizes_are_kept_apart(rows, cost, most_bytes):
    found = plan(rows, cost, max_bytes=most_bytes)
    table, price = table_of(rows, most_bytes), price_of(cost)
    _, end = brute_force(table, lambda split: end_s(table, price, split))
    assert found.end_s == pytest.approx(end, rel=1e-12)
    for first, last in found.segments:
        bucket = rows[first : last + 1]
        assert len({row.dtype for row in bucket}) == 1
        assert first == last or sum(row.size_bytes for row in bucket) <= most_bytes


@given(profiles(most=30, formats=2), costs(), st.one_of(st.none(), st.integers(30, 40)))
@settings(max_examples=60, deadline=None)
def test_no_baseline_within_the_limits_is_better(rows, cost, most):
    found = plan(rows, cost, most)
    assert set(found.baselines) == set(BASELINES)
    for name, end in found.baselines.items():
        assert name in found.over_limit or found.end_s <= end * (1 + 1e-12)
        assert found.gain(name) >= -1e-9 or name in found.over_limit
    assert not found.over_limit  # there are at most 30 buckets, and baselines cut at formats


@given(profiles(most=14), costs())
@settings(max_examples=60, deadline=None)
def test_the_bound_is_below_and_the_tail_above_zero(rows, cost):
    found = plan(rows, cost)
    assert bound(rows, cost) <= found.end_s * (1 + 1e-12)
    assert found.ready_s == max(row.ready_s for row in rows)
    assert found.tail_s >= 0


@given(profiles(most=12), costs())
@settings(max_examples=40, deadline=None)
def test_more_segments_are_never_worse(rows, cost):
    ends = [plan(rows, cost, most).end_s for most in range(1, len(rows) + 1)]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] == plan(rows, cost).end_s


def test_the_bound_is_reached_where_nothing_waits() -> None:
    rows = rows_of([0, 0, 0], [5, 6, 7])
    assert bound(rows, AlphaBeta(1.0, 1.0)) == plan(rows, AlphaBeta(1.0, 1.0)).end_s == 19.0


@pytest.mark.parametrize(("count", "merged"), [(3, 12.8), (13, 21.8)])
def test_the_local_merge_rule_waits_for_ever(count: int, merged: float) -> None:
    """Each gradient is ready less than a startup after the one before, so all is merged."""
    found = plan(waiting_chain(count), AlphaBeta(1.0, 1.0))
    assert found.end_s == 12.0
    assert found.baselines["mg_wfbp"] == pytest.approx(merged)
    assert found.segments == ((0, 0), (1, count - 1))


def test_ties_are_broken_for_few_segments() -> None:
    rows = rows_of([0, 1, 2, 3, 100], [1] * 5)  # all but the last can be sent in many ways in time
    assert plan(rows, AlphaBeta(0.0, 1.0)).segments == ((0, 3), (4, 4))
    assert plan(rows, AlphaBeta(0.0, 0.0)).segments == ((0, 4),)


def test_one_gradient_and_gradients_without_bytes() -> None:
    assert plan(rows_of([2.0], [8]), AlphaBeta(1.0, 1.0)).segments == ((0, 0),)
    found = plan(rows_of([0, 1, 2], [0, 0, 0]), AlphaBeta(1.0, 1.0))
    assert (found.segments, found.end_s) == (((0, 2),), 3.0)
    assert plan(rows_of([0, 0], [0, 0]), AlphaBeta(0.0, 0.0)).gain("one_bucket") == 0.0


@given(profiles(most=8), costs())
@settings(max_examples=30, deadline=None)
def test_times_out_of_order_are_their_running_maximum(rows, cost):
    ready = np.maximum.accumulate([row.ready_s for row in rows]).tolist()
    ordered = rows_of(ready, [row.size_bytes for row in rows])
    assert plan(rows, cost).end_s == plan(ordered, cost).end_s
    assert out_of_order(ordered) == 0
    late = sum(row.ready_s < high for row, high in zip(rows, ready, strict=True))
    assert out_of_order(rows) == late


def test_baselines_split_as_their_rules_say() -> None:
    mib = [MIB] * 60
    table, cost = table_of(rows_of([0.0] * 60, mib)), AlphaBeta(1.0, 0.0)
    assert baseline("ddp_25mb", table, cost) == ((0, 0), (1, 25), (26, 50), (51, 59))
    assert baseline("hccl_default", table, cost) == ((0, 57), (58, 59))  # 58 of 60 is 96.67 %
    assert baseline("one_bucket", table, cost) == ((0, 59),)
    assert len(baseline("per_layer", table, cost)) == 60
    assert by_cap(table, 1.5 * MIB)[:2] == ((0, 1), (2, 3))  # closed by the one that reaches it
    assert by_cap(table, 1)[:2] == ((0, 0), (1, 1))


def resnet50_bytes() -> list[int]:
    """Return the bytes of ResNet-50's fp32 gradients, last registered first."""
    counts, width = [64 * 3 * 49, 64, 64], 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for i, o, k in ((width, planes, 1), (planes, planes, 9), (planes, 4 * planes, 1)):
                counts += [i * o * k, o, o]
            if block == 0:
                counts += [width * 4 * planes, 4 * planes, 4 * planes]
            width = 4 * planes
    return [4 * n for n in reversed([*counts, 2048 * 1000, 1000])]


def test_ddp_buckets_of_resnet50_are_those_of_a_real_trace() -> None:
    """Sizes of a profiled DDP step (HolisticTraceAnalysis, tests/data/nccl_parser_config)."""
    sizes = resnet50_bytes()
    table = table_of(rows_of([0.0] * len(sizes), sizes))
    found = table.sizes_bytes(baseline("ddp_25mb", table, AlphaBeta(1.0, 1.0))).tolist()
    assert found == [8196000, 31502336, 26255360, 26550272, 9724160]


def test_gdat_fills_the_time_the_bucket_before_is_sent_in() -> None:
    rows = rows_of([0, 1, 2, 3, 4, 5], [1] * 6)
    found = plan(rows, AlphaBeta(0.0, 1.0))
    split = baseline("gdat", table_of(rows), AlphaBeta(0.0, 1.0))
    assert end_of(split, rows, AlphaBeta(0.0, 1.0)) == found.end_s == 6.0
    slow = rows_of([0, 100, 101], [1, 1, 1])
    assert baseline("gdat", table_of(slow), AlphaBeta(0.1, 1.0))[0] == (0, 0)


def test_the_best_threshold_is_the_best_of_its_grid() -> None:
    rng = np.random.default_rng(1)
    rows = rows_of(np.cumsum(rng.exponential(1, 40)).tolist(), rng.integers(1, 99, 40).tolist())
    table, cost = table_of(rows), AlphaBeta(2.0, 0.03)
    cap, split, end = best_cap(table, price_of(cost))
    grid = [end_s(table, price_of(cost), by_cap(table, c)) for c in np.geomspace(1, 4000, 20)]
    assert split == by_cap(table, cap)
    assert end <= min(grid) * 1.05
    assert end == plan(rows, cost).baselines["best_threshold"]


def test_baselines_above_the_limit_are_marked() -> None:
    rows = rows_of(range(10), [5] * 10)
    found = plan(rows, AlphaBeta(0.0, 0.1), 2)
    assert "per_layer" in found.over_limit
    assert found.baselines["per_layer"] < found.end_s
    assert "one_bucket" not in found.over_limit
    mixed = rows_of([0, 0], [1, 1], ["fp16", "fp32"])
    assert plan(mixed, AlphaBeta(1.0, 0.0)).baselines["one_bucket"] == 2.0
    with pytest.raises(InputError, match="at most 1 segments"):
        plan(mixed, AlphaBeta(1.0, 0.0), 1)
    assert legal(table_of(mixed), ((0, 1),)) == ((0, 0), (1, 1))


def test_measured_tables_are_made_to_rise() -> None:
    table = Piecewise((1.0, 2.0, 4.0), (1.0, 5.0, 3.0))
    assert [table(x) for x in (0, 1, 2, 4, 8)] == [1.0, 1.0, 4.0, 4.0, 8.0]
    assert table(1.5) == 2.5
    line = sampled(AlphaBeta(1.0, 0.5), 1e6)
    assert line(12_345) == pytest.approx(1 + 0.5 * 12_345)
    assert line(0) == line(1) == 1.5


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_table_never_falls(values):
    table = Piecewise(tuple(map(float, range(1, len(values) + 1))), tuple(values))
    found = table.many(np.linspace(0, 20, 101))
    assert np.all(np.diff(found) >= -1e-12)
    if values == sorted(values):
        assert table.many(np.arange(1.0, len(values) + 1)).tolist() == pytest.approx(values)


def test_costs_from_lists_functions_and_arrays_agree() -> None:
    cost = AlphaBeta(0.1, 0.02)
    sizes = np.array([1.0, 5.0, 1.0])
    assert price_of(cost)(sizes).tolist() == price_of(lambda n: 0.1 + 0.02 * n)(sizes).tolist()


BAD = {
    "no rows": (lambda: plan((), AlphaBeta(1, 1)), "at least one gradient"),
    "nan": (lambda: rows_of([math.nan], [1]), "ready time"),
    "negative time": (lambda: rows_of([-1.0], [1]), "ready time"),
    "negative size": (lambda: rows_of([0.0], [-1]), "whole number of bytes"),
    "half a byte": (lambda: Gradient("g", 0.0, 0.5), "whole number of bytes"),  # type: ignore
    "infinite size": (lambda: Gradient("g", 0.0, math.inf), "whole number"),  # type: ignore
    "no segments": (lambda: plan(rows_of([0], [1]), AlphaBeta(1, 1), 0), "at least 1 segment"),
    "no bytes": (lambda: plan(rows_of([0], [1]), AlphaBeta(1, 1), max_bytes=0), "more than 0"),
    "alpha": (lambda: AlphaBeta(-1.0, 0.0), "alpha and beta"),
    "beta": (lambda: AlphaBeta(0.0, math.inf), "alpha and beta"),
    "cost": (lambda: plan(rows_of([0], [1]), lambda n: -1.0), "cost of at least 0"),
    "nan cost": (lambda: plan(rows_of([0], [1]), lambda n: math.nan), "cost of at least 0"),
    "no table": (lambda: Piecewise((), ()), "a time for each size"),
    "unordered": (lambda: Piecewise((2.0, 1.0), (1.0, 1.0)), "each above"),
    "table time": (lambda: Piecewise((1.0,), (-1.0,)), "times of at least 0"),
    "too many": (lambda: list(all_splits(40)), "to try all splits"),
    "gap": (lambda: checked([[0, 0], [2, 2]], 3), "that are gradients 0 to 2"),
    "short": (lambda: checked([[0, 1]], 3), "that are gradients 0 to 2"),
    "none": (lambda: checked([], 3), "that are gradients 0 to 2"),
    "backwards": (lambda: checked([[0, 2], [3, 1], [2, 2]], 3), "gradients 0 to 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_means_nothing_is_refused(case: str) -> None:
    action, message = BAD[case]
    with pytest.raises(InputError, match=message):
        action()


def test_rows_of_a_profile_are_gradients() -> None:
    class Row:
        name, ready_s, size_bytes = "w", 1.5, 7

    assert gradients_of([Row()], "fp32") == (Gradient("w", 1.5, 7, "fp32"),)


def test_all_splits_are_all_and_different() -> None:
    found = list(all_splits(6))
    assert len(set(found)) == len(found) == 32
    assert {len(s) for s in all_splits(6, 2)} == {1, 2}
    assert split_at([0, 2]) == ((0, 0), (1, 2))


def test_a_thousand_gradients_with_few_segments() -> None:
    rng = np.random.default_rng(3)
    rows = rows_of(
        np.cumsum(rng.exponential(1e-4, 1000)).tolist(),
        rng.lognormal(11, 2, 1000).astype(int).tolist(),
    )
    table, price = table_of(rows), price_of(AlphaBeta(3e-4, 1e-10))
    free, end = best_split(table, price)
    few, limited = best_split(table, price, 8)
    assert len(few) <= 8 < len(free)
    assert end < limited < plan(rows, AlphaBeta(3e-4, 1e-10), 8).baselines["one_bucket"]
