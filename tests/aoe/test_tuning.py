"""Tuning one operator: bounds, seeds, workers, traps, interrupts."""

from dataclasses import replace
from typing import ClassVar

import engine_cases as cases
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe import Settings, tune_operator, tuning as tuning_module
from ascend_lab.aoe.drive import Rules
from ascend_lab.aoe.tuning import NOT_CHECKED, NOT_REACHED, job_of
from ascend_lab.aoe.workers import TimeUpError
from ascend_lab.compiler import compile_graph
from ascend_lab.compiler.lower import lower
from ascend_lab.errors import InputError

CUBE = cases.product(33, 70, 90, "bias relu")
VECTOR = cases.vector((48, 40), "relu")
BATCH = cases.batch(relu=False)
HARD = cases.convolution(1, 16, (14, 14), 32, 3, "bias relu", stride=1, pad=1)
"""Its best bound is not its best tiling."""
DEEPER = Settings(budget=1, early_stop=None, deeper=True)
UNITS = {"cube": CUBE, "vector": VECTOR, "product": BATCH}


def lowered_cycles(result):
    operator = result.operator
    return operator.cycles(lower(operator.piece, operator.chip, result.choice).kernel)


@settings(max_examples=8)
@given(cases.networks, st.sampled_from(cases.CHIPS), st.integers(0, 99), st.integers(1, 9))
def test_bound_after_before(graph, chip, seed, budget):
    for operator in cases.operators_of(compile_graph(graph, chip)):
        found = tune_operator(operator, Settings(budget=budget, seed=seed))
        assert found.before_cycles == operator.default_cycles
        assert found.after_cycles <= found.before_cycles
        assert (found.choice is not None) == (found.after_cycles < found.before_cycles)
        if operator.unit:
            assert 0 < found.bound_cycles <= found.after_cycles
            assert found.trials and found.source == "tuned" and found.gap >= 0 <= found.gain
            assert found.after_cycles == lowered_cycles(found)
            assert not found.proven or found.bound_cycles == found.after_cycles
            assert len({t.point for t in found.trace.trials}) == found.trials
        else:
            assert (found.source, found.bound_cycles, found.trials) == ("none", None, 0)
            assert found.note and found.gap is None


def trap(monkeypatch, operator, how):
    """Let one of the first points of an operator fail in a way; return it."""
    job = job_of(operator)
    point = job.start()[-1]
    monkeypatch.setattr(tuning_module, "job_of", lambda op: cases.trapped(job, point, how))
    return point


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("how", "note"),
    [("raises", "a kernel; got none"), ("breaks", "RuntimeError: broken"), ("hangs", "longer")],
)
def test_a_candidate_that_fails_is_survived(unit, how, note, monkeypatch):
    operator = cases.first(UNITS[unit])
    point = trap(monkeypatch, operator, how)
    limit_s = 1.0 if how == "hangs" else None
    found = tune_operator(operator, Settings(budget=30, trial_limit_s=limit_s, early_stop=None))
    (failed,) = found.trace.failures
    assert failed.point == point and note in failed.note
    assert found.trials > 2 and found.after_cycles <= found.before_cycles
    assert found.bound_cycles <= found.after_cycles == lowered_cycles(found)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_where_every_candidate_fails_the_default_stays(how, monkeypatch):
    operator = cases.first(BATCH)
    job = job_of(operator)
    job.measure = cases.TrapAll(job.measure, (), how)
    monkeypatch.setattr(tuning_module, "job_of", lambda op: job)
    found = tune_operator(operator, Settings(budget=20, trial_limit_s=0.02))
    assert len(found.trace.failures) == found.trials > 1
    assert found.choice is None and found.after_cycles == found.before_cycles
    assert not found.proven and 0 < found.bound_cycles <= found.after_cycles


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("stop", [1, 4])
def test_an_interrupt_keeps_what_was_found(unit, stop):
    operator = cases.first(UNITS[unit])
    heard = []
    whole = tune_operator(operator, Settings(budget=12, search="random"))

    def on_trial(trial):
        heard.append(trial)
        if len(heard) == stop:
            raise KeyboardInterrupt

    found = tune_operator(
        operator, Settings(budget=12, search="random"), rules=Rules(on_trial=on_trial)
    )
    assert found.trace.end == "interrupted"
    assert found.trace.trials == tuple(heard) == whole.trace.trials[:stop]
    best = min(t.cost for t in heard)
    assert found.after_cycles == min(best, operator.default_cycles)
    assert found.bound_cycles <= found.after_cycles
    known = {t.point: (t.cost, t.note) for t in heard}
    later = []
    again = tune_operator(
        operator,
        Settings(budget=12, search="random"),
        rules=Rules(known=known, on_trial=later.append),
    )
    assert again == whole
    assert later == list(whole.trace.trials)


