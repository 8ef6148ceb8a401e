"""A network saved as ONNX and read again is the same network: as many kernels, the same time."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import model_of

from ascend_lab.compiler import Graph, GraphBuilder, compile_graph, simulate_graph, zoo
from ascend_lab.compiler.onnx import import_onnx, save_onnx
from ascend_lab.compiler.passes import run_passes

SMALL = {
    "bert_base": {"length": 32, "layers": 1, "vocabulary": 100},
    "gpt2_small": {"length": 32, "layers": 1, "vocabulary": 100},
    "vit_b16": {"size": 48, "layers": 1},
    "mobilevit_block": {"size": 8, "layers": 1},
    "mobilenet_v2": {"size": 32},
    "efficientnet_b0": {"size": 32},
    "resnet18": {"size": 32},
    "shufflenet_v2": {"size": 32},
    "unet": {"size": 16, "width": 8},
}
SLOWER = 1.01
"""Most a network may take after the round trip, of what it took before."""
SAME_KERNEL = {"embedding": "gather"}


def again(graph: Graph, tmp_path) -> Graph:
    """Return the graph as a file tells it."""
    return import_onnx(save_onnx(graph, tmp_path / "saved.onnx"))


def operators(graph: Graph) -> Counter[str]:
    """Return how often each operator is left after all passes."""
    return Counter(SAME_KERNEL.get(n.op, n.op) for n in run_passes(graph)[0].nodes)


def cost(graph: Graph, chip: str, dtype: str = "fp16") -> tuple[int, float]:
    """Return kernels and seconds of the compiled graph."""
    timeline = simulate_graph(compile_graph(graph, chip, dtype=dtype))
    return len(timeline.operators), timeline.time_s


def assert_same_cost(graph: Graph, saved: Graph, *chips: str, dtype: str = "fp16") -> None:
    assert operators(saved) == operators(graph)
    for chip in chips:
        (count, time_s), (count_after, time_after_s) = (
            cost(g, chip, dtype) for g in (graph, saved)
        )
        assert count_after == count
        assert time_after_s <= SLOWER * time_s


QUICK = ("bert_base", "mobilevit_block", "unet", "shufflenet_v2")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in SMALL]
)
def test_a_saved_network_is_as_fast_as_the_one_in_memory(name, tmp_path):
    graph = zoo.build(name, **SMALL[name])
    assert_same_cost(graph, again(graph, tmp_path), "Ascend310", "Ascend910B2")


@pytest.mark.parametrize(
    "name", [pytest.param("bert_base", marks=pytest.mark.full), "gpt2_small", "mobilevit_block"]
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_network_in_a_narrow_format_too(name, dtype, tmp_path):
    """Factors that the format cannot hold pass through fp32 in the file."""
    graph = zoo.build(name, **SMALL[name], dtype=dtype)
    assert_same_cost(graph, again(graph, tmp_path), "Ascend910B2", dtype=dtype)


@pytest.mark.parametrize("name", ["bert_base", "gpt2_small"])
def test_a_network_saved_after_its_passes_keeps_attention(name, tmp_path):
    graph, _ = run_passes(zoo.build(name, **SMALL[name]))
    assert operators(graph)["flash_attention"] == 1
    assert_same_cost(graph, again(graph, tmp_path), "Ascend310")


def test_a_factor_in_an_initialiser_is_a_number_wherever_its_bytes_are(tmp_path):
    factor = numpy_helper.from_array(np.float32(0.25), "factor")
    plain = onnx.TensorProto(name="factor", data_type=1, float_data=[0.25])
    for tensor, outside in ((factor, False), (plain, False), (factor, True)):
        model = model_of("Mul x factor -> y", {"x": (2, 3)}, ["y"])
        model.graph.initializer.append(tensor)
        path = tmp_path / f"{outside}.onnx"
        onnx.save(model, path, save_as_external_data=outside, location="w.bin", size_threshold=0)
        (found,) = run_passes(import_onnx(path))[0].nodes
        assert (found.op, found.attrs) == ("muls", {"number": 0.25})


def test_a_weight_that_two_nodes_share_is_still_one(tmp_path):
    net = GraphBuilder("tied")
    words = net.constant(np.ones((40, 16), np.float32), name="words")
    row = net.embedding(words, net.input("ids", (3,), "int32"))
    net.output(net.matmul(row, words, trans_b=True))
    saved = again(net.build(), tmp_path)
    assert list(saved.constants) == ["words"]
