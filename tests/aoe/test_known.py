"""Between tuning and the bank: what is kept, and what becomes of it when it is found again."""

from dataclasses import replace
from functools import lru_cache

import engine_cases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe import Knowledge, Settings, tune_operator
from ascend_lab.aoe.bank.records import from_line, to_line
from ascend_lab.aoe.network import (
    NEAR,
    SIZES,
    entry_of,
    features_of,
    from_bank,
    key_of,
    suggestions,
)
from ascend_lab.aoe.tuning import job_of, untuned
from ascend_lab.chip import load_chip
from ascend_lab.graph import compile_graph

BUDGET = Settings(budget=8, seed=5)
BATCH = cases.batch(lead=(4,), relu=False)
UNITS = {
    "cube": cases.product(33, 70, 90, "bias relu"),
    "vector": cases.vector((64, 300), "relu"),
    "product": cases.batch(relu=False),
}


@lru_cache
def kept(unit):
    """The operator of a unit, tuned, and the entry it leaves; once for all tests."""
    operator = cases.first(UNITS[unit])
    found = tune_operator(operator, BUDGET)
    return operator, found, entry_of(found, BUDGET)


@settings(max_examples=6)
@given(cases.networks, st.sampled_from(cases.CHIPS))
def test_what_is_kept_comes_back_as_it_was(graph, chip):
    for operator in cases.operators_of(compile_graph(graph, chip)):
        if operator.unit:
            found = tune_operator(operator, BUDGET)
            entry = from_line(to_line(entry_of(found, BUDGET)))
            assert entry.improved == (found.choice is not None)
            assert (entry.seed, entry.trials, entry.search) == (5, found.trials, found.search)
            back = from_bank(operator, entry, "custom")
            expected = replace(found, source="custom", trace=None, spent_s=0.0, note="")
            assert back == expected


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "schedule",
    [
        {"tiling": {"base_m": 16}},
        {"tiling": 5},
        {"steps": [["bind", "nothing", "x"]]},
        {"steps": "none"},
        {"else": 1},
        [1, 2],
        7,
    ],
)
def test_a_schedule_that_does_not_fit_leaves_the_default(unit, schedule):
    operator, _, good = kept(unit)
    assert good.improved
    back = from_bank(operator, replace(good, schedule=schedule), "custom")
    assert back.choice is None and back.after_cycles == operator.default_cycles
    assert "does not fit" in back.note and not back.proven
    assert back.bound_cycles <= back.after_cycles


@pytest.mark.parametrize("unit", ["cube", "product"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, 1.5, "x", None, [1], {}])
def test_a_tiling_with_a_wrong_number_does_no_harm(unit, value):
    """Banks are merged from files of other people."""
    (operator, _, good), knowledge = kept(unit), Knowledge(None, None)
    job = job_of(operator)
    for name in SIZES:
        tiling = good.schedule["tiling"] | {name: value}
        bad = replace(good, schedule={"tiling": tiling})
        back = from_bank(operator, bad, "custom")
        assert back.bound_cycles <= back.after_cycles <= back.before_cycles
        assert value == 10**9 or value == 10**30 or back.choice is None
        other = cases.first(cases.product(40, 70, 90, "bias relu") if unit == "cube" else BATCH)
        knowledge.keep(replace(bad, key=key_of(other)))
        near = suggestions(operator, knowledge)
        assert all(job.measure(point) > 0 for point in job.points(near))
        assert near == [] or value in (10**9, 10**30)


def test_a_schedule_of_another_unit_does_not_fit():
    for unit, other in (("cube", "vector"), ("vector", "cube")):
        entry = kept(other)[2]
        assert entry.improved
        back = from_bank(kept(unit)[0], entry, "builtin")
        assert back.choice is None and "does not fit" in back.note


def test_a_schedule_that_is_no_longer_faster_is_not_used():
    operator, found, kept_entry = kept("cube")
    assert found.proven
    job = job_of(operator)
    slow = max(list(job.space.points())[:40], key=job.measure)
    assert job.measure(slow) > operator.default_cycles
    entry = replace(kept_entry, schedule=job.choice(slow).as_dict())
    back = from_bank(operator, entry, "custom")
    assert back.choice is None and back.after_cycles == operator.default_cycles
    assert not back.proven and back.bound_cycles <= back.after_cycles


def test_where_the_default_is_best_the_entry_says_so():
    operator = cases.first(UNITS["vector"])
    entry = entry_of(untuned(operator, ""), BUDGET)
    assert entry.schedule == {} and not entry.improved
    back = from_bank(operator, replace(entry, proven=True), "custom")
    assert back.choice is None and back.proven and back.source == "custom"


def test_bank_entries_of_like_shapes_are_suggestions():
    knowledge = Knowledge(None, None)
    kept = {}
    for rows in (16, 32, 48, 64, 80):
        operator = cases.first(cases.product(rows, 70, 90, "bias relu"))
        found = tune_operator(operator, BUDGET)
        kept[rows] = found.choice
        knowledge.keep(entry_of(found, BUDGET))
    operator = cases.first(cases.product(65, 70, 90, "bias relu"))
    near = suggestions(operator, knowledge)
    assert near == [kept[64], kept[80], kept[48]] and len(near) == NEAR
    assert suggestions(cases.first(UNITS["vector"]), knowledge) == []
    other = cases.first(cases.product(65, 70, 90, "bias relu"), "Ascend910A")
    assert suggestions(other, knowledge) == []
    found = tune_operator(operator, Settings(budget=2), near=near)
    assert found.trials


@pytest.mark.parametrize("schedule", [{"tiling": 5}, {"else": 1}, [3], "text", 7])
def test_a_bank_with_nonsense_suggests_nothing(schedule):
    knowledge = Knowledge(None, None)
    operator = cases.first(UNITS["cube"])
    good = tune_operator(cases.first(cases.product(40, 70, 90, "bias relu")), BUDGET)
    entry = entry_of(good, BUDGET)
    knowledge.keep(replace(entry, schedule=schedule))
    assert knowledge.nearest(key_of(operator), features_of(operator), 3)
    assert suggestions(operator, knowledge) == []


def test_an_edited_chip_has_keys_of_its_own():
    chip = load_chip("Ascend310")
    edited = replace(chip, launch_overhead_s=2 * chip.launch_overhead_s)
    keys = [key_of(cases.operators_of(compile_graph(UNITS["cube"], c))[1]) for c in (chip, edited)]
    assert keys[0] != keys[1]
    assert replace(keys[0], chip_digest="") == replace(keys[1], chip_digest="")
