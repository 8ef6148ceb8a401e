"""The bound of a network is below every time that is reached, and its ledger adds up."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ascend_lab.aoe import Settings, engine
from ascend_lab.aoe.saved import Report
from ascend_lab.aoe.subgraph import (
    Segments,
    SlicePlan,
    all_chains,
    compiled,
    plan_time,
    prepared,
    sliced,
)
from ascend_lab.cli import ascend_lab as main
from ascend_lab.compiler import (
    GraphBuilder,
    bound_of,
    compile_stages,
    evaluate,
    simulate_graph,
    zoo,
)
from ascend_lab.compiler.compile import TERMS, ledger
from ascend_lab.compiler.needs import Needs
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, gemm_launch
from tests.graph_strategies import smooth_graphs, whole_graphs

CHIP = load_chip("Ascend310")
CACHE = load_chip("Ascend310P3")
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_zoo.json").read_text("utf-8"))
QUICK = (
    "mobilenet_v2 1 Ascend310P3",
    "resnet18 16 Ascend310",
    "shufflenet_v2 1 Ascend910A",
    "squeezenet 1 Ascend910B2",
)
"""What every run checks; `pytest -m full` takes all rows of the golden times."""


def check(times, bound):
    """The bound is below the time, and the terms, none below nothing, add up to it."""
    assert bound.time_s <= times.time_s
    found = ledger(times, bound)
    assert list(found) == list(TERMS)
    assert found["bound"] == pytest.approx(bound.time_s, abs=1e-15)
    assert min(found.values()) >= 0.0
    assert sum(found.values()) == pytest.approx(times.time_s, abs=1e-12)
    return found


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r in QUICK else pytest.mark.full) for r in GOLDEN]
)
def test_the_zoo_is_above_its_bound(row):
    name, batch, chip = row.split()
    stages = compile_stages(zoo.build(name, batch=int(batch)), load_chip(chip))
    bound = bound_of(stages.rewritten, stages.compiled.chip)
    check(stages.timeline(), bound)
    after = bound_of(stages.compiled.graph, stages.compiled.chip)
    assert after.time_s >= 0.7 * bound.time_s  # of merged branches a part
    products = [sum(n.has("convolution", "product") for n in g.nodes)
                for g in (stages.rewritten, stages.compiled.graph)]  # fmt: skip
    if products[1] <= products[0]:  # no channels are moved by the cube
        assert after.time_s <= 1.02 * bound.time_s


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(graph=whole_graphs() | smooth_graphs())
def test_random_graphs_are_above_their_bound(chip, graph):
    chip = replace(
        load_chip(chip), launch_overhead_s=0.0, queued_launch_s=0.0
    )  # nothing hides what is too high
    for fusion in (True, False):
        stages = compile_stages(graph, chip, fusion=fusion)
        bound = bound_of(stages.rewritten, chip)
        tasks = stages.compiled.tasks
        check(stages.timeline(), bound)
        one = replace(stages.compiled, scopes=((0, len(tasks)),), prefetch=True)
        check(simulate_graph(one), bound)
    plain = compile_stages(graph, chip, passes=())
    check(plain.timeline(), bound_of(plain.rewritten, chip))


def net_of(write, *shape):
    """A graph of one input: `write(net, x, weights)` returns its output."""
    net = GraphBuilder("small", "fp16")
    rng = np.random.default_rng(0)

    def weights(*size):
        return net.constant(rng.standard_normal(size).astype(np.float16))

    found = write(net, net.input("x", shape), weights)
    net.output(*(found if isinstance(found, tuple) else (found,)))
    return net.build()


def cycles(graph, chip=CHIP):
    """Every part of the bound in cycles."""
    bound = bound_of(graph, chip)
    return {name: getattr(bound, name) * chip.clock_hz for name in bound.__slots__}


@pytest.mark.parametrize(
    ("shape", "write", "least"),
    [
        ((2048, 2048), lambda net, x, w: net.matmul(x, w(2048, 2048)), 0.7),
        ((64, 64, 112, 112), lambda net, x, w: net.relu(x), 0.9),
        ((1024, 1024), lambda net, x, w: net.exp(x), 0.85),
        ((16, 4096), lambda net, x, w: net.matmul(x, w(4096, 4096)), 0.7),
    ],
)
@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
def test_the_bound_is_close_where_little_is_wasted(chip, shape, write, least):
    stages = compile_stages(net_of(write, *shape), chip)
    times = stages.timeline()
    bound = bound_of(stages.rewritten, stages.compiled.chip)
    found = check(times, bound)
    assert bound.time_s >= least * (times.time_s - found["launches"])


@pytest.mark.parametrize(
    ("chip", "m", "k", "n", "closeness"),
    [("Ascend310", 512, 1024, 512, 0.5), ("Ascend910A", 64, 128, 64, 0.05)],
)
def test_no_tiling_of_a_product_goes_below(chip, m, k, n, closeness):
    chip = load_chip(chip)
    shape = GemmShape(m, k, n)
    found = []
    grids = [g for g in product((1, 2, 4, 8), repeat=2) if g[0] * g[1] <= chip.core_count]
    tiles = product((16, 64, 128, 256), (16, 64), (16, 64, 128, 256), (1, 2, 4), grids)
    for base_m, base_k, base_n, step, (rows, columns) in tiles:
        schedule = GemmSchedule(base_m, base_k, base_n, step, rows, columns)
        with suppress(AscendLabError):  # does not fit
            found.append(simulate(gemm_launch(shape, chip, schedule), chip).cycles)
    graph = net_of(lambda net, x, w: net.matmul(x, w(k, n)), m, k)
    least = bound_of(graph, chip).work_s * chip.clock_hz
    assert len(found) > 20 and closeness * min(found) < least <= min(found)


def test_products_by_hand():
    stem = net_of(lambda net, x, w: net.conv2d(x, w(64, 3, 7, 7), stride=2), 1, 3, 21, 21)
    assert cycles(stem)["cube"] == pytest.approx(8 * 8 * 64 * 10 / 256 / 2)  # 147 products deep
    assert cycles(stem)["results"] == pytest.approx(8 * 8 * 64 * 2 / 256 / 2)  # L0C to UB
    assert cycles(stem)["vector"] == cycles(stem)["results"]
    deep = net_of(lambda net, x, w: net.matmul(x, w(40, 24)), 5, 40)
    assert cycles(deep)["cube"] == pytest.approx(5 * 24 * 3 / 256 / 2)
    edge = net_of(lambda net, x, w: net.conv2d(x, w(16, 16, 3, 3), pad=1), 1, 16, 2, 2)
    assert cycles(edge)["cube"] == pytest.approx(4 * 16 * 4 / 256 / 2)  # 4 of 9 taps hit the image
    split = load_chip("Ascend910B2")
    wide = cycles(net_of(lambda net, x, w: net.matmul(x, w(64, 64)), 64, 64), split)
    assert wide["results"] == pytest.approx(64 * 64 * 2 / 74.3 / 24) and wide["vector"] == 0.0


def test_what_the_cube_may_do_counts_for_no_vector_unit():
    def mixed(net, x, w):
        y = net.avg_pool2d(net.depthwise_conv2d(x, w(16, 1, 3, 3), pad=1), kernel=2, stride=2)
        return net.add(net.relu(y), y)

    each = {n: c.slope_cycles + c.head_cycles / 255 for n, c in CHIP.vector_costs.items()}
    repeat = min(each.values())
    found = cycles(net_of(mixed, 1, 16, 8, 8))
    assert found["cube"] == found["results"] == 0.0  # made on V, or brought by it, with a ReLU
    assert found["vector"] == pytest.approx(16 * 8 * 8 / 128 / 2)
    curve = cycles(net_of(lambda net, x, w: net.silu(net.relu(x)), 128, 64))
    once = repeat + each["vexp"] + each["vrec"] + each["vmul"]  # 1 + e^-x
    assert curve["vector"] == pytest.approx(64 / 2 * once)
    repeated = net_of(lambda net, x, w: net.exp(net.expand(x, shape=(128, 64))), 1, 64)
    once = 64 / 128 / 2 * each["vexp"]  # then copied
    assert cycles(repeated)["vector"] == pytest.approx(once)
    largest = cycles(net_of(lambda net, x, w: net.max_pool2d(x, kernel=2, stride=2), 1, 16, 32, 32))
    assert largest["vector"] == pytest.approx(16 * 16 * 16 / 128 / 2 * repeat)
    lone = net_of(lambda net, x, w: net.max_pool2d(x, kernel=1), 1, 16, 32, 32)
    assert cycles(lone)["vector"] == 0.0


# -- what is needed --------------------------------------------------------------------------------
def walk(rng):
    """A random graph of one small input, whose every part that is read leaves a trace."""
    net = GraphBuilder("walk", "fp32")

    def weights(*size):
        return net.constant(rng.standard_normal(size).astype(np.float32))

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    def image(x):
        images, c, h, w = x.shape
        side = pick(1, 2, 3)
        step = pick(1, 2, 3)
        pad = pick(0, 1)
        far = pick(1, 2) if min(h, w) > 2 * side - 1 else 1
        if min(h, w) < side or side <= pad:
            return net.softmax(x, axis=-1)
        how = {"stride": step, "pad": pad}
        return pick(
            lambda: net.conv2d(x, weights(3, c, side, side), dilation=far, **how),
            lambda: net.depthwise_conv2d(x, weights(c, 1, side, side), **how),
            lambda: net.conv_transpose2d(x, weights(c, 2, side, side), **how),
            lambda: net.max_pool2d(x, kernel=side, **how),
            lambda: net.reshape(x, shape=(images * c * h, w)),
        )()

    def rows(x):
        m, n = x.shape
        factor = 2 if m % 2 == 0 else 1
        low = int(rng.integers(m))
        return pick(
            lambda: net.matmul(x, weights(n, 4)),
            lambda: net.matmul(x, weights(5, m), trans_a=True, trans_b=True),
            lambda: net.softmax(x, axis=pick(0, 1)),
            lambda: net.transpose(x),
            lambda: net.slice(x, begin=(low, 0), end=(m, n), step=(pick(1, 2), 1)),
            lambda: net.split(x, sizes=(1, n - 1), axis=1)[pick(0, 1)] if n > 1 else x,
            lambda: net.concat(x, weights(m, 2), axis=1),
            lambda: net.reshape(net.transpose(net.reshape(x, shape=(factor, m // factor, n)),
                                              perm=(1, 0, 2)), shape=(m, n)),
            lambda: net.mul(x, weights(m, 1)),
        )()  # fmt: skip

    x = net.input("x", pick((1, 2, 5, 4), (2, 2, 3, 3), (8, 6)))
    for _ in range(int(rng.integers(1, 6))):
        x = image(x) if len(x.shape) == 4 else rows(x)
    net.output(x)
    return net.build()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_said_to_be_needed_changes_the_result(seed):
    rng = np.random.default_rng(seed)
    partly = 0
    wholly = 0
    for _ in range(16):
        graph = walk(rng)
        masks = Needs(graph).masks.get("x")
        if masks is None:
            continue
        shape = graph.types["x"].shape
        x = rng.standard_normal(shape).astype(np.float32)
        sides = [np.ones(n, bool) for n in shape]
        for i, mask in enumerate(masks):
            sides[i] = sides[i] if mask is None else mask
        base = evaluate(graph, {"x": x})
        for index in product(*(np.flatnonzero(side) for side in sides)):
            found = []
            for change in (20.0, -20.0):
                other = x.copy()
                other[index] += change
                found.append(evaluate(graph, {"x": other}))
            assert any(not np.array_equal(f[n], base[n]) for f in found for n in graph.outputs)
        partly += not all(side.all() for side in sides)
        wholly += all(side.all() for side in sides)
    assert partly and wholly


def bytes_of(graph, chip=CACHE):
    """Bytes of the bound."""
    return bound_of(graph, chip).memory * chip.device_memory.rate_bytes_per_s


def test_bytes_by_hand():
    def conv(**how):
        return net_of(lambda net, x, w: net.conv2d(x, w(16, 64, 1, 1), **how), 4, 64, 8, 8)

    image = 4 * 64 * 8 * 8 * 2
    weight = 16 * 64 * 2
    assert bytes_of(conv()) == pytest.approx(image + weight)
    assert bytes_of(conv(stride=2)) == pytest.approx(weight)  # a quarter of the image is read
    hole = net_of(lambda net, x, w: net.conv2d(x, w(8, 16, 3, 3), pad=1), 1, 16, 1, 1)
    assert bytes_of(hole) == pytest.approx(16 * 2)  # one tap of nine
    part = net_of(lambda net, x, w: net.split(net.relu(x), sizes=(2, 6), axis=0)[0], 8, 16)
    assert bytes_of(part) == 0.0
    small = replace(CACHE, l2=replace(CACHE.l2, size_bytes=4096))
    graph = net_of(lambda net, x, w: net.relu(x), 64, 64)
    assert bytes_of(graph, small) == pytest.approx(8192 + 8192 - 4096)  # L2 keeps what it can
    assert bytes_of(graph) == pytest.approx(8192)
    assert bytes_of(graph, CHIP) == pytest.approx(2 * 8192)  # a buffer holds no results


def test_on_split_cores_small_groups_leave_the_cube_or_stay_on_the_vector_unit():
    split = load_chip("Ascend910B2")
    each = {n: c.slope_cycles + c.head_cycles / 255 for n, c in split.vector_costs.items()}
    lane = min(each.values()) / 128 / 48
    path = 2 / 74.3 / 24

    def of(side, size, limit):
        def net(net, x, w):
            y = net.depthwise_conv2d(x, w(16, 1, side, side), pad=side // 2)
            return net.clip(y, low=0.0, high=limit)

        found = cycles(net_of(net, 1, 16, size, size), split)
        assert found["cube"] == 0.0
        return found["vector"], found["results"]

    one = 16 * 8 * 8
    both = one * lane, one * path
    share = both[1] / sum(both)  # of one tap: as much time here as there
    assert of(1, 8, np.inf) == pytest.approx((share * both[0],) * 2)  # a path does the ReLU
    here, there = of(1, 8, 6.0)
    assert here == pytest.approx(there) and here > share * both[0]  # the limit stays here
    corners = (4, 4)
    sides = (6, 24)
    inside = (9, 36)
    first = 16 * lane * (corners[0] * corners[1] + sides[0] * sides[1])
    assert first < 16 * path * inside[1]  # so those of 9 taps are divided
    each = 16 * inside[1] * lane * inside[0], 16 * inside[1] * path
    share = (each[1] - first) / sum(each)
    assert of(3, 8, np.inf) == pytest.approx((first + share * each[0],) * 2)


def test_results_that_a_function_reads_leave_the_cubes_altogether():
    """By the slower path to memory; what the cubes read again may stay beside them."""

    def of(function, chip="Ascend910B2", columns=64):
        def net(net, x, w):
            y = net.matmul(x, w(64, 64))
            y = net.matmul(function(net, y), w(64, columns))
            return net.add(y, y)  # no function

        return cycles(net_of(net, 64, 64), load_chip(chip))["results"]

    near = 64 * 64 * 2 / 74.3 / 24
    far = 64 * 64 * 2 / 41.8 / 24
    assert of(lambda net, y: net.relu(y)) == pytest.approx(2 * near)
    assert of(lambda net, y: net.exp(y)) == pytest.approx(near + far)
    assert of(lambda net, y: net.clip(y, low=0.0, high=6.0)) == pytest.approx(near + far)
    row = of(lambda net, y: net.reduce_max(y, axis=0, keepdims=True), columns=16)
    assert row == pytest.approx(near + 16 / 74.3 / 12 + 64 * 2 / 24 * (1 / 41.8 - 1 / 74.3))
    one = load_chip("Ascend310").path("L0C", "UB").rate_bytes_per_cycle * 2
    assert of(lambda net, y: net.exp(y), "Ascend310") == pytest.approx(2 * 64 * 64 * 2 / one)


def test_before_a_maximum_functions_are_done_to_the_largest_alone():
    def vector(write, chip="Ascend310"):
        return bound_of(net_of(write, 2, 16, 32, 32), load_chip(chip)).vector

    def pooled(net, x):
        return net.max_pool2d(x, kernel=2, stride=2)

    behind = vector(lambda net, x, w: net.relu6(pooled(net, net.conv2d(x, w(16, 16, 1, 1)))))
    before = vector(lambda net, x, w: pooled(net, net.relu6(net.conv2d(x, w(16, 16, 1, 1)))))
    unpooled = vector(lambda net, x, w: net.relu6(net.conv2d(x, w(16, 16, 1, 1))))
    assert before == behind < unpooled


def test_sums_that_are_only_added_up_leave_once_and_may_share_steps():
    def two(net, x, w):
        return net.relu(net.add(net.matmul(x, w(24, 32)), net.matmul(net.exp(x), w(24, 32))))

    found = cycles(net_of(two, 16, 24))
    assert found["results"] == pytest.approx(16 * 32 * 2 / 256 / 2)
    assert found["cube"] == pytest.approx(2 * 16 * 32 * 24 / 4096 / 2)  # 48 deep: 3 steps, not 4


WAIT = {  # by hand: a start-up and a cycle a copy, two flags from pipe to pipe, L2's 50 cycles
    "in": 11 + 50 + 2,  # GM->L0A, or GM->UB
    "product": 6 + 1,
    "function": 2 + 11 + 13 + 2,  # two flags, out of L0C, vexp
    "on": 2 + 11 + 2 + 11 + 2,  # UB->L1->L0A
    "out": 2 + 11 + 50,  # UB->GM
}


def test_a_chain_waits_on_its_way_from_buffer_to_buffer():
    def chain(net, x, w):
        for _ in range(5):
            x = net.exp(net.matmul(x, w(16, 16)))
        return x

    def beside(net, x, w):
        return tuple(net.exp(net.matmul(x, w(16, 16))) for _ in range(5))

    long, wide = (cycles(net_of(write, 16, 16)) for write in (chain, beside))
    assert wide["chain"] == pytest.approx(sum(WAIT.values()) - WAIT["on"])
    one = WAIT["on"] + WAIT["product"] + WAIT["function"]
    assert long["chain"] == pytest.approx(wide["chain"] + 4 * one)
    assert long["cube"] == pytest.approx(wide["cube"])
    apart = load_chip("Ascend910B2")
    split = cycles(net_of(chain, 16, 16), apart)["chain"]
    over = 11 + 50 + 2  # from memory; and to it, behind two flags
    told = apart.cross_flag_cycles  # by a cube core or a vector core, of another kind
    once = over + 2 + 11 + 7 + 2 + 2 * over + 13  # L1->L0A, a product, to memory and back, vexp
    assert split == pytest.approx(5 * (once + told + 2 + 11 + 50) + 4 * told)


# -- what comes one after another ------------------------------------------------------------------
def squeezed(images):
    """A function, a product that needs all of an image, and as much work behind it."""

    def write(net, x, w):
        x = net.exp(x)
        y = net.global_avg_pool(x)
        return net.exp(net.mul(x, net.conv2d(y, w(16, 16, 1, 1))))

    return net_of(write, images, 16, 64, 64)


def test_work_before_and_behind_what_needs_all_of_an_image_adds_up():
    found = cycles(squeezed(1))
    many = cycles(squeezed(4))
    half = 16 * 64 * 64 / 128 / 2 * (2 + 13 / 255)  # of both functions, on both cores
    barrier = CHIP.barrier_s * CHIP.clock_hz / 2  # of which weights may hide a half
    other = WAIT["out"] + barrier + WAIT["in"] + WAIT["product"]  # for what another core did
    waits = WAIT["in"] + other / 2 + 2 + 11 + WAIT["out"]
    assert found["chain"] == pytest.approx(2 * half + waits)
    assert many["chain"] < many["vector"]  # images do not wait for each other


def test_weights_behind_the_last_number_of_a_tensor_are_read_late():
    def net(depth):
        def write(net, x, w):
            layers = (64, 3), (1024, 1), (1024, 3), (1024, 1)
            for columns, side in layers[:depth]:
                weight = w(columns, x.shape[1], side, side)
                x = net.relu(net.conv2d(x, weight, pad=side // 2))
            return x

        return net_of(write, 2, 64, 8, 8)

    graph = net(4)
    convs = [node for node in graph.nodes if node.op == "conv2d"]
    late = Needs(graph).later({node.inputs[1] for node in convs})
    last = 1024 * 1024 * 2
    corner = 9 * last * (2 / 3) ** 2  # what stands in a corner meets four of nine taps
    assert late[convs[0].output] == pytest.approx(corner + last)  # of the product behind, a row
    assert late[convs[2].output] == late[convs[3].output] == 0.0
    small = replace(CHIP, buffers=dict.fromkeys(CHIP.buffers, 1024))
    found = cycles(graph, small)
    before = cycles(net(1), small)
    rate = CHIP.path("GM", "L1").rate_bytes_per_cycle  # a core's own; memory's is lower
    least = (late[convs[1].inputs[0]] - 1024 * len(CHIP.buffers)) / rate
    assert found["chain"] >= before["cube"] + least > 0.35 * found["memory"]
    held = replace(small, l2=replace(CHIP.l2, kind="cache"))
    assert cycles(graph, held)["chain"] < found["chain"]  # most weights at once


def test_cores_of_two_kinds_start_later_or_in_turn():
    def net(*names):
        def write(net, x, w):
            for name in names:
                x = net.matmul(x, w(64, 64)) if name == "matmul" else getattr(net, name)(x)
            return x

        return net_of(write, 64, 64)

    chip = load_chip("Ascend910B2")
    queued = chip.queued_launch_s
    mix = chip.mix_start_s
    in_turn = ("matmul", "sigmoid") * 2
    for names, more in (
        (("matmul", "matmul"), 0.0),
        (("matmul", "relu", "matmul"), 0.0),  # on the way out of the cube
        (("exp", "matmul", "relu"), queued),
        (("matmul", "tanh", "relu", "matmul"), 2 * queued),
        ((*in_turn, "matmul"), min(4 * queued, mix)),
    ):
        found = bound_of(net(*names), chip).launch - chip.launch_overhead_s
        assert found == pytest.approx(more, abs=3 / chip.clock_hz), names
    combined = load_chip("Ascend910A")
    assert bound_of(net(*in_turn), combined).launch == combined.launch_overhead_s


def test_a_bound_above_the_time_is_refused():
    small = net_of(lambda net, x, w: net.relu(x), 16, 16)
    large = net_of(lambda net, x, w: net.matmul(x, w(512, 512)), 512, 512)
    times = compile_stages(small, CHIP).timeline()
    with pytest.raises(InputError, match=r"a bound of these times; got .* us, the time is"):
        ledger(times, bound_of(large, CHIP))


@pytest.mark.parametrize("tensors", [1, 3])
def test_no_slicing_of_a_chain_goes_below(tensors):
    l2 = replace(CHIP.l2, size_bytes=2**18)
    chip = replace(CHIP, l2=l2, launch_overhead_s=1e-7, queued_launch_s=1e-7)

    def chain(net, x, w):
        for _ in range(3):
            x = net.clip(net.conv2d(x, w(16, 16, tensors, tensors), pad=tensors // 2), low=-3.0,
                         high=3.0)  # fmt: skip
        return x

    graph = prepared(net_of(chain, 4, 16, 40, 40), chip)
    segments = Segments(graph, chip)
    bound = bound_of(graph, chip)
    ways = [("batch", (1,) * 4), ("batch", (2, 2)), ("height", (20, 20))]
    plans = [
        SlicePlan(tuple(segments.region(*choice) for choice in chain if choice[2][0]))
        for chain in all_chains(segments.count, lambda i, j: ways)
    ]
    times = [plan_time(graph, plan, chip) for plan in plans[::9]]
    assert len(times) > 5 and len(set(times)) > 3
    assert 0.02 * min(times) < bound.time_s <= min(times)


def test_tuning_reports_bound_and_ledgers(tmp_path):
    l2 = replace(CHIP.l2, size_bytes=2**17)
    graph = net_of(lambda net, x, w: net.relu(net.conv2d(x, w(32, 16, 3, 3), pad=1)), 4, 16, 24, 24)
    found = engine.tune(graph, replace(CHIP, l2=l2), "1,2", settings=Settings(budget=6))
    report = Report("net", found).as_dict()
    own = report["opat"]["ascend_lab"]
    assert {**own, **report["sgat"]["ascend_lab"]}.items() >= {"bound_s": found.bound_s}.items()
    assert own["bound_s"] == found.bound_s <= found.result_s
    assert own["gap"] == pytest.approx(found.result_s / found.bound_s - 1)
    for key, time_s in (("before", found.baseline_s), ("after", found.result_s)):
        assert list(own[f"ledger_{key}"]) == list(TERMS)
        assert sum(own[f"ledger_{key}"].values()) == pytest.approx(time_s, abs=1e-12)
    assert (
        found.bound_s
        == bound_of(compile_stages(graph, CHIP).rewritten, replace(CHIP, l2=l2)).time_s
    )


def test_simulate_prints_bound_and_ledger(capsys):
    words = ["simulate", "zoo:squeezenet", "--batch", "1", "--chip", "Ascend310"]
    assert main([*words, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sum(data["ledger"].values()) == pytest.approx(data["time_s"], abs=1e-12)
    assert data["ledger"]["bound"] == pytest.approx(data["bound_s"])
    assert data["memory_bytes"] == data["totals"]["memory_bytes"]
    assert data["kernels"] == data["totals"]["kernels"] == data["launches"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("where the time goes: us  share") + 1 : -2]
    assert lines[-1].startswith("total ")
    printed = {line[2:12].strip(): float(line[12:23]) for line in table}
    assert sum(printed.values()) == pytest.approx(data["time_s"] * 1e6, abs=0.05)
    assert printed["bound"] == pytest.approx(data["bound_s"] * 1e6, abs=0.005)


# -- all that can be expressed ---------------------------------------------------------------------
def tiny(rng):
    """A random graph of one or two blocks, small enough to be taken in every way."""

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    def squeeze(net, x, w):
        y = net.relu(net.conv2d(net.global_avg_pool(x), w(16, x.shape[1], 1, 1)))
        return net.mul(x, net.sigmoid(net.conv2d(y, w(x.shape[1], 16, 1, 1))))

    def image(net, x, w):
        c = x.shape[1]
        return pick(
            lambda: net.silu(x),
            lambda: net.clip(x, low=0.0, high=6.0),
            lambda: net.conv2d(x, w(pick(16, 32), c, 1, 1)),
            lambda: net.conv2d(x, w(16, c, 3, 3), pad=1),
            lambda: net.depthwise_conv2d(x, w(c, 1, 3, 3), pad=1),
            lambda: net.max_pool2d(x, kernel=2, stride=2),
            lambda: net.add(x, net.conv2d(net.relu(x), w(c, c, 1, 1))),
            lambda: squeeze(net, x, w),
        )()

    def rows(net, x, w):
        k = x.shape[1]
        return pick(
            lambda: net.gelu(x),
            lambda: net.matmul(x, w(k, pick(16, 64, 256))),
            lambda: net.softmax(x, axis=-1),
            lambda: net.layer_norm(x, w(k), w(k)),
            lambda: net.add(x, net.matmul(net.exp(x), w(k, k))),
        )()

    def write(net, x, w):
        for _ in range(rng.integers(1, 3)):
            x = (image if len(x.shape) == 4 else rows)(net, x, w)
        return x

    n = pick(1, 2, 4)
    return net_of(
        write, *pick((n, 16, 8, 8), (n, 32, 16, 16), (n, 16, 24, 24), (16 * n, 64), (n, 256))
    )


def times_of(graph, chip):
    """Seconds in every way that the compiler has words for: kernels, slices, launches, prefetch."""

    def launched(built):
        for one, prefetch in ((False, False), (True, False), (True, True)):
            yield simulate_graph(
                SlicePlan(one_launch=one, prefetch=prefetch).with_launches(built)
            ).time_s

    for fusion in (True, False):
        yield from launched(compile_stages(graph, chip, fusion=fusion).compiled)
    whole = prepared(graph, chip)
    segments = Segments(whole, chip)
    (n, *sizes) = whole.types[whole.outputs[0]].shape
    halves = ("batch", n) if segments.batch > 1 else ("height", sizes[1]) if sizes[2:] else ("", 1)
    way = halves[0], (halves[1] // 2, halves[1] - halves[1] // 2)
    ways = [way] if min(way[1]) and segments.count <= MOST else []
    for chain, inside in product(all_chains(segments.count, lambda i, j: ways), (False, True)):
        regions = tuple(segments.region(*choice) for choice in chain if choice[2][0])
        plan = SlicePlan(regions, one_launch=inside, inside=inside)
        if regions or inside:
            with suppress(AscendLabError):  # a slice that nothing can cut
                yield from launched(compiled(sliced(whole, plan), chip, plan.road(chip)))


MOST = 3
"""Units of a graph in slices: twice 18 ways to take them."""


@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        *(pytest.param(range(i, i + 20), marks=pytest.mark.full) for i in range(4, 1004, 20)),
    ],
)
def test_no_way_to_take_a_tiny_graph_goes_below(seeds):
    for seed, apart_s in product(seeds, (0.0, 1e-3)):  # launches hide no work, or are nearly all
        chip = load_chip(("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")[seed % 4])
        if apart_s and chip.combined:
            continue  # one launch does
        chip = replace(
            chip, launch_overhead_s=apart_s, queued_launch_s=apart_s, mix_start_s=2.5 * apart_s,
            ai_cpu_overhead_s=chip.ai_cpu_overhead_s + apart_s,
        )  # fmt: skip
        graph = tiny(np.random.default_rng(seed))  # 1004 in all
        least = min(times_of(graph, chip))
        bound = bound_of(compile_stages(graph, chip).rewritten, chip)
        assert bound.time_s <= least, seed


@pytest.mark.parametrize("seed", range(6))
def test_of_a_chain_of_functions_the_bound_is_the_optimum(seed):
    """Memory, which all cores and slices share, is the limit: fused, it is reached to the cycle."""
    rng = np.random.default_rng(seed)
    names = rng.choice(["relu", "abs", "exp", "square"], rng.integers(1, 4))

    def chain(net, x, w):
        for name in names:
            x = getattr(net, name)(x)
        return x

    graph = net_of(chain, 1, 16, 16 * int(rng.integers(12, 20)), 128)
    bound = bound_of(compile_stages(graph, CHIP).rewritten, CHIP)
    times = list(times_of(graph, CHIP))
    assert min(times) == pytest.approx(bound.time_s, abs=1 / CHIP.clock_hz)
    assert len(set(times)) > 1 or len(names) == 1
