"""Planned memory of compiled networks: run in one arena of poisoned bytes, nothing is lost."""

import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder, compile_stages, random_inputs, zoo
from ascend_lab.compiler.lower import packed
from ascend_lab.compiler.memory import METHODS, Plan, peak_live_bytes, reuse_distance_bytes, verify
from ascend_lab.compiler.network import simulate_graph
from ascend_lab.compiler.placement import (
    buffers_of,
    in_place_pairs,
    owners,
    places_of,
    plan_network,
    workspaces,
)
from ascend_lab.compiler.values import run_tasks
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import execute
from ascend_lab.operators.ops.formats import numpy_type

POISON = 0xA5


def block(dtype="fp16"):
    """A residual network in small: branches, a join, a view, elementwise nodes on their own."""
    net = GraphBuilder("block", dtype)
    x = net.input("x", (1, 20, 6, 6))
    y = net.relu(net.conv2d(x, net.weight((20, 20, 3, 3)), pad=1))
    z = net.add(net.conv2d(y, net.weight((20, 20, 3, 3)), pad=1), y)
    z = net.max_pool2d(net.concat(z, y, axis=1), kernel=2)
    flat = net.reshape(z, shape=(1, 360))
    side = net.sqrt(net.abs(flat))
    net.output(net.softmax(net.matmul(net.div(side, net.exp(flat)), net.weight((360, 12)))), flat)
    return net.build()


def compiled(fusion=True, chip="Ascend910A", graph=None):
    return compile_stages(graph or block(), load_chip(chip), fusion=fusion).compiled


def run_in_arena(network, plan, inputs):
    """Run every kernel on one array of bytes; what a kernel works in is poisoned before it runs."""
    places = places_of(network, plan.offsets)
    arena = np.full(max(low + size for low, size in places.values()), POISON, np.uint8)

    def view(name, elements, dtype):
        low, size = places[name]
        count = elements * numpy_type(dtype).itemsize
        assert count <= size
        return arena[low : low + count].view(numpy_type(dtype))

    graph = network.graph
    for name in graph.inputs:
        flat = packed(graph.types[name], inputs[name])
        view(name, flat.size, graph.types[name].dtype)[:] = flat
    for task in network.tasks:
        if task.lowered is None:
            continue
        for name in workspaces(task):
            low, size = places[name]
            arena[low : low + size] = POISON
        tensors = dict(task.lowered.extra)
        for buffer in task.lowered.kernel.tensors:
            base = buffer.name.partition(".")[0]
            value = task.value(buffer.name)
            if base not in task.piece.graph.inputs:
                continue
            if value in graph.constants:
                form = task.lowered.forms.get(buffer.name)
                array = graph.constants[value].array()
                tensors[buffer.name] = form(array) if form else packed(graph.types[value], array)
            else:
                tensors[buffer.name] = view(value, buffer.elements, buffer.dtype).copy()
        memory = execute(task.lowered.kernel, tensors, network.chip)
        for name in task.piece.graph.outputs:
            found = np.asarray(memory[name]).reshape(-1)
            view(task.value(name), found.size, graph.types[task.value(name)].dtype)[:] = found
    return {n: view(n, graph.types[n].elements, graph.types[n].dtype) for n in graph.outputs}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_a_plan_keeps_every_value_until_its_last_reader(method, in_place, fusion):
    network = compiled(fusion)
    inputs = random_inputs(network.graph, 3)
    plan = plan_network(network, method, in_place=in_place)
    got = run_in_arena(network, plan, inputs)
    for name, value in run_tasks(network, inputs).items():
        np.testing.assert_array_equal(got[name].reshape(value.shape), value)


def test_the_arena_shows_a_plan_that_is_wrong():
    network = compiled(fusion=False)
    inputs = random_inputs(network.graph, 3)
    plan = plan_network(network, in_place=False)
    wrong = Plan(dict.fromkeys(plan.offsets, 0), plan.height_bytes, 0, "wrong", False)
    got = run_in_arena(network, wrong, inputs)
    right = run_tasks(network, inputs)
    assert any(not np.array_equal(got[n].reshape(v.shape), v) for n, v in right.items())


@pytest.mark.parametrize(
    ("model", "chip"),
    [
        ("resnet18", "Ascend310"),
        ("bert_base", "Ascend910B2"),
        pytest.param("resnet18", "Ascend910B2", marks=pytest.mark.full),
        pytest.param("bert_base", "Ascend310", marks=pytest.mark.full),
    ],
)
def test_plans_are_sound_and_never_below_the_peak(model, chip):
    network = compiled(chip=chip, graph=zoo.build(model))
    buffers = buffers_of(network)
    for method in METHODS:
        plan = plan_network(network, method, in_place=False)
        verify(plan, buffers)
        assert plan.height_bytes >= peak_live_bytes(buffers)
    shared = plan_network(network, in_place=True)
    assert shared.height_bytes <= sum(b.size_bytes for b in buffers)


def test_in_place_pairs_are_of_one_size_and_die_together():
    network = compiled(fusion=False)
    pairs = in_place_pairs(network)
    assert pairs
    life = {b.id: b for b in buffers_of(network)}
    for source, target in pairs:
        assert life[source].upper == life[target].lower + 1
        assert life[source].size_bytes == life[target].size_bytes
        assert source not in network.graph.inputs


def test_a_view_lies_in_the_memory_of_its_source():
    network = compiled()
    views = owners(network)
    assert views
    places = places_of(network, plan_network(network).offsets)
    for view, owner in views.items():
        (low, size) = places[view]
        (start, whole) = places[owner]
        assert start <= low and low + size <= start + whole


def test_reused_memory_is_written_back_less():
    network = compiled(graph=zoo.build("resnet18"))
    top = 0
    offsets = {}
    for buffer in buffers_of(network):
        offsets[buffer.id] = top
        top += -(-buffer.size_bytes // 512) * 512
    apart = simulate_graph(network, Plan(offsets, top, 0, "apart", False), hints=False)
    planned = plan_network(network, "l2", in_place=False)
    assert simulate_graph(network, planned, hints=False).memory_bytes < apart.memory_bytes
    best = plan_network(network, "best-fit", in_place=False)
    near, far = (reuse_distance_bytes(buffers_of(network), p.offsets) for p in (planned, best))
    assert near <= far
