"""Reports: the published formula and names, the table, and files that are never half written."""

import json
import math
from datetime import datetime
from types import SimpleNamespace

import pytest

from ascend_lab.aoe.drive import Settings, Trace, Trial
from ascend_lab.aoe.engine import tune
from ascend_lab.aoe.report import Report, failed, ticks_best, write_report
from ascend_lab.aoe.saved import read_schedules, save_tuned
from ascend_lab.aoe.tuning import Result
from ascend_lab.errors import InputError
from ascend_lab.graph import GraphBuilder
from ascend_lab.graph.onnx import import_onnx


@pytest.fixture
def report(small):
    settings = Settings(budget=18)
    return Report("mlp", tune(import_onnx(small), "Ascend310", settings=settings), settings)


def trace(*costs):
    trials = tuple(Trial(i, (i,), cost, "no" * math.isinf(cost)) for i, cost in enumerate(costs))
    return Trace(("a",), trials, "budget")


def test_the_published_formula_divides_by_the_result():
    # the published sample: 134 us before, 99 us after, "35.35%"
    result = Result(SimpleNamespace(), None, 134, 99)
    assert f"{result.gain:.2%}" == "35.35%"


def test_the_curve_keeps_its_steps_only():
    assert ticks_best(trace(math.inf, 9, 9, 5, 7, 5, 4)) == [[2, 9], [4, 5], [7, 4]]
    assert ticks_best(trace(math.inf)) == []


def test_an_operator_failed_if_none_of_its_candidates_could_be_built():
    for costs, wanted in (((math.inf,) * 3, True), ((math.inf, 3), False), ((), False)):
        assert failed(Result(SimpleNamespace(), None, 1, 1, trace=trace(*costs))) == wanted


def test_the_table_ends_with_totals(report):
    lines = report.table().splitlines()
    assert "model results" in lines[0]
    assert len(lines) == 4 + len(report.tuning.operators.results)
    assert "(before - after) / after" in lines[-1] and f"{report.tuning.gap:.2%}" in lines[-1]
    assert any("proven" in line for line in lines)


def test_a_report_is_plain_data_and_what_was_tuned_without_a_bank_counts_as_added(report):
    data = report.as_dict()
    assert list(data) == ["opat"]
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    opat = data["opat"]["OPAT"]
    assert len(opat["repo_modified_operators"]["add_repo_operators"]) == 1
    own = data["opat"]["ascend_lab"]
    assert own["operators_tuned"] == own["operators_proven"] == 2
    assert own["bound(ms)"] < opat["model_result_performance(ms)"]


def test_a_report_has_time_and_process_in_its_name(tmp_path):
    path = write_report(tmp_path, "opat", [{"a": 1}], datetime(2026, 1, 2, 3, 4, 5, 6))
    assert path.name.startswith("aoe_result_opat_20260102030405000006_pid")
    assert json.loads(path.read_text()) == [{"a": 1}]


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(InputError, match="gone"):
        write_report(tmp_path / "gone", "opat", [])


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
