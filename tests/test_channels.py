"""Moves of channels as products: values, what is left alone, and that it is quicker."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, compile_stages, evaluate, run_compiled, zoo
from ascend_lab.compiler.canonical import canonical
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.values import run_tasks
from ascend_lab.fused.channels import channels_by_cube
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.ops.formats import numpy_type

CHIP = load_chip("Ascend310P3")
MOVES = {"concat", "split", "slice", "reshape", "transpose"}


def whole(net: GraphBuilder, *shape: int):
    """Return weights that are -1, 0 or 1, with which fp16 adds up without rounding."""
    values = np.random.default_rng(sum(shape)).integers(-1, 2, shape)
    return net.constant(values.astype(numpy_type(net.dtype)), name="weight")


def images(net: GraphBuilder, *counts: int, size: int = 6, batch: int = 1) -> list:
    """Return images of so many channels, each made by the cube."""
    x = net.input("x", (batch, 8, size, size))
    return [net.relu(net.conv2d(x, whole(net, n, 8, 1, 1))) for n in counts]


def shuffled(net: GraphBuilder, x, groups: int):
    n, c, h, w = x.shape
    y = net.reshape(x, shape=(n, groups, c // groups, h, w))
    return net.reshape(net.transpose(y, perm=(0, 2, 1, 3, 4)), shape=x.shape)


def deep(net: GraphBuilder, x):
    """Return what a depthwise convolution makes of x: it cannot take a move in."""
    c = x.shape[1]
    return net.conv2d(x, whole(net, c, 1, 3, 3), groups=c, pad=1)


def same_values(graph: Graph, made: Graph) -> None:
    """Compare all outputs to the bit, on whole numbers."""
    rng = np.random.default_rng(5)
    x = {"x": rng.integers(-2, 3, graph.types["x"].shape).astype(np.float16)}
    got = evaluate(made, x)
    want = evaluate(graph, x)
    for mine, name in zip(made.outputs, graph.outputs, strict=True):
        np.testing.assert_array_equal(got[mine], want[name])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Joins, shuffles and cuts of channels, read by convolutions of one tap and of nine."""
    net = GraphBuilder("moves", "fp16")
    counts = draw(st.lists(st.sampled_from([4, 8, 12, 16, 24]), min_size=1, max_size=3))
    parts = images(net, *counts, size=draw(st.sampled_from([3, 14])), batch=draw(st.integers(1, 2)))
    if draw(st.booleans()):
        parts.append(parts[0])
    x = net.concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if x.shape[1] % g == 0]))
    x = shuffled(net, x, groups) if groups > 1 else x
    cut = draw(st.integers(1, x.shape[1] - 1))
    n, c, h, w = x.shape
    ends = [(0, cut), (cut, c)][: draw(st.integers(1, 2))]
    pieces = [net.slice(x, begin=(0, a, 0, 0), end=(n, b, h, w)) for a, b in ends]
    for piece in pieces:
        if draw(st.booleans()):
            bias = (whole(net, 8),) if draw(st.booleans()) else ()
            net.output(net.conv2d(piece, whole(net, 8, piece.shape[1], 1, 1), *bias))
        else:
            net.output(deep(net, piece))
    return net.build()


@given(graphs())
@settings(max_examples=40)
def test_values_stay_to_the_bit(graph: Graph) -> None:
    same_values(graph, channels_by_cube(graph, CHIP))


def test_kernels_compute_the_same() -> None:
    net = GraphBuilder("unit", "fp16")
    left, right = images(net, 20, 20)
    x = shuffled(net, net.concat(left, right, axis=1), 2)
    stays, goes = net.split(x, sizes=(20, 20), axis=1)
    goes = net.relu(net.conv2d(goes, whole(net, 20, 20, 1, 1), whole(net, 20)))
    net.output(net.concat(stays, deep(net, goes), axis=1))
    graph = net.build()
    assert not MOVES & {n.op for n in canonical(graph, CHIP).nodes if n.output != graph.outputs[0]}
    x = {"x": np.random.default_rng(1).integers(-2, 3, (1, 8, 6, 6)).astype(np.float16)}
    (want,), (got,) = (run.values() for run in (evaluate(graph, x), run_compiled(graph, x, CHIP)))
    np.testing.assert_array_equal(got, want)


