"""The file that goes through Part IV: it is sound, and every stage makes something less."""

import numpy as np
import pytest

from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.values import run_tasks
from ascend_lab.lab import one_file

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = one_file.write(tmp_path_factory.mktemp("file") / "block.onnx")
    onnx.checker.check_model(str(path))
    return import_onnx(path)


def test_every_stage_computes_what_the_file_says(graph):
    from onnx.reference import ReferenceEvaluator

    x = np.random.default_rng(0).normal(0, 1, (1, 64, 56, 56)).astype(np.float32)
    (expected,) = ReferenceEvaluator(one_file.model()).run(None, {"x": x})
    for name in one_file.STAGES:
        compiled = one_file.stage(graph, name).compiled
        (got,) = run_tasks(compiled, {"x": x.astype(np.float16)}).values()
        assert np.abs(got.astype(np.float32) - expected).max() < 5e-3, name


def test_the_journey_never_grows(graph, capsys):
    one_file.journey(graph, "memory planned")
    rows = [line.replace(",", "").split()[-5:] for line in capsys.readouterr().out.splitlines()[1:]]
    columns = np.array(rows, float).T
    assert (np.diff(columns) <= 0).all()
    assert columns[-1][0] > 2 * columns[-1][-1]  # microseconds
    assert len(rows) == len(one_file.STAGES)
