"""Small networks and helpers for tests of training graphs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.cluster.train import TrainingGraph
from ascend_lab.compiler import Graph, GraphBuilder, evaluate, random_inputs
from ascend_lab.compiler.ir import Constant

Values = NDArray[Any]


def doubled(graph: Graph) -> Graph:
    """Return the graph with every fp32 tensor in fp64, which only references know."""
    types = {
        n: replace(t, dtype="fp64") if t.dtype == "fp32" else t for n, t in graph.types.items()
    }
    constants = {n: Constant(types[n], c.data) for n, c in graph.constants.items()}
    return replace(graph, types=types, constants=constants)


def given(step: TrainingGraph, seed: int = 0) -> dict[str, Values]:
    """Return values of all inputs: seeded data, random distributions as targets, first values."""
    rng = np.random.default_rng(seed)
    found = random_inputs(step.graph, seed)
    for name in step.targets:
        drawn = rng.random(step.graph.types[name].shape) + 0.1
        found[name] = (drawn / drawn.sum(axis=1, keepdims=True)).astype(np.float32)
    found.update({name: constant.array() for name, constant in step.initial.items()})
    return found


def check_gradients(
    step: TrainingGraph, inputs: Mapping[str, Values], *, rtol: float = 1e-6
) -> None:
    """Compare gradients, in fp64, with central differences of the loss along random directions."""
    graph = doubled(step.graph)
    start = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in inputs.items()}
    found = evaluate(graph, start)
    assert set(step.gradients) == set(step.parameters)
    rng = np.random.default_rng(7)
    for name, slope in step.gradients.items():
        toward = rng.standard_normal(start[name].shape)
        toward /= np.linalg.norm(toward)
        ends = []
        for sign in (1.0, -1.0):
            moved = {**start, name: start[name] + sign * 1e-5 * toward}
            ends.append(evaluate(graph, moved)[step.loss][0])
        wanted = (ends[0] - ends[1]) / 2e-5
        got = float((found[slope] * toward).sum()) / step.loss_scale
        size = float(np.abs(found[slope]).sum()) / step.loss_scale
        assert size > 0, name
        assert abs(got - wanted) <= rtol * abs(wanted) + 1e-9 * max(1.0, size), (name, got, wanted)


# -- networks -------------------------------------------------------------------------------------
def mlp(dtype: str = "fp32") -> Graph:
    """Two fully connected layers."""
    net = GraphBuilder("mlp", dtype)
    x = net.input("x", (4, 8))
    wide = net.gemm(x, net.weight((16, 8), "w1"), net.weight((16,), "b1"), trans_b=True, name="fc1")
    h = net.relu(wide, name="act")
    net.output(
        net.gemm(h, net.weight((5, 16), "w2"), net.weight((5,), "b2"), trans_b=True, name="fc2")
    )
    return net.build()


def norm(net: GraphBuilder, x: Any, name: str) -> Any:
    """Return x normalised over channels, the scale and bias of each a weight."""
    channels = x.shape[1]
    rows = [net.weight((channels,), f"{name}.{key}", scale=0.3) for key in ("scale", "bias")]
    rows += [net.fill((channels,), n, f"{name}.{key}") for n, key in ((0.0, "mean"), (1.0, "var"))]
    return net.batch_norm(x, *rows, name=name)


def convolutions(dtype: str = "fp32") -> Graph:
    """Convolutions with batch norm, max pooling, a residual sum, groups, a stride, a mean."""
    net = GraphBuilder("convolutions", dtype)
    x = net.input("x", (2, 3, 9, 8))
    x = net.conv2d(x, net.weight((8, 3, 3, 3), "w0"), net.weight((8,), "b0"), pad=1, name="conv0")
    x = net.relu(norm(net, x, "bn0"), name="relu0")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="pool")
    y = net.conv2d(x, net.weight((8, 8, 3, 3), "w1"), pad=1, name="conv1")
    y = net.relu6(norm(net, y, "bn1"), name="relu1")
    y = net.conv2d(y, net.weight((8, 8, 3, 3), "w2"), pad=1, name="conv2")
    x = net.relu(net.add(norm(net, y, "bn2"), x, name="sum"), name="relu2")
    x = net.conv2d(x, net.weight((12, 8, 2, 2), "w3"), stride=2, name="conv3")
    x = net.avg_pool2d(x, kernel=2, stride=1, pad=((1, 0), (0, 1)), name="mean")
    x = net.reshape(net.global_avg_pool(x, name="pool2"), shape=(0, -1), name="flat")
    net.output(net.gemm(x, net.weight((4, 12), "w4"), net.weight((4,), "b4"), trans_b=True))
    return net.build()


def attention(dtype: str = "fp32") -> Graph:
    """A block of attention with layer norms and GELU, q, k and v from one product."""
    net = GraphBuilder("attention", dtype)
    x = net.input("x", (6, 8))
    scale = net.weight((8,), "s", scale=1.0)
    bias = net.weight((8,), "b", scale=1.0)
    y = net.layer_norm(x, scale, bias, name="norm")
    y = net.add(net.matmul(y, net.weight((8, 24), "wqkv")), net.weight((24,), "bqkv"), name="qkv")
    q, k, v = net.split(y, sizes=3, axis=1, name="split")

    def heads(t: Any, perm: tuple[int, ...], name: str) -> Any:
        return net.transpose(net.reshape(t, shape=(1, 6, 2, 4)), perm=perm, name=name)

    scores = net.batch_matmul(heads(q, (0, 2, 1, 3), "q"), heads(k, (0, 2, 3, 1), "k"))
    later = np.triu(np.full((1, 1, 6, 6), -10000.0, np.float32), 1)
    masked = net.add(net.muls(scores, number=0.5), net.constant(later, name="mask"))
    context = net.batch_matmul(net.softmax(masked, axis=-1), heads(v, (0, 2, 1, 3), "v"))
    rows = net.reshape(net.transpose(context, perm=(0, 2, 1, 3)), shape=(6, 8))
    x = net.add(x, net.matmul(rows, net.weight((8, 8), "wo")), name="sum1")
    h = net.gelu(net.matmul(x, net.weight((8, 16), "wi")), name="act")
    x = net.add(net.matmul(h, net.weight((16, 8), "wd")), x, name="sum2")
    net.output(net.rms_norm(x, net.weight((8,), "r", scale=1.0), name="last"))
    return net.build()


def words(dtype: str = "fp32") -> Graph:
    """Embeddings with positions, the table tied to the output product."""
    net = GraphBuilder("words", dtype)
    ids = net.input("ids", (2, 5), "int32")
    table = net.weight((11, 6), "table")
    places = net.slice(net.weight((9, 6), "places"), begin=(0, 0), end=(5, 6), name="used")
    x = net.add(net.embedding(table, ids, name="look"), places, name="placed")
    x = net.tanh(net.reshape(x, shape=(10, 6)), name="act")
    net.output(net.matmul(x, table, trans_b=True, name="scores"))
    return net.build()


NETWORKS = {"mlp": mlp, "convolutions": convolutions, "attention": attention, "words": words}
