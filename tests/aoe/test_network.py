"""Operator tuning of networks: the bank's flow, time shared, interrupts, kills, never slower."""

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import engine_cases as cases
import pytest
from graph_strategies import whole_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe import Knowledge, Settings, tune_network
from ascend_lab.aoe import network as network_module
from ascend_lab.aoe import tuning as tuning_module
from ascend_lab.aoe import workers as clock_module
from ascend_lab.aoe import workers as workers_module
from ascend_lab.aoe.network import LEAST_S, entry_of, estimated, key_of, potential, together
from ascend_lab.aoe.tuning import NOT_CHECKED, NOT_REACHED, untuned
from ascend_lab.chip import load_chip
from ascend_lab.graph import compile_graph, simulate_graph

FEW = Settings(budget=5)


def small_net():
    """Two products and what is between them: three operators that can be tuned, and conversions."""
    net = cases.Net()
    x = net.input("x", (33, 70))
    h = net.relu(net.add(net.matmul(x, net.numbers(70, 90)), net.numbers(90)))
    net.output(net.matmul(h, net.numbers(90, 20)))
    return net.build()


NET = small_net()
COMPILED = compile_graph(NET, "Ascend310")
TUNABLE = sum(bool(op.unit) for op in cases.operators_of(COMPILED))
assert TUNABLE == 3


@lru_cache
def alone(settings):
    """The network tuned with these settings and no bank, once for all tests."""
    return tune_network(COMPILED, settings)


def bank(folder, **more):
    return Knowledge(folder / "bank.db", None, **more)


def timeless(found):
    results = tuple(replace(r, spent_s=0.0) for r in found.results)
    return replace(found, results=results, compiled=None)


def as_used(found):
    """What matters of a result, wherever it is from."""
    return [(r.operator.name, r.choice, r.after_cycles, r.bound_cycles, r.proven)
            for r in found.results]  # fmt: skip


def test_miss_hit_repeat_deeper(tmp_path):
    trials = []

    def progress(*heard):
        trials.extend([heard] if heard[3] else [])  # of a trial, not of bounds or checks

    with bank(tmp_path) as knowledge:
        first = tune_network(COMPILED, FEW, knowledge, progress=progress)
    assert len(first.outcomes) == TUNABLE and set(first.outcomes) <= {"add", "unsatisfied"}
    assert "add" in first.outcomes and first.gain > 0
    assert len(trials) == sum(
        len([t for t in r.trace.trials if t.note != "branch and bound"])
        for r in first.results
        if r.trace
    )
    with bank(tmp_path) as knowledge:
        trials.clear()
        second = tune_network(COMPILED, FEW, knowledge, progress=progress)
        assert second.outcomes == ("hit",) * TUNABLE
        assert not trials and not any(r.trials for r in second.results)
        assert {r.source for r in second.results} == {"custom", "none"}
        assert as_used(second) == as_used(first) and second.after_s == first.after_s
        again = tune_network(COMPILED, replace(FEW, repeat=True), knowledge)
        assert again.outcomes == ("reserved",) * TUNABLE  # the same seed finds the same
        assert all(r.trials for r in again.results if r.operator.unit)
        deeper = tune_network(COMPILED, replace(FEW, deeper=True), knowledge)
        searched = {r.operator.name for r in deeper.results if r.trials}
        assert searched == {r.operator.name for r in first.results
                            if r.operator.unit and not r.proven}  # fmt: skip
        assert deeper.after_s <= first.after_s


def test_repeat_updates_only_what_is_better(tmp_path):
    compiled = compile_graph(cases.vector((64, 300), "relu"), "Ascend310")
    with bank(tmp_path) as knowledge:
        one = tune_network(compiled, Settings(budget=1), knowledge)
        (result,) = [r for r in one.results if r.operator.unit]
        key = key_of(result.operator)
        assert one.outcomes == ("unsatisfied",) and not knowledge.find(key)[0].improved
        many = tune_network(compiled, Settings(budget=12, repeat=True), knowledge)
        assert many.outcomes == ("update",) and many.gain > 0
        best = knowledge.find(key)[0]
        worse = tune_network(compiled, Settings(budget=1, repeat=True), knowledge)
        assert worse.outcomes == ("reserved",) and knowledge.find(key)[0] == best
        hit = tune_network(compiled, Settings(budget=1), knowledge)
        assert hit.outcomes == ("hit",) and hit.after_s == many.after_s


