"""The models: parameters and multiply-accumulates as published, sane values, ONNX Runtime's."""

import inspect
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from onnx_models import run_onnx

from ascend_lab.compiler import Graph, GraphBuilder, evaluate, random_inputs, zoo
from ascend_lab.compiler.evaluate import evaluate_all
from ascend_lab.compiler.ir import Seeded, to_text, verify
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.passes import DEFAULT, run_passes
from ascend_lab.compiler.text_form import from_text
from ascend_lab.compiler.zoo import transformers
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.compiler.zoo.transformers import causal
from ascend_lab.errors import InputError

TORCHVISION = "torchvision model documentation, num_params and GFLOPS of the weights"
KERAS = "Keras applications, trainable parameters of the summary; MACs of the paper"
MODEL_CARD = "Hugging Face model card, parameters of the base model with pooler"
# name: (trainable parameters, multiply-accumulates / 1e9 or None, where both are published)
PUBLISHED = {
    "alexnet": (61_100_840, 0.71, TORCHVISION),
    "vgg16": (138_357_544, 15.47, TORCHVISION),
    "resnet18": (11_689_512, 1.81, TORCHVISION),
    "resnet50": (25_557_032, 4.09, TORCHVISION),
    "mobilenet_v1": (4_231_976, 0.569, KERAS),
    "mobilenet_v2": (3_504_872, 0.30, TORCHVISION),
    "mobilenet_v3_large": (5_483_032, 0.22, TORCHVISION),
    "shufflenet_v2": (2_278_604, 0.14, TORCHVISION),
    "squeezenet": (1_235_496, 0.35, TORCHVISION),
    "efficientnet_b0": (5_288_548, 0.39, TORCHVISION),
    "inception_v1": (6_624_904, 1.50, TORCHVISION),
    "densenet121": (7_978_856, 2.83, TORCHVISION),
    "unet": (31_030_658, None, "summaries of the paper's network with 1 channel and 2 classes"),
    "bert_base": (109_482_240, None, MODEL_CARD),
    "bert_large": (335_141_888, None, MODEL_CARD),
    "gpt2_small": (124_439_808, None, "Hugging Face model card of gpt2, output weights tied"),
    "vit_b16": (86_567_656, 17.56, TORCHVISION),
    "mobilevit_s": (5_578_632, 2.0, "timm model card of mobilevit_s; MACs of the paper, 256 px"),
    "mobilevit_block": (None, None, "no number of its own: see its test, and mobilevit_s"),
}
# arguments that make a model small enough to evaluate in a second
SMALL = {
    "alexnet": {"size": 64, "classes": 10},
    "vgg16": {"size": 32, "classes": 10},
    "unet": {"size": 32, "width": 8},
    "bert_base": {"length": 6, "layers": 1, "vocabulary": 99},
    "bert_large": {"length": 6, "layers": 1, "vocabulary": 99},
    "gpt2_small": {"length": 6, "layers": 1, "vocabulary": 99},
    "vit_b16": {"size": 32, "layers": 1},
    "mobilevit_block": {"size": 8, "channels": 12, "width": 16},
    "mobilevit_s": {"size": 64},
}
HEAVY = ("vgg16", "resnet50", "densenet121", "bert_large", "mobilevit_s")
"""Made of the layers of others: evaluated only on demand."""
EVALUATED = [pytest.param(n, marks=pytest.mark.full if n in HEAVY else ()) for n in PUBLISHED]
RTOL = 4e-6
"""Of the largest output: ONNX Runtime adds up in fp32, we in fp64, rounded after each node."""


def small(name: str, **more: object) -> Graph:
    return zoo.build(name, **SMALL.get(name, {"size": 64}), **more)


def test_every_model_has_its_row() -> None:
    assert set(PUBLISHED) <= set(zoo.ZOO)  # the light ones: test_zoo_light.py
    assert len(zoo.ZOO) >= 70


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    parameters, gmacs, _ = PUBLISHED[name]
    graph = zoo.build(name)
    assert graph.name == name
    assert parameters is None or zoo.parameters(graph) == parameters
    assert gmacs is None or zoo.macs(graph) / 1e9 == pytest.approx(gmacs, rel=0.04, abs=0.005)
    weights = [c for c in graph.constants.values() if c.type.elements > 4096]
    assert all(isinstance(c.data, Seeded) or callable(c.data) for c in weights)


