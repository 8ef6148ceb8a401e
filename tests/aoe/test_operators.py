"""The operators of a network: which kernels are one, what L2 holds, which tuner they are for."""

from dataclasses import replace

import engine_cases as cases
import numpy as np
import pytest

from ascend_lab.aoe import operators_of
from ascend_lab.aoe.network import key_of
from ascend_lab.aoe.operators import unit_of
from ascend_lab.chip import load_chip
from ascend_lab.graph import compile_graph, simulate_graph
from ascend_lab.graph.network import residency
from ascend_lab.ops.matmul import warm_cycles


def blocks(count=3, rows=64, columns=64):
    """Return a network of equal blocks: a product and a softmax each."""
    net = cases.Net()
    x = net.input("x", (rows, columns))
    for _ in range(count):
        x = net.softmax(net.relu(net.matmul(x, net.numbers(columns, columns))), axis=-1)
    net.output(x)
    return net.build()


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_equal_kernels_are_one_operator(chip):
    compiled = compile_graph(blocks(4), chip)
    found = operators_of(compiled)
    kernels = [task for task in compiled.tasks if task.lowered is not None]
    assert sum(op.count for op in found) == len(kernels) > len(found)
    assert len({op.piece.key for op in found}) == len(found)
    assert len({op.name for op in found}) == len(found)
    assert [op.count for op in found if op.unit == "cube"] == [4]
    first = [task.name for task in kernels]
    assert [first.index(op.name) for op in found] == sorted(first.index(op.name) for op in found)


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_an_operator_starts_on_the_l2_of_its_network(chip):
    compiled = compile_graph(blocks(4), chip)
    shares = dict(zip((t.name for t in compiled.tasks), residency(compiled), strict=True))
    for op in operators_of(compiled):
        if op.count == 1:
            held = {n.partition(".")[0] for n, share in shares[op.name].items() if share >= 0.5}
            assert op.warm == held
    (product,) = [op for op in operators_of(compiled) if op.unit == "cube"]
    first = product.piece.graph.nodes[0]
    assert product.warm == {first.inputs[0]}  # just written; weights are read for the first time
    own = [t for t in compiled.tasks if t.piece.key == product.piece.key]
    assert product.default_cycles == warm_cycles(own[0].lowered.kernel, op.chip, product.warm)
    cold = warm_cycles(own[0].lowered.kernel, op.chip, ())
    hot = warm_cycles(own[0].lowered.kernel, op.chip, first.inputs)
    assert cold > product.default_cycles > hot


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_operators_alone_add_up_to_about_the_network(chip):
    compiled = compile_graph(blocks(4), chip)
    found, chip, times = operators_of(compiled), compiled.chip, simulate_graph(compiled)
    alone = sum(op.count * op.default_cycles for op in found)
    alone -= sum(op.count for op in found) * round(chip.launch_overhead_s * chip.clock_hz)
    total = (times.time_s - times.launch_s) * chip.clock_hz
    assert alone == pytest.approx(total, rel=0.01)


def test_who_does_not_find_its_inputs_in_l2_is_another_problem():
    operator = cases.first(cases.product())
    warm = replace(operator, warm=frozenset(operator.piece.graph.inputs))
    assert operator.problem != warm.problem and key_of(operator) != key_of(warm)
    edited = replace(operator.chip, clock_hz=2 * operator.chip.clock_hz)
    other = replace(operator, chip=edited)
    assert key_of(operator) != key_of(other) and key_of(operator).chip == key_of(other).chip


def graph_of(build, *shapes):
    net = cases.Net()
    inputs = [net.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
    net.output(build(net, *inputs))
    return net.build()


UNITS = {
    "convolution": (cases.convolution(), "cube", ""),
    "product": (cases.product(), "cube", ""),
    "batch": (cases.batch(), "product", ""),
    "turned product": (
        graph_of(lambda n, a, b: n.matmul(a, b, trans_a=True), (24, 20), (24, 17)),
        "product",
        "",
    ),
    "fold": (cases.vector(kind="reduce_sum"), "vector", ""),
    "depthwise": (
        graph_of(lambda n, x: n.depthwise_conv2d(x, n.numbers(16, 1, 3, 3)), (1, 16, 8, 8)),
        "",
        "depthwise",
    ),
    "computed weights": (
        graph_of(lambda n, x, w: n.conv2d(x, w), (1, 16, 8, 8), (16, 16, 3, 3)),
        "",
        "computed, not constant",
    ),
    "pool": (graph_of(lambda n, x: n.max_pool2d(x, kernel=2, stride=2), (1, 16, 8, 8)), "", ""),
    "transposed convolution": (
        graph_of(lambda n, x: n.conv_transpose2d(x, n.numbers(16, 8, 3, 3)), (1, 16, 8, 8)),
        "",
        "hand-written",
    ),
}


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("kind", UNITS)
def test_which_tuner_an_operator_is_for(kind, chip):
    graph, unit, reason = UNITS[kind]
    op = graph.nodes[0].op
    found = operators_of(compile_graph(graph, chip))
    (operator,) = [o for o in found if any(n.op == op for n in o.piece.graph.nodes)]
    assert (operator.unit, reason in operator.reason) == (unit, True)
    assert bool(operator.reason) == (not unit)
    for other in found:
        assert (other.unit, other.reason) == unit_of(other.piece, load_chip(chip))
        if other.op == "trans_data":
            assert not other.unit and "hand-written" in other.reason
    assert np.isfinite(operator.default_cycles) and operator.default_cycles > 0