@settings(max_examples=3)
@given(whole_graphs(most=3), st.sampled_from((*cases.CHIPS, "Ascend310P3")), st.integers(0, 9))
def test_a_network_is_never_slower(graph, chip, seed):
    compiled = compile_graph(graph, chip)
    found = tune_network(compiled, Settings(budget=3, seed=seed))
    assert found.before_s == simulate_graph(compiled).time_s
    assert found.after_s == simulate_graph(found.compiled).time_s <= found.before_s
    assert found.gain >= 0
    used = {t.piece.key for t, o in zip(found.compiled.tasks, compiled.tasks, strict=True)
            if t.lowered is not o.lowered}  # fmt: skip
    assert used == {r.operator.piece.key for r in found.results if r.choice}


def test_choices_that_harm_the_network_are_left_out(monkeypatch):
    """Simulated times are made up: a network with the first choice in it is slower."""
    found = [r for r in alone(FEW).results if r.choice]
    assert len(found) >= 2
    bad = found[0].operator.piece.key

    class Time:
        """Seconds of a kernel, or of a network of them."""

        def __init__(self, time_s, name="", operators=()):
            self.time_s, self.name, self.operators = time_s, name, operators

    def slower(compiled):
        kernels = []
        for task, old in zip(compiled.tasks, COMPILED.tasks, strict=True):
            if task.lowered is not None:
                change = 1.0 if task.piece.key == bad else -0.01
                changed = task.lowered is not old.lowered
                kernels.append(Time(1 / len(COMPILED.tasks) + changed * change, task.name))
        return Time(sum(k.time_s for k in kernels), operators=kernels)

    monkeypatch.setattr(network_module, "simulate_graph", slower)
    before_s = slower(COMPILED).time_s
    _, after_s, kept = together(COMPILED, found, before_s)
    assert after_s < before_s
    assert [r.choice is None for r in kept] == [True] + [False] * (len(found) - 1)
    assert kept[0].after_cycles == kept[0].before_cycles and "not in this network" in kept[0].note
    monkeypatch.setattr(network_module, "simulate_graph", lambda c: Time(1.0 + (c is not COMPILED)))
    tuned, after_s, kept = together(COMPILED, found, 1.0)
    assert tuned is COMPILED and after_s == 1.0
    assert all(r.choice is None for r in kept)  # the report says what the network has


def test_one_seed_gives_one_network():
    assert timeless(tune_network(COMPILED, FEW)) == timeless(alone(FEW))


def test_only_what_the_user_wants():
    found = tune_network(COMPILED, FEW, wanted=lambda op: op.unit == "vector")
    for result in found.results:
        assert bool(result.trials) == (result.operator.unit == "vector")
        if result.operator.unit == "cube":
            assert (result.source, result.note) == ("none", "not asked for")
    nothing = tune_network(COMPILED, FEW, wanted=lambda op: False)
    assert nothing.gain == 0 and nothing.compiled is COMPILED and nothing.outcomes == ()


class Clock:
    """Time that passes when it is told to, and at every look by `step`."""

    def __init__(self, step=0.0):
        self.now, self.step = 100.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize("limit_s", [1.5, 300.0])
def test_time_is_shared_by_what_can_be_gained(limit_s, monkeypatch):
    """The one with most to gain goes first; none gets less than is of use."""
    clock, given_s = Clock(), {}
    monkeypatch.setattr(clock_module, "time", clock)
    monkeypatch.setattr(network_module, "CHECK_S", 0.0)

    def tune(operator, settings, *, time_limit_s, **_):
        given_s[operator.name] = time_limit_s
        clock.now += time_limit_s
        return untuned(operator, "")

    monkeypatch.setattr(network_module, "tune_operator", tune)
    found = tune_network(COMPILED, Settings(time_limit_s=limit_s))
    room = {op.name: estimated(op) for op in cases.operators_of(COMPILED) if op.unit}
    order = sorted(room, key=lambda name: -room[name])
    assert min(room.values()) > 0 and list(given_s) == order[: len(given_s)]
    assert sum(given_s.values()) == pytest.approx(limit_s)
    if limit_s > 100:
        for name, found_s in given_s.items():
            assert found_s == pytest.approx(limit_s * room[name] / sum(room.values()))
    else:
        late = [r.operator.name for r in found.results if r.note == NOT_REACHED]
        assert late == [name for name in room if name not in given_s] and late
        assert next(iter(given_s.values())) >= LEAST_S
    given_s.clear()
    monkeypatch.setattr(network_module, "tune_operator",
                        lambda op, s, time_limit_s, **_: given_s.update({op.name: time_limit_s})
                        or untuned(op, ""))  # fmt: skip
    tune_network(COMPILED, Settings())
    assert list(given_s.values()) == [None] * TUNABLE


