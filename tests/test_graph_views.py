"""Tables of graphs, and who starts the kernels: three ways, bytes over a cut."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, zoo
from ascend_lab.compiler.compile import compile_stages
from ascend_lab.compiler.counts import HEADINGS, table
from ascend_lab.compiler.network import simulate_graph
from ascend_lab.errors import InputError
from ascend_lab.lab.graph_examples import WAYS, crossing_bytes, dispatch, kernel_times
from ascend_lab.machine.chip import load_chip

TIMES = st.lists(st.floats(1e-7, 1e-4), min_size=1, max_size=30)


def two_products():
    """Return a graph in which two nodes read the same weights."""
    net = GraphBuilder("twice")
    x = net.input("x", (4, 8))
    w = net.weight((8, 8), "w")
    y = net.matmul(net.matmul(x, w, name="one"), w, name="two")
    net.output(net.relu(y, name="three"))
    return net.build()


# -- table -----------------------------------------------------------------------------------------
def test_rows_say_what_each_node_writes_and_costs():
    lines = table(two_products()).splitlines()
    assert [line.split() for line in lines] == [
        list(HEADINGS),
        ["one", "matmul", "fp32[4,", "8]", "64", "256"],
        ["two", "matmul", "fp32[4,", "8]", "256"],  # its weights count where they are first read
        ["three", "relu", "fp32[4,", "8]"],
        ["twice", "3", "nodes", "64", "512"],
    ]
    assert all(line[lines[0].index("operator") - 2 :].startswith("  ") for line in lines[:-1])


def test_a_node_with_several_outputs_lists_their_types():
    net = GraphBuilder("split")
    net.output(*net.split(net.input("x", (4, 6)), sizes=(2, 4), axis=1))
    assert "fp32[4, 2], fp32[4, 4]" in table(net.build()).splitlines()[1]


# -- dispatch --------------------------------------------------------------------------------------
def test_three_kernels_by_hand():
    times = [2.0, 9.0, 1.0]
    launch = 5.0
    task = 1.0
    found = {way: dispatch(times, way, launch, task) for way in WAYS}
    assert found["waits"].device == ((5, 7), (12, 21), (26, 27))
    assert found["waits"].host == ((0, 4), (7, 11), (21, 25))
    # sent at 4, 8, 12; each needs 1 to start: 5-7, 9-18, 19-20
    assert found["ahead"].device == ((5, 7), (9, 18), (19, 20))
    assert found["ahead"].host == ((0, 4), (4, 8), (8, 12))
    assert found["sink"].device == ((5, 7), (8, 17), (18, 19))
    assert found["sink"].host == ((0, 4),)
    assert [run.time_s for run in found.values()] == [27, 20, 19]
    assert found["sink"].busy_share == pytest.approx(12 / 19)


@settings(max_examples=100)
@given(TIMES, st.floats(1e-6, 1e-5), st.floats(0, 1))
def test_the_three_ways_are_ordered_and_follow_their_equations(times, launch, part):
    task = part * launch
    waits, ahead, sink = (dispatch(times, way, launch, task) for way in WAYS)
    assert sink.time_s <= ahead.time_s * (1 + 1e-9)
    assert ahead.time_s <= waits.time_s * (1 + 1e-9)
    assert waits.time_s == pytest.approx(sum(times) + len(times) * launch)
    assert sink.time_s == pytest.approx(sum(times) + launch + (len(times) - 1) * task)
    end = 0.0
    for i, time in enumerate(times, 1):
        end = max(end, i * (launch - task)) + task + time
    assert ahead.time_s == pytest.approx(end)
    for run in (waits, ahead, sink):
        spans = run.device
        assert all(one[1] <= two[0] + 1e-12 for one, two in pairwise(spans))


def test_wrong_ways_are_refused():
    for arguments in (([], "waits", 1.0, 0.5), ([1.0], "sinks", 1.0, 0.5)):
        with pytest.raises(InputError, match=r"waits, ahead, sink"):
            dispatch(*arguments)
    with pytest.raises(InputError, match="part of a launch"):
        dispatch([1.0], "sink", 1.0, 2.0)


def test_bytes_over_a_cut_are_what_the_second_part_reads():
    net = GraphBuilder("skip")
    x = net.input("x", (4, 8))  # 128 bytes
    a = net.relu(x, name="a")
    b = net.matmul(a, net.weight((8, 2)), name="b")  # 32 bytes
    net.output(net.add(net.matmul(b, net.weight((2, 8)), name="c"), a, name="d"))
    graph = net.build()
    # before a: x; behind a: a; behind b: a for the sum, and b; behind c: a and c; at the end: none
    assert [crossing_bytes(graph, i) for i in range(5)] == [128, 128, 160, 256, 0]


def test_kernel_times_are_the_networks_without_launches():
    chip = load_chip("Ascend910A")
    net = compile_stages(zoo.build("resnet18", size=32), chip, passes=(), fusion=False).compiled
    times = kernel_times(net)
    network = simulate_graph(net)
    assert len(times) == len(network.operators)
    assert sum(times.values()) + network.launch_s == pytest.approx(network.time_s, rel=1e-9)
    sink = dispatch(list(times.values()), "sink", chip.launch_overhead_s, chip.queued_launch_s)
    assert sink.time_s == pytest.approx(network.time_s, rel=1e-9)
