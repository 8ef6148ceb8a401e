"""A compiled network on the clock: sums, L2 between kernels, traces, lifetimes, linear growth."""

import json
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from graph_strategies import whole_graphs
from hypothesis import given

from ascend_lab.aoe.subgraph import SlicePlan, compiled, prepared
from ascend_lab.compiler import (
    GraphBuilder,
    bound_of,
    compile_stages,
    run_compiled,
    simulate_graph,
    tasks,
)
from ascend_lab.compiler.compile import account
from ascend_lab.compiler.memory import Buffer
from ascend_lab.compiler.network import network_events, write_network_trace
from ascend_lab.compiler.placement import (
    buffers_of,
    constant_bytes,
    owners,
    tensor_bytes,
    workspaces,
)
from ascend_lab.compiler.text_form import from_text
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip

TOY, A910, B910 = (load_chip(name) for name in ("Toy", "Ascend910A", "Ascend910B2"))
EACH = (pytest.param(TOY, marks=pytest.mark.full), A910, B910)


def stages_of(graph, chip=TOY, **how):
    return compile_stages(graph, chip, passes=(), **how)


def timed(graph, chip=TOY, **how):
    return simulate_graph(stages_of(graph, chip, **how).compiled)


def small_net(channels=16, side=8):
    """A residual block and a classifier."""
    net = GraphBuilder("block", "fp16")
    x = net.input("x", (1, channels, side, side))
    y = net.relu(net.conv2d(x, net.weight((channels, channels, 3, 3)), pad=1))
    y = net.add(net.conv2d(y, net.weight((channels, channels, 3, 3)), pad=1), x)
    y = net.reshape(net.global_avg_pool(y), shape=(1, channels))
    net.output(net.matmul(y, net.weight((channels, 10))))
    return net.build()


# -- totals ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", EACH, ids=lambda chip: chip.name)
@pytest.mark.parametrize("fusion", [True, False])
def test_a_network_is_the_sum_of_its_kernels(chip, fusion):
    stages = stages_of(small_net(), chip, fusion=fusion)
    times = simulate_graph(stages.compiled)
    real = [task for task in stages.compiled.tasks if task.lowered is not None]
    assert [op.name for op in times.operators] == [task.name for task in real]
    assert times.time_s == sum(op.time_s for op in times.operators)
    assert times.macs == sum(op.timeline.macs for op in times.operators)
    assert sum(times.by_type().values()) == pytest.approx(times.time_s)
    assert list(times.by_type().values()) == sorted(times.by_type().values(), reverse=True)
    launches_s = sum(op.timeline.launch_cycles for op in times.operators) / chip.clock_hz
    assert 0 < launches_s < times.time_s
    assert times.memory_bytes == times.written_back_bytes + sum(
        op.timeline.memory_bytes for op in times.operators
    )


def test_vector_cores_that_wait_for_their_cube_hide_no_less_of_a_barrier():
    """They begin when it has loaded and multiplied: its weights may come before the barrier."""
    net = GraphBuilder("limited", "fp16")
    x = net.input("x", (1, 64, 14, 14))
    for _ in range(2):
        x = net.clip(net.conv2d(x, net.weight((64, 64, 3, 3)), pad=1), low=-1.0, high=6.0)
    net.output(x)
    plan = SlicePlan(one_launch=True, inside=True)
    found = plan.with_launches(compiled(prepared(net.build(), B910), B910, plan.road(B910)))
    one = simulate_graph(found)
    second = [op.timeline for op in one.operators if op.type == "conv2d+clip"][1]
    assert second.start == "both"
    path = B910.path("GM", "L1")
    assert second.early_cycles > path.startup_cycles
    assert second.launch_cycles < round(3 * B910.barrier_s * B910.clock_hz)


