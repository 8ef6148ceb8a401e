"""Migration: what becomes of every node, and a model that computes the same."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest
from command_lines import refused, run, run_json
from onnx import TensorProto, helper, numpy_helper

from ascend_lab.compiler import compile_graph, zoo
from ascend_lab.compiler.migrate import VERDICTS, migrate
from ascend_lab.compiler.onnx import import_model
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.onnx.host import run_on_host
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

CHIP = load_chip("Ascend310")
FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
BOOL = TensorProto.BOOL


def model_of(nodes, inputs, outputs, weights=(), opset=18):
    graph = helper.make_graph(
        nodes,
        "small<model>",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def tokens():
    """Whole numbers, a comparison without a kernel, an erf by hand, a dead node, a constant."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Equal", ["ids", "zero"], ["padding"]),
        helper.make_node("Div", ["rows", "root"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["a"]),
        helper.make_node("Mul", ["rows", "a"], ["m"]),
        helper.make_node("Mul", ["m", "half"], ["gelu"]),
        helper.make_node("Neg", ["gelu"], ["nobody"]),
        helper.make_node("Shape", ["gelu"], ["size"]),
        helper.make_node("ArgMax", ["gelu"], ["best"], axis=-1, keepdims=0),
    ]
    weights = [
        ("table", rng.standard_normal((50, 24)).astype(np.float32)),
        ("zero", np.array(0)), ("root", np.array(2**0.5, np.float32)),
        ("one", np.array(1, np.float32)), ("half", np.array(0.5, np.float32)),
    ]  # fmt: skip
    outputs = [("gelu", FLOAT), ("padding", BOOL), ("best", INT64), ("size", INT64)]
    return model_of(nodes, [("ids", INT64, ("n", 6))], outputs, weights)


