"""Tuning networks: their operators, jobs and what is known already."""

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import engine_cases as cases
import numpy as np
import pytest
from graph_strategies import whole_graphs
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe import (
    Knowledge,
    Settings,
    engine as engine_module,
    tune_operator,
    tuning as tuning_module,
    workers as clock_module,
    workers as workers_module,
)
from ascend_lab.aoe.bank.records import from_line, to_line
from ascend_lab.aoe.cube import CubeJob
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.engine import (
    MIN_SEARCH_S,
    Session,
    estimated_gain_cycles,
    tune_network,
    with_useful_choices,
)
from ascend_lab.aoe.entries import (
    HINT_COUNT,
    POSITIVE_FIELDS,
    entry_of,
    features_of,
    from_bank,
    key_of,
    suggestions,
)
from ascend_lab.aoe.operators import operators_of, unit_of
from ascend_lab.aoe.tuning import NOT_CHECKED, NOT_REACHED, job_of, untuned
from ascend_lab.aoe.workers import attempt
from ascend_lab.compiler import compile_graph, simulate_graph
from ascend_lab.compiler.lower import lower
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.ops.matmul import warm_cycles

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


def as_used(found):
    """What matters of a result, wherever it is from."""
    return [(r.operator.name, r.choice, r.after_cycles, r.bound_cycles, r.proven)
            for r in found.results]  # fmt: skip


def hearing(heard, stop=0):
    """Return who hears of trials, not of bounds or checks, and presses Ctrl-C at one of them."""

    def progress(*told):
        heard.extend([told] if told[3] else [])
        if told[3] and len(heard) == stop:
            raise KeyboardInterrupt

    return progress


def test_miss_hit_repeat_deeper(tmp_path):
    trials = []
    progress = hearing(trials)
    with bank(tmp_path) as knowledge:
        first = tune_network(COMPILED, FEW, knowledge, session=Session(progress=progress))
    assert len(first.outcomes) == TUNABLE and set(first.outcomes) <= {"add", "unsatisfied"}
    assert "add" in first.outcomes and first.gain > 0
    tried = [t for r in first.results if r.trace for t in r.trace.trials]
    assert len(trials) == sum(t.note != "branch and bound" for t in tried)
    with bank(tmp_path) as knowledge:
        trials.clear()
        second = tune_network(COMPILED, FEW, knowledge, session=Session(progress=progress))
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
            self.time_s = time_s
            self.name = name
            self.operators = operators

    def slower(compiled):
        kernels = []
        for task, old in zip(compiled.tasks, COMPILED.tasks, strict=True):
            if task.lowered is not None:
                change = 1.0 if task.piece.key == bad else -0.01
                changed = task.lowered is not old.lowered
                kernels.append(Time(1 / len(COMPILED.tasks) + changed * change, task.name))
        return Time(sum(k.time_s for k in kernels), operators=kernels)

    monkeypatch.setattr(engine_module, "simulate_graph", slower)
    before_s = slower(COMPILED).time_s
    _, after_s, kept = with_useful_choices(COMPILED, found, before_s)
    assert after_s < before_s
    assert [r.choice is None for r in kept] == [True] + [False] * (len(found) - 1)
    assert kept[0].after_cycles == kept[0].before_cycles and "not in this network" in kept[0].note
    monkeypatch.setattr(engine_module, "simulate_graph", lambda c: Time(1.0 + (c is not COMPILED)))
    tuned, after_s, kept = with_useful_choices(COMPILED, found, 1.0)
    assert tuned is COMPILED and after_s == 1.0
    assert all(r.choice is None for r in kept)  # the report says what the network has


