"""Models by name on the command lines: `zoo`, and `zoo:NAME` wherever a model is taken."""

import numpy as np
import pytest
from command_lines import refused, run, run_json

from ascend_lab.cli import aoe
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph import evaluate, random_inputs, zoo
from ascend_lab.graph.models import load_model, model_name


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


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("zoo", "resnet19"), "did you mean resnet18"),
        (("zoo", "resnet50", "--width", "0.5"), "a width to choose"),
        (("zoo", "bert_base", "--resolution", "64"), "a size to choose"),
        (("zoo", "--width", "0.5"), "--width only with a model's name"),
        (("zoo", "mobilenet_v2", "--width", "0"), "a width from 0.05 to 8.0"),
        (("zoo", "mobilenet_v2", "--width", "nan"), "a number"),
        (("zoo", "--chip", "Ascend310"), "a model's name with --chip"),
        (("zoo", "mobilenet_v2", "--chip", "Ascend311"), "Ascend310"),
        (("zoo", "resnet50", "--resolution", "0"), "batch and size >= 1"),
        (("zoo", "resnet50", "--batch", "-1"), "batch and size >= 1"),
        (("zoo", "resnet50", "--batch", "nan"), "whole number"),
        (("simulate", "zoo:resnet19", "--chip", "Ascend310"), "did you mean resnet18"),
        (("simulate", "zoo:", "--chip", "Ascend310"), "one of the"),
        (("run", "zoo:resnet18", "--input-shape", "y:1,3,32,32"), "inputs x[1, 3, 32, 32]"),
        (("run", "zoo:resnet18", "--input-shape", "x:1,3,32,64"), "mend the shape"),
        (("simulate", "zoo:resnet18", "--batch", "100000", "--chip", "Ascend310"), "elements"),
    ],
)
def test_a_name_or_size_that_cannot_be_is_one_line(capsys, words, part):
    assert part in refused(capsys, *words)


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
