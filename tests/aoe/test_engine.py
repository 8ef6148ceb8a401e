"""The whole loop: jobs in order, results never slower, values kept, interrupts, seeds, formats."""

from dataclasses import replace
from functools import lru_cache

import engine_cases as cases
import numpy as np
import pytest
from graph_strategies import whole_graphs, whole_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe import Knowledge, Settings, tune
from ascend_lab.aoe import engine as engine_module
from ascend_lab.aoe.tuning import NOT_REACHED
from ascend_lab.chip import load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph import evaluate, run_tasks, simulate_graph

FEW = Settings(budget=4)
CHIP = load_chip("Ascend310")
TINY_L2 = replace(
    CHIP,
    l2=replace(CHIP.l2, size_bytes=1 << 16, kind="cache"),
    device_memory=replace(CHIP.device_memory, rate_bytes_per_s=8e9),
    launch_overhead_s=1e-8,
    queued_launch_s=1e-8,
    barrier_s=1e-8,
)
"""So that a network need not be large to profit from slices."""


def deep(count=2):
    """Return convolutions whose images do not fit into the tiny L2 together."""
    net = cases.Net()
    x = net.input("x", (4, 16, 20, 20))
    for _ in range(count):
        x = net.relu(net.conv2d(x, net.numbers(16, 16, 3, 3), pad=1))
    net.output(x)
    return net.build()


DEEP = deep()


@lru_cache
def whole():
    """Both jobs on the deep network, once for all tests."""
    return tune(DEEP, TINY_L2, "1,2", settings=FEW)


def timeless(tuning):
    operators = tuning.operators and replace(
        tuning.operators,
        compiled=None,
        results=tuple(replace(r, spent_s=0.0) for r in tuning.operators.results),
    )
    return replace(tuning, compiled=None, spent_s=0.0, operators=operators)


def check(tuning):
    assert 0 <= tuning.bound_s <= tuning.result_s <= tuning.baseline_s
    assert (tuning.bound_s > 0) == (tuning.baseline_s > 0)
    assert tuning.result_s == simulate_graph(tuning.compiled).time_s
    assert tuning.gain >= 0 and tuning.gap >= 0


@settings(max_examples=3)
@given(whole_graphs(most=3), st.sampled_from((*cases.CHIPS, "tiny")), st.sampled_from(("2", "1,2")))
def test_results_are_bounded_never_slower_and_compute_the_same(graph, chip, job):
    tuning = tune(graph, TINY_L2 if chip == "tiny" else chip, job, settings=Settings(budget=3))
    check(tuning)
    inputs = whole_inputs(graph)
    found, wanted = run_tasks(tuning.compiled, inputs), evaluate(graph, inputs)
    for one, two in zip(found.values(), wanted.values(), strict=True):
        assert np.abs(one - two).max(initial=0) <= 2e-3 * max(1, np.abs(two).max(initial=0))


def test_slices_come_first_then_the_operators_of_the_sliced_network():
    heard = []
    both = tune(DEEP, TINY_L2, "2,1", settings=FEW, progress=lambda what, *_: heard.append(what))
    assert both.jobs == ("1", "2") and both.subgraph.plan.regions
    first = [i for i, what in enumerate(heard) if "/" not in what and what != "all"]
    then = [i for i, what in enumerate(heard) if "/" in what]
    assert first and then and max(first) < min(then)
    check(both)
    slices = tune(DEEP, TINY_L2, "1", settings=FEW)
    check(slices)
    assert slices.operators is None and slices.subgraph.plan == both.subgraph.plan
    assert slices.result_s == pytest.approx(slices.subgraph.after_s)
    assert slices.baseline_s == pytest.approx(slices.subgraph.before_s)
    assert both.operators.before_s == pytest.approx(slices.result_s)
    assert both.result_s <= slices.result_s < both.baseline_s
    operators = tune(DEEP, TINY_L2, "2", settings=FEW)
    assert operators.subgraph is None and operators.graph is DEEP
    shapes = {r.operator.piece.output.shape[0] for r in both.operators.results}
    assert shapes != {r.operator.piece.output.shape[0] for r in operators.operators.results}