class Clock:
    """Time that passes when it is told to, and at every look by `step`."""

    def __init__(self, step=0.0):
        self.now = 100.0
        self.step = step

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize("limit_s", [1.5, 300.0])
def test_time_is_shared_by_what_can_be_gained(limit_s, monkeypatch):
    """The one with most to gain goes first; none gets less than is of use."""
    clock = Clock()
    given_s = {}
    monkeypatch.setattr(clock_module, "time", clock)
    monkeypatch.setattr(engine_module, "CHECK_S_PER_INSTRUCTION", 0.0)

    def tune(operator, settings, *, rules, **_):
        time_limit_s = rules.time_limit_s
        given_s[operator.name] = time_limit_s
        clock.now = time_limit_s and clock.now + time_limit_s
        return untuned(operator, "")

    monkeypatch.setattr(engine_module, "tune_operator", tune)
    found = tune_network(COMPILED, Settings(time_limit_s=limit_s))
    room = {op.name: estimated_gain_cycles(op) for op in cases.operators_of(COMPILED) if op.unit}
    order = sorted(room, key=lambda name: -room[name])
    assert min(room.values()) > 0 and list(given_s) == order[: len(given_s)]
    assert sum(given_s.values()) == pytest.approx(limit_s)
    if limit_s > 100:
        for name, found_s in given_s.items():
            assert found_s == pytest.approx(limit_s * room[name] / sum(room.values()))
    else:
        late = [r.operator.name for r in found.results if r.note == NOT_REACHED]
        assert late == [name for name in room if name not in given_s] and late
        assert next(iter(given_s.values())) >= MIN_SEARCH_S
    given_s.clear()
    clock.now = None  # no look at it without a limit
    tune_network(COMPILED, Settings())
    assert list(given_s.values()) == [None] * TUNABLE


@pytest.mark.parametrize("limit_s", [0.5, 3.0, 400.0])
def test_no_stage_works_behind_the_deadline(limit_s, monkeypatch):
    """Each look at the clock takes a tenth of a second: nothing begins when the time is over."""
    clock = Clock(0.1)
    late = []
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


WORK = ((tuning_module, "job_of"), (tuning_module, "difference_of"), (tuning_module, "prove"),
        (workers_module, "attempt"))  # fmt: skip


@pytest.mark.parametrize("stop", [1, 6, 9])
def test_ctrl_c_keeps_what_was_found_and_the_next_run_goes_on(stop, tmp_path):
    plain = replace(FEW, search="random", early_stop=None)
    whole = alone(plain)
    heard = []
    with bank(tmp_path) as knowledge:
        found = tune_network(
            COMPILED, plain, knowledge, session=Session(progress=hearing(heard, stop))
        )
    assert found.interrupted and len(heard) == stop == sum(r.trials for r in found.results)
    assert whole.after_s <= found.after_s <= found.before_s
    with bank(tmp_path) as knowledge:
        for result in filter(lambda r: r.choice, found.results):  # the interrupted one's, too
            kept, _ = knowledge.find(key_of(result.operator))
            assert kept.after_cycles == result.after_cycles
    left = [r for r in found.results if r.note == "interrupted"]
    assert all(r.choice is None for r in left)
    cut = [r for r in found.results if r.trace and r.trace.end == "interrupted"]
    assert len(found.outcomes) + len(left) + sum(not r.choice for r in cut) == TUNABLE
    measured = []
    original = engine_module.tune_operator

    def counting(operator, settings, *, rules, **more):
        measured.append(len(rules.known))
        return original(operator, settings, rules=rules, **more)

    with pytest.MonkeyPatch.context() as patch, bank(tmp_path) as knowledge:
        patch.setattr(engine_module, "tune_operator", counting)
        again = tune_network(COMPILED, plain, knowledge)
    assert as_used(again) == as_used(whole) and again.after_s == whole.after_s
    assert sum(measured) == sum(r.trials for r in cut)
    with sqlite3.connect(tmp_path / "bank.db") as con:
        assert con.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    con.close()


CHILD = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_network import COMPILED, PLAIN, bank
from pathlib import Path
from ascend_lab.aoe.engine import Session, tune_network
heard = []
def progress(*told):
    heard.extend([told] if told[3] else [])
    if len(heard) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
