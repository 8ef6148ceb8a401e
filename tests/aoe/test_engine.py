"""The engine: whole tunings, their reports, recorded runs."""

import gzip
import json
import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import engine_cases as cases
import numpy as np
import pytest
from graph_strategies import whole_graphs, whole_inputs
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe import Knowledge, Settings, engine as engine_module, tune
from ascend_lab.aoe.drive import Trace, Trial, replay
from ascend_lab.aoe.engine import Session
from ascend_lab.aoe.saved import (
    Report,
    failed,
    read_schedules,
    save_tuned,
    ticks_best,
)
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.aoe.space import read_recorded, recorded
from ascend_lab.aoe.subgraph import plan_as_data, plan_from_data, prepared
from ascend_lab.aoe.tuning import NOT_REACHED, Result
from ascend_lab.cli import ascend_lab as lab, solve as cli_replay
from ascend_lab.compiler import GraphBuilder, evaluate, simulate_graph
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.values import run_tasks
from ascend_lab.data import data_path
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip

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


def check(tuning):
    assert 0 <= tuning.bound_s <= tuning.result_s <= tuning.baseline_s
    assert tuning.result_s == simulate_graph(tuning.compiled).time_s
    assert tuning.gain >= 0 and tuning.gap >= 0


@settings(max_examples=3)
@given(whole_graphs(most=3), st.sampled_from((*cases.CHIPS, "tiny")), st.sampled_from(("2", "1,2")))
def test_results_are_bounded_never_slower_and_compute_the_same(graph, chip, job):
    tuning = tune(graph, TINY_L2 if chip == "tiny" else chip, job, settings=Settings(budget=3))
    check(tuning)
    inputs = whole_inputs(graph)
    found = run_tasks(tuning.compiled, inputs)
    wanted = evaluate(graph, inputs)
    for one, two in zip(found.values(), wanted.values(), strict=True):
        assert np.abs(one - two).max(initial=0) <= 2e-3 * max(1, np.abs(two).max(initial=0))


def test_slices_come_first_then_the_operators_of_the_sliced_network():
    heard = []
    both = tune(
        DEEP,
        TINY_L2,
        "2,1",
        settings=FEW,
        session=Session(progress=lambda what, *_: heard.append(what)),
    )
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
    luck = replace(FEW, search="luck", repeat=True)
    with pytest.raises(InputError):
        tune(graph, CHIP, settings=luck, bank=tmp_path / "bank.db")
    assert sorted(closed) == ["bank", "workers"]
    closed.clear()
    with Watched(tmp_path / "bank.db") as mine, Some() as own:
        tune(graph, CHIP, settings=FEW, bank=mine, session=Session(executor=own))
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
        tuning = tune(
            DEEP, TINY_L2, "1,2", settings=FEW, bank=bank, session=Session(progress=progress)
        )
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
    plan = first.subgraph.plan.as_dict()
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
        tuning = tune(graph, chip, settings=Settings(budget=3), session=Session(dtype=dtype))
        check(tuning)
        for result in tuning.operators.results:
            assert result.trials or result.note, result.operator.op
        cubes = [r for r in tuning.operators.results if r.operator.unit == "cube"]
        assert all(r.trials and not r.note and r.after_cycles <= r.before_cycles for r in cubes)
    with pytest.raises(InputError, match="a dtype among"):
        tune(cases.product(), CHIP, session=Session(dtype="fp64"))


@pytest.mark.parametrize("job", ["1", "2", "1,2"])
@pytest.mark.parametrize("op", ["reshape", "transpose"])
def test_where_nothing_can_be_tuned_nothing_changes(op, job):
    """A network of views takes no time at all."""
    net = cases.Net()
    x = net.input("x", (4, 6))
    view = op == "reshape"
    net.output(net.reshape(x, shape=(2, 12)) if view else net.transpose(x, perm=(1, 0)))
    tuning = tune(net.build(), CHIP, job, settings=FEW)
    assert tuning.gain == 0.0 and tuning.result_s == tuning.baseline_s
    assert (tuning.result_s == tuning.bound_s == tuning.gap == 0.0) or not view
    assert not tuning.operators or tuning.operators.gain == 0.0
    assert not tuning.operators or all(r.note for r in tuning.operators.results)


@pytest.mark.parametrize("job", ["", "3", "2,4", "1;2"])
def test_unknown_jobs(job):
    said = r"jobs among 1 subgraph, 2 operator, 4 gradient; .*`aoe --job_type 4"
    with pytest.raises(InputError, match=said):
        tune(cases.product(), CHIP, job)