@pytest.mark.parametrize("chip", [A910, B910], ids=lambda chip: chip.name)
def test_only_the_first_kernel_is_started_cold_and_a_super_kernel_once(chip):
    compiled = stages_of(small_net(), chip).compiled
    apart = simulate_graph(compiled)
    count = len(compiled.tasks)
    clock = chip.clock_hz
    assert [op.timeline.start for op in apart.operators] == ["cold"] + ["queued"] * (
        apart.kernels - 1
    )
    part = simulate_graph(compiled, first="queued")
    saved = chip.launch_overhead_s - chip.queued_launch_s
    assert apart.time_s - part.time_s == pytest.approx(saved, abs=1 / clock)
    assert apart.launches == apart.kernels
    one = simulate_graph(replace(compiled, scopes=((0, count),)))
    two = simulate_graph(replace(compiled, scopes=((0, count - 1), (count - 1, count))))
    assert (one.launches, two.launches) == (1, 2)
    assert one.launch_s == pytest.approx(chip.launch_overhead_s + chip.mix_start_s, abs=2 / clock)
    assert one.time_s < two.time_s < apart.time_s + chip.mix_start_s
    assert [op.timeline.cycles for op in one.operators] == [
        op.timeline.cycles for op in apart.operators
    ]
    for op in one.operators[1:]:
        barriers = {"inside": 1, "across": 2, "both": 3}[op.timeline.start]
        t = op.timeline
        whole = round(barriers * chip.barrier_s * clock)
        assert t.launch_cycles == max(0, whole - t.early_cycles)
        assert (t.early_cycles > 0) == ("conv" in op.type or op.type == "matmul")  # have weights
    assert "across" in {op.timeline.start for op in one.operators} or chip.combined
    bound = bound_of(small_net(), chip)
    found = account(one, bound)
    assert found["launches"] == 1
    assert found["ledger"]["launches"] == pytest.approx(chip.mix_start_s, abs=2 / clock)
    assert found["ledger"]["barriers"] > 0.0
    assert sum(found["ledger"].values()) == pytest.approx(one.time_s, abs=1e-12)


def test_the_ai_cpu_ends_a_super_kernel():
    net = GraphBuilder("whole", "fp16")
    x = net.cast(net.exp(net.input("x", (4, 64))), dtype="int32")
    net.output(net.cast(net.div(x, x), dtype="fp16"))
    compiled = stages_of(net.build(), A910, fusion=False).compiled
    times = simulate_graph(replace(compiled, scopes=((0, len(compiled.tasks)),)))
    assert times.on_ai_cpu, [op.type for op in times.operators]
    starts = [op.timeline.start for op in times.operators if op not in times.on_ai_cpu]
    assert starts == ["cold", "inside", "queued"] and times.launches == 3


def test_json_contract():
    found = json.loads(json.dumps(timed(small_net(), A910).summary()))
    assert found.keys() == {"name", "chip", "time_s", "operators", "totals"}
    keys = {"name", "type", "time_s", "bound_by", "cube_utilisation", "bytes", "l2_hit_rate"}
    for row in found["operators"]:
        assert row.keys() >= keys
        assert row["time_s"] > 0 and 0 <= row["l2_hit_rate"] <= 1
        assert all(n > 0 for n in row["bytes"].values())
    assert found["time_s"] == pytest.approx(sum(row["time_s"] for row in found["operators"]))
    totals = found["totals"]
    assert totals["kernels"] == len(found["operators"]) and totals["energy_j"] > 0
    assert totals["launch_time_s"] < found["time_s"] and totals["macs"] > 0


@given(graph=whole_graphs())
def test_bounds_hold_in_random_networks(graph):
    for chip in (TOY, B910):
        stages = stages_of(graph, chip)
        times = simulate_graph(stages.compiled)
        for op in times.operators:
            assert 0 <= op.cube_utilisation <= 1 and op.time_s > 0
            assert 0 <= op.timeline.l2_hit_rate <= 1
            assert all(0 <= share <= 1 for share in op.timeline.busy.values())
        assert 0 <= times.l2_hit_rate <= 1
        again = simulate_graph(stages.compiled)
        assert again.summary() == times.summary()


@pytest.mark.parametrize("chip", EACH, ids=lambda chip: chip.name)
def test_memory_traffic_is_at_least_what_must_cross(chip):
    """Weights and inputs come in once at least, outputs go out."""
    graph = small_net(32, 16)
    stages = stages_of(graph, chip)
    times = simulate_graph(stages.compiled)
    weights = sum(constant_bytes(stages.compiled).values())
    ends = sum(stages.laid_out.types[n].size_bytes for n in ("x", *stages.laid_out.outputs))
    assert weights > 0
    assert times.memory_bytes >= weights + ends