tune_network(COMPILED, PLAIN, bank(Path({folder!r})), session=Session(progress=progress))
"""
PLAIN = Settings(budget=5, search="random", early_stop=None)


def test_a_killed_run_loses_nothing(tmp_path):
    code = CHILD.format(path=sys.path, folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    heard = []
    with bank(tmp_path) as knowledge:
        again = tune_network(COMPILED, PLAIN, knowledge, session=Session(progress=hearing(heard)))
        assert knowledge.warnings == []
    whole = alone(PLAIN)
    assert as_used(again) == as_used(whole) and again.after_s == whole.after_s
    assert again.outcomes.count("hit") >= 1
    measured = sum(r.trials for r in again.results)
    hits = {r.operator.name for r in again.results if r.source == "custom"}
    total = sum(r.trials for r in whole.results if r.operator.name not in hits)
    assert hits and measured == total == len(heard)


def test_candidates_that_all_fail_leave_no_entry(tmp_path, monkeypatch):
    """Else a second run would take the failure for the best there is."""

    def failing(operator):
        job = original(operator)
        job.measure = cases.TrapAll(job.measure, (), "raises")
        return job

    original = engine_module.job_of
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


def blocks(count=3, rows=64, columns=64):
    """Return a network of equal blocks: a product and a softmax each."""
    net = cases.Net()
    x = net.input("x", (rows, columns))
    for _ in range(count):
        x = net.softmax(net.relu(net.matmul(x, net.numbers(columns, columns))), axis=-1)
    net.output(x)
    return net.build()


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_equal_kernels_are_one_operator(chip):
    compiled = compile_graph(blocks(4), chip)
    found = operators_of(compiled)
    kernels = [task for task in compiled.tasks if task.lowered is not None]
    assert sum(op.count for op in found) == len(kernels) > len(found)
    assert len({op.piece.key for op in found}) == len(found)
    assert len({op.name for op in found}) == len(found)
    assert [op.count for op in found if op.unit == "cube"] == [4]
    first = [task.name for task in kernels]
    assert [first.index(op.name) for op in found] == sorted(first.index(op.name) for op in found)


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_an_operator_starts_on_the_l2_of_its_network(chip):
    compiled = compile_graph(blocks(4), chip)
    shares = {op.name: op.timeline.hits for op in simulate_graph(compiled).operators}
    for op in operators_of(compiled):
        if op.count == 1:
            held = {n.partition(".")[0] for n, share in shares[op.name].items() if share >= 0.5}
            assert op.warm == held
    (product,) = [op for op in operators_of(compiled) if op.unit == "cube"]
    first = product.piece.graph.nodes[0]
    assert product.warm == {first.inputs[0]}  # just written; weights are read for the first time
    own = [t for t in compiled.tasks if t.piece.key == product.piece.key]
    assert product.default_cycles == warm_cycles(own[0].lowered.kernel, op.chip, product.warm)
    cold = warm_cycles(own[0].lowered.kernel, op.chip, ())
    hot = warm_cycles(own[0].lowered.kernel, op.chip, first.inputs)
    assert cold > product.default_cycles > hot
    if compiled.chip.l2.kind == "cache":  # weights come ahead
        every = operators_of(replace(compiled, prefetch=True))
        (ahead,) = [op for op in every if op.unit == "cube"]
        assert ahead.warm == {*first.inputs} and ahead.default_cycles == hot


def test_who_does_not_find_its_inputs_in_l2_is_another_problem():
    operator = cases.first(cases.product())
    warm = replace(operator, warm=frozenset(operator.piece.graph.inputs))
    assert operator.problem != warm.problem and key_of(operator) != key_of(warm)
    edited = replace(operator.chip, clock_hz=2 * operator.chip.clock_hz)
    other = replace(operator, chip=edited)
    assert key_of(operator) != key_of(other) and key_of(operator).chip == key_of(other).chip


def graph_of(build, *shapes):
    net = cases.Net()
    inputs = [net.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
    net.output(build(net, *inputs))
    return net.build()


IMAGE = (1, 16, 8, 8)
UNITS = {
    "convolution": (cases.convolution(), "cube", ""),
    "product": (cases.product(), "cube", ""),
    "batch": (cases.batch(), "product", ""),
    "turned product": (graph_of(lambda n, a, b: n.matmul(a, b, trans_a=True), (24, 20), (24, 17)),
                       "product", ""),
    "fold": (cases.vector(kind="reduce_sum"), "vector", ""),
    "depthwise": (graph_of(lambda n, x: n.depthwise_conv2d(x, n.numbers(16, 1, 3, 3)), IMAGE),
                  "cube", ""),
    "joint": (graph_of(lambda n, x: n.add(n.conv2d(x, n.numbers(16, 16, 1, 1)),
                                          n.conv2d(x, n.numbers(16, 16, 1, 1))), IMAGE),
              "joint", ""),
    "computed weights": (graph_of(lambda n, x, w: n.conv2d(x, w), IMAGE, (16, 16, 3, 3)),
                         "", "computed, not constant"),
    "pool": (graph_of(lambda n, x: n.max_pool2d(x, kernel=2, stride=2), IMAGE), "", ""),
    "transposed convolution": (
        graph_of(lambda n, x: n.conv_transpose2d(x, n.numbers(16, 8, 3, 3)), IMAGE),
        "", "hand-written"),
}  # fmt: skip


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("kind", UNITS)
def test_which_tuner_an_operator_is_for(kind, chip):
    graph, unit, reason = UNITS[kind]
    op = graph.nodes[0].op
    found = operators_of(compile_graph(graph, chip))
    (operator,) = [o for o in found if any(n.op == op for n in o.piece.graph.nodes)]
    assert (operator.unit, reason in operator.reason) == (unit, True)
    assert bool(operator.reason) == (not unit)
    for other in found:
        assert (other.unit, other.reason) == unit_of(other.piece, load_chip(chip))
        if other.op == "trans_data":
            assert not other.unit and "hand-written" in other.reason
    assert np.isfinite(operator.default_cycles) and operator.default_cycles > 0


chips = st.sampled_from(cases.CHIPS)


def check(job, seed):
    """A few points and the default: cycles are the lowered kernel's, and no bound exceeds them."""
    operator = job.operator
    rng = np.random.default_rng(seed)
    points = [job.space.sample(rng) for _ in range(4)]
    low, proven = job.bound(())
    assert 0 < low <= operator.default_cycles
    assert proven == (low == operator.default_cycles)
    for point in points:
        cycles = job.measure(point)
        kernel = lower(operator.piece, operator.chip, job.choice(point)).kernel
        assert cycles == warm_cycles(kernel, operator.chip, operator.warm), point
        assert low <= cycles, point
    if isinstance(job, CubeJob):
        rows = [job.space.row(p) for p in points]
        walked = job.bounds.walk(np.array(rows))
        for point, row, tight in zip(points, rows, walked, strict=True):
            assert job.bounds.closed_form[row] <= tight <= job.measure(point), point
            assert job.measure.bound(point) == job.bounds.closed_form[row]
    assert job.measure(job.start()[0]) == operator.default_cycles