def test_one_seed_one_result_and_a_second_run_from_the_bank(tmp_path):
    one = tune(DEEP, TINY_L2, "1,2", settings=FEW)
    assert timeless(one) == timeless(whole())
    heard = []
    with Knowledge(tmp_path / "bank.db", None) as knowledge:
        first = tune(DEEP, TINY_L2, "1,2", settings=FEW, bank=knowledge)
        assert first.outcomes == ("add",) and "add" in first.operators.outcomes
    second = tune(
        DEEP, TINY_L2, "1,2", settings=FEW, bank=tmp_path / "bank.db",
        progress=lambda *told: heard.append(told),
    )  # fmt: skip
    assert {told[0] for told in heard} == {"all", "compile"} and second.outcomes == ("hit",)
    assert set(second.operators.outcomes) == {"hit"}
    assert second.result_s == first.result_s == one.result_s
    assert second.subgraph.plan == first.subgraph.plan
    other = tune(DEEP, replace(TINY_L2, launch_overhead_s=1e-5), "1", bank=tmp_path / "bank.db")
    assert other.outcomes != ("hit",)


def test_unknown_workers_are_refused():
    with pytest.raises(InputError, match="processes:N"):
        tune(cases.product(), "Ascend910A", executor="threads:2")


def test_what_is_opened_here_is_closed_here(tmp_path, monkeypatch):
    closed = []

    class Watched(Knowledge):
        def close(self):
            closed.append("bank")
            super().close()

    class Some(engine_module.Workers):
        def close(self):
            closed.append("workers")
            super().close()

    monkeypatch.setattr(engine_module, "Knowledge", Watched)
    monkeypatch.setattr(engine_module, "workers_of", lambda text: Some())
    graph = cases.product()
    tune(graph, CHIP, settings=FEW, bank=tmp_path / "bank.db")
    assert sorted(closed) == ["bank", "workers"]
    closed.clear()
    with pytest.raises(InputError):
        tune(
            graph,
            CHIP,
            settings=replace(FEW, search="luck", repeat=True),
            bank=tmp_path / "bank.db",
        )
    assert sorted(closed) == ["bank", "workers"]
    closed.clear()
    with Watched(tmp_path / "bank.db") as mine, Some() as own:
        tune(graph, CHIP, settings=FEW, bank=mine, executor=own)
        assert closed == []
    assert sorted(closed) == ["bank", "workers"]


@pytest.mark.parametrize("stop", ["cuts", "plans", "operators"])
def test_ctrl_c_keeps_what_was_found(stop, tmp_path):
    heard = []

    def progress(what, *told):
        heard.append(what)
        place = "operators" if "/" in what else what
        if stop == place:
            raise KeyboardInterrupt

    with Knowledge(tmp_path / "bank.db", None) as bank:
        tuning = tune(DEEP, TINY_L2, "1,2", settings=FEW, bank=bank, progress=progress)
    check(tuning)
    if stop == "operators":
        assert tuning.operators.interrupted and tuning.subgraph.plan.regions
        assert tuning.outcomes == ("add",) and tuning.result_s < tuning.baseline_s
    else:
        assert tuning.subgraph.interrupted and tuning.operators is None
        assert tuning.outcomes == ()  # nothing unfinished in the bank
    with Knowledge(tmp_path / "bank.db", None) as bank:
        again = tune(DEEP, TINY_L2, "1,2", settings=FEW, bank=bank)
    assert again.result_s == whole().result_s <= tuning.result_s
    assert again.outcomes == (("hit",) if stop == "operators" else ("add",))


