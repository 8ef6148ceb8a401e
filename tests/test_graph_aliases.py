"""Slices and joins that are views: no kernel, addresses inside another tensor, equal values."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_placement import run_in_arena

from ascend_lab.compiler import GraphBuilder, compile_stages, evaluate, placement, random_inputs
from ascend_lab.compiler.aliases import Alias, aliases, idle_moves, view_nodes
from ascend_lab.compiler.ir import MOVES, Graph, Node, TensorType
from ascend_lab.compiler.lower import packed
from ascend_lab.compiler.network import DEFAULT_PLAN_METHOD, simulate_graph
from ascend_lab.compiler.placement import (
    aliases_of,
    buffers_of,
    in_place_pairs,
    places_of,
    plan_network,
)
from ascend_lab.compiler.values import run_tasks
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import DeviceMemory

CHIP = load_chip("Ascend310")


def cut_net(sizes=(3, 1), channels=20):
    """Images cut along the batch, each part convolved, and joined."""
    net = GraphBuilder("cut", "fp16")
    x = net.input("x", (sum(sizes), channels, 6, 6))
    weight = net.constant(np.eye(channels, dtype=np.float16).reshape(channels, channels, 1, 1))
    y = net.relu(net.conv2d(x, weight), name="y")
    low = 0
    parts = []
    for i, size in enumerate(sizes):
        begin = (low, 0, 0, 0)
        end = (low + size, channels, 6, 6)
        part = net.slice(y, begin=begin, end=end, name=f"cut{i}")
        parts.append(net.abs(net.conv2d(part, weight), name=f"part{i}"))
        low += size
    net.output(net.conv2d(net.concat(*parts, axis=0, name="join"), weight, name="z"))
    return net.build()


def compiled(graph, fusion=True):
    return compile_stages(graph, CHIP, fusion=fusion).compiled


def kernels(network):
    return [task.op for task in network.tasks if task.lowered is not None]


def test_slices_and_joins_of_a_batch_need_no_kernel():
    network = compiled(cut_net())
    assert not any(op in ("slice", "concat") for op in kernels(network))
    assert sum(op == "trans_data" for op in kernels(network)) == 2  # of the input and the output
    found = aliases_of(network)
    image = 2 * 16 * 6 * 6 * 2
    y = network.graph.node("cut0").inputs[0]
    assert found["cut0"] == Alias(y, 0) and found["cut1"] == Alias(y, 3 * image)
    assert found["part0"] == Alias("join", 0) and found["part1"] == Alias("join", 3 * image)
    names = {life.id for life in buffers_of(network)}
    assert {y, "join"} <= names and not names & set(found)


def test_kernels_use_the_addresses_of_views(monkeypatch):
    network = compiled(cut_net())
    places = places_of(network, plan_network(network, DEFAULT_PLAN_METHOD).offsets)
    image = 2 * 16 * 6 * 6 * 2
    assert places["cut1"] == (places["cut0"][0] + 3 * image, image)
    assert places["part1"][0] == places["join"][0] + 3 * image
    touched = []

    def noted(l2, tensors, **rest):
        touched.extend(tensors.values())
        return DeviceMemory(l2, tensors, **rest)

    monkeypatch.setattr(placement, "DeviceMemory", noted)
    simulate_graph(network, plan_network(network, DEFAULT_PLAN_METHOD))
    assert places["part1"] in touched and places["cut1"] in touched


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    channels=st.sampled_from([1, 16, 20]),
    fusion=st.booleans(),
    in_place=st.booleans(),
)
def test_values_survive_in_planned_memory(sizes, channels, fusion, in_place):
    graph = cut_net(sizes, channels)
    network = compiled(graph, fusion)
    inputs = random_inputs(graph, 1)
    wanted = evaluate(graph, inputs)["z"]
    (own,) = run_tasks(network, inputs).values()
    np.testing.assert_array_equal(own, wanted)
    plan = plan_network(network, "greedy-by-size", in_place=in_place)
    (planned,) = run_in_arena(network, plan, inputs).values()
    np.testing.assert_array_equal(planned.reshape(own.shape), own)


def matrices():
    """Batches of matrices between products: FRACTAL_NZ, cut and joined along the batch."""
    net = GraphBuilder("matrices", "fp16")
    a = net.input("a", (3, 16, 32))
    b = net.input("b", (3, 32, 48))
    y = net.batch_matmul(a, b, name="y")
    first = net.slice(y, begin=(0, 0, 0), end=(2, 16, 48), name="first")
    last = net.slice(y, begin=(2, 0, 0), end=(3, 16, 48), name="last")
    join = net.concat(net.relu(first), net.neg(last), axis=0, name="join")
    twice = net.concat(first, first, axis=0, name="twice")
    sides = [net.batch_matmul(join, net.input("c", (3, 48, 16))), net.relu(twice)]
    net.output(*sides)
    return net.build()


def test_batches_of_matrices_stay_in_fractals():
    graph = matrices()
    network = compiled(graph)
    types = network.graph.types
    assert types["first"].layout == types["join"].layout == types["twice"].layout == "FRACTAL_NZ"
    assert "slice" not in kernels(network)
    assert [t.name for t in network.tasks if t.op == "concat" and t.lowered] == ["twice"]
    inputs = random_inputs(graph, 2)
    wanted = evaluate(graph, inputs)
    for got, name in zip(run_tasks(network, inputs).values(), graph.outputs, strict=True):
        np.testing.assert_allclose(
            got.astype(float), wanted[name].astype(float), rtol=2e-3, atol=5e-2
        )


def test_what_cannot_be_a_view():
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (4, 32))
    k = net.constant(np.ones((4, 32), np.float16), name="k")
    a = net.abs(x)
    b = net.neg(x)
    net.output(
        net.concat(a, x, axis=0, name="input"),
        net.concat(a, k, axis=0, name="constant"),
        net.concat(a, a, axis=0, name="twice"),
        net.concat(a, b, axis=1, name="columns"),
        net.concat(a, b, axis=0, name="free"),
        net.concat(a, net.relu(x), axis=0, name="taken"),
        net.slice(a, begin=(0, 0), end=(4, 16), name="inner"),
        net.slice(a, begin=(0, 0), end=(4, 32), step=(2, 1), name="steps"),
        net.slice(b, begin=(1, 0), end=(3, 32), name="rows"),
        net.slice(k, begin=(1, 0), end=(3, 32), name="weights"),
        net.reshape(k, shape=(8, 16), name="numbers"),
    )
    graph = net.build()
    assert set(view_nodes(graph)) == {"free", "rows"}
    found = aliases(graph, view_nodes(graph))
    assert found["rows"] == Alias("free", 4 * 64 + 64)  # b lies behind a in the join


def test_an_output_that_is_a_constant_in_another_shape_has_a_place():
    net = GraphBuilder("g", "fp16")
    k = net.reshape(net.constant(np.arange(6, dtype=np.float16)), shape=(2, 3))
    net.output(k, net.add(k, net.input("x", (2, 3))))
    graph = net.build()
    stages = compile_stages(graph, CHIP)
    assert stages.timeline().time_s > 0
    feed = random_inputs(graph)
    found = run_tasks(stages.compiled, feed, graph.outputs)
    for name, array in evaluate(graph, feed).items():
        np.testing.assert_array_equal(found[name], array)


def test_a_part_is_never_overwritten_in_place():
    """relu reads a part for the last time; the rest is still needed."""
    net = GraphBuilder("g", "fp16")
    x = net.abs(net.input("x", (4, 16)))
    part = net.slice(x, begin=(0, 0), end=(2, 16))
    net.output(net.relu(part, name="y"), net.exp(x))
    network = compiled(net.build(), fusion=False)
    assert all(target != "y" for _, target in in_place_pairs(network))


@pytest.mark.parametrize("axis", [0, 2])
def test_slices_of_images_stay_in_blocks(axis):
    """Along rows a slice moves bytes, but needs no conversion."""
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (2, 20, 8, 4))
    y = net.conv2d(x, net.constant(np.eye(20, dtype=np.float16).reshape(20, 20, 1, 1)))
    begin = tuple(1 if i == axis else 0 for i in range(4))
    end = tuple(2 if i == axis else n for i, n in enumerate((2, 20, 8, 4)))
    net.output(net.global_max_pool(net.slice(y, begin=begin, end=end, name="cut")))
    graph = net.build()
    network = compiled(graph)
    assert network.graph.types["cut"].layout == "NC1HWC0"
    assert ("slice" in kernels(network)) == (axis == 2)
    inputs = random_inputs(graph)
    (got,) = run_tasks(network, inputs).values()
    (wanted,) = evaluate(graph, inputs).values()
    np.testing.assert_array_equal(got, wanted)


def heads_net(batch=1, rows=32, heads=4, width=32):
    """Products of a matrix, its columns parted into heads and joined again."""
    net = GraphBuilder("heads", "fp16")
    size = heads * width
    weight = net.constant((np.eye(size) * 2).astype(np.float16))
    y = net.matmul(net.input("x", (batch * rows, size)), weight)
    y = net.transpose(net.reshape(y, shape=(batch, rows, heads, width)), perm=(0, 2, 1, 3))
    key = net.input("k", (batch, heads, width, width))
    y = net.transpose(net.batch_matmul(y, key), perm=(0, 2, 1, 3))
    net.output(net.matmul(net.reshape(y, shape=(batch * rows, size)), weight))
    return net.build()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fusion", [True, False])
def test_heads_of_a_matrix_in_fractals_are_where_they_are(batch, fusion):
    """Of one image; the rows of several lie between each other's columns and have to move."""
    graph = heads_net(batch)
    network = compiled(graph, fusion)
    assert any("transpose" in op for op in kernels(network)) == (batch > 1)
    inputs = random_inputs(graph)
    plan = plan_network(network)
    (got,) = run_in_arena(network, plan, inputs).values()
    (wanted,) = evaluate(graph, inputs).values()
    np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=1e-2, atol=0.1)


