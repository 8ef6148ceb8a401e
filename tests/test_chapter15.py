"""The figures and checks of the chapter on memory planning, and what its prose claims."""

from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from ascend_lab.compiler import (
    GraphBuilder,
    Road,
    compile_graph,
    compile_stages,
    memory,
    simulate_graph,
)
from ascend_lab.compiler.memory_file import read_csv
from ascend_lab.compiler.placement import buffers_of, constant_bytes, in_place_pairs, plan_network
from ascend_lab.compiler.zoo import build
from ascend_lab.data import data_path
from ascend_lab.errors import GraphError
from ascend_lab.lab.checks import chapter15_16 as chapter15
from ascend_lab.lab.figures.lowering import network
from ascend_lab.lab.graph_examples import topological_order
from ascend_lab.lab.packing import exact_plan

MiB = 2**20
TOY, EIGHT = (
    [memory.Buffer("abcdefgh"[i], *life) for i, life in enumerate(lives)]
    for lives in (chapter15.TOY, chapter15.EIGHT)
)


# -- what the prose claims -------------------------------------------------------------------------
def test_the_toy_is_as_worked_by_hand():
    start, size = (memory.plan(TOY, method=f"greedy-by-{name}") for name in ("start", "size"))
    assert [start.offsets[name] for name in "abcdef"] == [0, 2, 5, 6, 0, 1]
    assert [size.offsets[name] for name in "abcdef"] == [3, 0, 6, 0, 6, 0]
    assert (start.height_bytes, size.height_bytes, size.lower_bound_bytes) == (12, 7, 7)
    assert sum(b.size_bytes for b in TOY) == 16


def test_eight_buffers_need_a_byte_more_than_ever_live():
    live = [sum(b.size_bytes for b in EIGHT if b.lower <= t < b.upper) for t in range(6)]
    assert live == [4] * 6
    best = exact_plan(EIGHT, 60)
    assert (best.height_bytes, best.lower_bound_bytes, best.optimal) == (5, 4, True)
    # without the search: all offsets within four bytes, none of them sound
    places = [range(5 - b.size_bytes) for b in EIGHT]
    pairs = [
        (i, k)
        for k in range(8)
        for i in range(k)
        if EIGHT[i].lower < EIGHT[k].upper and EIGHT[k].lower < EIGHT[i].upper
    ]
    size = [b.size_bytes for b in EIGHT]
    assert not any(
        all(at[i] + size[i] <= at[k] or at[k] + size[k] <= at[i] for i, k in pairs)
        for at in product(*places)
    )


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


@pytest.mark.full
def test_placing_for_l2_helps_and_harms():
    def moved(name, batch, method):
        compiled = network(name, batch)
        found = plan_network(compiled, method, time_limit_s=60)
        alive = memory.share(buffers_of(compiled), in_place_pairs(compiled))
        distance = memory.reuse_distance_bytes(alive, found.offsets)
        return (
            simulate_graph(compiled, found, hints=False).memory_bytes,
            distance,
            found.height_bytes,
        )

    start, hot, low = (moved("resnet50", 8, m) for m in ("greedy-by-start", "l2", "best of"))
    assert low[0] < hot[0] < start[0] and hot[2] >= start[2]
    assert hot[1] > start[1]  # the distance does not foresee it
    hot, low = (moved("unet", 2, m) for m in ("l2", "best of"))
    assert 1.01 < hot[0] / low[0] < 1.03 and hot[1] > low[1]
    assert low[2] > 1.9 * network("unet", 2).chip.l2.size_bytes


def test_joins_are_buffers_with_what_is_written_into_them():
    one = network("unet", 1)
    two = network("unet", 2)
    kernels = [[t.op for t in x.tasks if t.lowered is not None] for x in (one, two)]
    assert [ops.count("concat") for ops in kernels] == [0, 0]
    lives = {b.id: b for b in buffers_of(one)}
    joins = [lives[f"up{level}.concat"] for level in range(4)]
    for outer, inner in pairwise(joins):  # they nest
        assert outer.lower < inner.lower and inner.upper < outer.upper
    assert not in_place_pairs(one) and not in_place_pairs(two)


def test_sharing_does_what_fusion_does_and_can_raise_a_plan():
    resnet = build("resnet50")
    chip = network("unet", 1).chip
    apart, fused = (
        compile_stages(resnet, chip, fusion=fusion).compiled for fusion in (False, True)
    )
    assert len(in_place_pairs(apart)) > 60
    assert not in_place_pairs(fused)
    peaks = {
        (name, flag): plan_network(compiled, "best-fit", in_place=flag).lower_bound_bytes
        for name, compiled in (("apart", apart), ("fused", fused))
        for flag in (False, True)
    }
    assert peaks["apart", True] == peaks["fused", False] == peaks["fused", True]
    assert 0.74 < peaks["apart", True] / peaks["apart", False] < 0.78
    two = compile_stages(build("unet", batch=2), chip, fusion=False).compiled
    higher = [
        name
        for name in memory.HEURISTICS
        if plan_network(two, name, in_place=True).height_bytes
        > plan_network(two, name, in_place=False).height_bytes
    ]
    assert higher == ["greedy-by-size", "greedy-by-start", "greedy-by-life", "best-fit"]


def test_published_instances_fit_only_by_search():
    for letter in "AB":
        buffers = read_csv(data_path(f"minimalloc/{letter}.1048576.csv"))
        assert min(memory.plan(buffers, method=name).gap for name in memory.HEURISTICS) > 0.25
        assert exact_plan(buffers, 120).height_bytes == MiB


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


def test_a_plan_for_lives_too_short_is_caught_unless_its_lives_are_believed():
    early = [replace(b, upper=max(b.lower + 1, b.upper - 1)) for b in TOY]
    wrong = memory.plan(early)
    assert wrong.height_bytes < memory.peak_live_bytes(TOY)
    for check in (lambda: memory.verify(wrong, TOY), lambda: memory.simulate_writes(TOY, wrong)):
        with pytest.raises(GraphError, match=r"overlap|overwritten|outside"):
            check()
    memory.verify(wrong, early)
    memory.simulate_writes(early, wrong)


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