@pytest.mark.parametrize("limit_s", [0.5, 3.0, 400.0])
def test_no_stage_works_behind_the_deadline(limit_s, monkeypatch):
    """Each look at the clock takes a tenth of a second: nothing begins when the time is over."""
    clock, late = Clock(0.1), []
    monkeypatch.setattr(clock_module, "time", clock)
    end = clock.now + limit_s
    for module, name in WORK:
        original = getattr(module, name)

        def work(*given, original=original, name=name, **more):
            late.extend([name] if clock.now > end + 0.3 else [])
            return original(*given, **more)

        monkeypatch.setattr(module, name, work)
    found = tune_network(COMPILED, replace(FEW, time_limit_s=limit_s))
    assert not late
    notes = {r.note for r in found.results if r.operator.unit and r.source == "none"}
    assert notes <= {NOT_REACHED, NOT_CHECKED}
    assert bool(notes) == (limit_s < 400) and found.after_s <= found.before_s


WORK = ((tuning_module, "job_of"), (tuning_module, "agree"), (tuning_module, "prove"),
        (workers_module, "attempt"))  # fmt: skip


@pytest.mark.parametrize("stop", [1, 6, 9])
def test_ctrl_c_keeps_what_was_found_and_the_next_run_goes_on(stop, tmp_path):
    plain = replace(FEW, search="random", early_stop=None)
    whole = alone(plain)
    heard = []

    def progress(*told):
        heard.extend([told] if told[3] else [])
        if told[3] and len(heard) == stop:
            raise KeyboardInterrupt

    with bank(tmp_path) as knowledge:
        found = tune_network(COMPILED, plain, knowledge, progress=progress)
    assert found.interrupted and len(heard) == stop
    tried = sum(r.trials for r in found.results)
    assert tried == stop
    assert whole.after_s <= found.after_s <= found.before_s
    with bank(tmp_path) as knowledge:
        for result in found.results:  # the best so far of the interrupted one is kept, too
            if result.choice:
                assert (
                    knowledge.find(key_of(result.operator))[0].after_cycles == result.after_cycles
                )
    left = [r for r in found.results if r.note == "interrupted"]
    assert all(r.choice is None for r in left)
    assert (
        len(found.outcomes)
        + len(left)
        + any(r.trace and r.trace.end == "interrupted" and not r.choice for r in found.results)
        == TUNABLE
    )
    measured = []
    original = network_module.tune_operator

    def counting(operator, settings, *, known, **more):
        measured.append(len(known))
        return original(operator, settings, known=known, **more)

    with pytest.MonkeyPatch.context() as patch, bank(tmp_path) as knowledge:
        patch.setattr(network_module, "tune_operator", counting)
        again = tune_network(COMPILED, plain, knowledge)
    assert as_used(again) == as_used(whole) and again.after_s == whole.after_s
    assert sum(measured) + sum(r.trials for r in found.results if r.trace
                               and r.trace.end != "interrupted") == stop  # fmt: skip
    with sqlite3.connect(tmp_path / "bank.db") as con:
        assert con.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    con.close()


def test_ctrl_c_between_operators(monkeypatch):
    original, done = network_module.tune_operator, []

    def tune(operator, *rest, **more):
        if done:
            raise KeyboardInterrupt
        done.append(operator.name)
        return original(operator, *rest, **more)

    monkeypatch.setattr(network_module, "tune_operator", tune)
    found = tune_network(COMPILED, FEW)
    assert found.interrupted
    assert [r.operator.name for r in found.results if r.trials] == done
    assert [r.note for r in found.results].count("interrupted") == TUNABLE - 1


CHILD = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_network import COMPILED, PLAIN, bank
from pathlib import Path
from ascend_lab.aoe import tune_network
heard = []
def progress(*told):
    heard.extend([told] if told[3] else [])
    if told[3] and len(heard) == {stop}:
        os.kill(os.getpid(), signal.SIGKILL)
