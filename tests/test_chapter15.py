"""The figures and checks of the chapter on memory planning, and what its prose claims."""

from itertools import accumulate

import numpy as np

from ascend_lab.compiler import GraphBuilder, compile_graph, memory, simulate_graph
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.placement import buffers_of, constant_bytes, plan_network
from ascend_lab.lab.checks import chapter15_16 as chapter15
from ascend_lab.lab.figures.lowering import network
from ascend_lab.lab.graph_examples import topological_order

MiB = 2**20


# -- what the prose claims -------------------------------------------------------------------------


def own_addresses(buffers):
    ends = list(accumulate(-(-b.size_bytes // 512) * 512 for b in buffers))
    offsets = {b.id: at for b, at in zip(buffers, [0, *ends[:-1]], strict=True)}
    return memory.Plan(offsets, ends[-1], memory.peak_live_bytes(buffers), "apart", False)


def test_resnet_in_a_small_arena_spares_memory_most_of_the_bytes():
    resnet = network("resnet50", 8)
    buffers = buffers_of(resnet)
    best = plan_network(resnet, time_limit_s=60)
    start = plan_network(resnet, "greedy-by-start")
    assert best.optimal
    assert best.height_bytes == memory.peak_live_bytes(buffers) < 30 * MiB
    assert 1.2 < start.height_bytes / best.height_bytes < 1.24
    l2 = resnet.chip.l2.size_bytes
    assert best.height_bytes * 9 / 8 < l2 < best.height_bytes * 10 / 8
    assert best.height_bytes < l2 < start.height_bytes
    runs = [simulate_graph(resnet, p, hints=False) for p in (own_addresses(buffers), start, best)]
    apart, birth, low = (run.memory_bytes for run in runs)
    assert low < 0.42 * apart
    assert 0.46 < birth / apart < 0.52
    assert max(run.time_s for run in runs) < 1.02 * min(run.time_s for run in runs)
    told = [simulate_graph(resnet, p).memory_bytes for p in (own_addresses(buffers), start, best)]
    weights = sum(constant_bytes(resnet).values())
    assert weights < min(told) <= max(told) < 1.001 * min(told) < 1.06 * weights
    spent = [run.summary()["totals"]["energy_j"] for run in runs]
    assert spent[2] < 0.87 * spent[0]


def test_depth_first_finishes_a_branch_before_the_next():
    net = GraphBuilder("branches")
    x = net.input("x", (2, 16, 16, 16))
    parts = []
    for _ in range(3):
        wide = net.conv2d(x, net.weight((256, 16, 1, 1)))
        parts.append(net.relu(net.conv2d(wide, net.weight((16, 256, 1, 1)))))
    net.output(net.add(net.add(*parts[:2]), parts[2], name="y"))
    chip = network("unet", 1).chip
    as_it_stands = Road(ordered=False)
    breadth, depth = (
        memory.peak_live_bytes(
            buffers_of(as_it_stands.stages(topological_order(net.build(), mode), chip).compiled)
        )
        for mode in ("bfs", "dfs")
    )
    assert depth < 0.75 * breadth
    by_itself = compile_graph(topological_order(net.build(), "bfs"), chip)
    assert memory.peak_live_bytes(buffers_of(by_itself)) == depth


# -- the checks ------------------------------------------------------------------------------------
def test_the_references_agree_with_the_planner():
    rng = np.random.default_rng(5)
    for _ in range(60):
        lives = chapter15.draw_lives(rng)["lives"]
        buffers = [memory.Buffer(i, *life) for i, life in enumerate(lives)]
        assert chapter15.peak(lives) == memory.peak_live_bytes(buffers)
    for ratio in (1.05, 1.3, 1.9, 1.99):
        buffers = [memory.Buffer(i, *life) for i, life in enumerate(chapter15.trap(ratio))]
        start, size = (
            memory.plan(buffers, method=f"greedy-by-{name}") for name in ("start", "size")
        )
        assert size.optimal
        assert start.height_bytes >= ratio * size.height_bytes


def test_shared_memory_runs_as_separate_memory_where_it_is_safe():
    rng = np.random.default_rng(3)
    for _ in range(40):
        case = chapter15.draw_nodes(rng)
        nodes = case["nodes"]
        sizes = case["sizes"]
        outputs = case["outputs"]
        pairs = chapter15.pairs_in_place(nodes, sizes, outputs)
        shared, wrong = chapter15.run_shared(nodes, sizes, pairs)
        apart, none = chapter15.run_shared(nodes, sizes, [])
        assert wrong == none == ""
        assert all(shared[target] is shared[source] for source, target in pairs)
        assert all(np.array_equal(shared[name], apart[name]) for name in outputs)
