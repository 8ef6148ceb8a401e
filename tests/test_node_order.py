"""Times that neither the order of a file's nodes nor their names decide; one image and two."""

import random
from dataclasses import replace

import pytest

from ascend_lab.chip import load_chip
from ascend_lab.graph import Graph, GraphBuilder, compile_stages, zoo
from ascend_lab.graph.draft import in_order

CHIPS = ("Ascend310P3", "Ascend910B2")


def conv(net, x, channels, taps):
    """A convolution that keeps the sizes of the image."""
    weight = net.weight((channels, x.shape[1], taps, taps))
    return net.conv2d(x, weight, pad=taps // 2)


def branches(net, x):
    """An Inception block: four ways of one image, joined."""
    narrow = net.relu(conv(net, x, 32, 1))
    three = net.relu(conv(net, net.relu(conv(net, x, 48, 1)), 64, 3))
    five = net.relu(conv(net, net.relu(conv(net, x, 16, 1)), 32, 5))
    pooled = net.relu(conv(net, net.max_pool2d(x, kernel=3, stride=1, pad=1), 32, 1))
    return net.concat(narrow, three, five, pooled, axis=1)


def joined(net, x):
    """A dense block: each layer reads all before it."""
    for _ in range(3):
        new = conv(net, net.relu(conv(net, x, 64, 1)), 32, 3)
        x = net.concat(x, new, axis=1)
    return x


def residual(net, x):
    """Two convolutions beside a third, added."""
    way = conv(net, net.relu(conv(net, x, 64, 3)), 64, 3)
    return net.relu(net.add(way, conv(net, x, 64, 1)))


def built(block) -> Graph:
    net = GraphBuilder("block", "fp16")
    x = net.input("x", (1, 64, 14, 14))
    net.output(block(net, x))
    return net.build()


def shuffled(graph: Graph, seed: int) -> Graph:
    """The same graph, its nodes in another order that may be executed, under other names."""
    rng = random.Random(seed)
    waiting = list(graph.nodes)
    order = []
    known = {*graph.inputs, *graph.constants}
    while waiting:
        node = rng.choice([n for n in waiting if known.issuperset(n.inputs)])
        waiting.remove(node)
        known.update(node.outputs)
        order.append(replace(node, name=f"n{rng.random()}"))
    return replace(graph, nodes=tuple(order))


@pytest.mark.parametrize("block", [branches, joined, residual])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_order_of_nodes_changes_no_time(block, chip):
    graph = built(block)
    times = {
        compile_stages(one, chip).timeline().time_s
        for one in (graph, *(shuffled(graph, seed) for seed in range(2)))
    }
    assert len(times) == 1


def test_one_order_is_kept_and_is_an_order():
    graph = built(branches)
    for seed in range(10):
        ordered = in_order(shuffled(graph, seed))
        assert [n.outputs for n in ordered.nodes] == [n.outputs for n in in_order(graph).nodes]
        known = {*graph.inputs, *graph.constants}
        for node in ordered.nodes:
            assert known.issuperset(node.inputs)
            known.update(node.outputs)


def test_one_image_of_densenet_takes_less_than_two():
    """With one image every join at whole blocks is a view, as it is with two."""
    chip = load_chip("Ascend910A")
    stages = [compile_stages(zoo.build("densenet121", batch=n), chip) for n in (1, 2)]
    one, two = (found.timeline() for found in stages)
    assert one.time_s < two.time_s
    assert one.kernels <= two.kernels
