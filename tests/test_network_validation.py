"""Published rates of whole networks, and what the model says of them."""

from dataclasses import replace

import pytest

from ascend_lab.lab.validation import GOALS, NetworkRow, network_rows, network_table, published
from ascend_lab.machine.chip import load_chip


def test_the_published_rates_are_those_of_products_that_the_chips_can_reach():
    rows = published("compiler")["network"]
    assert len(rows) == 9 and {row["chip"] for row in rows} == {"Ascend310DK", "Ascend310P3"}
    assert {row["kind"] for row in rows} <= GOALS.keys()
    vgg = next(r for r in rows if r["name"] == "vgg16" and r["chip"] == "Ascend310DK")
    macs_per_s = max(vgg["per_s"].values()) * 15.47e9
    slow, fast = (
        load_chip(name).peak_ops_per_s("fp16") / 2 for name in ("Ascend310", "Ascend310DK")
    )
    assert slow < macs_per_s < fast  # at 500 MHz it would be above the peak


def test_a_network_with_small_channels_is_quicker_by_our_compiler_than_measured():
    rows = [row for row in network_rows(["resnet18"]) if row.chip == "Ascend310DK"]
    assert [row.batch for row in rows] == [1, 16]
    for row in rows:
        assert row.misses and -0.46 < row.time_error < -0.3, row.time_error
        assert sum(row.terms.values()) == pytest.approx(row.model_s)
        assert row.terms["bound"] < row.published_s  # nobody is below it
    last = network_table(rows).splitlines()[-1]
    assert "resnet18" in last and " 1510 " in last
    assert rows[-1].cause in last and "*" in last


def test_a_row_outside_its_goal_says_why():
    terms = {"bound": 1.0, "launches": 0.5, "memory": 2.5}
    row = NetworkRow("net", 4 / 2.1, 4.0, "Toy", 4, "light", terms)
    assert row.misses and row.cause == "memory 62%"
    assert "+110%*" in network_table([row])
    assert row.off_s == pytest.approx(4.0 - 4.0 / 2.1)
    for model_per_s, misses in ((1.5, False), (1.3, True), (3.1, False), (3.2, True)):
        assert replace(row, model_s=4 / model_per_s).misses == misses
