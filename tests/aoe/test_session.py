"""Sessions: the published order of calls, and what other orders get; the bank of a run."""

import numpy as np
import pytest

from ascend_lab.aoe import session as aoe
from ascend_lab.aoe.session import Ledger, SessionError, Status, open_ledger
from ascend_lab.errors import InputError
from ascend_lab.graph.onnx import import_onnx


@pytest.fixture
def begun(small):
    """Initialize, and finalize at the end."""
    assert aoe.initialize({"chip": "Ascend310"}) == Status.AOE_SUCCESS
    yield import_onnx(small)
    assert aoe.finalize() == Status.AOE_SUCCESS


def status_of(call, *arguments):
    with pytest.raises(SessionError) as caught:
        call(*arguments)
    assert caught.value.status.name in str(caught.value)
    return caught.value.status


def test_the_published_sequence(begun):
    session = aoe.create_session()
    assert aoe.set_tuning_graph(session, begun) == Status.AOE_SUCCESS
    inputs = {"x": np.linspace(-1, 1, 128 * 512, dtype=np.float32).reshape(128, 512)}
    assert aoe.set_tuning_graph_input(session, inputs) == Status.AOE_SUCCESS
    assert aoe.tuning_graph(session, {"job_type": "2"}) == Status.AOE_SUCCESS
    found = aoe.tuning_of(session)
    assert found.gain > 0 and found.compiled.chip.name == "Ascend310"
    assert aoe.destroy_session(session) == Status.AOE_SUCCESS
    assert status_of(aoe.tuning_of, session) == Status.NO_SESSION


def test_the_wrong_order_is_named(begun):
    assert status_of(aoe.initialize) == Status.ALREADY_INITIALIZED
    assert status_of(aoe.tuning_graph, 77) == Status.NO_SESSION
    session = aoe.create_session()
    assert status_of(aoe.set_tuning_graph_input, session, {}) == Status.NO_GRAPH
    assert status_of(aoe.tuning_graph, session) == Status.NO_GRAPH
    aoe.set_tuning_graph(session, begun)
    assert status_of(aoe.tuning_of, session) == Status.NO_GRAPH
    assert status_of(aoe.set_tuning_graph, session, begun) == Status.REPEATED_GRAPH == 401
    assert status_of(aoe.tuning_graph, session, {"colour": 1}) == Status.WRONG_OPTION
    assert status_of(aoe.tuning_graph, session, {"job_type": "9"}) == Status.WRONG_OPTION
    assert status_of(aoe.tuning_graph, session, {"settings": 3}) == Status.WRONG_OPTION


def test_calls_before_initialize_are_refused():
    for call, *arguments in (
        (aoe.create_session,),
        (aoe.finalize,),
        (aoe.destroy_session, 1),
        (aoe.set_tuning_graph, 1, None),
    ):
        assert status_of(call, *arguments) == Status.NOT_INITIALIZED


def test_a_graph_with_nothing_to_tune(begun):
    from ascend_lab.graph import GraphBuilder

    builder = GraphBuilder("move", "fp16")
    builder.output(builder.transpose(builder.input("x", (32, 64)), perm=(1, 0)))
    session = aoe.create_session()
    aoe.set_tuning_graph(session, builder.build())
    assert aoe.tuning_graph(session) == Status.AOE_ERROR_NON_OPTIMIZE_GRAPH


def test_other_values_are_noticed(begun, monkeypatch):
    session = aoe.create_session()
    aoe.set_tuning_graph(session, begun)
    aoe.set_tuning_graph_input(session, {"x": np.ones((128, 512), np.float32)})
    calls = []

    def wrong(compiled, inputs):
        calls.append(compiled)
        return {"p": np.full((2, 2), len(calls), np.float16)}

    monkeypatch.setattr("ascend_lab.graph.run_tasks", wrong)
    assert aoe.tuning_graph(session) == Status.VALUES_DIFFER
    assert len(calls) == 2


def test_a_ledger_without_a_place_warns(tmp_path):
    (tmp_path / "home").write_text("a file where a folder should be")
    environ = {"ASCEND_CACHE_PATH": str(tmp_path / "home")}
    with open_ledger(environ) as ledger:
        assert len(ledger.warnings) == 1 and "not stored" in ledger.warnings[0]
    with pytest.raises(InputError, match="TUNE_BANK_PATH"):
        open_ledger({"TUNE_BANK_PATH": str(tmp_path / "home")})


def test_a_ledger_answers_trials_only_to_those_who_resume(tmp_path):
    from ascend_lab.aoe.trace import Trial

    with Ledger(tmp_path / "k.db") as ledger:
        ledger.save_trials("run", [Trial(0, (1, 2), 3.0)])
        assert ledger.trials("run") == ()
    with Ledger(tmp_path / "k.db", resume=True) as ledger:
        assert [t.cost for t in ledger.trials("run")] == [3.0]
