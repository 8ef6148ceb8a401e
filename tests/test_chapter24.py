"""The checks and figures of chapter 24, and what its prose claims."""

import pytest
from two_sided import two_sided

from ascend_lab.aoe.gradient import AlphaBeta, plan
from ascend_lab.errors import InputError
from ascend_lab.lab.checks import check_ex_24_1, check_ex_24_2, check_ex_24_3, check_ex_24_4
from ascend_lab.lab.checks.chapter24_25 import best_of, ends_at, merged
from ascend_lab.lab.figures import fig_caps
from ascend_lab.lab.figures.tuned_networks import toy_rows


# -- exercises -------------------------------------------------------------------------------------
def tail(ready, sizes, a, b, lasts):
    done, first = 0.0, 0
    for last in lasts:
        done = max(done, ready[last]) + a + b * sum(sizes[first : last + 1])
        first = last + 1
    return done - ready[-1]


def test_ends_two_sided():
    two_sided(
        check_ex_24_1,
        tail,
        lambda r, s, a, b, lasts: a + b * sum(s),
        lambda r, s, a, b, lasts: len(lasts) * a + b * sum(s),
        lambda r, s, a, b, lasts: tail(r, s, 0, b, lasts),
        lambda r, s, a, b, lasts: tail([0] * len(r), s, a, b, lasts),
    )


def merge(ready, sizes, a, b, patience=1.0):
    lasts, first, start = [], 0, ready[0]
    for i in range(len(ready) - 1):
        sent = start + a + b * sum(sizes[first : i + 1])
        late = ready[i + 1]
        if late < sent and (late < start or late - start < patience * a):
            start = max(start, late)
        else:
            lasts, first, start = [*lasts, i], i + 1, max(sent, late)
    return [*lasts, len(ready) - 1]


def test_merging_two_sided():
    two_sided(
        check_ex_24_2,
        [merge, merged],
        lambda r, s, a, b: list(range(len(r))),
        lambda r, s, a, b: [len(r) - 1],
        lambda r, s, a, b: merge(r, s, a, b, patience=0.0),
        lambda r, s, a, b: merge(r, s, a, b, patience=9.0),
    )


def tuner(ready, sizes, cost, most):
    found = plan(toy_rows(ready, sizes), cost, most)
    return [last for _, last in found.segments]


def test_few_buckets_two_sided():
    two_sided(
        check_ex_24_3,
        tuner,
        lambda r, s, cost, most: [len(r) - 1],
        lambda r, s, cost, most: list(range(len(r))),
        lambda r, s, cost, most: tuner(r, s, cost, None),
        lambda r, s, cost, most: tuner(r, s, AlphaBeta(cost.a, cost.b), most),
        lambda r, s, cost, most: None,
        lambda r, s, cost, most: [0],
    )


def test_traps_two_sided():
    def trap():
        return [0.99 * i for i in range(40)], [40, *[0] * 39], 1.0, 1.0

    assert check_ex_24_4(trap).passed
    for wrong in (
        lambda: ([0.0, 0.9, 1.8], [10, 0, 0], 1.0, 1.0),
        lambda: None,
        lambda: ([1.0, 0.0], [1, 1], 1.0, 1.0),
        lambda: ([0.0], [-1], 1.0, 1.0),
        lambda: ([0.99 * i for i in range(40)], [40.5, *[0] * 39], 1.0, 1.0),
    ):
        assert not check_ex_24_4(wrong).passed


# -- figures and claims ----------------------------------------------------------------------------
def test_the_toy_of_the_chapter():
    given = [0, 1, 2, 3, 4], [1, 1, 4, 1, 6], 1.0, 0.5
    assert ends_at(*given, [0, 2, 4]) == best_of(*given) == pytest.approx(10.0)
    assert ends_at(*given, [4]) == ends_at(*given, [0, 1, 2, 3, 4]) == pytest.approx(11.5)


@pytest.mark.parametrize(("count", "rule", "exact"), [(3, 12.8, 12.0), (13, 21.8, 12.0)])
def test_the_counter_example(count, rule, exact):
    rows = toy_rows([0.9 * i for i in range(count)], [10] + [0] * (count - 1))
    found = plan(rows, AlphaBeta(1.0, 1.0))
    assert found.end_s == pytest.approx(exact)
    assert found.baselines["mg_wfbp"] == pytest.approx(rule)


def test_caps_are_never_better_than_the_best_split():
    rows = toy_rows([0.001 * i for i in range(20)], [2**i for i in range(20)])
    figure = fig_caps(rows, alpha_us=100.0, gbytes_per_s=0.5)
    said = figure.alt_text
    assert float(said.split("with ")[1].split(" ms")[0]) >= float(
        said.split("best split ")[1].split(";")[0]
    )
    with pytest.raises(InputError, match="rate above 0"):
        fig_caps(rows, gbytes_per_s=0.0)