def test_every_stage_tells_of_itself():
    told = []
    tune(
        DEEP,
        TINY_L2,
        "1,2",
        settings=FEW,
        session=Session(progress=lambda *step: told.append(step)),
    )
    labels = {label.rpartition(", ")[2] for label, *_ in told}
    stages = {"all", "compile", "cuts", "plans", "bounds", "values"}
    assert stages <= labels and any("/" in label for label in labels - stages)
    whole = [(done, of) for label, done, of, _ in told if label == "all"]
    assert whole == sorted(whole) and all(done < of for done, of in whole)
    # each job ends within its own part of one limit
    late = tune(DEEP, TINY_L2, "1,2", settings=replace(FEW, time_limit_s=1e-6))
    assert late.result_s == late.baseline_s and "nothing was tuned" in late.warnings[-1]
    assert {r.note for r in late.operators.results if r.operator.unit} == {NOT_REACHED}


@pytest.fixture
def report(small):
    settings = Settings(budget=18)
    return Report("mlp", tune(import_onnx(small), "Ascend310", settings=settings), settings)


def trace(*costs):
    trials = tuple(Trial(i, (i,), cost, "no" * math.isinf(cost)) for i, cost in enumerate(costs))
    return Trace(("a",), trials, "budget")


def test_the_curve_keeps_its_steps_only():
    assert ticks_best(trace(math.inf, 9, 9, 5, 7, 5, 4)) == [[2, 9], [4, 5], [7, 4]]
    assert ticks_best(trace(math.inf)) == []


def test_an_operator_failed_if_none_of_its_candidates_could_be_built():
    for costs, wanted in (((math.inf,) * 3, True), ((math.inf, 3), False), ((), False)):
        assert failed(Result(SimpleNamespace(), None, 1, 1, trace=trace(*costs))) == wanted


def test_the_table_ends_with_totals(report):
    lines = report.table().splitlines()
    assert "model results" in lines[0]
    results = report.tuning.operators.results
    assert len(lines) == 6 + len(results) + sum(bool(one.note) for one in results)
    assert "(before - after) / after" in lines[-2] and f"{report.tuning.gap:.2%}" in lines[-1]
    assert [line for line in lines if len(line) > 88 and " % " not in line] == []
    assert any("proven" in line for line in lines)


def test_schedules_hold_for_a_weight_that_is_stored_transposed(tmp_path):
    builder = GraphBuilder("transposed", "fp16")
    x = builder.input("x", (128, 256))
    builder.output(builder.matmul(x, builder.weight((64, 256)), trans_b=True))
    tuning = tune(builder.build(), "Ascend310")
    assert tuning.gain > 0
    saved = save_tuned(tmp_path, "t", tuning)
    kernels = read_schedules(saved.schedules).choices
    assert any("trans_b = True" in kernel for kernel in kernels)
    assert saved.time_s == pytest.approx(tuning.result_s, rel=1e-9)