class Counting(cases.Trap):
    """A measure that counts, and has the user press Ctrl-C at one of its calls."""

    calls: ClassVar[list] = []

    def __call__(self, point):
        self.calls.append(point)
        if len(self.calls) == self.point:
            raise KeyboardInterrupt
        return self.measure(point)


def counted(monkeypatch, operator, stop=0):
    job = job_of(operator)
    monkeypatch.setattr(Counting, "calls", [])
    job.measure = Counting(job.measure, stop, "")
    monkeypatch.setattr(tuning_module, "job_of", lambda op: job)
    return Counting.calls


def test_an_interrupted_proof_keeps_what_the_search_found(monkeypatch):
    operator = cases.first(HARD)
    whole = tune_operator(operator, DEEPER)
    calls = counted(monkeypatch, operator, stop=3)
    found = tune_operator(operator, DEEPER)
    assert len(calls) == 3 and found.trace.end == "interrupted" != whole.trace.end
    assert found.trace.trials == whole.trace.trials[:1]
    assert whole.after_cycles < found.after_cycles == found.trace.trials[0].cost
    assert whole.proven and not found.proven
    assert found.bound_cycles <= whole.bound_cycles


def test_a_proof_measures_nothing_twice(monkeypatch):
    operator = cases.first(HARD)
    calls = counted(monkeypatch, operator)
    found = tune_operator(operator, DEEPER)
    assert len(calls) == len(set(calls)) > found.trials
    assert len({t.point for t in found.trace.trials}) == found.trials


def test_a_candidate_that_fails_in_a_proof_ends_only_that(monkeypatch):
    operator = cases.first(HARD)
    calls = counted(monkeypatch, operator)
    tune_operator(operator, DEEPER)
    trap_point = calls[1]
    for how in ("raises", "breaks", "hangs"):
        job = job_of(operator)
        cases.trapped(job, trap_point, how)
        monkeypatch.setattr(tuning_module, "job_of", lambda op, job=job: job)
        found = tune_operator(operator, replace(DEEPER, trial_limit_s=0.3))
        assert found.trials == 1 and not found.proven
        assert found.bound_cycles <= found.after_cycles == min(t.cost for t in found.trace.trials)


def test_no_time_leaves_the_default():
    operator = cases.first(CUBE)
    found = tune_operator(operator, Settings(budget=50), rules=Rules(time_limit_s=-1.0))
    assert found.note == NOT_REACHED and found.trials == 0 and found.source == "none"
    assert found.choice is None and found.after_cycles == operator.default_cycles
    assert found.bound_cycles is None and not found.proven


def test_a_winner_whose_values_take_too_long_to_check_is_not_taken(monkeypatch):
    """The time ends while they are compared: the default stays, and nothing is called proven."""

    def difference_of(*_):
        raise TimeUpError

    monkeypatch.setattr(tuning_module, "difference_of", difference_of)
    found = tune_operator(cases.first(CUBE), Settings(budget=20))
    assert found.choice is None and not found.proven and found.trials
    assert (found.source, found.note) == ("none", NOT_CHECKED)


def test_schedules_of_like_shapes_are_tried_first(monkeypatch):
    operator = cases.first(CUBE)
    other = cases.first(cases.product(40, 70, 96, "bias relu"))
    suited = tune_operator(other, Settings(budget=30))
    job = job_of(operator)
    (near,) = job.points([suited.choice])
    job.start = lambda: [job.default]
    monkeypatch.setattr(tuning_module, "job_of", lambda op: job)
    found = tune_operator(operator, Settings(budget=4, search="genetic"), hints=[suited.choice])
    assert [t.point for t in found.trace.trials][:2] == [job.default, near]


def test_a_search_is_named_by_the_user_or_suits_the_space():
    names = {unit: tune_operator(cases.first(g), Settings(budget=3)).search
             for unit, g in UNITS.items()}  # fmt: skip
    assert names == {"cube": "genetic", "vector": "mcts", "product": "genetic"}
    assert tune_operator(cases.first(BATCH), Settings(budget=3, search="SA")).search == "SA"
    with pytest.raises(InputError, match="a search among"):
        tune_operator(cases.first(BATCH), Settings(search="luck"))