def mixed():
    """A convolution, NonZero of what it finds, and the count."""
    weight = np.random.default_rng(1).standard_normal((5, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("NonZero", ["r"], ["places"]),
        helper.make_node("ReduceMax", ["r"], ["most"], keepdims=0),
    ]
    outputs = [("places", INT64), ("most", FLOAT)]
    return model_of(nodes, [("x", FLOAT, (1, 3, 64, 64))], outputs, [("w", weight)])


def same_values(before, after, feed):
    one = run_on_host(before, feed)
    two = run_on_host(after, feed)
    assert list(one) == list(two)
    for name, array in one.items():
        assert two[name].dtype == array.dtype, name
        np.testing.assert_allclose(two[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_every_node_has_one_verdict_and_the_values_stay():
    model = tokens()
    found = migrate(model.SerializeToString(), CHIP, shapes={"ids": (2, 6)})
    report = found.report
    assert sum(report["totals"].values()) == report["nodes"] == 10
    assert set(report["totals"]) == set(VERDICTS)
    assert sum(row["count"] for row in report["rows"]) == 10
    verdict = {row["source_op"]: row["verdict"] for row in report["rows"]}
    assert verdict["Gather"] == "direct"
    assert verdict["Shape"] == verdict["Neg"] == "folded"
    assert any(row["verdict"] == "rewritten" for row in report["rows"])  # the gelu by hand
    assert report["passes"]
    assert max(report["max_error"].values()) < 1e-5
    assert found.model is not None
    onnx.checker.check_model(found.model)
    ids = np.array([[0, 4, 9, 0, 1, 2], [7, 0, 0, 49, 3, 3]])
    same_values(model, found.model, {"ids": ids})
    compile_graph(import_model(found.model).graph, CHIP)


def test_what_moves_is_told_with_its_reason():
    report = migrate(tokens().SerializeToString(), CHIP, shapes={"ids": (2, 6)}).report
    moved = {row["op"].partition(" ")[0]: row for row in report["moved"]}
    assert moved["equal"]["engine"] == "AI CPU"
    assert moved["equal"]["reason"]
    padded = migrate(mixed().SerializeToString(), CHIP).report["padded"]
    assert [row["zeros"] for row in padded if row["tensor"] == "r"] == [pytest.approx(11 / 16)]


def test_what_no_graph_holds_is_kept_and_advised():
    model = mixed()
    found = migrate(model.SerializeToString(), CHIP)
    rows = {row["source_op"]: row for row in found.report["rows"]}
    assert rows["NonZero"]["verdict"] == "host"
    assert "mask" in rows["NonZero"]["advice"]
    assert rows["Conv"]["verdict"] == "direct"
    assert found.model is not None
    x = np.random.default_rng(2).standard_normal((1, 3, 64, 64)).astype(np.float32)
    same_values(model, found.model, {"x": x})
    placement = found.report["placement"]
    assert placement["nodes_s"] <= placement["cheapest_engine_s"]


def test_a_network_of_the_zoo_compiles_after_its_migration():
    graph = zoo.build("shufflenet_v2_x0_5", size=32, classes=10)
    source = export_onnx(graph)
    found = migrate(source.SerializeToString(), CHIP)
    assert found.model is not None
    assert found.report["passes"]["ConvBatchnormFusionPass"] == 56
    assert len(found.model.graph.node) < len(source.graph.node)
    errors = [row["max_error"] for row in found.report["rows"] if row["max_error"] is not None]
    assert errors
    assert max(errors) < 1e-4
    x = np.random.default_rng(2).standard_normal((1, 3, 32, 32)).astype(np.float32)
    ours, theirs = (run_on_host(m, {"x": x})["classifier"] for m in (found.model, source))
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_an_operator_that_nobody_knows_is_refused_by_name():
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Alien", ["r"], ["y"], domain="far.away"),
    ]
    model = model_of(nodes, [("x", FLOAT, (3,))], [("y", FLOAT)])
    model.opset_import.append(helper.make_opsetid("far.away", 1))
    found = migrate(model.SerializeToString(), CHIP)
    assert found.model is None
    assert "Alien" in found.report["refused"]
    assert found.report["totals"]["unsupported"] == 1
    (row,) = [row for row in found.report["rows"] if row["verdict"] == "unsupported"]
    assert "standard" in row["advice"]


def test_values_are_compared_on_indices_that_exist():
    """A table of one row: of the whole numbers drawn as inputs none may be 1."""
    nodes = [helper.make_node("Gather", ["x", "ids"], ["y"], axis=0)]
    model = model_of(nodes, [("x", FLOAT, (1, 3)), ("ids", INT64, (8,))], [("y", FLOAT)])
    found = migrate(model.SerializeToString(), CHIP)
    assert found.report["max_error"] == {"y": 0.0}


def test_open_sizes_are_asked_for():
    with pytest.raises(UnsupportedError, match="ids"):
        migrate(tokens().SerializeToString(), CHIP)


# -- torch -----------------------------------------------------------------------------------------
def test_a_torch_program_needs_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="pip install torch"):
        migrate(tmp_path / "net.pt2", CHIP)


def test_a_torch_program_is_exported_first(tmp_path, monkeypatch):
    model = mixed()
    torch = ModuleType("torch")
    torch.export = SimpleNamespace(load=lambda path: path)
    torch.onnx = SimpleNamespace(export=lambda p, dynamo: SimpleNamespace(model_proto=model))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert migrate(tmp_path / "net.pt2", CHIP).report["nodes"] == 4
    torch.export = SimpleNamespace(load=lambda path: 1 / 0)
    with pytest.raises(InputError, match=r"a program of torch\.export"):
        migrate(tmp_path / "net.pt2", CHIP)


# -- the command line ------------------------------------------------------------------------------
def test_the_verb_writes_model_and_report(tmp_path, capsys):
    file = tmp_path / "mixed.onnx"
    out = tmp_path / "out.onnx"
    onnx.save(mixed(), file)
    for ending in ("json", "html", "txt"):
        report = tmp_path / f"report.{ending}"
        data = run_json(capsys, "migrate", file, "--output", out, "--report", report)
        text = report.read_text("utf-8")
        assert "NonZero" in text
        if ending == "html":
            assert "small&lt;model&gt;" in text and not re.search("<model>|http", text)
    assert data["output"] == str(out)
    assert json.loads((tmp_path / "report.json").read_text()) == data
    assert run(capsys, "simulate", out, "--chip", "Ascend310")[0] == 0
    code, said, _ = run(capsys, "migrate", "zoo:squeezenet", "--input-shape", "x:1,3,64,64")
    assert code == 0 and "direct" in said


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x08\x0a"])
def test_damaged_files_are_one_line(tmp_path, capsys, data):
    file = tmp_path / "bad.onnx"
    file.write_bytes(data)
    refused(capsys, "migrate", file)


def test_a_refused_model_writes_no_model(tmp_path, capsys):
    model = model_of([helper.make_node("Alien", ["x"], ["y"])], [("x", FLOAT, (3,))],
                     [("y", FLOAT)])  # fmt: skip
    file, out, report = (tmp_path / name for name in ("a.onnx", "out.onnx", "r.txt"))
    onnx.save(model, file)
    code, said, _ = run(capsys, "migrate", file, "--output", out, "--report", report)
    assert code == 1 and "unsupported" in said
    assert "Alien" in report.read_text("utf-8")
    assert not out.exists()


# -- what does not pay -----------------------------------------------------------------------------
def test_a_migrated_model_is_never_slower_than_its_source():
    """A place of a largest element, written again, compares and casts: it costs no more."""
    report = migrate(tokens().SerializeToString(), CHIP, shapes={"ids": (2, 6)}).report
    assert report["time_s"]["after"] <= report["time_s"]["before"] * (1 + 1e-6)
    assert "kept" not in report


def test_nodes_stay_where_rewriting_does_not_pay(monkeypatch):
    monkeypatch.setattr("ascend_lab.compiler.migrate._time_s", lambda *given: 1.0)
    model = tokens()
    found = migrate(model.SerializeToString(), CHIP, shapes={"ids": (2, 6)})
    assert "instead of" in found.report["kept"]
    assert not found.report["passes"]
    assert sum(found.report["totals"].values()) == found.report["nodes"] == 10
    assert found.model is not None
    assert "nobody" not in {name for node in found.model.graph.node for name in node.output}
    same_values(model, found.model, {"ids": np.array([[0, 4, 9, 0, 1, 2], [7, 0, 0, 49, 3, 3]])})
