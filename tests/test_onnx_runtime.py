"""Random graphs: what we evaluate, ONNX Runtime computes from the exported model."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_onnx_export import run_onnx

from ascend_lab.graph import GraphBuilder, evaluate, random_inputs, zoo
from ascend_lab.graph.onnx import import_onnx
from ascend_lab.graph.onnx.export import export_onnx

# Both sum fp32 products, in another order: errors grow with the largest number a graph holds.
RTOL = 2e-5

UNARY = (
    "abs", "neg", "relu", "square", "relu6", "leaky_relu", "sigmoid", "tanh", "gelu", "silu",
    "softplus", "elu", "hard_sigmoid", "hard_swish", "adds", "muls", "clip", "softmax",
    "log_softmax",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "max", "min", "select", "concat")


def windowed(draw, net, x):
    """Return x (n, c, h, w) after an operator with a window."""
    c, h, w = x.shape[1:]
    size = draw(st.integers(1, min(3, h, w)))
    step = {"stride": draw(st.integers(1, 2))}
    padded = {**step, "pad": draw(st.integers(0, size - 1))}
    return draw(
        st.sampled_from(
            (
                lambda: net.conv2d(x, net.weight((3, c, size, size)), net.weight((3,)), **padded),
                lambda: net.depthwise_conv2d(x, net.weight((c, 1, size, size)), **padded),
                lambda: net.conv_transpose2d(x, net.weight((c, 2, size, size)), **step),
                lambda: net.max_pool2d(x, kernel=size, **padded),
                lambda: net.avg_pool2d(x, kernel=size, **padded),
                lambda: net.avg_pool2d(x, kernel=size, count_include_pad=True, **padded),
            )
        )
    )()


def moved(draw, net, x):
    """Return x (n, c, h, w) after an operator that moves or rescales whole axes."""
    n, c, h, w = x.shape
    any_axis, few = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    picks = np.array(draw(st.lists(st.integers(0, c - 1), min_size=1, max_size=3)), np.int32)
    order = tuple(draw(st.permutations(range(4))))
    per_channel = [net.weight((c,)) for _ in range(3)]
    begin = draw(st.integers(0, h - 1))
    return draw(
        st.sampled_from(
            (
                lambda: net.batch_norm(x, *per_channel, net.fill((c,), 0.5)),
                lambda: net.layer_norm(x, net.weight((w,)), net.weight((w,))),
                lambda: net.transpose(x, perm=order),
                lambda: net.reshape(x, shape=(n * c, 1, w, h)),
                lambda: net.pad(x, pads=((0, 0), (few, 1), (0, few), (1, 0)), value=-1.5),
                lambda: net.slice(x, begin=(0, 0, begin, 0), end=x.shape, step=(1, 1, 1 + few, 1)),
                lambda: net.split(net.concat(x, x, axis=any_axis), sizes=2, axis=any_axis)[1],
                lambda: net.reduce_mean(x, axis=any_axis, keepdims=True),
                lambda: net.batch_matmul(x, net.weight((1, w, few + 1))),
                lambda: net.gather(x, net.constant(picks), axis=1),
                lambda: net.expand(net.reduce_max(x, axis=0, keepdims=True), shape=(2, c, h, w)),
            )
        )
    )()


def joined(draw, net, x, y):
    """Return two tensors in one; select asks the first, concat repeats it."""
    op = draw(st.sampled_from(BINARY))
    if op == "select":
        return net.select(net.greater(x, y), x, net.muls(y, number=0.5))
    return net.concat(x, y, x, axis=draw(st.integers(0, 3))) if op == "concat" else net.add_node(
        op, x, y
    )  # fmt: skip


@st.composite
def graphs(draw):
    """Draw a network of 1 to 8 operators over one image; branches join again."""
    net = GraphBuilder("random")
    x = net.input("x", tuple(draw(st.integers(1, 5)) for _ in range(4)))
    for _ in range(draw(st.integers(1, 8))):
        way = draw(st.integers(0, 3))
        if way == 0:
            x = joined(draw, net, x, net.add_node(draw(st.sampled_from(UNARY)), x))
        elif way == 1:
            x = net.add_node(draw(st.sampled_from(UNARY)), x)
        else:
            x = draw(st.sampled_from((windowed, moved)))(draw, net, x)
        if x.type.elements > 4000:
            x = net.slice(x, begin=(0,) * 4, end=tuple(min(n, 3) for n in x.shape))
    net.output(net.relu(x), net.reduce_max(x, axis=-1))
    return net.build()


def assert_close(found, wanted, limit):
    """Assert equal shapes and numbers, errors up to a share of the largest number."""
    for name, value in wanted.items():
        scale = max(1.0, float(np.abs(value).max()))
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=limit * scale)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.integers(0, 1000))
def test_random_graphs_agree_with_onnx_runtime_and_survive_the_way_back(graph, seed):
    feed, model = random_inputs(graph, seed), export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    wanted, again = evaluate(graph, feed), import_onnx(model)
    assert_close(run_onnx(model, feed), wanted, RTOL)
    assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
    assert_close(evaluate(again, feed), wanted, RTOL)


# Networks of the zoo, the transformers with fewer layers and words
QUICK = ("squeezenet", "mobilenet_v3_large", "bert_base")
NETWORKS = {
    "squeezenet": {},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "shufflenet_v2": {},
    "efficientnet_b0": {},
    "inception_v1": {},
    "mobilevit_block": {},
    "bert_base": {"layers": 1, "vocabulary": 500, "length": 32},
    "gpt2_small": {"layers": 1, "vocabulary": 500, "length": 32},
    "vit_b16": {"layers": 1},
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in NETWORKS]
)
def test_networks_agree_with_onnx_runtime_before_and_after_the_way_back(name):
    """fp32 sums of up to thousands of products: 1e-5 of the largest output."""
    graph = zoo.build(name, **NETWORKS[name])
    model, feed = export_onnx(graph), random_inputs(graph)
    wanted, again = run_onnx(model, feed), import_onnx(model)
    assert (again.inputs, again.outputs) == (graph.inputs, graph.outputs)
    for found in (evaluate(graph, feed), evaluate(again, feed)):
        for key, value in wanted.items():
            limit = 1e-5 * float(np.abs(value).max())
            np.testing.assert_allclose(found[key], value, rtol=0, atol=limit)
