"""The checks and figures of chapter 24, and what its prose claims."""

import pytest

from ascend_lab.aoe.gradient import AlphaBeta, plan
from ascend_lab.lab.checks.chapter24_25 import toy_rows
from ascend_lab.lab.figures import fig_caps

# -- figures and claims ----------------------------------------------------------------------------


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