def test_a_slicing_in_the_bank_that_does_not_fit_is_searched_anew(tmp_path):
    file = tmp_path / "bank.db"
    first = tune(DEEP, TINY_L2, "1", bank=file)
    plan = first.subgraph.plan.plain()
    nobody = plan | {"regions": [{**plan["regions"][0], "first": "nobody"}]}
    for schedule in ([{"first": "nothing"}], [7], {"steps": 1}, {**plan, "regions": 1}, nobody):
        with Knowledge(file, None) as bank:
            (entry,) = bank._store.entries()
            bank._store._con.execute("DELETE FROM entries")
            bank.keep(replace(entry, schedule=schedule))
            again = tune(DEEP, TINY_L2, "1", bank=bank)
        assert again.result_s == first.result_s and again.outcomes == ("reserved",)


@pytest.mark.parametrize(("dtype", "chip"), [("bf16", "Ascend910B2"), ("int8", "Ascend310"),
                                             ("int8", "Ascend910B2")])  # fmt: skip
def test_other_number_formats(dtype, chip):
    for graph in (cases.product(33, 70, 90), cases.convolution(pad=1), cases.vector(kind="relu")):
        tuning = tune(graph, chip, settings=Settings(budget=3), dtype=dtype)
        check(tuning)
        for result in tuning.operators.results:
            assert result.trials or result.note, result.operator.op
        cubes = [r for r in tuning.operators.results if r.operator.unit == "cube"]
        assert all(r.trials and not r.note and r.after_cycles <= r.before_cycles for r in cubes)
    with pytest.raises(InputError, match="a dtype among"):
        tune(cases.product(), CHIP, dtype="fp64")


def test_a_network_of_views_takes_no_time():
    net = cases.Net()
    net.output(net.reshape(net.input("x", (4, 6)), shape=(2, 12)))
    for job in ("1", "2", "1,2"):
        tuning = tune(net.build(), CHIP, job, settings=FEW)
        check(tuning)
        assert (tuning.result_s, tuning.gain, tuning.gap) == (0.0, 0.0, 0.0)
        assert tuning.operators is None or tuning.operators.gain == 0.0


def test_wanted_operators_and_nothing_to_tune():
    net = cases.Net()
    net.output(net.transpose(net.input("x", (5, 7)), perm=(1, 0)))
    for job in ("1", "2", "1,2"):
        tuning = tune(net.build(), CHIP, job, settings=FEW)
        assert tuning.gain == 0.0 and tuning.result_s == tuning.baseline_s
        if tuning.operators:
            assert all(r.note for r in tuning.operators.results)
    none = tune(cases.product(), CHIP, settings=FEW, wanted=lambda op: False)
    assert none.gain == 0.0 and {r.source for r in none.operators.results} == {"none"}
    assert "not asked for" in {r.note for r in none.operators.results}


@pytest.mark.parametrize("job", ["", "3", "2,4", "1;2"])
def test_unknown_jobs(job):
    said = r"jobs among 1 subgraph, 2 operator, 4 gradient; .*`aoe --job_type 4"
    with pytest.raises(InputError, match=said):
        tune(cases.product(), CHIP, job)


def test_every_stage_tells_of_itself():
    told = []
    tune(DEEP, TINY_L2, "1,2", settings=FEW, progress=lambda *step: told.append(step))
    labels = {label.rpartition(", ")[2] for label, *_ in told}
    stages = {"all", "compile", "cuts", "plans", "bounds", "values"}
    assert stages <= labels and any("/" in label for label in labels - stages)
    whole = [(done, of) for label, done, of, _ in told if label == "all"]
    assert whole == sorted(whole) and all(done < of for done, of in whole)
    # each job ends within its own part of one limit
    late = tune(DEEP, TINY_L2, "1,2", settings=replace(FEW, time_limit_s=1e-6))
    assert late.result_s == late.baseline_s and "nothing was tuned" in late.warnings[-1]
    assert {r.note for r in late.operators.results if r.operator.unit} == {NOT_REACHED}
