"""The order of a file's nodes and their names decide no time: one order is kept for all."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, compile_stages
from ascend_lab.compiler.draft import in_order
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.onnx import export_onnx, import_onnx

CHIPS = ("Ascend910A", "Ascend310P3", "Ascend910B2")


def convolved(net: GraphBuilder, x, features: int, kernel: int, groups: int = 1):
    weight = net.weight((features, x.shape[1] // groups, kernel, kernel))
    return net.relu(net.conv2d(x, weight, pad=kernel // 2, groups=groups))


def inception_block() -> Graph:
    """Return four branches of one image, joined, twice."""
    net = GraphBuilder("inception", "fp16")
    x = net.input("x", (2, 192, 14, 14))
    for _ in range(2):
        pooled = net.max_pool2d(x, kernel=3, stride=1, pad=1)
        parts = (
            convolved(net, x, 64, 1),
            convolved(net, convolved(net, x, 96, 1), 128, 3),
            convolved(net, convolved(net, x, 16, 1), 32, 3),
            convolved(net, pooled, 32, 1),
        )
        x = net.concat(*parts, axis=1)
    net.output(x)
    return net.build()


def dense_block() -> Graph:
    """Return layers that each read all before them, and add 32 channels."""
    net = GraphBuilder("dense", "fp16")
    parts = [convolved(net, net.input("x", (1, 64, 14, 14)), 64, 1)]
    for _ in range(4):
        y = net.concat(*parts, axis=1) if len(parts) > 1 else parts[0]
        parts.append(convolved(net, convolved(net, net.relu(y), 128, 1), 32, 3))
    net.output(net.concat(*parts, axis=1))
    return net.build()


def residual_block() -> Graph:
    """Return two convolutions beside a third, added."""
    net = GraphBuilder("residual", "fp16")
    x = net.input("x", (1, 64, 14, 14))
    way = convolved(net, convolved(net, x, 64, 3), 64, 3)
    net.output(net.relu(net.add(way, convolved(net, x, 64, 1))))
    return net.build()


def shuffle_block() -> Graph:
    """Return units that cut channels in halves, work on one, join and shuffle them."""
    net = GraphBuilder("shuffle", "fp16")
    x = convolved(net, net.input("x", (1, 24, 14, 14)), 116, 1)
    for _ in range(3):
        left, right = net.split(x, sizes=(58, 58), axis=1)
        right = convolved(net, right, 58, 1)
        right = convolved(net, convolved(net, right, 58, 3, groups=58), 58, 1)
        x = net.concat(left, right, axis=1)
        n, c, h, w = x.shape
        y = net.transpose(net.reshape(x, shape=(n, 2, c // 2, h, w)), perm=(0, 2, 1, 3, 4))
        x = net.reshape(y, shape=(n, c, h, w))
    net.output(convolved(net, x, 64, 1))
    return net.build()


def two_heads() -> Graph:
    """Return a trunk with two outputs, the deeper one declared first, and an unread node."""
    net = GraphBuilder("heads", "fp16")
    x = convolved(net, net.input("x", (1, 16, 8, 8)), 32, 3)
    deep = convolved(net, convolved(net, x, 32, 3), 16, 3)
    shallow = convolved(net, x, 16, 1)
    net.neg(x)
    net.output(deep, shallow)
    return net.build()


ALL = (inception_block, dense_block, residual_block, shuffle_block, two_heads)
BLOCKS = {block.__name__: block for block in ALL}


def reordered(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Return a model with its nodes in a random topological order, under other names."""
    waiting = list(model.graph.node)
    written = {name for node in waiting for name in node.output}
    order: list[onnx.NodeProto] = []
    while waiting:
        ready = [n for n in waiting if written.isdisjoint(n.input)]
        node = ready[rng.integers(len(ready))]
        waiting.remove(node)
        written -= set(node.output)
        order.append(node)
    inner = {n for node in order for n in node.output} - {o.name for o in model.graph.output}
    names = [f"t{i}" for i in rng.permutation(len(inner))]
    new = dict(zip(sorted(inner), names, strict=True))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:], made.graph.value_info[:]
    for number, node in enumerate(order):
        one = made.graph.node.add()
        one.CopyFrom(node)
        one.name = f"node{rng.integers(1 << 30)}_{number}"
        one.input[:] = [new.get(name, name) for name in node.input]
        one.output[:] = [new.get(name, name) for name in node.output]
    return made


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_time_does_not_depend_on_the_order_or_the_names_in_a_file(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = export_onnx(BLOCKS[name]())
    for chip in CHIPS:
        want, got = (
            compile_stages(import_onnx(one), chip).timeline()
            for one in (model, reordered(model, rng))
        )
        assert (got.time_s, got.memory_bytes) == (want.time_s, want.memory_bytes)
        assert [op.type for op in got.operators] == [op.type for op in want.operators]


@pytest.mark.parametrize("name", BLOCKS)
def test_one_order_is_kept_and_can_be_executed(name: str) -> None:
    model = export_onnx(BLOCKS[name]())
    want = operators_of(import_onnx(model))
    for seed in range(5):
        ordered = in_order(import_onnx(reordered(model, np.random.default_rng(seed))))
        assert operators_of(ordered) == want
        known = {*ordered.inputs, *ordered.constants}
        for node in ordered.nodes:
            assert known.issuperset(node.inputs)
            known.update(node.outputs)


def operators_of(graph: Graph) -> list[tuple[object, ...]]:
    """Return each node in the order that is kept: its operator, shapes and who wrote what it reads.

    Names differ from file to file; the place of the writer does not.
    """
    ordered = in_order(graph)
    place = {name: i for i, node in enumerate(ordered.nodes) for name in node.outputs}
    return [
        (
            node.op,
            tuple(place.get(name) for name in node.inputs),
            tuple(ordered.types[name].shape for name in (*node.inputs, *node.outputs)),
        )
        for node in ordered.nodes
    ]


def test_a_long_chain_needs_no_recursion() -> None:
    net = GraphBuilder("chain", "fp16")
    x = net.input("x", (1, 16))
    for _ in range(3000):
        x = net.adds(x, number=1.0)
    net.output(x)
    graph = net.build()
    assert in_order(graph).nodes == graph.nodes