def test_what_a_chain_of_moves_passes_is_read_by_nobody_else():
    """The row-major tensor between has a second reader here: it is written."""
    net = GraphBuilder("g", "fp16")
    weight = net.constant(np.eye(128, dtype=np.float16))
    y = net.matmul(net.input("x", (32, 128)), weight)
    parted = net.transpose(net.reshape(y, shape=(1, 32, 4, 32)), perm=(0, 2, 1, 3))
    key = net.input("k", (1, 4, 32, 32))
    net.output(net.batch_matmul(parted, key), net.abs(parted))
    graph = net.build()
    network = compiled(graph)
    inputs = random_inputs(graph)
    wanted = evaluate(graph, inputs).values()
    for got, value in zip(run_tasks(network, inputs).values(), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-2, atol=0.1)


def moved(draw, kind, array):
    """Return a random move: its name, its attributes, what it writes."""
    blocks = kind.layout != "ND"
    op = draw(st.sampled_from(["trans_data"] if blocks else MOVES))
    if op == "trans_data":
        return op, {}, replace(kind, layout="ND" if blocks else "FRACTAL_NZ"), array
    if op == "transpose":
        perm = tuple(draw(st.permutations(range(array.ndim))))
        return (
            op,
            {"perm": perm},
            replace(kind, shape=array.transpose(perm).shape),
            array.transpose(perm),
        )
    sizes = draw(st.sampled_from([(1, -1), (array.shape[0], -1), (2, 16, -1), (-1, 16)]))
    try:
        array = array.reshape(sizes)
    except ValueError:
        array = array.reshape(1, *array.shape)
    return op, {"shape": array.shape}, replace(kind, shape=array.shape), array


@settings(max_examples=100)
@given(data=st.data())
def test_a_chain_is_a_view_exactly_if_all_bytes_stay(data):
    sizes = st.lists(st.sampled_from([1, 2, 16, 32]), min_size=2, max_size=3)
    array = np.arange(np.prod(shape := data.draw(sizes)), dtype=np.float32).reshape(shape)
    kind = TensorType(tuple(shape), "fp32", data.draw(st.sampled_from(["ND", "FRACTAL_NZ"])))
    types = {"t0": kind}
    nodes = []
    stay = []
    pads = [kind.map.padding_bytes]
    start = packed(kind, array)
    for i in range(data.draw(st.integers(1, 4))):
        op, attrs, kind, array = moved(data.draw, kind, array)
        nodes.append(Node(f"n{i}", op, (f"t{i}",), (f"t{i + 1}",), attrs))
        types[f"t{i + 1}"] = kind
        pads.append(kind.map.padding_bytes)
        stay.append(np.array_equal(packed(kind, array), start))
    chain = idle_moves(Graph("g", ("t0",), (f"t{len(nodes)}",), tuple(nodes), types), nodes[0])
    assert not chain or stay[len(chain) - 1]
    assert chain or any(pads) or not any(stay)
