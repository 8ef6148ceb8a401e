"""SiLU turned around between constant weights: fewer instructions, the same bits."""

from collections.abc import Callable

import numpy as np
import pytest

from ascend_lab.compiler import Graph, GraphBuilder, canonical, compile_stages, run_compiled
from ascend_lab.compiler.canonical import turned_silus
from ascend_lab.compiler.draft import Value
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.ops import OPERATORS, gradient

Middle = Callable[[GraphBuilder, Value], Value]


def weights(net: GraphBuilder, *shape: int) -> Value:
    values = np.random.default_rng(sum(shape)).standard_normal(shape)
    return net.constant((values / np.sqrt(np.prod(shape[1:]))).astype(np.float16))


def network(middle: Middle, **first: object) -> Graph:
    """Return conv, silu, what `middle` makes of it, conv."""
    net = GraphBuilder("net", "fp16")
    x = net.input("x", (2, 24, 9, 9))
    start = net.conv2d(x, weights(net, 32, 24, 1, 1), weights(net, 32), name="start", **first)
    y = middle(net, net.silu(start, name="silu"))
    net.output(net.conv2d(y, weights(net, 16, y.shape[1], 1, 1), weights(net, 16), name="end"))
    return net.build()


def excited(net: GraphBuilder, x: Value) -> Value:
    """A depthwise convolution with its SiLU, squeezed and excited."""
    y = net.conv2d(x, weights(net, 32, 1, 3, 3), weights(net, 32), groups=32, pad=1)
    y = net.silu(y, name="deep")
    gate = net.silu(net.conv2d(net.global_avg_pool(y), weights(net, 16, 32, 1, 1)), name="squeezed")
    scaled: Value = net.mul(y, net.sigmoid(net.conv2d(gate, weights(net, 32, 16, 1, 1))))
    return scaled


def turned(graph: Graph) -> set[str]:
    return {n.name for n in turned_silus(graph).nodes if n.op == "silu" and n.attr("turned", False)}


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_turned_networks_compute_the_same_bits(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network(excited)
    x = np.random.default_rng(1).standard_normal((2, 24, 9, 9)).astype(np.float16) * 4
    found, stages = run_compiled(graph, {"x": x}, chip), compile_stages(graph, chip)
    marks = [n.attr("turned", False) for n in stages.laid_out.nodes if n.op == "silu"]
    assert marks == [True] * 3
    monkeypatch.setattr(canonical, "turned_silus", lambda graph: graph)
    plain = run_compiled(graph, {"x": x}, chip)
    assert all(found[n].tobytes() == plain[n].tobytes() for n in graph.outputs)


def test_a_pass_less_over_every_lane() -> None:
    """Of 8 cycles for 128 results, the copy out of L0C among them, 7 are left."""
    chip, net = load_chip("Ascend310"), GraphBuilder("net", "fp16")
    x = net.input("x", (1, 16, 112, 112))
    y = net.silu(net.conv2d(x, weights(net, 64, 16, 1, 1), name="conv"))
    net.output(net.conv2d(y, weights(net, 16, 64, 1, 1), name="end"))
    graph = net.build()
    busy = {}
    for name, one in (("turned", graph), ("plain", network_ended_early(graph))):
        first = compile_stages(one, chip).timeline().operators
        (work,) = (op.timeline for op in first if op.type == "conv2d+silu")
        busy[name] = work.phases[0].busy_cycles["V"]
    repeats = 64 * 112 * 112 // 128 // chip.core_count
    assert repeats <= busy["plain"] - busy["turned"] <= 1.1 * repeats


def network_ended_early(graph: Graph) -> Graph:
    """Return the graph with SiLU's result as another output: its sign is seen."""
    (silu,) = (node for node in graph.nodes if node.op == "silu")
    return Graph(graph.name, graph.inputs, (*graph.outputs, silu.output), graph.nodes, graph.types,
                 graph.constants)  # fmt: skip


KEPT: dict[str, Middle] = {
    "added to something": lambda net, y: net.add(y, net.constant(np.ones((1, 32, 1, 1), "f2"))),
    "bent again": lambda net, y: net.relu(y),
    "times itself": lambda net, y: net.mul(y, y),
    "padded with ones": lambda net, y: net.pad(y, pads=((0, 0), (0, 0), (1, 1), (1, 1)), value=1.0),
    "weights that vary": lambda net, y: net.batch_matmul(y, y),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_sign_that_shows_is_kept(case: str) -> None:
    assert turned(network(KEPT[case])) == set()


def test_what_two_nodes_read_before_the_activation_is_kept() -> None:
    net = GraphBuilder("net", "fp16")
    start = net.conv2d(net.input("x", (1, 16, 8, 8)), weights(net, 16, 16, 1, 1))
    y = net.add(net.conv2d(net.silu(start), weights(net, 16, 16, 1, 1)), start)
    net.output(y)
    assert turned(net.build()) == set()


def test_of_two_that_meet_in_a_product_one_is_turned() -> None:
    def both(net: GraphBuilder, y: Value) -> Value:
        gate = net.conv2d(net.input("g", (2, 8, 9, 9)), weights(net, 32, 8, 1, 1))
        product: Value = net.mul(y, net.silu(gate, name="other"))
        return product

    assert len(turned(network(both))) == 1


def test_weights_that_several_nodes_read_are_turned_once() -> None:
    """Two slices of a batch share their weights before and after."""
    net = GraphBuilder("net", "fp16")
    first, last = weights(net, 16, 16, 1, 1), weights(net, 8, 16, 1, 1)
    for name in ("a", "b"):
        x = net.input(name, (1, 16, 8, 8))
        net.output(net.conv2d(net.silu(net.conv2d(x, first)), last))
    graph = turned_silus(net.build())
    read = [tuple(n.inputs[1] for n in graph.nodes if n.op == "conv2d")[i::2] for i in (0, 1)]
    assert len(graph.constants) == len(set(read[0])) + len(set(read[1])) == 2
    assert not {first.name, last.name} & set(graph.constants)


def test_the_gradient_of_a_turned_silu_is_that_of_its_values() -> None:
    x, step, operator = np.linspace(-4, 4, 9), 1e-5, OPERATORS["silu"]
    (slope,) = gradient(operator, [np.ones_like(x)], [x], [x / (1 + np.exp(x))], turned=True)
    ends = [operator.reference(x + side, turned=True) for side in (step, -step)]
    np.testing.assert_allclose(slope, np.subtract(*ends) / (2 * step), atol=1e-8)