@settings(max_examples=10)
@given(cases.networks, chips, st.integers(0, 999))
def test_points_are_timed_as_lowered_and_bounded_from_below(graph, chip, seed):
    for job in cases.jobs_of_graph(graph, chip):
        rng = np.random.default_rng(seed)
        names = [n for n in job.operator.piece.graph.inputs if rng.random() < 0.5]
        check(job_of(cases.with_warm(job.operator, frozenset(names))), seed)


@pytest.mark.parametrize("chip", cases.CHIPS)
@pytest.mark.parametrize("kind", ["product", "square", "convolution"])
def test_a_tensor_read_twice_by_one_kernel(kind, chip):
    """It is fetched once, and warm for both its readers or for none."""
    graph = cases.shared(kind)
    jobs = [j for j in cases.jobs_of_graph(graph, chip) if j.operator.unit == "cube"]
    inputs = jobs[0].operator.piece.graph.inputs
    for warm in (frozenset(), frozenset(inputs[:1]), frozenset(inputs)):
        check(job_of(cases.with_warm(jobs[0].operator, warm)), 0)


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_a_warm_l2_makes_kernels_and_bounds_shorter(chip):
    operator = cases.first(cases.product(200, 256, 240, "bias add relu"), chip, "cube")
    names = operator.piece.graph.inputs
    cold, warm = (job_of(cases.with_warm(operator, frozenset(held))) for held in ((), names))
    assert cold.operator.default_cycles > warm.operator.default_cycles
    rows = np.argsort(cold.bounds.closed_form)[:50]
    assert (warm.bounds.closed_form <= cold.bounds.closed_form).all()
    assert warm.bounds.walk(rows).min() < cold.bounds.walk(rows).min()


SMALL = {
    "product": cases.product(20, 40, 24, "relu"),
    "convolution": cases.convolution(1, 16, (5, 5), 16, 3, "bias add relu", pad=1),
    "batch": cases.batch(relu=False),
    "vector": cases.vector((3, 40), "relu"),
}
LARGER = SMALL | {"vector": cases.vector((48, 40), "relu")}