tune_network(COMPILED, PLAIN, bank(Path({folder!r})), progress=progress)
"""
PLAIN = Settings(budget=5, search="random", early_stop=None)


@pytest.mark.parametrize("stop", [7])
def test_a_killed_run_loses_nothing(stop, tmp_path):
    code = CHILD.format(path=sys.path, stop=stop, folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    heard = []

    def progress(*told):
        heard.extend([told] if told[3] else [])

    with bank(tmp_path) as knowledge:
        again = tune_network(COMPILED, PLAIN, knowledge, progress=progress)
        assert knowledge.warnings == []
    whole = alone(PLAIN)
    assert as_used(again) == as_used(whole) and again.after_s == whole.after_s
    assert again.outcomes.count("hit") >= 1
    measured = sum(r.trials for r in again.results)
    hits = {r.operator.name for r in again.results if r.source == "custom"}
    total = sum(r.trials for r in whole.results if r.operator.name not in hits)
    assert hits and measured == total == len(heard)


def test_known_trials_are_not_measured_again(tmp_path, monkeypatch):
    """After a kill, what was saved answers for the kernels."""
    operator = cases.first(cases.product())
    heard = []

    def progress(*told):
        heard.extend([told] if told[3] else [])
        if told[3] and len(heard) == 4:
            raise KeyboardInterrupt

    compiled = compile_graph(cases.product(), "Ascend310")
    with bank(tmp_path) as knowledge:
        tune_network(compiled, PLAIN, knowledge, progress=progress,
                     wanted=lambda op: op.unit == "cube")  # fmt: skip
        original, calls = network_module.tune_operator, []

        def counting(op, settings, *, known, **more):
            calls.append(dict(known))
            found = original(op, settings, known=known, **more)
            assert [(t.cost, t.note) for t in found.trace.trials[: len(known)]] == [*known.values()]
            return found

        monkeypatch.setattr(network_module, "tune_operator", counting)
        tune_network(compiled, PLAIN, knowledge, wanted=lambda op: op.unit == "cube")
        other = replace(PLAIN, seed=1)
        tune_network(compiled, replace(other, repeat=True), knowledge,
                     wanted=lambda op: op.unit == "cube")  # fmt: skip
    assert [len(known) for known in calls] == [4, 0]
    assert operator.unit == "cube"


def test_a_bank_that_cannot_be_written_does_not_stop_tuning(tmp_path):
    with bank(tmp_path) as knowledge:
        tune_network(COMPILED, FEW, knowledge, wanted=lambda op: op.unit == "vector")
    file = tmp_path / "bank.db"
    before = file.read_bytes()
    # one may write a read-only file as root: SQLite itself is told not to
    with bank(tmp_path) as knowledge:
        knowledge._store._con.execute("PRAGMA query_only=1")
        found = tune_network(COMPILED, FEW, knowledge)
        assert as_used(found) == as_used(alone(FEW))
        assert 0 < found.outcomes.count("hit") < TUNABLE
        (warning,) = {w.partition("bank.db")[0] for w in knowledge.warnings}
        assert "tuning goes on" in knowledge.warnings[0] and "writing" in warning
        assert len(knowledge.unsaved) == TUNABLE - found.outcomes.count("hit")
        again = tune_network(COMPILED, FEW, knowledge)
        assert again.outcomes == ("hit",) * TUNABLE
    assert file.read_bytes() == before


def test_entries_for_the_preset_are_no_hits_on_an_edited_chip(tmp_path):
    chip = load_chip("Ascend310")
    edited = replace(chip, launch_overhead_s=2 * chip.launch_overhead_s)
    with bank(tmp_path) as knowledge:
        tune_network(COMPILED, FEW, knowledge)
        other = tune_network(compile_graph(NET, edited), FEW, knowledge)
        assert "hit" not in other.outcomes and len(other.outcomes) == TUNABLE
        fewer = tune_network(compile_graph(NET, replace(chip, core_count=1)), FEW, knowledge)
        assert "hit" not in fewer.outcomes
        assert tune_network(COMPILED, FEW, knowledge).outcomes == ("hit",) * TUNABLE


def test_nothing_to_tune():
    net = cases.Net()
    net.output(net.transpose(net.input("x", (5, 7)), perm=(1, 0)))
    found = tune_network(compile_graph(net.build(), "Ascend310"), FEW)
    assert found.gain == 0.0 and found.after_s == found.before_s and found.outcomes == ()
    assert found.results and all(r.source == "none" and r.note for r in found.results)
    assert potential(found.results[0].operator) == 0.0


def test_candidates_that_all_fail_leave_no_entry(tmp_path, monkeypatch):
    """Else a second run would take the failure for the best there is."""

    def failing(operator):
        job = original(operator)
        job.measure = Never(job.measure, (), "raises")
        return job

    original = network_module.job_of
    monkeypatch.setattr("ascend_lab.aoe.tuning.job_of", failing)
    compiled = compile_graph(cases.batch(relu=False), "Ascend310")
    with bank(tmp_path) as knowledge:
        found = tune_network(compiled, FEW, knowledge)
        assert found.gain == 0 and found.outcomes == ()
        (result,) = [r for r in found.results if r.operator.unit]
        assert len(result.trace.failures) == result.trials > 0
        assert knowledge.find(key_of(result.operator)) is None
        with pytest.raises(AssertionError):
            assert entry_of(result, FEW).improved


class Never(cases.Trap):
    """Raises for every point."""

    def __call__(self, point):
        return super().__call__(self.point)