def test_what_counts_as_a_parameter() -> None:
    net = Net("one")
    x = net.images(1, 3, 4)
    y = net.conv_norm(x, 5, 1, name="a")
    net.output(net.add(y, net.fill((1,), 2.0)))
    graph = net.build()
    assert zoo.parameters(graph) == 5 * 3 + 2 * 5  # weights, scale and bias
    assert graph.parameter_count == 5 * 3 + 4 * 5 + 1  # and statistics, and the constant
    tied = zoo.build("gpt2_small", length=4, layers=1)
    readers = [node.op for node in tied.readers["wte.weight"]]
    assert readers == ["embedding", "matmul"]
    assert tied.constants["causal_mask"].type.shape == (1, 1, 4, 4)


@pytest.mark.parametrize("name", ["squeezenet", "mobilevit_block"])
def test_text_form_round_trip(name: str) -> None:
    graph = small(name)
    again = from_text(to_text(graph))
    assert to_text(again) == to_text(graph)
    given = random_inputs(graph)
    (out,) = graph.outputs
    np.testing.assert_array_equal(evaluate(again, given)[out], evaluate(graph, given)[out])


def test_fp16_models_keep_batch_norms_in_fp32() -> None:
    graph = zoo.build("resnet18", size=32, dtype="fp16")
    kinds = {c.type.dtype for name, c in graph.constants.items() if ".bn." in name}
    others = {c.type.dtype for name, c in graph.constants.items() if ".bn." not in name}
    assert (kinds, others) == ({"fp32"}, {"fp16"})
    (out,) = evaluate(graph, random_inputs(graph)).values()
    assert np.isfinite(out).all()


def test_nothing_is_drawn_while_a_model_is_built() -> None:
    zoo.build("bert_large")  # imports
    tracemalloc.start()
    try:
        zoo.build("bert_large")
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 8 << 20  # the weights would take 1.3 GB


def test_gpt2_sees_only_the_past() -> None:
    mask = causal(3)[0, 0]
    assert mask.tolist() == [[0, -1e4, -1e4], [0, 0, -1e4], [0, 0, 0]]
    graph = small("gpt2_small")
    ids = random_inputs(graph, 1)["input_ids"]
    changed = ids.copy()
    changed[0, 3] = (changed[0, 3] + 1) % 99
    one, two = (evaluate(graph, {"input_ids": i})["logits"] for i in (ids, changed))
    np.testing.assert_array_equal(one[0, :3], two[0, :3])
    assert np.abs(one[0, 3:] - two[0, 3:]).max() > 0.01


def test_bert_ignores_what_the_mask_drops() -> None:
    graph = small("bert_base")
    given = random_inputs(graph, 1)
    given["attention_mask"] = np.array([[1, 1, 1, 1, 0, 0]], np.int32)
    other = {**given, "input_ids": given["input_ids"].copy()}
    other["input_ids"][0, 4:] = (other["input_ids"][0, 4:] + 1) % 99
    one, two = (evaluate(graph, g)["last_hidden_state"] for g in (given, other))
    np.testing.assert_allclose(one[0, :4], two[0, :4], atol=1e-6)
    assert np.abs(one[0, 4:] - two[0, 4:]).max() > 0.01


def test_folded_patches_come_back_where_they_were() -> None:
    net = Net("fold")
    x = net.images(2, 3, 8)
    parts = transformers._unfolded(net, x, (0, 3, 2, 1))
    net.output(parts, transformers._folded(net, parts, (0, 3, 2, 1), x.shape))
    graph = net.build()
    given = random_inputs(graph)
    found, back = evaluate(graph, given).values()
    np.testing.assert_array_equal(back, given["x"])
    assert found.shape == (2, 4, 16, 3)
    # the first sequence: the top left pixel of every patch
    np.testing.assert_array_equal(found[0, 0].T.reshape(3, 4, 4), given["x"][0, :, ::2, ::2])


