"""The figures and checks of the chapter on graphs, and what its prose claims."""

import pytest

from ascend_lab.compiler.zoo import convolutional, transformers
from ascend_lab.compiler.zoo.blocks import Net
from ascend_lab.lab.figures import fig_network
from ascend_lab.lab.figures.networks import placed, residual_block


def bottleneck():
    net = Net("bottleneck")
    x = net.images(1, 256, 8)
    return net.finish(convolutional._bottleneck(net, x, 64, 1, "r"))


def inception():
    net = Net("inception")
    x = net.images(1, 192, 8)
    return net.finish(convolutional._inception(net, x, convolutional.INCEPTION["3a"], "i"))


def attention():
    net = Net("attention")
    size = transformers.Size(64, 1, 4, 16, 1, 1e-5)
    return net.finish(
        transformers.self_attention(net, net.input("x", (16, 64)), size, None, name="a")
    )


GRAPHS = (residual_block, bottleneck, inception, attention)
each_graph = pytest.mark.parametrize("make", GRAPHS, ids=lambda f: f.__name__)


# -- the graph beside its text ---------------------------------------------------------------------
@each_graph
def test_no_edge_runs_through_a_box_of_another_node(make):
    graph = make()
    fig = fig_network(graph)
    places, _ = placed(graph)
    assert len(set(places.values())) == len(places), "two boxes in one place"
    ends = iter(fig.axes[0].lines)
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            if name not in places:
                continue
            xs, ys = next(ends).get_data()
            assert (xs[0], ys[0]) == places[name]
            assert (xs[-1], ys[-1]) == places[node.output]
            own = {places[name], places[node.output]}
            lane = xs[1]
            between = range(ys[1] + 1, ys[2])
            assert not {(lane, row) for row in between} & set(places.values()) - own
