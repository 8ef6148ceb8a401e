"""The policy learned from the bank: what it learns, from what, and that it is off by default."""

from dataclasses import replace

import bank_cases
import engine_cases as cases
import pytest
from hypothesis import given, settings

from ascend_lab.aoe import Knowledge, Settings, tune_operator
from ascend_lab.aoe.bank import MODEL_VERSION, Store, write_builtin
from ascend_lab.aoe.engine import tune_network
from ascend_lab.aoe.tuning import entry_of, from_bank, job_of
from ascend_lab.aoe.vector import TAUGHT, Decision, decisions_of, examples, learn
from ascend_lab.cli import aoe_words as cli_aoe_flags
from ascend_lab.compiler import compile_graph
from ascend_lab.compiler.lower import choice_of

BUDGET = Settings(budget=30, seed=1)
IMPROVES = cases.vector((64, 300), "relu")
TILES = (8, 16, 32, 64)


def told(*chain, problem="p", folds=0, size=10.0, **changes):
    """Return an entry that says how its schedule was decided."""
    data = {"folds": folds, "size": size, "chain": [list(row) for row in chain]}
    return bank_cases.entry(problem, schedule={"steps": [], TAUGHT: data}, **changes)


def width(options=TILES, usual=0):
    return Decision("width", options, usual, 0, 10.0)


@pytest.fixture(scope="module")
def tuned():
    operator = cases.first(IMPROVES)
    return operator, tune_operator(operator, BUDGET)


@pytest.mark.parametrize("best", range(len(TILES)))
def test_an_option_that_always_wins_is_preferred(best):
    policy = learn([told(("width", best, 0, TILES))] * 5)
    chances = policy.chances(width())
    assert chances.argmax() == best and chances[best] > 0.5
    assert chances.min() > 0 and chances.sum() == pytest.approx(1)


def test_it_carries_over_to_other_numbers_but_not_to_other_decisions():
    policy = learn([told(("width", 3, 0, TILES))] * 5)
    longer = policy.chances(width((24, 48, 96, 192, 384)))
    assert longer.argmax() == 4
    other = policy.chances(replace(width(), name="share"))
    assert other.tolist() == pytest.approx([0.25] * 4)


def test_the_default_is_told_from_its_place():
    policy = learn([told(("width", k, k, TILES)) for k in range(4)])
    for usual in range(4):
        assert policy.chances(width(usual=usual)).argmax() == usual


def test_reductions_can_turn_a_choice_around():
    flat, deep = (told(("width", k, -1, TILES), folds=f) for k, f in ((0, 0), (3, 4)))
    policy = learn([flat, deep] * 3)
    assert policy.chances(width(usual=-1)).argmax() == 0
    assert policy.chances(replace(width(usual=-1), folds=4)).argmax() == 3


def test_an_empty_bank_says_nothing():
    space = job_of(cases.first(IMPROVES)).space
    prior = learn(Knowledge(None, None).entries()).prior(space)
    for at in range(len(space.names)):
        prefix = space.default_point[:at]
        options = space.options(prefix)
        assert prior(prefix, options) == pytest.approx([1 / len(options)] * len(options))


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        7,
        {"steps": []},
        {"tiling": {}, TAUGHT: None},
        {TAUGHT: {"chain": [["width", 0, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width", 2, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width", -1, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 0, "size": "x", "chain": [["width", 0, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width", 0.5, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width", 0, 0, []]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width", 0, 0, [[1], {}]]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [["width"]]}},
        {TAUGHT: {"folds": 0, "size": 1, "chain": [[["width"], 0, 0, [1, 2]]]}},
        {TAUGHT: {"folds": 10**400, "size": 1, "chain": [["width", 0, 0, [1, 10**400]]]}},
    ],
)
def test_entries_that_do_not_say_are_skipped(schedule):
    bad = bank_cases.entry("old", schedule=schedule)
    good = told(("width", 1, 0, TILES))
    assert examples(bad) == [] and not learn([bad]).weights
    assert learn([bad, good]) == learn([good]) and learn([good]).weights


@settings(max_examples=15)
@given(bank_cases.banks)
def test_no_bank_breaks_it(entries):
    assert not learn(entries).weights


def test_what_is_kept_says_how_it_was_decided(tuned):
    operator, found = tuned
    entry = entry_of(found, BUDGET)
    space = job_of(operator).space
    point = next(t.point for t in found.trace.trials if t.cost == found.after_cycles)
    said = entry.schedule[TAUGHT]
    assert said == decisions_of(space, point) and len(said["chain"]) >= 2
    several = [at for at in range(len(point)) if len(space.options(point[:at])) > 1]
    for at, (name, taken, usual, options) in zip(several, said["chain"], strict=True):
        assert space.names[at].startswith(name) and options[taken] == point[at]
        assert usual == -1 or options[usual] == space.default_point[at]
    assert choice_of(entry.schedule, operator.chip.name) == found.choice
    assert from_bank(operator, entry, "custom").choice == found.choice


def test_cubes_say_nothing():
    found = tune_operator(cases.first(cases.product(33, 70, 90)), BUDGET)
    assert found.choice.tiling is not None
    assert TAUGHT not in entry_of(found, BUDGET).schedule


def test_both_banks_teach_and_old_models_do_not(tmp_path):
    one, two, old = (told(("width", k, 0, TILES), problem=str(k)) for k in range(3))
    old = replace(old, model_version=MODEL_VERSION + 1)
    better = replace(two, after_cycles=110)
    write_builtin([one, two], tmp_path / "bank.gz")
    with Store(tmp_path / "bank.db") as store:
        store.put(better)
        store.put(old)
    with Knowledge(tmp_path / "bank.db", tmp_path / "bank.gz") as knowledge:
        assert [e.after_cycles for e in knowledge.entries()] == [110, 120]
    memory = Knowledge(None, tmp_path / "bank.gz")
    memory.keep(better)
    assert [e.after_cycles for e in memory.entries()] == [110, 120]


def test_it_is_off_unless_asked_for(tuned):
    operator, found = tuned
    compiled = compile_graph(IMPROVES, operator.chip)

    def trials(settings, *entries):
        bank = Knowledge(None, None)
        for entry in entries:
            bank.keep(entry)
        return tune_network(compiled, settings, bank).results[0].trace.trials

    lesson = told(("share", 3, 0, TILES), ("width", 0, 0, TILES), ("depth", 2, 0, (2, 3, 1)))
    asked = replace(BUDGET, prior=True)
    assert trials(BUDGET) == trials(BUDGET, lesson) == found.trace.trials
    on = trials(asked, lesson)
    assert on == trials(asked, lesson) != found.trace.trials and len(on) == len(found.trace.trials)


def test_the_command_has_a_switch():
    for words, wanted in (([], False), (["--policy_prior"], True)):
        given_ = cli_aoe_flags.parser().parse_args(["-j", "2", "-m", "x.onnx", *words])
        assert cli_aoe_flags.settings_of(given_, {}).prior is wanted
