"""The figures and checks of the chapter on graphs, and what its prose claims."""

import pytest

from ascend_lab.errors import InputError
from ascend_lab.graph import verify, zoo
from ascend_lab.graph.zoo import convolutional, transformers
from ascend_lab.graph.zoo.blocks import Net
from ascend_lab.lab.checks import check_ex_13_2, check_ex_13_3, check_ex_13_4
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
            lane, between = xs[1], range(ys[1] + 1, ys[2])
            assert not {(lane, row) for row in between} & set(places.values()) - own


def test_a_large_graph_is_not_drawn():
    with pytest.raises(InputError, match="30 rows"):
        fig_network(zoo.build("resnet18", size=32))


# -- who starts the kernels ------------------------------------------------------------------------
# -- checks: wrong answers that look right ---------------------------------------------------------
def test_the_block_is_sound():
    graph = verify(residual_block())
    assert graph.types["y"].shape == (1, 32, 4, 4)


def gemm(net, a, b, c, attributes, *, swap=False, scale_all=False, beta=True, op=""):
    said = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0, **attributes}
    if op:
        rest = c if c is not None else net.fill((1,), 0.0)
        turned = {"trans_a": bool(said["transA"]), "trans_b": bool(said["transB"])}
        return net.gemm(a, b, rest, alpha=said["alpha"], beta=said["beta"], **turned)
    sides = ("transB", "transA") if swap else ("transA", "transB")
    y = net.matmul(a, b, trans_a=bool(said[sides[0]]), trans_b=bool(said[sides[1]]))
    if not scale_all:
        y = net.muls(y, number=said["alpha"])
    if c is not None:
        y = net.add(y, net.muls(c, number=said["beta"] if beta else 1.0))
    return net.muls(y, number=said["alpha"]) if scale_all else y


@pytest.mark.parametrize(
    "wrong", [{"swap": True}, {"scale_all": True}, {"beta": False}, {"op": "gemm"}]
)
@pytest.mark.parametrize("seed", [7, 8])
def test_wrong_gemms_are_found(wrong, seed):
    assert check_ex_13_2(gemm, seed=seed)
    assert not check_ex_13_2(lambda *args: gemm(*args, **wrong), seed=seed)


def test_a_gemm_that_is_no_function_or_raises_is_no_crash():
    assert not check_ex_13_2(None)
    assert not check_ex_13_2(lambda *args: 3)
    assert "ShapeError" in check_ex_13_2(lambda net, a, b, c, attributes: net.matmul(b, a)).message


def walk(graph, *, places=slice(None), late=False, constants=True, last=False):
    ready = {*graph.inputs, *(graph.constants if constants else ())}
    found = []
    for node in graph.nodes:
        if late:
            ready.update(node.outputs)
        if not ready.issuperset(node.inputs[places]):
            found.append(node.name)
        ready.update(node.outputs)
    return (found[-1] if last else found[0]) if found else None


@pytest.mark.parametrize(
    "wrong",
    [{"places": slice(0, 1)}, {"late": True}, {"constants": False}, {"last": True}],
)
def test_wrong_rules_are_found(wrong):
    assert check_ex_13_3(walk)
    assert not check_ex_13_3(lambda graph: walk(graph, **wrong))


def pace(times, over, rate, wait, at):
    return max(sum(times[:at]), wait + over[at] / rate, sum(times[at:]))


def test_wrong_cuts_are_found():
    def best(times, over, rate, wait):
        return min(range(1, len(times)), key=lambda at: pace(times, over, rate, wait, at))

    def any_best(times, over, rate, wait):
        return max(range(1, len(times)), key=lambda at: -pace(times, over, rate, wait, at))

    def no_link(times, over, rate, wait):
        return best(times, [0] * len(times), rate, 0.0)

    def no_latency(times, over, rate, wait):
        return best(times, over, rate, 0.0)

    def fewest_bytes(times, over, rate, wait):
        return min(range(1, len(times)), key=lambda at: over[at])

    def added(times, over, rate, wait):
        return min(
            range(1, len(times)),
            key=lambda at: over[at] / rate + max(sum(times[:at]), sum(times[at:])),
        )

    assert check_ex_13_4(best)
    assert check_ex_13_4(any_best)
    for wrong in (no_link, fewest_bytes, added, lambda *_: 0, lambda *_: None):
        assert not check_ex_13_4(wrong)
    assert not all(check_ex_13_4(no_latency, seed=seed) for seed in range(7, 12))