@pytest.mark.parametrize("chip", cases.CHIPS)
@pytest.mark.parametrize("kind", SMALL)
def test_what_is_proven_is_the_optimum_of_the_space(kind, chip):
    """Against every point of the space, measured."""
    graph = SMALL[kind]
    operator = cases.first(graph, chip)
    job = job_of(operator)
    assert job.space.size <= 400
    least = min(attempt(job.measure, p)[0] for p in job.space.points())
    found = tune_operator(operator, Settings(budget=job.space.size))
    assert found.bound_cycles <= least
    assert found.after_cycles == min(least, operator.default_cycles)
    assert found.proven
    short = tune_operator(operator, Settings(budget=2))
    assert short.bound_cycles <= least <= short.after_cycles <= operator.default_cycles
    if short.proven:
        assert short.after_cycles == min(least, operator.default_cycles)


@pytest.mark.parametrize("kind", SMALL)
def test_trials_only_raise_the_bound(kind):
    job = job_of(cases.first(LARGER[kind]))
    points = list(job.space.points())
    some = points[:: max(1, len(points) // 9)]
    trials = [Trial(i, p, job.measure(p)) for i, p in enumerate(some)]
    best = job.operator.default_cycles
    before = 0
    for count in range(len(trials) + 1):
        best = min([best, *(t.cost for t in trials[:count])])
        low, proven = job.bound(trials[:count])
        assert before <= low <= best
        assert not proven or low == best
        before = low


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("note", ["took longer than 1 s", "its worker process died"])
def test_what_was_not_measured_is_not_proven(kind, note):
    """A candidate lost on the way may still be the best one."""
    job = job_of(cases.first(LARGER[kind]))
    costs = {p: job.measure(p) for p in job.space.points()}
    least = min(costs.values())
    assert least < max(costs.values())
    trials = [Trial(i, p, *((c, "") if c > least else (np.inf, note)))
              for i, (p, c) in enumerate(costs.items())]  # fmt: skip
    low, proven = job.bound(trials)
    assert low <= least
    assert not proven or job.operator.default_cycles == least


BUDGET = Settings(budget=8, seed=5)
BATCH = cases.batch(lead=(4,), relu=False)
CUBE = cases.product(33, 70, 90, "bias relu")
VECTOR = cases.vector((64, 300), "relu")
VECTOR_UNITS = {"cube": CUBE, "vector": VECTOR, "product": cases.batch(relu=False)}


@lru_cache
def kept(unit):
    """The operator of a unit, tuned, and the entry it leaves; once for all tests."""
    operator = cases.first(VECTOR_UNITS[unit])
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
            assert back == replace(found, source="custom", trace=None, note="")


NONSENSE = [{"tiling": {"base_m": 16}}, {"tiling": 5}, {"steps": [["bind", "nothing", "x"]]},
            {"steps": "none"}, {"else": 1}, [1, 2], 7, "text"]  # fmt: skip


@pytest.mark.parametrize("unit", VECTOR_UNITS)
@pytest.mark.parametrize("schedule", NONSENSE)
def test_a_schedule_that_does_not_fit_leaves_the_default_and_is_not_suggested(unit, schedule):
    operator, _, good = kept(unit)
    assert good.improved
    back = from_bank(operator, replace(good, schedule=schedule), "custom")
    knowledge = Knowledge(None, None)
    knowledge.keep(replace(good, key=replace(good.key, problem="other"), schedule=schedule))
    assert knowledge.nearest(key_of(operator), features_of(operator), 3)
    near = suggestions(operator, knowledge)
    assert not near or job_of(operator).points(near) == []
    assert back.choice is None and back.after_cycles == operator.default_cycles
    assert "does not fit" in back.note and not back.proven
    assert back.bound_cycles <= back.after_cycles


@pytest.mark.parametrize("unit", ["cube", "product"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, 1.5, "x", None, [1], {}])
def test_a_tiling_with_a_wrong_number_does_no_harm(unit, value):
    """Banks are merged from files of other people."""
    (operator, _, good) = kept(unit)
    knowledge = Knowledge(None, None)
    job = job_of(operator)
    for name in POSITIVE_FIELDS:
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
    operator = cases.first(VECTOR_UNITS["vector"])
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
    assert near == [kept[64], kept[80], kept[48]] and len(near) == HINT_COUNT
    assert suggestions(cases.first(VECTOR_UNITS["vector"]), knowledge) == []
    other = cases.first(cases.product(65, 70, 90, "bias relu"), "Ascend910A")
    assert suggestions(other, knowledge) == []
    found = tune_operator(operator, Settings(budget=2), hints=near)
    assert found.trials