def test_a_convolution_of_one_tap_takes_the_move_in() -> None:
    net = GraphBuilder("taken", "fp16")
    x = shuffled(net, images(net, 24)[0], 3)
    net.output(net.conv2d(x, whole(net, 40, 24, 1, 1), whole(net, 40)))
    graph = net.build()
    made = channels_by_cube(graph, CHIP)
    assert [n.op for n in made.nodes] == ["conv2d", "relu", "conv2d"]
    same_values(graph, made)


@pytest.mark.parametrize("batch", [1, 4])
def test_whole_blocks_are_joined_where_they_are(batch: int) -> None:
    net = GraphBuilder("fire", "fp16")
    y = net.concat(*images(net, 32, 64, size=14, batch=batch), axis=1)
    net.output(net.conv2d(y, whole(net, 16, 96, 1, 1), whole(net, 16)))
    graph = net.build()
    made = channels_by_cube(graph, CHIP)
    assert made == graph
    network = Road().stages(graph, CHIP).compiled
    assert [t.name for t in network.tasks if t.lowered is None] == ["concat"]


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("parts", [2, 3])
def test_sums_that_cancel_stay_on_the_core(chip: str, fusion: bool, parts: int) -> None:
    """Parts of a sum in fp16 would overflow, or lose what is left when they cancel."""
    net = GraphBuilder("cancel", "fp16")
    x = net.input("x", (1, 8, 4, 4))
    ones = net.fill((33, 8, 1, 1), 1.0, "ones")
    y = net.concat(*(net.conv2d(x, ones) for _ in range(parts)), axis=1)
    signs = np.repeat([1.0, -1.0, 0.0][:parts], 33).astype(np.float16)
    net.output(net.conv2d(y, net.constant(np.tile(signs, (5, 1)).reshape(5, -1, 1, 1))))
    graph = net.build()
    road = Road(fusion=fusion).stages(graph, load_chip(chip)).compiled
    x = {"x": np.full((1, 8, 4, 4), 4000 / 8, np.float16)}
    (got,) = run_tasks(road, x, graph.outputs).values()
    np.testing.assert_array_equal(got, np.zeros_like(got))


@pytest.mark.parametrize("kind", ["blocks", "row-major", "bytes", "large"])
def test_what_is_left_alone(kind: str) -> None:
    net = GraphBuilder("left", "int8" if kind == "bytes" else "fp16")
    if kind == "row-major":
        parts = [net.input(name, (1, 20, 6, 6)) for name in "xy"]
        net.output(net.concat(*parts, axis=1))
    elif kind == "bytes":
        parts = [net.input(name, (1, 20, 6, 6)) for name in "xy"]
        net.output(deep(net, net.concat(*parts, axis=1)))
    else:
        counts, size = ((32, 16), 6) if kind == "blocks" else ((3000, 3000), 1)
        net.output(deep(net, net.concat(*images(net, *counts, size=size), axis=1)))
    graph = net.build()
    assert channels_by_cube(graph, load_chip("Ascend310")) is graph


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_image_of_one_number_may_lose_its_axes(shape: tuple[int, ...]) -> None:
    net = GraphBuilder("one number", "fp16")
    x = net.global_avg_pool(net.conv2d(net.input("x", (1, 3, 4, 4)), whole(net, 1, 3, 1, 1)))
    net.output(net.muls(net.reshape(x, shape=shape), number=2.0))
    graph = net.build()
    assert channels_by_cube(graph, CHIP).nodes == graph.nodes
    x_values = {"x": np.arange(48, dtype=np.float16).reshape(1, 3, 4, 4)}
    (found,) = run_compiled(graph, x_values, CHIP).values()
    np.testing.assert_array_equal(found, evaluate(graph, x_values)[graph.outputs[0]])


def test_a_chip_without_room_moves_channels_as_before() -> None:
    net = GraphBuilder("tight", "fp16")
    net.output(deep(net, net.concat(*images(net, 20, 20), axis=1)))
    graph = net.build()
    tight = replace(CHIP, buffers={**CHIP.buffers, "L0C": 64})
    assert channels_by_cube(graph, CHIP) is not graph
    assert channels_by_cube(graph, tight) is graph


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_a_shuffled_network_is_quicker(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = zoo.build("shufflenet_v2_x0_5")
    quick = compile_stages(network, chip).timeline()
    monkeypatch.setattr("ascend_lab.compiler.canonical.operator_rewrites", tuple)
    slow = compile_stages(network, chip).timeline()
    assert quick.time_s < 0.8 * slow.time_s
    assert quick.kernels < 0.7 * slow.kernels