def test_wrong_names_and_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="resnet50"):
        zoo.build("resnet5")
    with pytest.raises(InputError, match="length"):
        zoo.build("resnet50", length=3)
    with pytest.raises(InputError, match="512"):
        zoo.build("bert_base", length=513)
    for name in ("unet", "vit_b16", "mobilevit_s", "mobilevit_block"):
        with pytest.raises(InputError, match="size"):
            zoo.build(name, size=33)
    with pytest.raises(InputError, match="batch"):
        zoo.build("alexnet", 0)
    with pytest.raises(InputError, match="batch"):
        zoo.build("gpt2_small", 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_builders_say_what_they_take(name: str) -> None:
    builder = zoo.find(name)
    assert builder.__doc__
    assert builder.__name__ == zoo.ZOO[name].__name__ == name
    assert next(iter(inspect.signature(builder).parameters)) == "batch"


def assert_near(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, values in wanted.items():
        scale = float(np.abs(values).max())
        np.testing.assert_allclose(found[name], values, rtol=0, atol=RTOL * scale, err_msg=name)


@pytest.mark.parametrize("name", EVALUATED)
def test_values_are_sane_agree_with_onnx_runtime_and_survive_passes_and_files(name: str) -> None:
    """Of two images, and of the second alone; weights are drawn once for all of it."""
    graph = verify(small(name, batch=2))
    drawn = {n: replace(c, data=c.array()) for n, c in graph.constants.items()}
    given = random_inputs(graph, 3)
    values = evaluate_all(replace(graph, constants=drawn), given)
    written = [out for node in graph.nodes for out in node.outputs]
    # the masks add -10000 to scores
    unmasked = [n for n in written if "mask" not in n]
    assert all(np.isfinite(values[n]).all() for n in written)
    assert max(float(np.abs(values[n]).max()) for n in unmasked) < 1000
    for out in graph.outputs:
        assert values[out].shape[0] == 2
        assert 0.01 < values[out].std() < 100
    graph = small(name)
    second = {n: a[1:] for n, a in given.items()}
    graph = replace(graph, constants=drawn)
    ours = evaluate(graph, second)
    data = export_onnx(graph).SerializeToString()
    np.testing.assert_allclose(ours[out], values[out][1:], rtol=1e-4, atol=1e-4)
    assert_near(run_onnx(data, second), ours)
    rewritten, _ = run_passes(graph, DEFAULT)
    assert_near(evaluate(rewritten, second), ours)
    assert_near(evaluate(import_onnx(data), second), ours)


@pytest.mark.full
def test_the_whole_resnet50_agrees_with_onnx_runtime() -> None:
    graph = zoo.build("resnet50")
    given = random_inputs(graph, 5)
    theirs = run_onnx(export_onnx(graph).SerializeToString(), given)
    assert_near(theirs, evaluate(graph, given))


def test_the_list_of_models_is_stored_as_it_is_counted():
    stored = zoo.stored_counts()
    assert list(stored) == list(zoo.ZOO)
    for name, row in stored.items():
        assert row == zoo.counts_of(name), name


def test_macs_of_each_kind_of_product() -> None:
    net = GraphBuilder("products", "fp16")
    a = net.input("a", (2, 5, 7))
    b = net.input("b", (2, 7, 3))
    q = net.input("q", (2, 5, 7))
    image = net.input("image", (1, 4, 6, 6))
    net.output(
        net.batch_matmul(a, b),  # 2 * 5 * 7 * 3 = 210
        net.attention(q, a, a),  # scores and context: 2 * (2 * 5 * 5 * 7) = 700
        net.conv2d(image, net.weight((4, 1, 3, 3)), groups=4),  # 4 * 16 * 9 = 576
        net.conv_transpose2d(image, net.weight((4, 3, 2, 2)), stride=2),  # 144 * 12 = 1728
        net.relu(image),
    )
    assert zoo.macs(net.build()) == 210 + 700 + 576 + 1728