def test_utilisation_by_hand():
    """One product of 1024 cubed: macs / (cores x macs a cycle x cycles, launch included)."""
    net = GraphBuilder("product", "fp16")
    net.output(net.matmul(net.input("a", (1024, 1024)), net.weight((1024, 1024))))
    op = next(op for op in timed(net.build(), A910).operators if op.type == "matmul")
    whole = A910.core_count * A910.macs_per_cycle("fp16")
    assert op.timeline.macs == 1024**3
    assert op.cube_utilisation == 1024**3 / (whole * op.timeline.total_cycles)
    assert 0.02 < op.cube_utilisation < 1


# -- L2 -------------------------------------------------------------------------------------------
def readers(rows, chip=A910, count=3):
    """Time kernels that read the same tensor one after another."""
    net = GraphBuilder("readers", "fp16")
    x = net.input("x", (rows, 1024))
    net.output(*(net.reduce_max(x, axis=1) for _ in range(count)))
    return [op.timeline for op in timed(net.build(), chip, fusion=False).operators]


def test_the_second_reader_finds_a_tensor_in_l2():
    first, *others = readers(256)
    assert first.l2_hit_rate == 0 and [t.l2_hit_rate for t in others] == [1, 1]
    assert first.memory_bytes >= 256 * 1024 * 2 > others[0].memory_bytes
    assert all(t.cycles <= first.cycles for t in others)


def test_an_activation_is_warm_for_its_reader_and_weights_are_cold():
    net = GraphBuilder("chain", "fp16")
    x = net.input("x", (256, 256))
    y = net.matmul(x, net.weight((256, 256)))
    net.output(net.matmul(net.softmax(y), net.weight((256, 256))))
    found = timed(net.build(), A910, fusion=False).operators
    ops = {op.name.partition(".")[0]: op.timeline for op in found if op.type != "trans_data"}
    assert ops["softmax"].l2_hit_rate == 1
    assert ops["matmul_1"].memory_bytes >= 256 * 256 * 2
    assert ops["matmul_1"].l2_hit_rate < 1


def test_networks_without_a_kernel():
    """Inputs, constants and views of inputs as outputs: no time, and the values they have."""
    net = GraphBuilder("nothing", "fp16")
    x = net.input("x", (4,))
    c = net.constant(np.arange(4).astype(np.float16))
    net.output(x, c)
    for _ in range(2):
        stages = stages_of(net.build())
        times = simulate_graph(stages.compiled)
        assert times.time_s == times.l2_hit_rate == len(times.operators) == 0
        assert [e["ph"] for e in network_events(times)] == ["M"] * 3
        found = run_tasks(stages.compiled, {"x": np.ones(4)})
        assert [v.sum() for v in found.values()] == [4, 6, 4][: len(found)]
        net.output(net.reshape(x, shape=(2, 2)))


def test_a_view_of_a_constant_is_a_copy():
    """It lies with the weights, as the kernels that read it have packed it."""
    net = GraphBuilder("constant", "fp16")
    c = net.constant(np.arange(4).astype(np.float16))
    net.output(net.reshape(c, shape=(2, 2)))
    compiled = stages_of(net.build()).compiled
    assert len(simulate_graph(compiled).operators) == 1
    (found,) = run_tasks(compiled, {}).values()
    assert found.tolist() == [[0, 1], [2, 3]]


def test_an_output_asked_for_twice():
    graph = from_text("graph g (x: fp16[4]) -> (y, y) {\n y: fp16[4] = neg(x) y\n}")
    assert run_compiled(graph, {"x": np.ones(4)}, TOY)["y"].tolist() == [-1] * 4


# -- growth ---------------------------------------------------------------------------------------
def test_a_thousand_nodes_need_a_handful_of_kernels(monkeypatch):
    """Equal blocks are lowered and timed once, however many there are."""
    calls = {"lower": 0, "time": 0}
    simulate = import_module("ascend_lab.machine.sim")
    lower = tasks.lower
    time_launch = simulate.time_launch

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(tasks, "lower", counted("lower", lower))
    monkeypatch.setattr(simulate, "time_launch", counted("time", time_launch))
    found = []
    for depth in (100, 500):
        tasks._lowered.cache_clear()
        tasks._cycles.cache_clear()
        simulate._time_warm.cache_clear()
        calls.update(lower=0, time=0)
        net = GraphBuilder("deep", "fp16")
        x = net.input("x", (1, 16, 6, 6))
        for _ in range(depth):
            x = net.relu(net.conv2d(x, net.constant(np.ones((16, 16, 1, 1), np.float16))))
        net.output(x)
        times = timed(net.build())
        assert len(times.operators) == depth + 2  # and two conversions
        found.append((calls["lower"], calls["time"]))
    assert found[0] == found[1] and max(found[0]) <= 12


