"""Models on the command lines: `zoo`, `zoo:NAME` wherever one is taken, and `simulate`."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import refused, run, run_json

from ascend_lab.cli import aoe, ascend_lab as run_lab
from ascend_lab.compiler import evaluate, random_inputs, zoo
from ascend_lab.compiler.zoo import load_model, model_name
from ascend_lab.errors import InputError, UnsupportedError

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SQUEEZENET = LIGHT / "light_squeezenet.onnx"
ALEXNET = LIGHT / "light_bvlc_alexnet.onnx"
KEYS = {"name", "type", "time_s", "bound_by", "cube_utilisation", "bytes", "l2_hit_rate"}


@pytest.fixture
def tiny(tmp_path):
    """Write a model of one convolution with a symbolic batch, and its classifier."""
    rng = np.random.default_rng(0)
    make = onnx.helper
    tensors = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in (("w", (16, 3, 3, 3)), ("b", (16,)), ("v", (16, 10)))
    ]
    nodes = [
        make.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        make.make_node("Relu", ["c"], ["r"]),
        make.make_node("GlobalAveragePool", ["r"], ["p"]),
        make.make_node("Flatten", ["p"], ["f"]),
        make.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    x = make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 16, 16])
    y = make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 10])
    graph = make.make_graph(nodes, "tiny", [x], [y], tensors)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "tiny.onnx"
    onnx.save(model, path)
    return path


def test_inputs_that_are_not_finite_are_computed_and_said(capsys, tiny, tmp_path):
    x = np.ones((1, 3, 16, 16), np.float32)
    x[0, 0, 0, :2] = np.nan, np.inf
    np.savez(tmp_path / "x.npz", x=x)
    assert run_lab(["run", str(tiny), "--inputs", str(tmp_path / "x.npz")]) == 0
    said = capsys.readouterr()
    assert "2 of 768 numbers of x are NaN or infinite" in said.err and "mean nan" in said.out
    (tmp_path / "off.cfg").write_text("{")
    words = ("simulate", tiny, "--batch", 1, "--chip", "Toy", "--fusion-switch")
    assert "off.cfg: {" in refused(capsys, *words, tmp_path / "off.cfg")
    assert "did you mean zoo:resnet18?" in refused(capsys, "run", "resnet18")


@pytest.mark.parametrize(
    ("model", "chip", "gmac"), [(SQUEEZENET, "Ascend910A", 0.35), (ALEXNET, "Ascend910B2", 0.65)]
)
def test_shipped_models_keep_the_contract(capsys, model, chip, gmac):
    data = run_json(capsys, "simulate", model, "--chip", chip)
    assert data["chip"] == chip
    assert data["time_s"] == pytest.approx(sum(row["time_s"] for row in data["operators"]))
    for row in data["operators"]:
        assert row.keys() >= KEYS and row["bound_by"]
        assert row["time_s"] > 0
        assert 0 <= row["cube_utilisation"] <= 1 and 0 <= row["l2_hit_rate"] <= 1
    totals = data["totals"]
    assert totals["kernels"] == len(data["operators"])
    assert gmac <= totals["macs"] / 1e9 < 5 * gmac  # the published count, and padding
    assert 0 < totals["launch_time_s"] < data["time_s"] < 0.01


def test_the_table_ends_in_the_total(capsys, tiny):
    code, out, err = run(capsys, "simulate", tiny, "--chip", "Ascend310", "--batch", 1)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("tiny on Ascend310: 5 nodes, ")
    assert "bound by" in lines[1] and "conv2d" in out and lines[-1].startswith("total ")
    data = run_json(capsys, "simulate", tiny, "--chip", "Ascend310", "--batch", 1)
    assert lines.index("where the time goes: us  share") == 2 + len(data["operators"])
    assert f"total {data['time_s'] * 1e6:.1f} us" in lines[-1]
    assert all(len(line) <= 88 for line in lines)


def test_equal_kernels_are_one_row(capsys):
    """Twelve equal blocks take the rows of one, and of all rows together the time is the same."""
    words = ("simulate", "zoo:bert_base", "--chip", "Ascend310")
    lines = run(capsys, *words)[1].splitlines()
    rows = lines[2 : lines.index("where the time goes: us  share")]
    data = run_json(capsys, *words)
    counts = [int(row.split()[0]) if row.split()[1] == "x" else 1 for row in rows]
    assert sum(counts) == len(data["operators"]) > 3 * len(rows)
    times = [float(row[36:46]) for row in rows]
    assert sum(times) == pytest.approx(data["time_s"] * 1e6, abs=0.005 * len(rows))
    kinds = {row["type"] for row in data["operators"]}
    assert len(rows) >= len(kinds) and all(len(row) <= 88 for row in rows)


def test_fewer_cores_are_a_chip_of_fewer_cores(capsys, tiny, tmp_path):
    """Against a chip file that says so; also where part of a model runs on the host."""
    one = tmp_path / "one.toml"
    count = '{ value = 1, source = "UT310", trust = "assumed" }'
    head = 'base = "Ascend310"\nname = "One"\nsummary = "one"\ncombined = true\n'
    one.write_text(f"{head}[core]\ncount = {count}\n")
    make = onnx.helper
    x = make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [64, 4096])
    nodes = [make.make_node("Erf", ["x"], ["r"]), make.make_node("NonZero", ["r"], ["y"])]
    graph = make.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")])
    opsets = [make.make_opsetid("", 17)]
    onnx.save(make.make_model(graph, opset_imports=opsets), tmp_path / "host.onnx")
    for words in (("simulate", tiny, "--batch", 8), ("simulate", tmp_path / "host.onnx")):
        few, alone, all_of_them = (
            run_json(capsys, *words, "--chip", *chip)["time_s"]
            for chip in (("Ascend310", "--aicore-num", 1), (one,), ("Ascend310",))
        )
        assert few == alone > all_of_them
    words = ("run", tiny, "--batch", 1, "--compiled", "--chip", "Ascend310", "--aicore-num")
    assert "--aicore-num from 1 to 2" in refused(capsys, *words, 3)


def test_formats(capsys, tiny):
    base = (tiny, "--batch", 1, "--chip")
    low = run_json(capsys, "simulate", *base, "Ascend910A", "--dtype", "int8")
    assert any("quantise" in row["type"] for row in low["operators"])
    assert run_json(capsys, "simulate", *base, "Ascend910B2", "--dtype", "bf16")["time_s"] > 0
    assert "bf16" in refused(capsys, "simulate", *base, "Ascend910A", "--dtype", "bf16")


@pytest.mark.parametrize(
    "text",
    [
        "TbeConvElemwiseFusionPass:off\nAutomaticUbFusion:off\n",
        json.dumps({"Switch": {"UBFusion": {"ALL": "off"}, "GraphFusion": {"ALL": "on"}}}),
    ],
)
def test_fusion_switches(capsys, tiny, tmp_path, text):
    file = tmp_path / "fusion_switch.cfg"
    file.write_text(text)
    result = tmp_path / "fusion_result.json"
    base = (tiny, "--chip", "Ascend910A", "--batch", 1, "--fusion-result", result)
    on = run_json(capsys, "simulate", *base)
    counts = json.loads(result.read_text())[0]["ub_fusion"]
    assert counts["TbeConvElemwiseFusionPass"] == {"effect_times": "1", "match_times": "1"}
    off = run_json(capsys, "simulate", *base, "--fusion-switch", file)
    assert "conv2d+relu" in {row["type"] for row in on["operators"]}
    assert "conv2d+relu" not in {row["type"] for row in off["operators"]}
    assert "TbeConvElemwiseFusionPass" not in json.loads(result.read_text())[0]["ub_fusion"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"Switch": {"GraphFusion": {"TbeConvElemwiseFusionPass": "off"}}}',
         "TbeConvElemwiseFusionPass under UBFusion; got another scope"),
        ('{"Switch": {"UBFusion": {"DeadCodeEliminationPass": "off"}}}', "list it under Graph"),
        ("TbeConvElemwiseFusionPass:off\nDeadCodeEliminationPass:on\nALL:on", ""),
        ("TbeFusionPass:off", "no pass or rule is called TbeFusionPass"),
    ],
)  # fmt: skip
def test_switches_that_change_nothing_are_named(capsys, tiny, tmp_path, text, told):
    file = tmp_path / "fusion_switch.cfg"
    file.write_text(text)
    code, _, line = run(capsys, "simulate", tiny, *CHIP, "--batch", 1, "--fusion-switch", file)
    assert code == 0 and told in line and bool(told) == bool(line)


def test_the_memory_limit_that_a_message_names_is_enough(capsys, tiny):
    words = ("simulate", tiny, *CHIP, "--batch", 8, "--memory-limit")
    line = refused(capsys, *words, 9)
    enough = int(re.search(r"got 9 B; with --memory-limit (\d+) nothing is in tiles", line)[1])
    assert run(capsys, *words, enough)[0] == 0
    assert "use a chip with more" in refused(capsys, *words, enough // 2)


def test_trace_and_json_files(capsys, tiny, tmp_path):
    trace = tmp_path / "t.json"
    numbers = tmp_path / "n.json"
    words = ("simulate", tiny, "--chip", "Toy", "--batch", 1)
    assert run(capsys, *words, "--trace", trace, "--json", numbers) == (0, "", "")
    data = json.loads(numbers.read_text())
    events = json.loads(trace.read_text())["traceEvents"]
    spans = {e["name"] for e in events if e["ph"] == "X" and e["tid"] == 1}
    assert spans == {row["name"] for row in data["operators"]}


# -- bad input ------------------------------------------------------------------------------------
CHIP = ("--chip", "Toy")


def test_files_that_are_no_models(capsys, tmp_path):
    text = tmp_path / "text.onnx"
    text.write_text("this is not a model")
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    half = tmp_path / "half.onnx"
    half.write_bytes(SQUEEZENET.read_bytes()[:3000])
    for path in (tmp_path / "missing.onnx", tmp_path, text, empty):
        assert path.name in refused(capsys, "simulate", path, *CHIP)
    assert refused(capsys, "simulate", half, *CHIP)


# -- models by name -------------------------------------------------------------------------------
def test_zoo_lists_all_models_and_counts_one(capsys):
    rows = run_json(capsys, "zoo")
    assert list(rows) == list(zoo.ZOO)
    for name, row in rows.items():
        assert row.keys() >= {"parameters", "macs", "input_shape", "source"}, name
    one = run_json(capsys, "zoo", "resnet50", "--batch", 2)
    assert one["parameters"] == rows["resnet50"]["parameters"] == 25_557_032
    assert one["macs"] == 2 * rows["resnet50"]["macs"]
    assert one["input_shape"] == [2, 3, 224, 224]
    assert run_json(capsys, "zoo", "zoo:ResNet-50", "--batch", 2) == one
    code, out, _ = run(capsys, "zoo", "resnet50")
    assert code == 0
    assert "25,557,032" in out
    assert "arXiv 1512.03385" in out
    wide = run_json(capsys, "zoo", "mobilenet_v1", "--width", "0.5", "--resolution", "128")
    assert (wide["parameters"], wide["input_shape"]) == (1_331_592, [1, 3, 128, 128])
    why = run_json(capsys, "zoo", "mobilenet_v3_small", "--chip", "Ascend310")
    assert why["time_s"] > why["bound_s"] > 0


def test_zoo_names_are_models_everywhere(capsys, tmp_path):
    data = run_json(capsys, "simulate", "zoo:resnet18", "--chip", "Ascend310", "--batch", 2)
    assert data["name"] == "resnet18"
    saved = tmp_path / "out.npz"
    shape = ("--input-shape", "x:2,3,32,32")
    run_json(capsys, "run", "zoo:resnet18", *shape, "--seed", 3, "--outputs", saved)
    graph = zoo.build("resnet18", batch=2, size=32)
    wanted = evaluate(graph, random_inputs(graph, 3))
    with np.load(saved) as found:
        np.testing.assert_array_equal(found["classifier" if "classifier" in found else "fc"],
                                      wanted[graph.outputs[0]])  # fmt: skip
    assert aoe(["--model", "zoo:resnet19", "--soc_version", "Ascend310", "--job_type", "2"]) == 2
    assert "did you mean resnet18" in capsys.readouterr().err


def test_a_model_is_loaded_with_the_sizes_given():
    given = {name: np.ones((2, 16), np.int32) for name in zoo.build("bert_base").inputs}
    found = load_model("zoo:bert_base", given=given)
    assert found.graph.types["input_ids"].shape == (2, 16)
    assert found.input_types["input_ids"] == "int32"
    assert found.output_types["pooler_output"] == "float32"
    assert model_name("zoo:bert_base") == "bert_base"
    assert model_name("folder/net.onnx") == "net"
    with pytest.raises(InputError, match="one of the"):
        load_model("zoo:../x")
    with pytest.raises(UnsupportedError):
        load_model("zoo:vgg16", batch=500)