def test_kernels_for_one_launch_are_saved_and_read_again(tmp_path, capsys):
    net = cases.Net()
    chip = load_chip("Ascend910B2")
    x = net.silu(net.conv2d(net.input("x", (1, 32, 28, 28)), net.numbers(32, 32, 1, 1)))
    x = net.silu(net.depthwise_conv2d(x, net.numbers(32, 1, 5, 5), pad=2))
    net.output(net.conv2d(x, net.numbers(32, 32, 1, 1)))
    tuning = tune(net.build(), chip, "1,2", settings=FEW)
    assert tuning.subgraph.plan.inside
    assert "own (all together have one):" in Report("inverted", tuning).top(8)
    saved = save_tuned(tmp_path, "inverted", tuning)
    assert saved.time_s == pytest.approx(tuning.result_s, rel=1e-9)
    files = [str(saved.model), "--tuned", str(saved.schedules), "--chip", chip.name]
    assert lab(["simulate", *files, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["time_s"] == pytest.approx(saved.time_s, rel=1e-9)
    assert lab(["run", *files, "--compiled"]) == 0
    head, *lines = saved.schedules.read_text("utf-8").splitlines()
    old = {name: value for name, value in json.loads(head).items() if name != "inside"}
    saved.schedules.write_text("\n".join([json.dumps(old), *lines]), "utf-8")
    assert read_schedules(saved.schedules).launches == replace(tuning.subgraph.plan, inside=False)
    graph = prepared(net.build(), chip)
    data = plan_as_data(tuning.subgraph.plan, graph)
    assert plan_from_data(data, graph) == tuning.subgraph.plan
    del data["inside"]
    assert plan_from_data(data, graph) == replace(tuning.subgraph.plan, inside=False)


FOLDER = data_path("autotune_bruteforce/README.md").parent
SMALL = "a,b,time_ms\n1,2,3.5\n1,4,\n2,2,1.25\n2,8,2\n"


@pytest.mark.parametrize(
    ("name", "size", "optimum", "close"),
    [
        ("conv2d_A100", 4362, 0.5536, 1),
        ("dedispersion_MI250X", 11130, 49.5725, 19),
        ("gemm_RTX_3090", 17956, 5.65784, 6),
    ],
)
def test_the_three_recorded_spaces(name, size, optimum, close):
    found = read_recorded(FOLDER / f"{name}.csv.gz")
    assert (found.space.size, found.optimum) == (size, optimum)
    assert np.sum(found.costs <= 1.05 * optimum) == close
    rows = gzip.decompress((FOLDER / f"{name}.csv.gz").read_bytes()).decode().split()
    for row in rows[1 :: size // 50]:
        *point, time_ms = (float(cell or "inf") for cell in row.split(","))
        assert found.costs[found.space.row(tuple(point))] == time_ms


def test_plain_and_gzipped_files_and_failures(tmp_path):
    (tmp_path / "a.csv").write_text(SMALL)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(SMALL.replace("\n", "\r\n").encode()))
    one, two = (read_recorded(tmp_path / f) for f in ("a.csv", "a.csv.gz"))
    assert one.space.names == ("a", "b") and list(one.space.points()) == list(two.space.points())
    assert one.costs.tolist() == two.costs.tolist() == [3.5, math.inf, 1.25, 2.0]
    assert one.optimum == one((2, 2)) == 1.25
    with pytest.raises(InputError, match=r"ran; got \(1, 4\), which failed"):
        one((1, 4))


BAD = {
    "a,b\n1,2\n": "then time_ms; got the columns a, b",
    "time_ms,a\n1,2\n": "then time_ms; got the columns time_ms, a",
    "time_ms\n1\n": "then time_ms",
    "a,a,time_ms\n1,2,3\n": "different names",
    "": r"\(none\)",
    "a,b,time_ms\n": "rows of configurations; got none",
    "a,b,time_ms\n1,2\n": "3 cells in every row; got 2 in row 2",
    "a,b,time_ms\n1,2,3\n1,x,4\n": "numbers in the column b; got 'x' in row 3",
    "a,b,time_ms\n1,2,3\n1,,4\n": "numbers in the column b; got '' in row 3",
    "a,b,time_ms\n1,2,3\n1,nan,4\n": "numbers in the column b; got 'nan' in row 3",
    "a,b,time_ms\n1,2,3\n1,inf,4\n": "numbers in the column b; got 'inf' in row 3",
    "a,b,time_ms\n1,2,fast\n": "in the column time_ms; got 'fast' in row 2",
    "a,b,time_ms\n1,2,-3\n": "a time above 0",
    "a,b,time_ms\n1,2,nan\n": "a time above 0",
    "a,b,time_ms\n1,2,inf\n": "a time above 0",
    "a,b,time_ms\n1,2,3\n1,2,4\n": r"every configuration once; got \(1, 2\) twice",
    "a,b,time_ms\n1,2,3\n1,2.0,4\n": "every configuration once",
    "a,b,time_ms\n1,2,\n1,3,\n": "a configuration that ran; got 2 failed ones",
    '"a,b,time_ms\n1,2,3\n': "a CSV file",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_say_what_is_wrong(tmp_path, text):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=BAD[text]) as caught:
        read_recorded(file)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(SMALL.encode())[:-9])
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (cut, binary, tmp_path, tmp_path / "none.csv"):
        with pytest.raises(InputError, match="a CSV file"):
            read_recorded(file)


def test_a_replay_with_the_full_budget_is_exact():
    space = recorded(("a", "b"), [(1, 1, 2, 2), (2, 4, 2, 8)], (3.5, math.inf, 1.25, 2.0))
    for search in SEARCHES.values():
        found = replay(space, search, 10, range(3))
        assert found.best_per_seed == (1.25,) * 3 and found.evaluations_per_seed == (4,) * 3
        assert found.median_ratio == 1.0 and found.share_within(0.0) == 1.0


def test_the_first_trial_of_a_replay_may_fail():
    space = recorded(("a",), [(1, 2)], (math.inf, 2.0))
    found = replay(space, SEARCHES["exhaustive"], 1, range(2))
    assert found.best_per_seed == (math.inf, math.inf)
    assert found.median_ratio == math.inf and found.share_within(0.05) == 0.0


def run_verb(*words):
    out: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_replay, "emit", lambda _, data, lines: out.append((data, lines)))
        assert lab(["replay", *words]) == 0
    return out[0][0], "\n".join(out[0][1])


@pytest.mark.parametrize("name", [*SEARCHES, "sa", "ga"])
def test_the_verb_counts_trials_and_gives_ratios(name):
    file = str(FOLDER / "conv2d_A100.csv.gz")
    data, text = run_verb(file, "--search", name, "--budget", "60", "--seeds", "3", "--json", "-")
    again, _ = run_verb(file, "--search", name, "--budget", "60", "--seeds", "3", "--json", "-")
    assert data == again == json.loads(json.dumps(data))
    assert data["optimum"] == 0.5536 and data["evaluations_per_seed"] == [60, 60, 60]
    ratios = sorted(best / 0.5536 for best in data["best_per_seed"])
    assert ratios[0] >= 1 and data["median_ratio"] == pytest.approx(ratios[1])
    assert data["within_5_percent"] == np.mean([r <= 1.05 for r in ratios])
    assert f"{data['median_ratio']:.4f}" in text