# -- traces ---------------------------------------------------------------------------------------
def test_trace_rows_do_not_overlap(tmp_path):
    times = timed(small_net(), A910)
    write_network_trace(times, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values())[:2] == ["launch", "kernel"] and len(rows) > 4
    for tid, row in rows.items():
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        ends = [end for _, end in own[:-1]]
        assert own
        assert all(start >= end - 1e-6 for (start, _), end in zip(own[1:], ends, strict=True)), row
    end = max(e["ts"] + e["dur"] for e in spans)
    assert end == pytest.approx(times.time_s * 1e6)
    kernels = [e for e in spans if rows[e["tid"]] == "kernel"]
    assert [e["name"] for e in kernels] == [op.name for op in times.operators]
    assert network_events(times) == events


# -- lifetimes ------------------------------------------------------------------------------------
CHAIN = """graph g (x: fp16[64, 8], i: fp16[4]) -> (d, b) {
  k: fp16[8] = fill(2.0)
  a: fp16[64, 8] = exp(x) a
  b: fp16[64, 8] = mul(a, k) b
  v: fp16[8, 64] = reshape(b) {shape = (8, 64)} v
  c: fp16[8, 64] = softmax(v) c
  d: fp16[64, 8] = transpose(c) d
}
"""


def test_lifetimes_by_hand():
    stages = stages_of(from_text(CHAIN), fusion=False)
    assert [t.name for t in stages.compiled.tasks] == ["a", "b", "v", "c", "d"]
    found = {life.id: life for life in buffers_of(stages.compiled)}
    assert owners(stages.compiled) == {"v": "b"}
    assert found["x"] == Buffer("x", 0, 1, 1024)
    assert found["i"] == Buffer("i", 0, 1, 8)
    assert found["a"] == Buffer("a", 0, 2, 1024)
    assert found["b"] == Buffer("b", 1, 5, 1024)  # an output, read as v
    assert found["c"] == Buffer("c", 3, 5, 1024)
    assert found["d"] == Buffer("d", 4, 5, 1024)
    assert "k" not in found and "v" not in found
    assert constant_bytes(stages.compiled) == {"k": 16}


def test_workspaces_live_inside_their_kernel():
    """Batch norm in training folds on all cores first: sums pass through device memory."""
    net = GraphBuilder("g", "fp16")
    x = net.input("x", (2, 3, 40, 8))
    parts = [net.constant(np.ones(3, np.float32)) for _ in range(4)]
    net.output(net.batch_norm_training(x, *parts)[0])
    stages = stages_of(net.build(), B910)
    inner = {t.name: workspaces(t) for t in stages.compiled.tasks if workspaces(t)}
    assert inner
    spans = {life.id: life for life in buffers_of(stages.compiled)}
    sizes = tensor_bytes(stages.compiled)
    for place, task in enumerate(stages.compiled.tasks):
        for name in workspaces(task):
            assert (spans[name].lower, spans[name].upper) == (place, place + 1)
            assert name.startswith(f"{task.name}/") and sizes[name] == spans[name].size_bytes > 0


@given(graph=whole_graphs())
def test_every_read_falls_into_a_lifetime(graph):
    found = stages_of(graph).compiled
    spans = {life.id: life for life in buffers_of(found)}
    own = owners(found)
    for place, task in enumerate(found.tasks):
        for name in (*task.reads, *task.writes, *workspaces(task)):
            if name not in found.graph.constants and own.get(name, name) in spans:
                life = spans[own.get(name, name)]
                assert life.lower <= place < life.upper, name
            else:
                assert own.get(name, name) in found.graph.constants, name
    end = len(found.tasks) - 1
    for name in found.graph.outputs:
        if own.get(name, name) in spans and found.tasks:
            assert spans[own.get(name, name)].upper == end + 1


# -- values ---------------------------------------------------------------------------------------
def test_run_compiled_names_outputs_as_the_model_does():
    graph = small_net()
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((1, 16, 8, 8))}
    found = run_compiled(graph, inputs, TOY)
    assert found.keys() == set(graph.outputs)
    with pytest.raises(InputError, match="a dtype among fp16, bf16, int8; got fp64"):
        run_compiled(graph, inputs, TOY, dtype="fp64")
    with pytest.raises(InputError, match="missing"):
        run_compiled(graph, {}, TOY)
